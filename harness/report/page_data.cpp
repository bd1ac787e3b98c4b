// SPDX-License-Identifier: Apache-2.0
#include "harness/report/page_data.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "harness/compare/drift.hpp"
#include "harness/report/aggregates.hpp"
#include "harness/report/compact_tables.hpp"
#include "harness/report/markup.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/schema.hpp"
#include "harness/report/summary.hpp"

namespace loopgauge::harness {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kDetailDriftBins = 64;
constexpr std::size_t kDetailTolerance = 24;
constexpr std::size_t kDetailDecisions = 24;

// Six significant digits read back to the double whose shortest form has at most six.
Json number(double value) {
  if (std::isnan(value)) return nullptr;
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.6g", value);
  const double rounded = std::strtod(buffer, nullptr);
  if (rounded == std::floor(rounded) && std::fabs(rounded) < 1e15) return static_cast<std::int64_t>(rounded);  // "3" instead of "3.0"
  return rounded;
}

Json interval(const Interval& value) { return Json::array({number(value.value), number(value.low), number(value.high)}); }

// Distinct texts, each once; rows hold their index.
class Dictionary {
 public:
  std::size_t index_of(const std::string& text) {
    const auto [place, added] = index_.try_emplace(text, texts_.size());
    if (added) texts_.push_back(text);
    return place->second;
  }
  const Json& texts() const { return texts_; }

 private:
  std::unordered_map<std::string, std::size_t> index_;
  Json texts_ = Json::array();
};

struct TextColumn {
  Dictionary dictionary;
  Json index = Json::array();
  void add(const std::string& text) { index.push_back(dictionary.index_of(text)); }
  Json json() const { return {{"texts", dictionary.texts()}, {"index", index}}; }
};

bool is_bad(const CaseResult& row) { return row.status == CaseStatus::failed || row.status == CaseStatus::error; }

// Row numbers in the order in which they deserve room: failures and errors, then the nearest to a limit, then the order of the report.
std::vector<std::size_t> by_interest(const Report& report) {
  std::vector<double> ratio;
  for (const CaseResult& row : report.cases) {
    const double worst = worst_error_over_bound(row);
    ratio.push_back(std::isnan(worst) ? -1.0 : worst);
  }
  std::vector<std::size_t> order(report.cases.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const bool bad_a = is_bad(report.cases[a]), bad_b = is_bad(report.cases[b]);
    return bad_a != bad_b ? bad_a : ratio[a] > ratio[b];
  });
  return order;
}

Json counts_json(const StatusCounts& counts) {
  return {{"passed", counts.passed},
          {"failed", counts.failed},
          {"error", counts.error},
          {"skipped", counts.skipped},
          {"not_run", counts.not_run}};
}

Json meta_json(const ReportMeta& meta, std::size_t text_bytes) {
  Json json;
  for (const Column<ReportMeta>& column : columns<ReportMeta>())
    json[std::string(column.name)] = clipped(cell_text(meta, column), text_bytes);
  return json;
}

