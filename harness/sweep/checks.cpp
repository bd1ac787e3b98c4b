// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/checks.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

#include "models/handoff/regions.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::array<std::string_view, 5> kKlNames{"kl_p50", "kl_p90", "kl_p99", "kl_p999", "kl_max"};

void add_estimate(std::vector<DriftSummaryRow>& rows, std::string_view metric, std::string_view scope, const Estimate& estimate,
                  std::int64_t samples) {
  DriftSummaryRow row;
  row.metric = metric;
  row.scope = scope;
  row.value = estimate.value;
  if (estimate.kind != Uncertainty::none) {
    row.low = estimate.low;
    row.high = estimate.high;
  }
  row.samples = samples;
  row.method = std::string(to_string(estimate.kind));
  rows.push_back(std::move(row));
}

void add_summary(std::vector<DriftSummaryRow>& rows, std::string_view scope, const RowSummary& summary) {
  if (summary.rows == 0) return;
  add_estimate(rows, "kl_mean", scope, summary.kl_mean, summary.rows);
  for (std::size_t i = 0; i < kKlNames.size(); ++i) add_estimate(rows, kKlNames[i], scope, summary.kl_percentiles[i], summary.rows);
  add_estimate(rows, "same_top1", scope, summary.same_top1, summary.rows);
  add_estimate(rows, "top1_probability_change", scope, summary.top1_probability_change, summary.rows);
}

void add_likelihood(std::vector<DriftSummaryRow>& rows, const std::string& prefix, const Likelihood& likelihood) {
  if (likelihood.tokens == 0) return;
  add_estimate(rows, prefix + "perplexity", "all", likelihood.perplexity, likelihood.tokens);
  if (likelihood.bits_per_byte) add_estimate(rows, prefix + "bits_per_byte", "all", *likelihood.bits_per_byte, likelihood.tokens);
}

void add_memory(std::vector<MemoryRow>& rows, std::string_view phase, const MemoryBytes& bytes) {
  for (int i = 0; i < kMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    MemoryRow row{std::string(to_string(category)), std::string(phase), "predicted", bytes.logical_of(category),
                  bytes.physical_of(category)};
    if (row.logical_bytes != 0 || row.physical_bytes != 0) rows.push_back(std::move(row));
  }
}

}  // namespace

CheckRow passed_check(std::string_view name, std::string detail) { return {std::string(name), "passed", std::move(detail)}; }
CheckRow failed_check(std::string_view name, std::string detail) { return {std::string(name), "failed", std::move(detail)}; }
CheckRow skipped_check(std::string_view name, std::string reason) { return {std::string(name), "skipped", std::move(reason)}; }
CheckRow not_run_check(std::string_view name, std::string reason) { return {std::string(name), "not_run", std::move(reason)}; }

CheckRow audit_check(const AuditResult& result) {
  std::int64_t checks = 0;
  int rules = 0;
  for (const AuditCoverage& coverage : result.coverage) {
    checks += coverage.checks;
    rules += coverage.checks > 0 ? 1 : 0;
  }
  if (!result.clean()) {
    const AuditFinding& first = result.findings.front();
    std::string detail = first.text;
    std::vector<std::string_view> others;
    for (const AuditFinding& finding : result.findings) {
      if (finding.rule != first.rule && std::find(others.begin(), others.end(), finding.rule) == others.end())
        others.push_back(finding.rule);
    }
    const std::size_t more = result.findings.size() - 1;
    if (more > 0) detail += "; " + std::to_string(more) + (more == 1 ? " more finding" : " more findings");
    for (std::size_t i = 0; i < others.size(); ++i) detail += (i == 0 ? ", also of rules " : ", ") + std::string(others[i]);
    return failed_check(kAuditCheck, detail);
  }
  if (checks == 0) return not_run_check(kAuditCheck, "no audit rule applies to what the record holds");
  return passed_check(kAuditCheck, std::to_string(checks) + " checks of " + std::to_string(rules) + " rules");
}

std::string divergence_text(const RecordComparison& comparison) {
  if (comparison.first) return "first divergence: " + comparison.first->text();
  for (const GroupComparison& group : comparison.groups) {
    if (group.status == GroupStatus::only_expected || group.status == GroupStatus::only_actual) {
      return "group " + std::string(to_string(group.group)) + " is recorded by one run only";
    }
  }
  return "nothing was compared";
}

