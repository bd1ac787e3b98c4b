// SPDX-License-Identifier: Apache-2.0
// Finds the first operation row that differs between two runs without keeping either run's values, in memory that does not grow with the
// depth of the model or with the number of its operations. Twice each run is observed:
//
// 1. CellDigests keeps one sum for all rows of a place (request, position, loop). Places whose sums differ hold the rows that differ, and those
//    that could hold the first of them are few: the ones that a submission computes side by side.
// 2. RowDigests keeps a 64-bit digest for every row of these places, and RowComparer compares the second run while it runs.
//
// RowCapture then keeps the values of the one row that matters. Rows are matched by what they are (request, position, loop, layer, operation,
// and how often that came before), never by when they come, so that runs of two different plans can be compared. Of all rows that differ the
// earliest in the first run's order is reported.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/executor.hpp"

namespace loopgauge::harness {

struct RowId {
  int request = 0;
  int position = 0;
  int loop = 0;  // 1..4; 0 before the first loop
  int layer = -1;
  std::string operation;  // tap name
  int occurrence = 0;     // rows of the same coordinates that came before
  bool operator==(const RowId&) const = default;
  bool operator<(const RowId& other) const;
};

// Digest of the bits of a row; NaN payloads do not enter.
std::uint64_t row_digest(std::span<const float> values);

// Where rows are computed together: all layers and operations of one row of one loop.
struct Place {
  int request = 0, position = 0, loop = 0;
  auto operator<=>(const Place&) const = default;
  static Place of(const TapPoint& point) { return {point.request, point.position, point.loop}; }
};
using Places = std::set<Place>;

// Attach to either run.
class CellDigests : public Tap {
 public:
  // `expected`: null for the first run; for the second the digests of the first, which must outlive it.
  explicit CellDigests(const CellDigests* expected = nullptr) : expected_(expected) {}
  void record(const TapPoint& point, std::span<const float> values) override;
  std::int64_t rows() const { return rows_; }
  std::int64_t places() const { return static_cast<std::int64_t>(cells_.size()); }

 private:
  friend class CellComparison;
  struct Cell {
    std::uint64_t sum = 0;  // of the rows' digests, each mixed with its layer and operation: the order of rows is nothing
    std::int64_t rows = 0;
    std::int64_t first = 0, last = 0;  // rows of the run that came before its first and its last one
    std::optional<Place> anchor;       // second run: the place of the first run that came right before a row that the first run lacks
  };
  const CellDigests* expected_;
  std::map<Place, Cell> cells_;
  std::int64_t rows_ = 0;
  std::optional<Place> known_;  // second run: place of the last row whose place the first run has
};

// What the sums of both runs say, once both have ended.
class CellComparison {
 public:
  // With `work_may_differ` a place that one run executed more often, to the same values, is no difference: plans reuse and repeat work.
  CellComparison(const CellDigests& expected, const CellDigests& actual, bool work_may_differ);

  std::int64_t compared() const { return compared_; }    // rows of places that both runs have
  std::int64_t places() const { return places_; }        // that either run has
  std::int64_t different() const { return different_; }  // of these
  // Places that have to be compared row by row: those that may hold the first difference, and those that its order is measured by.
  const Places& suspects() const { return suspects_; }
  std::int64_t expected_rows() const { return expected_rows_; }  // of the suspects, in either run
  std::int64_t actual_rows() const { return actual_rows_; }

 private:
  std::int64_t compared_ = 0, places_ = 0, different_ = 0;
  std::int64_t expected_rows_ = 0, actual_rows_ = 0;
  Places suspects_;
};

// Attach to the first run.
class RowDigests : public Tap {
 public:
  // Rows of `places` only, which must outlive it; null: all.
  explicit RowDigests(const Places* places = nullptr) : places_(places) {}
  void record(const TapPoint& point, std::span<const float> values) override;
  std::int64_t rows() const { return static_cast<std::int64_t>(order_.size()); }

 private:
  friend class RowComparer;
  struct Entry {
    std::uint64_t digest;
    std::int64_t index;  // in the order of the run
    int submission;
    bool seen = false;  // by the comparison
  };
  const Places* places_;
  std::map<RowId, Entry> entries_;
  std::vector<const RowId*> order_;
  std::int64_t index_ = 0;  // of the next row of the run
};

struct DivergentRow {
  RowId id;
  enum class Kind { values, only_expected, only_actual } kind = Kind::values;
  int expected_submission = -1, actual_submission = -1;  // -1: the row does not exist there
};

// Attach to the second run. `expected` must outlive it and is marked by it: one comparison for one RowDigests.
class RowComparer : public Tap {
 public:
  explicit RowComparer(RowDigests& expected) : expected_(expected) {}
  void record(const TapPoint& point, std::span<const float> values) override;

  // After the run. Empty: every row of either run has its equal in the other.
  std::optional<DivergentRow> first();
  std::int64_t rows() const { return rows_; }            // of the places that are compared
  std::int64_t compared() const { return compared_; }    // rows that both runs have
  std::int64_t different() const { return different_; }  // of these

 private:
  void consider(double order, const DivergentRow& row);

  RowDigests& expected_;
  std::int64_t rows_ = 0, compared_ = 0, different_ = 0;
  double last_order_ = -1;  // of the expected row that was matched last
  double best_order_ = 0;
  std::optional<DivergentRow> best_;
};

// Attach to a repetition of either run: keeps the values of one row, at most `byte_limit` bytes of them.
class RowCapture : public Tap {
 public:
  RowCapture(RowId id, std::size_t byte_limit) : id_(std::move(id)), limit_(byte_limit / sizeof(float)) {}
  void record(const TapPoint& point, std::span<const float> values) override;

  bool found() const { return found_; }
  const std::vector<float>& values() const { return values_; }
  std::size_t width() const { return width_; }  // elements of the whole row

 private:
  RowId id_;
  std::size_t limit_;
  int seen_ = 0;
  bool found_ = false;
  std::size_t width_ = 0;
  std::vector<float> values_;
};

}  // namespace loopgauge::harness
