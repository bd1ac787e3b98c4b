// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_decode.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "models/spec/attention.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "tests/equivalence/kv_fixture.hpp"
#include "tests/equivalence/late_rows.hpp"

namespace loopgauge::equivalence {
namespace {

const spec::Tolerance& output_tolerance() { return spec::kAttentionDense.outputs[2].tolerance; }

Batch random_batch(const History& history, const std::vector<int>& positions, const std::vector<int>& frontiers, std::uint32_t seed) {
  std::mt19937 generator(seed);
  Batch batch;
  for (const int position : positions) {
    for (int loop = 1; loop <= history.shape().max_loop; ++loop) {
      for (const int frontier : frontiers) {
        if (frontier <= position) batch.rows.push_back({history.request(), position, loop, frontier, -1});
      }
    }
  }
  batch.q = random_rows(generator, batch.rows.size() * static_cast<std::size_t>(history.model().projection_width()));
  return batch;
}

enum class Kernel { narrowest, general };  // without encoded rows there are two that give the same bits

std::vector<std::uint16_t> run(History& history, int layer, const Batch& batch, int max_length, Fault fault = Fault::none,
                               Kernel kernel = Kernel::narrowest, bool early = false) {
  optimized::DeviceAllocator& allocator = history.allocator();
  const auto rows = static_cast<int>(batch.rows.size());
  DeviceArray<std::uint16_t> q(allocator, batch.q), output(allocator, batch.q.size());
  DeviceArray<optimized::QueryRow> device_rows(allocator, batch.rows);
  DeviceArray<std::uint8_t> workspace(allocator, optimized::attention_decode_workspace_bytes(history.kv_shape(), rows));
  DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(batch.rows.size() * static_cast<std::size_t>(history.model().heads)));
  const bool encoded =
      std::any_of(batch.rows.begin(), batch.rows.end(), [](const optimized::QueryRow& row) { return row.encoded_frontier > 0; });
  optimized::AttentionDecodeArguments arguments{.kv = history.cache().view(),
                                                .layer = layer,
                                                .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                                .q_row_stride = history.model().projection_width(),
                                                .rows = device_rows.data(),
                                                .row_count = rows,
                                                .max_length = max_length,
                                                .encoded_history = encoded || kernel == Kernel::general,
                                                .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                                .workspace = workspace.data(),
                                                .arrivals = arrivals.data(),
                                                .fault = fault};
  optimized::attention_decode(arguments, history.stream());
  if (early) {  // and behind the launch above twice more, whose outputs they replace
    LateRows late(history, layer, device_rows.data(), rows, q);
    output.poison();
    arguments.written_rows = device_rows.data();
    arguments.written_count = rows;
    late.launch();
    for (int i = 0; i < 3; ++i) optimized::attention_decode(arguments, history.stream());
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
  }
  for (const std::uint32_t count : arrivals.download()) EXPECT_EQ(count, 0u) << "arrivals of the next launch";
  return output.download();
}

int longest(const Batch& batch) {
  int length = 0;
  for (const auto& row : batch.rows) length = std::max(length, row.position + 1);
  return length;
}

void compare(History& history, const Batch& batch, const std::vector<std::uint16_t>& actual, int layer, ErrorCheck& check) {
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  const auto head_dim = static_cast<std::size_t>(history.model().head_dim);
  for (std::size_t i = 0; i < batch.rows.size(); ++i) {
    const auto& row = batch.rows[i];
    for (int head = 0; head < history.model().heads; ++head) {
      const std::size_t offset = i * width + static_cast<std::size_t>(head) * head_dim;
      const auto query = widen(std::span(batch.q).subspan(offset, head_dim));
      const ExpectedAttention expected = expected_attention(history, query, layer, row.loop, head, row.position, row.encoded_frontier);
      for (std::size_t d = 0; d < head_dim; ++d) {
        check.add(output_tolerance(),
                  {.expected = reference::round_to_bfloat16(expected.output[d]),
                   .magnitude = expected.magnitude[d],
                   .terms = static_cast<double>(row.position + 1),
                   .input_error = expected.score_error},
                  to_float(actual[offset + d]),
                  "position " + std::to_string(row.position) + " loop " + std::to_string(row.loop) + " frontier " +
                      std::to_string(row.encoded_frontier) + " head " + std::to_string(head) + " channel " + std::to_string(d));
      }
    }
  }
}

struct Case {
  int heads, head_dim, positions, prompt;
  bool dense;
};

class AttentionDecode : public ::testing::TestWithParam<Case> {};
class AttentionDecodePacked : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionDecode, Bf16PlanesMatchTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const Case& c = GetParam();
  History history({.heads = c.heads,
                   .head_dim = c.head_dim,
                   .positions = c.positions,
                   .prompt = c.prompt,
                   .dense = c.dense,
                   .dense_runs = 384,  // pages of one plane and of several, in turn, in one ring
                   .fragmented = true});
  std::vector<int> positions;
  for (const int length : {1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 256, 257, c.positions}) {
    if (length <= c.positions) positions.push_back(length - 1);
  }
  const Batch batch = random_batch(history, positions, {0}, 11);
  ErrorCheck check;
  for (int layer = 0; layer < history.model().layers; ++layer) {
    const auto actual = run(history, layer, batch, longest(batch));
    compare(history, batch, actual, layer, check);
    EXPECT_EQ(run(history, layer, batch, longest(batch), Fault::none, Kernel::general), actual) << "the kernel that also reads encoded rows";
  }
  check.expect_within("attention_decode, BF16", output_tolerance().differing_share);
}

