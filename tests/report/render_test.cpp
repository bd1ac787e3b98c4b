// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "harness/report/aggregates.hpp"
#include "harness/report/compact_tables.hpp"
#include "harness/report/render.hpp"
#include "harness/report/schema.hpp"
#include "harness/report/summary.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

std::string rendered(Renderer render, const Report& report) {
  std::ostringstream out;
  render(report, out);
  return out.str();
}

// The fields of RFC 4180 text.
std::vector<std::vector<std::string>> parse_csv(const std::string& text) {
  std::vector<std::vector<std::string>> rows{{""}};
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c != '"')
        rows.back().back() += c;
      else if (i + 1 < text.size() && text[i + 1] == '"')
        rows.back().back() += text[++i];
      else
        quoted = false;
    } else if (c == '"')
      quoted = true;
    else if (c == ',')
      rows.back().emplace_back();
    else if (c == '\n')
      rows.push_back({""});
    else
      rows.back().back() += c;
  }
  rows.pop_back();
  return rows;
}

TEST(Render, CsvReadsBackCellByCell) {
  const Report report = sample_report();
  const auto rows = parse_csv(rendered(render_csv, report));
  ASSERT_EQ(rows.size(), report.cases.size() + 1);
  const auto list = columns<CaseResult>();
  for (std::size_t r = 0; r < rows.size(); ++r) {
    ASSERT_EQ(rows[r].size(), list.size() + 16) << "line " << r << ": transport, requests, thirteen sums and the latency of handoffs";
    for (std::size_t c = 0; c < list.size(); ++c) {
      EXPECT_EQ(rows[r][c], r == 0 ? std::string(list[c].name) : cell_text(report.cases[r - 1], list[c]));
    }
  }
}

// Two settings over one transport; one request is cancelled, and another executor handed the same requests over.
Report report_with_handoffs() {
  Report report = sample_report();
  HandoffRow first;
  first.transport = "peer";
  first.outcome = "handed over";
  first.bytes = 3 * 1024 + 512;
  first.dense_bytes = 7 * 1024;
  first.base_payload_bytes = 1024;
  first.rows_bytes = 2048;
  first.parameters_bytes = 512;
  first.bytes_before_prompt_end = 1792;
  first.bytes_final_before_last_loop = 3584;
  first.most_bytes_in_flight = 1024;
  first.most_reserved_bytes = 8192;
  first.seconds = 0.002;
  HandoffRow second = first, cancelled = first;
  second.request = 1;
  second.seconds = 0.004;
  cancelled.request = 2;
  cancelled.outcome = "cancelled";
  report.cases[0].handoffs = {first, second, cancelled};
  report.cases[1].handoffs = {first, second, cancelled};
  for (HandoffRow& row : report.cases[1].handoffs) row.transport = "host";
  report.cases[1].handoffs[1].rows_bytes = 2047;
  return report;
}

TEST(Render, HandoffsAreShownBySettingAndTransportEverywhere) {
  const Report report = report_with_handoffs();
  const auto summaries = handoff_summaries(report);
  ASSERT_EQ(summaries.size(), 2u);
  EXPECT_EQ(summaries[0].transport, "peer");
  EXPECT_EQ(summaries[0].requests, 3);
  EXPECT_EQ(summaries[0].handed_over, 2);
  EXPECT_EQ(summaries[0].sums.bytes, 7 * 1024) << "what was cancelled has moved nothing that counts";
  EXPECT_EQ(summaries[0].compared, 2);
  EXPECT_EQ(summaries[0].equal, 1) << "a kind of region differs by a byte";
  const CompactTable table = handoff_table(report);
  ASSERT_EQ(table.rows.size(), 2u);
  for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.header.size());
  for (const Renderer renderer : {render_terminal, render_markdown, render_html}) {
    const std::string text = rendered(renderer, report);
    for (const char* cell : {"t1s0q0", "peer", "2 of 3", "7 KiB", "50.0 %", "100.0 %", "8 KiB", "1 of 2"})
      EXPECT_NE(text.find(cell), std::string::npos) << cell;
  }
  const auto csv = parse_csv(rendered(render_csv, report));
  const auto at = static_cast<std::size_t>(std::find(csv[0].begin(), csv[0].end(), "handoff_bytes") - csv[0].begin());
  ASSERT_LT(at, csv[0].size());
  EXPECT_EQ(csv[1][at], "7168");
  EXPECT_EQ(csv[1].back(), "0.003") << "the median latency: of two their mean";
  EXPECT_EQ(csv[3][at], "") << "no handoff";
  const std::string none = rendered(render_terminal, sample_report());
  EXPECT_EQ(none.find("Handoffs"), std::string::npos);
}

