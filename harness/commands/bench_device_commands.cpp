// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/bench_device_commands.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "harness/bench/bench_output.hpp"
#include "harness/bench/device_bench.hpp"
#include "harness/bench/peers_bench.hpp"
#include "harness/case.hpp"
#include "harness/commands/option_checks.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr int kMostRequests = 64;
constexpr std::array<std::string_view, 5> kOperationGroups{"linear", "attention", "projections", "encode", "prefill_attention"};

struct DeviceBenchOptions {
  optimized::StepBenchOptions device;
  std::vector<int> contexts{2048, 8192, 32768};
  std::vector<int> batches{1, 8};
  BenchOutputOptions output;
};

void measure(DeviceBenchOptions& options, int& exit_code) {
  require_device();
  for (const int context : options.contexts) {
    for (const int batch : options.batches) options.device.steps.push_back({context, batch});
  }
  BenchOutput output(options.output);
  run_device_bench(options.device, output);
  output.finish();
  exit_code = 0;
}

// The whole windows that prompts and prefill batches are made of.
CLI::Validator whole_windows() {
  return CLI::Validator([](const std::string& text) { return std::stoi(text) % 256 == 0 ? std::string() : text + " is not a whole number of windows of 256"; },
                        "MULTIPLE of 256");
}

void add_repeats_option(CLI::App& command, int& repeats) {
  command.add_option("--repeats", repeats, "Times that are taken of each, after warming up")->check(CLI::Range(1, 1000))->capture_default_str();
}

// What decode steps and their operations are measured at, and where the rows go.
void add_decode_options(CLI::App& command, DeviceBenchOptions& options) {
  add_switches_option(command, options.device.switches);
  command.add_option("--contexts", options.contexts, "Positions of each request before the step")
      ->delimiter(',')
      ->check(CLI::Range(1, optimized::ouro_1_4b_shape().max_positions - kGroupSize))
      ->capture_default_str();
  command.add_option("--batches", options.batches, "Requests of a step")->delimiter(',')->check(CLI::Range(1, kMostRequests))->capture_default_str();
  add_repeats_option(command, options.device.repeats);
  add_bench_output_options(command, options.output);
}

void add_windows_option(CLI::App& command, const char* name, std::vector<int>& positions, const std::string& what) {
  command.add_option(name, positions, what + ", whole windows of 256 positions")
      ->delimiter(',')
      ->check(CLI::Range(256, optimized::ouro_1_4b_shape().max_positions))
      ->check(whole_windows())
      ->capture_default_str();
}

void add_prompts_option(CLI::App& command, std::vector<int>& prompts) { add_windows_option(command, "--prompts", prompts, "Lengths of prompts"); }

// CONTEXTxBATCH, such as 8192x1.
optimized::StepShape parse_step_shape(const std::string& text) {
  optimized::StepShape shape;
  const char* const end = text.data() + text.size();
  const auto context = std::from_chars(text.data(), end, shape.context);
  if (context.ec == std::errc() && context.ptr != end && *context.ptr == 'x') {
    const auto batch = std::from_chars(context.ptr + 1, end, shape.batch);
    const bool in_range =
        shape.context >= 1 && shape.context <= optimized::ouro_1_4b_shape().max_positions - kGroupSize && shape.batch >= 1 && shape.batch <= kMostRequests;
    if (batch.ec == std::errc() && batch.ptr == end && in_range) return shape;
  }
  throw ConfigError("--shapes '" + text + "' is not CONTEXTxBATCH such as 8192x1, with a batch of at most " + std::to_string(kMostRequests));
}

}  // namespace

void require_device() {
  const optimized::DeviceStatus status = optimized::device_status();
  if (!status.available) throw UnsupportedError("this bench measures a CUDA device, and there is none to use: " + status.description);
}

void add_switches_option(CLI::App& command, std::vector<std::string>& switches, const std::string& description) {
  const CLI::Validator readable(
      [](const std::string& text) {
        try {
          AlgorithmConfig config;
          apply_switches(config, text);
        } catch (const Error& error) {
          return std::string(error.what());
        }
        return std::string();
      },
      "tXsXqX");
  command.add_option("--switches", switches, description)->delimiter(',')->check(readable)->capture_default_str();
}

void add_bench_ops_command(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand("ops", "Single operations of the device at the shape of Ouro-1.4B, and what a decode step is made of");
  const auto options = std::make_shared<DeviceBenchOptions>();
  for (const std::string_view group : kOperationGroups) options->device.what.emplace_back(group);
  command
      ->add_option("--what", options->device.what,
                   "Groups of rows: linear (products), attention (decode attention, selection, correction), projections (a step without attention; the head), "
                   "encode, prefill_attention")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>(kOperationGroups.begin(), kOperationGroups.end())))
      ->capture_default_str();
  add_decode_options(*command, *options);
  command->footer(
      "Examples:\n"
      "  loopgauge bench ops --what attention,projections,encode --contexts 8192 --batches 1 --report bench.h5\n"
      "  loopgauge bench step --contexts 8192 --batches 1 --report bench.h5 --append\n"
      "  loopgauge report bench.h5                       with both in one file it shows where a step's time goes\n"
      "Needs a CUDA device (exit code 4 without one).");
  command->callback([options, &exit_code] { measure(*options, exit_code); });
}