TEST_P(AttentionDecodePacked, PackedStreamsMatchTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const Case& c = GetParam();
  History history(
      {.heads = c.heads, .head_dim = c.head_dim, .positions = c.positions, .prompt = c.prompt, .dense = c.dense, .fragmented = true});
  // A window of up to 256, then 64-token flushes, leaving a tail that is no multiple of 64.
  std::vector<PositionRange> blocks;
  const int limit = (c.positions - 1) / 64 * 64;
  blocks.push_back({0, std::min(256, limit)});
  for (int begin = blocks.back().end; begin + 64 <= limit; begin += 64) blocks.push_back({begin, begin + 64});
  history.encode(blocks);
  ASSERT_EQ(history.numeric_fault_word(), optimized::kNoNumericFault);
  std::vector<int> positions{c.positions - 1};
  if (limit + 3 < c.positions) positions.push_back(limit + 2);
  const Batch batch = random_batch(history, positions, {limit}, 12);
  ErrorCheck check;
  for (int layer = 0; layer < history.model().layers; ++layer) {
    compare(history, batch, run(history, layer, batch, longest(batch)), layer, check);
  }
  check.expect_within("attention_decode, packed", output_tolerance().differing_share);
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionDecode,
                         ::testing::Values(Case{3, 128, 1000, 500, false}, Case{3, 64, 1000, 500, false}, Case{16, 128, 300, 300, false},
                                           Case{3, 128, 700, 0, true}, Case{3, 64, 65, 20, false}, Case{2, 128, 1, 1, true},
                                           Case{2, 64, 7, 4, false}, Case{2, 128, 193, 128, false},
                                           Case{1, 64, 4400, 4200, false}));  // more splits than chains
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionDecodePacked,
                         ::testing::Values(Case{3, 128, 1000, 500, false}, Case{3, 64, 1000, 500, false}, Case{16, 128, 300, 300, false},
                                           Case{3, 128, 700, 0, true}, Case{3, 64, 65, 20, false}, Case{2, 128, 193, 128, false},
                                           Case{1, 128, 4400, 4200, false}));

