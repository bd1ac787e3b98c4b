// SPDX-License-Identifier: Apache-2.0
// Baselines: what a sweep gave when somebody last looked and agreed. Text, committed, reviewed by diff, updated by one explicit command.
//
//     loopgauge-baseline 3
//     model 4598aa90855a14cf492ab3dfa7c86cd45a49b4b37d2eac42ce741adfbbf876c8
//     config {"head_dim":128,"heads":3,...,"rms_norm_eps":1e-06,"rope_theta":10000.0,"vocab":264}
//     set ci
//     device NVIDIA H200, driver 570.1
//     serial/t0s0q1:rolling:serial_aligned/seven reference digest 0f3a9d0c11b2e4d7
//     serial/t0s0q1:rolling:serial_aligned/seven reference kl_mean 0.000612[0.0002,0.0011]
//     serial/t0s0q1:rolling:serial_aligned/seven reference memory.steady 1830912
//
// Five header lines, then one line per case, executor and metric: `<case id> <executor> <metric> <value>`, sorted by bytes, distinct,
// single spaces. Blank lines are ignored, lines that begin with '#' are remarks, which an update keeps at the head of the file. `model` is the hash of the weights, `config` what they do not say of
// the model (attribute model_config of a report): the same weights with another rope_theta are another model. `device` is where the values of
// the optimized column come from, `none` without such values. A value is the first 16 hex digits of a SHA-256, an integer (bytes), or a number
// with its 95 % interval (time: the median with the least and the largest). Version 2 has no config line, version 1 in addition no device line
// and fewer metrics; both are read and judged by what they hold.
#pragma once

#include <compare>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kBaselineMagic = "loopgauge-baseline";  // what a baseline begins with
inline constexpr int kBaselineVersion = 3;

struct BaselineKey {
  std::string id;
  std::string executor;
  std::string metric;
  auto operator<=>(const BaselineKey&) const = default;
};

struct Baseline {
  int version = kBaselineVersion;  // of the text that it was read from
  std::string model_sha256;
  std::string model_config;  // one line of JSON; empty: of a version that did not record it
  std::string set;
  std::string device = "none";
  std::vector<std::string> remarks;  // lines that begin with '#', kept above the header
  std::map<BaselineKey, std::string> values;
};

// What a metric's value is compared by (gate.hpp says how).
enum class MetricKind {
  digest,        // equal or not
  bytes,         // at most the old ones
  bound_ratio,   // error / bound nearest to its limit
  lower_better,  // a drift metric with an uncertainty
  higher_better,
  time,  // seconds, median with spread
};
struct MetricInfo {
  std::string_view name;
  MetricKind kind;
  int since_version;  // of baselines
  std::string_view description;
};
// Throws FileError for a metric that this version does not know.
const MetricInfo& metric_info(std::string_view metric);

// Metrics of one row of a report that passed, as far as the row has them.
std::map<std::string, std::string> metrics_of(const CaseResult& row);

// Rows that passed. Throws ConfigError for a report with a planted fault, with failed rows, with cases it did not reach or of some shards
// only, or that does not say the model's configuration: none of these may become what later sweeps are measured by.
Baseline baseline_of(const Report& report);

// A baseline brought up to date: `fresh` replaces the values of the cases (id and executor) that it holds, cases that it lacks keep theirs,
// so that a filtered sweep or one without a device takes nothing away.
struct BaselineUpdate {
  Baseline baseline;
  int updated = 0;  // cases whose values changed
  int added = 0;    // cases that are new
  int kept = 0;     // cases that `fresh` lacks
};
// Throws ConfigError when the two are of different models, configurations or sets: nothing of the one can stand beside the other. `before` of a version
// without the configuration: where cases of it are to be kept, an equal digest of a reference case must show that it is the same.
BaselineUpdate update_baseline(const Baseline& before, const Baseline& fresh);

std::string baseline_text(const Baseline& baseline);
// Throws FileError naming `name` and the line for anything that is not exactly such a text: wrong header, unknown version or metric,
// unsorted, duplicate or malformed lines.
Baseline parse_baseline(std::string_view text, std::string_view name);
// "rope_theta is 10000.0 in the baseline and 500000.0 in the report": every key of the two model_configs that differs; empty where they are equal.
std::string model_config_difference(std::string_view baseline, std::string_view report);
// Whether the first line that is no remark says that it is one, of whatever version.
bool is_baseline(std::string_view text);
Baseline read_baseline(const std::filesystem::path& path);

struct MeasuredValue {
  double value = 0.0;
  double low = 0.0, high = 0.0;  // equal to value without an interval
};
// "0.000612[0.0002,0.0011]" or "0.5". Throws FileError.
MeasuredValue parse_measured(std::string_view text, std::string_view where);

}  // namespace loopgauge::harness
