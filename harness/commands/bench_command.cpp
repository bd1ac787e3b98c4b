// SPDX-License-Identifier: Apache-2.0
// `loopgauge bench`: speed of an executor for each switch setting; its subcommands measure a device.
#include <array>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/bench/reference_bench.hpp"
#include "harness/case.hpp"
#include "harness/commands/bench_device_commands.hpp"
#include "harness/commands/bench_end_to_end_command.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/executor_by_name.hpp"
#include "harness/progress.hpp"
#include "harness/provenance.hpp"
#include "harness/report/terminal_text.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::array<std::string_view, 8> kAllSwitches{"t0s0q0", "t0s0q1", "t0s1q0", "t0s1q1", "t1s0q0", "t1s0q1", "t1s1q0", "t1s1q1"};

constexpr std::uint64_t kMostTokens = 1 << 24;  // the model has fewer

struct BenchOptions {
  explicit BenchOptions(CLI::App& command) : settings(command, {SettingGroup::execution}) {}
  SettingOptions settings;
  std::vector<std::string> switches;
  std::string policy = "rolling";
  ReferenceBenchOptions bench;
  std::string output = "console";
};

struct BenchResult {
  std::string executor;
  std::string model_sha256;
  std::string profile;
  std::vector<ReferenceBenchRow> rows;
};

std::vector<AlgorithmConfig> requested_configs(const BenchOptions& options) {
  std::vector<std::string> switches = options.switches;
  if (switches.empty()) switches.assign(kAllSwitches.begin(), kAllSwitches.end());
  std::vector<AlgorithmConfig> configs;
  for (const std::string& text : switches) {
    AlgorithmConfig config;
    apply_switches(config, text);
    config.kv_residual_quantization.policy = parse_encoding_policy(options.policy);
    configs.push_back(normalized(config));
  }
  return configs;
}

BenchResult measure(const BenchOptions& options, const Settings& settings) {
  const std::vector<AlgorithmConfig> configs = requested_configs(options);
  const Checkpoint checkpoint = load_checkpoint(settings.checkpoint);
  const std::unique_ptr<Executor> executor = make_executor(settings.executor, checkpoint);
  BenchResult result{settings.executor, checkpoint.sha256, std::string(to_string(settings.profile)), {}};
  Progress progress("bench", static_cast<std::int64_t>(configs.size()));
  for (const AlgorithmConfig& config : configs) {
    progress.update(static_cast<std::int64_t>(result.rows.size()), settings_text(config));
    result.rows.push_back(measure_reference(*executor, config, checkpoint.config, settings.profile, options.bench));
  }
  return result;
}

void print_console(const BenchOptions& options, const BenchResult& result) {
  const HostInfo host = host_info();
  const ReferenceBenchOptions& bench = options.bench;
  std::cout << formatted("bench of executor %s, profile %s, model sha256 %s\n", result.executor.c_str(), result.profile.c_str(), result.model_sha256.c_str());
  std::cout << formatted("host %s, %d logical CPUs, %d threads\n", host.cpu.c_str(), host.logical_cpus, host.threads);
  std::cout << formatted("prompt %d random tokens (seed %llu), %d decode steps, %d runs after a warm-up; tokens/s as median [minimum, maximum]\n\n",
              bench.context, static_cast<unsigned long long>(bench.seed), bench.new_tokens, bench.repeat);
  std::cout << formatted("%-40s %30s %30s\n", "settings", "prefill tokens/s", "decode tokens/s");
  for (const ReferenceBenchRow& row : result.rows) {
    const auto& p = row.prefill_tokens_per_second;
    const auto& d = row.decode_tokens_per_second;
    std::cout << formatted("%-40s %10.1f [%7.1f, %7.1f] %10.1f [%7.1f, %7.1f]\n", row.settings.c_str(), p.median, p.minimum, p.maximum, d.median,
                           d.minimum, d.maximum);
  }
  std::cout.flush();
}

nlohmann::ordered_json spread_json(const Spread& value) {
  return {{"median", value.median}, {"minimum", value.minimum}, {"maximum", value.maximum}};
}

