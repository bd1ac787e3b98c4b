// SPDX-License-Identifier: Apache-2.0
#include "harness/gate/gate.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <set>

#include "harness/compare/significant.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

// Sums of double-precision exponentials differ in the last digits between C libraries: nothing below this counts as a change of a drift
// metric, whatever its interval.
constexpr double kRelativeFloor = 1e-5;

std::int64_t bytes_of(const std::string& text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

GateMetric judge_drift(const std::string& metric, const std::string& old_text, const std::string& new_text, bool lower_is_better) {
  GateMetric result{metric, GateWord::unchanged, old_text, new_text, ""};
  const MeasuredValue before = parse_measured(old_text, "baseline");
  const MeasuredValue after = parse_measured(new_text, "report");
  const double change = after.value - before.value;
  // Each side's interval half towards the other value; independent errors add in squares.
  const double old_half = change > 0 ? before.high - before.value : before.value - before.low;
  const double new_half = change > 0 ? after.value - after.low : after.high - after.value;
  const double allowed = std::max(std::hypot(old_half, new_half), kRelativeFloor * std::fabs(before.value));
  result.limit = "change of at most " + significant(allowed, 6);
  if (std::fabs(change) <= allowed) return result;
  result.word = (change > 0) == lower_is_better ? GateWord::regression : GateWord::improved;
  return result;
}

GateMetric judge_metric(const std::string& metric, const std::string& old_text, const std::string& new_text) {
  switch (metric_kind(metric)) {
    case MetricKind::digest:
      return {metric, old_text == new_text ? GateWord::unchanged : GateWord::regression, old_text, new_text, "equal"};
    case MetricKind::bytes: {
      const std::int64_t before = bytes_of(old_text), after = bytes_of(new_text);
      const GateWord word = after > before ? GateWord::regression : after < before ? GateWord::improved : GateWord::unchanged;
      return {metric, word, old_text, new_text, "at most " + old_text + " bytes"};
    }
    case MetricKind::lower_better:
      return judge_drift(metric, old_text, new_text, true);
    case MetricKind::higher_better:
      return judge_drift(metric, old_text, new_text, false);
  }
  throw InternalError("metric kind without a rule");
}

using CaseKey = std::pair<std::string, std::string>;  // id, executor

void judge_case(GateCase& result, const std::map<std::string, std::string>* old_values, const CaseResult* row, bool without_device) {
  if (row == nullptr || row->status == CaseStatus::not_run || row->status == CaseStatus::skipped) {
    result.word = GateWord::missing;
    result.reason = row == nullptr ? "the report lacks this case" : row->reason;
    result.excused = without_device;
    return;
  }
  if (row->status != CaseStatus::passed) {
    result.word = GateWord::regression;
    result.reason = row->reason;
    return;
  }
  const std::map<std::string, std::string> now = metrics_of(*row);
  if (old_values == nullptr) {
    result.word = GateWord::added;
    return;
  }
  for (const auto& [metric, old_value] : *old_values) {
    const auto at = now.find(metric);
    GateMetric judged =
        at == now.end() ? GateMetric{metric, GateWord::missing, old_value, "", "present"} : judge_metric(metric, old_value, at->second);
    if (judged.word == GateWord::unchanged) continue;
    result.word = std::max(result.word, judged.word);
    result.metrics.push_back(std::move(judged));
  }
  for (const auto& [metric, value] : now) {
    if (old_values->contains(metric)) continue;
    result.word = std::max(result.word, GateWord::added);
    result.metrics.push_back({metric, GateWord::added, "", value, ""});
  }
}

}  // namespace

std::string_view to_string(GateWord word) {
  constexpr std::array<std::string_view, 5> kWords{"unchanged", "new", "improved", "missing", "regression"};
  return kWords[static_cast<std::size_t>(word)];
}

GateResult judge_report(const Report& report, const Baseline& baseline) {
  if (!report.meta.mutant.empty()) {
    throw FileError("the report is of a sweep with the planted fault " + report.meta.mutant + ": it is not comparable with a baseline");
  }
  if (report.meta.model_sha256 != baseline.model_sha256) {
    throw FileError("not comparable: the report is of model " + report.meta.model_sha256 + ", the baseline of " + baseline.model_sha256);
  }
  if (report.meta.set != baseline.set) {
    throw FileError("not comparable: the report is of set '" + report.meta.set + "', the baseline of set '" + baseline.set + "'");
  }
  std::map<CaseKey, std::map<std::string, std::string>> before;
  for (const auto& [key, value] : baseline.values) before[{key.id, key.executor}][key.metric] = value;
  std::map<CaseKey, const CaseResult*> now;
  for (const CaseResult& row : report.cases) now[{row.id, row.executor}] = &row;
  std::set<CaseKey> all;
  for (const auto& [key, unused] : before) all.insert(key);
  for (const auto& [key, unused] : now) all.insert(key);

  GateResult result;
  int excused = 0;
  for (const CaseKey& key : all) {
    GateCase judged;
    judged.id = key.first;
    judged.executor = key.second;
    const auto old_values = before.find(key);
    const auto row = now.find(key);
    // A sweep that did not ask for the optimized column has no such excuse.
    const bool without_device = key.second == "optimized" && report.meta.executors == "both" && !report.meta.device_available;
    judge_case(judged, old_values == before.end() ? nullptr : &old_values->second, row == now.end() ? nullptr : row->second,
               without_device);
    switch (judged.word) {
      case GateWord::regression:
        ++result.failed;
        break;
      case GateWord::missing:
        ++result.skipped;
        excused += judged.excused;
        break;
      default:
        ++result.passed;
    }
    result.cases.push_back(std::move(judged));
  }
  if (excused > 0) result.notes.push_back(std::to_string(excused) + " optimized cases were not run: " + report.meta.device);
  if (!report.meta.shard.empty())
    result.notes.push_back("the report holds shards " + report.meta.shard + " only: merge all of them before gating");
  result.exit_code = result.failed > 0 ? 1 : result.skipped > excused ? 5 : 0;
  return result;
}

std::string gate_text(const GateResult& result) {
  std::string text;
  int counts[5] = {}, not_run = 0;
  for (const GateCase& judged : result.cases) {
    if (judged.excused) {
      ++not_run;
      continue;
    }
    ++counts[static_cast<std::size_t>(judged.word)];
    const std::string head = std::string(to_string(judged.word)) + "  " + judged.id + " " + judged.executor;
    if (judged.metrics.empty() && judged.word != GateWord::unchanged) {
      text += head + (judged.reason.empty() ? "" : ": " + judged.reason) + "\n";
    }
    for (const GateMetric& metric : judged.metrics) {
      text += std::string(to_string(metric.word)) + "  " + judged.id + " " + judged.executor + " " + metric.metric + ": ";
      text += (metric.old_value.empty() ? "none" : metric.old_value) + " -> " + (metric.new_value.empty() ? "none" : metric.new_value);
      text += (metric.limit.empty() ? "" : ", limit: " + metric.limit) + "\n";
    }
  }
  for (const std::string& note : result.notes) text += "note  " + note + "\n";
  for (int word = 0; word < 5; ++word) {
    text += (word == 0 ? "" : ", ") + std::to_string(counts[word]) + " " + std::string(to_string(static_cast<GateWord>(word)));
  }
  if (not_run > 0) text += ", " + std::to_string(not_run) + " not run here";
  text += "\n" + std::to_string(result.passed) + " passed, " + std::to_string(result.failed) + " failed, " +
          std::to_string(result.skipped) + " skipped\n";
  return text;
}

}  // namespace loopgauge::harness
