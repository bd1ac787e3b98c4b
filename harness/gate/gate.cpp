// SPDX-License-Identifier: Apache-2.0
#include "harness/gate/gate.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "harness/compare/significant.hpp"
#include "harness/report/terminal_text.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr double kReproducibleShare = 0.02;  // of a drift metric whose bits are promised
constexpr double kBoundFactor = 1.25, kBoundMargin = 0.02;
constexpr double kTimeFactor = 1.05;
// The paired test over traces: at least this many, and a mean change of at least that share.
constexpr std::size_t kPairedTraces = 4;
constexpr double kPairedShare = 0.02;
// KL below this is nothing: its logarithm is noise.
constexpr double kSmallestKl = 1e-9;

std::int64_t bytes_of(const std::string& text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

GateWord word_of(double change, double allowed, bool lower_is_better) {
  if (std::fabs(change) <= allowed) return GateWord::unchanged;
  return (change > 0) == lower_is_better ? GateWord::regression : GateWord::improved;
}

GateMetric judge_drift(const std::string& metric, const std::string& old_text, const std::string& new_text, bool lower_is_better,
                       bool same_bits) {
  GateMetric result{metric, GateWord::unchanged, old_text, new_text, "", ""};
  const MeasuredValue before = parse_measured(old_text, "baseline");
  const MeasuredValue after = parse_measured(new_text, "report");
  const double change = after.value - before.value;
  // Each side's interval half towards the other value; independent errors add in squares.
  const double old_half = change > 0 ? before.high - before.value : before.value - before.low;
  const double new_half = change > 0 ? after.value - after.low : after.high - after.value;
  const double share = kReproducibleShare * std::fabs(before.value);
  const double allowed = same_bits ? share : std::max(std::hypot(old_half, new_half), share);
  result.limit = "change of at most " + significant(allowed, 6) + (same_bits ? " (2 %: the same bits are promised)" : " (both intervals)");
  result.word = word_of(change, allowed, lower_is_better);
  return result;
}

GateMetric judge_time(const std::string& metric, const std::string& old_text, const std::string& new_text) {
  const MeasuredValue before = parse_measured(old_text, "baseline"), after = parse_measured(new_text, "report");
  GateMetric result{metric, GateWord::unchanged, old_text, new_text, "", ""};
  result.limit = "fastest at most " + significant(before.high * kTimeFactor, 6) + " s";
  if (after.low > before.high * kTimeFactor) result.word = GateWord::regression;
  if (after.high * kTimeFactor < before.low) result.word = GateWord::improved;
  return result;
}

// `same_bits`: the column promises the baseline's bits.
GateMetric judge_metric(const std::string& metric, const std::string& old_text, const std::string& new_text, bool same_bits) {
  switch (metric_info(metric).kind) {
    case MetricKind::digest: {
      const bool equal = old_text == new_text || !same_bits;
      return {metric, equal ? GateWord::unchanged : GateWord::regression, old_text, new_text, "equal", ""};
    }
    case MetricKind::bytes: {
      const std::int64_t before = bytes_of(old_text), after = bytes_of(new_text);
      const GateWord word = after > before ? GateWord::regression : after < before ? GateWord::improved : GateWord::unchanged;
      return {metric, word, old_text, new_text, "at most " + old_text + " bytes", ""};
    }
    case MetricKind::bound_ratio: {
      const double before = parse_measured(old_text, "baseline").value, after = parse_measured(new_text, "report").value;
      const double limit = kBoundFactor * before + kBoundMargin;
      const GateWord word = after > limit                                  ? GateWord::regression
                            : kBoundFactor * after + kBoundMargin < before ? GateWord::improved
                                                                           : GateWord::unchanged;
      return {metric, word, old_text, new_text, "at most " + significant(limit, 6), ""};
    }
    case MetricKind::lower_better:
      return judge_drift(metric, old_text, new_text, true, same_bits);
    case MetricKind::higher_better:
      return judge_drift(metric, old_text, new_text, false, same_bits);
    case MetricKind::time:
      if (!same_bits) return {metric, GateWord::unchanged, old_text, new_text, "", ""};
      return judge_time(metric, old_text, new_text);
  }
  throw InternalError("metric kind without a rule");
}

using CaseKey = std::pair<std::string, std::string>;  // id, executor
using Metrics = std::map<std::string, std::string>;

// What a judgement needs to know of the report beside its rows.
struct Context {
  const Report& report;
  const Baseline& baseline;
  bool same_bits(const std::string& executor) const {
    return executor != "optimized" || (report.meta.device_available && report.meta.device == baseline.device);
  }
  // A sweep that did not ask for the optimized column has no such excuse.
  bool without_device(const std::string& executor) const {
    return executor == "optimized" && report.meta.executors == "both" && !report.meta.device_available;
  }
};

void judge_case(GateCase& result, const Metrics* old_values, const CaseResult* row, const Context& context) {
  if (row == nullptr || row->status == CaseStatus::not_run || row->status == CaseStatus::skipped) {
    result.word = GateWord::missing;
    result.reason = row == nullptr ? "the report lacks this case" : row->reason;
    result.excused = context.without_device(result.executor);
    return;
  }
  if (row->status != CaseStatus::passed) {
    result.word = GateWord::regression;
    result.reason = row->reason;
    return;
  }
  if (old_values == nullptr) {
    result.word = GateWord::added;
    return;
  }
  const bool same_bits = context.same_bits(result.executor);
  const Metrics now = metrics_of(*row);
  for (const auto& [metric, old_value] : *old_values) {
    const auto at = now.find(metric);
    const bool optional = metric_info(metric).kind == MetricKind::time && !same_bits;
    if (at == now.end() && optional) continue;
    GateMetric judged = at == now.end() ? GateMetric{metric, GateWord::missing, old_value, "", "present", ""}
                                        : judge_metric(metric, old_value, at->second, same_bits);
    if (judged.word != GateWord::unchanged) result.metrics.push_back(std::move(judged));
  }
  for (const auto& [metric, value] : now) {
    // A baseline of an older version could not hold it.
    if (old_values->contains(metric) || metric_info(metric).since_version > context.baseline.version) continue;
    result.metrics.push_back({metric, GateWord::added, "", value, "", ""});
  }
}

// Settles the word of a case, with what is known of it. `used` marks the issues that did something.
void apply_known_issues(GateCase& result, const GateOptions& options, std::vector<bool>& used) {
  const auto known = [&](std::string_view metric) -> const KnownIssue* {
    for (std::size_t i = 0; i < options.known_issues.size(); ++i) {
      const KnownIssue& issue = options.known_issues[i];
      if (!issue.matches(result.id, result.executor, metric)) continue;
      used[i] = true;
      if (issue.until >= options.today) return &issue;
    }
    return nullptr;
  };
  const auto matters = [](GateWord word) { return word == GateWord::regression || word == GateWord::missing; };
  if (matters(result.word) && !result.excused) {
    if (const KnownIssue* issue = known(kWholeCase)) {
      result.word = GateWord::known;
      result.reason += (result.reason.empty() ? "" : "; ") + ("known until " + issue->until + ": ") + issue->why;
    }
  }
  for (GateMetric& metric : result.metrics) {
    if (matters(metric.word)) {
      if (const KnownIssue* issue = known(metric.metric)) {
        metric.word = GateWord::known;
        metric.why = "known until " + issue->until + ": " + issue->why;
      }
    }
    result.word = std::max(result.word, metric.word);
  }
}

// --- paired test over the traces of a setting
// ---------------------------------------------------------------------------------------------

// 99.5 % point of Student's t distribution, by degrees of freedom from 3 on; beyond the table the normal one is near enough.
double student_t(std::size_t degrees) {
  constexpr std::array kPoints{5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921,
                               2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750};
  const std::size_t at = degrees - 3;
  return at < kPoints.size() ? kPoints[at] : 2.70;
}

// Mean of the logarithm of new / old over traces: systematic when it exceeds its standard error by Student's factor.
struct PairedChange {
  std::size_t traces = 0;
  double mean = 0.0, half = 0.0;  // of log(new / old), 99 % interval
};

PairedChange paired_change(const std::vector<double>& logarithms) {
  PairedChange change;
  change.traces = logarithms.size();
  const double n = static_cast<double>(logarithms.size());
  change.mean = std::accumulate(logarithms.begin(), logarithms.end(), 0.0) / n;
  double squares = 0.0;
  for (const double x : logarithms) squares += (x - change.mean) * (x - change.mean);
  change.half = student_t(logarithms.size() - 1) * std::sqrt(squares / (n - 1.0) / n);
  return change;
}

// "<settings>" and "<trace>" of a case id.
std::pair<std::string, std::string> settings_and_trace(const std::string& id) {
  const std::size_t first = id.find('/'), last = id.rfind('/');
  if (first == std::string::npos || first == last) return {"", id};
  return {id.substr(first + 1, last - first - 1), id.substr(last + 1)};
}

// Where bits are promised every value is judged by itself; elsewhere a change that traces share is invisible in each of them.
void judge_paired(const Context& context, const std::map<CaseKey, Metrics>& before, const std::map<CaseKey, const CaseResult*>& now,
                  GateResult& result) {
  // Modes of a setting mostly have the same bits: one value per trace, the mean over its modes.
  std::map<std::tuple<std::string, std::string, std::string>, std::map<std::string, std::vector<double>>> groups;
  for (const auto& [key, old_values] : before) {
    const auto row = now.find(key);
    if (row == now.end() || row->second->status != CaseStatus::passed || context.same_bits(key.second)) continue;
    const Metrics new_values = metrics_of(*row->second);
    const auto [settings, trace] = settings_and_trace(key.first);
    for (const auto& [metric, old_text] : old_values) {
      const auto at = new_values.find(metric);
      if (metric_info(metric).kind != MetricKind::lower_better || at == new_values.end()) continue;
      const double x = parse_measured(old_text, "baseline").value, y = parse_measured(at->second, "report").value;
      if (x > kSmallestKl && y > kSmallestKl) groups[{settings, key.second, metric}][trace].push_back(std::log(y / x));
    }
  }
  for (const auto& [group, by_trace] : groups) {
    if (by_trace.size() < kPairedTraces) continue;
    std::vector<double> changes;
    for (const auto& [trace, values] : by_trace) {
      changes.push_back(std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size()));
    }
    const PairedChange change = paired_change(changes);
    if (std::fabs(change.mean) <= std::max(change.half, std::log1p(kPairedShare))) continue;
    const auto& [settings, executor, metric] = group;
    GateMetric judged{metric,
                      change.mean > 0 ? GateWord::regression : GateWord::improved,
                      "1",
                      significant(std::exp(change.mean), 4) + "[" + significant(std::exp(change.mean - change.half), 4) + "," +
                          significant(std::exp(change.mean + change.half), 4) + "]",
                      "mean ratio to the baseline, 99 % interval of the paired test must hold 1 or stay within 2 %",
                      ""};
    GateCase found;
    found.id = settings + " over " + std::to_string(change.traces) + " traces";
    found.executor = executor;
    found.metrics.push_back(std::move(judged));
    result.cases.push_back(std::move(found));
  }
}

