// SPDX-License-Identifier: Apache-2.0
#include "harness/report/aggregates.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "harness/compare/bootstrap.hpp"
#include "harness/compare/drift.hpp"
#include "harness/compare/error_stats.hpp"
#include "harness/report/summary.hpp"

namespace loopgauge::harness {

namespace {

constexpr double kNormalQuantile = 1.959963984540054;  // 97.5 % point of the standard normal distribution
constexpr std::int64_t kBlockRows = 8;
constexpr std::int64_t kFirstPositionBin = 64;

double median_of(std::vector<double> values) {
  if (values.empty()) return kNotApplicable;
  std::sort(values.begin(), values.end());
  return median_of_sorted(values);
}

std::string rows_text(std::int64_t count) { return std::to_string(count) + (count == 1 ? " row" : " rows"); }

// The element of `list` with this key, default-constructed at the end of the list when there is none.
template <class Item, class Key>
Item& at_key(std::vector<Item>& list, std::map<Key, std::size_t>& index, const Key& key) {
  const auto [place, added] = index.try_emplace(key, list.size());
  if (added) list.emplace_back();
  return list[place->second];
}

struct BinSums {
  ClusteredMean kl;
  std::int64_t same = 0;
  double most = kNotApplicable;
  void add(std::int64_t cluster, const DriftRow& row) {
    kl.add(cluster, row.kl);
    same += row.same_top1;
    if (!(row.kl <= most)) most = row.kl;
  }
};

std::vector<DriftBin> bins_of(const std::map<std::pair<std::int64_t, std::int64_t>, BinSums>& sums) {
  std::vector<DriftBin> bins;
  for (const auto& [range, sum] : sums) {
    const Estimate same = wilson_interval(sum.same, sum.kl.count());
    bins.push_back({range.first, range.second, sum.kl.count(), sum.kl.interval(), sum.most, {same.value, same.low, same.high}});
  }
  return bins;
}

// [2^k, 2^(k+1)) around a row >= 1, [0, 1) for row 0.
std::pair<std::int64_t, std::int64_t> row_bin(std::int64_t row) {
  if (row < 1) return {0, 1};
  const auto begin = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(row)));
  return {begin, 2 * begin};
}

std::pair<std::int64_t, std::int64_t> position_bin(std::int64_t position) {
  if (position < kFirstPositionBin) return {0, kFirstPositionBin};
  const auto begin = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(position)));
  return {begin, 2 * begin};
}

}  // namespace

namespace {

// Rows of a planted fault that nothing found: those that it left as they are, and those that it changed unnoticed.
std::string missed_fault_text(const Report& report) {
  std::int64_t unnoticed = 0, without_effect = 0, other = 0;
  for (const CaseResult& row : report.cases) {
    if (!is_mutant(row)) continue;
    const bool same = std::any_of(row.checks.begin(), row.checks.end(),
                                  [](const CheckRow& check) { return check.name == "equals_clean" && check.status != "skipped"; });
    ++(same ? without_effect : row.status == CaseStatus::passed ? unnoticed : other);
  }
  std::string text = "the planted fault was not found";
  if (unnoticed > 0) text += "; it acted in " + rows_text(unnoticed) + " and no check noticed";
  if (without_effect > 0) text += "; it changed nothing in " + rows_text(without_effect) + ": choose cases in which it can act";
  if (other > 0) text += "; " + rows_text(other) + " did not run";
  return text;
}

bool fault_missed(const Report& report) {
  return !report.meta.mutant.empty() && verdict(report) == CaseStatus::not_run && !fault_found(report);
}

}  // namespace

std::string verdict_word(const Report& report) {
  if (fault_missed(report)) return "fault not found";
  const CaseStatus result = verdict(report);
  return result == CaseStatus::not_run ? "not run" : std::string(to_string(result));
}

