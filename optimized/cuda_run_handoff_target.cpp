// SPDX-License-Identifier: Apache-2.0
// The decode side of a handoff: room for what is to come, and the request that it becomes.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "models/error.hpp"
#include "models/handoff/planted_fault.hpp"
#include "optimized/cuda_run_handoff.hpp"
#include "optimized/runtime/device_guard.hpp"

namespace loopgauge::optimized {

using handoff::HandoffError;
using handoff::Region;
using handoff::RegionKind;

namespace {

// The parts of a reservation's scratch memory.
struct Scratch {
  // With base null: how many bytes there are.
  Scratch(void* base, std::size_t regions, std::size_t rows) {
    const auto take = [&](auto*& part, std::size_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(reinterpret_cast<std::uintptr_t>(base) + bytes);
      bytes += (count * sizeof *part + 15) / 16 * 16;
    };
    take(copies, regions);
    take(ranges, regions);
    take(sums, regions);
    take(positions, rows);
  }
  RegionCopy* copies = nullptr;
  RegionBytes* ranges = nullptr;
  std::uint64_t* sums = nullptr;
  std::int32_t* positions = nullptr;
  std::size_t bytes = 0;
};

// At most: of all regions of rows.
std::size_t positions_of_rows(std::span<const Region> regions) {
  std::size_t count = 0;
  for (const Region& region : regions) count += region.kind == RegionKind::rows ? static_cast<std::size_t>(region.most_rows) : 0;
  return count;
}

}  // namespace

handoff::Target* CudaRun::handoff_target() { return target_.get(); }

handoff::Descriptor CudaRun::HandoffTarget::expected(int request) const {
  if (request < 0 || static_cast<std::size_t>(request) >= run_.requests_.size()) {
    throw HandoffError("request " + std::to_string(request) + " is none of the " + std::to_string(run_.requests_.size()) + " of trace " +
                       run_.trace_.name);
  }
  const RequestState& s = run_.requests_[static_cast<std::size_t>(request)];
  return handoff::make_descriptor(run_.model_, run_.model_sha256_, run_.config_, s.index, *s.request, Profile::declared);
}

// Pages and blocks for the most rows that the regions can have. Where E cuts a selection window in two its block keeps room for rows of late loops
// that may lie in the other part; pages without a row go back when the activity is known.
KvLayout CudaRun::HandoffTarget::layout_for(const RequestState& s, const handoff::Descriptor& descriptor, std::span<const Region> regions) const {
  KvLayout layout;
  layout.max_positions = s.capacity;
  layout.maps.assign(static_cast<std::size_t>(page_count(s.capacity)), ActivityMap{});
  layout.resident.assign(layout.maps.size(), 0);
  for (const Region& region : regions) {
    if (region.kind == RegionKind::base_payload) layout.blocks.push_back({region.positions, {}});
    if (region.kind == RegionKind::base_payload || region.kind == RegionKind::residual_payload)
      layout.blocks.back().rows[static_cast<std::size_t>(region.loop - 1)] = static_cast<std::uint32_t>(region.most_rows);
  }
  // Payload regions stand block by block, in ascending order of loops.
  for (const KvLayout::Block& block : layout.blocks) {
    for (int page = block.positions.begin / kPageTokens; page < page_count(block.positions.end); ++page)
      std::copy(block.rows.begin(), block.rows.end(), layout.maps[static_cast<std::size_t>(page)].rows);
  }
  const std::uint8_t all_loops = static_cast<std::uint8_t>((1u << run_.config_.loops()) - 1u);
  for (int page = descriptor.encoded_frontier / kPageTokens; descriptor.encoded_frontier < s.prompt_length && page < page_count(s.prompt_length); ++page)
    layout.resident[static_cast<std::size_t>(page)] = all_loops;
  return layout;
}

std::vector<handoff::Memory> CudaRun::HandoffTarget::reserve(int request, const handoff::Descriptor& descriptor) {
  const DeviceGuard guard(run_.device_);
  if (const std::string text = first_difference(descriptor, expected(request)); !text.empty()) throw HandoffError("handoff refused: " + text);
  const RequestState& s = run_.requests_.at(static_cast<std::size_t>(request));
  if (s.slot >= 0 || s.finished || reservations_.contains(request)) throw HandoffError("handoff refused: " + s.name() + " is here already");
  Reservation reservation;
  reservation.descriptor = descriptor;
  reservation.regions = handoff::regions_of(descriptor);
  RegionMemory& memory = reservation.memory;
  for (const Region& region : reservation.regions) {
    memory.offsets.push_back(memory.bytes);
    memory.bytes += (region.capacity + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  }
  const bool on_host = run_.options_.region_memory == handoff::MemoryPlace::host;
  memory.device = run_.allocator_.allocate_shareable(MemoryCategory::transfer_buffers, memory.bytes);
  if (on_host) memory.host.resize(memory.bytes);
  const std::size_t rows = positions_of_rows(reservation.regions);
  reservation.scratch = run_.allocator_.allocate(
      MemoryCategory::transfer_buffers, Scratch(nullptr, reservation.regions.size(), rows).bytes);
  std::byte* const base = on_host ? memory.host.data() : memory.device.as<std::byte>();
  std::vector<handoff::Memory> regions;
  for (std::size_t i = 0; i < reservation.regions.size(); ++i)
    regions.push_back({base + memory.offsets[i], reservation.regions[i].capacity, on_host ? -1 : run_.device_});
  const KvLayout layout = layout_for(s, descriptor, reservation.regions);
  // From here on the entry owns what there is: whatever fails gives it back.
  Reservation& entry = reservations_.emplace(request, std::move(reservation)).first->second;
  bytes_ += held_bytes(entry);
  try {
    entry.slot = run_.kv_.open_request(layout);
    run_.stream_.synchronize();  // whoever writes next does not follow this stream
  } catch (...) {
    abort(request);
    throw;
  }
  most_bytes_ = std::max(most_bytes_, bytes_);
  return regions;
}

// Checksums are formed where the bytes will be read.
std::string CudaRun::HandoffTarget::arrival_fault(Reservation& reservation, std::span<const handoff::RegionSummary> summaries,
                                                  handoff::ActivityMaps& maps) {
  if (std::string fault = size_fault(reservation.regions, summaries); !fault.empty()) return fault;
  RegionMemory& memory = reservation.memory;
  std::byte* const base = memory.device.as<std::byte>();
  if (!memory.host.empty()) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(base, memory.host.data(), memory.bytes, cudaMemcpyHostToDevice, run_.stream_));
  const std::size_t count = reservation.regions.size();
  std::vector<RegionBytes> ranges;
  for (std::size_t i = 0; i < count; ++i) ranges.push_back({base + memory.offsets[i], summaries[i].bytes});
  const Scratch scratch(reservation.scratch.data(), count, 0);
  copy_to_device<RegionBytes>(scratch.ranges, ranges, run_.ticket_->arena, run_.stream_);
  region_checksums(scratch.ranges, scratch.sums, static_cast<int>(count), run_.stream_);
  std::vector<std::vector<std::byte>> bitmaps;
  for (std::size_t i = 0; i < count; ++i) {
    const bool wanted = is_bitmap(reservation.regions[i]);
    bitmaps.push_back(wanted ? run_.read(base + memory.offsets[i], static_cast<std::size_t>(summaries[i].bytes)) : std::vector<std::byte>{});
  }
  const std::vector<std::uint64_t> checksums = run_.read(scratch.sums, count);
  const std::vector<std::span<const std::byte>> views(bitmaps.begin(), bitmaps.end());
  return handoff::arrival_fault(reservation.descriptor, reservation.regions, summaries, checksums, views, maps);
}

void CudaRun::HandoffTarget::activate(int request, std::span<const handoff::RegionSummary> summaries) {
  const DeviceGuard guard(run_.device_);
  RequestState& s = run_.requests_.at(static_cast<std::size_t>(request));
  Reservation& reservation = reservations_.at(request);
  handoff::ActivityMaps maps(reservation.descriptor);
  if (const std::string fault = arrival_fault(reservation, summaries, maps); !fault.empty()) {
    throw HandoffError("handoff of " + s.name() + " not activated: " + fault);
  }
  forget(reservation, summaries);
  maps = handoff::planted_activity(run_.options_.fault, reservation.descriptor, reservation.regions, maps);
  enter(s, reservation, maps);
  scatter(s, reservation, maps);
  run_.pending_emissions_.push_back({&s, s.prompt_length - 1, run_.config_.loops()});
  run_.emit_pending();
  run_.activated_ = true;
  run_.stream_.synchronize();  // the regions have been read
  bytes_ -= held_bytes(reservation);
  reservations_.erase(request);
}

// The planted faults: what a receiver without checks would go on with.
void CudaRun::HandoffTarget::forget(Reservation& reservation, std::span<const handoff::RegionSummary> summaries) {
  RegionMemory& memory = reservation.memory;
  std::byte* const base = memory.device.as<std::byte>();
  for (const auto& [region, begin] : handoff::forgotten_bytes(run_.options_.fault, reservation.regions, summaries)) {
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(base + memory.offsets[region] + begin, 0, reservation.regions[region].capacity - begin, run_.stream_));
  }
  for (const auto& [from, to, bytes] : handoff::repeated_bytes(run_.options_.fault, reservation.regions)) {
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(base + memory.offsets[to], base + memory.offsets[from], bytes, cudaMemcpyDeviceToDevice, run_.stream_));
  }
}

