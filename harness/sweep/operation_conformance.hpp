// SPDX-License-Identifier: Apache-2.0
// Operation by operation (level 2): a candidate's run is observed, and every observed output of a sample of rows is compared with what the
// reference's operation makes of exactly the inputs that the candidate had, within the tolerance declared beside the operation. No error of
// an earlier operation enters, so a fault shows where it is, however small its effect on the result.
//
// Inputs come from the observed rows and from the record (K/V planes, hidden rows). Attention is checked where the record holds K/V as the
// row read it: always with Q off, and with Q on for rows that saw the frontier of the end of the run. Encoding is checked where all rows of
// a group were observed: V groups of the sampled rows, K groups of one stretch of a sealed block. Its inverse is checked on whole records
// by the audit.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "harness/compare/distances.hpp"
#include "harness/report/report.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// Rows whose operations are checked, by request: prompt rows, among them some that execute loop 4, and decode rows, evenly spaced.
std::vector<std::vector<int>> sampled_positions(const RunRecord& record, const ModelConfig& model);

// By request, up to 64 positions of a sealed block, whose keys are kept so that the K groups in them can be encoded again. Empty ranges
// where nothing is encoded.
std::vector<PositionRange> sampled_key_ranges(const RunRecord& record);

// Keeps every observed row of the sampled positions, and the keys of the given ranges. Attach to a run of the trace that the sample was
// taken from.
class OperationTap : public Tap {
 public:
  explicit OperationTap(std::vector<std::vector<int>> positions, std::vector<PositionRange> key_ranges = {})
      : positions_(std::move(positions)), key_ranges_(std::move(key_ranges)) {}
  void record(const TapPoint& point, std::span<const float> values) override;

  const std::vector<std::vector<int>>& positions() const { return positions_; }
  PositionRange key_range(std::size_t request) const { return request < key_ranges_.size() ? key_ranges_[request] : PositionRange{}; }
  // Null when the row was not observed. Layer -1: outside layers; loop 0: embedding.
  const std::vector<float>* find(int request, int position, int loop, int layer, std::string_view operation) const;

 private:
  std::vector<std::vector<int>> positions_;  // ascending
  std::vector<PositionRange> key_ranges_;
  std::map<std::tuple<int, int, int, int, std::string>, std::vector<float>, std::less<>> rows_;
};

// Errors of one operation at one loop.
struct OperationErrors {
  std::string operation;  // of the registry
  int loop = -1;
  std::int64_t elements = 0, different = 0, non_finite = 0;
  double largest_ratio = 0.0;  // error / bound; infinite for a difference where bits are promised
  double largest_share = 0.0;  // share of differing elements / the share allowed, of one output
  double max_absolute = 0.0, square_sum = 0.0;
  std::vector<double> ulps;  // of differing elements, in the output's format
  DistancePlace where;       // of the largest ratio
  std::string tap;           // the output it belongs to
  std::int64_t element = -1;
  double expected = 0.0, actual = 0.0;
  bool passed() const { return largest_ratio <= 1.0 && largest_share <= 1.0 && non_finite == 0; }
};

// The reference's operations on one checkpoint, which must outlive it.
class OperationReference {
 public:
  explicit OperationReference(const Checkpoint& checkpoint);
  ~OperationReference();

  // By operation in the registry's order, then loop. `record` is of the run that `tap` observed. `declared_order`: the candidate promises
  // the bits of outputs that the registry declares bit_exact; else their relaxed tolerance holds.
  std::vector<OperationErrors> check(const OperationTap& tap, const RunRecord& record, const Trace& trace, const EffectiveConfig& config,
                                     bool declared_order) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace loopgauge::harness