std::string verdict_reason(const Report& report) {
  const CaseStatus result = verdict(report);
  const StatusCounts counts = count_statuses(report);
  const auto total = std::ssize(report.cases);
  if (result == CaseStatus::failed || result == CaseStatus::error) {
    const auto first = std::find_if(report.cases.begin(), report.cases.end(), [&](const CaseResult& row) { return row.status == result; });
    std::string text = result == CaseStatus::error ? rows_text(counts.error) + " of " + std::to_string(total) + " could not be judged"
                                                   : rows_text(counts.failed) + " of " + std::to_string(total) + " failed";
    if (result == CaseStatus::error && counts.failed > 0) text += " and " + std::to_string(counts.failed) + " failed";
    return text + ", first " + first->id + " (" + first->executor + "): " + first->reason;
  }
  if (fault_missed(report)) return missed_fault_text(report);
  std::map<std::string, int> reasons;  // of rows that were left out or not run
  for (const CaseResult& row : report.cases) {
    const bool left_out = row.status == CaseStatus::skipped || row.status == CaseStatus::not_run;
    if (left_out && (result == CaseStatus::passed || result == CaseStatus::skipped || !is_excused(report, row))) ++reasons[row.reason];
  }
  const auto most = std::max_element(reasons.begin(), reasons.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const std::string because = most == reasons.end() ? "" : most->first + " (" + rows_text(most->second) + ")";
  if (result == CaseStatus::not_run) {
    if (report.cases.empty()) return "the report holds no case";
    if (counts.passed == 0 && because.empty()) return "no row passed";
    if (because.empty())
      return "cases of the request are missing: the report has fewer than the " + std::to_string(report.meta.case_count) + " asked for";
    return "coverage is incomplete: " + because;
  }
  if (report.cases.empty()) return "no case of the request falls to this shard";
  std::string text = rows_text(counts.passed) + " of " + std::to_string(total) + " passed, none failed";
  if (!because.empty()) text += "; not part of the verdict: " + because;
  return text;
}

double worst_error_over_bound(const CaseResult& row) {
  double worst = kNotApplicable;
  for (const ToleranceRow& entry : row.tolerance) {
    if (entry.verdict != "passed" && entry.verdict != "failed") continue;
    double ratio = entry.error_over_bound;
    if (std::isnan(ratio) && entry.verdict == "failed") ratio = std::numeric_limits<double>::infinity();
    if (!std::isnan(ratio) && !(ratio <= worst)) worst = ratio;
  }
  return worst;
}

void ClusteredMean::add(std::int64_t cluster, double value) {
  Sum& sum = clusters_[cluster];
  sum.values += value;
  ++sum.count;
  sum_ += value;
  ++count_;
}

Interval ClusteredMean::interval() const {
  if (count_ == 0) return {};
  const double n = static_cast<double>(count_), mean = sum_ / n;
  if (clusters_.size() < 2) return {mean, kNotApplicable, kNotApplicable};
  double squares = 0.0;
  for (const auto& [cluster, sum] : clusters_) {
    const double residual = sum.values - mean * static_cast<double>(sum.count);
    squares += residual * residual;
  }
  const double k = static_cast<double>(clusters_.size());
  const double half = kNormalQuantile * std::sqrt(squares * k / (k - 1.0)) / n;
  return {mean, std::max(0.0, mean - half), mean + half};
}

std::vector<DriftProfile> drift_profiles(const Report& report) {
  struct Sums {
    ClusteredMean continuation, first;
    std::map<std::pair<std::int64_t, std::int64_t>, BinSums> rows, positions;
  };
  std::vector<DriftProfile> profiles;
  std::vector<Sums> sums;
  std::map<std::pair<std::string, std::string>, std::size_t> index, sums_index;
  std::int64_t requests = 0;  // of the cases before, so that clusters of different cases differ
  for (const CaseResult& row : report.cases) {
    if (row.mode != "serial" || row.executor.starts_with("mutant:") || row.drift.empty()) continue;
    const std::pair key{row.executor, settings_of(row)};
    DriftProfile& profile = at_key(profiles, index, key);
    std::tie(profile.executor, profile.settings) = key;
    Sums& sum = at_key(sums, sums_index, key);
    std::int64_t most_requests = 0;
    for (const DriftRow& entry : row.drift) {
      constexpr std::int64_t kBlocks = std::int64_t{1} << 28;  // more than a request has blocks
      const std::int64_t request = requests + entry.request, block = request * kBlocks + std::max<std::int64_t>(entry.row, 0) / kBlockRows;
      most_requests = std::max(most_requests, entry.request + 1);
      if (entry.row == 0)
        sum.first.add(request, entry.kl);
      else
        sum.continuation.add(block, entry.kl);
      sum.rows[row_bin(entry.row)].add(block, entry);
      sum.positions[position_bin(entry.position)].add(block, entry);
    }
    requests += most_requests;
    for (const ToleranceRow& entry : row.tolerance) {
      if (entry.level != "teacher_forced" || entry.operation != "kl" || entry.source != "reordered") continue;
      if (!(entry.p99 <= profile.noise_p99)) profile.noise_p99 = entry.p99;
      if (!(entry.max_absolute <= profile.noise_max)) profile.noise_max = entry.max_absolute;
    }
  }
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    profiles[i].continuation_kl = sums[i].continuation.interval();
    profiles[i].first_token_kl = sums[i].first.interval();
    profiles[i].after_prompt = bins_of(sums[i].rows);
    profiles[i].by_position = bins_of(sums[i].positions);
  }
  return profiles;
}