// Columns of the list of rows; `listed` holds row numbers of the report, ascending.
Json rows_json(const Report& report, const std::vector<std::size_t>& listed, const std::vector<bool>& detailed, std::size_t text_bytes) {
  TextColumn id, mode, settings, trace, executor, status, reason;
  Json number_of = Json::array(), ratio = Json::array(), flips = Json::array(), unexplained = Json::array(), has_details = Json::array();
  using Headline = std::pair<const char*, double CaseResult::*>;
  constexpr Headline kHeadlines[] = {{"kl_mean", &CaseResult::kl_mean},
                                     {"kl_max", &CaseResult::kl_max},
                                     {"first_token_kl", &CaseResult::first_token_kl},
                                     {"same_top1", &CaseResult::same_top1},
                                     {"bits_per_byte", &CaseResult::bits_per_byte},
                                     {"task_accuracy", &CaseResult::task_accuracy},
                                     {"memory_ratio", &CaseResult::memory_ratio},
                                     {"seconds", &CaseResult::seconds}};
  std::vector<Json> headlines(std::size(kHeadlines), Json::array());
  for (const std::size_t n : listed) {
    const CaseResult& row = report.cases[n];
    number_of.push_back(n);
    // Most ids are their parts put together: only the others are written out.
    id.add(row.id == row.mode + "/" + settings_of(row) + "/" + row.trace ? "" : clipped(row.id, text_bytes));
    mode.add(clipped(row.mode, text_bytes));
    settings.add(clipped(settings_of(row), text_bytes));
    trace.add(clipped(row.trace, text_bytes));
    executor.add(clipped(row.executor, text_bytes));
    status.add(std::string(to_string(row.status)));
    reason.add(clipped(row.reason, text_bytes));
    ratio.push_back(number(worst_error_over_bound(row)));
    flips.push_back(std::count_if(row.decisions.begin(), row.decisions.end(), [](const DecisionRow& flip) { return flip.root; }));
    unexplained.push_back(
        std::count_if(row.decisions.begin(), row.decisions.end(), [](const DecisionRow& flip) { return !flip.explained; }));
    has_details.push_back(detailed[n] ? 1 : 0);
    for (std::size_t i = 0; i < headlines.size(); ++i) headlines[i].push_back(number(row.*kHeadlines[i].second));
  }
  Json json{{"n", std::move(number_of)},
            {"id", id.json()},
            {"mode", mode.json()},
            {"settings", settings.json()},
            {"trace", trace.json()},
            {"executor", executor.json()},
            {"status", status.json()},
            {"reason", reason.json()},
            {"ratio", std::move(ratio)},
            {"flips", std::move(flips)},
            {"unexplained", std::move(unexplained)},
            {"detailed", std::move(has_details)}};
  for (std::size_t i = 0; i < headlines.size(); ++i) json[kHeadlines[i].first] = std::move(headlines[i]);
  return json;
}

Json matrices_json(const Report& report, std::size_t text_bytes) {
  Json list = Json::array();
  for (const StatusMatrix& matrix : status_matrices(report)) {
    struct Cell {
      double ratio = kNotApplicable;
      std::size_t row = 0;  // the failing row, else the nearest to a limit, else the first
      bool bad = false, any = false;
    };
    std::map<std::pair<std::string, std::string>, Cell> cells;
    for (std::size_t n = 0; n < report.cases.size(); ++n) {
      const CaseResult& row = report.cases[n];
      if (row.executor != matrix.executor) continue;
      Cell& cell = cells[{settings_of(row), row.mode}];
      const double ratio = worst_error_over_bound(row);
      const bool nearer = !std::isnan(ratio) && !(ratio <= cell.ratio);
      if (nearer) cell.ratio = ratio;
      if (!cell.any || (is_bad(row) && !cell.bad) || (nearer && is_bad(row) == cell.bad)) cell.row = n;
      cell.bad = cell.bad || is_bad(row);
      cell.any = true;
    }
    Json settings = Json::array(), modes = Json::array(), entries = Json::array();
    for (const std::string& text : matrix.settings) settings.push_back(clipped(text, text_bytes));
    for (const std::string& text : matrix.modes) modes.push_back(clipped(text, text_bytes));
    std::map<std::string, std::size_t> setting_index, mode_index;
    for (const std::string& text : matrix.settings) setting_index.try_emplace(text, setting_index.size());
    for (const std::string& text : matrix.modes) mode_index.try_emplace(text, mode_index.size());
    for (const auto& [place, c] : matrix.cells) {
      const Cell& cell = cells.at(place);
      entries.push_back(Json::array({setting_index.at(place.first), mode_index.at(place.second),
                                     Json::array({c.passed, c.failed, c.error, c.skipped, c.not_run}), number(cell.ratio), cell.row}));
    }
    list.push_back({{"executor", clipped(matrix.executor, text_bytes)}, {"settings", settings}, {"modes", modes}, {"cells", entries}});
  }
  return list;
}

Json conformance_json(const Report& report, std::size_t text_bytes) {
  Json list = Json::array();
  for (const LoopConformance& item : loop_conformances(report)) {
    list.push_back({{"executor", clipped(item.executor, text_bytes)},
                    {"level", clipped(item.level, text_bytes)},
                    {"operation", clipped(item.operation, text_bytes)},
                    {"loop", item.loop},
                    {"judged", item.judged},
                    {"failed", item.failed},
                    {"median", number(item.median)},
                    {"worst", number(item.worst)},
                    {"reordered", number(item.reordered)},
                    {"double", number(item.exact)},
                    {"row", item.worst_row},
                    {"where", clipped(item.where, text_bytes)}});
  }
  return list;
}

