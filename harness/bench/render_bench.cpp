// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/render_bench.hpp"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "harness/bench/bench_file.hpp"
#include "harness/report/row_text.hpp"
#include "harness/report/text_table.hpp"

namespace loopgauge::harness {

namespace {

template <class... Arguments>
std::string formatted(const char* format, Arguments... arguments) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, arguments...);
  return buffer;
}

std::string times(double p50, double p90, double p99) {
  return std::isnan(p50) ? "-" : formatted("%.1f %.1f %.1f", p50, p90, p99);
}

}  // namespace

std::string bench_line_header(std::string_view table) {
  if (table == "end_to_end") {
    return formatted("%-28s %-24s %-22s %5s %11s %24s %22s %26s %10s", "setting", "mode", "load", "cards", "done/failed", "TTFT ms p50 p90 p99", "TPOT ms p50 p90 p99",
                     "latency ms p50 p90 p99", "tokens/s");
  }
  return formatted("%-28s %-16s %-16s %8s %6s %36s %9s %9s %8s", "what", "setting", "implementation", "context", "batch", "us: median [least, most]", "GB/s", "TFLOP/s",
                   "of floor");
}

std::string bench_line(const BenchRow& row) {
  const std::string what = row.engine == kOwnEngine ? row.what : row.engine + ": " + row.what;
  const std::string share = std::isnan(row.ratio_to_floor) ? "-" : percent(1 / row.ratio_to_floor);
  const std::string rate = row.bytes > 0 ? formatted("%.0f", row.bytes / row.median_us / 1e3) : "-";
  const std::string work = row.flops > 0 ? formatted("%.1f", row.flops / row.median_us / 1e6) : "-";
  return formatted("%-28s %-16s %-16s %8lld %6lld %12.1f [%10.1f, %10.1f] %9s %9s %8s", what.c_str(), row.setting.empty() ? "-" : row.setting.c_str(),
                   row.implementation.empty() ? "-" : row.implementation.c_str(), static_cast<long long>(row.context), static_cast<long long>(row.batch), row.median_us,
                   row.minimum_us, row.maximum_us, rate.c_str(), work.c_str(), share.c_str());
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
  return more.insert(0, formatted("%-28s %-24s %-22s %5lld %11s %24s %22s %26s %10.1f", row.setting.c_str(), row.mode.c_str(), row.load.c_str(), static_cast<long long>(row.device_count),
                   done.c_str(), times(row.ttft_ms_p50, row.ttft_ms_p90, row.ttft_ms_p99).c_str(), times(row.tpot_ms_p50, row.tpot_ms_p90, row.tpot_ms_p99).c_str(),
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

}  // namespace loopgauge::harness
