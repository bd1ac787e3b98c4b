// SPDX-License-Identifier: Apache-2.0
// A sweep's result in memory: one CaseResult per (case, executor), with the tables behind its verdict. reports/SCHEMA.md describes the
// file form; report/schema.hpp holds name, unit and description of every column, once for the writer, the reader and all renderers.
//
// A number that does not apply to a row is NaN, an index that does not apply is -1, a text that does not apply is empty.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loopgauge::harness {

inline constexpr double kNotApplicable = std::numeric_limits<double>::quiet_NaN();

// In ascending order of severity: the status of a set is the maximum over its members.
enum class CaseStatus {
  passed,   // every check that was made holds, and at least one was made
  skipped,  // left out on purpose, with the reason
  not_run,  // requested but not executed (no device, unsupported, interrupted), with the reason; never a pass
  failed,   // a check does not hold
  error,    // the case could not be judged: something other than the numbers broke
};
std::string_view to_string(CaseStatus status);        // "passed", "skipped", "not_run", "failed", "error"
CaseStatus parse_case_status(std::string_view text);  // throws FileError listing the words
CaseStatus worse(CaseStatus a, CaseStatus b);

// One check that decided the status of a case. `status` is passed, failed, skipped or not_run.
struct CheckRow {
  std::string name;  // "audit", "split_equals_serial", "repeat_with_taps", "mutant_equals_clean", ...
  std::string status;
  std::string detail;  // for failed: what was found, where; for skipped: why
};

// SHA-256 of one record group over all requests (harness/io/digest.hpp).
struct DigestRow {
  std::string group;   // "tokens", "logits", "hidden", ...
  std::string sha256;  // lower-case hex
};

// Distance of one operation's outputs from the reference's, for equal inputs; or of whole runs, one metric of
// harness/compare/distances.hpp.
struct ToleranceRow {
  std::string operation;  // models/spec/op_list.hpp; a metric for whole runs
  std::int64_t loop = -1;
  std::int64_t elements = 0;
  double max_ulp = kNotApplicable;
  double max_absolute = kNotApplicable;
  std::string max_index;  // where the largest error is: "request 0 position 17 layer 2 element 5"
  double rms = kNotApplicable;
  double p50 = kNotApplicable, p90 = kNotApplicable, p99 = kNotApplicable, p999 = kNotApplicable;
  std::int64_t nan_count = 0;
  std::int64_t inf_count = 0;
  double limit = kNotApplicable;  // the operation's declared bound
  double error_over_bound = kNotApplicable;
  std::string verdict = {};
  std::string level = {};   // "operation", "decision_forced", "teacher_forced"
  std::string source = {};  // whose distance from the reference: "candidate", or a yardstick, "reordered", "double"
};

// One discrete decision (selected token, selected key, argmax, exit, code) that differs between two executions.
struct DecisionRow {
  std::string kind;
  std::int64_t request = -1;
  std::int64_t position = -1;
  std::int64_t loop = -1;
  std::int64_t layer = -1;
  std::int64_t head = -1;
  double margin = kNotApplicable;      // distance to the other decision in the reference
  double difference = kNotApplicable;  // of this element between the executions
  bool explained = false;
  bool root = true;  // no earlier flip lies in its causal past
  std::string detail;
};

// Candidate against dense, per logits row.
struct DriftRow {
  std::int64_t request = 0;
  std::int64_t row = 0;        // 0 after the prompt, j + 1 after feeding token j
  std::int64_t position = 0;   // absolute position whose hidden state the row is read from
  double kl = kNotApplicable;  // KL(dense || candidate)
  bool same_top1 = false;
  double top1_probability_change = kNotApplicable;  // candidate minus dense, of the dense top-1 token
  std::int64_t token = -1;                          // the known next token
  double dense_nll = kNotApplicable;                // its negative log-likelihood in nats, dense and candidate
  double nll = kNotApplicable;
  bool scored = false;  // part of an answer, or the trace marks no answers
};

