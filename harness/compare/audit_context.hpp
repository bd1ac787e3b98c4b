// SPDX-License-Identifier: Apache-2.0
// What the parts of the audit share: the place for findings, the facts of one request, and which rows executed which loop.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "harness/compare/audit.hpp"

namespace loopgauge::harness {

// Indices into audit_rules(), in the same order.
enum class Rule {
  record_shape,
  forced_tokens,
  greedy_token,
  sampled_token,
  run_end,
  finite_logits,
  logits_head,
  gate_value,
  hidden_bfloat16,
  final_norm_magnitude,
  inherited_hidden,
  inherited_gate,
  inherited_kv,
  score_eligible,
  score_aliased,
  score_value,
  active_order,
  active_nested,
  active_budget,
  active_top,
  keys_present,
  keys_budget,
  keys_order,
  mass_range,
  exit_depth,
  frontier,
  block_cuts,
  stream_rows,
  codec_parameters,
  codec_extremes,
  decode_chain,
  kv_bfloat16,
  layer0_kv,
  codec_error,
};

struct AuditPlace {
  int request = 0;
  int loop = 0, layer = -1, position = -1, head = -1;
  std::int64_t element = -1;
};

class AuditLog {
 public:
  AuditLog();

  void checked(Rule rule, std::int64_t count = 1) { result_.coverage[static_cast<std::size_t>(rule)].checks += count; }
  // A violation: the first of its (rule, request, loop, layer) becomes a finding, later ones are counted. `bound` 0: exact.
  void violation(Rule rule, const AuditPlace& place, double expected, double actual, double bound, std::string_view what);
  // checked() and, when the condition fails, violation().
  void require(bool holds, Rule rule, const AuditPlace& place, double expected, double actual, double bound, std::string_view what) {
    checked(rule);
    if (!holds) violation(rule, place, expected, actual, bound, what);
  }

  AuditResult take() { return std::move(result_); }

 private:
  AuditResult result_;
  std::map<std::tuple<Rule, int, int, int>, std::size_t> seen_;
};

struct AuditContext {
  const RunRecord& run;
  const RequestRecord& record;
  const TraceRequest& request;
  const EffectiveConfig& config;
  const Checkpoint& checkpoint;
  AuditLog& log;
  int index = 0;                                           // of the request
  std::int64_t multiplications = 0;                        // this request's share of AuditOptions::max_multiplications
  bool has_events = false;                                 // events of the trace touch this request
  bool rounds_bfloat16 = true;                             // false: the double profile
  std::array<std::vector<std::uint8_t>, kLoops> executed;  // [loop - 1][position] from the recorded active sets and exit depths

  int prompt() const { return record.prompt_length; }
  int positions() const { return record.prompt_length + record.fed; }
  bool ran(int loop, int position) const { return executed[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(position)] != 0; }
  AuditPlace place(int loop = 0, int layer = -1, int position = -1, int head = -1, std::int64_t element = -1) const {
    return {index, loop, layer, position, head, element};
  }
};

// False when extents or lengths make the rest of the record unreadable.
bool audit_shapes(AuditContext& context);
void audit_decisions(const AuditContext& context);  // tokens, exits, scores against active sets, keys, frontier, blocks
void audit_values(const AuditContext& context);     // logits, gate, hidden, scores, inheritance
void audit_codec(const AuditContext& context);      // codes, parameters, decode chain
void audit_layer0(const AuditContext& context);     // K/V of layer 0 from hidden rows

}  // namespace loopgauge::harness
