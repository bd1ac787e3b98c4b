// SPDX-License-Identifier: Apache-2.0
#include "tests/equivalence/kv_fixture.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "models/spec/attention.hpp"
#include "optimized/ops/residual_encode.cuh"
#include "reference/kv/block_encoder.hpp"
#include "reference/numeric/bfloat16.hpp"

namespace loopgauge::equivalence {
namespace {

ModelConfig model_of(const HistoryShape& shape) {
  ModelConfig model;
  model.layers = shape.layers;
  model.loops = kLoops;
  model.heads = shape.heads;
  model.head_dim = shape.head_dim;
  model.hidden = shape.heads * shape.head_dim;
  return model;
}

// Last executed loop of every position: nested selections in windows of 64 for the prompt, exits anywhere after it.
std::vector<int> make_depths(const HistoryShape& shape, std::mt19937& generator) {
  std::vector<int> depths(static_cast<std::size_t>(shape.positions), kLoops);
  if (shape.dense) return depths;
  for (int position = 0; position < shape.positions; ++position) {
    const auto draw = generator() % 100;
    if (shape.dense_runs > 0 && position / shape.dense_runs % 2 == 1) continue;
    int& depth = depths[static_cast<std::size_t>(position)];
    if (position < shape.prompt) {
      depth = draw < 10 ? 4 : draw < 25 ? 3 : 2;
    } else {
      depth = draw < 70 ? 4 : draw < 80 ? 3 : draw < 90 ? 2 : 1;
    }
  }
  return depths;
}

float half_to_float(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                           : exponent == 31 ? (fraction ? NAN : INFINITY)
                                            : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

}  // namespace

std::string missing_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (count == 0) return "none found";
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "its properties cannot be read";
  if (properties.major != 9 || properties.minor != 0) return std::string(properties.name) + " has another";
  return "";
}

std::uint16_t random_bf16(std::mt19937& generator, double outlier_share) {
  std::normal_distribution<float> normal;
  float value = normal(generator);
  if (static_cast<double>(generator() % 100000) < outlier_share * 100000) value *= 8.0f;
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(reference::round_to_bfloat16(value)) >> 16);
}

std::vector<std::uint16_t> random_rows(std::mt19937& generator, std::size_t count) {
  std::vector<std::uint16_t> values(count);
  for (auto& value : values) value = random_bf16(generator);
  return values;
}

std::vector<float> widen(std::span<const std::uint16_t> values) {
  std::vector<float> result;
  for (const auto value : values) result.push_back(to_float(value));
  return result;
}

optimized::DeviceAllocator poisoning_allocator() { return optimized::DeviceAllocator({.poison = true}); }

History::History(const HistoryShape& shape)
    : shape_(shape), model_(model_of(shape)), allocator_(poisoning_allocator()), planes_(model_, shape.positions, true) {
  std::mt19937 generator(shape.seed);
  cache_ = std::make_unique<optimized::KvCache>(kv_shape(), allocator_, nullptr,
                                                optimized::KvCacheOptions{.quantized = false, .poison_reused_pages = true});
  numeric_fault_ = std::make_unique<DeviceArray<std::uint64_t>>(allocator_, std::vector<std::uint64_t>{optimized::kNoNumericFault});
  depths_ = make_depths(shape, generator);

  // The same values whatever the fragmentation: they are drawn before any page is.
  for (int loop = 1; loop <= shape.max_loop; ++loop) {
    for (int position = 0; position < shape.positions; ++position) {
      if (depths_[static_cast<std::size_t>(position)] < loop) {
        planes_.inherit_row(loop, position);
        continue;
      }
      write_values(loop, position, generator, 1.0f);
    }
  }

  std::vector<int> others;
  if (shape.fragmented) {
    // Two requests take pages; one is closed, so that the free list is neither empty nor in order.
    for (int i = 0; i < 3; ++i) others.push_back(cache_->open_request(shape.positions));
    for (int page = optimized::page_count(shape.positions) - 1; page >= 0; --page) {
      for (std::size_t i = 0; i < others.size(); ++i) {
        const int loop = 1 + (page + static_cast<int>(i)) % kLoops;
        const int begin = page * optimized::kPageTokens;
        cache_->reserve(others[i], loop, PositionRange{begin, std::min(begin + optimized::kPageTokens, shape.positions)});
      }
    }
    cache_->close_request(others[1]);
  }
  request_ = cache_->open_request(shape.positions);
  for (int loop = 1; loop <= shape.max_loop; ++loop) {
    std::vector<std::int32_t> active;
    for (int position = 0; position < shape.positions; ++position) {
      if (depths_[static_cast<std::size_t>(position)] >= loop) active.push_back(position);
    }
    cache_->reserve(request_, loop, std::span<const std::int32_t>(active));
    cache_->set_active(request_, loop, std::span<const std::int32_t>(active));
    for (int page = 0; page < optimized::page_count(shape.positions); ++page) write_page(loop, page);
  }
  cache_->upload();
}

