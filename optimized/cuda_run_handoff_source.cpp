// SPDX-License-Identifier: Apache-2.0
// The prefill side of a handoff: what has become final of a prompt, in the layout of the handoff.
#include <algorithm>
#include <bit>

#include "models/error.hpp"
#include "optimized/cuda_run_handoff.hpp"
#include "optimized/runtime/device_guard.hpp"

namespace loopgauge::optimized {

using handoff::Region;
using handoff::RegionKind;

handoff::Source* CudaRun::handoff_source() { return source_.get(); }

bool is_kv(const Region& region) { return !is_bitmap(region) && region.kind != RegionKind::final_hidden; }

RegionCopy copy_of(const Region& region, int slot, int rows, const std::int32_t* positions, std::byte* memory) {
  RegionCopy copy;
  copy.content = region.kind == RegionKind::rows         ? RegionContent::rows
                 : region.kind == RegionKind::parameters ? RegionContent::parameters
                                                         : RegionContent::payload;
  copy.request = slot;
  copy.begin = region.positions.begin;
  copy.loop = region.loop;
  copy.rows = rows;
  copy.positions = positions;
  copy.region = memory;
  return copy;
}

handoff::Descriptor CudaRun::HandoffSource::describe(int request) const {
  const RequestState& s = run_.requests_.at(static_cast<std::size_t>(request));
  return handoff::make_descriptor(run_.model_, run_.model_sha256_, run_.config_, s.index, *s.request, Profile::declared);
}

CudaRun::HandoffSource::Exports& CudaRun::HandoffSource::exports(int request) {
  const auto [entry, is_new] = exports_.try_emplace(request);
  if (is_new) {
    entry->second.descriptor = describe(request);
    entry->second.regions = handoff::regions_of(entry->second.descriptor);
    for (std::uint32_t i = 0; i < entry->second.regions.size(); ++i) entry->second.waiting.insert(i);
  }
  return entry->second;
}

bool CudaRun::HandoffSource::is_final(const RequestState& s, const Region& region) const {
  const int done = s.completed_loops.at(static_cast<std::size_t>(region.positions.begin / run_.config_.window()));
  switch (region.kind) {
    case RegionKind::validity:
      return done == run_.config_.loops();
    case RegionKind::activity:
    case RegionKind::rows:
      return done >= region.loop;
    case RegionKind::base_payload:
    case RegionKind::residual_payload:
    case RegionKind::parameters:
      return run_.config_.q().policy == EncodingPolicy::streaming ? done >= region.loop : s.encoded >= region.positions.end;
    case RegionKind::final_hidden:
      return s.committed == s.prompt_length;
  }
  throw InternalError("unknown kind of region");
}

bool CudaRun::HandoffSource::rows_known(const RequestState& s, const Region& region) const {
  if (region.loop <= 2 || !run_.config_.selects_tokens()) return true;
  return !s.active[static_cast<std::size_t>(region.loop - 1)][static_cast<std::size_t>(region.positions.begin / run_.config_.window())].empty();
}

// Regions that can be copied now, up to `most_bytes` with what is held already.
std::vector<std::uint32_t> CudaRun::HandoffSource::take_ready(const RequestState& s, Exports& e, std::size_t most_bytes) {
  const bool complete = s.committed == s.prompt_length;
  bool waited = false;
  std::vector<std::uint32_t> ready;
  std::size_t bytes = e.bytes;
  for (auto next = e.waiting.begin(); next != e.waiting.end();) {
    const Region& region = e.regions[*next];
    if (!is_final(s, region) || (!complete && !rows_known(s, region))) {
      ++next;
      continue;
    }
    if ((!e.copies.empty() || !ready.empty()) && bytes + region.capacity > most_bytes) break;
    if (!waited && !rows_known(s, region)) {
      run_.settle();
      waited = true;
    }
    bytes += region.capacity;
    ready.push_back(*next);
    next = e.waiting.erase(next);
  }
  return ready;
}

std::vector<handoff::ExportedRegion> CudaRun::HandoffSource::export_ready(int request, std::size_t most_bytes) {
  const DeviceGuard guard(run_.device_);
  RequestState& s = run_.requests_.at(static_cast<std::size_t>(request));
  if (s.slot >= 0) {
    Exports& e = exports(request);
    if (std::vector<std::uint32_t> ready = take_ready(s, e, most_bytes); !ready.empty()) begin_copies(s, e, std::move(ready));
  }
  return collect(request);
}

// One launch for all regions, and one for their checksums.
void CudaRun::HandoffSource::begin_copies(RequestState& s, Exports& e, std::vector<std::uint32_t> numbers) {
  std::unique_ptr<Batch> batch = spare_batches_.empty() ? std::make_unique<Batch>() : std::move(spare_batches_.back());
  if (!spare_batches_.empty()) spare_batches_.pop_back();
  PinnedArena& arena = batch->arena;
  run_.kv_.upload(arena);
  const std::span<const ActivityMap> maps = run_.kv_.maps(s.slot);
  std::vector<std::int32_t> positions;          // of rows that are not encoded, region by region
  std::vector<std::size_t> sizes, offsets, first;
  std::vector<int> counts;                      // rows that executed the region's loop
  std::size_t total = 0;
  for (const std::uint32_t number : numbers) {
    const Region& region = e.regions[number];
    first.push_back(positions.size());
    counts.push_back(0);
    for (int position = region.positions.begin; is_kv(region) && position < region.positions.end; ++position) {
      const ActivityMap& map = maps[static_cast<std::size_t>(position / kPageTokens)];
      if (((map.active[region.loop - 1] >> (position % kPageTokens)) & 1u) == 0) continue;
      ++counts.back();
      if (region.kind == RegionKind::rows) positions.push_back(position);
    }
    sizes.push_back(handoff::region_bytes(e.descriptor, region, counts.back()));
    offsets.push_back(total);
    total += (sizes.back() + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  }
  const std::shared_ptr<RegionMemory> memory = take_memory(total);
  memory->offsets = offsets;

  std::byte* const base = memory->device.as<std::byte>();
  std::vector<RegionCopy> copies;
  std::vector<RegionBytes> regions;
  const std::int32_t* device_positions = positions_.upload<std::int32_t>(positions, arena, run_.stream_);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const Region& region = e.regions[numbers[i]];
    std::byte* target = base + offsets[i];
    regions.push_back({target, sizes[i]});
    if (is_bitmap(region)) {
      std::vector<std::uint64_t> words;
      const int loop = std::max(1, region.loop);
      for (int page = region.positions.begin / kPageTokens; page < page_count(region.positions.end); ++page)
        words.push_back(maps[static_cast<std::size_t>(page)].active[loop - 1]);
      copy_to_device<std::uint64_t>(reinterpret_cast<std::uint64_t*>(target), words, arena, run_.stream_);
    } else if (region.kind == RegionKind::final_hidden) {
      LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, run_.decode_state(s), sizes[i], cudaMemcpyDeviceToDevice, run_.stream_));
    } else if (counts[i] > 0) {
      copies.push_back(copy_of(region, s.slot, counts[i], device_positions + first[i], target));
    }
  }
  const RegionCopy* tasks = copies_.upload<RegionCopy>(copies, arena, run_.stream_);
  const RegionBytes* ranges = ranges_.upload<RegionBytes>(regions, arena, run_.stream_);
  auto* sums = sums_.reserve<std::uint64_t>(regions.size());
  gather_regions(run_.kv_.view(), tasks, static_cast<int>(copies.size()), run_.stream_);
  region_checksums(ranges, sums, static_cast<int>(regions.size()), run_.stream_);
  const auto bring = [&]<class T>(const T* source, std::size_t count) {
    T* target = arena.take<T>(count);
    if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, count * sizeof(T), cudaMemcpyDeviceToHost, run_.stream_));
    return target;
  };
  batch->checksums = bring(sums, regions.size());
  batch->bytes = run_.options_.region_memory == handoff::MemoryPlace::host ? bring(base, total) : nullptr;
  batch->done.record(run_.stream_);
  batch->request = s.index;
  batch->numbers = std::move(numbers);
  batch->sizes = std::move(sizes);
  batch->memory = memory;
  for (std::size_t i = 0; i < batch->numbers.size(); ++i) {
    e.copies[batch->numbers[i]] = {memory, batch->sizes[i]};
    e.bytes += batch->sizes[i];
  }
  under_way_.push_back(std::move(batch));
}

