// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/row_divergence.hpp"

#include <bit>
#include <cmath>
#include <tuple>

namespace loopgauge::harness {
namespace {

RowId id_of(const TapPoint& point) { return {point.request, point.position, point.loop, point.layer, std::string(point.operation), 0}; }

bool same_place(const RowId& id, const TapPoint& point) {
  return id.request == point.request && id.position == point.position && id.loop == point.loop && id.layer == point.layer &&
         id.operation == point.operation;
}

}  // namespace

bool RowId::operator<(const RowId& other) const {
  return std::tie(request, position, loop, layer, operation, occurrence) <
         std::tie(other.request, other.position, other.loop, other.layer, other.operation, other.occurrence);
}

std::uint64_t row_digest(std::span<const float> values) {
  // Each step is a bijection of the state for a given word and of the word for a given state, so a single changed element always
  // changes the digest; several changes collide with probability 2^-64.
  std::uint64_t state = 0x9e3779b97f4a7c15u ^ values.size();
  for (const float value : values) {
    const std::uint32_t word = std::isnan(value) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(value);
    state = (state ^ word) * 0xff51afd7ed558ccdu;
    state ^= state >> 32;
  }
  return state;
}

void RowDigests::record(const TapPoint& point, std::span<const float> values) {
  RowId id = id_of(point);
  const Entry entry{row_digest(values), static_cast<std::int64_t>(order_.size()), point.submission};
  auto [at, is_new] = entries_.try_emplace(id, entry);
  while (!is_new) {
    ++id.occurrence;
    std::tie(at, is_new) = entries_.try_emplace(id, entry);
  }
  order_.push_back(&at->first);
}

void RowComparer::consider(double order, const DivergentRow& row) {
  if (best_ && best_order_ <= order) return;
  best_order_ = order;
  best_ = row;
}

void RowComparer::record(const TapPoint& point, std::span<const float> values) {
  RowId id = id_of(point);
  auto at = expected_.entries_.find(id);
  while (at != expected_.entries_.end() && at->second.seen) {
    ++id.occurrence;
    at = expected_.entries_.find(id);
  }
  if (at == expected_.entries_.end()) {
    // Placed right behind the row that the other run matched last: nothing earlier is known to differ.
    consider(last_order_ + 0.5, {id, DivergentRow::Kind::only_actual, -1, point.submission});
    return;
  }
  RowDigests::Entry& entry = at->second;
  entry.seen = true;
  ++compared_;
  last_order_ = static_cast<double>(entry.index);
  if (entry.digest == row_digest(values)) return;
  ++different_;
  consider(last_order_, {id, DivergentRow::Kind::values, entry.submission, point.submission});
}

std::optional<DivergentRow> RowComparer::first() {
  for (const RowId* id : expected_.order_) {
    const RowDigests::Entry& entry = expected_.entries_.at(*id);
    if (entry.seen) continue;
    consider(static_cast<double>(entry.index), {*id, DivergentRow::Kind::only_expected, entry.submission, -1});
    break;
  }
  return best_;
}

void RowCapture::record(const TapPoint& point, std::span<const float> values) {
  if (found_ || !same_place(id_, point)) return;
  if (seen_++ != id_.occurrence) return;
  found_ = true;
  width_ = values.size();
  values_.assign(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(std::min(limit_, values.size())));
}

}  // namespace loopgauge::harness
