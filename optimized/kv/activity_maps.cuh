// SPDX-License-Identifier: Apache-2.0
// Activity maps have two writers: the host, for what it knows, and kernels, for members of selections and exits that only the device knows
// yet. So the host's copy is joined with what is there, and ranks are counted where all members are known.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

struct EncodeTask;

inline constexpr std::uint8_t kReplaceActivity = 1;  // the host's bits are all there are: rows may have been taken away
inline constexpr std::uint8_t kKeepRanks = 2;        // the device's ranks count members that the host has not read

// What the host has changed of one page of a request.
struct PageUpdate {
  PageTableEntry* entry_target;  // on the device
  ActivityMap* map_target;
  PageTableEntry entry;
  ActivityMap map;
  std::uint32_t flags;  // kReplaceActivity, kKeepRanks
};

// For every update: *entry_target = entry; *map_target = map, but activity bits are joined unless flags have kReplaceActivity, and ranks stay with
// kKeepRanks. updates [count], no page twice, are page-locked host memory that stays as it is until the work is done. One launch for the pages of all
// requests: a batch of decode rows changes one page of each, every loop.
void update_pages(const PageUpdate* updates, int count, cudaStream_t stream);

// Ranks of the streams of every task's block, from the activity bits as they are when the kernel runs. tasks [count] on the device.
void rank_rows(const KvView& kv, const EncodeTask* tasks, int count, cudaStream_t stream);

}  // namespace loopgauge::optimized
