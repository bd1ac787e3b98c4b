// SPDX-License-Identifier: Apache-2.0
// A trace: the fixed input that is replayed through executors. The file format is described in data/README.md; reading and writing
// HDF5 is the harness's work, the in-memory form and its validity rules are here because every executor and planner needs them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/model_config.hpp"

namespace loopgauge {

inline constexpr float kLeastTemperature = 0.01f, kMostTemperature = 100.0f;

struct TraceRequest {
  int id = 0;                              // unique among live requests
  int arrival = 0;                         // submission index from which the request may be scheduled
  int max_new_tokens = 0;
  int eos_token_id = -1;                   // -1: none
  std::uint64_t seed = 0;                  // of sampling (S-SAMP-2)
  float temperature = 0.0f;                // 0: greedy; otherwise within kLeastTemperature..kMostTemperature (S-SAMP-1)
  std::string task = "text";               // text, needle, kv, copy, sum, other
  std::vector<std::int32_t> prompt;        // [P], P >= 1
  std::vector<std::int32_t> forced;        // empty, or max_new_tokens teacher-forced tokens
  std::vector<std::uint8_t> exit_depths;   // empty, or one depth in 1..loops per new token (exit mode `trace`)
  std::vector<std::uint8_t> answer_mask;   // empty, or one flag per forced token: 1 = scored
  // Empty, or for every new token the draft that a speculating mode proposes for it, -1: the model's own (S-SPEC-10). Other modes take no
  // notice.
  std::vector<std::int32_t> draft_tokens;

  bool teacher_forced() const { return !forced.empty(); }
  int prompt_length() const { return static_cast<int>(prompt.size()); }
};

enum class TraceEventKind { cancel, preempt, resume, reuse_id };

struct TraceEvent {
  int submission = 0;
  TraceEventKind kind = TraceEventKind::cancel;
  int request = 0;                         // index into Trace::requests
};

struct Trace {
  std::string name;
  std::string description;
  std::string source;
  int vocab_size = 0;
  std::vector<TraceRequest> requests;
  std::vector<TraceEvent> events;
};

// Positions after the prompt that are forwarded at most (S-GEN-1, S-GEN-2): all n forced tokens, else max_new_tokens - 1, because the last
// emitted token is not forwarded.
int fed_tokens(const TraceRequest& request);
// Positions of the longest request: its prompt and every token that may be forwarded.
int longest_sequence(const Trace& trace);

// Every fault of the trace as a sentence "requests/0/prompt[17] = 300 is not below vocab_size 264"; empty when it is valid.
std::vector<std::string> trace_faults(const Trace& trace);
// Faults of the trace for this model: vocabulary, position limit, exit depths.
std::vector<std::string> trace_faults(const Trace& trace, const ModelConfig& model);

}  // namespace loopgauge
