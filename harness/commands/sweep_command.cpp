// SPDX-License-Identifier: Apache-2.0
// `loopgauge sweep`: every case of a selection on the reference and the optimized runtime, judged, into one report.
#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/byte_text.hpp"
#include "harness/commands/case_selection.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/config_file.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/executor_by_name.hpp"
#include "harness/interrupt.hpp"
#include "harness/io/data_paths.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/io/shortest_decimal.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/progress.hpp"
#include "harness/provenance.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/report_merge.hpp"
#include "harness/report/schema.hpp"
#include "harness/report_lock.hpp"
#include "harness/sweep/sweep.hpp"
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"

namespace loopgauge::harness {

namespace {

using Clock = std::chrono::steady_clock;

// Writing takes at most a twentieth of the time, however short the interval (but 0).
constexpr int kWriteShare = 20;

struct SweepOptions {
  explicit SweepOptions(CLI::App& command) : selection(command) {}
  CaseSelectionOptions selection;
  std::string config;
  std::string checkpoint;
  std::string executor = "both";
  std::string transport;
  std::string report = "loopgauge-report.h5";
  std::string mutant;
  std::string measure = "everything";
  std::string output = "console";
  std::uint64_t seed = DriftOptions{}.seed;
  double write_interval = 10.0;  // seconds
  int jobs = 0;                  // 0: chosen
  int device_jobs = 1;
  int time_runs = 0;
  bool resume = false;
  bool repeat = false;
  bool list_mutants = false;
};

// Options that a configuration file may give, by key; the flag is --<key> with '-' for '_'.
constexpr std::array<std::string_view, 11> kConfigKeys{"set",  "mode",           "filter", "executor", "checkpoint", "report",
                                                       "jobs", "write_interval", "seed",   "repeat",   "time_runs"};

// Takes what the command line leaves out from the file. Throws ConfigError naming file, line and key.
void apply_config(CLI::App& command, const std::filesystem::path& file) {
  for (const ConfigEntry& entry : read_config_file(file)) {
    const std::string where = file.string() + ":" + std::to_string(entry.line) + ": ";
    if (std::find(kConfigKeys.begin(), kConfigKeys.end(), entry.key) == kConfigKeys.end()) {
      std::string known;
      for (const std::string_view key : kConfigKeys) known += (known.empty() ? "" : ", ") + std::string(key);
      throw ConfigError(where + "unknown key '" + entry.key + "' (known: " + known + ")");
    }
    std::string flag = "--" + entry.key;
    std::replace(flag.begin(), flag.end(), '_', '-');
    CLI::Option& option = *command.get_option(flag);
    const bool traces_win = entry.key == "set" && command.get_option("--traces")->count() > 0;
    if (option.count() > 0 || traces_win) continue;
    try {
      option.add_result(entry.value);
      option.run_callback();
    } catch (const CLI::ParseError& error) {
      throw ConfigError(where + error.what());
    }
  }
}

void print_mutants() {
  for (const FaultInfo& info : planted_faults()) {
    const std::string_view executors = !info.in_reference ? "optimized" : !info.in_optimized ? "reference" : "reference, optimized";
    std::cout << info.name << "\t" << (info.needs.empty() ? "any" : info.needs) << "\t" << (!info.mode.empty() ? std::string(info.mode) : info.not_beside.empty() ? "any" : "not beside " + std::string(info.not_beside)) << "\t"
              << executors << "\t" << info.description << "\n";
  }
}

Renderer find_renderer(const std::string& output) {
  std::vector<std::string_view> words;
  for (const RendererInfo& info : renderers()) {
    if (info.name == output) return info.render;
    words.push_back(info.name);
  }
  require_output(output, words);
  throw InternalError("--output has a word without a renderer");
}

std::string model_config_json(const ModelConfig& model) {
  return nlohmann::json{{"layers", model.layers},     {"loops", model.loops},
                        {"hidden", model.hidden},     {"heads", model.heads},
                        {"head_dim", model.head_dim}, {"intermediate", model.intermediate},
                        {"vocab", model.vocab},       {"max_positions", model.max_positions},
                        {"rms_norm_eps", shortest_decimal(model.rms_norm_eps)}, {"rope_theta", model.rope_theta}}
      .dump();
}

// Everything of one sweep that exists before the first case runs.
struct Sweep {
  SweepRequest request;
  std::vector<SweepCase> cases;  // of the shard
  Checkpoint checkpoint;
  std::vector<std::unique_ptr<Executor>> reference;  // one per lane
  std::vector<std::unique_ptr<Executor>> optimized;  // likewise
  SweepExecutors executors;
  Report report;
};

// More lanes use small cases better, but each holds a run's tensors: about 200 MiB for 2048 tokens of the shipped model.
constexpr int kMostDefaultLanes = 4;

void select_executors(Sweep& sweep, int jobs, int device_jobs, const std::string& transport) {
  const optimized::DeviceStatus device = optimized::device_status();
  sweep.executors.device = device.description;
  require_handoff_transport(transport, sweep.request.executors == ExecutorChoice::reference ? "reference" : "optimized");
  if (sweep.request.executors == ExecutorChoice::optimized && !device.available) {
    throw UnsupportedError("--executor optimized: " + device.description + "; --executor reference needs no device");
  }
  // The optimized column is compared with the reference, so it needs one even where no reference column is asked for.
  const bool needs_reference =
      sweep.request.executors != ExecutorChoice::optimized || (device.available && sweep.request.runner.measure == Measure::everything);
  if (needs_reference) {
    const int lanes = jobs > 0 ? jobs : std::min(host_info().threads, kMostDefaultLanes);
    for (int i = 0; i < lanes; ++i) {
      sweep.reference.push_back(make_executor("reference", sweep.checkpoint));
      sweep.executors.reference.push_back(sweep.reference.back().get());
    }
  }
  if (sweep.request.executors != ExecutorChoice::reference && device.available) {
    for (int i = 0; i < device_jobs; ++i) {
      sweep.optimized.push_back(make_executor("optimized", sweep.checkpoint, transport));
      sweep.executors.optimized.push_back(sweep.optimized.back().get());
    }
  }
}

ReportMeta make_meta(const Sweep& sweep, const SweepOptions& options, const CaseSelection& selection) {
  const BuildInfo& build = build_info();
  const HostInfo host = host_info();
  const SweepRequest& request = sweep.request;
  ReportMeta meta;
  meta.tool_version = build.version;
  meta.source_revision = build.revision;
  meta.compiler = build.compiler + ", " + build.build_type + ", " + build.cuda;
  meta.model_sha256 = sweep.checkpoint.sha256;
  meta.model_config = model_config_json(sweep.checkpoint.config);
  meta.device = request.executors == ExecutorChoice::reference ? "not asked for" : sweep.executors.device;
  meta.device_available = !sweep.executors.optimized.empty();
  meta.cpu = host.cpu + ", " + std::to_string(host.threads) + " threads";
  meta.set = request.set;
  meta.set_sha256 = request_sha256(request, sweep.checkpoint.config);
  meta.executors = to_string(request.executors);
  meta.mutant = request.mutant == Fault::none ? "" : to_string(request.mutant);
  nlohmann::json configuration{{"repeat_with_taps", request.runner.repeat_with_taps}, {"reference_profile", "declared"}};
  if (request.runner.measure != Measure::everything) configuration["measure"] = to_string(request.runner.measure);
  if (request.runner.time_runs > 0) configuration["time_runs"] = request.runner.time_runs;
  if (!options.transport.empty()) configuration["handoff_transport"] = options.transport;
  meta.configuration = configuration.dump();
  meta.command_line = command_line();
  meta.seed = std::to_string(options.seed);
  meta.shard = selection.shard;
  meta.started = utc_timestamp();
  meta.finished = meta.started;
  // Counted over the rows of the whole request: a mutant leaves out the cases in which it cannot act.
  std::vector<std::int64_t> ordinals;
  for (const CaseResult& row : planned_rows(request, request.cases, sweep.executors, sweep.checkpoint.config))
    ordinals.push_back(row.ordinal);
  ordinals.erase(std::unique(ordinals.begin(), ordinals.end()), ordinals.end());
  meta.case_count = std::ssize(ordinals);
  meta.title = (meta.mutant.empty() ? "sweep of " : "mutant " + meta.mutant + " over ") +
               (request.set == "traces" ? "trace files" : "set " + request.set) + ", " + std::to_string(meta.case_count) + " cases";
  return meta;
}

// Reads and validates everything; nothing is written before this succeeds.
void prepare(Sweep& sweep, const SweepOptions& options) {
  const CaseSelection selection = options.selection.resolve();
  SweepRequest& request = sweep.request;
  request.executors = parse_executor_choice(options.executor);
  if (!options.mutant.empty()) {
    request.mutant = parse_fault(options.mutant);
    if (request.executors == ExecutorChoice::both) request.executors = ExecutorChoice::reference;
    require_fault_in(request.mutant, to_string(request.executors));
  }
  request.set = selection.set.empty() ? "traces" : selection.set;
  request.runner.measure = parse_measure(options.measure);
  const bool everything = request.runner.measure == Measure::everything, quality = request.runner.measure == Measure::quality;
  if (!everything && (options.repeat || request.mutant != Fault::none))
    throw ConfigError("--measure " + options.measure + " leaves out what --repeat and --mutant need: it goes without them");
  request.runner.time_runs = options.time_runs;
  if (options.time_runs > 0 && (request.executors == ExecutorChoice::reference || quality || request.mutant != Fault::none))
    throw ConfigError("--time-runs times the optimized column of a judged sweep: it goes without --executor reference, --measure quality and --mutant");
  request.runner.repeat_with_taps = everything && (options.repeat || request.set == "smoke");
  request.runner.drift.seed = options.seed;

  sweep.checkpoint = load_checkpoint(options.checkpoint.empty() ? default_checkpoint() : std::filesystem::path(options.checkpoint));
  request.runner.drift.byte_level = sweep.checkpoint.config.vocab == kByteVocabulary;
  for (const Case& value : selection.request) {
    const bool known =
        std::any_of(request.traces.begin(), request.traces.end(), [&](const Trace& trace) { return trace.name == value.trace; });
    if (!known) request.traces.push_back(read_trace(selection.trace_files.at(value.trace)));
  }
  request.cases = numbered_cases(selection.request, request.traces, sweep.checkpoint.config);
  sweep.cases = shard_cases(request.cases, selection.cases);
  select_executors(sweep, options.jobs, options.device_jobs, options.transport);
  const bool hands_off = std::any_of(request.cases.begin(), request.cases.end(), [](const SweepCase& each) { return each.value.mode.pd; });
  if (!options.transport.empty() && !hands_off) throw ConfigError("--handoff-transport has no effect: no selected case has pd in its mode");

  sweep.report.meta = make_meta(sweep, options, selection);
  if (sweep.report.meta.case_count == 0) {
    throw ConfigError("mutant " + options.mutant +
                      " cannot act in any selected case: it needs the switches and the mode that `sweep --list-mutants` prints");
  }
  sweep.report.cases = planned_rows(request, sweep.cases, sweep.executors, sweep.checkpoint.config);
}

// Takes over what the report of an earlier, killed sweep has finished.
void resume(Sweep& sweep, const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return;
  Report earlier = read_report(path);
  std::vector<std::string> differences = request_differences(earlier.meta, sweep.report.meta, path.string(), "this sweep");
  if (earlier.meta.shard != sweep.report.meta.shard) {
    differences.push_back("shard is '" + earlier.meta.shard + "' in " + path.string() + " and '" + sweep.report.meta.shard +
                          "' in this sweep");
  }
  if (!differences.empty())
    throw ConfigError("--resume cannot continue: " + differences.front() + "; choose another --report or leave out --resume");
  earlier.meta.command_line = sweep.report.meta.command_line;
  sweep.report = std::move(earlier);
}

void write_now(Report& report, const std::filesystem::path& path) {
  report.meta.finished = utc_timestamp();
  write_report(path, report);
}

void execute(Sweep& sweep, const std::filesystem::path& path, std::chrono::duration<double> write_interval) {
  Progress progress("sweep", std::ssize(sweep.report.cases));
  Clock::time_point written = Clock::now();
  std::chrono::duration<double> interval = write_interval;
  const auto before = [&](const CaseResult& row, std::int64_t done, std::int64_t) {
    progress.update(done, row.id + " (" + row.executor + ")");
  };
  const auto after = [&](const Report&, std::int64_t, std::int64_t) {
    if (interrupted()) return false;
    if (Clock::now() - written >= interval) {
      const Clock::time_point start = Clock::now();
      write_now(sweep.report, path);
      written = Clock::now();
      if (write_interval.count() > 0) interval = std::max<std::chrono::duration<double>>(write_interval, kWriteShare * (written - start));
    }
    return true;
  };
  write_now(sweep.report, path);  // an unwritable path shows before the work, not after it
  try {
    throw_if_interrupted();
    run_sweep(sweep.request, sweep.executors, sweep.checkpoint, sweep.report, before, after);
  } catch (const Interrupted&) {
    write_now(sweep.report, path);
    throw;
  }
  write_now(sweep.report, path);
  throw_if_interrupted();
}

void run(const SweepOptions& options, int& exit_code) {
  const Renderer render = find_renderer(options.output);
  Sweep sweep;
  prepare(sweep, options);
  const std::filesystem::path path = options.report;
  require_replaceable(path, kReportFormat, "--report");
  const ReportLock lock(path);
  if (options.resume) resume(sweep, path);
  // Data goes to standard output; what a person reads beside it goes to standard error when the data is for programs.
  const bool console = options.output == "console";
  std::ostream& notes = console ? std::cout : std::cerr;
  notes << "sweep of " << sweep.report.cases.size() << " rows, seed " << options.seed << "\n";
  execute(sweep, path, std::chrono::duration<double>(options.write_interval));
  notes << "report " << path.string() << "\n\n";
  render(sweep.report, std::cout);
  if (!console) std::cerr << summary_line(count_statuses(sweep.report)) << "\n";
  exit_code = exit_code_of(verdict(sweep.report));
}

}  // namespace

void add_sweep_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("sweep", "Run and judge every case of a selection, write one report");
  auto options = std::make_shared<SweepOptions>(*command);
  command
      ->add_option("--config", options->config,
                   "Configuration file with lines `key = value`: set, mode, filter, executor, checkpoint, report, jobs, write_interval, "
                   "seed, repeat, time_runs; flags win over it")
      ->type_name("FILE");
  command
      ->add_option("--executor", options->executor,
                   "Columns: reference, optimized, both. Without a device, both marks the optimized column 'not run' and judges the "
                   "reference alone; optimized exits with 4")
      ->type_name("WORD")
      ->capture_default_str();
  command->add_option("--checkpoint", options->checkpoint, "Model folder in the Hugging Face layout (default: the shipped ouro-tiny)")
      ->type_name("DIR");
  command->add_option("--report", options->report, "Report to write; replaces a report, and no other file")->type_name("FILE")->capture_default_str();
  command
      ->add_option("--handoff-transport", options->transport,
                   "What moves handoffs (mode part pd) of the optimized executor: host, device (one GPU, the default) or peer (prompts on GPU 0, "
                   "decoding on GPU 1)")
      ->type_name("NAME");
  command
      ->add_option("--jobs", options->jobs,
                   "Reference cases run at once; they share out the threads (default: the threads, at most 4). Results do not depend on it")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--device-jobs", options->device_jobs,
                   "Optimized cases run at once on the device, each with its own copy of the weights. Results do not depend on it")
      ->type_name("N")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command->add_flag("--resume", options->resume,
                    "Continue the report of a killed sweep with the same request; starts anew when the file does not exist");
  command
      ->add_option("--write-interval", options->write_interval,
                   "Seconds between two writes of the unfinished report, which is what a kill leaves; 0 writes after every case")
      ->type_name("SECONDS")
      ->check(real_number(0.0, 86400.0))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the bootstrap intervals")
      ->check(whole_number())
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--repeat", options->repeat,
                    "Repeat every setting with taps attached and require equal bits (always on for --set smoke)");
  command
      ->add_option("--time-runs", options->time_runs,
                   "When all is judged, run every passed case of the optimized column N times more for its times, one at a time, without "
                   "recording; from 3 on, which is what gate needs for a spread (default: the one time of the judged run)")
      ->type_name("N")
      ->check(CLI::Range(3, 1000));
  command
      ->add_option(
          "--measure", options->measure,
          "everything; quality: record logits only and measure drift from dense; modes: every mode against the executor's own serial run. The last two go "
          "without audit and comparison with the reference")
      ->type_name("WORD")
      ->capture_default_str();
  CLI::Option* mutant =
      command
          ->add_option("--mutant", options->mutant,
                       "Plant a known fault in the reference, or with --executor optimized in the optimized runtime; a sweep that finds it fails (exit 1), one that "
                       "does not exits with 5")
          ->type_name("NAME");
  command
      ->add_flag("--list-mutants", options->list_mutants,
                 "Print the faults: name, switches and mode that they need, executors that can plant them, description")
      ->excludes(mutant);
  command->add_option("--output", options->output, "console, json, csv, quality, markdown")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge sweep --set smoke --report smoke.h5\n"
      "  loopgauge sweep --set ci --filter '*q1:streaming*' --executor reference\n"
      "  loopgauge sweep --set ci --shard 2/4 --report shard-2.h5 --resume\n"
      "  loopgauge sweep --set modes --filter 'wcpb+*' --executor reference\n"
      "  loopgauge sweep --set speculation --filter 'block_spec*' --executor reference\n"
      "  loopgauge sweep --set ci --mode serial mixed.b64+prefix+preempt async+graph --filter '*/four'\n"
      "  loopgauge sweep --set ci --grid 'switches=t1s0q0 window=64,256' 'switches=t0s1q0 keys=500,2000' --measure quality\n"
      "  loopgauge sweep --set ci --mode block_spec.d2.k4 --grid 'switches=t0s1q1 window=64 tail=5 timing=serial_aligned,execution_dependent "
      "flush=committed,eager' --filter '*q1:*/greedy' --measure modes\n"
      "  loopgauge sweep --set smoke --time-runs 5                     times with a spread, on a device\n"
      "  loopgauge sweep --set smoke --mutant early_flush\n"
      "  loopgauge sweep --set smoke --mutant stale_reference_slot --executor optimized\n"
      "Exit codes: 0 passed; 1 a case failed; 4 no device for --executor optimized; 5 a requested case was not run; 6 a case could not\n"
      "be judged. With --mutant: 1 the fault was found; 5 it was not, because it changed nothing in the cases chosen or no check noticed it;\n"
      "6 a check fails without the fault too.");
  command->callback([options, command, &exit_code] {
    exit_code = 0;
    if (!options->config.empty()) apply_config(*command, options->config);
    if (options->list_mutants) {
      print_mutants();
    } else {
      run(*options, exit_code);
    }
  });
}

}  // namespace loopgauge::harness
