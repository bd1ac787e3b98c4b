// SPDX-License-Identifier: Apache-2.0
// What the device benches found, as plain data: one file may hold several runs of `loopgauge bench` of one build on one device.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace loopgauge::harness {

inline constexpr double kNotMeasured = std::numeric_limits<double>::quiet_NaN();

// What all runs of a file share.
struct BenchMeta {
  std::string tool_version{};
  std::string source_revision{};  // "-dirty" for uncommitted changes
  std::string compiler{};         // and build type
  std::string device{};           // name, compute capability, CUDA of driver and runtime; of the reference executor the host's processor
  std::string cpu{};
  std::string shape{};            // "ouro-1.4b"
  std::int64_t layers = 0;        // of the shape: rows of single operations are of one
};

// One call of `loopgauge bench ops|step|prefill|e2e|peers`. Ceilings are measured in the run itself.
struct BenchRun {
  std::string command_line{};
  std::string started{}, finished{};  // UTC, ISO 8601; finished: the last write
  bool complete = false;          // the run came to its end
  double read_gb_per_s = kNotMeasured;
  double bf16_tflop_per_s = kNotMeasured;
  std::string peer{};               // what the rows of other engines ran with: "torch 2.11.0+cu130, ..."; empty: no peer
};

inline constexpr const char* kOwnEngine = "loopgauge";
inline constexpr const char* kTorchEngine = "pytorch";

// One timed thing: repeated, between device events, nothing else on the stream.
struct BenchRow {
  std::int64_t run = 0;           // index of the run
  std::string engine = kOwnEngine;
  std::string what{};               // "decode step", "linear.qkv", "attention_decode.loop1"
  std::string setting{};            // switches (t0s0q0); of a peer what it computes; empty where none applies
  std::string implementation{};     // what ran: "captured graph", "split_k", "cuDNN"; may be empty
  std::int64_t context = 0;       // positions of each request before the step; of prefill the prompt's length
  std::int64_t batch = 0;         // rows
  std::int64_t repeats = 0;
  double median_us = kNotMeasured, minimum_us = kNotMeasured, maximum_us = kNotMeasured;
  double bytes = 0;               // device-memory bytes that must move at least; 0: not counted
  double flops = 0;               // arithmetic that must be done; 0: not counted
  double floor_us = kNotMeasured; // the longer of bytes and flops at the ceilings of the run
  double ratio_to_floor = kNotMeasured;  // median over floor
};

// Single times of a row, in the order in which they were taken.
struct BenchSample {
  std::int64_t row = 0;           // index into rows
  std::int64_t repetition = 0;
  double us = 0;
};

// Device memory while a row was measured.
struct BenchMemory {
  std::int64_t row = 0;           // index into rows
  std::string category{};           // models/memory_category.hpp
  std::string phase{};              // "steady": in use after it; "peak": most since the setting was set up
  std::int64_t bytes = 0;
};

// Requests that arrive at fixed times, served from their arrival to their last token.
struct EndToEndRow {
  std::int64_t run = 0;
  std::string engine = kOwnEngine;
  std::string setting{};            // switches, and policy where it matters
  std::string mode{};               // execution mode; with pd: prefill and decode on different devices
  std::string load{};               // "closed, 8 at once", "open, 4 requests/s"
  std::int64_t device_count = 1;
  std::int64_t prompt_tokens = 0, new_tokens = 0;        // of one request; 0: they differ
  std::int64_t requests = 0, finished = 0, failed = 0;
  double ttft_ms_p50 = kNotMeasured, ttft_ms_p90 = kNotMeasured, ttft_ms_p99 = kNotMeasured;           // arrival to first token
  double tpot_ms_p50 = kNotMeasured, tpot_ms_p90 = kNotMeasured, tpot_ms_p99 = kNotMeasured;           // a token after the first, mean of a request
  double latency_ms_p50 = kNotMeasured, latency_ms_p90 = kNotMeasured, latency_ms_p99 = kNotMeasured;  // arrival to last token
  double output_tokens_per_s = kNotMeasured, requests_per_s = kNotMeasured;  // finished requests over the duration
  double duration_s = kNotMeasured;  // first arrival to last completion
  double transfer_share = kNotMeasured;         // of the duration: handoffs are under way
  std::int64_t peak_bytes = 0;    // device memory, all devices together; 0: not measured
  std::int64_t cancelled = 0, refused = 0;  // of the failed ones: given up by their client; without room even alone
  std::int64_t failed_submissions = 0;      // planned failures and refused allocations, whose rows ran again
  std::int64_t most_live = 0;     // requests that held memory at once
  double token_gap_ms_p50 = kNotMeasured, token_gap_ms_p90 = kNotMeasured, token_gap_ms_p99 = kNotMeasured;  // between two tokens of a request
  std::int64_t predicted_live = 0;          // requests that fit at once, by the memory model; 0: not asked
  double tokens_per_s_of_all = kNotMeasured;  // while every request was past its prompt and none had ended
  std::int64_t kv_bytes_of_a_prompt = 0;    // measured when all prompts were complete, tables included; 0: not measured
  std::int64_t bf16_bytes_of_a_prompt = 0;  // the same in four BF16 planes
  std::string note{};               // why requests failed, what the row leaves out
};

struct LeftOut {
  std::int64_t run = 0;
  std::string what{};               // the row or the group that did not run
  std::string reason{};
};

struct BenchReport {
  BenchMeta meta;
  std::vector<BenchRun> runs;
  std::vector<BenchRow> rows;
  std::vector<BenchSample> samples;
  std::vector<BenchMemory> memory;
  std::vector<EndToEndRow> end_to_end;
  std::vector<LeftOut> left_out;
};

// Floor and ratio of a row from its bytes and flops and the ceilings of its run; left as they are where neither is counted or measured.
void set_floor(BenchRow& row, const BenchRun& run);

}  // namespace loopgauge::harness
