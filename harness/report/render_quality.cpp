// SPDX-License-Identifier: Apache-2.0
// The quality report as tables for a terminal or a text file.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <utility>

#include "harness/report/quality.hpp"
#include "harness/report/render.hpp"
#include "harness/report/summary.hpp"
#include "harness/report/terminal_text.hpp"
#include "harness/report/text_table.hpp"

namespace loopgauge::harness {
namespace {

// "0.0141 [0.012, 0.0165]"
std::string interval_text(const Interval& interval, int digits = 3) {
  std::string text = short_number(interval.value, digits);
  if (!std::isnan(interval.low)) text += " [" + short_number(interval.low, digits) + ", " + short_number(interval.high, digits) + "]";
  return text;
}

std::string percent_text(const Interval& interval, int decimals = 2) {
  std::string text = percent(interval.value, decimals);
  if (!std::isnan(interval.low)) text += " [" + short_number(100 * interval.low, 4) + ", " + short_number(100 * interval.high, 4) + "]";
  return text;
}

std::string points_text(const Interval& interval) {
  std::string text = short_number(100 * interval.value, 3);
  if (!std::isnan(interval.low)) text += " [" + short_number(100 * interval.low, 3) + ", " + short_number(100 * interval.high, 3) + "]";
  return text;
}

std::string length_text(const ProseQuality& row) { return row.prompt_length < 0 ? "all" : std::to_string(row.prompt_length); }

void print_prose(const Quality& quality, const std::map<std::pair<std::string, std::string>, double>& ratios, std::ostream& out) {
  if (quality.prose.empty()) return;
  out << "\nProse: KLD of rows after the first token, KL(dense || setting) in nats\n";
  TextTable distance(
      {"setting", "executor", "prompt", "rows", "mean", "median", "99.0 %", "99.9 %", "maximum", "same top p", "first token"});
  for (const ProseQuality& row : quality.prose) {
    distance.add({row.settings, row.executor, length_text(row), std::to_string(row.rows), interval_text(row.kld_mean),
                  interval_text(row.kld_median), interval_text(row.kld_p99), interval_text(row.kld_p999), short_number(row.kld_max),
                  percent_text(row.same_top), interval_text(row.first_token_kld)});
  }
  distance.print(out);
  out << "\nProse: the true next token\n";
  TextTable likelihood(
      {"setting", "executor", "prompt", "requests", "ln(PPL(Q)/PPL(base))", "RMS delta p", "bits/byte", "dense", "change", "K/V ratio"});
  for (const ProseQuality& row : quality.prose) {
    const auto ratio = ratios.find({row.executor, row.settings});
    likelihood.add({row.settings, row.executor, length_text(row), std::to_string(row.requests), interval_text(row.log_perplexity_ratio),
                    percent_text(row.rms_delta_p), short_number(row.bits_per_byte, 4), short_number(row.dense_bits_per_byte, 4),
                    interval_text(row.bits_per_byte_change),
                    row.prompt_length < 0 && ratio != ratios.end() ? short_number(ratio->second) : "-"});
  }
  likelihood.print(out);
}

void print_tasks(const std::vector<TaskQuality>& tasks, const std::string& title, bool by_depth, std::ostream& out) {
  if (tasks.empty()) return;
  out << "\n" << title << "\n";
  TextTable table({"setting", "executor", by_depth ? "quarter" : "task", "answers", "dense", "accuracy", "change in points", "lost",
                   "gained", "McNemar p", "p (Holm)"});
  for (const TaskQuality& row : tasks) {
    const auto rate = [&](std::int64_t correct) { return percent(static_cast<double>(correct) / static_cast<double>(row.answers)); };
    table.add({row.settings, row.executor,
               by_depth            ? std::to_string(row.depth + 1)
               : row.trace.empty() ? "all"
                                   : row.trace,
               std::to_string(row.answers), rate(row.dense_correct), rate(row.correct), points_text(row.accuracy_change),
               std::to_string(row.lost), std::to_string(row.gained), short_number(row.p), short_number(row.p_holm)});
  }
  table.print(out);
}

}  // namespace

void render_quality(const Report& report, std::ostream& out) {
  const Quality quality = measure_quality(report);
  out << without_controls(report.meta.title) << "\nmodel " << report.meta.model_sha256 << "\n"
      << report.meta.tool_version << ", " << report.meta.source_revision << ", " << report.meta.compiler << "\n"
      << report.meta.device << "\n";
  if (quality.prose.empty() && quality.tasks.empty()) {
    out << "\nNo row holds the likelihood of known next tokens: quality needs traces with forced tokens, and reports of schema 1.2 or "
           "later.\n";
    return;
  }
  // Of the trace with the longest sequence: the padding of short ones blurs it.
  std::map<std::pair<std::string, std::string>, double> ratios;
  std::map<std::pair<std::string, std::string>, std::int64_t> longest;
  for (const CaseResult& row : report.cases) {
    std::int64_t length = 0;
    for (const DriftRow& drift : row.drift) length = std::max(length, drift.position + 1);
    for (const AnswerRow& answer : row.answers) length = std::max(length, answer.prompt_length);
    const std::pair key{row.executor, settings_of(row)};
    if (length <= longest[key]) continue;
    longest[key] = length;
    ratios[key] = row.memory_ratio;
  }
  print_prose(quality, ratios, out);
  print_tasks(quality.tasks, "Tasks: answers whose every token is the top-1 token", false, out);
  print_tasks(quality.depths, "Retrieval by depth: quarter of the prompt that holds the answer, 1 the earliest", true, out);
  out << "\nIntervals are 95 %, by bootstrap over requests. McNemar's exact test takes answers as independent; p (Holm) corrects for all "
         "tasks and\n"
         "settings. A row that could not be compared makes its case fail and is in no number.\n";
}

}  // namespace loopgauge::harness