Json flip_json(const DecisionRow& flip, std::size_t text_bytes) {
  return Json::array({flip.request, flip.position, flip.loop, flip.layer, flip.head, number(flip.margin), number(flip.difference),
                      flip.explained ? 1 : 0, flip.root ? 1 : 0, clipped(flip.detail, text_bytes)});
}

// Per kind and executor: counts over all rows, margins of a sample, and the flips that matter most: unexplained, then widest margin.
Json decisions_json(const Report& report, const PageLimits& limits) {
  struct Group {
    std::vector<std::pair<std::size_t, const DecisionRow*>> flips;
    std::size_t cases = 0;
  };
  std::vector<std::pair<std::string, std::string>> order;
  std::map<std::pair<std::string, std::string>, Group> groups;
  for (std::size_t n = 0; n < report.cases.size(); ++n) {
    Group* last = nullptr;
    std::vector<Group*> counted;
    for (const DecisionRow& flip : report.cases[n].decisions) {
      const auto [place, added] = groups.try_emplace({report.cases[n].executor, flip.kind});
      if (added) order.push_back(place->first);
      last = &place->second;
      last->flips.emplace_back(n, &flip);
      if (std::find(counted.begin(), counted.end(), last) == counted.end()) {
        counted.push_back(last);
        ++last->cases;
      }
    }
  }
  Json list = Json::array();
  for (const auto& key : order) {
    Group& group = groups.at(key);
    std::stable_sort(group.flips.begin(), group.flips.end(), [](const auto& a, const auto& b) {
      if (a.second->explained != b.second->explained) return !a.second->explained;
      const double left = std::isnan(a.second->margin) ? -1.0 : a.second->margin,
                   right = std::isnan(b.second->margin) ? -1.0 : b.second->margin;
      return left > right;
    });
    std::size_t roots = 0, unexplained = 0;
    double widest = kNotApplicable;
    for (const auto& [n, flip] : group.flips) {
      roots += flip->root;
      unexplained += !flip->explained;
      if (flip->explained && flip->root && !(flip->margin <= widest)) widest = flip->margin;
    }
    Json listed = Json::array(), points = Json::array();
    for (std::size_t i = 0; i < std::min(limits.listed_flips, group.flips.size()); ++i) {
      Json flip = flip_json(*group.flips[i].second, limits.text_bytes);
      flip.insert(flip.begin(), group.flips[i].first);
      listed.push_back(std::move(flip));
    }
    // All that are unexplained, then every k-th of the others in order of margin.
    const std::size_t explained = group.flips.size() - unexplained;
    const std::size_t room = limits.plotted_flips > unexplained ? limits.plotted_flips - unexplained : 1;
    const std::size_t step = std::max<std::size_t>(1, (explained + room - 1) / room);
    for (std::size_t i = 0; i < group.flips.size(); ++i) {
      const bool take = i < unexplained ? i < limits.plotted_flips : (i - unexplained) % step == 0;
      if (!take) continue;
      const DecisionRow& flip = *group.flips[i].second;
      points.push_back(Json::array({number(flip.margin), number(flip.difference), flip.explained ? 1 : 0, group.flips[i].first}));
    }
    list.push_back({{"executor", clipped(key.first, limits.text_bytes)},
                    {"kind", clipped(key.second, limits.text_bytes)},
                    {"flips", group.flips.size()},
                    {"cases", group.cases},
                    {"roots", roots},
                    {"unexplained", unexplained},
                    {"widest", number(widest)},
                    {"points", std::move(points)},
                    {"listed", std::move(listed)}});
  }
  return list;
}

Json bins_json(const std::vector<DriftBin>& bins) {
  Json list = Json::array();
  for (const DriftBin& bin : bins)
    list.push_back(Json::array({bin.begin, bin.end, bin.rows, interval(bin.kl), number(bin.kl_max), interval(bin.same_top1)}));
  return list;
}

