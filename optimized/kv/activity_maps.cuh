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

// target[i] = host[i], but activity bits are joined unless flags[i] has kReplaceActivity, and ranks stay with kKeepRanks. `host` and `flags`
// [count] are page-locked host memory that stays as it is until the work is done.
void merge_activity_maps(ActivityMap* target, const ActivityMap* host, const std::uint8_t* flags, int count, cudaStream_t stream);

// Ranks of the streams of every task's block, from the activity bits as they are when the kernel runs. tasks [count] on the device.
void rank_rows(const KvView& kv, const EncodeTask* tasks, int count, cudaStream_t stream);

}  // namespace loopgauge::optimized
