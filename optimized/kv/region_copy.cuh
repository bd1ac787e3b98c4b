// SPDX-License-Identifier: Apache-2.0
// Regions of a handoff (models/handoff/regions.hpp), read from pages and sealed blocks and written to them. Neither side stores K/V in that
// layout; a tile of one (layer, K or V, head) is contiguous in it, and of encoded streams in a block too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

enum class RegionContent : std::int32_t { rows, payload, parameters };

// One region of K/V. POD: an array of these goes to the kernel.
struct RegionCopy {
  RegionContent content = RegionContent::rows;
  std::int32_t request = 0;                    // slot
  std::int32_t begin = 0;                      // first position of the block; rows: not used
  std::int32_t loop = 1;                       // stream or plane, 1..4
  std::int32_t rows = 0;                       // that executed the loop
  const std::int32_t* positions = nullptr;     // rows: [rows] on the device, ascending
  std::byte* region = nullptr;                 // device memory, 16-byte aligned
};

// Specification clause and reference counterpart: S-PD-4; HandoffSource::bytes_of and HandoffTarget::unpack of reference/run/handoff.
// Shapes and layouts: regions as in models/handoff/README.md, of BF16 elements. copies [count] on the device.
// Requires: head_dim 64 or 128; tables uploaded; pages of the rows, blocks with ranks counted from their first row.
// Numerics: bit-exact copies. Determinism: element-wise.
// Launch: (layer, K|V, head) x region CTAs of 128 threads; one launch for all. Traffic: every region read once and written once.
void gather_regions(const KvView& kv, const RegionCopy* copies, int count, cudaStream_t stream);
void scatter_regions(const KvView& kv, const RegionCopy* copies, int count, cudaStream_t stream);

struct RegionBytes {
  const std::byte* data = nullptr;             // 8-byte aligned device memory of this device
  std::uint64_t bytes = 0;
};

// sums[i] = handoff::region_checksum of regions[i]; both [count] on the device. Exact: a sum of integers modulo 2^64 in any order.
void region_checksums(const RegionBytes* regions, std::uint64_t* sums, int count, cudaStream_t stream);

}  // namespace loopgauge::optimized