// As if the prompt had run here.
void CudaRun::HandoffTarget::enter(RequestState& s, Reservation& reservation, const handoff::ActivityMaps& maps) {
  KvCache& kv = run_.kv_;
  const int loops = run_.config_.loops(), window = run_.config_.window();
  const int windows = static_cast<int>(s.windows.size());
  s.slot = std::exchange(reservation.slot, -1);  // one owner, whatever fails from here on
  s.generation = run_.generations_++;
  s.committed = s.prompt_length;
  s.encoded = reservation.descriptor.encoded_frontier;
  s.complete_windows = windows;
  std::fill(s.begun_loops.begin(), s.begun_loops.end(), loops);
  std::fill(s.completed_loops.begin(), s.completed_loops.end(), loops);
  for (int loop = 3; run_.config_.selects_tokens() && loop <= loops; ++loop) {
    for (int w = 0; w < windows; ++w)
      s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(w)] = maps.rows(loop, window_range(w, s.prompt_length, window));
  }
  for (int loop = 1; loop <= loops; ++loop) kv.set_active(s.slot, loop, maps.rows(loop, {0, s.prompt_length}));
  for (const PositionRange& block : block_cuts(run_.config_, s.prompt_length, 0, s.encoded)) kv.prepare_encode(s.slot, block, 1, loops);
  for (int loop = 3; loop <= loops; ++loop) kv.release_unused(s.slot, loop, {s.encoded, s.prompt_length / kPageTokens * kPageTokens});
  kv.upload(run_.ticket_->arena);
}

