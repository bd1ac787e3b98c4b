// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/render_bench.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/bench_tables.hpp"
#include "harness/report/html_assets.hpp"
#include "harness/report/markup.hpp"
#include "harness/report/page_frame.hpp"
#include "harness/report/row_text.hpp"
#include "harness/report/terminal_text.hpp"
#include "harness/report/text_table.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::size_t kCellBytes = 2000;

std::string times(double p50, double p90, double p99) {
  if (std::isnan(p50)) return "-";
  std::string text = formatted("%.1f", p50);
  for (const double tail : {p90, p99}) text += std::isnan(tail) ? " -" : formatted(" %.1f", tail);
  return text;
}

std::string build_text(const BenchMeta& meta) { return "loopgauge " + meta.tool_version + " (" + meta.source_revision + "), " + meta.compiler; }

// Shares as one bar; what a negative remainder takes off is not drawn.
std::string bar_html(const std::vector<double>& shares) {
  std::string out = "<svg class=\"share\" aria-hidden=\"true\" width=\"100%\" height=\"10\">";
  double at = 0, sum = 0;
  for (const double share : shares) sum += std::max(0.0, std::isnan(share) ? 0.0 : share);
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (!(shares[i] > 0)) continue;
    const double width = 100 * shares[i] / std::max(1.0, sum);
    out += formatted("<rect class=\"category-%zu\" x=\"%.2f%%\" width=\"%.2f%%\" height=\"10\"/>", i + 1, at, width);
    at += width;
  }
  return out + "</svg>";
}

std::string section_html(const BenchTable& table) {
  std::string out =
      "<section id=\"" + table.id + "\" aria-labelledby=\"" + table.id + "-title\"><h2 id=\"" + table.id + "-title\">" + html_text(table.title) + "</h2>\n";
  if (!table.note.empty()) out += "<p class=\"lead\">" + html_text(table.note) + "</p>\n";
  if (!table.part_names.empty()) {
    out += "<ul class=\"legend\">";
    for (std::size_t i = 0; i < table.part_names.size(); ++i) {
      out += "<li><svg width=\"12\" height=\"12\" aria-hidden=\"true\"><rect class=\"category-" + std::to_string(i + 1) +
             "\" width=\"12\" height=\"12\"/></svg>" + html_text(table.part_names[i]) + "</li>";
    }
    out += "</ul>\n";
  }
  const auto attributes = [&](std::size_t column) { return column < static_cast<std::size_t>(table.text_columns) ? "" : " class=\"number\""; };
  out += "<div class=\"scroll\" role=\"group\" tabindex=\"0\" aria-label=\"" + html_text(table.title) + "\"><table><thead><tr>";
  for (std::size_t i = 0; i < table.header.size(); ++i) out += "<th scope=\"col\"" + std::string(attributes(i)) + ">" + html_text(table.header[i]) + "</th>";
  out += "</tr></thead><tbody>\n";
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    out += "<tr>";
    for (std::size_t i = 0; i < table.rows[r].size(); ++i) {
      const std::string cell = html_text(clipped(table.rows[r][i], kCellBytes));
      if (i == 0) out += "<th scope=\"row\">" + cell + (r < table.part_shares.size() ? bar_html(table.part_shares[r]) : "") + "</th>";
      else out += "<td" + std::string(attributes(i)) + ">" + cell + "</td>";
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div></section>\n";
}

}  // namespace

std::string bench_line_header(std::string_view table) {
  if (table == "end_to_end") {
    return formatted("%-28s %-24s %-22s %5s %11s %24s %22s %26s %10s", "setting", "mode", "load", "cards", "done/failed", "TTFT ms p50 p90 p99",
                     "TPOT ms p50 p90 p99", "latency ms p50 p90 p99", "tokens/s");
  }
  return formatted("%-28s %-16s %-16s %8s %6s %36s %9s %9s %8s", "what", "setting", "implementation", "context", "batch", "us: median [least, most]", "GB/s",
                   "TFLOP/s", "of floor");
}