// Of the request, what has been copied. Synchronous execution has nothing in flight that waiting would hold up.
std::vector<handoff::ExportedRegion> CudaRun::HandoffSource::collect(int request) {
  std::vector<handoff::ExportedRegion> exported;
  for (auto next = under_way_.begin(); next != under_way_.end();) {
    Batch& batch = **next;
    if (batch.request != request) {
      ++next;
      continue;
    }
    if (!run_.asynchronous()) batch.done.synchronize();
    const cudaError_t status = cudaEventQuery(batch.done.get());
    if (status == cudaErrorNotReady) break;
    LOOPGAUGE_CUDA_CHECK(status);
    RegionMemory& memory = *batch.memory;
    if (batch.bytes != nullptr) {
      memory.host.assign(batch.bytes, batch.bytes + memory.bytes);
      spare_.push_back(std::move(memory.device));
    }
    for (std::size_t i = 0; i < batch.numbers.size(); ++i) {
      std::byte* data = (batch.bytes != nullptr ? memory.host.data() : memory.device.as<std::byte>()) + memory.offsets[i];
      exported.push_back({batch.numbers[i], {data, batch.sizes[i], batch.bytes != nullptr ? -1 : run_.device_}, batch.checksums[i]});
    }
    batch.arena.reset();
    batch.memory.reset();
    spare_batches_.push_back(std::move(*next));
    next = under_way_.erase(next);
  }
  return exported;
}

