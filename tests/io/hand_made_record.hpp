// SPDX-License-Identifier: Apache-2.0
// A small record with every group in it, of two requests: one forced, one free running without selection. Values are a pattern, so that a
// swapped axis or a shifted dataset shows.
#pragma once

#include <cmath>
#include <limits>
#include <numeric>

#include "models/run_record.hpp"

namespace loopgauge::harness::test {

inline Tensor<float> pattern(std::vector<std::int64_t> shape, float first) {
  Tensor<float> tensor(std::move(shape));
  for (std::size_t i = 0; i < tensor.data.size(); ++i) tensor.data[i] = first + 0.25f * static_cast<float>(i);
  return tensor;
}

inline CodecStream codec_stream(std::vector<std::int32_t> rows, int layers, int heads, int head_dim) {
  CodecStream stream;
  stream.rows = std::move(rows);
  const auto count = static_cast<std::int64_t>(stream.rows.size());
  for (int layer = 0; layer < (count == 0 ? 0 : layers); ++layer) {
    CodecLayer values;
    values.k_codes = Tensor<std::uint8_t>({heads, count, head_dim});
    values.v_codes = Tensor<std::uint8_t>({heads, count, head_dim});
    for (std::size_t i = 0; i < values.k_codes.data.size(); ++i) {
      values.k_codes.data[i] = static_cast<std::uint8_t>((i + static_cast<std::size_t>(layer)) % 16);
      values.v_codes.data[i] = static_cast<std::uint8_t>((3 * i) % 16);
    }
    values.k_min = pattern({heads, (count + 63) / 64, head_dim}, -1.0f);
    values.k_scale = pattern({heads, (count + 63) / 64, head_dim}, 0.5f);
    values.v_min = pattern({heads, count, 1}, -2.0f);
    values.v_scale = pattern({heads, count, 1}, 0.125f);
    stream.layers.push_back(std::move(values));
  }
  return stream;
}

// Two layers, two heads, head_dim 3, hidden 5, vocabulary 7.
inline RunRecord hand_made_record() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  RunRecord record;
  record.mode = "serial";
  record.executor = "reference";
  record.profile = "declared";
  record.model_sha256 = "00ff";
  record.trace = "hand-made";
  record.config_json = "{}";

  RequestRecord forced;
  forced.prompt_length = 4;
  forced.fed = 2;
  forced.tokens = {5, 6};
  forced.exit_depths = {4, 1};
  forced.encoded_frontier = {0, 0, 4};
  forced.logits = pattern({3, 7}, 0.0f);
  forced.logits.data[1] = -0.0f;
  for (int loop = 0; loop < kLoops; ++loop)
    forced.hidden[static_cast<std::size_t>(loop)] = pattern({6, 5}, 10.0f * static_cast<float>(loop));
  forced.gate = pattern({6, 4}, -3.0f);
  forced.scores = {std::vector<float>{0.5f, 0.25f, 1.0f, 0.0f}, std::vector<float>{nan, 0.25f, 1.0f, nan}};
  forced.active = {std::vector<std::int32_t>{1, 2}, std::vector<std::int32_t>{2}};
  forced.keys.resize(2);
  forced.keys[0].layers = {Tensor<std::int32_t>({2, 2}, 0), Tensor<std::int32_t>({2, 2}, 0)};
  forced.keys[0].layers[0].data = {0, 4, 1, 2};
  forced.keys[0].layers[1].data = {2, 3, 0, 1};
  forced.keys[0].mass = pattern({2, 2}, 0.25f);
  for (int plane = 0; plane < 2 * kLoops; ++plane) {
    forced.kv.push_back({pattern({2, 6, 3}, static_cast<float>(plane)), pattern({2, 6, 3}, -static_cast<float>(plane))});
  }
  CodecBlock block;
  block.positions = {0, 4};
  block.streams = {codec_stream({0, 1, 2, 3}, 2, 2, 3), codec_stream({0, 1, 2, 3}, 2, 2, 3), codec_stream({1, 2}, 2, 2, 3),
                   codec_stream({}, 2, 2, 3)};
  forced.blocks.push_back(block);

  RequestRecord free;
  free.prompt_length = 1;
  free.fed = 0;
  free.tokens = {3};
  free.exit_depths = {0};
  free.encoded_frontier = {0};
  free.logits = pattern({1, 7}, 1.0f);
  record.requests = {forced, free};
  return record;
}

}  // namespace loopgauge::harness::test
