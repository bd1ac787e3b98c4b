// SPDX-License-Identifier: Apache-2.0
// Reads K/V back to the host for a run's record: logical planes, sealed blocks, selected keys.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "models/run_record.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

// Logical values of positions [0, length) of every layer and loop 1..loops, as read at the encoded frontier. [layers * 4] planes.
std::vector<KvPlane> read_planes(const KvCache& kv, int request, int length, int encoded_frontier, int loops, DeviceAllocator& allocator,
                                 cudaStream_t stream);

// The sealed blocks, unpacked to one code per byte.
std::vector<CodecBlock> read_blocks(const KvCache& kv, int request, cudaStream_t stream);

// Selected keys and m of one query at `position` that selected `count` keys a head, from a host copy of its reference slot: masks
// [layers][heads][mask_pages], mass [layers][heads].
StepKeys read_keys(const KvShape& shape, const std::uint64_t* masks, int mask_pages, const float* mass, int position, int count);

}  // namespace loopgauge::optimized
