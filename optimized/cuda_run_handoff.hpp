// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime's ends of a handoff (S-PD-1..8). Regions are copies in device memory, taken by one kernel when they have become final, and
// stay as they are whatever happens to the request; a transport that moves host memory gets them brought there. What arrives is checked where it
// lies and put into pages and blocks that were reserved for it.
//
// Asynchronous execution keeps its submissions in flight while it exports: a copy follows the work that was issued on the run's stream and is handed
// out when its event has come. The host must know which rows a region has, so with token selection a region waits for the delivery of the selection;
// when the prompt is complete there is nothing left to overlap with, and what remains is waited for.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "models/handoff/transfer.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/kv/region_copy.cuh"

namespace loopgauge::optimized {

// Memory of several regions, one after the other: device memory, and host memory of the same layout where a transport moves that.
struct RegionMemory {
  DeviceBuffer device;
  std::vector<std::byte> host;
  std::vector<std::size_t> offsets;            // by region of the set, multiples of kRegionAlignment
  std::size_t bytes = 0;                       // of all, alignment included
};

inline constexpr std::size_t kRegionAlignment = 256;

class CudaRun::HandoffSource final : public handoff::Source {
 public:
  explicit HandoffSource(CudaRun& run)
      : run_(run),
        positions_(run.allocator_, MemoryCategory::transfer_buffers),
        copies_(run.allocator_, MemoryCategory::transfer_buffers),
        ranges_(run.allocator_, MemoryCategory::transfer_buffers),
        sums_(run.allocator_, MemoryCategory::transfer_buffers) {}

  handoff::Descriptor describe(int request) const override;
  std::vector<handoff::ExportedRegion> export_ready(int request, std::size_t most_bytes) override;
  bool exported_all(int request) const override;
  void sent(int request, std::uint32_t region) override;
  void release(int request) override;
  std::int64_t regions_held() const;

 private:
  struct Copy {
    std::shared_ptr<RegionMemory> memory;      // shared with the regions that were copied at once
    std::size_t bytes = 0;
  };
  struct Exports {
    handoff::Descriptor descriptor;
    std::vector<handoff::Region> regions;
    std::set<std::uint32_t> waiting;           // not exported yet
    std::map<std::uint32_t, Copy> copies;      // exported and not sent
    std::size_t bytes = 0;                     // of the copies
  };
  // Regions of a request that are being copied.
  struct Batch {
    int request = -1;
    std::vector<std::uint32_t> numbers;
    std::vector<std::size_t> sizes;            // by region of the batch, as the next ones
    std::shared_ptr<RegionMemory> memory;
    PinnedArena arena;                         // what the copies are told, and what comes back:
    const std::uint64_t* checksums = nullptr;
    const std::byte* bytes = nullptr;          // for a transport that moves host memory
    Event done;
  };
  Exports& exports(int request);
  bool is_final(const RequestState& s, const handoff::Region& region) const;
  // The host knows which rows of the region's window execute its loop.
  bool rows_known(const RequestState& s, const handoff::Region& region) const;
  std::vector<std::uint32_t> take_ready(const RequestState& s, Exports& e, std::size_t most_bytes);
  void begin_copies(RequestState& s, Exports& e, std::vector<std::uint32_t> numbers);
  std::vector<handoff::ExportedRegion> collect(int request);
  std::shared_ptr<RegionMemory> take_memory(std::size_t bytes);

  CudaRun& run_;
  std::vector<DeviceBuffer> spare_;            // device memory of copies that were sent; outlives the copies
  std::map<int, Exports> exports_;
  GrowableBuffer positions_, copies_, ranges_, sums_;  // what a copy tells the device, and its checksums; used in the stream's order
  std::vector<std::unique_ptr<Batch>> under_way_;      // in the stream's order
  std::vector<std::unique_ptr<Batch>> spare_batches_;  // for their page-locked memory
};

class CudaRun::HandoffTarget final : public handoff::Target {
 public:
  explicit HandoffTarget(CudaRun& run) : run_(run) {}

  handoff::Descriptor expected(int request) const override;
  std::vector<handoff::Memory> reserve(int request, const handoff::Descriptor& descriptor) override;
  void activate(int request, std::span<const handoff::RegionSummary> summaries) override;
  void abort(int request) override;
  std::size_t transfer_bytes() const override { return bytes_; }
  std::size_t most_transfer_bytes() const override { return most_bytes_; }
  std::int64_t regions_held() const;

 private:
  struct Reservation {
    handoff::Descriptor descriptor;
    std::vector<handoff::Region> regions;
    RegionMemory memory;
    DeviceBuffer scratch;                      // for what activation tells the device: activation itself takes no memory but for logits
    int slot = -1;                             // of the K/V cache, with pages and blocks for the most rows that there can be; -1: the request's
  };
  KvLayout layout_for(const RequestState& s, const handoff::Descriptor& descriptor, std::span<const handoff::Region> regions) const;
  std::string arrival_fault(Reservation& reservation, std::span<const handoff::RegionSummary> summaries, handoff::ActivityMaps& maps);
  void forget(Reservation& reservation, std::span<const handoff::RegionSummary> summaries);
  void enter(RequestState& s, Reservation& reservation, const handoff::ActivityMaps& maps);
  void scatter(const RequestState& s, Reservation& reservation, const handoff::ActivityMaps& maps);
  static std::size_t held_bytes(const Reservation& reservation);

  CudaRun& run_;
  std::map<int, Reservation> reservations_;
  std::size_t bytes_ = 0, most_bytes_ = 0;
};

// Pages and blocks, not a bitmap or the hidden row.
bool is_kv(const handoff::Region& region);
// `positions`: of the rows of a region of rows, on the device.
RegionCopy copy_of(const handoff::Region& region, int slot, int rows, const std::int32_t* positions, std::byte* memory);

}  // namespace loopgauge::optimized
