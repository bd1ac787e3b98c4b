// SPDX-License-Identifier: Apache-2.0
// Attention reference state of live decode tokens: what loop 2 leaves for loops 3 and 4. SPEC.md: "Sparse decode attention".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "optimized/kv/kv_layout.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

// Device arrays by reference slot (fastest axis last). Selected keys are one 64-bit mask per (slot, layer, head, page), bit i = position
// 64 * page + i; masks of pages beyond the token's own are not written and not read.
struct ReferenceView {
  std::uint64_t* selected;  // [slots][layers][heads][mask_pages]
  float* maximum;           // [slots][layers][heads]            largest scaled logit
  float* sum;               // [slots][layers][heads]            sum of exp(logit - maximum)
  float* mass;              // [slots][layers][heads]            m
  float* o_ref;             // [slots][layers][heads][head_dim]
  float* c_ref;             // [slots][layers][heads][head_dim]
  std::uint32_t mask_pages;
};

// Offset of (slot, layer, head) in units of one head's state.
LOOPGAUGE_HOST_DEVICE std::size_t reference_index(const KvShape& shape, int slot, int layer, int head) {
  return (static_cast<std::size_t>(slot) * shape.layers + layer) * shape.heads + head;
}

// One slot per live token, keyed by (request generation, token incarnation): position alone is not identity.
// States: empty -> source_ready (loop 2 submitted) -> reusable (loop 3 may read) -> retired (released). The device work is ordered on one
// stream, so the states are what the host has enqueued. Every misuse is an InternalError, never stale data.
class ReferenceStore {
 public:
  enum class State { empty, source_ready, reusable, retired };
  struct Key {
    std::uint64_t request_generation = 0;
    std::uint64_t token_incarnation = 0;
    bool operator==(const Key&) const = default;
  };

  // `slots` live tokens of at most `max_positions` positions.
  ReferenceStore(const KvShape& shape, int slots, int max_positions, DeviceAllocator& allocator);

  int acquire(const Key& key);  // empty or retired slot -> empty with this key
  void mark_source_ready(int slot, const Key& key);
  void mark_reusable(int slot, const Key& key);  // selection and C_ref are enqueued as well
  // The slot of `key` if it is reusable; throws InternalError naming what is missing or stale otherwise.
  void require_reusable(int slot, const Key& key) const;
  void release(int slot, const Key& key);

  // What the slot holds on the device, one contiguous range for each array: for snapshots.
  std::vector<DeviceRange> ranges(int slot) const;

  int slots() const { return static_cast<int>(entries_.size()); }
  int in_use() const;
  State state(int slot) const { return entries_.at(slot).state; }
  ReferenceView view() const;

 private:
  struct Entry {
    State state = State::retired;
    Key key;
  };
  Entry& owned(int slot, const Key& key, const char* what);

  KvShape shape_;
  std::uint32_t mask_pages_;
  std::vector<Entry> entries_;
  DeviceBuffer selected_, statistics_, o_ref_, c_ref_;
};

}  // namespace loopgauge::optimized