Json drift_json(const Report& report, std::size_t text_bytes) {
  const std::vector<SettingDrift> settings = setting_drifts(report);
  const std::vector<DriftProfile> profiles = drift_profiles(report);
  Json list = Json::array();
  for (const SettingDrift& drift : settings) {
    const auto profile = std::find_if(profiles.begin(), profiles.end(), [&](const DriftProfile& other) {
      return other.executor == drift.executor && other.settings == drift.settings;
    });
    if (profile == profiles.end()) continue;
    list.push_back({{"executor", clipped(drift.executor, text_bytes)},
                    {"settings", clipped(drift.settings, text_bytes)},
                    {"traces", drift.traces},
                    {"rows", drift.rows},
                    {"kl", interval(profile->continuation_kl)},
                    {"kl_p99", number(drift.kl_p99)},
                    {"kl_max", number(drift.kl_max)},
                    {"kl_max_where", clipped(drift.kl_max_where, text_bytes)},
                    {"first_token_kl", interval(profile->first_token_kl)},
                    {"first_tokens", drift.first_tokens},
                    {"same_top1", Json::array({number(drift.same_top1), number(drift.same_top1_low), number(drift.same_top1_high)})},
                    {"bits_per_byte", number(drift.bits_per_byte)},
                    {"task_accuracy", number(drift.task_accuracy)},
                    {"answers", drift.answers},
                    {"noise_p99", number(profile->noise_p99)},
                    {"noise_max", number(profile->noise_max)},
                    {"after_prompt", bins_json(profile->after_prompt)},
                    {"by_position", bins_json(profile->by_position)}});
  }
  return list;
}

Json acceptance_json(const Report& report, std::size_t text_bytes) {
  Json list = Json::array();
  for (const AcceptanceSummary& summary : acceptance_summaries(report)) {
    Json positions = Json::array();
    for (const AcceptanceSummary::Position& position : summary.positions) {
      const Estimate rate = wilson_interval(position.accepted, position.drafted);
      positions.push_back(Json::array(
          {position.drafted, position.accepted, interval({rate.value, rate.low, rate.high}), position.rounds, position.divergences}));
    }
    Json seconds = Json::array();  // draft, verification, acceptance; empty where they were not measured
    for (const double phase : {summary.draft_seconds, summary.verify_seconds, summary.accept_seconds}) {
      if (summary.timed_tokens > 0) seconds.push_back(number(phase / static_cast<double>(summary.timed_tokens)));
    }
    list.push_back({{"executor", clipped(summary.executor, text_bytes)},
                    {"mode", clipped(summary.mode + (summary.timing.empty() ? "" : ", " + summary.timing), text_bytes)},
                    {"cases", summary.cases},
                    {"mean_emitted", number(summary.mean_emitted)},
                    {"seconds_per_token", std::move(seconds)},
                    {"positions", std::move(positions)}});
  }
  return list;
}

Json compact_json(const CompactTable& table, std::size_t text_bytes) {
  Json rows = Json::array();
  for (const std::vector<std::string>& row : table.rows) {
    Json cells = Json::array();
    for (const std::string& cell : row) cells.push_back(clipped(cell, text_bytes));
    rows.push_back(std::move(cells));
  }
  return {{"title", table.title}, {"header", table.header}, {"rows", std::move(rows)}};
}

Json memory_json(const Report& report, std::size_t text_bytes) {
  const MemoryBars memory = memory_bars(report);
  Json bars = Json::array();
  for (const MemoryBar& bar : memory.bars) {
    Json categories = Json::array();
    for (const auto& [name, bytes] : bar.categories) {
      if (bytes.logical_bytes == 0 && bytes.physical_bytes == 0) continue;
      categories.push_back(
          Json::array({clipped(name, text_bytes), bytes.logical_bytes, bytes.physical_bytes, is_kv_category(name) ? 1 : 0}));
    }
    bars.push_back({{"settings", clipped(bar.settings, text_bytes)},
                    {"source", clipped(bar.source, text_bytes)},
                    {"phase", clipped(bar.phase, text_bytes)},
                    {"executor", clipped(bar.executor, text_bytes)},
                    {"categories", std::move(categories)}});
  }
  return {{"trace", clipped(memory.trace, text_bytes)}, {"bars", std::move(bars)}};
}

