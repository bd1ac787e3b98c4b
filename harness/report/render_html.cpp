// SPDX-License-Identifier: Apache-2.0
// The HTML page: verdict, failures and provenance as plain markup, which needs no script; everything else is drawn by the page's scripts
// from the embedded data. The page loads nothing, and its content security policy lets only the scripts and styles of this file run.
#include <algorithm>
#include <array>
#include <numeric>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/report/aggregates.hpp"
#include "harness/report/html_assets.hpp"
#include "harness/report/markup.hpp"
#include "harness/report/page_data.hpp"
#include "harness/report/page_frame.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/schema.hpp"
#include "harness/report/text_table.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::size_t kStaticFailures = 10;
constexpr std::size_t kTextBytes = 1000;
constexpr std::size_t kCommandBytes = 4000;

struct StatusWord {
  CaseStatus status;
  std::string_view word, sign;
  int StatusCounts::*count;
};
// In the order in which a reader needs them.
constexpr StatusWord kWords[] = {{CaseStatus::failed, "failed", "\xe2\x9c\x95", &StatusCounts::failed},
                                 {CaseStatus::error, "error", "!", &StatusCounts::error},
                                 {CaseStatus::passed, "passed", "\xe2\x9c\x93", &StatusCounts::passed},
                                 {CaseStatus::skipped, "skipped", "\xe2\x80\x93", &StatusCounts::skipped},
                                 {CaseStatus::not_run, "not run", "\xe2\x97\x8b", &StatusCounts::not_run}};

const StatusWord& word_of(CaseStatus status) {
  for (const StatusWord& word : kWords) {
    if (word.status == status) return word;
  }
  throw InternalError("a case status has no word on the page");
}

std::string text(std::string_view value, std::size_t bytes = kTextBytes) { return html_text(clipped(value, bytes)); }

std::string badge(CaseStatus status, std::string_view word) {
  return "<span class=\"badge\" data-status=\"" + std::string(to_string(status)) + "\"><span aria-hidden=\"true\">" +
         std::string(word_of(status).sign) + "</span> " + std::string(word) + "</span>";
}

std::string badge(CaseStatus status) { return badge(status, word_of(status).word); }

std::string verdict_html(const Report& report) {
  const ReportMeta& meta = report.meta;
  const CaseStatus result = verdict(report);
  const StatusCounts counts = count_statuses(report);
  const auto total = std::ssize(report.cases);
  std::string out = "<header id=\"verdict\" class=\"verdict\" data-status=\"" + std::string(to_string(result)) + "\">\n";
  out += "<h1>" + badge(result, verdict_word(report)) + " <span class=\"title\">" + text(meta.title) + "</span></h1>\n";
  out += "<p class=\"why\">" + text(verdict_reason(report)) + "</p>\n";
  if (!is_complete(report)) {
    const auto unreached = std::count_if(report.cases.begin(), report.cases.end(), [](const CaseResult& row) {
      return row.status == CaseStatus::not_run && row.reason == kNotReached;
    });
    out += "<p class=\"notice\"><strong>Incomplete.</strong> " +
           (unreached > 0 ? "The sweep ended before " + std::to_string(unreached) + " of " + std::to_string(total) + " rows"
                          : "Cases are missing: the request has " + std::to_string(meta.case_count)) +
           "; <code>--resume</code> continues a sweep, <code>report merge</code> joins shards.</p>\n";
  }
  if (!meta.mutant.empty()) {
    out += "<p class=\"notice\"><strong>Planted fault</strong> <code>" + text(meta.mutant) +
           "</code>: failures of its column are what this report is meant to show.</p>\n";
  }
  if (total > 0) {
    out += "<svg class=\"share\" aria-hidden=\"true\" width=\"100%\" height=\"10\">";
    // A single failure among thousands is still to be seen.
    constexpr double kLeastShare = 0.8;
    std::array<double, std::size(kWords)> shares{};
    for (std::size_t i = 0; i < shares.size(); ++i) {
      shares[i] = 100.0 * counts.*kWords[i].count / static_cast<double>(total);
      if (shares[i] > 0.0) shares[i] = std::max(shares[i], kLeastShare);
    }
    const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
    double at = 0.0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (shares[i] == 0.0) continue;
      const double width = 100.0 * shares[i] / sum;
      out += "<rect data-status=\"" + std::string(to_string(kWords[i].status)) + "\" x=\"" + short_number(at, 5) + "%\" width=\"" +
             short_number(width, 5) + "%\" height=\"10\"/>";
      at += width;
    }
    out += "</svg>\n";
  }
  out += "<ul class=\"counts\">";
  for (const StatusWord& word : kWords) {
    const int count = counts.*word.count;
    if (count == 0 && word.status != CaseStatus::passed && word.status != CaseStatus::failed) continue;
    out += "<li data-status=\"" + std::string(to_string(word.status)) + "\"><b>" + std::to_string(count) + "</b> " +
           std::string(word.word) + "</li>";
  }
  out += "<li><b>" + std::to_string(total) + "</b> rows: " + text(meta.executors) + "</li></ul>\n";
  out += "<dl class=\"facts\"><div><dt>Model</dt><dd><code>" + text(meta.model_sha256.substr(0, 12)) +
         "</code></dd></div><div><dt>Device</dt><dd>" + text(meta.device) + "</dd></div><div><dt>Sources</dt><dd>loopgauge " +
         text(meta.tool_version) + ", <code>" + text(meta.source_revision.substr(0, 12)) +
         (meta.source_revision.ends_with("-dirty") ? "-dirty" : "") + "</code></dd></div><div><dt>Seed</dt><dd>" + text(meta.seed) +
         "</dd></div><div><dt>Finished</dt><dd>" + text(meta.finished) + "</dd></div></dl>\n";
  return out + "</header>\n";
}

