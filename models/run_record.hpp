// SPDX-License-Identifier: Apache-2.0
// Everything observable of one run: what a dump file holds (harness/io/dump_file), what comparisons read and what digests cover.
// Shapes use P = prompt length, fed = tokens forwarded after the prompt, n = tokens emitted or forced.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/tensor.hpp"

namespace loopgauge {

// Which tensors a run keeps. Tokens, frontiers, exits, active sets and scores are always kept: they are small.
struct RecordGroups {
  bool logits = true;
  bool hidden = false;
  bool gate = false;
  bool keys = false;               // keys and mass
  bool kv = false;
  bool codec = false;
  static RecordGroups all() { return {true, true, true, true, true, true}; }
};

// One stream of one sealed block for one layer. Codes are one per byte here; packing is a storage matter.
struct CodecLayer {
  Tensor<std::uint8_t> k_codes;    // [heads, rows, head_dim]
  Tensor<float> k_min, k_scale;    // [heads, ceil(rows / 64), head_dim]      FP16 values, exact in FP32
  Tensor<std::uint8_t> v_codes;    // [heads, rows, head_dim]
  Tensor<float> v_min, v_scale;    // [heads, rows, ceil(head_dim / 64)]
};

struct CodecStream {
  std::vector<std::int32_t> rows;  // absolute positions present in this stream, ascending (compact row i is rows[i])
  std::vector<CodecLayer> layers;  // empty when rows is empty
};

struct CodecBlock {
  PositionRange positions;
  std::array<CodecStream, kLoops> streams;   // index loop - 1
};

struct StepKeys {
  std::vector<Tensor<std::int32_t>> layers;  // per layer [heads, k], ascending; empty: no selection happened at this step
  Tensor<float> mass;                        // [layers, heads]
};

struct KvPlane {
  Tensor<float> k, v;              // [heads, P + fed, head_dim]: logical values as read at the end (reconstructed where encoded)
};

enum class RequestOutcome { completed, cancelled };
std::string_view to_string(RequestOutcome outcome);

// One decision of a speculating mode: a round of block speculation, or one commit of a token pipeline.
struct SpeculationRound {
  std::int32_t position = 0;       // of the pending token, p0
  std::int32_t proposed = 0;       // candidates that were verified: up to K; pipeline: 1 when the oldest token had a child, otherwise 0
  std::int32_t accepted = 0;       // leading ones that the target confirmed, up to one that ends the sequence
  std::int32_t emitted = 0;        // tokens, which is also rows committed: accepted + 1, or accepted when the last of these ends the sequence
  bool operator==(const SpeculationRound&) const = default;
};

// A cancelled request keeps what had been read (S-ACT-2): nothing but scores and active sets before its prompt's result (then fed is 0 and
// encoded_frontier is empty), otherwise the tokens read so far, of forced ones those fed, with fed rows. Its kv and codec groups are empty.
struct RequestRecord {
  RequestOutcome outcome = RequestOutcome::completed;
  int prompt_length = 0;
  int fed = 0;                               // forced: n; free run: n - 1, the last emitted token is not forwarded (0 when n == 0)
  std::vector<std::int32_t> tokens;          // [n]
  Tensor<float> logits;                      // [1 + fed, vocab]; row 0 follows the prompt, row j + 1 follows feeding tokens[j]
  std::array<Tensor<float>, kLoops> hidden;  // per loop [P + fed, hidden], inherited where not executed
  Tensor<float> gate;                        // [P + fed, 4] logits before the sigmoid, of the hidden row above (so inherited too)
  std::vector<std::uint8_t> exit_depths;     // [n]: last executed loop of the row that fed tokens[j]; 0 for a token not forwarded
  std::array<std::vector<float>, 2> scores;  // loops 3, 4: [P], NaN where not eligible; empty when T selects nothing
  std::array<std::vector<std::int32_t>, 2> active;  // loops 3, 4: ascending positions; empty when T selects nothing
  std::vector<StepKeys> keys;                // [fed]
  std::vector<KvPlane> kv;                   // [layers * 4], index layer * 4 + loop - 1; empty unless requested
  std::vector<std::int32_t> encoded_frontier;  // [1 + fed]
  std::vector<CodecBlock> blocks;            // sealed blocks in position order
  // How often each (position, loop) was executed for a row that was committed, [(P + fed) * 4], index position * 4 + loop - 1: 1 for executed rows of an undisturbed run,
  // 0 for rows that inherit, exit or come from published windows, more after a rewind.
  std::vector<std::uint8_t> executions;
  std::vector<SpeculationRound> rounds;      // in order, as far as their results were read
};

// What a run did beside its results. Counts of the whole run; byte counts are payload.
struct RunCounters {
  std::int64_t submissions = 0;
  std::int64_t executed_rows = 0;            // (position, loop) executions, all of the following included
  std::int64_t recomputed_rows = 0;          // executions of a (position, loop) that had been executed before (rewind)
  std::int64_t discarded_rows = 0;           // executions past the end of a sequence that was read late (async)
  std::int64_t unused_statistics_rows = 0;   // decode rows whose loop-2 attention reference was made and never read (exit before loop 3)
  std::int64_t most_in_flight = 0;           // submissions issued whose results had not been read, at most
  std::int64_t host_reads = 0;               // device values that the host waited for to prepare a submission; 0 in asynchronous execution
  std::int64_t graph_captures = 0;
  std::int64_t graph_replays = 0;            // submissions or steps that ran as a replay
  std::int64_t graph_fallbacks = 0;          // decode steps of a graph plan that ran eagerly
  std::int64_t preemptions = 0;
  std::int64_t snapshot_bytes = 0;           // of all snapshots
  std::int64_t published_windows = 0;
  std::int64_t reused_windows = 0;
  std::int64_t evicted_windows = 0;
  std::int64_t failures = 0;                 // planned failures that happened
  // Of speculating modes. Rows count as executed_rows does: a row that runs two loops counts twice.
  std::int64_t speculation_rounds = 0;       // rounds decided; pipeline: commits
  std::int64_t draft_rows = 0;               // executions of loops 1..d
  std::int64_t verify_rows = 0;              // executions of loops d + 1..4
  std::int64_t rejected_rows = 0;            // executions, of either kind, for rows that were not committed
  std::int64_t most_doubled_bytes = 0;       // BF16 K/V of encoded positions that a round still reads as BF16, at most (serial_aligned)
  std::int64_t rewritten_rows = 0;           // positions of sealed blocks that were encoded again after a rejection (flush eager)
};

// A name and a member for everything that tabulates counters: reports, dumps, JSON.
struct RunCounterField {
  std::string_view name;
  std::string_view description;
  std::int64_t RunCounters::*member;
};
std::span<const RunCounterField> run_counter_fields();

// What a run still holds after its last result was read and its published windows were dropped (S-INV-12): zero everywhere.
struct HeldResources {
  std::int64_t requests = 0;                 // slots of the K/V cache
  std::int64_t pages = 0;                    // BF16 pages, free list excluded
  std::int64_t blocks = 0;                   // sealed blocks
  std::int64_t references = 0;               // attention reference slots
  std::int64_t hidden_windows = 0;           // windows between their loops
  std::int64_t snapshots = 0;
  std::int64_t published_windows = 0;        // in use by a request
  std::int64_t tickets = 0;                  // submissions whose result was not read
  std::int64_t transfers = 0;                // regions exported or reserved for a handoff
  bool operator==(const HeldResources&) const = default;
};
// "3 pages, 1 snapshot"; empty when nothing is held.
std::string describe(const HeldResources& held);

// What moved when a request was handed from one executor to another (S-PD). Bytes are of regions; control messages are not counted.
struct HandoffRegion {
  std::string kind;                          // as regions are called in models/handoff/regions.hpp
  PositionRange positions;
  int loop = 0;
  std::int64_t bytes = 0;
  std::uint64_t checksum = 0;                // the receiver found the same one in its own memory
  bool operator==(const HandoffRegion&) const = default;
};

struct HandoffRecord {
  int request = 0;
  std::string outcome;                       // "handed over", "cancelled", ...
  std::string transport;
  std::int64_t bytes = 0;                    // of all regions
  std::int64_t dense_bytes = 0;              // of K and V of all loops in BF16
  std::int64_t bytes_before_prompt_end = 0;  // left while the prompt was still being computed
  std::int64_t bytes_final_before_last_loop = 0;  // depend on no row of the last loop: could leave before it at best
  std::int64_t partitions = 0;
  std::int64_t most_bytes_in_flight = 0;
  std::int64_t most_reserved_bytes = 0;      // that reservations of all requests held at the receiver at once, beside the requests' own storage
  double seconds = 0;                        // from the end of the prompt to the acknowledgement; no result
  std::vector<HandoffRegion> regions;
};

// Where the time of a speculating run went, in seconds on the device, waiting for the host included; no result.
struct SpeculationTimes {
  double draft = 0;                          // loops 1..d, and choosing candidates
  double verify = 0;                         // loops d + 1..4; a batch of both kinds counts by its rows
  double accept = 0;                         // logits and decision of verified rows, and what follows: truncation, encoding
};

struct RunRecord {
  std::string mode;                          // plan mode
  std::string executor;                      // "reference", "optimized"
  std::string profile;                       // "declared", "reordered", "double"
  std::string model_sha256;
  std::string trace;                         // trace name
  std::string config_json;                   // EffectiveConfig::canonical_json()
  std::vector<RequestRecord> requests;
  RunCounters counters;
  HeldResources held_at_drain;
  std::vector<HandoffRecord> handoffs;       // of a plan of handoffs, by request
  std::optional<SpeculationTimes> speculation_times;  // of executors that measure them, in a plan that speculates
};

}  // namespace loopgauge
