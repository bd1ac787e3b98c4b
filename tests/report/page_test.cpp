// SPDX-License-Identifier: Apache-2.0
// The HTML page, JUnit XML, the Markdown comment and the JSON Schema, without a browser: form, escaping, size, and totals that equal the
// report's. tests/report/browser_test.py looks at the page as a person would.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "harness/report/aggregates.hpp"
#include "harness/report/html_assets.hpp"
#include "harness/report/markup.hpp"
#include "harness/report/page_data.hpp"
#include "harness/report/render.hpp"
#include "harness/report/summary.hpp"
#include "tests/report/large_report.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

using Json = nlohmann::json;

std::string rendered(Renderer render, const Report& report) {
  std::ostringstream out;
  render(report, out);
  return out.str();
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

// Content of the only element that starts with `open`.
std::string element(const std::string& page, const std::string& open, const std::string& close) {
  const std::size_t begin = page.find(open);
  EXPECT_NE(begin, std::string::npos) << open;
  if (begin == std::string::npos) return "";
  const std::size_t end = page.find(close, begin);
  return page.substr(begin + open.size(), end - begin - open.size());
}

Json embedded(const std::string& page, const std::string& id) {
  return Json::parse(element(page, "<script type=\"application/json\" id=\"" + id + "\">", "</script>"));
}

bool is_valid_utf8(const std::string& text) { return valid_utf8(text) == text; }

// Elements are closed in the order in which they were opened. Void elements of HTML need no end; script and style hold raw text.
void expect_nested(const std::string& markup, bool html) {
  const std::set<std::string> empty{"meta", "input", "br", "wbr", "img", "link", "hr"};
  std::vector<std::string> open;
  for (std::size_t at = markup.find('<'); at != std::string::npos; at = markup.find('<', at + 1)) {
    if (markup.compare(at, 2, "<!") == 0 || markup.compare(at, 2, "<?") == 0) continue;
    std::size_t end = at + 1;
    char quote = 0;
    while (end < markup.size() && (quote != 0 || markup[end] != '>')) {
      if (quote == 0 && (markup[end] == '"' || markup[end] == '\''))
        quote = markup[end];
      else if (markup[end] == quote)
        quote = 0;
      ++end;
    }
    ASSERT_LT(end, markup.size()) << "an open tag: " << markup.substr(at, 80);
    const std::string tag = markup.substr(at + 1, end - at - 1);
    const bool closing = tag.starts_with('/');
    const std::string name = tag.substr(closing, tag.find_first_of(" \n/", closing) - closing);
    if (closing) {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ(open.back(), name) << "at byte " << at;
      open.pop_back();
    } else if (!tag.ends_with('/') && !(html && empty.contains(name))) {
      open.push_back(name);
      if (html && (name == "script" || name == "style")) end = markup.find("</" + name + ">", end) - 1;
    }
    at = end;
  }
  EXPECT_TRUE(open.empty()) << open.back();
}

TEST(Page, IsWholeSelfContainedAndSaysTheVerdictWithoutAScript) {
  const Report report = sample_report();
  const std::string page = rendered(render_html, report);
  EXPECT_TRUE(page.starts_with("<!doctype html>\n<html lang=\"en\">"));
  EXPECT_TRUE(page.ends_with("</html>\n"));
  expect_nested(page, true);
  EXPECT_EQ(page.find("{{"), std::string::npos) << "a slot of the frame is left";
  EXPECT_EQ(page.find("http://"), page.find("http://www.w3.org/2000/svg")) << "the name of SVG is the only address";
  EXPECT_EQ(page.find("https://"), std::string::npos);
  EXPECT_EQ(count_of(page, " src="), 0u);
  EXPECT_EQ(count_of(page, "<link"), 0u);
  EXPECT_NE(page.find("default-src 'none'; style-src 'sha256-"), std::string::npos);
  EXPECT_EQ(page.find("unsafe-inline"), std::string::npos);
  const std::string verdict = element(page, "<header id=\"verdict\"", "</header>");
  EXPECT_NE(verdict.find("</span> failed</span> <span class=\"title\">sweep of set sample, 2 cases"), std::string::npos) << verdict;
  EXPECT_NE(verdict.find("1 row of 4 failed, first serial/t1s0q0/trace-1 (reference): audit"), std::string::npos) << verdict;
  EXPECT_LT(page.find("id=\"verdict\""), page.find("id=\"failures\""));
  EXPECT_NE(page.find("<code>loopgauge sweep --set sample --filter &#39;a b&#39;</code>"), std::string::npos);
}

TEST(Page, ContentSecurityPolicyNamesTheStyleAndTheScriptOfThePage) {
  const std::string page = rendered(render_html, sample_report());
  EXPECT_EQ(element(page, "<style>", "</style>"), html_assets::style());
  EXPECT_EQ(element(page, "<script>", "</script>"), html_assets::script());
  for (const std::string_view source : {html_assets::style(), html_assets::script()}) {
    EXPECT_EQ(source.find("</"), std::string_view::npos) << "would end its element";
    EXPECT_EQ(source.find("<!--"), std::string_view::npos);
    EXPECT_EQ(source.find("innerHTML"), std::string_view::npos) << "text of a report must not be parsed as markup";
    EXPECT_TRUE(std::all_of(source.begin(), source.end(), [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); })) << "ASCII only";
  }
}

