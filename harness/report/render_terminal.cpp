// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <ostream>

#include "harness/compare/drift.hpp"
#include "harness/report/aggregates.hpp"
#include "harness/report/compact_tables.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/summary.hpp"
#include "harness/report/terminal_text.hpp"
#include "harness/report/text_table.hpp"

namespace loopgauge::harness {

namespace {

// Long reasons and many failures are cut here; --json has all of them.
constexpr int kShownFailures = 20;
constexpr std::size_t kTitleColumns = 140;

// Lines of at most `columns` characters, broken at spaces.
std::string wrapped(std::string text, std::size_t columns) {
  for (std::size_t begin = 0; text.size() - begin > columns;) {
    const std::size_t space = text.rfind(' ', begin + columns);
    if (space == std::string::npos || space <= begin) break;
    text[space] = '\n';
    begin = space + 1;
  }
  return text;
}

std::string_view words(CaseStatus status) { return status == CaseStatus::not_run ? "not run" : to_string(status); }

std::string counts_text(const StatusCounts& counts) {
  std::string text;
  const auto add = [&](int count, const char* word) {
    if (count > 0) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + word;
  };
  add(counts.error, "ERROR");
  add(counts.failed, "FAILED");
  add(counts.passed, "passed");
  add(counts.skipped, "skipped");
  add(counts.not_run, "not run");
  return text.empty() ? "-" : text;
}

StatusCounts total(const StatusMatrix& matrix) {
  StatusCounts sum;
  for (const auto& [place, counts] : matrix.cells) sum += counts;
  return sum;
}

void print_verdict(const Report& report, std::ostream& out) {
  const ReportMeta& meta = report.meta;
  std::string word = verdict_word(report);
  std::transform(word.begin(), word.end(), word.begin(),
                 [](char c) { return static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c); });
  out << word << ": " << without_controls(meta.title) << (is_complete(report) ? "" : " (incomplete)") << "\n";
  if (!meta.mutant.empty() && !fault_found(report)) out << "  " << verdict_reason(report) << "\n";
  out << "  model " << meta.model_sha256.substr(0, 16) << ", loopgauge " << meta.tool_version << " (" << meta.source_revision.substr(0, 12)
      << (meta.source_revision.ends_with("-dirty") ? "-dirty" : "") << "), " << meta.compiler << ", seed " << meta.seed;
  if (!meta.shard.empty()) out << ", shard " << meta.shard;
  if (meta.device_available) out << "\n  device " << without_controls(meta.device);
  out << "\n  " << meta.started << " to " << meta.finished << "\n";
  for (std::size_t begin = 0; begin <= meta.command_line.size();) {
    const std::size_t end = std::min(meta.command_line.find('\n', begin), meta.command_line.size());
    out << "  $ " << without_controls(meta.command_line.substr(begin, end - begin)) << "\n";
    begin = end + 1;
  }
}

void print_failures(const Report& report, std::ostream& out) {
  int shown = 0, hidden = 0;
  for (const CaseResult& row : report.cases) {
    if (row.status != CaseStatus::failed && row.status != CaseStatus::error) continue;
    if (shown == kShownFailures) {
      ++hidden;
      continue;
    }
    if (shown++ == 0) out << "\nFailures\n";
    out << "  " << without_controls(row.id) << " (" << without_controls(row.executor) << ") " << words(row.status) << "\n    " << without_controls(row.reason) << "\n";
  }
  if (hidden > 0) out << "  and " << hidden << " more (report --json lists all)\n";
}

// Reasons of rows that did not run, with how many rows each has.
void print_not_run(const StatusMatrix& matrix, const Report& report, std::ostream& out) {
  std::map<std::pair<CaseStatus, std::string>, int> reasons;
  for (const CaseResult& row : report.cases) {
    if (row.executor == matrix.executor && (row.status == CaseStatus::not_run || row.status == CaseStatus::skipped)) {
      ++reasons[{row.status, row.reason}];
    }
  }
  for (const auto& [key, count] : reasons)
    out << "  " << words(key.first) << ": " << without_controls(key.second) << " (" << count << (count == 1 ? " case)\n" : " cases)\n");
}

void print_status(const Report& report, std::ostream& out) {
  for (const StatusMatrix& matrix : status_matrices(report)) {
    out << "\n" << without_controls(matrix.executor) << ": " << counts_text(total(matrix)) << "\n";
    print_not_run(matrix, report, out);
    const StatusCounts counts = total(matrix);
    if (counts.passed + counts.failed + counts.error == 0) continue;
    std::vector<std::string> header{"setting"};
    header.insert(header.end(), matrix.modes.begin(), matrix.modes.end());
    TextTable table(header);
    for (const std::string& settings : matrix.settings) {
      std::vector<std::string> line{settings};
      for (const std::string& mode : matrix.modes) {
        const auto cell = matrix.cells.find({settings, mode});
        line.push_back(cell == matrix.cells.end() ? "-" : counts_text(cell->second));
      }
      table.add(std::move(line));
    }
    table.print(out);
  }
}

void print_drift(const Report& report, std::ostream& out) {
  const std::vector<SettingDrift> drifts = setting_drifts(report);
  if (drifts.empty()) return;
  out << "\nDrift from dense Ouro on the same executor (KL in nats; pooled over traces; per trace with intervals: "
         "/case/<n>/drift_summary)\n";
  TextTable table({"setting", "executor", "traces", "rows", "same top-1", "95 % interval", "KL mean", "KL p99", "KL max", "first token KL",
                   "bits/byte", "accuracy"});
  for (const SettingDrift& drift : drifts) {
    const std::string interval =
        drift.rows == 0 ? "-" : short_number(100.0 * drift.same_top1_low, 4) + ".." + short_number(100.0 * drift.same_top1_high, 4);
    table.add({drift.settings, drift.executor, std::to_string(drift.traces), std::to_string(drift.rows), percent(drift.same_top1, 2),
               interval, short_number(drift.kl_mean), short_number(drift.kl_p99), short_number(drift.kl_max),
               short_number(drift.first_token_kl), short_number(drift.bits_per_byte, 4),
               drift.answers == 0 ? "-" : percent(drift.task_accuracy) + " of " + std::to_string(drift.answers)});
  }
  table.print(out);
}

void print_acceptance(const Report& report, std::ostream& out) {
  const std::vector<AcceptanceSummary> summaries = acceptance_summaries(report);
  if (summaries.empty()) return;
  out << "\nSpeculation: candidates accepted by place in a round, of the rounds that verified one there, with 95 % intervals (Wilson);\n"
         "loops a token in drafts, in verification and of these in vain (serial: 4 in all); KL in nats; times on the device, where they were measured\n";
  TextTable table({"mode", "encoding", "executor", "cases", "rounds", "tokens / round", "accepted by place", "draft + verify, in vain",
                   "ms / token: draft + verify + accept", "dense KL", "held twice", "rewritten"});
  for (const AcceptanceSummary& summary : summaries) {
    std::string places;
    std::int64_t rounds = 0;
    for (const AcceptanceSummary::Position& place : summary.positions) {
      rounds += place.rounds;
      if (place.drafted == 0) continue;
      const Estimate rate = wilson_interval(place.accepted, place.drafted);
      places += (places.empty() ? "" : ", ") + short_number(100.0 * rate.value, 3) + " % (" + short_number(100.0 * rate.low, 3) + ".." +
                short_number(100.0 * rate.high, 3) + ")";
    }
    const auto milliseconds = [&](double seconds) { return short_number(1e3 * seconds / static_cast<double>(summary.timed_tokens), 3); };
    const auto per_token = [&](std::int64_t loops) { return short_number(static_cast<double>(loops) / static_cast<double>(summary.tokens), 3); };
    table.add({summary.mode, summary.timing.empty() ? "-" : summary.timing, summary.executor, std::to_string(summary.cases), std::to_string(rounds),
               short_number(summary.mean_emitted, 3), places.empty() ? "-" : places,
               summary.draft_loops + summary.verify_loops == 0 || summary.tokens == 0
                   ? "-"
                   : per_token(summary.draft_loops) + " + " + per_token(summary.verify_loops) + ", " + per_token(summary.rejected_loops),
               summary.timed_tokens == 0 ? "-"
                                         : milliseconds(summary.draft_seconds) + " + " + milliseconds(summary.verify_seconds) + " + " +
                                               milliseconds(summary.accept_seconds),
               short_number(summary.dense_kl),
               summary.doubled_bytes == 0 ? "-" : byte_count(summary.doubled_bytes),
               summary.rewritten_rows == 0 ? "-" : std::to_string(summary.rewritten_rows)});
  }
  table.print(out);
}

void print_compact(const CompactTable& content, std::ostream& out) {
  if (content.rows.empty()) return;
  out << "\n" << wrapped(content.title, kTitleColumns) << "\n";
  TextTable table(content.header);
  for (const std::vector<std::string>& row : content.rows) table.add(row);
  table.print(out);
}

void print_conformance(const Report& report, std::ostream& out) {
  const std::vector<MetricConformance> metrics = metric_conformances(report);
  if (!metrics.empty()) {
    out << "\nDistance from the reference over its limit (at most 1 passes), worst of all cases and loops\n";
    TextTable table({"level", "executor", "metric", "judged", "failed", "error / bound", "loop", "where"});
    for (const MetricConformance& metric : metrics) {
      table.add({metric.level, metric.executor, metric.operation, std::to_string(metric.values), std::to_string(metric.failed),
                 short_number(metric.error_over_bound), metric.loop < 0 ? "-" : std::to_string(metric.loop), metric.where});
    }
    table.print(out);
  }
  const std::vector<FlipCount> flips = flip_counts(report);
  if (flips.empty()) return;
  out << "\nDecisions that differ from the reference with its tokens forced\n";
  TextTable table({"kind", "executor", "roots", "unexplained", "largest explained margin"});
  for (const FlipCount& flip : flips) {
    table.add({flip.kind, flip.executor, std::to_string(flip.roots), std::to_string(flip.unexplained), short_number(flip.largest_margin)});
  }
  table.print(out);
}

void print_memory(const Report& report, std::ostream& out) {
  const MemoryTable memory = memory_table(report);
  if (memory.rows.empty()) return;
  // Categories that hold K/V; the others do not depend on the setting or are the runtime's.
  const std::vector<std::string> kv{"base payload", "residual payload", "parameters",  "activity maps",
                                    "padding",      "BF16 tail",        "BF16 planes", "inherited references"};
  out << "\nPredicted K/V memory of trace " << without_controls(memory.trace) << ", steady state, physical bytes (ratio: dense / this)\n";
  std::vector<std::string> header{"setting"};
  std::vector<std::string> used;
  for (const std::string& category : kv) {
    const bool any =
        std::any_of(memory.rows.begin(), memory.rows.end(), [&](const SettingMemory& row) { return row.categories.contains(category); });
    if (any) used.push_back(category);
  }
  header.insert(header.end(), used.begin(), used.end());
  header.push_back("K/V total");
  header.push_back("ratio");
  TextTable table(header);
  for (const SettingMemory& row : memory.rows) {
    std::vector<std::string> line{row.settings};
    std::int64_t sum = 0;
    for (const std::string& category : used) {
      const auto entry = row.categories.find(category);
      const std::int64_t bytes = entry == row.categories.end() ? 0 : entry->second.physical_bytes;
      sum += bytes;
      line.push_back(bytes == 0 ? "-" : byte_count(bytes));
    }
    line.push_back(byte_count(sum));
    line.push_back(short_number(row.ratio));
    table.add(std::move(line));
  }
  table.print(out);
}

void print_time(const Report& report, std::ostream& out) {
  std::map<std::string, double> seconds;
  for (const CaseResult& row : report.cases) {
    for (const TimingRow& timing : row.timings) {
      if (timing.phase == "run") seconds[row.executor] += timing.seconds;
    }
  }
  if (seconds.empty()) return;
  out << "\nTime in runs:";
  const char* separator = " ";
  for (const auto& [executor, sum] : seconds) {
    out << separator << executor << " " << short_number(sum) << " s";
    separator = ", ";
  }
  out << "\n";
}

}  // namespace

void render_terminal(const Report& report, std::ostream& out) {
  print_verdict(report, out);
  print_failures(report, out);
  print_status(report, out);
  print_conformance(report, out);
  print_acceptance(report, out);
  print_compact(encoding_timing_table(report), out);
  print_compact(handoff_table(report), out);
  print_drift(report, out);
  print_memory(report, out);
  print_time(report, out);
  const StatusCounts counts = count_statuses(report);
  out << "\n";
  if (counts.not_run > 0) out << counts.not_run << " of the skipped were not run\n";
  if (counts.error > 0) out << counts.error << " of the failed could not be judged (errors)\n";
  out << summary_line(counts) << "\n";
}

}  // namespace loopgauge::harness
