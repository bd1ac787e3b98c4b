// SPDX-License-Identifier: Apache-2.0
// `loopgauge run`: one case through one executor, its tokens, its digests and, with --dump, every tensor.
#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "harness/byte_text.hpp"
#include "harness/commands/case_selection.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/handoff_json.hpp"
#include "harness/executor_by_name.hpp"
#include "harness/io/decisions_file.hpp"
#include "harness/io/digest.hpp"
#include "harness/io/dump_file.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "harness/replay.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

struct RunCommandOptions {
  explicit RunCommandOptions(CLI::App& command)
      : settings(command, {SettingGroup::mode, SettingGroup::algorithm, SettingGroup::execution}) {}
  SettingOptions settings;
  std::string case_text;
  std::string trace_file;
  std::string mutant;
  std::string failure;
  std::string transport;
  std::string decisions_file;
  std::string dump_file;
  std::vector<std::string> dump_only;
  bool digest = false;
  std::string output = "console";
};

// What a run was asked for, checked as far as possible without the model.
struct Request {
  Settings settings;
  Trace trace;
  Case value;  // its configuration is normalized: equal ids give equal effective configurations
  Fault fault = Fault::none;
  PlanOptions plan;
};

void check_fault_can_act(Fault fault, const Case& value) {
  const std::string reason = inert_fault_reason(fault, value);
  if (!reason.empty()) throw ConfigError("--mutant " + std::string(to_string(fault)) + " cannot act in " + case_id(value) + ": " + reason);
}

void check_exit_depths(const Case& value, const Trace& trace) {
  if (value.config.exit.mode != ExitMode::trace) return;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    if (trace.requests[i].max_new_tokens > 0 && trace.requests[i].exit_depths.empty()) {
      throw ConfigError("exit trace needs exit_depths, which requests/" + std::to_string(i) + " of trace " + trace.name + " does not have");
    }
  }
}

Request read_request(const RunCommandOptions& options) {
  if (options.case_text.empty() && options.trace_file.empty()) {
    throw ConfigError("nothing to run: give a case id (loopgauge list prints them) or --trace FILE");
  }
  if (!options.dump_only.empty() && options.dump_file.empty()) throw ConfigError("--dump-only has no effect without --dump");
  constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
  require_output(options.output, kOutputs);

  Request request;
  if (!options.case_text.empty()) {
    std::vector<std::string> flags = options.settings.given_flags(SettingGroup::mode);
    for (const std::string& flag : options.settings.given_flags(SettingGroup::algorithm)) flags.push_back(flag);
    if (!flags.empty()) throw ConfigError(flags[0] + " cannot be given with a case id, which carries its mode and settings");
    request.value = parse_case_id(options.case_text);
  }
  request.settings = options.settings.resolve();
  if (options.case_text.empty()) request.value = {request.settings.mode, normalized(request.settings.config), ""};
  if (!options.transport.empty() && !request.value.mode.pd)
    throw ConfigError("--handoff-transport has no effect without pd in the mode, which is " + mode_text(request.value.mode));
  if (!options.mutant.empty()) request.fault = parse_fault(options.mutant);
  if (!options.failure.empty()) request.plan.failure = parse_plan_failure(options.failure);

  request.trace = read_trace(options.trace_file.empty() ? trace_path(request.value.trace) : std::filesystem::path(options.trace_file));
  if (options.case_text.empty()) request.value.trace = request.trace.name;
  if (request.value.trace != request.trace.name) {
    throw ConfigError("the case names trace '" + request.value.trace + "', but the file holds trace '" + request.trace.name + "'");
  }
  require_runnable(request.value);
  check_exit_depths(request.value, request.trace);
  check_fault_can_act(request.fault, request.value);
  return request;
}

struct Outcome {
  std::string id;
  std::string model_folder;
  RunRecord record;
  bool byte_level = false;
  double seconds = 0;
  std::map<std::string, std::string> digests;  // empty without --digest
  std::optional<FileDecisions> forced;         // with --decisions
  std::string failure;                         // as given to --fail
};

