// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/activity_maps.cuh"

#include "optimized/kv/kv_cache.hpp"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 64;

__global__ void update_pages_kernel(const PageUpdate* updates, int count) {
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const PageUpdate update = updates[index];
  *update.entry_target = update.entry;
  ActivityMap& out = *update.map_target;
  for (int i = 0; i < kLoops; ++i) {
    out.active[i] = update.flags & kReplaceActivity ? update.map.active[i] : out.active[i] | update.map.active[i];
    if (!(update.flags & kKeepRanks)) out.rank[i] = update.map.rank[i];
    out.rows[i] = update.map.rows[i];
  }
}

// One block a task, one thread a stream.
__global__ void rank_rows_kernel(KvView kv, const EncodeTask* tasks) {
  const EncodeTask task = tasks[blockIdx.x];
  const int loop = task.loop_first + static_cast<int>(threadIdx.x);
  if (loop > task.loop_last) return;
  ActivityMap* maps = kv.requests[task.request].maps;
  std::uint32_t rank = 0;
  for (int page = task.begin / kPageTokens; page < page_count(task.end); ++page) {
    maps[page].rank[loop - 1] = rank;
    rank += static_cast<std::uint32_t>(__popcll(maps[page].active[loop - 1] & page_mask(page, task.begin, task.end)));
  }
}

}  // namespace

void update_pages(const PageUpdate* updates, int count, cudaStream_t stream) {
  if (count == 0) return;
  update_pages_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(updates, count);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("update_pages");
}

void rank_rows(const KvView& kv, const EncodeTask* tasks, int count, cudaStream_t stream) {
  if (count == 0) return;
  rank_rows_kernel<<<count, kLoops, 0, stream>>>(kv, tasks);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("rank_rows");
}

}  // namespace loopgauge::optimized
