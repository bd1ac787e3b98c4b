// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/reference_store.hpp"

#include <algorithm>
#include <string>

#include "models/error.hpp"

namespace loopgauge::optimized {
namespace {

std::string key_text(const ReferenceStore::Key& key) {
  return "request generation " + std::to_string(key.request_generation) + ", token incarnation " + std::to_string(key.token_incarnation);
}

}  // namespace

ReferenceStore::ReferenceStore(const KvShape& shape, int slots, int max_positions, DeviceAllocator& allocator)
    : shape_(shape), mask_pages_(static_cast<std::uint32_t>(page_count(max_positions))), entries_(static_cast<std::size_t>(slots)) {
  const std::size_t states = static_cast<std::size_t>(slots) * shape.layers * shape.heads;
  constexpr auto kCategory = MemoryCategory::attention_reference_state;
  selected_ = allocator.allocate_array<std::uint64_t>(kCategory, states * mask_pages_);
  statistics_ = allocator.allocate_array<float>(kCategory, states * 3);
  o_ref_ = allocator.allocate_array<float>(kCategory, states * shape.head_dim);
  c_ref_ = allocator.allocate_array<float>(kCategory, states * shape.head_dim);
}

int ReferenceStore::acquire(const Key& key) {
  for (std::size_t slot = 0; slot < entries_.size(); ++slot) {
    if (entries_[slot].state == State::retired) {
      entries_[slot] = {State::empty, key};
      return static_cast<int>(slot);
    }
  }
  throw InternalError("no free attention reference slot for " + key_text(key) + ": all " + std::to_string(entries_.size()) +
                      " belong to live tokens");
}

ReferenceStore::Entry& ReferenceStore::owned(int slot, const Key& key, const char* what) {
  if (slot < 0 || slot >= slots())
    throw InternalError(std::string("attention reference, ") + what + ": slot " + std::to_string(slot) + " does not exist");
  Entry& entry = entries_[static_cast<std::size_t>(slot)];
  if (entry.state == State::retired || entry.key != key) {
    throw InternalError(std::string("attention reference, ") + what + ": slot " + std::to_string(slot) + " does not belong to " +
                        key_text(key));
  }
  return entry;
}

void ReferenceStore::mark_source_ready(int slot, const Key& key) { owned(slot, key, "loop 2").state = State::source_ready; }

void ReferenceStore::mark_reusable(int slot, const Key& key) {
  Entry& entry = owned(slot, key, "selection");
  if (entry.state != State::source_ready) {
    throw InternalError("attention reference, selection: loop 2 was not executed for " + key_text(key));
  }
  entry.state = State::reusable;
}

void ReferenceStore::require_reusable(int slot, const Key& key) const {
  const Entry& entry = const_cast<ReferenceStore*>(this)->owned(slot, key, "correction");
  if (entry.state != State::reusable) {
    throw InternalError("sparse correction is unavailable: loop 2 was not executed for " + key_text(key));
  }
}

void ReferenceStore::release(int slot, const Key& key) { owned(slot, key, "release").state = State::retired; }

std::vector<DeviceRange> ReferenceStore::ranges(int slot) const {
  const ReferenceView arrays = view();
  const std::size_t heads = static_cast<std::size_t>(shape_.layers) * static_cast<std::size_t>(shape_.heads);
  const std::size_t first = reference_index(shape_, slot, 0, 0);
  const auto width = static_cast<std::size_t>(shape_.head_dim);
  std::vector<DeviceRange> ranges{{arrays.selected + first * mask_pages_, heads * mask_pages_ * sizeof(std::uint64_t)}};
  for (float* statistic : {arrays.maximum, arrays.sum, arrays.mass}) ranges.push_back({statistic + first, heads * sizeof(float)});
  for (float* vector : {arrays.o_ref, arrays.c_ref}) ranges.push_back({vector + first * width, heads * width * sizeof(float)});
  return ranges;
}

int ReferenceStore::in_use() const {
  return static_cast<int>(
      std::count_if(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.state != State::retired; }));
}

ReferenceView ReferenceStore::view() const {
  const std::size_t states = entries_.size() * static_cast<std::size_t>(shape_.layers) * static_cast<std::size_t>(shape_.heads);
  auto* statistics = const_cast<float*>(statistics_.as<float>());
  return {const_cast<std::uint64_t*>(selected_.as<std::uint64_t>()),
          statistics,
          statistics + states,
          statistics + 2 * states,
          const_cast<float*>(o_ref_.as<float>()),
          const_cast<float*>(c_ref_.as<float>()),
          mask_pages_};
}

}  // namespace loopgauge::optimized