Outcome replay_request(const RunCommandOptions& options, const Request& request) {
  const Checkpoint checkpoint = load_checkpoint(request.settings.checkpoint);
  const EffectiveConfig config = EffectiveConfig::resolve(request.value.config, checkpoint.config);
  if (const auto faults = trace_faults(request.trace, checkpoint.config); !faults.empty()) {
    throw TraceError("trace " + request.trace.name + " does not fit the model: " + faults[0] +
                     (faults.size() > 1 ? " (and " + std::to_string(faults.size() - 1) + " more)" : ""));
  }
  const Plan plan = make_plan(request.value.mode, request.trace, config, request.plan);
  const std::unique_ptr<Executor> executor = make_executor(request.settings.executor, checkpoint, options.transport);

  RunOptions run_options;
  run_options.profile = request.settings.profile;
  run_options.fault = request.fault;
  // A digest covers everything, whatever part of it the dump keeps.
  run_options.record = RecordGroups{};
  if (!options.dump_file.empty()) run_options.record = record_groups(options.dump_only);
  if (options.digest) run_options.record = RecordGroups::all();

  Outcome outcome;
  if (!options.decisions_file.empty()) {
    outcome.forced = read_decisions(options.decisions_file, request.trace, config, checkpoint.config);
    run_options.decisions = &outcome.forced->record;
  }
  outcome.id = case_id(request.value);
  outcome.failure = options.failure;
  outcome.model_folder = request.settings.checkpoint.string();
  outcome.byte_level = checkpoint.config.vocab == kByteVocabulary;
  const auto start = std::chrono::steady_clock::now();
  {
    Progress progress(outcome.id, static_cast<std::int64_t>(plan.submissions.size()));
    outcome.record = replay_watched(*executor, plan, request.trace, config, run_options, &progress);
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // A dump of a faulty run, or of one that did not decide for itself, must not pass for a result.
  if (request.fault != Fault::none) outcome.record.executor += "+" + std::string(to_string(request.fault));
  if (outcome.forced) outcome.record.executor += "+forced_decisions";
  if (options.digest) outcome.digests = digests(outcome.record);
  if (!options.dump_file.empty()) write_dump(options.dump_file, outcome.record, config, {.case_id = outcome.id, .only = options.dump_only});
  return outcome;
}

// Forwarded rows by the last loop they executed, index loop - 1.
std::array<int, kLoops> exit_counts(const RequestRecord& request) {
  std::array<int, kLoops> counts{};
  for (std::uint8_t depth : request.exit_depths) {
    if (depth >= 1 && depth <= kLoops) ++counts[depth - std::size_t{1}];
  }
  return counts;
}

void print_request(const Outcome& outcome, const Trace& trace, std::size_t index) {
  const RequestRecord& request = outcome.record.requests[index];
  const bool forced = trace.requests[index].teacher_forced();
  std::cout << "\nrequest " << index << "  id " << trace.requests[index].id << ", prompt " << request.prompt_length << ", "
            << request.tokens.size() << (forced ? " forced, " : " generated, ") << request.fed << " forwarded"
            << (request.outcome == RequestOutcome::cancelled ? ", cancelled" : "") << "\n";
  if (!request.active[0].empty()) {
    std::cout << "  active   loop 3: " << request.active[0].size() << ", loop 4: " << request.active[1].size() << " of "
              << request.prompt_length << "\n";
  }
  if (!request.encoded_frontier.empty() && request.encoded_frontier.back() > 0) {
    std::cout << "  encoded  " << request.encoded_frontier.front() << " positions after the prompt, " << request.encoded_frontier.back()
              << " at the end\n";
  }
  if (request.fed > 0) {
    const auto counts = exit_counts(request);
    std::cout << "  exits    after loop 1: " << counts[0] << ", 2: " << counts[1] << ", 3: " << counts[2] << ", 4: " << counts[3] << "\n";
  }
  if (!request.tokens.empty()) {
    std::cout << "  tokens  ";
    for (std::int32_t token : request.tokens) std::cout << " " << token;
    std::cout << "\n";
    if (outcome.byte_level) std::cout << "  text     " << printable_text(request.tokens) << "\n";
  }
}

// Only what happened: most counters of most modes are 0.
void print_counters(const RunRecord& record) {
  std::cout << "\ncounters\n";
  for (const RunCounterField& field : run_counter_fields()) {
    const std::int64_t value = record.counters.*field.member;
    if (value != 0) std::cout << "  " << value << "  " << field.name << ": " << field.description << "\n";
  }
  for (const HandoffRecord& handoff : record.handoffs) {
    std::cout << "  request " << handoff.request << " " << handoff.outcome << " (" << handoff.transport << "): " << handoff.bytes << " bytes in "
              << handoff.partitions << " partitions, dense BF16 " << handoff.dense_bytes << "; " << handoff.bytes_before_prompt_end
              << " left before the prompt's end, " << handoff.bytes_final_before_last_loop << " were final before the last loop\n";
  }
  const std::string held = describe(record.held_at_drain);
  std::cout << "  held at the end: " << (held.empty() ? "nothing" : held) << "\n";
}

std::string forced_text(const FileDecisions& forced) {
  std::string text = std::to_string(forced.token_sets) + " token sets, keys of " + std::to_string(forced.key_steps) + " steps, exits of " +
                     std::to_string(forced.exit_steps) + " steps";
  if (forced.steps_without_keys > 0) {
    text += "; keys of " + std::to_string(forced.steps_without_keys) + " steps selected anew, as the file lacks those of some layer";
  }
  return text;
}

void print_console(const Outcome& outcome, const Trace& trace, const std::string& dump_file) {
  const RunRecord& record = outcome.record;
  std::cout << "case      " << outcome.id << "\n"
            << "model     " << outcome.model_folder << "  sha256 " << record.model_sha256 << "\n"
            << "executor  " << record.executor << ", profile " << record.profile << "\n"
            << "config    " << record.config_json << "\n"
            << "seconds   " << outcome.seconds << "\n";
  if (outcome.forced) std::cout << "forced    " << forced_text(*outcome.forced) << "\n";
  for (std::size_t i = 0; i < record.requests.size(); ++i) print_request(outcome, trace, i);
  print_counters(record);
  if (!outcome.failure.empty() && record.counters.failures == 0) {
    std::cout << "  " << outcome.failure << " did not happen: every row of that submission is past the end of its request\n";
  }
  if (!outcome.digests.empty()) {
    std::cout << "\ndigests (" << kDigestVersion << ")\n";
    for (const auto& [group, digest] : outcome.digests) std::cout << "  " << digest << "  " << group << "\n";
  }
  if (!dump_file.empty()) std::cout << "\ndump      " << dump_file << "\n";
}

void print_json(const Outcome& outcome, const Trace& trace, const std::string& dump_file) {
  const RunRecord& record = outcome.record;
  nlohmann::ordered_json json{{"case", outcome.id},
                              {"mode", record.mode},
                              {"trace", record.trace},
                              {"checkpoint", outcome.model_folder},
                              {"model_sha256", record.model_sha256},
                              {"executor", record.executor},
                              {"profile", record.profile},
                              {"config", nlohmann::ordered_json::parse(record.config_json)},
                              {"seconds", outcome.seconds},
                              {"requests", nlohmann::ordered_json::array()}};
  for (std::size_t i = 0; i < record.requests.size(); ++i) {
    const RequestRecord& request = record.requests[i];
    nlohmann::ordered_json entry{{"id", trace.requests[i].id},
                                 {"prompt_length", request.prompt_length},
                                 {"forced", trace.requests[i].teacher_forced()},
                                 {"outcome", to_string(request.outcome)},
                                 {"fed", request.fed},
                                 {"tokens", request.tokens},
                                 {"exit_depths", request.exit_depths},
                                 {"active", {{"loop3", request.active[0].size()}, {"loop4", request.active[1].size()}}},
                                 {"encoded_frontier", request.encoded_frontier}};
    if (outcome.byte_level) entry["text"] = printable_text(request.tokens);
    json["requests"].push_back(std::move(entry));
  }
  nlohmann::ordered_json& counters = json["counters"];
  for (const RunCounterField& field : run_counter_fields()) counters[std::string(field.name)] = record.counters.*field.member;
  json["held_at_drain"] = describe(record.held_at_drain);
  for (const HandoffRecord& handoff : record.handoffs) json["handoffs"].push_back(handoff_json(handoff));
  if (outcome.forced) {
    json["forced_decisions"] = {{"token_sets", outcome.forced->token_sets},
                                {"key_steps", outcome.forced->key_steps},
                                {"steps_without_keys", outcome.forced->steps_without_keys},
                                {"exit_steps", outcome.forced->exit_steps}};
  }
  if (!outcome.digests.empty()) json["digests"] = {{"version", kDigestVersion}, {"sha256", outcome.digests}};
  if (!dump_file.empty()) json["dump"] = dump_file;
  std::cout << json.dump(2) << "\n";
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("run", "Replay one case and print its tokens; --dump writes every tensor");
  const auto options = std::make_shared<RunCommandOptions>(*command);
  command->add_option("case", options->case_text, "Case id, as loopgauge list prints it; carries mode, settings and trace")
      ->type_name("CASE");
  command->add_option("--trace", options->trace_file, "Trace file, instead of a case id or as the place of the id's trace")
      ->type_name("FILE");
  command->add_option("--handoff-transport", options->transport,
                      "What moves a handoff (mode part pd): host; with the optimized executor also device (one GPU, its default) and peer (prompts on "
                      "GPU 0, decoding on GPU 1)")
      ->type_name("NAME");
  command->add_option("--mutant", options->mutant, "Plant a known fault (loopgauge sweep --list-mutants); never a result")
      ->type_name("NAME");
  command
      ->add_option("--fail", options->failure,
                   "Let one submission fail, allocation@17 or launch@17, 17 its index in the plan; its requests are rewound and go on")
      ->type_name("KIND@N");
  command
      ->add_option("--decisions", options->decisions_file,
                   "Take selected tokens, keys and exit depths from this dump or expected file instead of deciding: what still differs is "
                   "arithmetic")
      ->type_name("FILE");
  command->add_option("--dump", options->dump_file, "Write the run's tensors to this HDF5 file, replacing it")->type_name("FILE");
  command
      ->add_option("--dump-only", options->dump_only,
                   "Groups of the dump, separated by commas: tokens, logits, hidden, gate, exit_depths, scores, active, keys, mass, kv, "
                   "encoded_frontier, codec")
      ->type_name("GROUPS")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_flag("--digest", options->digest, "Print SHA-256 digests of all results: equal digests mean equal bits");
  command->add_option("--output", options->output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge run serial/t1s0q0/text-512\n"
      "  loopgauge run split/t1s1q1:streaming:serial_aligned/needle-1k --dump needle.h5\n"
      "  loopgauge run wcpb+prefix+async/t1s0q0:w64/shared-prefix --fail launch@17\n"
      "  loopgauge run --trace data/traces/kv-700.h5 --switches t0s0q1 --policy rolling --tail 32 --digest\n"
      "  loopgauge run serial/t0s0q0/copy --profile double --dump copy.h5 --dump-only logits,hidden\n"
      "  loopgauge run serial/t1s0q0/text-512 --decisions mine.h5 --dump forced.h5\n"
      "  loopgauge run --config flashloop.toml --trace data/traces/sum.h5 --output json\n"
      "Configuration file: keys mode, piece_tokens, draft_depth, draft_length, window, exit, min_loops, checkpoint, executor, profile;\n"
      "sections [token_sparse_prefill] enabled, retention_bp, reserve; [sparse_decode_attention] enabled, key_fraction_bp;\n"
      "[kv_residual_quantization] enabled, policy, timing, flush, tail. Flags win over it, a case id over its mode and settings.");
  command->callback([options, &exit_code] {
    const Request request = read_request(*options);
    require_dump_replaceable(options->dump_file);
    require_other_file(options->dump_file, options->decisions_file, "the file that --decisions names");
    const Outcome outcome = replay_request(*options, request);
    if (options->output == "json") {
      print_json(outcome, request.trace, options->dump_file);
    } else {
      print_console(outcome, request.trace, options->dump_file);
    }
    exit_code = 0;
  });
}

}  // namespace loopgauge::harness
