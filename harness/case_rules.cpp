// SPDX-License-Identifier: Apache-2.0
// Which cases are illegal by SPEC.md, "Execution modes" and "KV base and residual quantization".
#include <algorithm>
#include <array>

#include "harness/case.hpp"
#include "models/error.hpp"
#include "models/plan.hpp"

namespace loopgauge::harness {
namespace {

struct Rule {
  bool (*applies)(const Case&);
  std::string_view reason;
  std::string_view example;  // mode and settings of a case that this rule is the first to refuse
};

bool is(const Case& value, std::string_view schedule) { return value.mode.schedule == schedule; }

bool streaming(const Case& value) {
  const auto& q = value.config.kv_residual_quantization;
  return q.enabled && q.policy == EncodingPolicy::streaming;
}

bool serial_aligned_encoding(const Case& value) {
  const auto& q = value.config.kv_residual_quantization;
  return q.enabled && q.timing == EncodingTiming::serial_aligned;
}

// Tokens of one request that are in the pipeline at once: one per started group of d loops.
int live_tokens(const ModeSpec& mode) { return (kLoops + mode.draft_depth - 1) / mode.draft_depth; }

static_assert(kMostDraftLength == 64, "the rule and SPEC.md name it");

// Ranges of mode parameters come first: later rules compute with them.
constexpr std::array kRules{
    Rule{[](const Case& c) { return is(c, "block_spec") && (c.mode.draft_depth < 1 || c.mode.draft_depth > 2); },
         "block speculation drafts with one or two loops (d1, d2)", "block_spec.d3.k4/t0s0q0"},
    Rule{[](const Case& c) { return is(c, "block_spec") && c.mode.draft_length < 1; },
         "block speculation drafts at least one token (k1)", "block_spec.d2.k0/t0s0q0"},
    Rule{[](const Case& c) { return is(c, "block_spec") && c.mode.draft_length > kMostDraftLength; },
         "block speculation drafts at most 64 tokens a round (k64)", "block_spec.d2.k65/t0s0q0"},
    Rule{[](const Case& c) { return is(c, "pipeline_spec") && (c.mode.draft_depth < 1 || c.mode.draft_depth >= kLoops); },
         "a token pipeline advances one to three loops a cycle (d1, d2, d3)", "pipeline_spec.d4/t0s0q0"},
    Rule{[](const Case& c) { return is(c, "mixed") && c.mode.token_budget < 2; },
         "a mixed submission has room for a decode row and a prompt position: its token budget is at least 2 (b2)", "mixed.b1/t0s0q0"},
    Rule{[](const Case& c) { return is(c, "wcpb") && c.mode.chunk_windows < 1; }, "a chunk is at least one whole window (c1)",
         "wcpb.c0/t0s0q0"},
    Rule{[](const Case& c) { return c.mode.preempt && c.mode.preempt_loops < 1; },
         "a request runs at least one loop between two preemptions (p1)", "preempt.p0/t0s0q0"},
    Rule{[](const Case& c) { return c.mode.pd && c.mode.preempt; },
         "what a handoff reads stays where it is, so a request that is handed off is not preempted", "pd+preempt/t0s0q0"},
    Rule{[](const Case& c) { return is(c, "block_spec") && c.config.exit.mode != ExitMode::full; },
         "block speculation verifies all four loops: it needs exit full", "block_spec.d2.k4/t0s0q0:exit=threshold0.9"},
    Rule{[](const Case& c) { return is(c, "pipeline_spec") && c.config.exit.mode != ExitMode::full; },
         "a token pipeline verifies all four loops: it needs exit full", "pipeline_spec.d2/t0s0q0:exit=trace"},
    Rule{[](const Case& c) { return c.mode.async && c.config.exit.mode == ExitMode::threshold; },
         "asynchronous execution issues the next loop before the gate is read: it needs exit full, trace or delayed",
         "async/t0s0q0:exit=threshold0.9"},
    Rule{[](const Case& c) {
           return is(c, "block_spec") && serial_aligned_encoding(c) && c.config.kv_residual_quantization.tail < c.mode.draft_length + 1;
         },
         "serial_aligned encoding under block speculation needs a tail of at least K + 1 tokens, so that no candidate row is encoded",
         "block_spec.d2.k64/t0s0q1:rolling:serial_aligned"},
    Rule{[](const Case& c) {
           return is(c, "pipeline_spec") && serial_aligned_encoding(c) && c.config.kv_residual_quantization.tail < live_tokens(c.mode);
         },
         "serial_aligned encoding under a token pipeline needs a tail of at least the number of live tokens, so that no candidate row is "
         "encoded",
         "pipeline_spec.d1/t0s0q1:rolling:serial_aligned:tail3"},
    Rule{[](const Case& c) { return c.mode.prefix && c.mode.encoded_prefix && !streaming(c); },
         "encoded windows can be reused only with q1 under streaming: the block cuts of the other policies depend on the prompt length",
         "prefix.encoded/t0s0q1:rolling:serial_aligned"},
    Rule{[](const Case& c) { return c.mode.prefix && !c.mode.encoded_prefix && streaming(c); },
         "under streaming a completed window exists only encoded, so there are no BF16 planes to reuse: write prefix.encoded",
         "prefix/t0s0q1:streaming:serial_aligned"},
    Rule{[](const Case& c) { return serial_aligned_encoding(c) && c.config.kv_residual_quantization.flush == FlushRule::eager; },
         "eager flushing encodes rows before they are final, which serial_aligned timing forbids: use execution_dependent",
         "serial/t0s0q1:rolling:serial_aligned:flush=eager"},
};

}  // namespace

std::optional<std::string> case_refusal(const Case& value) {
  const auto rule = std::find_if(kRules.begin(), kRules.end(), [&](const Rule& candidate) { return candidate.applies(value); });
  if (rule == kRules.end()) return std::nullopt;
  return std::string(rule->reason);
}

void require_runnable(const Case& value) {
  if (const auto reason = case_refusal(value)) throw ConfigError("case " + case_id(value) + " is illegal: " + *reason);
}

std::vector<IllegalCombination> illegal_combinations(std::string_view trace) {
  std::vector<IllegalCombination> combinations;
  for (const Rule& rule : kRules) {
    combinations.push_back({std::string(rule.example) + "/" + std::string(trace), std::string(rule.reason)});
  }
  return combinations;
}

}  // namespace loopgauge::harness