TEST(Render, JsonHoldsEveryCellAndTable) {
  const Report report = sample_report();
  const auto json = nlohmann::json::parse(rendered(render_json, report));
  EXPECT_EQ(json["verdict"], "failed");
  EXPECT_EQ(json["counts"]["not_run"], 1);
  EXPECT_EQ(json["meta"]["command_line"], report.meta.command_line);
  ASSERT_EQ(json["cases"].size(), report.cases.size());
  for (std::size_t n = 0; n < report.cases.size(); ++n) {
    const auto& entry = json["cases"][n];
    for (const Column<CaseResult>& column : columns<CaseResult>()) EXPECT_TRUE(entry.contains(std::string(column.name))) << column.name;
    visit_tables([&](const char* name, const char*, auto table) {
      const std::size_t expected = (report.cases[n].*table).size();
      EXPECT_EQ(entry["tables"].contains(name) ? entry["tables"][name].size() : 0, expected) << name;
    });
  }
  EXPECT_EQ(json["cases"][0]["kl_mean"], 0.014);
  EXPECT_TRUE(json["cases"][2]["kl_mean"].is_null());
  EXPECT_EQ(json["cases"][0]["tables"]["drift"][0]["same_top1"], false);
}

TEST(Render, TerminalPutsVerdictFirstAndCountsLast) {
  const std::string text = rendered(render_terminal, sample_report());
  EXPECT_EQ(text.substr(0, text.find('\n')), "FAILED: sweep of set sample, 2 cases");
  EXPECT_TRUE(text.ends_with("\n1 passed, 1 failed, 2 skipped\n")) << text;
  EXPECT_NE(text.find("optimized: 1 skipped, 1 not run\n"), std::string::npos) << text;
  EXPECT_NE(text.find("not run: no CUDA device (1 case)"), std::string::npos) << text;
  EXPECT_NE(text.find("serial/t1s0q0/trace-1 (reference) failed"), std::string::npos) << text;
}

TEST(Render, TerminalNeverCallsAnUnrunColumnPassed) {
  Report report = sample_report();
  for (CaseResult& row : report.cases) {
    row.status = CaseStatus::not_run;
    row.reason = "no CUDA device";
  }
  const std::string text = rendered(render_terminal, report);
  EXPECT_TRUE(text.starts_with("NOT RUN")) << text;
  EXPECT_TRUE(text.ends_with("\n0 passed, 0 failed, 4 skipped\n")) << text;
}

TEST(Render, SameReportSameBytes) {
  for (const RendererInfo& info : renderers())
    EXPECT_EQ(rendered(info.render, sample_report()), rendered(info.render, sample_report())) << info.name;
}

