// SPDX-License-Identifier: Apache-2.0
// Finds the first operation row that differs between two runs without keeping either run's values: the first run leaves a 64-bit digest
// per row, the second is compared while it runs, and a third and fourth run capture the values of the one row that matters.
//
// Rows are matched by what they are (request, position, loop, layer, operation, and how often that came before), never by when they
// come, so that runs of two different plans can be compared. Of all rows that differ the earliest in the first run's order is reported.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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

// Attach to the first run.
class RowDigests : public Tap {
 public:
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
  std::map<RowId, Entry> entries_;
  std::vector<const RowId*> order_;
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
  std::int64_t compared() const { return compared_; }    // rows that both runs have
  std::int64_t different() const { return different_; }  // of these

 private:
  void consider(double order, const DivergentRow& row);

  RowDigests& expected_;
  std::int64_t compared_ = 0, different_ = 0;
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