std::vector<LoopConformance> loop_conformances(const Report& report) {
  std::vector<LoopConformance> list;
  std::vector<std::vector<double>> ratios;
  std::map<std::tuple<std::string, std::string, std::string, std::int64_t>, std::size_t> index, ratios_index;
  for (std::size_t n = 0; n < report.cases.size(); ++n) {
    const CaseResult& row = report.cases[n];
    for (const ToleranceRow& entry : row.tolerance) {
      if (entry.verdict != "passed" && entry.verdict != "failed") continue;
      const std::tuple key{row.executor, entry.level, entry.operation, entry.loop};
      LoopConformance& item = at_key(list, index, key);
      std::tie(item.executor, item.level, item.operation, item.loop) = key;
      const bool failed = entry.verdict == "failed";
      const double ratio = std::isnan(entry.error_over_bound) && failed ? std::numeric_limits<double>::infinity() : entry.error_over_bound;
      ++item.judged;
      item.failed += failed;
      if (std::isnan(ratio)) continue;
      at_key(ratios, ratios_index, key).push_back(ratio);
      if (ratio <= item.worst) continue;
      item.worst = ratio;
      item.worst_row = n;
      item.where = entry.max_index;
      item.reordered = item.exact = kNotApplicable;
      for (const ToleranceRow& yardstick : row.tolerance) {
        if (yardstick.verdict != "yardstick" ||
            std::tie(yardstick.level, yardstick.operation, yardstick.loop) != std::tie(entry.level, entry.operation, entry.loop))
          continue;
        (yardstick.source == "reordered" ? item.reordered : item.exact) = yardstick_over_bound(entry, yardstick);
      }
    }
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::tuple key{list[i].executor, list[i].level, list[i].operation, list[i].loop};
    if (const auto place = ratios_index.find(key); place != ratios_index.end()) list[i].median = median_of(ratios[place->second]);
  }
  return list;
}

double yardstick_over_bound(const ToleranceRow& judged, const ToleranceRow& yardstick) {
  constexpr std::array kDistances{&ToleranceRow::p50, &ToleranceRow::p90, &ToleranceRow::p99, &ToleranceRow::p999,
                                  &ToleranceRow::max_absolute};
  if (!(judged.limit > 0.0) || !std::isfinite(judged.limit)) return kNotApplicable;
  for (const auto distance : kDistances) {
    if (std::fabs(judged.*distance / judged.limit - judged.error_over_bound) <= 1e-6 * judged.error_over_bound)
      return yardstick.*distance / judged.limit;
  }
  return kNotApplicable;
}

