// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/bench_file.hpp"

namespace loopgauge::harness {

template <>
std::span<const Column<BenchMeta>> columns() {
  static constexpr Column<BenchMeta> list[] = {
      {"tool_version", "", "Version of loopgauge", &BenchMeta::tool_version},
      {"source_revision", "", "Revision of the sources, with '-dirty' for uncommitted changes", &BenchMeta::source_revision},
      {"compiler", "", "Compiler and build type", &BenchMeta::compiler},
      {"device", "", "Device, compute capability, CUDA of driver and runtime; of the reference executor the host's processor", &BenchMeta::device},
      {"cpu", "", "Processor of the host", &BenchMeta::cpu},
      {"shape", "", "Shape that was measured; single operations have random weights", &BenchMeta::shape},
      {"layers", "1", "Layers of that shape, of which rows of single operations are one; 0: it has no such rows", &BenchMeta::layers},
  };
  return list;
}

template <>
std::span<const Column<BenchRun>> columns() {
  static constexpr Column<BenchRun> list[] = {
      {"command_line", "", "Command of the run", &BenchRun::command_line},
      {"started", "", "Start of the run, UTC, ISO 8601", &BenchRun::started},
      {"finished", "", "Last write of the run, UTC, ISO 8601", &BenchRun::finished},
      {"complete", "1", "Whether the run came to its end", &BenchRun::complete},
      {"read_gb_per_s", "1e9 byte s-1", "Ceiling of this run: read of device memory", &BenchRun::read_gb_per_s},
      {"bf16_tflop_per_s", "1e12 s-1", "Ceiling of this run: 8192^3 product of random BF16 matrices", &BenchRun::bf16_tflop_per_s},
      {"peer", "", "What rows of other engines ran with; empty: none", &BenchRun::peer},
  };
  return list;
}

template <>
std::span<const Column<BenchRow>> columns() {
  static constexpr Column<BenchRow> list[] = {
      {"run", "1", "Index of the run", &BenchRow::run},
      {"engine", "", "loopgauge, or the peer that was measured beside it: pytorch", &BenchRow::engine},
      {"what", "", "What was timed", &BenchRow::what},
      {"setting", "", "Switches; of a peer what it computes; empty where none applies", &BenchRow::setting},
      {"implementation", "", "What ran; may be empty", &BenchRow::implementation},
      {"context", "1", "Positions of each request before the step; of prefill the length of the prompt", &BenchRow::context},
      {"batch", "1", "Rows", &BenchRow::batch},
      {"repeats", "1", "Times taken, after warming up", &BenchRow::repeats},
      {"median_us", "us", "Median of the repeats, of an even number the mean of the middle two", &BenchRow::median_us},
      {"minimum_us", "us", "Least", &BenchRow::minimum_us},
      {"maximum_us", "us", "Most", &BenchRow::maximum_us},
      {"bytes", "byte", "Device memory that must be moved at least; 0: not counted", &BenchRow::bytes},
      {"flops", "1", "Arithmetic that must be done; 0: not counted", &BenchRow::flops},
      {"floor_us", "us", "What these bytes or this arithmetic need at the ceilings of the run, the longer of the two", &BenchRow::floor_us},
      {"ratio_to_floor", "1", "Median over floor", &BenchRow::ratio_to_floor},
  };
  return list;
}

template <>
std::span<const Column<BenchSample>> columns() {
  static constexpr Column<BenchSample> list[] = {
      {"row", "1", "Index of the row", &BenchSample::row},
      {"repetition", "1", "Repetition, from 0", &BenchSample::repetition},
      {"us", "us", "Time", &BenchSample::us},
  };
  return list;
}

template <>
std::span<const Column<BenchMemory>> columns() {
  static constexpr Column<BenchMemory> list[] = {
      {"row", "1", "Index of the row", &BenchMemory::row},
      {"category", "", "Memory category", &BenchMemory::category},
      {"phase", "", "steady: in use after the row; peak: most since its setting was set up", &BenchMemory::phase},
      {"bytes", "byte", "Bytes of the device allocator", &BenchMemory::bytes},
  };
  return list;
}

template <>
std::span<const Column<EndToEndRow>> columns() {
  static constexpr Column<EndToEndRow> list[] = {
      {"run", "1", "Index of the run", &EndToEndRow::run},
      {"engine", "", "loopgauge, or a peer", &EndToEndRow::engine},
      {"setting", "", "Switches and policy", &EndToEndRow::setting},
      {"mode", "", "Execution mode; pd: prefill and decode on different devices", &EndToEndRow::mode},
      {"load", "", "How requests arrive", &EndToEndRow::load},
      {"device_count", "1", "Devices", &EndToEndRow::device_count},
      {"prompt_tokens", "1", "Prompt of a request; 0: they differ", &EndToEndRow::prompt_tokens},
      {"new_tokens", "1", "Generated tokens of a request; 0: they differ", &EndToEndRow::new_tokens},
      {"requests", "1", "Requests that arrived", &EndToEndRow::requests},
      {"finished", "1", "Requests that came to their last token", &EndToEndRow::finished},
      {"failed", "1", "Requests that did not", &EndToEndRow::failed},
      {"ttft_ms_p50", "ms", "From arrival to first token: 50th percentile over requests, nearest rank", &EndToEndRow::ttft_ms_p50},
      {"ttft_ms_p90", "ms", "90th percentile of the same; of fewer than 10 none", &EndToEndRow::ttft_ms_p90},
      {"ttft_ms_p99", "ms", "99th percentile of the same; of fewer than 100 none", &EndToEndRow::ttft_ms_p99},
      {"tpot_ms_p50", "ms", "Time of a token after the first, mean of a request: 50th percentile over requests, nearest rank", &EndToEndRow::tpot_ms_p50},
      {"tpot_ms_p90", "ms", "90th percentile of the same; of fewer than 10 none", &EndToEndRow::tpot_ms_p90},
      {"tpot_ms_p99", "ms", "99th percentile of the same; of fewer than 100 none", &EndToEndRow::tpot_ms_p99},
      {"latency_ms_p50", "ms", "From arrival to last token: 50th percentile over requests, nearest rank", &EndToEndRow::latency_ms_p50},
      {"latency_ms_p90", "ms", "90th percentile of the same; of fewer than 10 none", &EndToEndRow::latency_ms_p90},
      {"latency_ms_p99", "ms", "99th percentile of the same; of fewer than 100 none", &EndToEndRow::latency_ms_p99},
      {"output_tokens_per_s", "s-1", "Generated tokens of finished requests over the duration", &EndToEndRow::output_tokens_per_s},
      {"requests_per_s", "s-1", "Finished requests over the duration", &EndToEndRow::requests_per_s},
      {"duration_s", "s", "From the first arrival to the last completion", &EndToEndRow::duration_s},
      {"transfer_share", "1", "Share of the duration in which handoffs were under way", &EndToEndRow::transfer_share},
      {"peak_bytes", "byte", "Most device memory in use, all devices together; 0: not measured", &EndToEndRow::peak_bytes},
      {"cancelled", "1", "Of the requests that failed, those whose client gave up", &EndToEndRow::cancelled},
      {"refused", "1", "Of the requests that failed, those without room even alone", &EndToEndRow::refused},
      {"failed_submissions", "1", "Submissions that failed, as planned or for want of memory; their rows ran again", &EndToEndRow::failed_submissions},
      {"most_live", "1", "Requests that held memory at once, at most", &EndToEndRow::most_live},
      {"token_gap_ms_p50", "ms", "Between two consecutive tokens of a request: 50th percentile over all of them, nearest rank", &EndToEndRow::token_gap_ms_p50},
      {"token_gap_ms_p90", "ms", "90th percentile of the same; of fewer than 10 none", &EndToEndRow::token_gap_ms_p90},
      {"token_gap_ms_p99", "ms", "99th percentile of the same; of fewer than 100 none", &EndToEndRow::token_gap_ms_p99},
      {"predicted_live", "1", "Requests that fit the memory at once by the memory model; 0: not asked", &EndToEndRow::predicted_live},
      {"tokens_per_s_of_all", "s-1", "Generated tokens while every request was past its prompt and none had ended", &EndToEndRow::tokens_per_s_of_all},
      {"kv_bytes_of_a_prompt", "byte", "K/V of a prompt with what is needed to find it, when all prompts were complete; 0: not measured",
       &EndToEndRow::kv_bytes_of_a_prompt},
      {"bf16_bytes_of_a_prompt", "byte", "K/V of the same prompt in four BF16 planes", &EndToEndRow::bf16_bytes_of_a_prompt},
      {"note", "", "Why requests failed, what the row leaves out", &EndToEndRow::note},
  };
  return list;
}

template <>
std::span<const Column<LeftOut>> columns() {
  static constexpr Column<LeftOut> list[] = {
      {"run", "1", "Index of the run", &LeftOut::run},
      {"what", "", "Row or group that did not run", &LeftOut::what},
      {"reason", "", "Why", &LeftOut::reason},
  };
  return list;
}

}  // namespace loopgauge::harness
