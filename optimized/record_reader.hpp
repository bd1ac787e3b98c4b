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

// Selected keys and m of one reference slot for a query at `position` that selected `count` keys a head.
StepKeys read_keys(const KvShape& shape, const ReferenceView& view, int slot, int position, int count, cudaStream_t stream);

}  // namespace loopgauge::optimized
