// SPDX-License-Identifier: Apache-2.0
// A pull-request comment: verdict, matrices, worst rows, and details to unfold, within what GitHub takes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "harness/report/aggregates.hpp"
#include "harness/report/compact_tables.hpp"
#include "harness/report/markup.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/summary.hpp"
#include "harness/report/text_table.hpp"

namespace loopgauge::harness {

namespace {

// GitHub refuses a comment above 65,536 characters. Bytes are never fewer than characters, so counting bytes is safe.
constexpr std::size_t kCommentBytes = 65'000;
constexpr std::size_t kNoteBytes = 200;  // for the sentence about what was left out
constexpr std::size_t kListedRows = 25;
constexpr std::size_t kListedSettings = 40;
constexpr std::size_t kReasonBytes = 300;
constexpr std::size_t kPartBytes = 22'000;  // of one list, so that no list crowds out the others

const char* sign(CaseStatus status) {
  switch (status) {
    case CaseStatus::passed:
      return "\xe2\x9c\x85";
    case CaseStatus::skipped:
      return "\xe2\x9e\x96";
    case CaseStatus::not_run:
      return "\xe2\x9a\xaa";
    case CaseStatus::failed:
      return "\xe2\x9d\x8c";
    case CaseStatus::error:
      return "\xe2\x9d\x97";
  }
  return "";
}

std::string words(CaseStatus status) { return status == CaseStatus::not_run ? "not run" : std::string(to_string(status)); }

std::string cell_text(const StatusCounts& counts, double ratio) {
  std::string text;
  const auto add = [&](int count, CaseStatus status) {
    if (count > 0) text += (text.empty() ? "" : " ") + std::string(sign(status)) + " " + std::to_string(count);
  };
  add(counts.error, CaseStatus::error);
  add(counts.failed, CaseStatus::failed);
  add(counts.passed, CaseStatus::passed);
  add(counts.not_run, CaseStatus::not_run);
  add(counts.skipped, CaseStatus::skipped);
  if (!std::isnan(ratio)) text += ", " + short_number(ratio, 2);
  return text;
}

std::string code(const std::string& text, std::size_t bytes = kReasonBytes) { return markdown_code(clipped(text, bytes)); }

std::string unfolded(const std::string& summary, const std::string& body) {
  return "<details><summary>" + summary + "</summary>\n\n" + body + "\n</details>\n\n";
}

std::string matrix_text(const StatusMatrix& matrix, const Report& report) {
  std::map<std::pair<std::string, std::string>, double> ratios;
  bool any = false;
  for (const CaseResult& row : report.cases) {
    const double ratio = worst_error_over_bound(row);
    if (row.executor != matrix.executor || std::isnan(ratio)) continue;
    double& worst = ratios.try_emplace({settings_of(row), row.mode}, ratio).first->second;
    worst = std::max(worst, ratio);
    any = true;
  }
  StatusCounts total;
  std::vector<std::pair<bool, std::string>> settings;  // whether all its rows passed
  for (const std::string& setting : matrix.settings) {
    bool passed = true;
    for (const auto& [place, counts] : matrix.cells)
      passed = passed && (place.first != setting || counts.failed + counts.error + counts.not_run == 0);
    settings.emplace_back(passed, setting);
  }
  for (const auto& [place, counts] : matrix.cells) total += counts;
  if (total.passed + total.failed + total.error == 0) {
    const auto row =
        std::find_if(report.cases.begin(), report.cases.end(), [&](const CaseResult& r) { return r.executor == matrix.executor; });
    return "**" + code(matrix.executor) + "**: " + cell_text(total, kNotApplicable) + " " + words(row->status) + ": " + code(row->reason) +
           "\n\n";
  }
  if (settings.size() > kListedSettings)
    std::stable_sort(settings.begin(), settings.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text =
      "**" + code(matrix.executor) + "**" + (any ? ": rows, worst error / bound (at most 1 passes)" : "") + "\n\n| setting |";
  for (const std::string& mode : matrix.modes) text += " " + code(mode, 60) + " |";
  text += "\n|---|";
  for (std::size_t i = 0; i < matrix.modes.size(); ++i) text += "---|";
  text += "\n";
  std::size_t listed = 0;
  for (const auto& [passed, setting] : settings) {
    if (listed == kListedSettings || text.size() > kPartBytes) break;
    ++listed;
    text += "| " + code(setting, 120) + " |";
    for (const std::string& mode : matrix.modes) {
      const auto counts = matrix.cells.find({setting, mode});
      const auto ratio = ratios.find({setting, mode});
      text += counts == matrix.cells.end() ? " |"
                                           : " " + cell_text(counts->second, ratio == ratios.end() ? kNotApplicable : ratio->second) + " |";
    }
    text += "\n";
  }
  if (listed < settings.size()) text += "\nand " + std::to_string(settings.size() - listed) + " more settings\n";
  return text + "\n";
}

// Rows whose status is bad, in the order of the report, then those that passed with more than half of their bound used.
std::string worst_rows_text(const Report& report) {
  std::vector<std::pair<double, const CaseResult*>> rows;
  std::size_t bad = 0;
  for (const CaseResult& row : report.cases) {
    const double ratio = worst_error_over_bound(row);
    const bool is_bad = row.status == CaseStatus::failed || row.status == CaseStatus::error;
    bad += is_bad;
    if (is_bad || ratio > 0.5) rows.emplace_back(is_bad ? kNotApplicable : ratio, &row);
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    const bool bad_a = std::isnan(a.first), bad_b = std::isnan(b.first);
    return bad_a != bad_b ? bad_a : !bad_a && a.first > b.first;
  });
  if (rows.empty()) return "";
  std::string text = std::string("### ") + (bad > 0 ? "Failures and worst rows" : "Worst rows") +
                     "\n\n| | case | executor | error / bound | why |\n|---|---|---|---:|---|\n";
  std::size_t listed = 0;
  for (; listed < std::min(rows.size(), kListedRows) && text.size() < kPartBytes; ++listed) {
    const CaseResult& row = *rows[listed].second;
    text += std::string("| ") + sign(row.status) + " " + words(row.status) + " | " + code(row.id) + " | " + code(row.executor, 60) + " | " +
            short_number(worst_error_over_bound(row), 3) + " | " + code(row.reason) + " |\n";
  }
  if (listed < rows.size()) text += "\nand " + std::to_string(rows.size() - listed) + " more\n";
  return text + "\n";
}

std::string conformance_text(const Report& report) {
  std::vector<LoopConformance> items = loop_conformances(report);
  if (items.empty()) return "";
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.worst > b.worst; });
  std::string text =
      "| level | metric | loop | judged | failed | worst error / bound | other order of additions | double precision | where "
      "|\n|---|---|---:|---:|---:|---:|---:|---:|---|\n";
  for (std::size_t i = 0; i < std::min(items.size(), kListedRows) && text.size() < kPartBytes; ++i) {
    const LoopConformance& item = items[i];
    text += "| " + code(item.level, 60) + " | " + code(item.operation, 60) + " | " + (item.loop < 0 ? "-" : std::to_string(item.loop)) +
            " | " + std::to_string(item.judged) + " | " + std::to_string(item.failed) + " | " + short_number(item.worst) + " | " +
            short_number(item.reordered) + " | " + short_number(item.exact) + " | " +
            code(report.cases[item.worst_row].id + " " + item.where) + " |\n";
  }
  return unfolded("Distance from the reference, with the noise floor beside it", text);
}

