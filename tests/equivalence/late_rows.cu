// SPDX-License-Identifier: Apache-2.0
#include "tests/equivalence/late_rows.hpp"

#include "optimized/ops/programmatic_launch.cuh"

namespace loopgauge::equivalence {
namespace {

constexpr int kThreads = 128;
constexpr std::uint64_t kLateNanoseconds = 2'000'000;
constexpr std::uint32_t kNaNs = 0xFFFFFFFF;

__device__ std::uint64_t nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

enum class Direction { away, back };

// A block a row.
__global__ void move_late_rows(optimized::KvView kv, int layer, const optimized::QueryRow* rows, std::uint32_t* q, std::uint32_t* all_kept,
                               Direction direction) {
  if (direction == Direction::back) {
    optimized::let_next_kernel_begin();
    for (const std::uint64_t begin = nanoseconds(); nanoseconds() - begin < kLateNanoseconds;) {
    }
  }
  const optimized::QueryRow row = rows[blockIdx.x];
  const int head_words = kv.shape.head_dim / 2, words = kv.shape.heads * head_words;
  const std::uint64_t page = kv.requests[row.request].pages[row.position / optimized::kPageTokens].bf16[row.loop - 1];
  for (int i = static_cast<int>(threadIdx.x); i < 3 * words; i += kThreads) {
    const int tensor = i / words - 1, word = i % words, head = word / head_words;
    std::uint32_t* place = q + static_cast<std::size_t>(blockIdx.x) * words + word;
    if (tensor >= 0) {
      if (page == 0) continue;  // nobody in this page executed the loop
      const std::size_t offset =
          optimized::page_row_offset(kv.shape, layer, static_cast<optimized::KvTensor>(tensor), head, row.position % optimized::kPageTokens);
      place = reinterpret_cast<std::uint32_t*>(page) + offset / 2 + word % head_words;
    }
    std::uint32_t& kept = all_kept[static_cast<std::size_t>(blockIdx.x) * 3 * words + i];
    if (direction == Direction::away) {
      kept = *place;
      *place = kNaNs;
    } else {
      *place = kept;
    }
  }
}

__global__ void read_at_once(const volatile std::uint32_t* from, std::uint32_t* to) {
  const std::uint32_t value = *from;
  optimized::wait_for_previous_kernel();
  *to = value;
}

}  // namespace

LateRows::LateRows(History& history, int layer, const optimized::QueryRow* rows, int row_count, DeviceArray<std::uint16_t>& q)
    : history_(history),
      layer_(layer),
      row_count_(row_count),
      rows_(rows),
      q_(q),
      kept_(history.allocator(), q.size() / 2 * 3),
      read_(history.allocator(), 1) {}

void LateRows::launch() {
  for (const Direction direction : {Direction::away, Direction::back}) {
    move_late_rows<<<static_cast<unsigned>(row_count_), kThreads, 0, history_.stream()>>>(history_.cache().view(), layer_, rows_,
                                                                                         reinterpret_cast<std::uint32_t*>(q_.data()), kept_.data(), direction);
    LOOPGAUGE_CUDA_CHECK(cudaGetLastError());
  }
}

std::uint32_t LateRows::read_without_waiting() {
  optimized::launch_in_turn(true, read_at_once, dim3(1), 1, 0, history_.stream(), reinterpret_cast<const volatile std::uint32_t*>(q_.data()), read_.data());
  return read_.download().front();
}

}  // namespace loopgauge::equivalence