std::string bench_line(const BenchRow& row) {
  const std::string what = row.engine == kOwnEngine ? row.what : row.engine + ": " + row.what;
  const std::string share = std::isnan(row.ratio_to_floor) ? "-" : percent(1 / row.ratio_to_floor);
  const std::string rate = row.bytes > 0 ? formatted("%.0f", row.bytes / row.median_us / 1e3) : "-";
  const std::string work = row.flops > 0 ? formatted("%.1f", row.flops / row.median_us / 1e6) : "-";
  return formatted("%-28s %-16s %-16s %8lld %6lld %12.1f [%10.1f, %10.1f] %9s %9s %8s", what.c_str(), row.setting.empty() ? "-" : row.setting.c_str(),
                   row.implementation.empty() ? "-" : row.implementation.c_str(), static_cast<long long>(row.context), static_cast<long long>(row.batch),
                   row.median_us, row.minimum_us, row.maximum_us, rate.c_str(), work.c_str(), share.c_str());
}

std::string bench_line(const EndToEndRow& row) {
  const std::string done = std::to_string(row.finished) + "/" + std::to_string(row.failed);
  std::string more;
  if (row.predicted_live > 0) {
    more += formatted("\n    %lld requests at once, %lld predicted; %.1f tokens/s with all of them", static_cast<long long>(row.most_live),
                      static_cast<long long>(row.predicted_live), row.tokens_per_s_of_all);
  }
  if (row.kv_bytes_of_a_prompt > 0) {
    more += formatted("; %lld bytes of K/V a prompt, 1/%.2f of BF16", static_cast<long long>(row.kv_bytes_of_a_prompt),
                      static_cast<double>(row.bf16_bytes_of_a_prompt) / static_cast<double>(row.kv_bytes_of_a_prompt));
  }
  if (!row.note.empty()) more += "\n    " + row.note;
  return more.insert(0, formatted("%-28s %-24s %-22s %5lld %11s %24s %22s %26s %10.1f", row.setting.c_str(), row.mode.c_str(), row.load.c_str(),
                                  static_cast<long long>(row.device_count), done.c_str(), times(row.ttft_ms_p50, row.ttft_ms_p90, row.ttft_ms_p99).c_str(),
                                  times(row.tpot_ms_p50, row.tpot_ms_p90, row.tpot_ms_p99).c_str(),
                                  times(row.latency_ms_p50, row.latency_ms_p90, row.latency_ms_p99).c_str(), row.output_tokens_per_s));
}

std::string bench_csv_header(std::string_view table) { return table == "end_to_end" ? csv_header<EndToEndRow>() : csv_header<BenchRow>(); }
std::string bench_csv_line(const BenchRow& row) { return csv_line(row); }
std::string bench_csv_line(const EndToEndRow& row) { return csv_line(row); }

void render_bench_json(const BenchReport& report, std::ostream& out) {
  nlohmann::ordered_json json;
  json["format"] = std::string(kBenchFormat);
  json["schema_version"] = std::to_string(kBenchMajor) + "." + std::to_string(kBenchMinor);
  json["meta"] = row_json(report.meta);
  visit_bench_tables([&](const char* name, const char*, const char*, auto table) {
    json[name] = nlohmann::ordered_json::array();
    for (const auto& row : report.*table) json[name].push_back(row_json(row));
  });
  out << json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
}

void render_bench_csv(const BenchReport& report, std::ostream& out) {
  if (!report.rows.empty() || report.end_to_end.empty()) {
    out << bench_csv_header("rows") << "\n";
    for (const BenchRow& row : report.rows) out << csv_line(row) << "\n";
  }
  if (report.end_to_end.empty()) return;
  if (!report.rows.empty()) out << "\n";
  out << bench_csv_header("end_to_end") << "\n";
  for (const EndToEndRow& row : report.end_to_end) out << csv_line(row) << "\n";
}