// A block that ends inside a page (a prompt that is no multiple of 64, policy fixed_prompt): the rest of the page is read as BF16.
TEST(AttentionDecodeDevice, EncodedPromptEndsInsideAPage) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int prompt : {1, 63, 65, 130}) {
    History history({.positions = prompt + 90, .prompt = prompt});
    history.encode({{0, prompt}});
    const Batch batch = random_batch(history, {prompt, prompt + 1, prompt + 89}, {prompt}, 13);
    ErrorCheck check;
    compare(history, batch, run(history, 1, batch, longest(batch)), 1, check);
    check.expect_within("attention_decode, prompt of " + std::to_string(prompt), output_tolerance().differing_share);
  }
}

TEST(AttentionDecodeDevice, BitsDoNotDependOnBatchOrderLengthOrPlace) {
  LOOPGAUGE_REQUIRE_DEVICE();
  HistoryShape shape{.positions = 700, .prompt = 300, .seed = 5};
  History history(shape);
  shape.fragmented = true;
  History fragmented(shape);
  for (History* h : {&history, &fragmented}) h->encode({{0, 256}, {256, 320}, {320, 384}});
  const Batch batch = random_batch(history, {384, 450, 511, 512, 699}, {384}, 14);
  const std::vector<std::uint16_t> expected = run(history, 0, batch, longest(batch));
  EXPECT_EQ(run(history, 0, batch, longest(batch)), expected) << "second run";
  EXPECT_EQ(run(history, 0, batch, 4000), expected) << "larger grid";
  Batch moved = batch;
  for (auto& row : moved.rows) row.request = fragmented.request();
  EXPECT_EQ(run(fragmented, 0, moved, longest(batch)), expected) << "fragmented tables";

  const auto width = static_cast<std::size_t>(history.model().projection_width());
  const auto q_of = [&](std::size_t i) { return std::span(batch.q).subspan(i * width, width); };
  const auto output_of = [&](const std::vector<std::uint16_t>& values, std::size_t i) {
    return std::vector<std::uint16_t>(values.begin() + static_cast<std::ptrdiff_t>(i * width),
                                      values.begin() + static_cast<std::ptrdiff_t>((i + 1) * width));
  };
  std::vector<std::size_t> order(batch.rows.size());
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  Batch shuffled;
  for (const std::size_t i : order) {
    shuffled.rows.push_back(batch.rows[i]);
    shuffled.q.insert(shuffled.q.end(), q_of(i).begin(), q_of(i).end());
  }
  const auto shuffled_output = run(history, 0, shuffled, longest(batch));
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(output_of(shuffled_output, i), output_of(expected, order[i])) << "shuffled row " << i;
  }
  for (std::size_t i = 0; i < batch.rows.size(); ++i) {
    const Batch alone{{batch.rows[i]}, {q_of(i).begin(), q_of(i).end()}};
    EXPECT_EQ(run(history, 0, alone, longest(alone)), output_of(expected, i)) << "row " << i << " alone";
  }
}

TEST(AttentionDecodeDevice, ZerosAndLargeRowsAmongOthers) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = 420, .dense = true, .keep_planes = true});
    ASSERT_NO_FATAL_FAILURE(encode_zeros_and_large_rows(history));
    const Batch batch = random_batch(history, {384, 419}, {384}, 20);
    ErrorCheck check;
    for (int layer = 0; layer < history.model().layers; ++layer) compare(history, batch, run(history, layer, batch, longest(batch)), layer, check);
    check.expect_within("attention_decode, zeros and large rows among others", output_tolerance().differing_share);
  }
}

// 19 splits of a row for 16 CTAs, for a few, and for one, whose two groups then take ten rounds; short rows leave CTAs without a split.
TEST(AttentionDecodeDevice, BitsDoNotDependOnHowManyCtasShareARow) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.heads = 2, .positions = kManyPositions, .prompt = 4400, .dense_runs = 384, .keep_planes = true});
  encode_many(history);
  for (const bool encoded : {true, false}) {
    Batch batch;
    for (const int position : {0, 70, 300, kManyFrontier - 1, kManyFrontier, kManyPositions - 1}) {
      for (int loop = 1; loop <= kLoops; ++loop) {
        const int frontier = encoded ? std::min(kManyFrontier, position / 64 * 64) : 0;
        batch.rows.push_back({history.request(), position, loop, frontier, -1});
      }
    }
    std::mt19937 generator(19);
    batch.q = random_rows(generator, batch.rows.size() * static_cast<std::size_t>(history.model().projection_width()));
    const Kernel kernel = encoded ? Kernel::general : Kernel::narrowest;
    // (row, head) pairs of the launch: 48, 384 (more than are resident)
    expect_bits_of_rows_alone(batch, {1, 8}, encoded ? "encoded" : "BF16",
                              [&](const Batch& rows) { return run(history, 1, rows, kManyPositions, Fault::none, kernel); });
  }
}