TEST(Render, TerminalShowsAcceptanceByTiming) {
  Report report = sample_report();
  report.cases.resize(2, report.cases[0]);
  for (CaseResult& row : report.cases) {
    row.executor = "reference";
    row.mode = "block_spec.d2.k2";
    row.timing = "execution_dependent";
    row.acceptance = {{0, 10, 9, 1, 0}, {1, 9, 7, 2, 0}, {2, 0, 0, 7, 1}};
    row.counters = {{"draft_rows", 60}, {"verify_rows", 60}, {"rejected_rows", 16}, {"rewritten_rows", 3}};
    row.divergence = {{0, 1, 70, 0.25, false, 1.0}, {0, 2, 71, 0.5, true, 1.0}};
    row.drift.clear();
  }
  report.cases[0].id = "block_spec.d2.k2/t0s0q1:rolling:execution_dependent:tail0/a";
  report.cases[0].timings = {{"run", 0, 1.0}, {"draft", 0, 0.013}, {"verify", 0, 0.026}, {"accept", 0, 0.0026},
                             {"draft", 1, 0.013}, {"verify", 1, 0.026}, {"accept", 1, 0.0026}};
  report.cases[1].id = "block_spec.d2.k2/t0s0q1:rolling:execution_dependent:tail0:flush=eager/a";
  CaseResult aligned = report.cases[0];
  aligned.timing = "serial_aligned";
  aligned.divergence.clear();
  for (const char* tail : {"", ":tail5"}) {
    aligned.id = std::string("block_spec.d2.k2/t0s0q1:rolling:serial_aligned") + tail + "/a";
    aligned.checks = {{"equals_serial", "passed", "digest"}};
    report.cases.push_back(aligned);
  }
  aligned.checks = {{"equals_serial", "skipped", "seeded"}};
  report.cases.push_back(aligned);
  report.cases[0].divergence = {{0, 1, 70, 0.25, false, 1.0}, {0, 2, 71, 0.5, true, 1.0}, {1, 1, 70, 0.0, true, 0.0}};
  const auto summaries = acceptance_summaries(report);
  ASSERT_EQ(summaries.size(), 4u) << "a tail is a timing of its own";
  EXPECT_EQ(summaries[0].timing, "execution_dependent, tail 0");
  EXPECT_EQ(summaries[1].timing, "execution_dependent, tail 0, eager");
  EXPECT_EQ(summaries[2].timing, "serial_aligned");
  EXPECT_EQ(summaries[3].timing, "serial_aligned, tail 5");
  EXPECT_EQ(summaries[0].divergent_rows, 3);
  EXPECT_EQ(summaries[0].different_rows, 2);
  EXPECT_EQ(summaries[0].compared_requests, 2);
  EXPECT_DOUBLE_EQ(summaries[0].kl_mean.value, 0.25);
  EXPECT_EQ(summaries[0].kl_mean.low, 0.0) << "the second request drawn twice";
  EXPECT_EQ(summaries[0].kl_mean.high, 0.375) << "the first one drawn twice";
  EXPECT_TRUE(std::isnan(summaries[1].kl_mean.low)) << "one request has no spread";
  EXPECT_EQ(summaries[0].tokens, 26) << "1, 2 and 3 tokens of 1, 2 and 7 rounds";
  EXPECT_EQ(summaries[0].timed_tokens, 52) << "twice";
  EXPECT_EQ(summaries[1].timed_tokens, 0) << "nobody measured";
  EXPECT_EQ(summaries[0].flips, 1);
  EXPECT_EQ(summaries[0].kl_max, 0.5);
  EXPECT_EQ(summaries[0].rewritten_rows, 3);
  std::ostringstream out;
  render_terminal(report, out);
  for (const char* cell : {"execution_dependent, tail 0, eager", "0.25 (0..0.375)", "none: bits equal ", "none: bits equal in 1 of 2", "1 of 2"})
    EXPECT_NE(out.str().find(cell), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("90 % (59.6..98.2), 77.8 %"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("2.31 + 2.31, 0.615"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("0.5 + 1 + 0.1"), std::string::npos) << out.str();
}

TEST(Summary, ConformanceKeepsTheWorstLoopOfTheWorstCase) {
  Report report;
  CaseResult a = sample_row(0, "optimized", CaseStatus::passed), b = sample_row(1, "optimized", CaseStatus::failed);
  const auto tolerance = [](const char* metric, int loop, double ratio, const char* verdict) {
    ToleranceRow row;
    row.operation = metric;
    row.level = "decision_forced";
    row.loop = loop;
    row.error_over_bound = ratio;
    row.verdict = verdict;
    return row;
  };
  a.tolerance = {tolerance("hidden", 1, 0.2, "passed"), tolerance("hidden", 1, 9.0, "yardstick"), tolerance("kl", -1, 0.1, "not judged")};
  b.tolerance = {tolerance("hidden", 1, 0.1, "passed"), tolerance("hidden", 4, 1.5, "failed")};
  b.decisions = {{"key", 0, 3, 2, 0, 0, 0.25, 0.5, true, true, ""}, {"key", 0, 4, 2, 0, 0, 0.75, 0.5, false, true, ""}};
  report.cases = {a, b};
  const std::vector<MetricConformance> metrics = metric_conformances(report);
  ASSERT_EQ(metrics.size(), 1u);
  EXPECT_EQ(metrics[0].values, 3);
  EXPECT_EQ(metrics[0].failed, 1);
  EXPECT_EQ(metrics[0].error_over_bound, 1.5);
  EXPECT_EQ(metrics[0].loop, 4);
  EXPECT_EQ(metrics[0].where, b.id);
  const std::vector<FlipCount> flips = flip_counts(report);
  ASSERT_EQ(flips.size(), 1u);
  EXPECT_EQ(flips[0].roots, 2);
  EXPECT_EQ(flips[0].unexplained, 1);
  EXPECT_EQ(flips[0].largest_margin, 0.25);
  const std::string text = rendered(render_terminal, report);
  EXPECT_NE(text.find("decision_forced"), std::string::npos) << text;
}

TEST(Summary, PoolsDriftOverRowsOfAllTraces) {
  Report report;
  CaseResult a = sample_row(0, "reference", CaseStatus::passed), b = sample_row(1, "reference", CaseStatus::passed);
  a.drift = {{0, 0, 6, 1.0, false, 0.0}, {0, 1, 7, 0.5, false, 0.0}};
  b.drift = {{0, 0, 6, 3.0, true, 0.0}, {0, 1, 7, 0.1, true, 0.0}, {0, 2, 8, 0.0, true, 0.0}};
  a.drift_summary = {{"bits_per_byte", "all", 2.0, 2.0, 2.0, 1, "bootstrap"}};
  b.drift_summary = {{"bits_per_byte", "all", 5.0, 5.0, 5.0, 3, "bootstrap"}};
  report.cases = {a, b};
  const std::vector<SettingDrift> drifts = setting_drifts(report);
  ASSERT_EQ(drifts.size(), 1u);
  EXPECT_EQ(drifts[0].settings, "t1s0q0");
  EXPECT_EQ(drifts[0].rows, 3);
  EXPECT_DOUBLE_EQ(drifts[0].kl_mean, 0.2);
  EXPECT_DOUBLE_EQ(drifts[0].kl_max, 0.5);
  EXPECT_EQ(drifts[0].kl_max_where, "serial/t1s0q0/trace-0 request 0 position 7");
  EXPECT_DOUBLE_EQ(drifts[0].same_top1, 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(drifts[0].first_token_kl, 2.0);
  EXPECT_DOUBLE_EQ(drifts[0].bits_per_byte, 17.0 / 4.0);
}

}  // namespace
}  // namespace loopgauge::harness