void add_bench_step_command(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand("step", "Whole decode steps of the device at the shape of Ouro-1.4B: each feature alone and together");
  const auto options = std::make_shared<DeviceBenchOptions>();
  options->device.what = {"step"};
  add_decode_options(*command, *options);
  command->footer(
      "Examples:\n"
      "  loopgauge bench step --report step.h5\n"
      "  loopgauge bench step --contexts 2048,8192 --batches 1,8 --switches t0s0q0,t1s1q1 --output csv\n"
      "A step is all four loops and the head for a batch of rows that each have --contexts positions, as one captured graph and launched kernel by kernel.\n"
      "Needs a CUDA device (exit code 4 without one).");
  command->callback([options, &exit_code] { measure(*options, exit_code); });
}

void add_bench_prefill_command(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand("prefill", "Whole prompts of the device at the shape of Ouro-1.4B, their attention, products and encoding alone");
  const auto options = std::make_shared<DeviceBenchOptions>();
  options->device.what = {"prefill"};
  options->contexts.clear();
  add_switches_option(*command, options->device.prefill_switches);
  add_prompts_option(*command, options->device.prompts);
  add_windows_option(*command, "--prefill-rows", options->device.prefill_rows, "Rows of a prefill batch");
  add_bench_output_options(*command, options->output);
  command->footer(
      "Examples:\n"
      "  loopgauge bench prefill --report prefill.h5\n"
      "  loopgauge bench prefill --prompts 8192 --prefill-rows 4096\n"
      "Late loops of t1 run on evenly spread rows; choosing rows is not part of it. With q1 the prompt is encoded at its end.\n"
      "Needs a CUDA device (exit code 4 without one).");
  command->callback([options, &exit_code] { measure(*options, exit_code); });
}

void add_bench_peers_command(CLI::App& bench, int& exit_code) {
  struct Options {
    PeersOptions peers;
    std::vector<std::string> what{"step", "prefill"};
    std::vector<std::string> shapes{"2048x1", "8192x1", "32768x1", "2048x8", "8192x8"};
    std::vector<std::string> switches{"t0s0q0", "t0s1q0", "t1s1q1"};
    BenchOutputOptions output;
  };
  CLI::App* command = bench.add_subcommand("peers", "The same steps and prompts in PyTorch on the same GPU, in the same run, beside the own ones");
  const auto options = std::make_shared<Options>();
  command->add_option("--python", options->peers.python, "Python that has PyTorch")->type_name("PROGRAM")->capture_default_str();
  command->add_option("--what", options->what, "step, prefill")->delimiter(',')->check(CLI::IsMember({"step", "prefill"}))->capture_default_str();
  command->add_option("--shapes", options->shapes, "Decode steps as CONTEXTxBATCH")->delimiter(',')->type_name("CONTEXTxBATCH")->capture_default_str();
  add_prompts_option(*command, options->peers.prompts);
  add_switches_option(*command, options->switches, "Switch settings of the own decode steps; prompts are measured with t0s0q0 and t1s0q0");
  add_repeats_option(*command, options->peers.repeats);
  command->add_option("--compile-seconds", options->peers.compile_seconds, "Time for torch.compile in all; 0: PyTorch runs eagerly, in its CUDA graph")
      ->check(real_number(0.0, 86400.0))
      ->capture_default_str();
  command->add_option("--tune-seconds", options->peers.tune_seconds, "Time for torch.compile to tune own kernels for batch 1, in all; 0: none")
      ->check(real_number(0.0, 86400.0))
      ->capture_default_str();
  command->add_option("--script-seconds", options->peers.seconds, "Time for all of PyTorch")->check(real_number(0.01, 86400.0))->capture_default_str();
  add_bench_output_options(*command, options->output);
  command->footer(
      "Examples:\n"
      "  loopgauge bench peers --report peers.h5\n"
      "  loopgauge bench peers --shapes 8192x1,8192x8 --prompts 8192 --python /opt/torch/bin/python3 --report peers.h5\n"
      "  loopgauge report peers.h5                       ends with a table against the peer\n"
      "harness/bench/peers.py is what runs: dense and top-k sparse, static K/V cache, whole step as a CUDA graph, torch.compile, the fastest attention "
      "backend.\n"
      "Exit code 4 without a CUDA device or PyTorch, 5 when the script does not come to its end; the rows until then are kept.");
  command->callback([options, &exit_code] {
    options->peers.steps.clear();
    for (const std::string& text : options->shapes) options->peers.steps.push_back(parse_step_shape(text));
    const auto asked = [&](const char* what) { return std::find(options->what.begin(), options->what.end(), what) != options->what.end(); };
    if (!asked("step")) options->peers.steps.clear();
    if (!asked("prefill")) options->peers.prompts.clear();
    const std::string peer = find_peer(options->peers);
    BenchOutput output(options->output);
    output.peer(peer);
    optimized::StepBenchOptions own;
    own.what = options->what;
    own.steps = options->peers.steps;
    own.switches = options->switches;
    own.prompts = options->peers.prompts;
    own.prefill_rows = {optimized::CudaExecutorOptions{}.prefill_step_rows};
    own.repeats = options->peers.repeats;
    run_device_bench(own, output);
    const std::string broken_off = run_peers(options->peers, output);
    if (!broken_off.empty()) output.left_out("pytorch: what comes after its last row", broken_off);
    output.finish(broken_off.empty());
    exit_code = broken_off.empty() ? 0 : kIncompleteExit;
  });
}

}  // namespace loopgauge::harness
