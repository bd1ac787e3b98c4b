// SPDX-License-Identifier: Apache-2.0
// Identity of a case: one execution mode, one algorithm configuration, one trace. Its id is a line that a user pastes into
// `loopgauge run` or `loopgauge explain`, a key of reports and of baselines, and therefore a promise: an id keeps its meaning for
// ever, and a new parameter may only add a spelling for its non-default values.
//
// Grammar (no character of it is expanded by a shell):
//
//   id        = mode "/" settings "/" trace
//   mode      = part { "+" part }        serial  split.p100  wcpb+prefix+async  mixed.b64+prefix.k4+preempt  async+graph
//   part      = name { "." parameter }
//     A mode is one schedule and any of the modifiers, in this order:
//       serial | split | mixed | wcpb | block_spec | pipeline_spec           schedule
//       prefix, pd, preempt, async, graph                                    modifiers
//     `serial` is written only alone: async is serial order, executed asynchronously, and pd is serial order with a handoff. Parameters:
//     p<N>       split: at most N tokens of a window in one submission; without it, whole windows
//     b<N>       mixed: token budget of a submission (256)
//     c<N>       wcpb: windows of a chunk (1)
//     d<N>       block_spec: loops of the draft, 1 or 2; pipeline_spec: 1 to 3 (default 2)
//     k<N>       block_spec: drafted tokens a round, 1 to 64 (default 4)
//     encoded    prefix: reuse encoded windows, not BF16 planes
//     k<N>       prefix: at most N windows are published at once (no limit)
//     p<N>       preempt: a request is preempted after every N of its loops (3)
//     Parameters are written where they differ from the default, but block_spec always writes d and k, pipeline_spec always writes d.
//   settings  = "t" bit "s" bit "q" bit [ ":" policy ":" timing ] { ":" parameter }
//     policy and timing are written exactly when q1. Parameters are written only where they differ from the default, in this order:
//     w<N>                            window in tokens (256)
//     retention<bp>-<bp>-<bp>-<bp>    with t1: loops 1 to 4 (10000-10000-2500-1000)
//     reserve=final_prompt_token      with t1: the prompt's last position is always selected, an ablation (none)
//     keys<bp>                        with s1: key fraction (1000)
//     tail<N>                         with q1: tail in tokens (64)
//     flush=eager                     with q1: flush rule (committed)
//     exit=<rule>                     trace, threshold<x>, delayed<x>, x in the shortest decimal form that reads back as the same
//                                     float: exit=threshold0.9 (full)
//     minloops<N>                     with threshold and delayed (1)
//   trace     = one or more of A-Z a-z 0-9 . _ -      the trace's name
//
// Numbers are decimal without sign or leading zero; fractions are basis points. Settings of a switched-off group are no part of a case.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "harness/shard.hpp"
#include "models/algorithm_config.hpp"
#include "models/fault.hpp"

namespace loopgauge::harness {

// An execution mode of SPEC.md, "Execution modes": a schedule and modifiers, with their parameters. Parameters of what is not chosen keep
// their defaults.
struct ModeSpec {
  std::string schedule = "serial";  // serial split mixed wcpb block_spec pipeline_spec
  int piece_tokens = 0;             // split: most tokens of a window in one submission; 0 = whole windows
  int token_budget = 256;           // mixed: most tokens of a submission
  int chunk_windows = 1;            // wcpb: windows of a chunk
  int draft_depth = 2;              // block_spec, pipeline_spec: loops of the draft
  int draft_length = 4;             // block_spec: drafted tokens a round (K)

  bool prefix = false;          // completed windows are published and reused
  bool encoded_prefix = false;  // prefix: encoded, not as BF16 planes
  int published_windows = 0;    // prefix: most windows published at once; 0 = no limit
  bool pd = false;              // prompts are computed on one side and handed off to another
  bool preempt = false;         // requests are preempted and resumed
  int preempt_loops = 3;        // preempt: loops of a request between two preemptions
  bool async = false;           // two submissions in flight
  bool graph = false;           // decode steps are replayed from captured graphs

