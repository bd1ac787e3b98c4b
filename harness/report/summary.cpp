// SPDX-License-Identifier: Apache-2.0
#include "harness/report/summary.hpp"

#include <algorithm>
#include <utility>

#include "harness/compare/drift.hpp"

namespace loopgauge::harness {

namespace {

void push_unique(std::vector<std::string>& list, const std::string& value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

// Weighted mean of one metric of the per-trace summaries, weights being the samples behind each.
class PooledMean {
 public:
  void add(const CaseResult& row, std::string_view metric) {
    for (const DriftSummaryRow& summary : row.drift_summary) {
      if (summary.metric != metric) continue;
      sum_ += summary.value * static_cast<double>(summary.samples);
      samples_ += summary.samples;
    }
  }
  double value() const { return samples_ == 0 ? kNotApplicable : sum_ / static_cast<double>(samples_); }
  std::int64_t samples() const { return samples_; }

 private:
  double sum_ = 0.0;
  std::int64_t samples_ = 0;
};

SettingDrift pool(const std::vector<const CaseResult*>& rows) {
  SettingDrift drift;
  drift.executor = rows.front()->executor;
  drift.settings = settings_of(*rows.front());
  drift.traces = static_cast<int>(rows.size());
  std::vector<double> kl;
  double kl_sum = 0.0, first_sum = 0.0;
  std::int64_t same = 0;
  PooledMean bits, accuracy;
  for (const CaseResult* row : rows) {
    bits.add(*row, "bits_per_byte");
    accuracy.add(*row, "task_accuracy");
    for (const DriftRow& entry : row->drift) {
      if (entry.row == 0) {
        first_sum += entry.kl;
        ++drift.first_tokens;
        continue;
      }
      if (kl.empty() || entry.kl > drift.kl_max) {
        drift.kl_max = entry.kl;
        drift.kl_max_where = row->id + " request " + std::to_string(entry.request) + " position " + std::to_string(entry.position);
      }
      kl.push_back(entry.kl);
      kl_sum += entry.kl;
      same += entry.same_top1 ? 1 : 0;
    }
  }
  drift.rows = std::ssize(kl);
  if (drift.first_tokens > 0) drift.first_token_kl = first_sum / static_cast<double>(drift.first_tokens);
  if (!kl.empty()) {
    std::sort(kl.begin(), kl.end());
    drift.kl_mean = kl_sum / static_cast<double>(kl.size());
    drift.kl_p99 = tail_percentile_of_sorted(kl, 0.99);
    const Estimate rate = wilson_interval(same, drift.rows);
    drift.same_top1 = rate.value;
    drift.same_top1_low = rate.low;
    drift.same_top1_high = rate.high;
  }
  drift.bits_per_byte = bits.value();
  drift.task_accuracy = accuracy.value();
  drift.answers = accuracy.samples();
  return drift;
}

}  // namespace

std::string settings_of(const CaseResult& row) {
  const std::size_t first = row.id.find('/');
  const std::size_t last = row.id.rfind('/');
  if (first == std::string::npos || last == first) return row.switches;
  return row.id.substr(first + 1, last - first - 1);
}

std::vector<StatusMatrix> status_matrices(const Report& report) {
  std::vector<StatusMatrix> matrices;
  for (const CaseResult& row : report.cases) {
    auto matrix = std::find_if(matrices.begin(), matrices.end(), [&](const StatusMatrix& m) { return m.executor == row.executor; });
    if (matrix == matrices.end()) {
      matrices.push_back({row.executor, {}, {}, {}});
      matrix = matrices.end() - 1;
    }
    const std::string settings = settings_of(row);
    push_unique(matrix->settings, settings);
    push_unique(matrix->modes, row.mode);
    matrix->cells[{settings, row.mode}].add(row.status);
  }
  return matrices;
}

std::vector<SettingDrift> setting_drifts(const Report& report) {
  std::vector<std::pair<std::string, std::vector<const CaseResult*>>> groups;
  for (const CaseResult& row : report.cases) {
    if (row.mode != "serial" || is_mutant(row) || row.drift.empty()) continue;
    const std::string key = row.executor + "/" + settings_of(row);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& entry) { return entry.first == key; });
    if (group == groups.end()) {
      groups.push_back({key, {}});
      group = groups.end() - 1;
    }
    group->second.push_back(&row);
  }
  std::vector<SettingDrift> drifts;
  for (const auto& [key, rows] : groups) drifts.push_back(pool(rows));
  return drifts;
}

std::vector<MetricConformance> metric_conformances(const Report& report) {
  std::vector<MetricConformance> list;
  for (const CaseResult& row : report.cases) {
    for (const ToleranceRow& entry : row.tolerance) {
      if (entry.verdict != "passed" && entry.verdict != "failed") continue;
      auto metric = std::find_if(list.begin(), list.end(), [&](const MetricConformance& other) {
        return other.executor == row.executor && other.level == entry.level && other.operation == entry.operation;
      });
      if (metric == list.end()) {
        list.push_back({row.executor, entry.level, entry.operation, 0, 0, kNotApplicable, -1, ""});
        metric = list.end() - 1;
      }
      ++metric->values;
      metric->failed += entry.verdict == "failed" ? 1 : 0;
      // Not "greater": the first value meets NaN.
      if (!(entry.error_over_bound <= metric->error_over_bound)) {
        metric->error_over_bound = entry.error_over_bound;
        metric->loop = entry.loop;
        metric->where = row.id + (entry.max_index.empty() ? "" : " " + entry.max_index);
      }
    }
  }
  return list;
}

std::vector<FlipCount> flip_counts(const Report& report) {
  std::vector<FlipCount> list;
  for (const CaseResult& row : report.cases) {
    for (const DecisionRow& flip : row.decisions) {
      auto count_of = std::find_if(list.begin(), list.end(),
                                   [&](const FlipCount& other) { return other.executor == row.executor && other.kind == flip.kind; });
      if (count_of == list.end()) {
        list.push_back({row.executor, flip.kind, 0, 0, kNotApplicable});
        count_of = list.end() - 1;
      }
      count_of->roots += flip.root ? 1 : 0;
      count_of->unexplained += flip.explained ? 0 : 1;
      if (flip.root && flip.explained && !(flip.margin <= count_of->largest_margin)) count_of->largest_margin = flip.margin;
    }
  }
  return list;
}

MemoryTable memory_table(const Report& report) {
  const auto steady_bytes = [](const CaseResult& row) {
    std::int64_t bytes = 0;
    for (const MemoryRow& entry : row.memory) {
      if (entry.phase == "steady" && entry.source == "predicted") bytes += entry.physical_bytes;
    }
    return bytes;
  };
  MemoryTable table;
  std::int64_t most = 0;
  for (const CaseResult& row : report.cases) {
    const std::int64_t bytes = steady_bytes(row);
    if (bytes > most) {
      most = bytes;
      table.trace = row.trace;
    }
  }
  for (const CaseResult& row : report.cases) {
    if (row.trace != table.trace || row.memory.empty()) continue;
    const std::string settings = settings_of(row);
    if (std::any_of(table.rows.begin(), table.rows.end(), [&](const SettingMemory& entry) { return entry.settings == settings; })) continue;
    SettingMemory entry;
    entry.settings = settings;
    entry.ratio = row.memory_ratio;
    for (const MemoryRow& category : row.memory) {
      if (category.phase == "steady" && category.source == "predicted") entry.categories[category.category] = category;
    }
    table.rows.push_back(std::move(entry));
  }
  return table;
}

}  // namespace loopgauge::harness