Json timing_json(const Report& report, std::size_t text_bytes) {
  Json list = Json::array();
  for (const TimingSummary& summary : timing_summaries(report)) {
    list.push_back({{"executor", clipped(summary.executor, text_bytes)},
                    {"phase", clipped(summary.phase, text_bytes)},
                    {"settings", clipped(summary.settings, text_bytes)},
                    {"cases", summary.cases},
                    {"repetitions", summary.repetitions},
                    {"median", number(summary.median)},
                    {"least", number(summary.least)},
                    {"most", number(summary.most)},
                    {"total", number(summary.total)},
                    {"floor", number(summary.floor)},
                    {"ratio_to_floor", number(summary.ratio_to_floor)}});
  }
  return list;
}

// The worst judged rows, each with the yardsticks of the same metric and loop beside it.
Json tolerance_details(const CaseResult& row, Dictionary& texts, std::size_t text_bytes) {
  std::vector<const ToleranceRow*> judged;
  for (const ToleranceRow& entry : row.tolerance) {
    if (entry.verdict != "yardstick") judged.push_back(&entry);
  }
  std::stable_sort(judged.begin(), judged.end(), [](const ToleranceRow* a, const ToleranceRow* b) {
    const auto rank = [](const ToleranceRow* entry) { return std::isnan(entry->error_over_bound) ? -1.0 : entry->error_over_bound; };
    return (a->verdict == "failed") != (b->verdict == "failed") ? a->verdict == "failed" : rank(a) > rank(b);
  });
  Json list = Json::array();
  for (std::size_t i = 0; i < std::min(kDetailTolerance, judged.size()); ++i) {
    const ToleranceRow& entry = *judged[i];
    double reordered = kNotApplicable, exact = kNotApplicable;
    for (const ToleranceRow& yardstick : row.tolerance) {
      if (yardstick.verdict != "yardstick" || yardstick.level != entry.level || yardstick.operation != entry.operation ||
          yardstick.loop != entry.loop)
        continue;
      (yardstick.source == "reordered" ? reordered : exact) = yardstick.max_absolute;
    }
    const auto text = [&](const std::string& value) { return texts.index_of(clipped(value, text_bytes)); };
    list.push_back(Json::array({text(entry.level), text(entry.operation), entry.loop, text(entry.verdict), number(entry.error_over_bound),
                                number(entry.max_ulp), number(entry.max_absolute), number(reordered), number(exact), number(entry.limit),
                                entry.elements, entry.nan_count + entry.inf_count, text(entry.max_index)}));
  }
  return {{"rows", std::move(list)}, {"of", judged.size()}};
}

// At most kDetailDriftBins groups of consecutive rows: first row, first position, mean, largest, rows, rows with the same top-1.
Json drift_details(const CaseResult& row) {
  Json list = Json::array();
  const std::size_t step = std::max<std::size_t>(1, (row.drift.size() + kDetailDriftBins - 1) / kDetailDriftBins);
  for (std::size_t begin = 0; begin < row.drift.size();) {
    std::size_t end = begin;
    double sum = 0.0, most = kNotApplicable;
    int same = 0;
    const DriftRow& first = row.drift[begin];
    // Row 0 stands alone, and a group never joins requests.
    const std::size_t length = first.row == 0 ? 1 : step;
    while (end < row.drift.size() && end - begin < length && row.drift[end].request == first.request) {
      sum += row.drift[end].kl;
      if (!(row.drift[end].kl <= most)) most = row.drift[end].kl;
      same += row.drift[end].same_top1;
      ++end;
    }
    list.push_back(Json::array(
        {first.request, first.row, first.position, number(sum / static_cast<double>(end - begin)), number(most), end - begin, same}));
    begin = end;
  }
  return list;
}