std::string flips_text(const Report& report) {
  const std::vector<FlipCount> flips = flip_counts(report);
  if (flips.empty()) return "";
  std::string text = "| kind | executor | roots | unexplained | widest explained margin |\n|---|---|---:|---:|---:|\n";
  for (const FlipCount& flip : flips) {
    text += "| " + code(flip.kind, 60) + " | " + code(flip.executor, 60) + " | " + std::to_string(flip.roots) + " | " +
            std::to_string(flip.unexplained) + " | " + short_number(flip.largest_margin) + " |\n";
  }
  return unfolded("Decisions that differ from the reference", text);
}

std::string interval_text(const Interval& value) {
  if (std::isnan(value.value)) return "-";
  if (std::isnan(value.low)) return short_number(value.value);
  return short_number(value.value) + " (" + short_number(value.low) + " to " + short_number(value.high) + ")";
}

std::string drift_text(const Report& report) {
  const std::vector<SettingDrift> drifts = setting_drifts(report);
  const std::vector<DriftProfile> profiles = drift_profiles(report);
  if (drifts.empty()) return "";
  std::string text =
      "| setting | executor | KL mean (95 %) | KL p99 | noise p99 | first token KL | same top-1 | bits/byte | accuracy "
      "|\n|---|---|---:|---:|---:|---:|---:|---:|---:|\n";
  for (std::size_t i = 0; i < std::min(drifts.size(), kListedSettings); ++i) {
    const SettingDrift& drift = drifts[i];
    text += "| " + code(drift.settings, 120) + " | " + code(drift.executor, 60) + " | " + interval_text(profiles[i].continuation_kl) +
            " | " + short_number(drift.kl_p99) + " | " + short_number(profiles[i].noise_p99) + " | " + short_number(drift.first_token_kl) +
            " | " + percent(drift.same_top1, 2) + " | " + short_number(drift.bits_per_byte, 4) + " | " + percent(drift.task_accuracy) +
            " |\n";
  }
  if (drifts.size() > kListedSettings) text += "\nand " + std::to_string(drifts.size() - kListedSettings) + " more settings\n";
  return unfolded("Drift from dense (a property of the settings, not a failure)", text);
}