void decide(CaseResult& result) {
  const auto has = [&](std::string_view status) {
    return std::any_of(result.checks.begin(), result.checks.end(), [&](const CheckRow& check) { return check.status == status; });
  };
  std::string_view deciding;
  if (has("failed")) {
    result.status = CaseStatus::failed;
    deciding = "failed";
  } else if (has("not_run")) {
    result.status = CaseStatus::not_run;
    deciding = "not_run";
  } else if (has("passed")) {
    result.status = CaseStatus::passed;
    result.reason.clear();
    return;
  } else {
    result.status = CaseStatus::not_run;
    result.reason = "no check was made";
    return;
  }
  result.reason.clear();
  for (const CheckRow& check : result.checks) {
    if (check.status != deciding) continue;
    result.reason += (result.reason.empty() ? "" : "; ") + check.name + ": " + check.detail;
  }
}

void add_speculation_times(std::vector<TimingRow>& timings, const RunRecord& record, std::int64_t repetition) {
  if (!record.speculation_times) return;
  const SpeculationTimes& times = *record.speculation_times;
  const std::pair<const char*, double> phases[] = {{"draft", times.draft}, {"verify", times.verify}, {"accept", times.accept}};
  for (const auto& [phase, seconds] : phases) timings.push_back({phase, repetition, seconds});
}

void set_counters(CaseResult& result, const RunCounters& counters) {
  result.counters.clear();
  for (const RunCounterField& field : run_counter_fields()) result.counters.push_back({std::string(field.name), counters.*field.member});
}

void set_handoffs(CaseResult& result, std::span<const HandoffRecord> handoffs) {
  static const std::map<std::string_view, std::int64_t HandoffRow::*> kKinds{
      {to_string(handoff::RegionKind::validity), &HandoffRow::validity_bytes},
      {to_string(handoff::RegionKind::activity), &HandoffRow::activity_bytes},
      {to_string(handoff::RegionKind::base_payload), &HandoffRow::base_payload_bytes},
      {to_string(handoff::RegionKind::residual_payload), &HandoffRow::residual_payload_bytes},
      {to_string(handoff::RegionKind::parameters), &HandoffRow::parameters_bytes},
      {to_string(handoff::RegionKind::rows), &HandoffRow::rows_bytes},
      {to_string(handoff::RegionKind::final_hidden), &HandoffRow::final_hidden_bytes}};
  result.handoffs.clear();
  for (const HandoffRecord& handoff : handoffs) {
    HandoffRow& row = result.handoffs.emplace_back();
    row.request = handoff.request;
    row.transport = handoff.transport;
    row.outcome = handoff.outcome;
    row.regions = static_cast<std::int64_t>(handoff.regions.size());
    row.partitions = handoff.partitions;
    row.bytes = handoff.bytes;
    row.dense_bytes = handoff.dense_bytes;
    for (const HandoffRegion& region : handoff.regions) row.*kKinds.at(region.kind) += region.bytes;
    row.bytes_before_prompt_end = handoff.bytes_before_prompt_end;
    row.bytes_final_before_last_loop = handoff.bytes_final_before_last_loop;
    row.most_bytes_in_flight = handoff.most_bytes_in_flight;
    row.most_reserved_bytes = handoff.most_reserved_bytes;
    row.seconds = handoff.seconds;
  }
}

std::vector<DigestRow> digest_rows(const Digests& digests) {
  std::vector<DigestRow> rows;
  for (const auto& [group, sha256] : digests) rows.push_back({group, sha256});
  return rows;
}

std::string digest_of(const CaseResult& result, std::string_view group) {
  for (const DigestRow& row : result.digests) {
    if (row.group == group) return row.sha256;
  }
  return {};
}