std::string failures_html(const Report& report) {
  std::string items;
  std::size_t shown = 0, hidden = 0;
  for (const CaseStatus status : {CaseStatus::error, CaseStatus::failed}) {
    for (std::size_t n = 0; n < report.cases.size(); ++n) {
      const CaseResult& row = report.cases[n];
      if (row.status != status) continue;
      if (shown == kStaticFailures) {
        ++hidden;
        continue;
      }
      ++shown;
      items += "<li>" + badge(row.status) + " <a href=\"#case-" + std::to_string(n) + "\"><code>" + text(row.id) +
               "</code></a> <span class=\"executor\">" + text(row.executor) + "</span><p class=\"reason\">" + text(row.reason) +
               "</p></li>\n";
    }
  }
  if (shown == 0) return "";
  std::string out =
      "<section id=\"failures\" aria-labelledby=\"failures-title\"><h2 id=\"failures-title\">Failures</h2>\n<ol class=\"failures\">\n" +
      items + "</ol>\n";
  if (hidden > 0) {
    out +=
        "<p>and " + std::to_string(hidden) + " more: <a href=\"#cases?status=failed,error\">all failures in the list of cases</a>.</p>\n";
  }
  return out + "<p class=\"hint\">What diverged first, and in which operation: <code>loopgauge explain CASE</code>.</p></section>\n";
}

std::string provenance_html(const Report& report) {
  std::string out =
      "<section id=\"provenance\" aria-labelledby=\"provenance-title\"><h2 id=\"provenance-title\">Provenance</h2>\n"
      "<h3>Command</h3>\n<pre class=\"command\"><code>" +
      text(report.meta.command_line, kCommandBytes) + "</code></pre>\n<dl class=\"provenance\">";
  out +=
      "<div><dt>schema_version</dt><dd><code>" + std::to_string(kReportMajor) + "." + std::to_string(kReportMinor) + "</code></dd></div>";
  for (const Column<ReportMeta>& column : columns<ReportMeta>()) {
    if (column.name == "command_line" || column.name == "title") continue;
    const std::string value = cell_text(report.meta, column);
    if (value.empty()) continue;
    out += "<div><dt title=\"" + text(column.description) + "\">" + text(column.name) + "</dt><dd><code>" + text(value, kCommandBytes) +
           "</code></dd></div>";
  }
  return out + "</dl></section>\n";
}

}  // namespace

void render_html(const Report& report, std::ostream& out) {
  const PageData data = page_data(report);
  const std::string style(html_assets::style()), script(html_assets::script());
  const std::string policy = "default-src 'none'; style-src " + content_hash(style) + "; script-src " + content_hash(script) +
                             "; base-uri 'none'; form-action 'none'";
  std::string title = verdict_word(report);
  title += ": " + report.meta.title;
  write_page(html_assets::page(),
             {{"policy", policy},
              {"title", text(title)},
              {"style", style},
              {"verdict", verdict_html(report)},
              {"failures", failures_html(report)},
              {"provenance", provenance_html(report)},
              {"overview", json_for_script(data.overview)},
              {"details", json_for_script(data.details)},
              {"script", script}},
             out);
}

}  // namespace loopgauge::harness