void require_comparable(const Report& report, const Baseline& baseline) {
  if (!report.meta.mutant.empty()) {
    throw FileError("the report is of a sweep with the planted fault " + report.meta.mutant + ": it is not comparable with a baseline");
  }
  if (report.meta.model_sha256 != baseline.model_sha256) {
    throw FileError("not comparable: the report is of model " + report.meta.model_sha256 + ", the baseline of " + baseline.model_sha256);
  }
  if (const std::string difference = model_config_difference(baseline.model_config, report.meta.model_config);
      baseline.version >= 3 && !difference.empty()) {
    throw FileError("not comparable: other configurations of the model: " + difference);
  }
  if (report.meta.set != baseline.set) {
    throw FileError("not comparable: the report is of set '" + report.meta.set + "', the baseline of set '" + baseline.set + "'");
  }
}

void add_notes(const Context& context, const GateOptions& options, const std::vector<bool>& used, bool optimized_values, int excused,
               GateResult& result) {
  const ReportMeta& meta = context.report.meta;
  if (excused > 0) result.notes.push_back(std::to_string(excused) + " optimized cases were not run: " + meta.device);
  if (optimized_values && meta.device_available && !context.same_bits("optimized")) {
    result.notes.push_back("the optimized column ran on '" + meta.device + "', the baseline's on '" + context.baseline.device +
                           "': digests and times of it are not compared, drift by its uncertainty");
  }
  if (context.baseline.version < kBaselineVersion) {
    result.notes.push_back("the baseline is of version " + std::to_string(context.baseline.version) +
                           ": the model is known by its weights alone, not by its configuration" +
                           (context.baseline.version < 2 ? ", and metrics of this version are lacking" : "") + "; --update writes it");
  }
  if (!meta.shard.empty()) result.notes.push_back("the report holds shards " + meta.shard + " only: merge all of them before gating");
  for (std::size_t i = 0; i < options.known_issues.size(); ++i) {
    const KnownIssue& issue = options.known_issues[i];
    const std::string which = "known issue of line " + std::to_string(issue.line) + " (" + issue.why + ")";
    if (issue.until < options.today) {
      result.notes.push_back(which + " has expired on " + issue.until + (used[i] ? "" : ", and matches nothing any more"));
    } else if (!used[i]) {
      result.notes.push_back(which + " matches nothing: delete it");
    }
  }
}