void set_drift(CaseResult& result, const Drift& drift, const Trace& trace) {
  result.drift.clear();
  for (const RowDrift& row : drift.rows) {
    const int prompt = trace.requests[static_cast<std::size_t>(row.request)].prompt_length();
    DriftRow entry{row.request, row.row, prompt - 1 + row.row, row.kl, row.same_top1, row.top1_probability_change};
    if (row.token >= 0) {
      entry.token = row.token;
      entry.dense_nll = row.dense_nll;
      entry.nll = row.nll;
      entry.scored = row.scored;
    }
    result.drift.push_back(std::move(entry));
  }
  result.answers.clear();
  for (const AnswerDrift& answer : drift.answers) {
    const int prompt = trace.requests[static_cast<std::size_t>(answer.request)].prompt_length();
    result.answers.push_back(
        {answer.request, answer.row, answer.tokens, prompt, answer.source_position, answer.dense_correct, answer.correct});
  }

  auto& summary = result.drift_summary;
  summary.clear();
  add_summary(summary, "first_token", drift.first_token);
  add_summary(summary, "continuation", drift.continuation);
  add_likelihood(summary, "", drift.candidate);
  add_likelihood(summary, "dense_", drift.dense);
  if (drift.task) {
    add_estimate(summary, "task_accuracy", "all", drift.task->candidate, drift.task->answers);
    add_estimate(summary, "dense_task_accuracy", "all", drift.task->dense, drift.task->answers);
  }

  if (drift.first_token.rows > 0) result.first_token_kl = drift.first_token.kl_mean.value;
  if (drift.continuation.rows > 0) {
    result.same_top1 = drift.continuation.same_top1.value;
    result.kl_mean = drift.continuation.kl_mean.value;
    result.kl_max = drift.continuation.kl_percentiles.back().value;
  }
  if (drift.candidate.bits_per_byte && drift.candidate.tokens > 0) result.bits_per_byte = drift.candidate.bits_per_byte->value;
  if (drift.task && drift.task->answers > 0) result.task_accuracy = drift.task->candidate.value;
}

void keep_quality_rows(CaseResult& result) {
  result.drift_summary.clear();
  if (!result.answers.empty()) result.drift.clear();
  std::erase_if(result.drift, [](const DriftRow& row) { return !row.scored; });
  // volatile: gcc 12 with -O3 leaves out the conversions of neighbouring members when it vectorizes them.
  const auto narrow = [](double& value) {
    const volatile float narrowed = static_cast<float>(value);
    value = narrowed;
  };
  for (DriftRow& row : result.drift) {
    narrow(row.kl);
    narrow(row.top1_probability_change);
    narrow(row.dense_nll);
    narrow(row.nll);
  }
}

CheckRow quality_check(const Drift& drift) {
  std::int64_t scored = 0;
  for (const RowDrift& row : drift.rows) scored += row.scored;
  const std::string counts = std::to_string(scored) + " scored tokens, " + std::to_string(drift.answers.size()) + " answers";
  if (drift.rows_non_finite > 0)
    return failed_check(kQualityCheck, std::to_string(drift.rows_non_finite) + " logits rows hold a NaN or an infinity; " + counts);
  if (drift.rows_left_out > 0)
    return failed_check(kQualityCheck, std::to_string(drift.rows_left_out) +
                                           " logits rows follow other tokens than those of the dense run: quality needs forced tokens; " +
                                           counts);
  if (scored == 0) return not_run_check(kQualityCheck, "no next token of the trace is known and scored: quality needs forced tokens");
  return passed_check(kQualityCheck, counts);
}

MemoryInput memory_input(const RunRecord& record) {
  MemoryInput input;
  for (const RequestRecord& request : record.requests) {
    if (request.outcome == RequestOutcome::cancelled) continue;  // it holds nothing
    RequestMemory memory;
    memory.prompt_length = request.prompt_length;
    memory.committed = request.prompt_length + request.fed;
    memory.active = request.active;
    memory.exit_depths.assign(request.exit_depths.begin(),
                              request.exit_depths.begin() + std::min<std::ptrdiff_t>(request.fed, std::ssize(request.exit_depths)));
    input.requests.push_back(std::move(memory));
  }
  return input;
}

void set_memory(CaseResult& result, const MemoryPrediction& prediction) {
  result.memory.clear();
  add_memory(result.memory, "steady", prediction.steady);
  add_memory(result.memory, "peak", prediction.peak);
  result.memory_ratio = prediction.kv_ratio_physical();
}

}  // namespace loopgauge::harness