// Device memory that no copy uses any more is used again: freeing it would wait for the device.
std::shared_ptr<RegionMemory> CudaRun::HandoffSource::take_memory(std::size_t bytes) {
  auto memory = std::shared_ptr<RegionMemory>(new RegionMemory, [this](RegionMemory* done) {
    if (done->device) spare_.push_back(std::move(done->device));
    delete done;
  });
  memory->bytes = bytes;
  const auto fitting = std::find_if(spare_.begin(), spare_.end(), [&](const DeviceBuffer& buffer) { return buffer.size_bytes() >= bytes; });
  if (fitting != spare_.end()) {
    memory->device = std::move(*fitting);
    spare_.erase(fitting);
  } else {
    spare_.clear();  // smaller ones
    memory->device = run_.allocator_.allocate_shareable(MemoryCategory::transfer_buffers, std::bit_ceil(std::max(bytes, kRegionAlignment)));
  }
  return memory;
}

bool CudaRun::HandoffSource::exported_all(int request) const {
  const auto found = exports_.find(request);
  const auto copies = [&](const std::unique_ptr<Batch>& batch) { return batch->request == request; };
  return found != exports_.end() && found->second.waiting.empty() && std::none_of(under_way_.begin(), under_way_.end(), copies);
}

void CudaRun::HandoffSource::sent(int request, std::uint32_t region) {
  Exports& e = exports(request);
  const auto found = e.copies.find(region);
  if (found == e.copies.end()) throw InternalError("a region was sent that was not exported");
  e.bytes -= found->second.bytes;
  e.copies.erase(found);
}

void CudaRun::HandoffSource::release(int request) {
  const DeviceGuard guard(run_.device_);
  if (std::any_of(under_way_.begin(), under_way_.end(), [&](const auto& batch) { return batch->request == request; })) {
    run_.stream_.synchronize();
    collect(request);
  }
  exports_.erase(request);
  if (exports_.empty()) spare_.clear();
  RequestState& s = run_.requests_.at(static_cast<std::size_t>(request));
  if (s.slot < 0) return;
  run_.stream_.synchronize();  // what was issued for it still reads its storage
  run_.release_storage(s);
  run_.kv_.trim();
  s.handed_over = s.finished = true;
}

std::int64_t CudaRun::HandoffSource::regions_held() const {
  std::int64_t count = 0;
  for (const auto& [_, e] : exports_) count += static_cast<std::int64_t>(e.copies.size());
  return count;
}

}  // namespace loopgauge::optimized