void History::write_values(int loop, int position, std::mt19937& generator, float scale) {
  const std::size_t width = static_cast<std::size_t>(model_.projection_width());
  std::vector<float> row(width);
  for (int layer = 0; layer < model_.layers; ++layer) {
    for (const auto tensor : {reference::KvTensor::key, reference::KvTensor::value}) {
      // Planes of one position are alike, as in a looped model: residuals are smaller than the base.
      for (std::size_t i = 0; i < width; ++i) {
        const float fresh = reference::round_to_bfloat16(scale * to_float(random_bf16(generator)));
        const float previous = loop == 1 ? 0.0f
                                         : *(planes_.exact(tensor, layer, loop - 1, static_cast<int>(i) / model_.head_dim, position) +
                                             static_cast<int>(i) % model_.head_dim);
        row[i] = loop == 1 ? fresh : reference::round_to_bfloat16(previous + 0.2f * fresh);
      }
      planes_.write_row(tensor, layer, loop, position, row.data());
    }
  }
}

void History::encode_again(PositionRange rows, float scale) {
  std::mt19937 generator(shape_.seed + 1);
  for (int loop = 1; loop <= kLoops; ++loop) {
    for (int position = rows.begin; position < rows.end; ++position) write_values(loop, position, generator, scale);
    for (int page = rows.begin / optimized::kPageTokens; page < optimized::page_count(rows.end); ++page) write_page(loop, page);
  }
  for (CodecBlock& block : blocks_) {
    const PositionRange part{std::max(rows.begin, block.positions.begin), std::min(rows.end, block.positions.end)};
    if (part.begin >= part.end) continue;
    for (int loop = 1; loop <= kLoops; ++loop)
      reference::encode_rows_again(planes_, model_, loop, block.streams[static_cast<std::size_t>(loop - 1)], part, "request 0");
  }
  DeviceArray<optimized::EncodeTask> task(allocator_, std::vector<optimized::EncodeTask>{{request_, rows.begin, rows.end, 1, kLoops}});
  optimized::residual_encode_again({cache_->view(), task.data(), 1, numeric_fault(), Fault::none}, stream());
}

void History::write_page(int loop, int page) {
  const std::uint64_t address = cache_->pages(request_)[static_cast<std::size_t>(page)].bf16[loop - 1];
  if (address == 0) return;
  std::vector<std::uint16_t> image(optimized::page_bytes(kv_shape()) / 2, 0xFFFF);  // NaN where nothing is written
  for (int row = 0; row < optimized::kPageTokens; ++row) {
    const int position = page * optimized::kPageTokens + row;
    if (position >= shape_.positions || depth(position) < loop) continue;
    for (int layer = 0; layer < model_.layers; ++layer) {
      for (int head = 0; head < model_.heads; ++head) {
        for (const auto tensor : {reference::KvTensor::key, reference::KvTensor::value}) {
          const float* source = planes_.exact(tensor, layer, loop, head, position);
          const auto target = tensor == reference::KvTensor::key ? optimized::KvTensor::k : optimized::KvTensor::v;
          std::uint16_t* out = image.data() + optimized::page_row_offset(kv_shape(), layer, target, head, row);
          for (int d = 0; d < model_.head_dim; ++d) out[d] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(source[d]) >> 16);
        }
      }
    }
  }
  LOOPGAUGE_CUDA_CHECK(cudaMemcpy(reinterpret_cast<void*>(address), image.data(), image.size() * 2, cudaMemcpyHostToDevice));
}

void History::encode(const std::vector<PositionRange>& blocks) {
  std::vector<optimized::EncodeTask> tasks;
  for (const PositionRange& block : blocks) {
    CodecBlock expected;
    expected.positions = block;
    for (int loop = 1; loop <= shape_.max_loop; ++loop) {
      CodecStream& stream = expected.streams[static_cast<std::size_t>(loop - 1)];
      for (int position = block.begin; position < block.end; ++position) {
        if (depth(position) >= loop) stream.rows.push_back(position);
      }
      reference::encode_stream(planes_, model_, block, loop, stream, Fault::none, "request 0");
    }
    blocks_.push_back(std::move(expected));
    tasks.push_back(cache_->prepare_encode(request_, block, 1, shape_.max_loop));
    frontier_ = block.end;
  }
  cache_->upload();
  DeviceArray<optimized::EncodeTask> device_tasks(allocator_, tasks);
  optimized::residual_encode({cache_->view(), device_tasks.data(), static_cast<int>(tasks.size()), numeric_fault(), Fault::none}, stream());
  LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
  for (int loop = 1; loop <= kLoops && !shape_.keep_planes; ++loop) cache_->release_planes(request_, loop, {0, frontier_});
  cache_->upload();
}