namespace {

// "execution_dependent, tail 0, eager": the suffixes of the settings that decide what a rejected candidate can leave behind.
std::string timing_text(const CaseResult& row) {
  if (row.timing.empty()) return {};
  std::string text = row.timing;
  const std::string settings = settings_of(row) + ":";
  constexpr std::string_view kTail = ":tail";
  if (const std::size_t at = settings.find(kTail); at != std::string::npos)
    text += ", tail " + settings.substr(at + kTail.size(), settings.find(':', at + 1) - at - kTail.size());
  if (settings.find(":flush=eager:") != std::string::npos) text += ", eager";
  return text;
}

// Sum of KL and rows of each request, requests of one case and executor under keys of their own.
using RequestKl = std::map<std::pair<std::size_t, std::int64_t>, std::pair<double, std::int64_t>>;

Interval mean_over_requests(const RequestKl& requests) {
  std::vector<std::pair<double, std::int64_t>> units;
  double sum = 0.0;
  std::int64_t rows = 0;
  for (const auto& [key, unit] : requests) {
    units.push_back(unit);
    sum += unit.first;
    rows += unit.second;
  }
  if (rows == 0) return {};
  Interval mean{sum / static_cast<double>(rows), kNotApplicable, kNotApplicable};
  std::vector<double> replicates;
  const DriftOptions drift;  // intervals are made as those of drift
  resample(units.size(), drift.seed, drift.resamples, [&](const std::vector<int>& multiplicity) {
    double drawn = 0.0;
    std::int64_t count = 0;
    for (std::size_t i = 0; i < units.size(); ++i) {
      drawn += multiplicity[i] * units[i].first;
      count += multiplicity[i] * units[i].second;
    }
    replicates.push_back(drawn / static_cast<double>(count));
  });
  if (replicates.empty()) return mean;
  std::sort(replicates.begin(), replicates.end());
  mean.low = percentile_of_sorted(replicates, 0.025);
  mean.high = percentile_of_sorted(replicates, 0.975);
  return mean;
}

}  // namespace

std::vector<AcceptanceSummary> acceptance_summaries(const Report& report) {
  std::vector<AcceptanceSummary> list;
  using Key = std::tuple<std::string, std::string, std::string>;
  std::map<Key, std::size_t> index;
  std::map<Key, std::pair<double, std::int64_t>> drifts;  // sum of KL, rows
  std::map<Key, RequestKl> divergences;
  for (std::size_t n = 0; n < report.cases.size(); ++n) {
    const CaseResult& row = report.cases[n];
    if (row.acceptance.empty()) continue;
    const std::tuple key{row.executor, row.mode, timing_text(row)};
    AcceptanceSummary& summary = at_key(list, index, key);
    std::tie(summary.executor, summary.mode, summary.timing) = key;
    ++summary.cases;
    for (const CounterRow& counter : row.counters) {
      if (counter.name == "most_doubled_bytes") summary.doubled_bytes = std::max(summary.doubled_bytes, counter.value);
      if (counter.name == "rewritten_rows") summary.rewritten_rows += counter.value;
      if (counter.name == "draft_rows") summary.draft_loops += counter.value;
      if (counter.name == "verify_rows") summary.verify_loops += counter.value;
      if (counter.name == "rejected_rows") summary.rejected_loops += counter.value;
    }
    summary.equals_serial += std::any_of(row.checks.begin(), row.checks.end(), [](const CheckRow& check) {
      return (check.name == "equals_serial" || check.name == "equals_undisturbed") && check.status == "passed";
    });
    if (!(summary.least_memory_ratio <= row.memory_ratio)) summary.least_memory_ratio = row.memory_ratio;
    if (!(summary.most_memory_ratio >= row.memory_ratio)) summary.most_memory_ratio = row.memory_ratio;
    std::int64_t repetitions = 0;
    for (const TimingRow& timing : row.timings) {
      if (timing.phase == "draft") summary.draft_seconds += timing.seconds, ++repetitions;
      if (timing.phase == "verify") summary.verify_seconds += timing.seconds;
      if (timing.phase == "accept") summary.accept_seconds += timing.seconds;
    }
    for (const AcceptanceRow& entry : row.acceptance) {
      summary.timed_tokens += repetitions * entry.rounds_emitting_this_many * (entry.draft_position + 1);
    }
    for (const DriftRow& drift : row.drift) {
      auto& [sum, rows] = drifts[key];
      sum += drift.kl;
      ++rows;
    }
    for (const DivergenceRow& divergence : row.divergence) {
      ++summary.divergent_rows;
      summary.different_rows += divergence.max_logit_difference != 0 ? 1 : 0;
      auto& [sum, rows] = divergences[key][{n, divergence.request}];
      sum += divergence.kl;
      ++rows;
      summary.flips += divergence.same_top1 ? 0 : 1;
      if (!(summary.kl_max >= divergence.kl)) summary.kl_max = divergence.kl;
    }
    for (const AcceptanceRow& entry : row.acceptance) {
      constexpr std::int64_t kMostPositions = 1024;  // a draft is a handful of tokens; anything else is a damaged file
      if (entry.draft_position < 0 || entry.draft_position >= kMostPositions) continue;
      const auto at = static_cast<std::size_t>(entry.draft_position);
      if (summary.positions.size() <= at) summary.positions.resize(at + 1);
      AcceptanceSummary::Position& position = summary.positions[at];
      position.drafted += entry.drafted;
      position.accepted += entry.accepted;
      position.rounds += entry.rounds_emitting_this_many;
      position.divergences += entry.verifier_serial_divergences;
    }
  }
  for (AcceptanceSummary& summary : list) {
    double rounds = 0.0, tokens = 0.0;
    for (std::size_t i = 0; i < summary.positions.size(); ++i) {
      rounds += static_cast<double>(summary.positions[i].rounds);
      tokens += static_cast<double>(summary.positions[i].rounds) * static_cast<double>(i + 1);
    }
    if (rounds > 0.0) summary.mean_emitted = tokens / rounds;
    summary.tokens = static_cast<std::int64_t>(tokens);
    const Key key{summary.executor, summary.mode, summary.timing};
    if (const auto requests = divergences.find(key); requests != divergences.end()) {
      summary.compared_requests = std::ssize(requests->second);
      summary.kl_mean = mean_over_requests(requests->second);
    }
    const auto drift = drifts.find(key);
    if (drift != drifts.end()) summary.dense_kl = drift->second.first / static_cast<double>(drift->second.second);
  }
  return list;
}

