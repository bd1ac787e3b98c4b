// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/audit.hpp"

#include "harness/compare/audit_context.hpp"
#include "harness/compare/distances.hpp"
#include "harness/compare/significant.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::array kRules{
    AuditRule{"record_shape", "S-GEN-1", "lengths and extents of the record agree with the trace, the model and each other"},
    AuditRule{"forced_tokens", "S-GEN-2", "a teacher-forced request holds the trace's tokens and forwards all of them"},
    AuditRule{"greedy_token", "S-HEAD-2", "an emitted token is the lowest id among the largest logits of its row"},
    AuditRule{"sampled_token", "S-SAMP-3", "a token drawn from the target is where its number falls in the distribution; one that verification chose is possible"},
    AuditRule{"run_end", "S-GEN-1", "a free run ends at max_new_tokens or with its first end-of-sequence token"},
    AuditRule{"finite_logits", "S-ERR-2", "logits are finite"},
    AuditRule{"logits_head", "S-EXIT-5", "a logits row is the head on the hidden row of the last executed loop, which loop 4 inherits"},
    AuditRule{"gate_value", "S-GATE-1", "the gate is the dot product with the hidden row of its loop plus the bias"},
    AuditRule{"hidden_bfloat16", "S-MODEL-2", "hidden rows are BF16 numbers"},
    AuditRule{"final_norm_magnitude", "S-RMS-3", "a normed row divided by the norm's weight has a mean square of at most 1"},
    AuditRule{"inherited_hidden", "S-TSEL-7", "a row that did not execute a loop keeps the hidden bits of the loop before"},
    AuditRule{"inherited_gate", "S-GATE-1", "a row that did not execute a loop has the gate bits of the loop before"},
    AuditRule{"inherited_kv", "S-TERM-4", "a row that did not execute a loop has the K/V bits of the loop before in every layer"},
    AuditRule{"score_eligible", "S-TSEL-2", "exactly the eligible rows of a window have a score, finite and not negative"},
    AuditRule{"score_aliased", "S-TSEL-3", "scores of a window are not all zero unless its hidden rows are unchanged"},
    AuditRule{"score_value", "S-TSEL-2", "a score follows from the two hidden rows before it"},
    AuditRule{"active_order", "S-TSEL-4", "active positions are ascending, distinct prompt positions"},
    AuditRule{"active_nested", "S-INV-9", "rows active at loop 4 are active at loop 3"},
    AuditRule{"active_budget", "S-TSEL-4", "a window has exactly min(budget, rows active before) active rows"},
    AuditRule{"active_top", "S-TSEL-4", "active rows are first in the order score descending, position ascending"},
    AuditRule{"keys_present", "S-SDA-1",
              "a decode row that executes loop 3 has selected keys in every layer; one that exits at loop 1 or runs with S off has none"},
    AuditRule{"keys_budget", "S-SDA-2", "every head selects budget(key fraction, position + 1) keys"},
    AuditRule{"keys_order", "S-SDA-2", "selected keys are ascending, distinct and causal"},
    AuditRule{"mass_range", "S-SDA-3", "the mass of the k likeliest of n keys lies between k/n and 1"},
    AuditRule{"exit_depth", "S-EXIT-1", "exit depths follow the exit rule from the recorded gates or the trace"},
    AuditRule{"frontier", "S-POL-1", "the encoded frontier follows the policy"},
    AuditRule{"block_cuts", "S-KVQ-8", "blocks tile [0, E) and are cut as the policy says"},
    AuditRule{"stream_rows", "S-KVQ-9", "stream r of a block holds exactly the rows whose token executed loop r, ascending"},
    AuditRule{"codec_parameters", "S-KVQ-4",
              "codes are below 16, parameters are finite FP16 numbers, a scale is not negative and scale 0 means code 0"},
    AuditRule{"codec_extremes", "S-KVQ-3", "a group with a scale holds code 0 and code 15: its least and greatest value"},
    AuditRule{"decode_chain", "S-KVQ-1", "K/V of encoded positions are the chain of decoded streams, bit for bit in FP32"},
    AuditRule{"kv_bfloat16", "S-KVA-1", "K/V above the frontier are BF16 numbers"},
    AuditRule{"layer0_kv", "S-KVA-1", "K/V of layer 0 above the frontier follow from the hidden row before the loop"},
    AuditRule{"codec_error", "S-KVQ-1", "reconstructed K/V of layer 0 are within half a step of what the hidden row before the loop gives"},
};

}  // namespace