TEST(Page, TotalsEqualThoseOfTheReport) {
  const Report report = large_report({.cases = 700, .speculation = true});
  const std::string page = rendered(render_html, report);
  const Json overview = embedded(page, "overview");
  const StatusCounts counts = count_statuses(report);
  EXPECT_GT(counts.failed, 0);
  EXPECT_GT(counts.skipped, 0);
  EXPECT_EQ(overview["rows"], report.cases.size());
  EXPECT_EQ(overview["counts"]["passed"], counts.passed);
  EXPECT_EQ(overview["counts"]["failed"], counts.failed);
  EXPECT_EQ(overview["counts"]["error"], counts.error);
  EXPECT_EQ(overview["counts"]["skipped"], counts.skipped);
  EXPECT_EQ(overview["counts"]["not_run"], counts.not_run);
  EXPECT_EQ(overview["verdict"], to_string(verdict(report)));

  // The list, row by row.
  const Json& list = overview["cases"];
  ASSERT_EQ(list["n"].size(), report.cases.size());
  const auto text = [&](const char* column, std::size_t row) -> std::string {
    return list[column]["texts"][list[column]["index"][row].get<int>()];
  };
  for (std::size_t n = 0; n < report.cases.size(); ++n) {
    const CaseResult& row = report.cases[n];
    const std::string id = text("id", n);
    EXPECT_EQ(id.empty() ? text("mode", n) + "/" + text("settings", n) + "/" + text("trace", n) : id, row.id);
    EXPECT_EQ(text("executor", n), row.executor);
    EXPECT_EQ(text("status", n), to_string(row.status));
    EXPECT_EQ(text("reason", n), row.reason);
    const double ratio = worst_error_over_bound(row);
    EXPECT_EQ(list["ratio"][n].is_null(), std::isnan(ratio));
    if (!std::isnan(ratio)) {
      EXPECT_NEAR(list["ratio"][n].get<double>(), ratio, 1e-5 * ratio);
    }
  }

  // Matrices and aggregates cover every row.
  std::array<int, 5> sum{};
  for (const Json& matrix : overview["matrices"]) {
    for (const Json& cell : matrix["cells"]) {
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += cell[2][i].get<int>();
      const CaseResult& row = report.cases.at(cell[4].get<std::size_t>());
      EXPECT_EQ(row.mode, matrix["modes"][cell[1].get<std::size_t>()]);
      EXPECT_EQ(settings_of(row), matrix["settings"][cell[0].get<std::size_t>()]);
      EXPECT_EQ(row.executor, matrix["executor"]);
      const bool bad = cell[2][1].get<int>() + cell[2][2].get<int>() > 0;
      EXPECT_EQ(bad, row.status == CaseStatus::failed || row.status == CaseStatus::error) << "a cell leads to its failure";
    }
  }
  EXPECT_EQ(sum, (std::array<int, 5>{counts.passed, counts.failed, counts.error, counts.skipped, counts.not_run}));
  std::int64_t judged = 0, flips = 0, drift_rows = 0;
  for (const Json& item : overview["conformance"]) judged += item["judged"].get<int>();
  for (const Json& group : overview["decisions"]) flips += group["flips"].get<int>();
  for (const Json& setting : overview["drift"]) {
    std::int64_t by_row = 0, by_position = 0;
    for (const Json& bin : setting["after_prompt"]) by_row += bin[2].get<int>();
    for (const Json& bin : setting["by_position"]) by_position += bin[2].get<int>();
    EXPECT_EQ(by_row, by_position);
    EXPECT_EQ(by_row, setting["rows"].get<std::int64_t>() + setting["first_tokens"].get<std::int64_t>());
    drift_rows += by_row;
  }
  std::int64_t expected_judged = 0, expected_flips = 0, expected_rows = 0;
  for (const CaseResult& row : report.cases) {
    expected_judged +=
        std::count_if(row.tolerance.begin(), row.tolerance.end(), [](const ToleranceRow& entry) { return entry.verdict != "yardstick"; });
    expected_flips += std::ssize(row.decisions);
    if (row.mode == "serial") expected_rows += std::ssize(row.drift);
  }
  EXPECT_EQ(judged, expected_judged);
  EXPECT_EQ(flips, expected_flips);
  EXPECT_EQ(drift_rows, expected_rows);
  EXPECT_EQ(overview["acceptance"].size(), 6u) << "one mode on two executors, with Q off and under two timings";
}