CodecBlock History::device_block(std::size_t index) const {
  const optimized::SealedBlock& block = *cache_->blocks(request_)[index];
  const optimized::KvShape shape = kv_shape();
  const auto fetch = [](const optimized::DeviceBuffer& buffer) {
    std::vector<std::uint8_t> bytes(buffer.size_bytes());
    if (!bytes.empty()) LOOPGAUGE_CUDA_CHECK(cudaMemcpy(bytes.data(), buffer.data(), bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  };
  const std::vector<std::uint8_t> base = fetch(block.base_payload), residual = fetch(block.residual_payload),
                                  parameters = fetch(block.parameters);
  CodecBlock result;
  result.positions = block.positions;
  const auto page = static_cast<std::size_t>(block.positions.begin / optimized::kPageTokens);
  const optimized::ActivityMap& map = cache_->maps(request_)[page];
  // Host addresses in place of the device's: stream_tile() then points into the copies.
  optimized::PageTableEntry entry{};
  entry.base_payload = reinterpret_cast<std::uint64_t>(base.data());
  entry.residual_payload = reinterpret_cast<std::uint64_t>(residual.data());
  entry.parameters = reinterpret_cast<std::uint64_t>(parameters.data());
  for (int loop = 1; loop <= kLoops; ++loop) {
    CodecStream& stream = result.streams[static_cast<std::size_t>(loop - 1)];
    for (int position = block.positions.begin; position < block.positions.end; ++position) {
      if (depth(position) >= loop && loop <= shape_.max_loop) stream.rows.push_back(position);
    }
    const auto rows = static_cast<std::int64_t>(stream.rows.size());
    if (rows == 0) continue;
    stream.layers.resize(static_cast<std::size_t>(shape.layers));
    for (int layer = 0; layer < shape.layers; ++layer) {
      CodecLayer& out = stream.layers[static_cast<std::size_t>(layer)];
      for (const auto tensor : {optimized::KvTensor::k, optimized::KvTensor::v}) {
        const bool is_key = tensor == optimized::KvTensor::k;
        const std::int64_t groups = is_key ? (rows + kGroupSize - 1) / kGroupSize : rows;
        const std::int64_t per_group = is_key ? shape.head_dim : shape.head_dim / kGroupSize;
        Tensor<std::uint8_t> codes({shape.heads, rows, shape.head_dim});
        Tensor<float> minima({shape.heads, groups, per_group}), scales({shape.heads, groups, per_group});
        for (int head = 0; head < shape.heads; ++head) {
          const optimized::StreamTile tile = optimized::stream_tile(shape, entry, map, layer, loop, tensor, head);
          for (std::int64_t i = 0; i < rows * shape.head_dim; ++i) {
            const std::uint8_t byte = tile.payload[i / 2];
            codes.row(head)[static_cast<std::size_t>(i)] = i % 2 == 0 ? byte & 15 : byte >> 4;
          }
          for (std::int64_t i = 0; i < groups * per_group; ++i) {
            minima.row(head)[static_cast<std::size_t>(i)] = half_to_float(static_cast<std::uint16_t>(tile.parameters[i] & 0xFFFF));
            scales.row(head)[static_cast<std::size_t>(i)] = half_to_float(static_cast<std::uint16_t>(tile.parameters[i] >> 16));
          }
        }
        (is_key ? out.k_codes : out.v_codes) = std::move(codes);
        (is_key ? out.k_min : out.v_min) = std::move(minima);
        (is_key ? out.k_scale : out.v_scale) = std::move(scales);
      }
    }
  }
  return result;
}

double score_error_bound(History& history, std::span<const float> query, int layer, int loop, int head, std::span<const int> keys,
                         int frontier) {
  const auto view = history.keys(layer, loop, head, frontier);
  const double scale = reference::attention_scale<reference::Declared>(view.head_dim);
  double largest = 0.0;
  for (const int position : keys) {
    double magnitude = 0.0;
    for (int d = 0; d < view.head_dim; ++d)
      magnitude += std::fabs(static_cast<double>(query[static_cast<std::size_t>(d)]) * view.row(position)[d]);
    const spec::Element element{.magnitude = magnitude * scale, .terms = static_cast<double>(view.head_dim)};
    largest = std::max(largest, spec::bound(spec::kScoreTolerance, element, 0.0));
  }
  return largest;
}

void encode_zeros_and_large_rows(History& history) {
  history.encode({{0, 256}, {256, 320}, {320, 384}});
  history.encode_again({70, 100}, 0.0f);
  history.encode_again({250, 260}, 300.0f);
  history.encode_again({320, 384}, 0.0f);
  ASSERT_EQ(history.numeric_fault_word(), optimized::kNoNumericFault);
}

void encode_many(History& history) {
  std::vector<PositionRange> blocks{{0, 256}, {256, 2048}, {2048, 4096}};
  for (int begin = 4096; begin < kManyFrontier; begin += 64) blocks.push_back({begin, begin + 64});
  history.encode(blocks);
}

void expect_bits_of_rows_alone(const Batch& batch, const std::vector<int>& copies, const std::string& what,
                               const std::function<std::vector<std::uint16_t>(const Batch&)>& launch) {
  const std::size_t width = batch.q.size() / batch.rows.size();
  std::vector<std::uint16_t> expected;
  for (std::size_t i = 0; i < batch.rows.size(); ++i) {
    const auto q = std::span(batch.q).subspan(i * width, width);
    const auto alone = launch({{batch.rows[i]}, {q.begin(), q.end()}});
    expected.insert(expected.end(), alone.begin(), alone.end());
  }
  for (const int count : copies) {
    Batch repeated;
    for (int copy = 0; copy < count; ++copy) {
      repeated.rows.insert(repeated.rows.end(), batch.rows.begin(), batch.rows.end());
      repeated.q.insert(repeated.q.end(), batch.q.begin(), batch.q.end());
    }
    const auto actual = launch(repeated);
    for (std::size_t i = 0; i < repeated.rows.size(); ++i) {
      const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(i % batch.rows.size() * width);
      EXPECT_TRUE(std::equal(begin, begin + static_cast<std::ptrdiff_t>(width), actual.begin() + static_cast<std::ptrdiff_t>(i * width)))
          << what << ", row " << i << " of " << repeated.rows.size();
    }
  }
}

ExpectedAttention expected_attention(History& history, std::span<const float> query, int layer, int loop, int head, int position,
                                     int frontier) {
  const auto keys = history.keys(layer, loop, head, frontier);
  const auto values = history.values(layer, loop, head, frontier);
  const int count = position + 1;
  ExpectedAttention expected;
  expected.logits.resize(static_cast<std::size_t>(count));
  expected.probabilities.resize(static_cast<std::size_t>(count));
  expected.output.resize(static_cast<std::size_t>(keys.head_dim));
  reference::attention_dense<reference::Declared>(query.data(), keys, values, count,
                                                  reference::attention_scale<reference::Declared>(keys.head_dim), expected.logits.data(),
                                                  expected.probabilities.data(), expected.output.data());
  expected.magnitude.assign(static_cast<std::size_t>(keys.head_dim), 0.0);
  std::vector<int> all(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    all[static_cast<std::size_t>(i)] = i;
    for (int d = 0; d < keys.head_dim; ++d) {
      expected.magnitude[static_cast<std::size_t>(d)] +=
          static_cast<double>(expected.probabilities[static_cast<std::size_t>(i)]) * std::fabs(values.row(i)[d]);
    }
  }
  expected.score_error = score_error_bound(history, query, layer, loop, head, all, frontier);
  return expected;
}

void ErrorCheck::add(const spec::Tolerance& tolerance, const spec::Element& element, double actual, const std::string& where) {
  ++count_;
  if (actual != element.expected) ++differing_;
  const double ratio = spec::error_ratio(tolerance, element, actual);
  if (!(ratio <= largest_)) {
    largest_ = ratio;
    largest_where_ = where + ": expected " + std::to_string(element.expected) + ", actual " + std::to_string(actual);
  }
}

bool ErrorCheck::within(double share) const {
  return count_ > 0 && largest_ <= 1.0 && static_cast<double>(differing_) <= share * static_cast<double>(count_);
}

void ErrorCheck::expect_within(const std::string& what, double share) const {
  ASSERT_GT(count_, 0u) << what << ": nothing was compared";
  EXPECT_LE(largest_, 1.0) << what << " at " << largest_where_;
  const double differing = static_cast<double>(differing_) / static_cast<double>(count_);
  EXPECT_LE(differing, share) << what << ": " << differing_ << " of " << count_ << " elements differ";
  ::testing::Test::RecordProperty("error_over_bound", std::to_string(largest_));
  std::printf("  %-60s error/bound %.4f, differing share %.5f of %zu\n", what.c_str(), largest_, differing, count_);
}

}  // namespace loopgauge::equivalence
