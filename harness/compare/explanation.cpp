// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/explanation.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "harness/compare/causal_order.hpp"
#include "harness/compare/distances.hpp"
#include "harness/compare/float_bits.hpp"
#include "harness/compare/significant.hpp"
#include "models/spec/op_list.hpp"

namespace loopgauge::harness {
namespace {

std::string token_margin(const RequestRecord& record, int row) {
  if (record.logits.empty() || row < 0 || row >= record.logits.extent(0)) return {};
  std::vector<float> logits(record.logits.row(row).begin(), record.logits.row(row).end());
  if (logits.size() < 2) return {};
  std::partial_sort(logits.begin(), logits.begin() + 2, logits.end(), std::greater<>());
  return "the two largest logits of row " + std::to_string(row) + " are " + significant(static_cast<double>(logits[0]) - logits[1], 6) +
         " apart";
}

std::string active_margin(const Divergence& d, const RequestRecord& record, int window) {
  if (d.loop < 3) return {};
  const auto at = static_cast<std::size_t>(d.loop - 3);
  const auto& scores = record.scores[at];
  const auto& active = record.active[at];
  if (scores.empty() || d.position < 0 || d.position >= static_cast<int>(scores.size())) return {};
  const float own = scores[static_cast<std::size_t>(d.position)];
  if (std::isnan(own)) return "the row was not eligible: it follows from a selection at the loop before";
  const bool selected = std::find(active.begin(), active.end(), d.position) != active.end();
  // The nearest row on the other side of the boundary, in the same window.
  const int begin = d.position / window * window;
  const int end = std::min(begin + window, static_cast<int>(scores.size()));
  float other = std::nanf("");
  for (int p = begin; p < end; ++p) {
    const float score = scores[static_cast<std::size_t>(p)];
    if (std::isnan(score) || (std::find(active.begin(), active.end(), p) != active.end()) == selected) continue;
    if (std::isnan(other) || (selected ? score > other : score < other)) other = score;
  }
  if (std::isnan(other)) return {};
  return "its score " + significant(own, 6) + " is " +
         significant(std::fabs(static_cast<double>(own) - other) / std::max<double>(std::fabs(other), 1e-30), 6) +
         " (relative) from the boundary score " + significant(other, 6) + " of its window";
}

std::string exit_margin(const Divergence& d, const RequestRecord& record, const ExitRule& rule) {
  if (rule.mode != ExitMode::threshold && rule.mode != ExitMode::delayed) return {};
  if (record.gate.empty() || d.position < 0 || d.position >= record.gate.extent(0)) return {};
  // The decision at the earlier of the two depths went differently.
  const int depth = static_cast<int>(std::min(d.expected, d.actual)) - (rule.mode == ExitMode::delayed ? 1 : 0);
  double survival = 1.0;
  for (int loop = 1; loop <= std::max(depth, 1); ++loop) {
    survival *= 1.0 - 1.0 / (1.0 + std::exp(-static_cast<double>(record.gate.row(d.position)[static_cast<std::size_t>(loop - 1)])));
  }
  return "the exit probability after loop " + std::to_string(std::max(depth, 1)) + " is " + significant(1.0 - survival, 6) + ", " +
         significant(std::fabs(1.0 - survival - static_cast<double>(rule.threshold)), 6) + " from the threshold";
}

}  // namespace

std::string operation_clauses(std::string_view tap) {
  std::string text;
  for (const spec::TapOwner& owner : spec::find_tap(tap)) {
    text += (text.empty() ? "" : "; ") + std::string(owner.op->name) + ":";
    for (const std::string_view clause : owner.op->clauses) text += " " + std::string(clause);
  }
  return text;
}

std::string result_clauses(const Divergence& divergence) {
  switch (divergence.group) {
    case RecordGroup::tokens:
      return "S-HEAD-2 S-GEN-1";
    case RecordGroup::exit_depths:
      return "S-EXIT-1 S-EXIT-2 S-EXIT-3 S-EXIT-4";
    case RecordGroup::encoded_frontier:
      return "S-POL-1 S-TIME-1";
    case RecordGroup::logits:
      return "S-HEAD-1 S-EXIT-5";
    case RecordGroup::hidden:
      return "S-MODEL-1 S-MODEL-2 S-TSEL-7";
    case RecordGroup::gate:
      return "S-GATE-1";
    case RecordGroup::scores:
      return "S-TSEL-2 S-TSEL-3";
    case RecordGroup::active:
      return "S-TSEL-4";
    case RecordGroup::keys:
      return "S-SDA-2";
    case RecordGroup::mass:
      return "S-SDA-3";
    case RecordGroup::codec:
      return "S-KVQ-1 S-KVQ-2 S-KVQ-3 S-KVQ-4 S-KVQ-8 S-KVQ-9";
    case RecordGroup::kv:
      return CausalOrder::is_encoded_kv(divergence.key) ? "S-KVQ-1 S-KVQ-9" : "S-KVA-1 S-KVA-2";
  }
  return {};
}

BlamedOperation blame_operation(std::string_view name, int request, int position, int loop, int layer) {
  BlamedOperation result{std::string(name), {}, false, request, position, loop, layer};
  if (const spec::OpSpec* op = spec::find_op(name)) {
    for (const std::string_view clause : op->clauses) result.clauses += (result.clauses.empty() ? "" : " ") + std::string(clause);
  }
  return result;
}

BlamedOperation blame_row(const RowId& row, const RequestRecord& expected, const EffectiveConfig& config) {
  std::string_view name;
  for (const spec::TapOwner& owner : spec::find_tap(row.operation)) {
    // One tap name for two operations: loops 3 and 4 of decode rows are corrected.
    const bool corrected = config.s().enabled && row.position >= expected.prompt_length && row.loop >= 3;
    if (name.empty() || (owner.op->name == "sparse_correction") == corrected) name = owner.op->name;
  }
  BlamedOperation result = blame_operation(name, row.request, row.position, row.loop, row.layer);
  result.decision = row.operation == "sparse_decode.keys";
  return result;
}

BlamedOperation blame_result(const Divergence& divergence, const RequestRecord& expected) {
  const auto executed = [&] {
    if (divergence.loop < 1 || divergence.position < 0) return true;
    const auto flags = executed_loops(expected);
    const auto at = static_cast<std::size_t>(divergence.position);
    return at >= flags[0].size() || flags[static_cast<std::size_t>(divergence.loop - 1)][at] != 0;
  };
  const auto name = [&]() -> std::string_view {
    switch (divergence.group) {
      case RecordGroup::tokens:
      case RecordGroup::logits:
        return "head_argmax";
      case RecordGroup::exit_depths:
        return "exit_step";
      case RecordGroup::encoded_frontier:
        return "seal_blocks";
      case RecordGroup::hidden:
        return executed() ? "rms_norm" : "inherit";
      case RecordGroup::gate:
        return "exit_gate";
      case RecordGroup::scores:
        // A row that one run alone scores is eligible in one alone: a selection differs, not a score.
        return std::isnan(divergence.expected) != std::isnan(divergence.actual) ? "select_tokens" : "update_score";
      case RecordGroup::active:
        return "select_tokens";
      case RecordGroup::keys:
      case RecordGroup::mass:
        return "reference_statistics";
      case RecordGroup::codec:
        return divergence.tensor.ends_with("rows") || !divergence.note.empty() ? "seal_blocks" : "residual_encode";
      case RecordGroup::kv:
        if (CausalOrder::is_encoded_kv(divergence.key)) return "residual_decode";
        return executed() ? "kv_append" : "inherit";
    }
    return {};
  };
  return blame_operation(name(), divergence.request, divergence.position, divergence.loop, divergence.layer);
}

RowDifference row_difference(std::string_view tap, std::span<const float> expected, std::span<const float> actual, std::size_t width,
                             const ModelConfig& model) {
  RowDifference result;
  result.width = width;
  for (std::size_t i = 0; i < std::min(expected.size(), actual.size()); ++i) {
    if (same_float(expected[i], actual[i])) continue;
    ++result.different;
    const double error = std::fabs(static_cast<double>(expected[i]) - actual[i]);
    if (std::isfinite(error)) result.max_abs = std::max(result.max_abs, error);
    if (result.element >= 0) continue;
    result.element = static_cast<std::int64_t>(i);
    result.expected = expected[i];
    result.actual = actual[i];
    result.format = is_bfloat16(expected[i]) && is_bfloat16(actual[i]) ? UlpFormat::bfloat16 : UlpFormat::float32;
    result.ulps = ulp_distance(expected[i], actual[i], result.format);
  }
  const auto owners = spec::find_tap(tap);
  if (owners.empty() || result.element < 0) return result;
  const spec::OutputSpec& output = *owners[0].output;
  if (output.format == spec::Format::int32) result.ulps = kNoUlpDistance;
  const std::string_view shape = output.shape;
  // Rows of a head lie side by side: "H, D", "H, k", or one value a head. The projections before attention are of that layout too.
  const bool by_head = shape.find("H,") != std::string_view::npos || shape.ends_with("H") || tap == "linear.q_proj" ||
                       tap == "linear.k_proj" || tap == "linear.v_proj";
  const auto per_head = static_cast<std::int64_t>(width) / model.heads;
  if (by_head && per_head > 0) {
    result.head = static_cast<int>(result.element / per_head);
    result.element_in_head = static_cast<int>(result.element % per_head);
  }
  return result;
}

std::string decision_margin(const Divergence& divergence, const RunRecord& expected, const AlgorithmConfig& config) {
  const auto at = static_cast<std::size_t>(divergence.request);
  if (at >= expected.requests.size()) return {};
  const RequestRecord& record = expected.requests[at];
  switch (divergence.group) {
    case RecordGroup::tokens:
      return token_margin(record, divergence.position - record.prompt_length + 1);
    case RecordGroup::active:
      return active_margin(divergence, record, config.window);
    case RecordGroup::exit_depths:
      return exit_margin(divergence, record, config.exit);
    default:
      return {};
  }
}

std::optional<Divergence> first_decision(const RecordComparison& comparison) {
  std::optional<Divergence> first;
  for (const GroupComparison& group : comparison.groups) {
    const bool decides = group.group == RecordGroup::tokens || group.group == RecordGroup::active || group.group == RecordGroup::keys ||
                         group.group == RecordGroup::exit_depths;
    if (!decides || !group.first) continue;
    if (!first || std::tie(group.first->request, group.first->key) < std::tie(first->request, first->key)) first = group.first;
  }
  return first;
}

bool happens_before(const Divergence& result, const RowId& row, const RequestRecord& expected, int window) {
  const CausalOrder order(expected, window);
  CausalKey key = order.computed(row.position, row.loop, CausalOrder::kLayers, row.layer);
  if (row.operation == "logits") {
    key = order.completed(row.position - expected.prompt_length + 1, CausalOrder::kLogits);
  } else if (row.operation == "update_score") {
    key = order.computed(row.position, row.loop, CausalOrder::kScores);
  } else if (row.operation == "exit_gate") {
    key = order.computed(row.position, row.loop, CausalOrder::kGate);
  } else if (row.layer < 0 && row.loop > 0) {
    key = order.computed(row.position, row.loop, CausalOrder::kHidden);
  }
  return std::tie(result.key.stage, result.key.loop, result.key.phase) < std::tie(key.stage, key.loop, key.phase);
}

}  // namespace loopgauge::harness