void CudaRun::HandoffTarget::scatter(const RequestState& s, Reservation& reservation, const handoff::ActivityMaps& maps) {
  std::byte* const base = reservation.memory.device.as<std::byte>();
  const Scratch scratch(reservation.scratch.data(), reservation.regions.size(), positions_of_rows(reservation.regions));
  std::vector<std::int32_t> positions;
  std::vector<RegionCopy> copies;
  for (std::size_t i = 0; i < reservation.regions.size(); ++i) {
    const Region& region = reservation.regions[i];
    std::byte* source = base + reservation.memory.offsets[i];
    if (region.kind == RegionKind::final_hidden) {
      LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(run_.decode_state(s), source, region.capacity, cudaMemcpyDeviceToDevice, run_.stream_));
    }
    if (!is_kv(region)) continue;
    const std::vector<std::int32_t> rows = maps.rows(region.loop, region.positions);
    if (!rows.empty()) copies.push_back(copy_of(region, s.slot, static_cast<int>(rows.size()), scratch.positions + positions.size(), source));
    if (region.kind == RegionKind::rows) positions.insert(positions.end(), rows.begin(), rows.end());
  }
  PinnedArena& arena = run_.ticket_->arena;
  copy_to_device<std::int32_t>(scratch.positions, positions, arena, run_.stream_);
  copy_to_device<RegionCopy>(scratch.copies, copies, arena, run_.stream_);
  scatter_regions(run_.kv_.view(), scratch.copies, static_cast<int>(copies.size()), run_.stream_);
}

void CudaRun::HandoffTarget::abort(int request) {
  const DeviceGuard guard(run_.device_);
  const auto found = reservations_.find(request);
  if (found == reservations_.end()) return;
  const int slot = found->second.slot;
  bytes_ -= held_bytes(found->second);
  reservations_.erase(found);
  if (slot < 0) return;  // it was not opened, or is the request's
  run_.kv_.close_request(slot);
  run_.kv_.trim();
}

std::size_t CudaRun::HandoffTarget::held_bytes(const Reservation& reservation) {
  return reservation.memory.device.size_bytes() + reservation.memory.host.size() + reservation.scratch.size_bytes();
}

std::int64_t CudaRun::HandoffTarget::regions_held() const {
  std::int64_t count = 0;
  for (const auto& [_, reservation] : reservations_) count += static_cast<std::int64_t>(reservation.regions.size());
  return count;
}

}  // namespace loopgauge::optimized
