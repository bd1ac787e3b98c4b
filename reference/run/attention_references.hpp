// SPDX-License-Identifier: Apache-2.0
// The attention references of the decode rows that are on their way (S-SDA-9..11). Slots are few and are used again: what a slot holds
// belongs to one incarnation of a token of one generation of a request, and is of no use to anybody else.
#pragma once

#include <vector>

#include "models/error.hpp"
#include "reference/ops/sparse_decode.hpp"

namespace loopgauge::reference {

template <class Real>
struct AttentionReference {
  enum class State { empty, source_ready, reusable, retired };
  State state = State::retired;
  int generation = -1;
  int incarnation = -1;
  std::vector<HeadReference<Real>> heads;  // [layers * heads]

  bool belongs_to(int request_generation, int token_incarnation) const {
    return generation == request_generation && incarnation == token_incarnation;
  }
};

template <class Real>
class AttentionReferencePool {
 public:
  AttentionReferencePool(int heads_of_all_layers, int head_dim) : heads_(heads_of_all_layers), head_dim_(head_dim) {}

  // A free slot for the token, in state `empty`. Its content is whatever its last owner left.
  int acquire(int generation, int incarnation) {
    if (free_.empty()) {
      slots_.emplace_back();
      free_.push_back(static_cast<int>(slots_.size()) - 1);
      wipe(free_.back());
    }
    const int slot = free_.back();
    free_.pop_back();
    AttentionReference<Real>& reference = at(slot);
    reference.state = AttentionReference<Real>::State::empty;
    reference.generation = generation;
    reference.incarnation = incarnation;
    return slot;
  }

  AttentionReference<Real>& at(int slot) { return slots_.at(static_cast<std::size_t>(slot)); }

  void retire(int slot) {
    if (at(slot).state == AttentionReference<Real>::State::retired) throw InternalError("an attention reference is retired twice");
    at(slot).state = AttentionReference<Real>::State::retired;
    free_.push_back(slot);
  }

  // Destroys what the slot holds: one key and no mass, which nobody reads but a planted fault.
  void wipe(int slot) {
    const std::vector<Real> zeros(static_cast<std::size_t>(head_dim_), Real{0});
    at(slot).heads.assign(static_cast<std::size_t>(heads_), HeadReference<Real>{{0}, 0, zeros, zeros});
  }

  int in_use() const {
    int count = 0;
    for (const auto& slot : slots_) count += slot.state != AttentionReference<Real>::State::retired;
    return count;
  }

 private:
  int heads_, head_dim_;
  std::vector<AttentionReference<Real>> slots_;
  std::vector<int> free_;  // last in, first out, so that slots are used again at once
};

}  // namespace loopgauge::reference