std::string memory_text(const Report& report) {
  const MemoryTable memory = memory_table(report);
  if (memory.rows.empty()) return "";
  std::string text =
      "Trace " + code(memory.trace) + ", steady state, predicted.\n\n| setting | K/V bytes | dense / this |\n|---|---:|---:|\n";
  for (const SettingMemory& row : memory.rows) {
    if (text.size() > kPartBytes) {
      text += "\nand more settings\n";
      break;
    }
    std::int64_t bytes = 0;
    for (const auto& [name, category] : row.categories) bytes += is_kv_category(name) ? category.physical_bytes : 0;
    text += "| " + code(row.settings, 120) + " | " + byte_count(bytes) + " | " + short_number(row.ratio) + " |\n";
  }
  return unfolded("Memory of the K/V cache", text);
}

std::string compact_text(const std::string& summary, const CompactTable& table) {
  if (table.rows.empty()) return "";
  std::string text = table.title + ".\n\n|", rule = "|";
  for (const std::string& head : table.header) {
    text += " " + head + " |";
    rule += rule.size() == 1 ? "---|" : "---:|";
  }
  text += "\n" + rule + "\n";
  std::size_t listed = 0;
  for (; listed < std::min(table.rows.size(), kListedSettings) && text.size() < kPartBytes; ++listed) {
    text += "|";
    for (const std::string& cell : table.rows[listed]) text += " " + code(cell, 120) + " |";
    text += "\n";
  }
  if (listed < table.rows.size()) text += "\nand " + std::to_string(table.rows.size() - listed) + " more\n";
  return unfolded(summary, text);
}

std::string provenance_text(const Report& report) {
  const ReportMeta& meta = report.meta;
  std::string text = "| | |\n|---|---|\n";
  for (const auto& [name, value] :
       {std::pair{"model", meta.model_sha256}, std::pair{"sources", meta.tool_version + " " + meta.source_revision},
        std::pair{"compiler", meta.compiler}, std::pair{"device", meta.device}, std::pair{"processor", meta.cpu},
        std::pair{"seed", meta.seed}, std::pair{"time", meta.started + " to " + meta.finished}})
    text += std::string("| ") + name + " | " + code(value) + " |\n";
  return unfolded("Provenance", text + "\n" + code(meta.command_line, 2000) + "\n");
}

}  // namespace

void render_markdown(const Report& report, std::ostream& out) {
  const CaseStatus result = verdict(report);
  const StatusCounts counts = count_statuses(report);
  std::string text = std::string("## ") + sign(result) + " loopgauge: " + verdict_word(report) + (is_complete(report) ? "" : " (incomplete)") +
                     "\n\n" + code(report.meta.title) + "\n\n" + code(verdict_reason(report), 1000) + "\n\n" + summary_line(counts) +
                     "\n\n";
  // Whole parts in order of weight: one that does not fit is left out and named.
  std::vector<std::pair<std::string, std::string>> parts;
  parts.emplace_back("failures and worst rows", worst_rows_text(report));
  for (const StatusMatrix& matrix : status_matrices(report))
    parts.emplace_back("matrix of " + matrix.executor, matrix_text(matrix, report));
  parts.emplace_back("conformance", conformance_text(report));
  parts.emplace_back("decisions", flips_text(report));
  parts.emplace_back("timing of the encoding", compact_text("Speculation by timing of the encoding", encoding_timing_table(report)));
  parts.emplace_back("handoffs", compact_text("Handoffs from prefill to decode", handoff_table(report)));
  parts.emplace_back("drift", drift_text(report));
  parts.emplace_back("memory", memory_text(report));
  parts.emplace_back("provenance", provenance_text(report));
  int left_out = 0;
  for (const auto& [name, part] : parts) {
    if (text.size() + part.size() + kNoteBytes <= kCommentBytes)
      text += part;
    else
      ++left_out;
  }
  if (left_out > 0) {
    text += "_" + std::to_string(left_out) + (left_out == 1 ? " part is" : " parts are") +
            " left out: a comment holds 65,536 characters. `loopgauge report FILE --html OUT` shows everything._\n";
  }
  out << text;
}

}  // namespace loopgauge::harness
