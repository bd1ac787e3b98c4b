// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/bench_device_commands.hpp"

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "harness/bench/bench_output.hpp"
#include "harness/bench/device_bench.hpp"
#include "harness/case.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::array<std::string_view, 5> kOperationGroups{"linear", "attention", "projections", "encode", "prefill_attention"};

struct DeviceBenchOptions {
  optimized::StepBenchOptions device;
  BenchOutputOptions output;
};

void measure(const DeviceBenchOptions& options, int& exit_code) {
  require_device();
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

}  // namespace

void require_device() {
  const optimized::DeviceStatus status = optimized::device_status();
  if (!status.available) throw UnsupportedError("this bench measures a CUDA device, and there is none to use: " + status.description);
}

void add_contexts_option(CLI::App& command, optimized::StepBenchOptions& options) {
  command.add_option("--contexts", options.contexts, "Positions of each request before the step")
      ->delimiter(',')
      ->check(CLI::Range(1, optimized::ouro_1_4b_shape().max_positions - kGroupSize))
      ->capture_default_str();
}

void add_batches_option(CLI::App& command, optimized::StepBenchOptions& options) {
  command.add_option("--batches", options.batches, "Requests of a step")->delimiter(',')->check(CLI::Range(1, 64))->capture_default_str();
}

void add_repeats_option(CLI::App& command, optimized::StepBenchOptions& options) {
  command.add_option("--repeats", options.repeats, "Times that are taken of each, after warming up")->check(CLI::Range(1, 1000))->capture_default_str();
}

void add_prompts_option(CLI::App& command, optimized::StepBenchOptions& options) {
  command.add_option("--prompts", options.prompts, "Lengths of prompts, whole windows of 256 positions")
      ->delimiter(',')
      ->check(CLI::Range(256, optimized::ouro_1_4b_shape().max_positions))
      ->check(whole_windows())
      ->capture_default_str();
}

void add_prefill_rows_option(CLI::App& command, optimized::StepBenchOptions& options) {
  command.add_option("--prefill-rows", options.prefill_rows, "Rows of a prefill batch, whole windows of 256 positions")
      ->delimiter(',')
      ->check(CLI::Range(256, optimized::ouro_1_4b_shape().max_positions))
      ->check(whole_windows())
      ->capture_default_str();
}

void add_switches_option(CLI::App& command, std::vector<std::string>& switches) {
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
  command.add_option("--switches", switches, "Switch settings to measure")->delimiter(',')->check(readable)->capture_default_str();
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
  add_switches_option(*command, options->device.switches);
  add_contexts_option(*command, options->device);
  add_batches_option(*command, options->device);
  add_repeats_option(*command, options->device);
  add_bench_output_options(*command, options->output);
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
  add_switches_option(*command, options->device.switches);
  add_contexts_option(*command, options->device);
  add_batches_option(*command, options->device);
  add_repeats_option(*command, options->device);
  add_bench_output_options(*command, options->output);
  command->footer(
      "Examples:\n"
      "  loopgauge bench step --report step.h5\n"
      "  loopgauge bench step --contexts 2048,8192 --batches 1,8 --switches t0s0q0,t1s1q1 --output csv\n"
      "A step is all four loops and the head for a batch of rows that each have --contexts positions, as one captured graph and launched kernel by kernel.\n"
      "Needs a CUDA device (exit code 4 without one).");
  command->callback([options, &exit_code] { measure(*options, exit_code); });
}

void add_bench_prefill_command(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand("prefill", "Whole prompts of the device at the shape of Ouro-1.4B, their attention and their products alone");
  const auto options = std::make_shared<DeviceBenchOptions>();
  options->device.what = {"prefill"};
  add_switches_option(*command, options->device.prefill_switches);
  add_prompts_option(*command, options->device);
  add_prefill_rows_option(*command, options->device);
  add_bench_output_options(*command, options->output);
  command->footer(
      "Examples:\n"
      "  loopgauge bench prefill --report prefill.h5\n"
      "  loopgauge bench prefill --prompts 8192 --prefill-rows 2048\n"
      "Late loops of t1 run on evenly spread rows; choosing rows is not part of it.\n"
      "Needs a CUDA device (exit code 4 without one).");
  command->callback([options, &exit_code] { measure(*options, exit_code); });
}

}  // namespace loopgauge::harness