void print_json(const BenchOptions& options, const BenchResult& result) {
  const HostInfo host = host_info();
  nlohmann::ordered_json json{{"executor", result.executor},
                              {"profile", result.profile},
                              {"model_sha256", result.model_sha256},
                              {"tool_version", build_info().version},
                              {"revision", build_info().revision},
                              {"compiler", build_info().compiler},
                              {"build_type", build_info().build_type},
                              {"cpu", host.cpu},
                              {"logical_cpus", host.logical_cpus},
                              {"threads", host.threads},
                              {"context", options.bench.context},
                              {"new_tokens", options.bench.new_tokens},
                              {"repeat", options.bench.repeat},
                              {"seed", options.bench.seed},
                              {"rows", nlohmann::ordered_json::array()}};
  for (const ReferenceBenchRow& row : result.rows) {
    json["rows"].push_back({{"settings", row.settings},
                            {"prefill_tokens_per_second", spread_json(row.prefill_tokens_per_second)},
                            {"decode_tokens_per_second", spread_json(row.decode_tokens_per_second)}});
  }
  std::cout << json.dump(2) << "\n";
}

void print_csv(const BenchOptions& options, const BenchResult& result) {
  const HostInfo host = host_info();
  std::cout << "executor,profile,settings,context,new_tokens,repeat,seed,threads,prefill_tokens_per_second_median,prefill_tokens_per_"
               "second_minimum,"
               "prefill_tokens_per_second_maximum,decode_tokens_per_second_median,decode_tokens_per_second_minimum,decode_tokens_per_"
               "second_maximum\n";
  for (const ReferenceBenchRow& row : result.rows) {
    const auto& p = row.prefill_tokens_per_second;
    const auto& d = row.decode_tokens_per_second;
    std::cout << result.executor << "," << result.profile << "," << row.settings << "," << options.bench.context << "," << options.bench.new_tokens
              << "," << options.bench.repeat << "," << options.bench.seed << "," << host.threads << "," << p.median << "," << p.minimum
              << "," << p.maximum << "," << d.median << "," << d.minimum << "," << d.maximum << "\n";
  }
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure speed: without a subcommand prefill and decode of an executor for every switch setting; a device in depth with the subcommands");
  const auto options = std::make_shared<BenchOptions>(*command);
  command->add_option("--switches", options->switches, "Switch settings to measure (default: all eight)")->type_name("tXsXqX");
  command->add_option("--policy", options->policy, "Encoding policy of the settings with q1")->type_name("POLICY")->capture_default_str();
  command->add_option("--context", options->bench.context, "Prompt tokens")->check(whole_number(1, kMostTokens))->type_name("N")->capture_default_str();
  command->add_option("--new-tokens", options->bench.new_tokens, "Decode steps")->check(whole_number(1, kMostTokens))->type_name("N")->capture_default_str();
  command->add_option("--repeat", options->bench.repeat, "Measured runs, after one that is not measured")->check(whole_number(1, 1000))->type_name("N")->capture_default_str();
  command->add_option("--seed", options->bench.seed, "Seed of the random prompt")->check(whole_number())->type_name("N")->capture_default_str();
  command->add_option("--output", options->output, "console, json, csv")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge bench --executor reference\n"
      "  loopgauge bench --switches t0s0q0 t1s1q1 --context 512 --repeat 5\n"
      "  loopgauge bench --output csv > bench.csv\n"
      "  loopgauge bench step --contexts 2048,8192 --batches 1,8 --report step.h5     the device at the shape of Ouro-1.4B (ops, step, prefill, peers)\n"
      "  loopgauge bench e2e --load low,high --report e2e.h5     requests served online, from arrival to last token\n"
      "  loopgauge report step.h5");
  add_bench_ops_command(*command, exit_code);
  add_bench_step_command(*command, exit_code);
  add_bench_prefill_command(*command, exit_code);
  add_bench_end_to_end_command(*command, exit_code);
  add_bench_peers_command(*command, exit_code);
  command->require_subcommand(0, 1);
  // Before the subcommand's own callback.
  command->parse_complete_callback([command] {
    if (command->get_subcommands().empty()) return;
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() > 0) throw ConfigError(option->get_name() + " belongs to bench without a subcommand; options of a subcommand stand after its name");
    }
  });
  command->callback([command, options, &exit_code] {
    if (!command->get_subcommands().empty()) return;
    constexpr std::array<std::string_view, 3> kOutputs{"console", "json", "csv"};
    require_output(options->output, kOutputs);
    const Settings settings = options->settings.resolve();
    const BenchResult result = measure(*options, settings);
    if (options->output == "json") {
      print_json(*options, result);
    } else if (options->output == "csv") {
      print_csv(*options, result);
    } else {
      print_console(*options, result);
    }
    exit_code = 0;
  });
}

}  // namespace loopgauge::harness
