// SPDX-License-Identifier: Apache-2.0
#include "harness/report/quality.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "harness/compare/bootstrap.hpp"
#include "harness/compare/drift.hpp"
#include "harness/compare/error_stats.hpp"
#include "harness/report/summary.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::string_view kDense = "t0s0q0";
constexpr int kByteTokens = 256;
constexpr int kDepths = 4;

constexpr DriftOptions kDrift;  // intervals are made as those of drift

using Multiplicity = std::vector<int>;  // by cluster

Interval with_interval(double value, std::vector<double> replicates) {
  std::erase_if(replicates, [](double x) { return std::isnan(x); });  // resamples without a row that counts
  if (replicates.empty()) return {value, kNotApplicable, kNotApplicable};
  std::sort(replicates.begin(), replicates.end());
  return {value, percentile_of_sorted(replicates, 0.025), percentile_of_sorted(replicates, 0.975)};
}

// Sums over the rows of one request, of which every mean is a ratio.
struct Sums {
  double rows = 0, kld = 0, same_top = 0;
  double tokens = 0, nll = 0, dense_nll = 0, squared_delta_p = 0;
  double bytes = 0, byte_nll = 0, dense_byte_nll = 0;
  double first_rows = 0, first_kld = 0;

  void add(const DriftRow& row) {
    if (row.row == 0) {
      first_rows += 1;
      first_kld += row.kl;
      return;
    }
    rows += 1;
    kld += row.kl;
    same_top += row.same_top1;
    tokens += 1;
    nll += row.nll;
    dense_nll += row.dense_nll;
    const double delta = std::exp(-row.nll) - std::exp(-row.dense_nll);
    squared_delta_p += delta * delta;
    if (row.token >= kByteTokens) return;
    bytes += 1;
    byte_nll += row.nll;
    dense_byte_nll += row.dense_nll;
  }
  void add(const Sums& other, double times) {
    for (double Sums::*member :
         {&Sums::rows, &Sums::kld, &Sums::same_top, &Sums::tokens, &Sums::nll, &Sums::dense_nll, &Sums::squared_delta_p, &Sums::bytes,
          &Sums::byte_nll, &Sums::dense_byte_nll, &Sums::first_rows, &Sums::first_kld})
      this->*member += times * (other.*member);
  }
};

struct RequestKey {
  std::string trace;
  std::int64_t request;
  auto operator<=>(const RequestKey&) const = default;
};

struct ProseRow {
  double kld;
  std::size_t cluster;
};

// 0/0 is NaN: no row counts.
using Statistic = double (*)(const Sums&);
double kld_mean(const Sums& s) { return s.kld / s.rows; }
double same_top(const Sums& s) { return s.same_top / s.rows; }
double log_perplexity_ratio(const Sums& s) { return (s.nll - s.dense_nll) / s.tokens; }
double rms_delta_p(const Sums& s) { return std::sqrt(s.squared_delta_p / s.tokens); }
double bits_per_byte_change(const Sums& s) { return (s.byte_nll - s.dense_byte_nll) / s.bytes / std::log(2.0); }
double first_token_kld(const Sums& s) { return s.first_kld / s.first_rows; }

struct MeanMember {
  Interval ProseQuality::*member;
  Statistic statistic;
};
constexpr MeanMember kMeans[] = {{&ProseQuality::kld_mean, kld_mean},
                                 {&ProseQuality::same_top, same_top},
                                 {&ProseQuality::log_perplexity_ratio, log_perplexity_ratio},
                                 {&ProseQuality::rms_delta_p, rms_delta_p},
                                 {&ProseQuality::bits_per_byte_change, bits_per_byte_change},
                                 {&ProseQuality::first_token_kld, first_token_kld}};
struct PercentileMember {
  Interval ProseQuality::*member;
  double q;
};
constexpr PercentileMember kKldPercentiles[] = {
    {&ProseQuality::kld_median, 0.5}, {&ProseQuality::kld_p99, 0.99}, {&ProseQuality::kld_p999, 0.999}};

class ProseGroup {
 public:
  void add(const std::string& trace, const DriftRow& row) {
    const auto [entry, _] = clusters_.try_emplace({trace, row.request}, sums_.size());
    if (entry->second == sums_.size()) sums_.emplace_back();
    sums_[entry->second].add(row);
    if (row.row != 0) rows_.push_back({row.kl, entry->second});
  }
  bool empty() const { return sums_.empty(); }