// One marked answer of a task under teacher forcing.
struct AnswerRow {
  std::int64_t request = 0;
  std::int64_t row = 0;  // logits row that predicts its first token
  std::int64_t tokens = 0;
  std::int64_t prompt_length = 0;
  std::int64_t source_position = -1;  // prompt position where the answer's tokens last occur
  bool dense_correct = false;
  bool correct = false;
};

// A number over a trace with its uncertainty: KL mean and percentiles, same top-1, bits per byte, perplexity, task accuracy.
struct DriftSummaryRow {
  std::string metric;  // "kl_mean", "kl_p99", ...
  std::string scope;   // "first_token" (row 0), "continuation" (rows >= 1), "all"
  double value = kNotApplicable;
  double low = kNotApplicable;  // 95 % interval
  double high = kNotApplicable;
  std::int64_t samples = 0;
  std::string method;  // how the interval was obtained
};

// Speculation, one row per place in a round: of candidate draft_position + 1, and of the token that a round emits there.
struct AcceptanceRow {
  std::int64_t draft_position = 0;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  std::int64_t rounds_emitting_this_many = 0;    // rounds that emitted draft_position + 1 tokens
  std::int64_t verifier_serial_divergences = 0;  // requests whose first token that differs from serial execution was emitted here
};

struct MemoryRow {
  std::string category;             // the words of TERMINOLOGY.md: "base payload", "residual payload", ...
  std::string phase;                // "steady", "peak"
  std::string source;               // "predicted", "measured"
  std::int64_t logical_bytes = 0;   // bytes that carry information
  std::int64_t physical_bytes = 0;  // bytes taken, padding and page granularity included
};

// What the run did, a row per counter (models/run_record.hpp, RunCounters).
struct CounterRow {
  std::string name;
  std::int64_t value = 0;
};

// A request that was handed from prefill to decode (S-PD): bytes of regions by kind, and when they could and did leave.
struct HandoffRow {
  std::int64_t request = 0;
  std::string transport;
  std::string outcome;                             // "handed over", "cancelled", ...
  std::int64_t regions = 0;
  std::int64_t partitions = 0;
  std::int64_t bytes = 0;                          // of all regions
  std::int64_t dense_bytes = 0;                    // of K and V of all loops in BF16
  std::int64_t validity_bytes = 0, activity_bytes = 0, base_payload_bytes = 0, residual_payload_bytes = 0, parameters_bytes = 0, rows_bytes = 0,
               final_hidden_bytes = 0;
  std::int64_t bytes_before_prompt_end = 0;        // left while the prompt was being computed
  std::int64_t bytes_final_before_last_loop = 0;   // could leave before the last loop
  std::int64_t most_bytes_in_flight = 0;
  std::int64_t most_reserved_bytes = 0;            // of all requests at once, at the receiver
  double seconds = kNotApplicable;                 // from the end of the prompt to the acknowledgement
};

// Execution-dependent timing: this plan against the serial plan, per logits row.
struct DivergenceRow {
  std::int64_t request = 0;
  std::int64_t row = 0;
  std::int64_t position = 0;   // absolute position whose hidden state the row is read from
  double kl = kNotApplicable;  // KL(serial || this plan)
  bool same_top1 = false;
  double max_logit_difference = kNotApplicable;  // absolute
};

struct TimingRow {
  std::string phase;  // "run": the whole case on this executor; "draft", "verify", "accept": of a speculating run, on the device
  std::int64_t repetition = 0;
  double seconds = kNotApplicable;
  double floor_seconds = kNotApplicable;  // bytes over the read ceiling, or FLOPs over the compute ceiling, of the same run
};

struct CaseResult {
  // Identity
  std::int64_t ordinal = 0;  // index of the case in the whole, unsharded request
  std::string id;
  std::string mode;
  std::string switches;
  std::string policy;  // empty with Q off
  std::string timing;  // empty with Q off
  std::string trace;
  std::string executor;       // "reference", "optimized", "mutant:<name>"
  std::string profile;        // "declared"; empty for the optimized column
  std::string configuration;  // EffectiveConfig::canonical_json()