std::string case_line(const GateCase& judged) {
  return judged.id + " " + judged.executor + (judged.reason.empty() ? "" : ": " + judged.reason);
}

std::string metric_line(const GateCase& judged, const GateMetric& metric) {
  std::string line = judged.id + " " + judged.executor + " " + metric.metric + ": " +
                     (metric.old_value.empty() ? "none" : metric.old_value) + " -> " +
                     (metric.new_value.empty() ? "none" : metric.new_value);
  if (!metric.limit.empty()) line += ", limit: " + metric.limit;
  if (!metric.why.empty()) line += "; " + metric.why;
  return line;
}

// Calls visit(word, line) for everything that is not unchanged and not excused.
template <class Visit>
void for_each_line(const GateResult& result, Visit&& visit) {
  for (const GateCase& judged : result.cases) {
    if (judged.excused) continue;
    if (judged.metrics.empty() && judged.word != GateWord::unchanged) visit(judged.word, case_line(judged));
    for (const GateMetric& metric : judged.metrics) visit(metric.word, metric_line(judged, metric));
  }
}

// Data of a workflow command.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '%':
        result += "%25";
        break;
      case '\r':
        result += "%0D";
        break;
      case '\n':
        result += "%0A";
        break;
      default:
        result += c;
    }
  }
  return result;
}

}  // namespace