  void measure(ProseQuality& result) {
    std::sort(rows_.begin(), rows_.end(), [](const ProseRow& a, const ProseRow& b) { return a.kld < b.kld; });
    Sums total;
    for (const Sums& each : sums_) total.add(each, 1.0);
    result.requests = std::ssize(sums_);
    result.rows = std::ssize(rows_);
    result.bits_per_byte = total.byte_nll / total.bytes / std::log(2.0);
    result.dense_bits_per_byte = total.dense_byte_nll / total.bytes / std::log(2.0);
    result.kld_max = rows_.empty() ? kNotApplicable : rows_.back().kld;

    std::vector<double> means[std::size(kMeans)], percentiles[std::size(kKldPercentiles)];
    resample(sums_.size(), kDrift.seed, kDrift.resamples, [&](const Multiplicity& times) {
      Sums drawn;
      for (std::size_t i = 0; i < sums_.size(); ++i) drawn.add(sums_[i], times[i]);
      for (std::size_t i = 0; i < std::size(kMeans); ++i) means[i].push_back(kMeans[i].statistic(drawn));
      const std::vector<double> values = percentiles_of(&times);
      for (std::size_t i = 0; i < std::size(kKldPercentiles); ++i) percentiles[i].push_back(values[i]);
    });
    const std::vector<double> values = percentiles_of(nullptr);
    for (std::size_t i = 0; i < std::size(kMeans); ++i) result.*kMeans[i].member = with_interval(kMeans[i].statistic(total), means[i]);
    for (std::size_t i = 0; i < std::size(kKldPercentiles); ++i)
      result.*kKldPercentiles[i].member = with_interval(values[i], percentiles[i]);
  }

 private:
  // Nearest rank, each row as often as its cluster was drawn.
  std::vector<double> percentiles_of(const Multiplicity* times) const {
    const auto weight = [&](const ProseRow& row) { return times == nullptr ? 1 : (*times)[row.cluster]; };
    std::int64_t total = 0;
    for (const ProseRow& row : rows_) total += weight(row);
    std::vector<double> values(std::size(kKldPercentiles), kNotApplicable);
    if (total == 0) return values;
    std::int64_t seen = 0;
    std::size_t at = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto rank = static_cast<std::int64_t>(std::ceil(kKldPercentiles[i].q * static_cast<double>(total)));
      while (seen < rank) seen += weight(rows_[at++]);
      values[i] = rows_[at - 1].kld;
    }
    return values;
  }

  std::map<RequestKey, std::size_t> clusters_;
  std::vector<Sums> sums_;  // by cluster
  std::vector<ProseRow> rows_;
};

class TaskGroup {
 public:
  void add(const std::string& trace, const AnswerRow& answer) {
    Counts& counts = requests_[{trace, answer.request}];
    ++counts.answers;
    counts.dense_correct += answer.dense_correct;
    counts.correct += answer.correct;
    counts.lost += answer.dense_correct && !answer.correct;
    counts.gained += !answer.dense_correct && answer.correct;
  }
  bool empty() const { return requests_.empty(); }

  void measure(TaskQuality& result) const {
    std::vector<Counts> all;
    for (const auto& [_, counts] : requests_) all.push_back(counts);
    result.requests = std::ssize(all);
    for (const Counts& counts : all) {
      result.answers += counts.answers;
      result.dense_correct += counts.dense_correct;
      result.correct += counts.correct;
      result.lost += counts.lost;
      result.gained += counts.gained;
    }
    std::vector<double> changes;
    resample(all.size(), kDrift.seed, kDrift.resamples, [&](const Multiplicity& times) {
      std::int64_t answers = 0, change = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        answers += times[i] * all[i].answers;
        change += times[i] * (all[i].correct - all[i].dense_correct);
      }
      changes.push_back(static_cast<double>(change) / static_cast<double>(answers));
    });
    result.accuracy_change =
        with_interval(static_cast<double>(result.correct - result.dense_correct) / static_cast<double>(result.answers), std::move(changes));
    result.p = mcnemar_exact(result.lost, result.gained);
  }

 private:
  struct Counts {
    std::int64_t answers = 0, dense_correct = 0, correct = 0, lost = 0, gained = 0;
  };
  std::map<RequestKey, Counts> requests_;
};

// Of one setting on one executor.
struct Setting {
  std::string executor, settings;
  std::vector<const CaseResult*> cases;  // one of each trace
};

std::vector<Setting> settings_with_drift(const Report& report) {
  std::vector<Setting> settings;
  for (const CaseResult& row : report.cases) {
    if ((row.drift.empty() && row.answers.empty()) || row.executor.starts_with("mutant:")) continue;
    const std::string text = settings_of(row);
    auto setting = std::find_if(settings.begin(), settings.end(),
                                [&](const Setting& other) { return other.executor == row.executor && other.settings == text; });
    if (setting == settings.end()) setting = settings.insert(settings.end(), {row.executor, text, {}});
    const bool known =
        std::any_of(setting->cases.begin(), setting->cases.end(), [&](const CaseResult* other) { return other->trace == row.trace; });
    if (!known) setting->cases.push_back(&row);
  }
  return settings;
}