  // Verdict
  CaseStatus status = CaseStatus::not_run;
  std::string reason;  // empty only for passed

  // Headline numbers; the drift ones cover rows >= 1 ("continuation"), row 0 has its own
  double same_top1 = kNotApplicable;  // fraction
  double kl_mean = kNotApplicable;    // nats
  double kl_max = kNotApplicable;
  double first_token_kl = kNotApplicable;
  double bits_per_byte = kNotApplicable;
  double task_accuracy = kNotApplicable;  // fraction
  double memory_ratio = kNotApplicable;   // predicted bytes of four BF16 planes / predicted bytes of this configuration, steady
  double seconds = kNotApplicable;

  std::vector<CheckRow> checks;
  std::vector<DigestRow> digests;
  std::vector<ToleranceRow> tolerance;
  std::vector<DecisionRow> decisions;
  std::vector<DriftRow> drift;
  std::vector<DriftSummaryRow> drift_summary;
  std::vector<AnswerRow> answers;
  std::vector<AcceptanceRow> acceptance;
  std::vector<MemoryRow> memory;
  std::vector<TimingRow> timings;
  std::vector<CounterRow> counters;
  std::vector<DivergenceRow> divergence;
  std::vector<HandoffRow> handoffs;
};

struct ReportMeta {
  std::string title;
  std::string tool_version;
  std::string source_revision;
  std::string compiler;
  std::string model_sha256;
  std::string model_config;  // one line of JSON
  std::string device;        // device and driver of the optimized column, or why there is none
  bool device_available = false;
  std::string cpu;
  std::string set;            // name of the set, or "traces"
  std::string set_sha256;     // identity of the unsharded request: case ids, configurations and trace bytes
  std::string executors;      // "reference", "optimized", "both"
  std::string mutant;         // planted fault, empty for a real sweep
  std::string configuration;  // options that hold for all cases, one line of sorted JSON
  std::string command_line;
  std::string seed;
  std::string shard;            // "1/4"; "1/4,3/4" when merged; empty: the whole request
  std::int64_t case_count = 0;  // cases of the unsharded request
  std::string started;          // UTC, ISO 8601
  std::string finished;         // of the last write
};

struct Report {
  ReportMeta meta;
  std::vector<CaseResult> cases;  // ordered by (ordinal, executor column)
};

struct StatusCounts {
  int passed = 0, skipped = 0, not_run = 0, failed = 0, error = 0;
  void add(CaseStatus status);
  StatusCounts& operator+=(const StatusCounts& other);
};
StatusCounts count_statuses(const Report& report);

// The reason of a case that a running or interrupted sweep has not come to. --resume continues with these.
inline constexpr std::string_view kNotReached = "the sweep ended before this case";

// Whether the row is stated but does not decide: of the optimized column, not run, where both columns were asked for and there is no
// device.
bool is_excused(const Report& report, const CaseResult& row);

bool is_mutant(const CaseResult& row);  // a row of the column "mutant:<planted fault>"
// Whether a sweep with a planted fault found it: a row of the fault failed. False for a sweep without one.
bool fault_found(const Report& report);

// Maximum over the rows that decide: where there is no device, rows of the optimized column that were not run are stated but do not
// decide. A report that lacks cases of its own request (an incomplete merge) is at best not_run, and so is one without a
// passed row, or with a planted fault that no row found; a shard to which no case falls is skipped.
CaseStatus verdict(const Report& report);
// passed, skipped: 0; not_run: 5 (incomplete coverage); failed: 1; error: 6.
int exit_code_of(CaseStatus verdict);
// "12 passed, 0 failed, 8 skipped": errors count as failed, not-run rows as skipped. The stable last line of a sweep and a gate.
std::string summary_line(const StatusCounts& counts);

}  // namespace loopgauge::harness
