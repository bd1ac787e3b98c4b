// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/bench_end_to_end_command.hpp"

#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "harness/bench/end_to_end_bench.hpp"
#include "harness/commands/bench_device_commands.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/io/data_paths.hpp"
#include "harness/provenance.hpp"
#include "models/error.hpp"
#include "optimized/bench/step_bench.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::uint32_t kWeightSeed = 1;

constexpr int kOtherTokensExit = 1;

struct CommandOptions {
  EndToEndOptions bench;
  BenchOutputOptions output;
  std::string executor = "optimized";
  std::string checkpoint;             // empty: random weights at the shape of Ouro-1.4B, or the shipped model
  std::string policy = "rolling";
  std::int64_t requests = 0, new_tokens = 0;
  CLI::Option* in_flight = nullptr;
  std::vector<CLI::Option*> not_of_fit;  // how a server is run, which the load fit decides itself
  double requests_per_s = -1;
};

int measure(CommandOptions& options) {
  EndToEndOptions& bench = options.bench;
  bench.policy = parse_encoding_policy(options.policy);
  if (options.requests > 0) bench.requests = static_cast<int>(options.requests);
  if (options.new_tokens > 0) bench.new_tokens = static_cast<int>(options.new_tokens);
  if (options.requests_per_s >= 0) bench.requests_per_s = options.requests_per_s;

  if (bench.loads == std::vector<std::string>{"fit"}) {
    for (const CLI::Option* option : options.not_of_fit) {
      if (option->count() > 0) throw ConfigError(option->get_name() + " has no effect on --load fit, which gives every prompt its room first and then decodes with all");
    }
  }
  if (options.executor == "reference") {
    // It computes when it is told to: a result that is read late would only make times wrong, and there is nothing to capture.
    if (options.in_flight->count() > 0 && bench.submissions_in_flight > 1)
      throw ConfigError("--in-flight " + std::to_string(bench.submissions_in_flight) + " needs --executor optimized: the reference has nothing in flight");
    if (bench.graph_replay) throw ConfigError("--graph needs --executor optimized: the reference captures no steps");
    bench.submissions_in_flight = 1;
    options.output.device = "none, the reference executor on " + host_info().cpu;
  }
  if (options.executor == "optimized") require_device();
  Checkpoint checkpoint;
  ServingTarget target;
  if (options.executor == "optimized" && options.checkpoint.empty()) {
    target = random_model_on_devices(optimized::ouro_1_4b_shape(), kWeightSeed);
  } else {
    const std::filesystem::path folder = options.checkpoint.empty() ? default_checkpoint() : std::filesystem::path(options.checkpoint);
    checkpoint = load_checkpoint(folder);
    // Folders of one name may hold other weights.
    options.output.shape = (folder.filename().empty() ? folder.parent_path() : folder).filename().string() + ", model " + checkpoint.sha256.substr(0, 12);
    target = checkpoint_target(options.executor, checkpoint);
  }
  BenchOutput output(options.output);
  const EndToEndVerdict verdict = run_end_to_end_bench(target, bench, output);
  output.finish();
  if (!verdict.tokens_agree) return kOtherTokensExit;
  if (!verdict.compared) std::cerr << "loopgauge: --check compared nothing: no request finished\n";
  return output.anything_left_out() || !verdict.compared ? kIncompleteExit : 0;
}

}  // namespace

