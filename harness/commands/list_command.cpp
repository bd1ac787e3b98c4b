// SPDX-License-Identifier: Apache-2.0
// `loopgauge list`: the ids that a sweep with the same flags replays, or the combinations that no sweep replays and why.
#include <array>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/commands/case_selection.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"

namespace loopgauge::harness {
namespace {

struct ListOptions {
  explicit ListOptions(CLI::App& command) : selection(command) {}
  CaseSelectionOptions selection;
  bool illegal = false;
  std::string output = "console";
};

void print_illegal(const ListOptions& options) {
  const std::vector<IllegalCombination> combinations = illegal_combinations("TRACE");
  if (options.output == "json") {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const auto& [id, reason] : combinations) json.push_back({{"id", id}, {"status", "illegal"}, {"reason", reason}});
    std::cout << json.dump(2) << "\n";
    return;
  }
  for (const auto& [id, reason] : combinations) std::cout << id << "\tillegal\t" << reason << "\n";
}

void print_cases(const ListOptions& options) {
  const CaseSelection selection = options.selection.resolve();
  if (options.output == "json") {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const Case& value : selection.cases) {
      json.push_back({{"id", case_id(value)},
                      {"mode", mode_text(value.mode)},
                      {"settings", settings_text(value.config)},
                      {"trace", value.trace},
                      {"trace_file", selection.trace_files.at(value.trace).string()}});
    }
    std::cout << json.dump(2) << "\n";
    return;
  }
  for (const Case& value : selection.cases) std::cout << case_id(value) << "\n";
}

}  // namespace

void add_list_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("list", "Print the cases that a sweep would run, one id a line");
  const auto options = std::make_shared<ListOptions>(*command);
  CLI::Option* illegal =
      command->add_flag("--illegal", options->illegal, "Print one example of every combination that is not run, with the reason, instead");
  for (const char* selecting : {"--set", "--traces", "--mode", "--grid", "--filter", "--shard"})
    illegal->excludes(command->get_option(selecting));
  command->add_option("--output", options->output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge list --set ci\n"
      "  loopgauge list --set ci --filter 'split/*q1:streaming*/needle-1k'\n"
      "  loopgauge list --set ci --shard 1/4\n"
      "  loopgauge list --set ci --mode mixed.b64 wcpb+prefix+async --filter '*/four'\n"
      "  loopgauge list --set ci --grid 'switches=t1s0q0 window=64,128,256' 'switches=t0s1q0 keys=500,2000'\n"
      "  loopgauge list --illegal\n"
      "A mode is a schedule, serial, split[.p<tokens>], mixed[.b<tokens>], wcpb[.c<windows>], block_spec.d<loops>.k<tokens> or\n"
      "pipeline_spec.d<loops>, followed by any of +prefix[.encoded][.k<windows>], +pd, +preempt[.p<loops>], +async, +graph in this order;\n"
      "serial is written only alone: async, prefix+graph.");
  command->callback([options, &exit_code] {
    constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
    require_output(options->output, kOutputs);
    if (options->illegal) {
      print_illegal(*options);
    } else {
      print_cases(*options);
    }
    exit_code = 0;
  });
}

}  // namespace loopgauge::harness