std::span<const AuditRule> audit_rules() { return kRules; }

AuditLog::AuditLog() {
  for (const AuditRule& rule : kRules) result_.coverage.push_back({rule.name, 0});
}

void AuditLog::violation(Rule rule, const AuditPlace& place, double expected, double actual, double bound, std::string_view what) {
  const auto [at, is_new] = seen_.try_emplace({rule, place.request, place.loop, place.layer}, result_.findings.size());
  if (!is_new) {
    ++result_.findings[at->second].count;
    return;
  }
  const AuditRule& description = kRules[static_cast<std::size_t>(rule)];
  AuditFinding finding;
  finding.rule = description.name;
  finding.clause = description.clause;
  finding.request = place.request;
  finding.loop = place.loop;
  finding.layer = place.layer;
  finding.position = place.position;
  finding.head = place.head;
  finding.element = place.element;
  finding.expected = expected;
  finding.actual = actual;
  finding.bound = bound;
  std::string& text = finding.text;
  text = std::string(description.name) + " (" + std::string(description.clause) + "): request " + std::to_string(place.request);
  if (place.loop > 0) text += " loop " + std::to_string(place.loop);
  if (place.layer >= 0) text += " layer " + std::to_string(place.layer);
  if (place.position >= 0) text += " position " + std::to_string(place.position);
  if (place.head >= 0) text += " head " + std::to_string(place.head);
  if (place.element >= 0) text += " element " + std::to_string(place.element);
  text += ": " + std::string(what) + " is " + significant(actual, 9) + ", expected " + significant(expected, 9);
  if (bound > 0) text += " within " + significant(bound, 9);
  result_.findings.push_back(std::move(finding));
}

AuditResult audit(const RunRecord& record, const Trace& trace, const EffectiveConfig& config, const Checkpoint& checkpoint,
                  const AuditOptions& options) {
  static_assert(kRules.size() == static_cast<std::size_t>(Rule::codec_error) + 1);
  AuditLog log;
  log.require(record.requests.size() == trace.requests.size(), Rule::record_shape, {}, static_cast<double>(trace.requests.size()),
              static_cast<double>(record.requests.size()), 0, "number of requests");
  const std::size_t count = std::min(record.requests.size(), trace.requests.size());
  for (std::size_t i = 0; i < count; ++i) {
    AuditContext context{.run = record,
                         .record = record.requests[i],
                         .request = trace.requests[i],
                         .config = config,
                         .checkpoint = checkpoint,
                         .log = log,
                         .index = static_cast<int>(i),
                         .multiplications = options.max_multiplications / static_cast<std::int64_t>(count),
                         .has_events = false,
                         .rounds_bfloat16 = record.profile != "double",
                         .executed = {}};
    bool may_be_cancelled = false;
    for (const TraceEvent& event : trace.events) {
      if (event.request != context.index) continue;
      context.has_events = true;
      may_be_cancelled |= event.kind == TraceEventKind::cancel;
    }
    if (context.record.outcome == RequestOutcome::cancelled) {
      // What it holds is a part of an undisturbed run's record, with which the sweep compares it.
      log.require(may_be_cancelled, Rule::record_shape, context.place(), 0, 1, 0, "cancelled (no event of the trace asks for it)");
      continue;
    }
    if (!audit_shapes(context)) continue;
    context.executed = executed_loops(context.record, context.config.selects_tokens());
    audit_decisions(context);
    audit_values(context);
    audit_codec(context);
    audit_layer0(context);
  }
  return log.take();
}

}  // namespace loopgauge::harness