// Behind a kernel that writes q and the rows' K and V long after the launch may have begun, and behind attention.
TEST(AttentionDecodeDevice, BitsDoNotDependOnWhenALaunchMayBegin) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = 1300, .prompt = 600, .dense_runs = 384, .keep_planes = true});
    history.encode({{0, 256}, {256, 1216}});
    for (const int frontier : {0, 1216}) {
      const Batch batch = random_batch(history, {1216, 1247, 1299}, {frontier}, 21);
      for (int layer = 0; layer < history.model().layers; ++layer) {
        const auto expected = run(history, layer, batch, 1300);
        for (const Kernel kernel : {Kernel::narrowest, Kernel::general}) {
          EXPECT_EQ(run(history, layer, batch, 1300, Fault::none, kernel, true), expected) << "head_dim " << head_dim << ", frontier " << frontier;
        }
      }
    }
  }
}

// Without this the test above, and that of the correction, could not fail.
TEST(AttentionDecodeDevice, WhatDoesNotWaitReadsLateRowsTooSoon) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 70, .dense = true});
  const Batch batch = random_batch(history, {66, 69}, {0}, 22);
  DeviceArray<std::uint16_t> q(history.allocator(), batch.q);
  DeviceArray<optimized::QueryRow> rows(history.allocator(), batch.rows);
  LateRows late(history, 0, rows.data(), static_cast<int>(batch.rows.size()), q);
  EXPECT_NE(late.read_without_waiting(), 0xFFFFFFFFu);  // which loads the kernel: that can take longer than the rows are late
  late.launch();
  EXPECT_EQ(late.read_without_waiting(), 0xFFFFFFFFu);
  EXPECT_EQ(q.download(), batch.q) << "put back";
}

TEST(AttentionDecodeDevice, PaddingRowsAreLeftAlone) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 80, .dense = true});
  Batch batch = random_batch(history, {79}, {0}, 15);
  batch.rows[1].request = -1;
  const auto output = run(history, 0, batch, 80);
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  for (std::size_t i = 0; i < width; ++i) ASSERT_EQ(output[width + i], 0xFFFF);  // the poison of the fresh buffer
}

TEST(AttentionDecodeDevice, PlantedFaultsShow) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 300, .prompt = 200});
  history.encode({{0, 192}});
  const Batch batch = random_batch(history, {299}, {192}, 16);
  const auto right = run(history, 0, batch, 300);
  EXPECT_NE(run(history, 0, batch, 300, Fault::loop_off_by_one), right);
  EXPECT_NE(run(history, 0, batch, 300, Fault::absent_residual_as_code_zero), right);
}

// Faults of the optimized runtime alone are outside the tolerance, where the right kernel is inside.
TEST(AttentionDecodeDevice, KernelFaultsAreDetected) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 300, .prompt = 200, .keep_planes = true});
  history.encode({{0, 192}, {192, 256}});
  const Batch batch = random_batch(history, {256, 299}, {192, 256}, 17);
  for (const Fault fault : {Fault::none, Fault::half_precision_stream_dots, Fault::wrong_compact_rank, Fault::tail_read_as_encoded}) {
    ErrorCheck check;
    compare(history, batch, run(history, 0, batch, 300, fault), 0, check);
    EXPECT_EQ(check.within(output_tolerance().differing_share), fault == Fault::none) << to_string(fault);
  }
}

}  // namespace
}  // namespace loopgauge::equivalence