namespace {

// Single operations have random weights and K/V; requests those of their model.
std::string what_was_timed(const BenchReport& report) {
  std::string text;
  if (!report.rows.empty()) text += ", random weights and K/V, medians of repeated times between device events";
  if (!report.end_to_end.empty()) text += ", requests by the wall clock";
  return text.empty() ? ", nothing" : text;
}

}  // namespace

void render_bench_terminal(const BenchReport& report, std::ostream& out) {
  out << "bench at the shape of " << report.meta.shape << what_was_timed(report) << "\n  device " << report.meta.device << "\n  " << build_text(report.meta)
      << "\n";
  for (const BenchTable& table : bench_tables(report)) {
    out << "\n" << table.title << "\n";
    if (!table.note.empty()) out << "  " << table.note << "\n";
    TextTable text(table.header);
    for (const std::vector<std::string>& row : table.rows) text.add(row);
    text.print(out);
  }
}

void render_bench_markdown(const BenchReport& report, std::ostream& out) {
  out << "## Bench at the shape of " << markdown_code(report.meta.shape) << "\n\nTimed: " << what_was_timed(report).substr(2) << ". Device " << markdown_code(report.meta.device) << "; "
      << markdown_code(build_text(report.meta)) << ".\n";
  for (const BenchTable& table : bench_tables(report)) {
    out << "\n### " << table.title << "\n\n";
    if (!table.note.empty()) out << table.note << "\n\n";
    const auto is_text = [&](std::size_t column) { return column < static_cast<std::size_t>(table.text_columns); };
    for (const std::string& name : table.header) out << "| " << name << " ";
    out << "|\n";
    for (std::size_t i = 0; i < table.header.size(); ++i) out << (is_text(i) ? "|---" : "|---:");
    out << "|\n";
    for (const std::vector<std::string>& row : table.rows) {
      for (std::size_t i = 0; i < row.size(); ++i) out << "| " << (is_text(i) && row[i] != "-" ? markdown_code(row[i]) : row[i]) << " ";
      out << "|\n";
    }
  }
}

void render_bench_html(const BenchReport& report, std::ostream& out) {
  const std::vector<BenchTable> tables = bench_tables(report);
  std::string nav = "<a href=\"#verdict\">Bench</a>", sections;
  for (const BenchTable& table : tables) {
    nav += "<a href=\"#" + table.id + "\">" + html_text(table.title) + "</a>";
    sections += section_html(table);
  }
  const std::string style(html_assets::style());
  const bool broken_off = std::any_of(report.runs.begin(), report.runs.end(), [](const BenchRun& run) { return !run.complete; });
  const std::string header = "<header id=\"verdict\" class=\"verdict\">\n<h1><span class=\"title\">Bench at the shape of " + html_text(report.meta.shape) +
                             "</span></h1>\n<p class=\"why\">" + html_text(what_was_timed(report).substr(2)) + ".</p>\n" +
                             (broken_off ? "<p class=\"notice\"><strong>A run was broken off:</strong> its rows until then are here.</p>\n" : "") +
                             "<dl class=\"facts\"><div><dt>Device</dt><dd>" + html_text(report.meta.device) + "</dd></div><div><dt>Sources</dt><dd>" +
                             html_text(build_text(report.meta)) + "</dd></div><div><dt>Host</dt><dd>" + html_text(report.meta.cpu) +
                             "</dd></div></dl>\n</header>\n";
  write_page(html_assets::bench_page(),
             {{"policy", "default-src 'none'; style-src " + content_hash(style) + "; base-uri 'none'; form-action 'none'"},
              {"title", "Bench: " + html_text(report.meta.device)},
              {"style", style},
              {"nav", nav},
              {"header", header},
              {"sections", sections}},
             out);
}

}  // namespace loopgauge::harness