std::string_view to_string(GateWord word) {
  constexpr std::array<std::string_view, kGateWords> kWords{"unchanged", "new", "improved", "known", "missing", "regression"};
  return kWords[static_cast<std::size_t>(word)];
}

GateResult judge_report(const Report& report, const Baseline& baseline, const GateOptions& options) {
  require_comparable(report, baseline);
  const Context context{report, baseline};
  std::map<CaseKey, Metrics> before;
  bool optimized_values = false;
  for (const auto& [key, value] : baseline.values) {
    before[{key.id, key.executor}][key.metric] = value;
    optimized_values = optimized_values || key.executor == "optimized";
  }
  std::map<CaseKey, const CaseResult*> now;
  for (const CaseResult& row : report.cases) now[{row.id, row.executor}] = &row;
  std::set<CaseKey> all;
  for (const auto& [key, unused] : before) all.insert(key);
  for (const auto& [key, unused] : now) all.insert(key);

  GateResult result;
  for (const CaseKey& key : all) {
    GateCase judged;
    judged.id = key.first;
    judged.executor = key.second;
    const auto old_values = before.find(key);
    const auto row = now.find(key);
    judge_case(judged, old_values == before.end() ? nullptr : &old_values->second, row == now.end() ? nullptr : row->second, context);
    result.cases.push_back(std::move(judged));
  }
  judge_paired(context, before, now, result);

  std::vector<bool> used(options.known_issues.size(), false);
  int excused = 0, known = 0;
  for (GateCase& judged : result.cases) {
    apply_known_issues(judged, options, used);
    switch (judged.word) {
      case GateWord::regression:
        ++result.failed;
        break;
      case GateWord::missing:
        ++result.skipped;
        excused += judged.excused;
        break;
      case GateWord::known:
        ++result.skipped;
        ++known;
        break;
      default:
        ++result.passed;
    }
  }
  add_notes(context, options, used, optimized_values, excused, result);
  result.exit_code = result.failed > 0 ? 1 : result.skipped > excused + known ? 5 : 0;
  return result;
}

std::string gate_text(const GateResult& result) {
  std::string text;
  // A line break in it could begin a workflow command of the CI system that shows the log.
  for_each_line(result, [&](GateWord word, const std::string& line) { text += std::string(to_string(word)) + "  " + without_controls(line) + "\n"; });
  int counts[kGateWords] = {}, not_run = 0;
  for (const GateCase& judged : result.cases) {
    if (judged.excused) {
      ++not_run;
    } else {
      ++counts[static_cast<std::size_t>(judged.word)];
    }
  }
  for (const std::string& note : result.notes) text += "note  " + without_controls(note) + "\n";
  for (int word = 0; word < kGateWords; ++word) {
    text += (word == 0 ? "" : ", ") + std::to_string(counts[word]) + " " + std::string(to_string(static_cast<GateWord>(word)));
  }
  if (not_run > 0) text += ", " + std::to_string(not_run) + " not run here";
  text += "\n" + std::to_string(result.passed) + " passed, " + std::to_string(result.failed) + " failed, " +
          std::to_string(result.skipped) + " skipped\n";
  return text;
}

std::string github_annotations(const GateResult& result, int limit) {
  constexpr std::array<std::string_view, 3> kLevels{"notice", "warning", "error"};
  std::array<std::string, kLevels.size()> lines;
  std::array<int, kLevels.size()> counts{};
  for_each_line(result, [&](GateWord word, const std::string& line) {
    const std::size_t level = word == GateWord::regression ? 2 : word == GateWord::missing || word == GateWord::known ? 1 : 0;
    if (++counts[level] > limit) return;
    lines[level] += "::" + std::string(kLevels[level]) + " title=loopgauge " + std::string(to_string(word)) + "::" + escaped(line) + "\n";
  });
  std::string text;
  for (std::size_t level = kLevels.size(); level-- > 0;) {
    text += lines[level];
    if (counts[level] > limit) {
      text += "::" + std::string(kLevels[level]) + " title=loopgauge::" + std::to_string(counts[level] - limit) +
              " more; the log of the gate has all\n";
    }
  }
  return text;
}

}  // namespace loopgauge::harness
