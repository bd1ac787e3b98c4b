// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/conformance_checks.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "harness/compare/record_compare.hpp"
#include "harness/compare/significant.hpp"
#include "harness/sweep/checks.hpp"

namespace loopgauge::harness {

namespace {

// Listed flips of one kind: the unexplained ones and the roots with the largest margins.
constexpr std::int64_t kListedFlips = 200;

ToleranceRow tolerance_row(std::string_view level, const DistanceVerdict& verdict, std::string_view source,
                           const std::array<double, kPercentiles.size()>& values) {
  ToleranceRow row;
  row.operation = verdict.metric;
  row.loop = verdict.loop;
  row.elements = verdict.values;
  row.max_absolute = values.back();
  if (!verdict.rate) {
    row.p50 = values[0];
    row.p90 = values[1];
    row.p99 = values[2];
    row.p999 = values[3];
  }
  row.level = level;
  row.source = source;
  return row;
}

void add_rows(std::vector<ToleranceRow>& rows, std::string_view level, const std::vector<DistanceVerdict>& verdicts) {
  for (const DistanceVerdict& verdict : verdicts) {
    ToleranceRow row = tolerance_row(level, verdict, "candidate", verdict.candidate);
    row.max_index = verdict.largest.text();
    row.nan_count = verdict.non_finite;
    row.limit = verdict.limit[verdict.worst];
    row.error_over_bound = verdict.worst_ratio;
    row.verdict = !verdict.judged ? "not judged" : verdict.passed ? "passed" : "failed";
    rows.push_back(std::move(row));
    for (const auto& [source, values] : {std::pair{"reordered", verdict.reordered}, std::pair{"double", verdict.exact}}) {
      rows.push_back(tolerance_row(level, verdict, source, values));
      rows.back().verdict = "yardstick";
    }
  }
}

DecisionRow decision_row(const Flip& flip) {
  DecisionRow row;
  row.kind = to_string(flip.kind);
  row.request = flip.request;
  row.position = flip.position;
  row.loop = flip.loop;
  row.layer = flip.layer;
  row.head = flip.head;
  row.margin = flip.margin;
  row.difference = flip.difference;
  row.explained = flip.explained;
  row.root = flip.root;
  row.detail = flip.detail;
  return row;
}

void add_rows(std::vector<DecisionRow>& rows, const Decisions& decisions) {
  for (int kind = 0; kind < kDecisionKinds; ++kind) {
    std::vector<const Flip*> flips;
    for (const Flip& flip : decisions.flips) {
      if (static_cast<int>(flip.kind) == kind && (flip.root || !flip.explained)) flips.push_back(&flip);
    }
    std::stable_sort(flips.begin(), flips.end(), [](const Flip* a, const Flip* b) {
      return a->explained != b->explained ? !a->explained : !a->explained ? false : a->margin > b->margin;
    });
    for (std::int64_t i = 0; i < std::min(kListedFlips, std::ssize(flips)); ++i)
      rows.push_back(decision_row(*flips[static_cast<std::size_t>(i)]));
  }
}

std::string flips_text(const FlipVerdict& v) {
  std::string text = std::string(to_string(v.kind)) + " " + std::to_string(v.flipped) + " of " + std::to_string(v.decided) +
                     " differ, rate " + significant(v.rate(), 3) + ", limit " + significant(v.rate_limit(), 3) + " (" +
                     std::to_string(v.roots) + " roots, reordered " + std::to_string(v.reordered) + ", double " + std::to_string(v.exact) +
                     ", largest margin " + significant(v.largest_margin, 4) + ")";
  if (v.unexplained > 0) text += ", " + std::to_string(v.unexplained) + " unexplained";
  return text;
}

std::string first_unexplained(const Decisions& decisions) {
  for (const Flip& flip : decisions.flips) {
    if (flip.explained) continue;
    std::string text = "first unexplained: " + std::string(to_string(flip.kind)) + ", " +
                       DistancePlace{flip.request, flip.position, flip.layer, flip.head}.text();
    if (flip.loop > 0) text += " loop " + std::to_string(flip.loop);
    return text + ": " + flip.detail + ", margin " + significant(flip.margin, 4) + ", difference " + significant(flip.difference, 4);
  }
  return {};
}

// The distances that fail, else the one nearest to its limit; adds whether all pass.
bool describe(const std::vector<DistanceVerdict>& verdicts, std::string& text) {
  const DistanceVerdict* worst = nullptr;
  std::int64_t judged = 0, failed = 0;
  for (const DistanceVerdict& verdict : verdicts) {
    judged += verdict.judged;
    failed += !verdict.passed;
    if (verdict.judged && (worst == nullptr || verdict.worst_ratio > worst->worst_ratio)) worst = &verdict;
  }
  if (judged == 0) {
    text += "no distance is judged: fewer than 100 rows";
    return true;
  }
  if (failed == 0) {
    text += std::to_string(judged) + " distances, nearest to its limit (" + significant(worst->worst_ratio, 4) + "): " + worst->text();
    return true;
  }
  text += std::to_string(failed) + " of " + std::to_string(judged) + " distances exceed their limit, farthest: " + worst->text();
  return false;
}

CheckRow check(std::string_view name, bool passed, std::string detail) {
  return passed ? passed_check(name, std::move(detail)) : failed_check(name, std::move(detail));
}

ToleranceRow operation_row(OperationErrors& errors) {
  std::sort(errors.ulps.begin(), errors.ulps.end());
  const auto equal = static_cast<double>(errors.elements - std::ssize(errors.ulps));
  // Nearest rank over all elements; those that are equal come first.
  const auto percentile = [&](double q) {
    const auto rank = static_cast<std::int64_t>(std::ceil(q * static_cast<double>(errors.elements)) - equal);
    return rank <= 0 ? 0.0 : errors.ulps[static_cast<std::size_t>(rank - 1)];
  };
  ToleranceRow row;
  row.operation = errors.operation;
  row.loop = errors.loop;
  row.elements = errors.elements;
  row.max_ulp = errors.ulps.empty() ? 0.0 : errors.ulps.back();
  row.max_absolute = errors.max_absolute;
  if (errors.element >= 0) row.max_index = errors.tap + " " + errors.where.text() + " element " + std::to_string(errors.element);
  row.rms = errors.elements == 0 ? 0.0 : std::sqrt(errors.square_sum / static_cast<double>(errors.elements));
  row.p50 = percentile(0.5);
  row.p90 = percentile(0.9);
  row.p99 = percentile(0.99);
  row.p999 = percentile(0.999);
  row.nan_count = errors.non_finite;
  row.error_over_bound = std::fmax(errors.largest_ratio, errors.largest_share);
  row.verdict = errors.passed() ? "passed" : "failed";
  row.level = "operation";
  row.source = "candidate";
  return row;
}

// Level 2: operation by operation, each with the inputs that the candidate had.
void judge_operations(const OperationReference& reference, const OperationTap& tap, const RunRecord& record, const Trace& trace,
                      const EffectiveConfig& config, CaseResult& row) {
  const bool declared_order = record.profile == to_string(Profile::declared);
  std::vector<OperationErrors> all = reference.check(tap, record, trace, config, declared_order);
  std::int64_t elements = 0, failed = 0;
  const OperationErrors* worst = nullptr;
  const auto ratio = [](const OperationErrors& e) { return std::fmax(e.largest_ratio, e.largest_share); };
  for (OperationErrors& errors : all) {
    row.tolerance.push_back(operation_row(errors));
    elements += errors.elements;
    failed += !errors.passed();
    const bool farther = worst == nullptr || (errors.passed() == worst->passed() ? ratio(errors) > ratio(*worst) : !errors.passed());
    if (farther) worst = &errors;
  }
  if (worst == nullptr) {
    row.checks.push_back(not_run_check(kOperationsCheck, "the candidate showed no operation to the observer"));
    return;
  }
  std::string text = std::to_string(elements) + " elements of " + std::to_string(all.size()) + " operations and loops";
  if (failed > 0) text += ", " + std::to_string(failed) + " beyond their tolerance";
  text += failed > 0 ? ", farthest: " : ", nearest to its tolerance: ";
  text += worst->operation + (worst->loop > 0 ? " loop " + std::to_string(worst->loop) : "") + ", error / bound " +
          significant(worst->largest_ratio, 4) + ", share " + significant(worst->largest_share, 4);
  if (worst->element >= 0) {
    text += ", at " + worst->tap + " " + worst->where.text() + " element " + std::to_string(worst->element) + ": " +
            significant(worst->actual, 4) + ", expected " + significant(worst->expected, 4);
  }
  row.checks.push_back(check(kOperationsCheck, failed == 0, text));
}

// Level 3: the candidate with the reference's decisions.
void judge_decision_forced(const ObservedRun& forced, const ConformanceBaseline& base, const ModelConfig& model, CaseResult& row) {
  const RunRecord& reference = base.reference.record;
  std::string text = shape_difference(reference, forced.record);
  if (text.empty()) text = forced_decision_difference(reference, forced.record);
  bool passed = false;
  if (text.empty()) {
    const std::vector<DistanceVerdict> verdicts = judge_distances(observed_distances(base.reference, forced, model), base.decision_forced);
    add_rows(row.tolerance, kDecisionForcedCheck, verdicts);
    if (verdicts.empty()) {
      text = "no distance is judged: neither run recorded anything that the other has";
    } else {
      passed = describe(verdicts, text);
    }
  }
  row.checks.push_back(check(kDecisionForcedCheck, passed, text));
}

// Level 4: the reference's tokens, own decisions. Returns the flips, explained.
Decisions judge_teacher_forced(const ObservedRun& run, const ConformanceBaseline& base, const EffectiveConfig& config,
                               const ModelConfig& model, CaseResult& row) {
  const RunRecord& reference = base.reference.record;
  std::string text = shape_difference(reference, run.record);
  if (!text.empty()) {
    row.checks.push_back(failed_check(kTeacherForcedCheck, text));
    return {};
  }
  Decisions decisions =
      find_flips(reference, run.record, config, model, {base.reference.keys.get(), keeps_planes(run.record) ? run.keys.get() : nullptr});
  explain_flips(decisions, base.limits);
  const std::vector<DistanceVerdict> verdicts =
      judge_teacher_forced_distances(observed_distances(base.reference, run, model), base.teacher_forced);
  add_rows(row.tolerance, kTeacherForcedCheck, verdicts);
  add_rows(row.decisions, decisions);
  bool passed = describe(verdicts, text);
  for (const FlipVerdict& verdict : judge_flips(decisions, base.reordered, base.exact)) {
    passed = passed && verdict.passed;
    text += "; " + flips_text(verdict);
  }
  const std::string unexplained = first_unexplained(decisions);
  if (!unexplained.empty()) text += "; " + unexplained;
  row.checks.push_back(check(kTeacherForcedCheck, passed, text));
  return decisions;
}

// Level 5: own tokens.
void judge_free(const RunRecord& own, const Trace& trace, const ConformanceBaseline& base, const Decisions& decisions, CaseResult& row) {
  const FreeRunVerdict free = judge_free_run(trace, base.reference.record, own, base.limits.logit, decisions, base.reordered, base.exact);
  std::string text = std::to_string(free.tokens) + " tokens of " + std::to_string(free.requests) + " free requests equal";
  if (free.diverged > 0)
    text +=
        "; " + std::to_string(free.diverged) + (free.diverged == 1 ? " request diverges: " : " requests diverge, the first: ") + free.text;
  text += "; at most " + significant(std::floor(free.limit), 4) + " may diverge (reordered " + std::to_string(free.reordered) +
          ", double " + std::to_string(free.exact) + ")";
  row.checks.push_back(check(kFreeRunCheck, free.passed(), text));
}

}  // namespace

void judge_conformance(Executor& candidate, const Checkpoint& checkpoint, const OperationReference& operations, const Case& value,
                       const Trace& trace, const RunRecord& own, const ConformanceBaseline& base, CaseResult& row) {
  const EffectiveConfig config = EffectiveConfig::resolve(value.config, checkpoint.config);
  const bool forced_by_trace = all_forced(trace);

  OperationTap tap(sampled_positions(base.reference.record, checkpoint.config), sampled_key_ranges(base.reference.record));
  const ObservedRun observed = run_observed(candidate, value, base.forced, checkpoint, Profile::declared, nullptr, &tap);
  if (forced_by_trace) {
    const RecordComparison comparison = compare_records(own, observed.record, config.window());
    if (!comparison.identical()) {
      row.checks.push_back(failed_check(kTeacherForcedCheck, "observing the run changes its result: " + divergence_text(comparison)));
      return;
    }
  }
  judge_operations(operations, tap, observed.record, base.forced, config, row);
  if (has_decisions(config)) {
    judge_decision_forced(run_observed(candidate, value, base.forced, checkpoint, Profile::declared, &base.reference.record), base,
                          checkpoint.config, row);
  } else {
    judge_decision_forced(observed, base, checkpoint.config, row);
  }
  const Decisions decisions = judge_teacher_forced(observed, base, config, checkpoint.config, row);
  if (forced_by_trace) {
    row.checks.push_back(skipped_check(kFreeRunCheck, "every request of the trace is forced"));
  } else {
    judge_free(own, trace, base, decisions, row);
  }
}

}  // namespace loopgauge::harness