TEST(Page, FiveThousandCasesStayBelowTenMegabytesAndFailuresKeepTheirTables) {
  const Report report = large_report({.cases = 5000});
  ASSERT_EQ(report.cases.size(), 10000u);
  const auto begin = std::chrono::steady_clock::now();
  const std::string page = rendered(render_html, report);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  RecordProperty("page_bytes", static_cast<int>(page.size()));
  RecordProperty("milliseconds", static_cast<int>(1e3 * seconds));
  EXPECT_LT(page.size(), 10'000'000u);
  const Json overview = embedded(page, "overview"), details = embedded(page, "details");
  EXPECT_EQ(overview["cases"]["n"].size(), report.cases.size());
  std::size_t detailed = 0;
  for (const Json& flag : overview["cases"]["detailed"]) detailed += flag.get<int>();
  EXPECT_EQ(details["cases"].size(), detailed);
  EXPECT_GT(detailed, 1000u);
  for (std::size_t n = 0; n < report.cases.size(); ++n) {
    if (report.cases[n].status != CaseStatus::failed && report.cases[n].status != CaseStatus::error) continue;
    EXPECT_TRUE(details["cases"].contains(std::to_string(n))) << report.cases[n].id;
  }
}

TEST(Page, LimitsAreKept) {
  const Report report = large_report({.cases = 300});
  const PageData page = page_data(report, {.listed_rows = 50, .detail_bytes = 60'000, .listed_flips = 3, .plotted_flips = 10});
  const Json overview = Json::parse(page.overview);
  EXPECT_EQ(page.listed_rows, 50u);
  EXPECT_EQ(overview["cases"]["n"].size(), 50u);
  EXPECT_EQ(overview["rows"], 600);
  EXPECT_LT(page.details.size(), 61'000u);
  EXPECT_GT(page.detailed_rows, 3u);
  std::size_t failed = 0;
  for (const Json& at : overview["cases"]["status"]["index"]) failed += overview["cases"]["status"]["texts"][at.get<int>()] == "failed";
  EXPECT_EQ(failed, static_cast<std::size_t>(count_statuses(report).failed)) << "failures are listed first";
  for (const Json& group : overview["decisions"]) {
    EXPECT_LE(group["listed"].size(), 3u);
    EXPECT_LE(group["points"].size(), 11u);
  }
}

TEST(Page, HostileTextStaysText) {
  const Report report = hostile_report();
  const std::string page = rendered(render_html, report);
  EXPECT_TRUE(is_valid_utf8(page));
  expect_nested(page, true);
  EXPECT_EQ(count_of(page, "<script"), 3u) << "two texts of data and the page's own script";
  EXPECT_EQ(count_of(page, "</script>"), 3u);
  EXPECT_EQ(count_of(page, "<img"), 0u);
  EXPECT_EQ(count_of(page, "<!--"), 0u);
  EXPECT_EQ(page.find('\x1b'), std::string::npos);
  EXPECT_EQ(page.find("\xe2\x80\xae"), std::string::npos) << "a character that turns the text after it around";
  const Json overview = embedded(page, "overview");
  const std::string reason = overview["cases"]["reason"]["texts"][0];
  EXPECT_TRUE(reason.starts_with("</script><script>document.title='owned'</script>")) << "the reader still sees what was there";
}

TEST(Page, EmptyReportAndReportWithoutTablesAreShown) {
  Report report = sample_report();
  report.cases.clear();
  const std::string page = rendered(render_html, report);
  expect_nested(page, true);
  EXPECT_NE(page.find("the report holds no case"), std::string::npos);
  for (const char* part : {"matrices", "conformance", "decisions", "drift", "acceptance", "timing"})
    EXPECT_TRUE(embedded(page, "overview")[part].empty()) << part;
  EXPECT_TRUE(embedded(page, "overview")["memory"]["bars"].empty());
}

TEST(Aggregates, YardsticksStandOverTheSameBoundAtTheSamePercentile) {
  Report report;
  CaseResult row = sample_row(0, "optimized", CaseStatus::passed);
  ToleranceRow judged;
  judged.operation = "kl";
  judged.level = "teacher_forced";
  judged.verdict = "passed";
  judged.source = "candidate";
  judged.p99 = 0.3;
  judged.max_absolute = 0.9;
  judged.limit = 0.4;
  judged.error_over_bound = 0.75;  // of the 99th percentile
  ToleranceRow reordered = judged, exact = judged, other = judged;
  reordered.verdict = exact.verdict = other.verdict = "yardstick";
  reordered.source = "reordered";
  reordered.p99 = 0.2;
  exact.source = "double";
  exact.p99 = 0.1;
  other.source = "reordered";
  other.operation = "logits";
  row.tolerance = {judged, reordered, exact, other};
  report.cases = {row};
  const auto list = loop_conformances(report);
  ASSERT_EQ(list.size(), 1u);
  EXPECT_DOUBLE_EQ(list[0].worst, 0.75);
  EXPECT_DOUBLE_EQ(list[0].reordered, 0.5);
  EXPECT_DOUBLE_EQ(list[0].exact, 0.25);
  report.cases[0].tolerance[0].error_over_bound = 0.8;  // of no percentile: no yardstick can be put beside it
  EXPECT_TRUE(std::isnan(loop_conformances(report)[0].reordered));
}

TEST(Aggregates, FailedRowWithoutANumberIsInfinitelyFar) {
  CaseResult row = sample_row(0, "optimized", CaseStatus::failed);
  EXPECT_TRUE(std::isnan(worst_error_over_bound(row)));
  ToleranceRow entry;
  entry.verdict = "failed";
  row.tolerance = {entry};
  EXPECT_TRUE(std::isinf(worst_error_over_bound(row)));
  row.tolerance[0].verdict = "not judged";
  EXPECT_TRUE(std::isnan(worst_error_over_bound(row)));
}

TEST(Aggregates, ClusteredIntervalIsThatOfIndependentMeans) {
  ClusteredMean mean;
  EXPECT_TRUE(std::isnan(mean.interval().value));
  mean.add(0, 1.0);
  mean.add(0, 3.0);
  EXPECT_DOUBLE_EQ(mean.interval().value, 2.0);
  EXPECT_TRUE(std::isnan(mean.interval().low)) << "one cluster has no spread";
  mean.add(1, 4.0);
  mean.add(1, 4.0);
  // Cluster means 2 and 4 around 3: residual sums -2 and 2, variance 8 * 2 / 1 / 16 = 1.
  EXPECT_DOUBLE_EQ(mean.interval().value, 3.0);
  EXPECT_NEAR(mean.interval().high - 3.0, 1.96, 1e-3);
}

TEST(Aggregates, VerdictReasonNamesWhatDecided) {
  EXPECT_EQ(verdict_reason(large_report({.cases = 40, .all_passed = true})), "80 rows of 80 passed, none failed");
  EXPECT_EQ(verdict_reason(large_report({.cases = 40, .optimized = false, .all_passed = true})),
            "40 rows of 80 passed, none failed; not part of the verdict: no CUDA device (40 rows)");
  Report holes = large_report({.cases = 4, .all_passed = true});
  holes.meta.case_count = 5;
  EXPECT_NE(verdict_reason(holes).find("fewer than the 5"), std::string::npos);
  Report unrun = large_report({.cases = 4, .all_passed = true});
  unrun.cases[1].status = CaseStatus::not_run;
  unrun.cases[1].reason = "events";
  EXPECT_EQ(verdict_reason(unrun), "coverage is incomplete: events (1 row)");
}

TEST(Aggregates, VerdictOfAPlantedFaultThatWasNotFoundSaysWhy) {
  Report report = large_report({.cases = 3, .optimized = false, .all_passed = true});
  EXPECT_EQ(verdict_word(report), "passed");
  report.meta.mutant = "early_flush";
  for (CaseResult& row : report.cases) {
    if (row.executor == "optimized") row.executor = "mutant:early_flush";
  }
  std::vector<CaseResult*> rows;
  for (CaseResult& row : report.cases) {
    if (is_mutant(row)) rows.push_back(&row);
  }
  ASSERT_EQ(rows.size(), 3u);
  rows[0]->status = CaseStatus::passed;
  rows[0]->checks = {{"equals_clean", "skipped", "not judged"}};
  for (CaseResult* row : {rows[1], rows[2]}) {
    row->status = CaseStatus::not_run;
    row->checks = {{"equals_clean", "not_run", "the fault changes nothing in this case"}};
  }
  EXPECT_EQ(verdict_word(report), "fault not found");
  EXPECT_EQ(verdict_reason(report),
            "the planted fault was not found; it acted in 1 row and no check noticed; it changed nothing in 2 rows: choose cases in which it can act");
  EXPECT_NE(rendered(render_terminal, report).find("FAULT NOT FOUND: "), std::string::npos);
  EXPECT_NE(rendered(render_markdown, report).find("loopgauge: fault not found"), std::string::npos);
  EXPECT_NE(rendered(render_html, report).find("fault not found</span>"), std::string::npos);
  rows[0]->status = CaseStatus::failed;
  rows[0]->reason = "audit: row 5";
  EXPECT_EQ(verdict_word(report), "failed");
}

TEST(Junit, CountsAndColoursFollowTheVerdict) {
  const std::string xml = rendered(render_junit, sample_report());
  expect_nested(xml, false);
  EXPECT_NE(xml.find("tests=\"4\" failures=\"1\" errors=\"0\" skipped=\"2\""), std::string::npos) << xml;
  EXPECT_EQ(count_of(xml, "<testcase "), 4u);
  EXPECT_EQ(count_of(xml, "<failure "), 1u);
  EXPECT_EQ(count_of(xml, "<skipped "), 2u) << "without a device the optimized column does not decide";
  EXPECT_NE(xml.find("loopgauge explain serial/t1s0q0/trace-1"), std::string::npos);

  Report decided = sample_report();
  decided.meta.device_available = true;
  const std::string red = rendered(render_junit, decided);
  EXPECT_NE(red.find("<error type=\"not_run\" message=\"no CUDA device\"/>"), std::string::npos) << red;

  Report holes = large_report({.cases = 4, .all_passed = true});
  holes.meta.case_count = 9;
  const std::string coverage = rendered(render_junit, holes);
  EXPECT_NE(coverage.find("name=\"every case of the request\""), std::string::npos) << coverage;
  EXPECT_NE(coverage.find("tests=\"9\" failures=\"0\" errors=\"1\""), std::string::npos) << coverage;
}

TEST(Junit, HostileTextIsXml) {
  const std::string xml = rendered(render_junit, hostile_report());
  EXPECT_TRUE(is_valid_utf8(xml));
  expect_nested(xml, false);
  EXPECT_TRUE(std::none_of(xml.begin(), xml.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\n'; }));
  EXPECT_EQ(xml.find("\xef\xbf\xbf"), std::string::npos);
}

TEST(Markdown, FitsACommentWhateverTheReport) {
  for (const Report& report : {sample_report(), hostile_report(), large_report({.cases = 2500}),
                               large_report({.cases = 100, .optimized = false, .all_passed = true})}) {
    const std::string text = rendered(render_markdown, report);
    EXPECT_LT(text.size(), 65'536u);
    EXPECT_TRUE(is_valid_utf8(text));
    EXPECT_TRUE(text.starts_with("## ")) << text.substr(0, 80);
    EXPECT_EQ(count_of(text, "<details>"), count_of(text, "</details>"));
    EXPECT_NE(text.find(summary_line(count_statuses(report))), std::string::npos);
  }
}

TEST(Markdown, EveryRowOfATableHasTheCellsOfItsHead) {
  for (const Report& report : {sample_report(), hostile_report(), large_report({.cases = 600})}) {
    std::istringstream text(rendered(render_markdown, report));
    std::string line;
    std::ptrdiff_t columns = 0;
    int rows = 0;
    while (std::getline(text, line)) {
      if (!line.starts_with("|")) {
        columns = 0;
        continue;
      }
      const auto bars = std::count(line.begin(), line.end(), '|');
      if (columns == 0) columns = bars;
      EXPECT_EQ(bars, columns) << line;
      ++rows;
    }
    EXPECT_GT(rows, 10);
  }
}

TEST(Markdown, HostileTextIsCodeOnly) {
  std::string text = rendered(render_markdown, hostile_report());
  // What stands in code is no markup; nothing hostile may be left outside.
  const auto erase_between = [&](const std::string& open, const std::string& close) {
    for (std::size_t at = text.find(open); at != std::string::npos; at = text.find(open)) {
      const std::size_t end = text.find(close, at + open.size());
      ASSERT_NE(end, std::string::npos);
      text.erase(at, end + close.size() - at);
    }
  };
  erase_between("<code>", "</code>");
  erase_between("`", "`");
  for (const char* part : {"@somebody", "owned", "**bold**", "example.invalid", "<script", "#1"})
    EXPECT_EQ(text.find(part), std::string::npos) << part;
}

TEST(Markup, TextIsCutBetweenCharactersAndRepaired) {
  EXPECT_EQ(clipped("abc", 3), "abc");
  EXPECT_EQ(clipped("abcdef", 5), "ab\xe2\x80\xa6");
  EXPECT_EQ(clipped("\xc3\xa9\xc3\xa9\xc3\xa9", 5), "\xc3\xa9\xe2\x80\xa6");
  EXPECT_EQ(clipped("\xf0\x9f\x98\x80z", 5), "\xf0\x9f\x98\x80z");
  for (std::size_t bytes = 3; bytes < 12; ++bytes) {
    const std::string cut = clipped("a\xf0\x9f\x98\x80\xc3\xa9\xe2\x82\xac xyz", bytes);
    EXPECT_LE(cut.size(), bytes);
    EXPECT_TRUE(is_valid_utf8(cut));
  }
  EXPECT_EQ(valid_utf8("a\xff"
                       "b\xc3"),
            "a\xef\xbf\xbd"
            "b\xef\xbf\xbd");
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd") << "a surrogate";
  EXPECT_EQ(html_text("<a href='x'>&\"\x01"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\xef\xbf\xbd");
  EXPECT_EQ(xml_text("a\nb"), "a&#10;b");
  EXPECT_EQ(json_for_script("\"</script>\""), "\"\\u003c/script>\"");
  EXPECT_EQ(markdown_code("plain id"), "`plain id`");
  EXPECT_EQ(markdown_code("a|`b"), "<code>a&#124;&#96;b</code>");
  EXPECT_EQ(markdown_code(" \n "), "");
  EXPECT_EQ(base64("any carnal pleas"), "YW55IGNhcm5hbCBwbGVhcw==");
}

// The part of JSON Schema that the published schema uses. Returns what does not hold, empty when all does.
std::string violation(const Json& value, const Json& schema, const Json& root, const std::string& where) {
  if (schema.contains("$ref"))
    return violation(value, root.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))), root, where);
  if (schema.contains("const") && value != schema["const"]) return where + " is not " + schema["const"].dump();
  if (schema.contains("enum") && std::find(schema["enum"].begin(), schema["enum"].end(), value) == schema["enum"].end())
    return where + " is none of the words";
  if (schema.contains("type")) {
    const auto is = [&](const std::string& type) {
      return (type == "object" && value.is_object()) || (type == "array" && value.is_array()) || (type == "string" && value.is_string()) ||
             (type == "integer" && value.is_number_integer()) || (type == "number" && value.is_number()) ||
             (type == "boolean" && value.is_boolean()) || (type == "null" && value.is_null());
    };
    const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
    if (std::none_of(types.begin(), types.end(), [&](const Json& type) { return is(type); })) return where + " is no " + types.dump();
  }
  if (schema.contains("minimum") && value < schema["minimum"]) return where + " is too small";
  if (schema.contains("minItems") && value.size() < schema["minItems"]) return where + " has too few items";
  if (schema.contains("required")) {
    for (const Json& name : schema["required"])
      if (!value.contains(name.get<std::string>())) return where + " lacks " + name.dump();
  }
  if (value.is_object()) {
    for (const auto& [name, entry] : value.items()) {
      if (schema.contains("properties") && schema["properties"].contains(name)) {
        if (std::string found = violation(entry, schema["properties"][name], root, where + "/" + name); !found.empty()) return found;
      } else if (schema.value("additionalProperties", true) == false) {
        return where + " has the unknown " + name;
      }
    }
  }
  if (value.is_array() && schema.contains("items")) {
    for (std::size_t i = 0; i < value.size(); ++i)
      if (std::string found = violation(value[i], schema["items"], root, where + "/" + std::to_string(i)); !found.empty()) return found;
  }
  return "";
}

TEST(JsonSchema, PublishedFileIsTheProgramsAndJsonObeysIt) {
  std::ifstream in(std::string(LOOPGAUGE_SOURCE_DIR) + "/reports/report.schema.json");
  const std::string published(std::istreambuf_iterator<char>(in), {});
  std::ostringstream own;
  render_json_schema(own);
  EXPECT_EQ(published, own.str()) << "write it again: loopgauge report --json-schema > reports/report.schema.json";
  const Json schema = Json::parse(published);
  for (const Report& report : {sample_report(), hostile_report(), large_report({.cases = 120, .speculation = true})})
    EXPECT_EQ(violation(Json::parse(rendered(render_json, report)), schema, schema, ""), "");

  // It can refuse.
  const Json good = Json::parse(rendered(render_json, sample_report()));
  const std::vector<std::pair<const char*, std::function<void(Json&)>>> changes{
      {"a word that is no status", [](Json& json) { json["cases"][0]["status"] = "fine"; }},
      {"a number as text", [](Json& json) { json["cases"][0]["kl_mean"] = "0.1"; }},
      {"a missing column", [](Json& json) { json["cases"][0].erase("reason"); }},
      {"an unknown column", [](Json& json) { json["cases"][0]["tables"]["drift"][0]["colour"] = 1; }},
      {"an empty table", [](Json& json) { json["cases"][0]["tables"]["drift"] = Json::array(); }},
      {"another version", [](Json& json) { json["schema_version"] = "0.9"; }},
      {"a fraction of a case", [](Json& json) { json["counts"]["passed"] = 0.5; }},
      {"no cases", [](Json& json) { json.erase("cases"); }},
  };
  for (const auto& [what, change] : changes) {
    Json bad = good;
    change(bad);
    EXPECT_NE(violation(bad, schema, schema, ""), "") << what;
  }
}

}  // namespace
}  // namespace loopgauge::harness