void add_bench_end_to_end_command(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand("e2e", "Requests served online under fixed arrivals: time to first token, time per token, throughput, tails, failures");
  const auto options = std::make_shared<CommandOptions>();
  EndToEndOptions& e2e = options->bench;
  command
      ->add_option("--load", e2e.loads,
                   "low (a few requests at once), high (more than a server keeps up with), failures (some are given up, one does not fit, submissions fail), fit (as "
                   "many prompts of 8192 as a device holds at once), pd (prompts on one device and decoding on another, beside half of the load on each)")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kLoadNames), std::end(kLoadNames))))
      ->capture_default_str();
  add_switches_option(*command, e2e.switches);
  command->add_option("--policy", options->policy, "Encoding policy of the settings with q1: fixed_prompt, rolling, streaming")->capture_default_str();
  command->add_option("--requests", options->requests, "Requests, in place of what the load has")->check(CLI::Range(1, 100000));
  command->add_option("--rate", options->requests_per_s, "Requests per second, with exponential gaps; 0: all at once")->check(real_number(0.0, 1e6));
  command->add_option("--prompts", e2e.prompt_tokens, "Prompt lengths to draw from")->delimiter(',')->check(CLI::Range(1, optimized::ouro_1_4b_shape().max_positions / 4));
  command->add_option("--new-tokens", options->new_tokens, "Tokens that each request generates")->check(CLI::Range(1, 4096));
  command->add_option("--seed", e2e.seed, "Of arrivals and prompts: the same for every setting")->check(whole_number())->capture_default_str();
  command->add_option("--executor", options->executor, "reference, optimized")->check(CLI::IsMember({"reference", "optimized"}))->capture_default_str();
  command->add_option("--checkpoint", options->checkpoint,
                      "Model folder (default: random weights at the shape of Ouro-1.4B, made on the device; with the reference the shipped ouro-tiny)")
      ->type_name("DIR");
  command->add_flag("--mixed", e2e.scheduler.mixed, "Decode rows and prompt windows in the same submissions, instead of rounds of either kind in turn");
  CLI::Option* const prefill_tokens =
      command->add_option("--prefill-tokens", e2e.scheduler.prefill_tokens, "Prompt tokens of a round, in whole windows")->check(CLI::Range(1, 65536))->capture_default_str();
  CLI::Option* const prefill_requests =
      command->add_option("--prefill-requests", e2e.scheduler.prefill_requests, "Prompts that share a round")->check(CLI::Range(1, 64))->capture_default_str();
  command->add_option("--decode-rows", e2e.scheduler.most_decode_rows, "Decode rows of a round at most")->check(CLI::Range(1, 64))->capture_default_str();
  CLI::Option* const live =
      command->add_option("--live", e2e.scheduler.most_live, "Requests that hold memory at once, at most")->check(CLI::Range(1, 256))->capture_default_str();
  options->in_flight = command->add_option("--in-flight", e2e.submissions_in_flight,
                                           "Submissions in flight; 1: every result is read before the next submission, as always with the reference")
                           ->check(CLI::Range(1, 16))
                           ->capture_default_str();
  options->not_of_fit = {prefill_tokens, prefill_requests, live, options->in_flight};
  command->add_flag("--graph", e2e.graph_replay, "Capture decode steps and replay them");
  command->add_option("--reserve-bytes", e2e.reserve_bytes, "Of a device's free memory, kept back from requests")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  command->add_flag("--check", e2e.check, "Run every finished request again alone: it has to generate the same tokens (exit code 1 otherwise)");
  add_bench_output_options(*command, options->output);
  command->footer(
      "Examples:\n"
      "  loopgauge bench e2e --report e2e.h5\n"
      "  loopgauge bench e2e --load fit --switches t0s0q0,t1s1q1\n"
      "  loopgauge bench e2e --load pd --switches t0s0q0,t1s1q1        on two devices\n"
      "  loopgauge bench e2e --executor reference --check              the shipped model on the CPU, shorter loads\n"
      "Times are 50th, 90th and 99th percentiles over finished requests (nearest rank: the smallest value that this share does not exceed); of fewer than 10\n"
      "requests there is no 90th, of fewer than 100 no 99th (--requests gives more).\n"
      "Requests arrive by the wall clock as a seed says, whatever the server does; what runs next is decided from what is there. A request begins when the memory that\n"
      "it will ever need is free. Needs a CUDA device unless --executor reference (exit code 4 without one). Exit codes: 1 a request has other tokens than alone; 5 a load was\n"
      "left out, with the reason, or --check had nothing to compare.");
  command->callback([options, &exit_code] { exit_code = measure(*options); });
}

}  // namespace loopgauge::harness
