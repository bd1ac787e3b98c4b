// SPDX-License-Identifier: Apache-2.0
// Re-checks one record against the specification from what the record itself holds, by plain double-precision arithmetic and integer rules
// written apart from both executors. It needs no second run, so it finds faults that two executors sharing a mistake would hide.
//
// What it can and cannot see: everything discrete (selections, budgets, frontiers, blocks, streams, exits, inheritance, tokens), every
// value that follows from recorded values (scores, gate, logits, the decode chain of quantized K/V) and the K/V of layer 0, which follow
// from the recorded hidden rows. Attention and the other layers are not recomputed: comparing two executors covers those.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/checkpoint.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

struct AuditRule {
  std::string_view name;       // stable word, such as "inherited_hidden"
  std::string_view clause;     // clause of models/SPEC.md
  std::string_view statement;  // what must hold, one sentence
};
std::span<const AuditRule> audit_rules();

// One finding per (rule, request, loop, layer): the first violation, and how many there are.
struct AuditFinding {
  std::string_view rule;
  std::string_view clause;
  int request = 0;
  int loop = 0;  // 1..4; 0: not of one loop
  int layer = -1;
  int position = -1;  // absolute token position; -1: none
  int head = -1;
  std::int64_t element = -1;
  double expected = 0.0, actual = 0.0;
  double bound = 0.0;      // allowed |expected - actual|; 0: exact
  std::int64_t count = 1;  // violations of this rule here
  std::string text;        // one sentence with the values
};

struct AuditCoverage {
  std::string_view rule;
  std::int64_t checks = 0;  // 0: the record holds nothing that this rule applies to
};

struct AuditResult {
  std::vector<AuditFinding> findings;
  std::vector<AuditCoverage> coverage;  // every rule, in the order of audit_rules()
  bool clean() const { return findings.empty(); }
};

struct AuditOptions {
  // Recomputations (logits, layer-0 K/V) that would cost more multiplications than this, shared evenly by the requests, look at evenly
  // spaced rows instead of all.
  std::int64_t max_multiplications = 100'000'000;
};

AuditResult audit(const RunRecord& record, const Trace& trace, const EffectiveConfig& config, const Checkpoint& checkpoint,
                  const AuditOptions& options = {});

}  // namespace loopgauge::harness