bool is_kv_category(const std::string& category) {
  constexpr std::array<std::string_view, 8> kKv{"base payload", "residual payload", "parameters",  "activity maps",
                                                "padding",      "BF16 tail",        "BF16 planes", "inherited references"};
  return std::find(kKv.begin(), kKv.end(), category) != kKv.end();
}

MemoryBars memory_bars(const Report& report) {
  MemoryBars result;
  result.trace = memory_table(report).trace;
  std::map<std::tuple<std::string, std::string, std::string, std::string>, std::size_t> index;
  for (const CaseResult& row : report.cases) {
    if (row.trace != result.trace) continue;
    std::vector<std::size_t> filled;  // by this row: the first case of a setting speaks for it
    for (const MemoryRow& entry : row.memory) {
      const std::string executor = entry.source == "predicted" ? "" : row.executor;
      const auto [place, added] = index.try_emplace({settings_of(row), entry.source, entry.phase, executor}, result.bars.size());
      if (added) {
        result.bars.push_back({settings_of(row), entry.source, entry.phase, executor, {}});
        filled.push_back(place->second);
      }
      if (std::find(filled.begin(), filled.end(), place->second) == filled.end()) continue;
      result.bars[place->second].categories[entry.category] = entry;
    }
  }
  return result;
}

std::vector<TimingSummary> timing_summaries(const Report& report) {
  struct Times {
    std::vector<double> seconds, floors, ratios;
  };
  std::vector<TimingSummary> list;
  std::vector<Times> times;
  std::map<std::tuple<std::string, std::string, std::string>, std::size_t> index, times_index;
  for (const CaseResult& row : report.cases) {
    if (row.mode != "serial") continue;
    std::vector<std::size_t> counted;
    for (const TimingRow& entry : row.timings) {
      if (!std::isfinite(entry.seconds)) continue;
      const std::tuple key{row.executor, entry.phase, settings_of(row)};
      TimingSummary& summary = at_key(list, index, key);
      std::tie(summary.executor, summary.phase, summary.settings) = key;
      ++summary.repetitions;
      if (std::find(counted.begin(), counted.end(), index.at(key)) == counted.end()) {
        counted.push_back(index.at(key));
        ++summary.cases;
      }
      Times& of = at_key(times, times_index, key);
      of.seconds.push_back(entry.seconds);
      if (entry.floor_seconds > 0.0 && std::isfinite(entry.floor_seconds)) {
        of.floors.push_back(entry.floor_seconds);
        of.ratios.push_back(entry.seconds / entry.floor_seconds);
      }
    }
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto [least, most] = std::minmax_element(times[i].seconds.begin(), times[i].seconds.end());
    list[i].least = *least;
    list[i].most = *most;
    list[i].total = 0.0;
    for (const double seconds : times[i].seconds) list[i].total += seconds;
    list[i].median = median_of(times[i].seconds);
    list[i].floor = median_of(times[i].floors);
    list[i].ratio_to_floor = median_of(times[i].ratios);
  }
  return list;
}

}  // namespace loopgauge::harness
