// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/row_divergence.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

namespace loopgauge::harness {
namespace {

RowId id_of(const TapPoint& point) { return {point.request, point.position, point.loop, point.layer, std::string(point.operation), 0}; }

// A bijection without pattern (the finalizer of MurmurHash3).
std::uint64_t mixed(std::uint64_t state) {
  state = (state ^ (state >> 33)) * 0xff51afd7ed558ccdu;
  state = (state ^ (state >> 33)) * 0xc4ceb9fe1a85ec53u;
  return state ^ (state >> 33);
}

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

void CellDigests::record(const TapPoint& point, std::span<const float> values) {
  const Place place = Place::of(point);
  const auto [at, is_new] = cells_.try_emplace(place);
  Cell& cell = at->second;
  if (is_new) cell.first = rows_;
  cell.last = rows_++;
  ++cell.rows;
  std::uint64_t salt = static_cast<std::uint64_t>(point.layer + 1);
  for (const char c : point.operation) salt = (salt ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  cell.sum += mixed(row_digest(values) ^ mixed(salt));
  if (expected_ == nullptr) return;
  const auto known = expected_->cells_.find(place);
  const bool surplus = known == expected_->cells_.end() || cell.rows > known->second.rows;
  if (surplus && !cell.anchor) cell.anchor = known_;
  if (known != expected_->cells_.end()) known_ = place;
}

CellComparison::CellComparison(const CellDigests& expected, const CellDigests& actual, bool work_may_differ) {
  using Cell = CellDigests::Cell;
  struct Suspect {
    Place place;
    std::int64_t first;
    std::optional<Place> anchor;
  };
  std::vector<Suspect> suspects;
  std::int64_t bound = std::numeric_limits<std::int64_t>::max();  // the first row that differs is no later
  const auto suspect = [&](const Place& place, std::int64_t first, std::int64_t last, const std::optional<Place>& anchor) {
    ++different_;
    bound = std::min(bound, last);
    suspects.push_back({place, first, anchor});
  };
  for (const auto& [place, e] : expected.cells_) {
    ++places_;
    const auto found = actual.cells_.find(place);
    if (found == actual.cells_.end()) {
      if (!work_may_differ) suspect(place, e.first, e.last, {});
      continue;
    }
    const Cell& a = found->second;
    compared_ += std::min(e.rows, a.rows);
    const bool same_values = e.rows == a.rows ? e.sum == a.sum
                                              : e.sum * static_cast<std::uint64_t>(a.rows) == a.sum * static_cast<std::uint64_t>(e.rows);
    if (same_values && (work_may_differ || e.rows == a.rows)) continue;
    suspect(place, e.first, e.last, a.anchor);
  }
  for (const auto& [place, a] : actual.cells_) {
    if (expected.cells_.contains(place)) continue;
    ++places_;
    if (work_may_differ) continue;
    // Its rows come right behind those of the anchor; before everything without one.
    const Cell* const anchor = a.anchor ? &expected.cells_.at(*a.anchor) : nullptr;
    suspect(place, anchor == nullptr ? -1 : anchor->first, anchor == nullptr ? -1 : anchor->last, a.anchor);
  }
  for (const Suspect& one : suspects) {
    if (one.first > bound) continue;
    suspects_.insert(one.place);
    if (one.anchor) suspects_.insert(*one.anchor);
  }
  const auto rows_of = [&](const CellDigests& run) {
    std::int64_t rows = 0;
    for (const Place& place : suspects_) {
      const auto found = run.cells_.find(place);
      if (found != run.cells_.end()) rows += found->second.rows;
    }
    return rows;
  };
  expected_rows_ = rows_of(expected);
  actual_rows_ = rows_of(actual);
}

void RowDigests::record(const TapPoint& point, std::span<const float> values) {
  const std::int64_t index = index_++;
  if (places_ != nullptr && !places_->contains(Place::of(point))) return;
  RowId id = id_of(point);
  const Entry entry{row_digest(values), index, point.submission};
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
  if (expected_.places_ != nullptr && !expected_.places_->contains(Place::of(point))) return;
  ++rows_;
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