  bool speculates() const { return schedule == "block_spec" || schedule == "pipeline_spec"; }
  bool operator==(const ModeSpec&) const = default;
};

struct Case {
  ModeSpec mode;
  AlgorithmConfig config;
  std::string trace;  // the trace's name
};

// Schedules of the specification.
std::span<const std::string_view> schedule_names();
// What this version plans: "serial, split, mixed, wcpb, each with any of prefix, pd, preempt, async, graph".
std::string available_modes();
// Whether the mode has this schedule or modifier; every mode has "".
bool has_part(const ModeSpec& mode, std::string_view name);

// "split.p100+async" <-> ModeSpec. The parser throws ConfigError naming the offending part and listing the accepted words; another order or
// spelling is refused with the right one.
std::string mode_text(const ModeSpec& mode);
ModeSpec parse_mode(std::string_view text);

// Why a planted fault cannot act in the case: "it needs mixed", "it needs t1q1", "it is not planted beside pd". Empty where it may.
std::string inert_fault_reason(Fault fault, const Case& value);

// The id of `value`. Throws ConfigError when a field has no spelling: unknown mode, trace name with other characters.
std::string case_id(const Case& value);
// The settings part alone, "t1s1q1:streaming:serial_aligned:w64".
std::string settings_text(const AlgorithmConfig& config);

// The case of an id. Exactly one id names a case: case_id(parse_case_id(id)) == id, and any other spelling is refused with the right
// one. Throws ConfigError naming the offending part and listing the accepted words. Does not judge legality: see case_refusal.
Case parse_case_id(std::string_view id);

// `config` with one parameter of the settings part, "w64" or "keys500". Throws ConfigError for one that cannot be read or has no effect.
AlgorithmConfig parse_case_parameter(const AlgorithmConfig& config, std::string_view parameter);

// The configuration that the id carries: settings of switched-off groups are back at their defaults.
AlgorithmConfig normalized(const AlgorithmConfig& config);

// True when `text` may be the trace part of an id.
bool is_case_trace_name(std::string_view text);

// Why the specification forbids this case (SPEC.md, "Execution modes"), as a sentence, judged without the trace's content and the model; empty when it
// can run.
std::optional<std::string> case_refusal(const Case& value);
// Throws ConfigError for an illegal case; the message carries the id and the reason.
void require_runnable(const Case& value);

// One example for every rule of case_refusal, as a case of trace `trace`.
struct IllegalCombination {
  std::string id;
  std::string reason;
};
std::vector<IllegalCombination> illegal_combinations(std::string_view trace);

// What the enumeration needs to know of a trace.
struct CaseTrace {
  std::string name;
  bool has_exit_depths = false;      // every request with new tokens carries exit_depths
  std::vector<ModeSpec> modes = {};  // that the set chooses for it; empty: default_modes()
  int window = AlgorithmConfig{}.window;
};

// Modes that a sweep replays where neither the user nor the set of traces chooses: serial, split.
std::vector<ModeSpec> default_modes();

// The threshold of the enumerated exit cases: on ouro-tiny it ends some tokens after loop 2, most after loop 3 and a few after loop 4.
inline constexpr float kEnumeratedExitThreshold = 0.5f;

// The cases of a sweep, trace by trace, then setting by setting, then mode by mode (so that runs that must agree bit for bit are
// neighbours):
//   settings: t0s0q0, t0s0q1, ..., t1s1q1; with q1 each of fixed_prompt, rolling, streaming, all serial_aligned
//   exits:    full; for a trace whose name begins with "exit-" also exit=threshold0.5; for a trace with has_exit_depths also exit=trace
//   window:   the trace's
//   modes:    `modes`; when empty those of the trace
// Everything else has its default. Illegal combinations (prefix under streaming, async with a threshold) are no cases; a mode that is
// illegal everywhere, or not available, raises what require_runnable raises.
std::vector<Case> enumerate_cases(std::span<const CaseTrace> traces, std::span<const ModeSpec> modes);

// Glob over a whole id: `*` any characters, `/` included, `?` one character, anything else itself.
bool glob_match(std::string_view pattern, std::string_view text);

// A case belongs to the shard given by a hash of its id, so that membership does not depend on the set, the filter or the order; the n
// shards partition any list of cases.
bool in_shard(std::string_view id, const Shard& shard);

}  // namespace loopgauge::harness
