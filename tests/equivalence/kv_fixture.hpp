// SPDX-License-Identifier: Apache-2.0
// One request's K/V history on both sides: reference planes and the paged device cache, the same values, the same exits.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "models/run_record.hpp"
#include "models/spec/tolerance.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/device_allocator.hpp"
#include "optimized/runtime/stream.hpp"
#include "reference/kv/kv_planes.hpp"

// First line of every test that needs the device.
#define LOOPGAUGE_REQUIRE_DEVICE()                                                              \
  do {                                                                                          \
    const std::string missing = ::loopgauge::equivalence::missing_device();                     \
    if (!missing.empty()) GTEST_SKIP() << "needs a CUDA device of capability 9.0: " << missing; \
  } while (false)

namespace loopgauge::equivalence {

std::string missing_device();  // empty: usable

inline float to_float(std::uint16_t bf16) { return std::bit_cast<float>(std::uint32_t{bf16} << 16); }
std::uint16_t random_bf16(std::mt19937& generator, double outlier_share = 0.01);  // normal; outliers 8 times larger
std::vector<std::uint16_t> random_rows(std::mt19937& generator, std::size_t count);
std::vector<float> widen(std::span<const std::uint16_t> values);

optimized::DeviceAllocator poisoning_allocator();

// A device array with a host copy in or out. Fresh device memory is poisoned (NaN patterns).
template <class T>
class DeviceArray {
 public:
  DeviceArray(optimized::DeviceAllocator& allocator, std::size_t count)
      : buffer_(allocator.allocate_array<T>(MemoryCategory::workspace, count)), count_(count) {}
  DeviceArray(optimized::DeviceAllocator& allocator, std::span<const T> values) : DeviceArray(allocator, values.size()) {
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(buffer_.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  }
  DeviceArray(optimized::DeviceAllocator& allocator, const std::vector<T>& values) : DeviceArray(allocator, std::span<const T>(values)) {}
  T* data() { return buffer_.template as<T>(); }
  std::size_t size() const { return count_; }
  void poison() { LOOPGAUGE_CUDA_CHECK(cudaMemset(buffer_.data(), 0xFF, count_ * sizeof(T))); }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(values.data(), buffer_.data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  optimized::DeviceBuffer buffer_;
  std::size_t count_;
};

struct HistoryShape {
  int heads = 3;
  int head_dim = 128;
  int layers = 2;
  int positions = 0;
  int prompt = 0;         // of them, rows selected by window: a quarter reaches loop 3, a tenth loop 4; later rows exit anywhere
  bool dense = false;     // instead: every row executes every loop
  int dense_runs = 0;     // or, of runs of so many rows, those of every other one
  int max_loop = kLoops;  // later planes are not written (a prefill in progress)
  std::uint32_t seed = 1;
  bool keep_planes = false;  // encode() leaves the BF16 pages, as a batch that crosses a boundary needs
  bool fragmented = false;   // pages come from a shuffled free list with other requests between
};

class History {
 public:
  explicit History(const HistoryShape& shape);

  // Encodes `blocks` (contiguous from the encoded frontier) on both sides and frees the device's BF16 pages below.
  void encode(const std::vector<PositionRange>& blocks);
  // Other values come to stand at `rows`, which execute every loop and are encoded; both sides encode them again. Needs keep_planes.
  void encode_again(PositionRange rows, float scale);
  // The streams as the device stores them, in the record's form.
  CodecBlock device_block(std::size_t index) const;

  const ModelConfig& model() const { return model_; }
  const HistoryShape& shape() const { return shape_; }
  optimized::KvShape kv_shape() const { return {model_.layers, model_.heads, model_.head_dim}; }
  optimized::DeviceAllocator& allocator() { return allocator_; }
  optimized::KvCache& cache() { return *cache_; }
  cudaStream_t stream() const { return nullptr; }
  int request() const { return request_; }
  int frontier() const { return frontier_; }
  int depth(int position) const { return depths_[static_cast<std::size_t>(position)]; }
  const std::vector<CodecBlock>& blocks() const { return blocks_; }
  std::uint64_t* numeric_fault() { return numeric_fault_->data(); }
  std::uint64_t numeric_fault_word() const { return numeric_fault_->download().front(); }

  reference::PlaneView<float> keys(int layer, int loop, int head, int frontier) {
    return planes_.view(reference::KvTensor::key, layer, loop, head, frontier);
  }
  reference::PlaneView<float> values(int layer, int loop, int head, int frontier) {
    return planes_.view(reference::KvTensor::value, layer, loop, head, frontier);
  }

 private:
  void write_values(int loop, int position, std::mt19937& generator, float scale);
  void write_page(int loop, int page);

  HistoryShape shape_;
  ModelConfig model_;
  optimized::DeviceAllocator allocator_;
  std::unique_ptr<optimized::KvCache> cache_;
  std::unique_ptr<DeviceArray<std::uint64_t>> numeric_fault_;
  reference::KvPlanes<float> planes_;
  std::vector<int> depths_;
  std::vector<CodecBlock> blocks_;
  int request_ = -1;
  int frontier_ = 0;
};

// Of a history of at least 420 positions with its planes kept, the first 384 in three blocks: among others, rows of V that are constant (scale zero), a page
// of nothing else, and rows of V 300 times larger, which have one power of two with the rest of their page; their keys are at the ends of their groups, or
// as near to zero as these allow.
void encode_zeros_and_large_rows(History& history);
// kManyPositions less a tail: three blocks, the last two of 28 and 32 pages, then a page a block.
inline constexpr int kManyPositions = 4700, kManyFrontier = 4608;
void encode_many(History& history);

struct Batch {
  std::vector<optimized::QueryRow> rows;
  std::vector<std::uint16_t> q;  // [rows, heads * head_dim]
};
// Launches every row by itself, then the batch as often as `copies` say, in one launch each: every row has the bits that it has alone. `launch` gives the
// outputs, laid out as q.
void expect_bits_of_rows_alone(const Batch& batch, const std::vector<int>& copies, const std::string& what,
                               const std::function<std::vector<std::uint16_t>(const Batch&)>& launch);

// What the reference computes for one query row and head, and what bounds the difference to another order of additions.
struct ExpectedAttention {
  std::vector<float> logits, probabilities, output;  // output not rounded
  std::vector<double> magnitude;                     // per channel: sum p |V|
  double score_error = 0.0;                          // largest bound of a logit
};
ExpectedAttention expected_attention(History& history, std::span<const float> query, int layer, int loop, int head, int position,
                                     int frontier);
// Largest bound of the scaled logit of any listed key.
double score_error_bound(History& history, std::span<const float> query, int layer, int loop, int head, std::span<const int> keys,
                         int frontier);

// Collects error / bound of many elements and the share of BF16 outputs that differ.
class ErrorCheck {
 public:
  void add(const spec::Tolerance& tolerance, const spec::Element& element, double actual, const std::string& where);
  // Expects every ratio <= 1 and, where `share` is given, that at most this share differs.
  void expect_within(const std::string& what, double share = 1.0) const;
  bool within(double share) const;

 private:
  double largest_ = 0.0;
  std::string largest_where_;
  std::size_t count_ = 0, differing_ = 0;
};

}  // namespace loopgauge::equivalence