void measure_prose(const Setting& setting, Quality& quality) {
  std::map<std::int64_t, ProseGroup> groups;  // by prompt length; -1: all
  for (const CaseResult* row : setting.cases) {
    if (!row->answers.empty()) continue;
    for (const DriftRow& drift : row->drift) {
      if (!drift.scored || std::isnan(drift.nll)) continue;
      groups[-1].add(row->trace, drift);
      groups[drift.position + 1 - drift.row].add(row->trace, drift);
    }
  }
  for (auto& [length, group] : groups) {
    ProseQuality& result = quality.prose.emplace_back();
    result.executor = setting.executor;
    result.settings = setting.settings;
    result.prompt_length = length;
    group.measure(result);
  }
}

void measure_tasks(const Setting& setting, Quality& quality) {
  const auto add = [&](std::vector<TaskQuality>& list, const TaskGroup& group, const std::string& trace, int depth) {
    if (group.empty()) return;
    TaskQuality& result = list.emplace_back();
    result.executor = setting.executor;
    result.settings = setting.settings;
    result.trace = trace;
    result.depth = depth;
    group.measure(result);
  };
  TaskGroup all, depths[kDepths];
  std::vector<std::pair<std::string, TaskGroup>> traces;
  for (const CaseResult* row : setting.cases) {
    if (row->answers.empty()) continue;
    traces.emplace_back(row->trace, TaskGroup{});
    for (const AnswerRow& answer : row->answers) {
      all.add(row->trace, answer);
      traces.back().second.add(row->trace, answer);
      if (answer.source_position >= 0 && answer.prompt_length > 0)
        depths[std::min<std::int64_t>(kDepths - 1, kDepths * answer.source_position / answer.prompt_length)].add(row->trace, answer);
    }
  }
  add(quality.tasks, all, "", -1);
  for (const auto& [trace, group] : traces) add(quality.tasks, group, trace, -1);
  for (int depth = 0; depth < kDepths; ++depth) add(quality.depths, depths[depth], "", depth);
}

void adjust_for_many_tests(std::vector<TaskQuality>& tasks) {
  std::set<std::string> executors;
  for (const TaskQuality& task : tasks) executors.insert(task.executor);
  for (const std::string& executor : executors) {
    std::vector<TaskQuality*> tested;
    std::vector<double> p;
    for (TaskQuality& task : tasks) {
      if (task.executor != executor || task.trace.empty() || task.settings == kDense) continue;
      tested.push_back(&task);
      p.push_back(task.p);
    }
    const std::vector<double> adjusted = holm_adjusted(p);
    for (std::size_t i = 0; i < tested.size(); ++i) tested[i]->p_holm = adjusted[i];
  }
}

}  // namespace

double mcnemar_exact(std::int64_t lost, std::int64_t gained) {
  const std::int64_t changes = lost + gained;
  // Binomial(changes, 1/2) at most min(lost, gained), twice; logarithms, because 2^-changes vanishes.
  double sum = 0.0;
  for (std::int64_t i = 0; i <= std::min(lost, gained); ++i) {
    const auto n = static_cast<double>(changes), k = static_cast<double>(i);
    sum += std::exp(std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1) - n * std::log(2.0));
  }
  return std::min(1.0, 2.0 * sum);
}

std::vector<double> holm_adjusted(std::span<const double> p) {
  std::vector<std::size_t> ascending(p.size());
  std::iota(ascending.begin(), ascending.end(), std::size_t{0});
  std::stable_sort(ascending.begin(), ascending.end(), [&](std::size_t a, std::size_t b) { return p[a] < p[b]; });
  std::vector<double> adjusted(p.size());
  double largest = 0.0;
  for (std::size_t rank = 0; rank < ascending.size(); ++rank) {
    largest = std::max(largest, std::min(1.0, static_cast<double>(p.size() - rank) * p[ascending[rank]]));
    adjusted[ascending[rank]] = largest;
  }
  return adjusted;
}

Quality measure_quality(const Report& report) {
  Quality quality;
  for (const Setting& setting : settings_with_drift(report)) {
    measure_prose(setting, quality);
    measure_tasks(setting, quality);
  }
  adjust_for_many_tests(quality.tasks);
  return quality;
}

}  // namespace loopgauge::harness