Json case_details(const CaseResult& row, Dictionary& texts, std::size_t text_bytes) {
  const auto text = [&](const std::string& value) { return texts.index_of(clipped(value, text_bytes)); };
  Json json;
  if (!row.configuration.empty()) json["configuration"] = text(row.configuration);
  if (!row.profile.empty()) json["profile"] = text(row.profile);
  for (const CheckRow& check : row.checks)
    json["checks"].push_back(Json::array({text(check.name), text(check.status), clipped(check.detail, text_bytes)}));
  if (!row.tolerance.empty()) json["tolerance"] = tolerance_details(row, texts, text_bytes);
  for (std::size_t i = 0; i < std::min(kDetailDecisions, row.decisions.size()); ++i) {
    Json flip = flip_json(row.decisions[i], text_bytes);
    flip.insert(flip.begin(), text(row.decisions[i].kind));
    json["decisions"].push_back(std::move(flip));
  }
  if (row.decisions.size() > kDetailDecisions) json["decisions_of"] = row.decisions.size();
  if (!row.drift.empty()) json["drift"] = drift_details(row);
  for (const DriftSummaryRow& summary : row.drift_summary) {
    json["summary"].push_back(Json::array({text(summary.metric), text(summary.scope), number(summary.value), number(summary.low),
                                           number(summary.high), summary.samples, text(summary.method)}));
  }
  for (const CounterRow& counter : row.counters) json["counters"].push_back(Json::array({text(counter.name), counter.value}));
  if (!row.divergence.empty()) {
    double sum = 0.0, most = 0.0;
    std::int64_t same = 0;
    for (const DivergenceRow& entry : row.divergence) {
      sum += entry.kl;
      most = std::max(most, entry.kl);
      same += entry.same_top1;
    }
    json["divergence"] = Json::array({row.divergence.size(), number(sum / static_cast<double>(row.divergence.size())), number(most), same});
  }
  for (const DigestRow& digest : row.digests) {
    if (digest.group == "all") json["digest"] = clipped(digest.sha256, text_bytes);
  }
  return json;
}

// A reason may quote bytes of a file: what is not UTF-8 is replaced instead of ending the rendering.
std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

PageData page_data(const Report& report, const PageLimits& limits) {
  PageData page;
  const std::vector<std::size_t> order = by_interest(report);

  // Tables of single cases, as many as fit. Texts that repeat are counted once.
  Dictionary texts;
  Json cases = Json::object();
  std::vector<bool> detailed(report.cases.size(), false);
  std::size_t bytes = 0, text_bytes = 0, texts_counted = 0;
  for (const std::size_t n : order) {
    const Json details = case_details(report.cases[n], texts, 4 * limits.text_bytes);
    for (; texts_counted < texts.texts().size(); ++texts_counted) text_bytes += dumped(texts.texts()[texts_counted]).size() + 1;
    const std::size_t size = dumped(details).size() + 12;
    if (bytes + size + text_bytes > limits.detail_bytes) break;
    bytes += size;
    cases[std::to_string(n)] = details;
    detailed[n] = true;
    ++page.detailed_rows;
  }
  page.details = dumped(Json{{"texts", texts.texts()}, {"cases", std::move(cases)}});

  std::vector<std::size_t> listed(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(std::min(order.size(), limits.listed_rows)));
  std::sort(listed.begin(), listed.end());
  page.listed_rows = listed.size();

  Json overview;
  overview["version"] = 1;
  overview["verdict"] = std::string(to_string(verdict(report)));
  overview["complete"] = is_complete(report);
  overview["rows"] = report.cases.size();
  overview["counts"] = counts_json(count_statuses(report));
  overview["meta"] = meta_json(report.meta, 4 * limits.text_bytes);
  overview["cases"] = rows_json(report, listed, detailed, limits.text_bytes);
  overview["matrices"] = matrices_json(report, limits.text_bytes);
  overview["conformance"] = conformance_json(report, limits.text_bytes);
  overview["decisions"] = decisions_json(report, limits);
  overview["drift"] = drift_json(report, limits.text_bytes);
  overview["acceptance"] = acceptance_json(report, limits.text_bytes);
  overview["encodings"] = compact_json(encoding_timing_table(report), limits.text_bytes);
  overview["handoffs"] = compact_json(handoff_table(report), limits.text_bytes);
  overview["memory"] = memory_json(report, limits.text_bytes);
  overview["timing"] = timing_json(report, limits.text_bytes);
  page.overview = dumped(overview);
  return page;
}

}  // namespace loopgauge::harness
