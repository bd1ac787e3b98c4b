// SPDX-License-Identifier: Apache-2.0
#include "harness/report/schema.hpp"

namespace loopgauge::harness {

template <>
std::span<const Column<ReportMeta>> columns() {
  static constexpr Column<ReportMeta> list[] = {
      {"title", "", "What this report is, in one line", &ReportMeta::title},
      {"tool_version", "", "Version of loopgauge", &ReportMeta::tool_version},
      {"source_revision", "", "Revision of the sources, with '-dirty' for uncommitted changes", &ReportMeta::source_revision},
      {"compiler", "", "Compiler and build type", &ReportMeta::compiler},
      {"model_sha256", "", "Fingerprint of the checkpoint: SHA-256 over the safetensors files in name order", &ReportMeta::model_sha256},
      {"model_config", "", "Shape, rms_norm_eps and rope_theta of the model, one line of JSON", &ReportMeta::model_config},
      {"device", "", "Device and driver of the optimized column, why there is none, or 'not asked for'", &ReportMeta::device},
      {"device_available", "1", "Whether the optimized column could run", &ReportMeta::device_available},
      {"cpu", "", "Processor and threads of the reference", &ReportMeta::cpu},
      {"set", "", "Name of the set, or 'traces' for traces given as files", &ReportMeta::set},
      {"set_sha256", "", "Identity of the unsharded request: case ids, configurations, executors and the traces' contents",
       &ReportMeta::set_sha256},
      {"executors", "", "Requested columns: reference, optimized, both", &ReportMeta::executors},
      {"mutant", "", "Planted fault; empty for a real sweep", &ReportMeta::mutant},
      {"configuration", "", "Effective options that hold for every case, one line of sorted JSON", &ReportMeta::configuration},
      {"command_line", "", "Command that wrote the report", &ReportMeta::command_line},
      {"seed", "", "Seed of every pseudo-random choice of the sweep", &ReportMeta::seed},
      {"shard", "", "Shards of the request that this report holds, such as 1/4; empty: all of it", &ReportMeta::shard},
      {"case_count", "1", "Cases of the unsharded request", &ReportMeta::case_count},
      {"started", "", "Start of the sweep, UTC, ISO 8601", &ReportMeta::started},
      {"finished", "", "Last write of the report, UTC, ISO 8601", &ReportMeta::finished},
  };
  return list;
}

template <>
std::span<const Column<CaseResult>> columns() {
  static constexpr Column<CaseResult> list[] = {
      {"ordinal", "1", "Index of the case in the unsharded request", &CaseResult::ordinal},
      {"id", "", "Case id, as accepted by run and explain", &CaseResult::id},
      {"mode", "", "Execution mode with its parameters", &CaseResult::mode},
      {"switches", "", "token_sparse_prefill, sparse_decode_attention, kv_residual_quantization as t0s0q0 to t1s1q1",
       &CaseResult::switches},
      {"policy", "", "Encoding policy; empty with Q off", &CaseResult::policy},
      {"timing", "", "Encoding timing; empty with Q off", &CaseResult::timing},
      {"trace", "", "Name of the trace", &CaseResult::trace},
      {"executor", "", "reference, optimized, or mutant:<planted fault>", &CaseResult::executor},
      {"profile", "", "How the executor rounds and sums: declared, reordered, double; empty for the optimized column",
       &CaseResult::profile},
      {"configuration", "", "Effective configuration, one line of sorted JSON", &CaseResult::configuration},
      {"status", "", "passed, skipped, not_run, failed, error", &CaseResult::status},
      {"reason", "", "Why the status is not passed", &CaseResult::reason},
      {"same_top1", "1", "Fraction of continuation rows with the dense top-1 token", &CaseResult::same_top1},
      {"kl_mean", "1", "Mean KL(dense || case) of continuation rows, in nats", &CaseResult::kl_mean},
      {"kl_max", "1", "Largest KL(dense || case) of a continuation row, in nats", &CaseResult::kl_max},
      {"first_token_kl", "1", "Mean over requests of KL(dense || case) of the first generated token, in nats", &CaseResult::first_token_kl},
      {"bits_per_byte", "bit", "Negative log2-likelihood per byte token of the continuation; byte-level models only",
       &CaseResult::bits_per_byte},
      {"task_accuracy", "1", "Fraction of answers of which every token is the top-1 token", &CaseResult::task_accuracy},
      {"memory_ratio", "1",
       "Predicted physical bytes of the K/V of dense over those of this configuration, steady state: payload, parameters, maps, tail, page "
       "tables and their padding",
       &CaseResult::memory_ratio},
      {"seconds", "s", "Wall time of the run on this executor; of several the median, of an even number the mean of the middle two", &CaseResult::seconds},
  };
  return list;
}

template <>
std::span<const Column<CheckRow>> columns() {
  static constexpr Column<CheckRow> list[] = {
      {"name", "", "Check", &CheckRow::name},
      {"status", "", "passed, failed, skipped, not_run", &CheckRow::status},
      {"detail", "", "What was found and where, or why the check was not made", &CheckRow::detail},
  };
  return list;
}

template <>
std::span<const Column<DigestRow>> columns() {
  static constexpr Column<DigestRow> list[] = {
      {"group", "", "Record group", &DigestRow::group},
      {"sha256", "", "Digest, lower-case hex (digest-v1)", &DigestRow::sha256},
  };
  return list;
}

template <>
std::span<const Column<ToleranceRow>> columns() {
  static constexpr Column<ToleranceRow> list[] = {
      {"operation", "", "Operation of the registry; for whole runs a metric", &ToleranceRow::operation},
      {"loop", "1", "Loop, from 1", &ToleranceRow::loop},
      {"elements", "1", "Elements or pooled values compared", &ToleranceRow::elements},
      {"max_ulp", "1", "Largest error in ulps of the declared rounding", &ToleranceRow::max_ulp},
      {"max_absolute", "1", "Largest absolute error of finite elements; for whole runs the largest distance", &ToleranceRow::max_absolute},
      {"max_index", "", "Where the largest error is", &ToleranceRow::max_index},
      {"rms", "1", "Root mean square error of finite elements", &ToleranceRow::rms},
      {"p50", "1", "50th percentile of the error in ulps, nearest rank; for whole runs of the distance", &ToleranceRow::p50},
      {"p90", "1", "90th percentile of the same", &ToleranceRow::p90},
      {"p99", "1", "99th percentile of the same", &ToleranceRow::p99},
      {"p999", "1", "99.9th percentile of the same", &ToleranceRow::p999},
      {"nan_count", "1", "NaN elements on either side", &ToleranceRow::nan_count},
      {"inf_count", "1", "Infinite elements on either side", &ToleranceRow::inf_count},
      {"limit", "1", "Declared bound of the operation, in ulps; for whole runs of the percentile nearest to its limit",
       &ToleranceRow::limit},
      {"error_over_bound", "1", "Largest error over its bound; at most 1 passes", &ToleranceRow::error_over_bound},
      {"verdict", "", "passed, failed, not judged, yardstick", &ToleranceRow::verdict},
      {"level", "", "operation: equal inputs; decision_forced, teacher_forced: whole runs", &ToleranceRow::level},
      {"source", "", "Whose distance from the reference: candidate, or of a yardstick, reordered or double", &ToleranceRow::source},
  };
  return list;
}

template <>
std::span<const Column<DecisionRow>> columns() {
  static constexpr Column<DecisionRow> list[] = {
      {"kind", "", "Kind of decision", &DecisionRow::kind},
      {"request", "1", "Request, from 0", &DecisionRow::request},
      {"position", "1", "Absolute token position, from 0", &DecisionRow::position},
      {"loop", "1", "Loop, from 1", &DecisionRow::loop},
      {"layer", "1", "Layer, from 0", &DecisionRow::layer},
      {"head", "1", "Query head, from 0", &DecisionRow::head},
      {"margin", "1", "Distance of the reference's value to the other decision", &DecisionRow::margin},
      {"difference", "1", "Difference of this element between the executions", &DecisionRow::difference},
      {"explained", "1", "Whether margin and difference account for the flip", &DecisionRow::explained},
      {"root", "1", "Whether no earlier flip lies in its causal past", &DecisionRow::root},
      {"detail", "", "The two decisions", &DecisionRow::detail},
  };
  return list;
}

template <>
std::span<const Column<DriftRow>> columns() {
  static constexpr Column<DriftRow> list[] = {
      {"request", "1", "Request, from 0", &DriftRow::request},
      {"row", "1", "Logits row: 0 after the prompt, j + 1 after feeding token j", &DriftRow::row},
      {"position", "1", "Absolute position whose hidden state the row is read from", &DriftRow::position},
      {"kl", "1", "KL(dense || case) in nats", &DriftRow::kl},
      {"same_top1", "1", "Whether the top-1 token is that of dense", &DriftRow::same_top1},
      {"top1_probability_change", "1", "Probability of the dense top-1 token, case minus dense", &DriftRow::top1_probability_change},
      {"token", "1", "The known next token, -1 where there is none", &DriftRow::token, 2},
      {"dense_nll", "1", "Negative log-likelihood of that token in the dense run, in nats", &DriftRow::dense_nll, 2},
      {"nll", "1", "The same in this case", &DriftRow::nll, 2},
      {"scored", "1", "Whether that token belongs to a marked answer, or the trace marks none", &DriftRow::scored, 2},
  };
  return list;
}

template <>
std::span<const Column<DriftSummaryRow>> columns() {
  static constexpr Column<DriftSummaryRow> list[] = {
      {"metric", "", "Metric", &DriftSummaryRow::metric},
      {"scope", "", "Rows it covers: first_token, continuation, all", &DriftSummaryRow::scope},
      {"value", "1", "Value; KL in nats, bits_per_byte in bits, others as fractions", &DriftSummaryRow::value},
      {"low", "1", "Lower end of the 95 % interval", &DriftSummaryRow::low},
      {"high", "1", "Upper end of the 95 % interval", &DriftSummaryRow::high},
      {"samples", "1", "Independent values behind it", &DriftSummaryRow::samples},
      {"method", "", "How the interval was obtained", &DriftSummaryRow::method},
  };
  return list;
}

template <>
std::span<const Column<AnswerRow>> columns() {
  static constexpr Column<AnswerRow> list[] = {
      {"request", "1", "Request, from 0", &AnswerRow::request},
      {"row", "1", "Logits row that predicts the first token of the answer", &AnswerRow::row},
      {"tokens", "1", "Tokens of the answer", &AnswerRow::tokens},
      {"prompt_length", "1", "Tokens of the prompt", &AnswerRow::prompt_length},
      {"source_position", "1", "Prompt position where the answer's tokens last occur; -1: nowhere, or fewer than three tokens",
       &AnswerRow::source_position},
      {"dense_correct", "1", "Whether every token is the top-1 token of the dense run", &AnswerRow::dense_correct},
      {"correct", "1", "The same of this case", &AnswerRow::correct},
  };
  return list;
}

template <>
std::span<const Column<AcceptanceRow>> columns() {
  static constexpr Column<AcceptanceRow> list[] = {
      {"draft_position", "1", "Place in a round, from 0: of the first candidate, and of the first token emitted", &AcceptanceRow::draft_position},
      {"drafted", "1", "Rounds that verified a candidate at this place", &AcceptanceRow::drafted},
      {"accepted", "1", "Of these, rounds that accepted it and all before it", &AcceptanceRow::accepted},
      {"rounds_emitting_this_many", "1", "Rounds that emitted draft_position + 1 tokens", &AcceptanceRow::rounds_emitting_this_many},
      {"verifier_serial_divergences", "1", "Requests whose first token that differs from serial execution was emitted here",
       &AcceptanceRow::verifier_serial_divergences},
  };
  return list;
}

template <>
std::span<const Column<MemoryRow>> columns() {
  static constexpr Column<MemoryRow> list[] = {
      {"category", "", "Memory category", &MemoryRow::category},
      {"phase", "", "steady or peak", &MemoryRow::phase},
      {"source", "", "predicted by the accounting model, or measured from the allocator", &MemoryRow::source},
      {"logical_bytes", "byte", "Bytes that carry information", &MemoryRow::logical_bytes},
      {"physical_bytes", "byte", "Bytes taken, padding and page granularity included", &MemoryRow::physical_bytes},
  };
  return list;
}

template <>
std::span<const Column<TimingRow>> columns() {
  static constexpr Column<TimingRow> list[] = {
      {"phase", "", "What was timed: run, the whole case; draft, verify, accept of a speculating run, between events on the device", &TimingRow::phase},
      {"repetition", "1", "Repetition, from 0", &TimingRow::repetition},
      {"seconds", "s", "Wall time", &TimingRow::seconds},
      {"floor_seconds", "s", "Time that the bytes or FLOPs need at the ceilings measured in the same run", &TimingRow::floor_seconds, 1},
  };
  return list;
}

template <>
std::span<const Column<CounterRow>> columns() {
  static constexpr Column<CounterRow> list[] = {
      {"name", "", "Counter of the run", &CounterRow::name},
      {"value", "1", "Count over the whole run; snapshot_bytes in bytes", &CounterRow::value},
  };
  return list;
}

template <>
std::span<const Column<DivergenceRow>> columns() {
  static constexpr Column<DivergenceRow> list[] = {
      {"request", "1", "Request, from 0", &DivergenceRow::request},
      {"row", "1", "Logits row: 0 after the prompt, j + 1 after feeding token j", &DivergenceRow::row},
      {"position", "1", "Absolute position whose hidden state the row is read from", &DivergenceRow::position},
      {"kl", "1", "KL(serial plan || this plan) in nats", &DivergenceRow::kl},
      {"same_top1", "1", "Whether the top-1 token is that of the serial plan", &DivergenceRow::same_top1},
      {"max_logit_difference", "1", "Largest absolute difference of a logit", &DivergenceRow::max_logit_difference},
  };
  return list;
}

template <>
std::span<const Column<HandoffRow>> columns() {
  static constexpr Column<HandoffRow> list[] = {
      {"request", "1", "Request, from 0", &HandoffRow::request},
      {"transport", "", "What carried it: host, device, peer, ipc", &HandoffRow::transport},
      {"outcome", "", "How it ended", &HandoffRow::outcome},
      {"regions", "1", "Regions of the descriptor", &HandoffRow::regions},
      {"partitions", "1", "Partitions that were posted", &HandoffRow::partitions},
      {"bytes", "byte", "Bytes of all regions", &HandoffRow::bytes},
      {"dense_bytes", "byte", "Bytes of K and V of all loops in BF16", &HandoffRow::dense_bytes},
      {"validity_bytes", "byte", "Validity bitmaps", &HandoffRow::validity_bytes},
      {"activity_bytes", "byte", "Activity bitmaps of loops 2 to 4", &HandoffRow::activity_bytes},
      {"base_payload_bytes", "byte", "Codes of loop 1", &HandoffRow::base_payload_bytes},
      {"residual_payload_bytes", "byte", "Codes of loops 2 to 4", &HandoffRow::residual_payload_bytes},
      {"parameters_bytes", "byte", "Minimum and scale of every group", &HandoffRow::parameters_bytes},
      {"rows_bytes", "byte", "K and V rows that are not encoded", &HandoffRow::rows_bytes},
      {"final_hidden_bytes", "byte", "The final hidden row", &HandoffRow::final_hidden_bytes},
      {"bytes_before_prompt_end", "byte", "Bytes that left while the prompt was being computed", &HandoffRow::bytes_before_prompt_end},
      {"bytes_final_before_last_loop", "byte", "Bytes that depend on no row of the last loop", &HandoffRow::bytes_final_before_last_loop},
      {"most_bytes_in_flight", "byte", "Bytes that were being written at once, at most", &HandoffRow::most_bytes_in_flight},
      {"most_reserved_bytes", "byte", "Bytes that reservations of all requests held at the receiver at once", &HandoffRow::most_reserved_bytes},
      {"seconds", "s", "From the end of the prompt to the acknowledgement", &HandoffRow::seconds},
  };
  return list;
}

}  // namespace loopgauge::harness
