// SPDX-License-Identifier: Apache-2.0
// `loopgauge explain`: where two runs of one case part, or two dumps.
#include <array>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "harness/commands/case_selection.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/compare/explanation.hpp"
#include "harness/compare/significant.hpp"
#include "harness/explain/explain_runs.hpp"
#include "harness/explain/minimize.hpp"
#include "harness/io/data_paths.hpp"
#include "harness/io/dump_file.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/io/set_file.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/report/report.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

// Elements shown on either side of the first one that differs.
constexpr std::int64_t kShownElements = 4;

struct ExplainOptions {
  explicit ExplainOptions(CLI::App& command) : settings(command, {SettingGroup::execution}) {}
  SettingOptions settings;
  std::vector<std::string> subjects;  // a case id, or two dump files
  std::string trace_file;
  std::string against_mode, against_executor, against_profile, mutant;
  std::string minimize_file;
  double minimize_seconds = MinimizeLimits{}.seconds;
  int layers = 0, loops = 0;  // 0: all of the model
  std::string output = "console";
};

// What is printed, of two runs or of two dumps; dumps hold no operation rows.
struct Finding {
  std::string subject;  // case id or the two files
  std::string expected_side, actual_side;
  bool planted = false;  // the actual run has a planted fault
  std::vector<std::string> notes;
  Explanation what;
};

// A planted fault that changed nothing: the case says nothing about the fault.
bool fault_missed(const Finding& finding) { return finding.planted && finding.what.identical(); }

std::string verdict_text(const Finding& finding) {
  if (fault_missed(finding)) return "fault not found: the planted fault changes nothing in this case; without a case one in which it acts is looked for";
  if (!finding.what.identical()) return "different";
  return finding.what.outcomes.empty() ? "identical" : "identical as far as both runs came";
}

// --- from runs -------------------------------------------------------------------------------------------------------------------------

std::pair<RunSide, RunSide> sides(const ExplainOptions& options, const Settings& settings, const Case& value) {
  const int given =
      !options.against_mode.empty() + !options.against_executor.empty() + !options.against_profile.empty() + !options.mutant.empty();
  if (given > 1) throw ConfigError("give one of --against-mode, --against-executor, --against-profile, --mutant: they name what differs");
  const RunSide expected{value.mode, settings.executor, settings.profile, Fault::none};
  RunSide actual = expected;
  if (!options.mutant.empty()) {
    actual.fault = parse_fault(options.mutant);
    require_fault_in(actual.fault, actual.executor);
  } else if (!options.against_executor.empty()) {
    actual.executor = options.against_executor;
  } else if (!options.against_profile.empty()) {
    actual.profile = parse_profile(options.against_profile);
  } else if (!options.against_mode.empty()) {
    actual.mode = parse_mode(options.against_mode);
  } else if (value.mode != ModeSpec{}) {
    // The case's own plan is in question, serial is what it must equal.
    RunSide serial = expected;
    serial.mode = parse_mode("serial");
    return {serial, expected};
  } else {
    actual.mode = parse_mode("split");
  }
  if (expected.text() == actual.text()) throw ConfigError("both runs would be the same: " + expected.text());
  return {expected, actual};
}

// A case with everything that its runs need.
struct PreparedCase {
  Case value;
  Trace trace;
  EffectiveConfig config;
  RunSide expected, actual;
};

PreparedCase prepare(const ExplainOptions& options, const Settings& settings, const Checkpoint& checkpoint, const std::string& id) {
  Case value = parse_case_id(id);
  const std::filesystem::path trace_file = options.trace_file.empty() ? trace_path(value.trace) : std::filesystem::path(options.trace_file);
  require_other_file(options.minimize_file, trace_file, "the trace of the case");
  Trace trace = read_trace(trace_file);
  if (value.trace != trace.name)
    throw ConfigError("the case names trace '" + value.trace + "', but the file holds trace '" + trace.name + "'");
  const auto [expected, actual] = sides(options, settings, value);
  for (const RunSide* side : {&expected, &actual}) {
    Case checked = value;
    checked.mode = side->mode;
    require_runnable(checked);
    const std::string inert = inert_fault_reason(side->fault, checked);
    if (!inert.empty()) throw ConfigError("--mutant " + options.mutant + " cannot act in " + case_id(checked) + ": " + inert);
  }
  if (const auto faults = trace_faults(trace, checkpoint.config); !faults.empty()) {
    throw TraceError("trace " + trace.name + " does not fit the model: " + faults[0]);
  }
  EffectiveConfig config = EffectiveConfig::resolve(value.config, checkpoint.config);
  return {std::move(value), std::move(trace), std::move(config), expected, actual};
}

const FaultInfo& info_of(Fault fault) {
  for (const FaultInfo& info : planted_faults()) {
    if (info.fault == fault) return info;
  }
  throw InternalError("a planted fault has no description");
}

// Ids of a shipped set in which the fault may act: with the switches that it needs alone, then with all of them. The blocks of fixed_prompt
// take the shortest prompts, those of rolling move.
std::vector<std::string> candidate_cases(const FaultInfo& info) {
  const auto has = [&](const char* on) { return info.needs.find(on) != std::string_view::npos; };
  const bool of_speculation = info.mode == "speculation" || info.mode == "block_spec";
  std::array<const char*, 2> policies{"fixed_prompt", "rolling"};
  if (of_speculation) std::swap(policies[0], policies[1]);  // rounds seal what rolling moves
  std::vector<std::string> settings;
  for (const bool all : {false, true}) {
    const std::string switches = std::string(all || has("t1") ? "t1" : "t0") + (all || has("s1") ? "s1" : "s0");
    if (!all && !has("q1")) {
      settings.push_back(switches + "q0");
      continue;
    }
    for (const char* policy : policies) settings.push_back(switches + "q1:" + policy + ":serial_aligned");
  }
  const char* const set = info.mode.empty() ? "smoke.txt" : of_speculation ? "speculation.txt" : info.mode == "pd" ? "pd.txt" : "modes.txt";
  const TraceSet traces = read_set(data_directory() / "sets" / set);
  std::vector<std::string> ids;
  for (const std::string& setting : settings) {
    for (const SetTrace& trace : traces.traces) {
      const std::string rest = "/" + setting + (trace.window == 0 ? "" : ":w" + std::to_string(trace.window)) + "/" + trace.name;
      if (info.mode.empty()) ids.push_back("serial" + rest);
      for (const std::string& mode : trace.modes) {
        const bool acts = !info.mode.empty() && has_part(parse_mode(mode), info.mode);
        if (acts && !case_refusal(parse_case_id(mode + rest))) ids.push_back(mode + rest);
      }
    }
  }
  return ids;
}

// The first of them in which it does.
std::string case_for_mutant(const ExplainOptions& options, const Settings& settings, const Checkpoint& checkpoint) {
  const FaultInfo& info = info_of(parse_fault(options.mutant));
  require_fault_in(info.fault, settings.executor);
  const std::vector<std::string> ids = candidate_cases(info);
  for (const std::string& id : ids) {
    const PreparedCase prepared = prepare(options, settings, checkpoint, id);
    if (runs_differ({checkpoint, prepared.trace, prepared.config, prepared.expected, prepared.actual})) return id;
  }
  throw ConfigError("--mutant " + options.mutant + " changes nothing in the " + std::to_string(ids.size()) +
                    " shipped cases tried: give a case");
}

std::string minimized_command(const ExplainOptions& options, const Settings& settings, const Checkpoint& checkpoint, Case value,
                              const MinimizedCase& found) {
  value.config = found.config;
  value.trace = found.trace.name;
  std::string command = "loopgauge explain " + case_id(value) + " --trace " + options.minimize_file;
  for (const auto& [flag, text] :
       {std::pair{"--against-mode", &options.against_mode}, std::pair{"--against-executor", &options.against_executor},
        std::pair{"--against-profile", &options.against_profile}, std::pair{"--mutant", &options.mutant}}) {
    if (!text->empty()) command += std::string(" ") + flag + " " + *text;
  }
  if (settings.executor != "reference") command += " --executor " + settings.executor;
  if (settings.profile != Profile::declared) command += " --profile " + std::string(to_string(settings.profile));
  if (found.layers < checkpoint.config.layers || options.layers > 0) command += " --layers " + std::to_string(found.layers);
  if (found.loops < checkpoint.config.loops || options.loops > 0) command += " --loops " + std::to_string(found.loops);
  return command;
}

Finding explain_case(const ExplainOptions& options) {
  const Settings settings = options.settings.resolve();
  if (!options.minimize_file.empty()) require_replaceable(options.minimize_file, kTraceFormat, "--minimize");
  const Checkpoint checkpoint = cut_checkpoint(load_checkpoint(settings.checkpoint), options.layers, options.loops);
  const std::string id = options.subjects.empty() ? case_for_mutant(options, settings, checkpoint) : options.subjects.front();
  const PreparedCase prepared = prepare(options, settings, checkpoint, id);
  const ExplainSubject subject{checkpoint, prepared.trace, prepared.config, prepared.expected, prepared.actual};
  Finding finding;
  finding.subject = case_id(prepared.value);
  finding.expected_side = prepared.expected.text();
  finding.actual_side = prepared.actual.text();
  finding.planted = prepared.actual.fault != Fault::none;
  finding.what = explain_runs(subject);
  if (!rows_are_comparable(subject)) {
    finding.notes.push_back("operations are not compared: rejected candidates stand where committed rows stand, and only one of the plans has them");
  }
  if (options.minimize_file.empty()) return finding;
  if (finding.what.operation.name.empty()) {
    finding.notes.push_back("nothing to minimize: " + (finding.what.identical() ? "the runs are " + verdict_text(finding) : "no operation is to blame"));
    return finding;
  }
  const MinimizedCase smallest = minimize(subject, finding.what.operation.name, finding.what.operation.request, {options.minimize_seconds});
  write_trace(options.minimize_file, smallest.trace);
  for (const std::string& step : smallest.steps) finding.notes.push_back("minimized: " + step);
  finding.notes.push_back("minimized in " + std::to_string(smallest.attempts) + " attempts" +
                          (smallest.out_of_time ? ", stopped by --minimize-seconds" : "") + ", wrote " + options.minimize_file + ": " +
                          minimized_command(options, settings, checkpoint, prepared.value, smallest));
  return finding;
}

// --- from dumps ------------------------------------------------------------------------------------------------------------------------

Finding explain_dumps(const ExplainOptions& options) {
  DumpInfo expected_info, actual_info;
  RunRecord expected = read_dump(options.subjects[0], expected_info);
  RunRecord actual = read_dump(options.subjects[1], actual_info);
  Finding finding;
  finding.subject = options.subjects[0] + " " + options.subjects[1];
  const auto side = [](const DumpInfo& info) {
    return info.case_id + ": " + info.executor + " executor, " + info.profile + " profile, " + info.mode + " plan, tool " +
           info.tool_version;
  };
  finding.expected_side = side(expected_info);
  finding.actual_side = side(actual_info);
  const auto differs = [&](const std::string& name, const auto& a, const auto& b) {
    if (a == b) return;
    std::ostringstream line;
    line << name << " differs: " << a << " and " << b;
    finding.notes.push_back(line.str());
  };
  differs("model", expected_info.model_sha256, actual_info.model_sha256);
  differs("trace", expected_info.trace, actual_info.trace);
  differs("switches", expected_info.switches, actual_info.switches);
  differs("policy", expected_info.policy, actual_info.policy);
  differs("timing", expected_info.timing, actual_info.timing);
  differs("window", expected_info.window, actual_info.window);
  differs("tail", expected_info.tail, actual_info.tail);
  differs("exit", expected_info.exit, actual_info.exit);
  finding.what.outcomes = cut_to_common(expected, actual, expected_info.window);
  finding.what.outcomes_decide = expected_info.mode == actual_info.mode;
  finding.what.results = compare_records(expected, actual, expected_info.window);
  finding.what.decision = first_decision(finding.what.results);
  AlgorithmConfig config;  // what a margin needs
  config.window = expected_info.window;
  config.exit.threshold = static_cast<float>(expected_info.threshold);
  if (expected_info.exit == "threshold") config.exit.mode = ExitMode::threshold;
  if (expected_info.exit == "delayed") config.exit.mode = ExitMode::delayed;
  if (finding.what.decision) finding.what.decision_margin_text = decision_margin(*finding.what.decision, expected, config);
  if (const auto& first = finding.what.results.first) {
    finding.what.operation = blame_result(*first, expected.requests.at(static_cast<std::size_t>(first->request)));
    finding.what.bound.reason = "dumps hold no inputs of operations";
  }
  return finding;
}

// --- output ----------------------------------------------------------------------------------------------------------------------------

std::string ulp_text(std::uint64_t ulps, UlpFormat format) {
  return std::to_string(ulps) + (format == UlpFormat::bfloat16 ? " bfloat16 ulp" : " float32 ulp");
}

std::string place(const RowId& id) {
  std::string text = "request " + std::to_string(id.request);
  if (id.loop > 0) text += ", loop " + std::to_string(id.loop);
  if (id.layer >= 0) text += ", layer " + std::to_string(id.layer);
  text += ", position " + std::to_string(id.position);
  if (id.occurrence > 0) text += ", occurrence " + std::to_string(id.occurrence);
  return text;
}

void print_row(const Finding& finding) {
  const DivergentRow& row = *finding.what.row;
  std::cout << "  operation   " << row.id.operation << "  (" << operation_clauses(row.id.operation) << ")\n"
            << "  row         " << place(row.id) << "\n";
  if (row.kind == DivergentRow::Kind::only_expected) {
    std::cout << "  exists only in the expected run, submission " << row.expected_submission
              << ": the actual run did not execute this row\n";
    return;
  }
  if (row.kind == DivergentRow::Kind::only_actual) {
    std::cout << "  exists only in the actual run, submission " << row.actual_submission << ": the expected run did not execute this row\n";
    return;
  }
  std::cout << "  submission  " << row.expected_submission << " expected, " << row.actual_submission << " actual\n";
  const RowDifference& d = finding.what.row_difference;
  if (d.element < 0) {
    std::cout << "  the rows differ beyond the " << kEvidenceBytes << " bytes that are kept of each\n";
    return;
  }
  std::cout << "  element     " << d.element << " of " << d.width;
  if (d.head >= 0) std::cout << "  (head " << d.head << ", channel " << d.element_in_head << ")";
  std::cout << "\n  expected    " << significant(d.expected, 9) << "\n  actual      " << significant(d.actual, 9) << "\n  difference  "
            << significant(static_cast<double>(d.actual) - d.expected, 9)
            << (d.ulps == kNoUlpDistance ? "" : ", " + ulp_text(d.ulps, d.format)) << "\n  in the row  " << d.different
            << " elements differ, at most by " << significant(d.max_abs, 9) << "\n";
  const std::int64_t begin = std::max<std::int64_t>(0, d.element - kShownElements);
  const std::int64_t end =
      std::min<std::int64_t>(static_cast<std::int64_t>(std::min(finding.what.expected_row.size(), finding.what.actual_row.size())),
                             d.element + kShownElements + 1);
  for (const auto& [name, values] : {std::pair{"expected", &finding.what.expected_row}, std::pair{"actual  ", &finding.what.actual_row}}) {
    std::cout << "    " << name << " [" << begin << ".." << end - 1 << "]";
    for (std::int64_t i = begin; i < end; ++i) std::cout << " " << significant((*values)[static_cast<std::size_t>(i)], 9);
    std::cout << "\n";
  }
}

void print_result(const Divergence& divergence) {
  std::cout << "  result      " << divergence.text() << "\n  clauses     " << result_clauses(divergence) << "\n";
}

void print_console(const Finding& finding) {
  std::cout << "subject   " << finding.subject << "\nexpected  " << finding.expected_side << "\nactual    " << finding.actual_side << "\n";
  for (const std::string& note : finding.notes) std::cout << "note      " << note << "\n";
  if (finding.what.rows_compared > 0) {
    std::cout << "rows      " << finding.what.rows_compared << " operation rows compared; " << finding.what.places_different << " of "
              << finding.what.places << " places (request, position, loop) differ\n";
  }
  if (!finding.what.actual_error.empty()) std::cout << "error     the actual run ends: " << finding.what.actual_error << "\n";
  for (const std::string& outcome : finding.what.outcomes) std::cout << "outcome   " << outcome << "; compared as far as both came\n";
  if (finding.what.outcomes_differ()) std::cout << "          under one plan a request ends at one place  (S-ACT-2)\n";
  const BlamedOperation& blamed = finding.what.operation;
  if (!blamed.name.empty()) {
    std::cout << "operation " << blamed.name << "  (" << blamed.clauses << ")\nown bound " << finding.what.bound.text() << "\n";
    if (finding.what.operations_checked > 0) {
      std::cout << "faulty    " << finding.what.faulty.size() << " of " << finding.what.operations_checked
                << " operations and loops of sampled rows are beyond their bound, whatever came before them\n";
    }
    for (const FaultyOperation& faulty : finding.what.faulty) {
      std::cout << "          " << faulty.name << (faulty.loop > 0 ? " loop " + std::to_string(faulty.loop) : "") << ", error / bound "
                << significant(faulty.ratio, 3) << ", " << faulty.where << "\n";
    }
  }
  std::cout << "\n";
  if (finding.what.row && !finding.what.result_is_first) {
    std::cout << "first divergence, an operation\n";
    print_row(finding);
    if (finding.what.results.first) {
      std::cout << "\nfirst recorded result that differs\n";
      print_result(*finding.what.results.first);
    }
  } else if (finding.what.results.first) {
    std::cout << "first divergence, a recorded result\n";
    print_result(*finding.what.results.first);
    if (finding.what.row) {
      std::cout << "\nfirst operation row that differs, later\n";
      print_row(finding);
    }
  }
  if (finding.what.decision) {
    std::cout << "\nfirst decision that differs\n";
    print_result(*finding.what.decision);
    if (!finding.what.decision_margin_text.empty()) std::cout << "  margin      " << finding.what.decision_margin_text << "\n";
  }
  std::cout << "\n";
  for (const GroupComparison& group : finding.what.results.groups) {
    if (group.status == GroupStatus::absent) continue;
    std::cout << "  " << to_string(group.group) << std::string(18 - to_string(group.group).size(), ' ') << to_string(group.status);
    if (group.compared > 0) std::cout << ", " << group.different << " of " << group.compared << " differ";
    std::cout << "\n";
  }
  std::cout << verdict_text(finding) << "\n";
}

nlohmann::ordered_json json_of(const Divergence& d) {
  nlohmann::ordered_json json{
      {"text", d.text()},   {"group", to_string(d.group)}, {"tensor", d.tensor}, {"request", d.request}, {"loop", d.loop},
      {"layer", d.layer},   {"position", d.position},      {"head", d.head},     {"element", d.element}, {"expected", d.expected},
      {"actual", d.actual}, {"clauses", result_clauses(d)}};
  if (d.ulps != kNoUlpDistance) json["ulps"] = d.ulps;
  return json;
}

void print_json(const Finding& finding) {
  nlohmann::ordered_json json{{"subject", finding.subject},
                              {"expected", finding.expected_side},
                              {"actual", finding.actual_side},
                              {"notes", finding.notes},
                              {"identical", finding.what.identical()},
                              {"verdict", verdict_text(finding)},
                              {"operation", finding.what.operation.name},
                              {"operation_clauses", finding.what.operation.clauses},
                              {"own_bound", finding.what.bound.text()},
                              {"rows_compared", finding.what.rows_compared},
                              {"places", finding.what.places},
                              {"places_different", finding.what.places_different}};
  if (finding.what.operations_checked > 0) {
    json["operations_checked"] = finding.what.operations_checked;
    json["faulty"] = nlohmann::ordered_json::array();
    for (const FaultyOperation& faulty : finding.what.faulty) {
      json["faulty"].push_back(
          {{"operation", faulty.name}, {"loop", faulty.loop}, {"error_over_bound", faulty.ratio}, {"where", faulty.where}});
    }
  }
  if (!finding.what.actual_error.empty()) json["actual_error"] = finding.what.actual_error;
  if (!finding.what.outcomes.empty()) {
    json["outcomes"] = finding.what.outcomes;
    json["outcomes_differ"] = finding.what.outcomes_differ();
  }
  if (finding.what.row) {
    const RowId& id = finding.what.row->id;
    const RowDifference& d = finding.what.row_difference;
    nlohmann::ordered_json row{{"operation", id.operation},
                               {"clauses", operation_clauses(id.operation)},
                               {"request", id.request},
                               {"loop", id.loop},
                               {"layer", id.layer},
                               {"position", id.position},
                               {"expected_submission", finding.what.row->expected_submission},
                               {"actual_submission", finding.what.row->actual_submission},
                               {"width", d.width},
                               {"element", d.element},
                               {"head", d.head},
                               {"expected", d.expected},
                               {"actual", d.actual},
                               {"elements_different", d.different},
                               {"max_abs", d.max_abs},
                               {"expected_row", finding.what.expected_row},
                               {"actual_row", finding.what.actual_row}};
    if (d.ulps != kNoUlpDistance) row["ulps"] = d.ulps;
    json["first_row"] = std::move(row);
    json["result_is_first"] = finding.what.result_is_first;
  }
  if (finding.what.results.first) json["first_result"] = json_of(*finding.what.results.first);
  if (finding.what.decision) {
    json["first_decision"] = json_of(*finding.what.decision);
    json["first_decision"]["margin"] = finding.what.decision_margin_text;
  }
  json["groups"] = nlohmann::ordered_json::object();
  for (const GroupComparison& group : finding.what.results.groups) {
    json["groups"][std::string(to_string(group.group))] = {
        {"status", to_string(group.status)}, {"compared", group.compared}, {"different", group.different}};
  }
  std::cout << json.dump(2) << "\n";
}

Finding explain(const ExplainOptions& options) {
  if (options.subjects.empty() && options.mutant.empty()) throw ConfigError("give a case id, two dump files, or --mutant alone");
  if (options.subjects.size() < 2) return explain_case(options);
  for (const auto& [flag, value] :
       {std::pair{"--against-mode", &options.against_mode}, std::pair{"--against-executor", &options.against_executor},
        std::pair{"--against-profile", &options.against_profile}, std::pair{"--mutant", &options.mutant},
        std::pair{"--trace", &options.trace_file}, std::pair{"--minimize", &options.minimize_file}}) {
    if (!value->empty()) throw ConfigError(std::string(flag) + " has no effect on two dump files");
  }
  if (options.layers != 0 || options.loops != 0) throw ConfigError("--layers and --loops have no effect on two dump files");
  if (const auto flags = options.settings.given_flags(SettingGroup::execution); !flags.empty()) {
    throw ConfigError(flags.front() + " has no effect on two dump files");
  }
  return explain_dumps(options);
}

}  // namespace

void add_explain_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("explain", "Name the first divergence between two runs of a case, or between two dumps");
  const auto options = std::make_shared<ExplainOptions>(*command);
  command
      ->add_option(
          "subject", options->subjects,
          "A case id, or two dump files (expected, actual). With --mutant it may be left out: the first case of the smoke, modes or pd set "
          "in which the fault acts")
      ->type_name("CASE | A.h5 B.h5")
      ->expected(0, 2);
  command->add_option("--trace", options->trace_file, "File of the case's trace, where it is not a shipped one")->type_name("FILE");
  command->add_option("--against-mode", options->against_mode, "Compare with another plan: serial, split.p100, wcpb+async, ... (loopgauge list --help)")->type_name("MODE");
  command->add_option("--against-executor", options->against_executor, "Compare with the other executor: reference, optimized")
      ->type_name("NAME");
  command->add_option("--against-profile", options->against_profile, "Compare with another profile: declared, reordered, double")
      ->type_name("NAME");
  command->add_option("--mutant", options->mutant, "Compare with the same run and a planted fault (loopgauge sweep --list-mutants)")
      ->type_name("NAME");
  command
      ->add_option(
          "--minimize", options->minimize_file,
          "Write the smallest trace in which the runs still part at the same operation, and print the command that explains it: fewer "
          "layers, requests, tokens, switches and loops")
      ->type_name("FILE");
  command->add_option("--minimize-seconds", options->minimize_seconds, "Begin no further attempt after that long")
      ->needs(command->get_option("--minimize"))
      ->type_name("SECONDS")
      ->check(real_number(0.0, 86400.0))
      ->capture_default_str();
  const CLI::Validator some = whole_number(1, std::numeric_limits<int>::max());
  command->add_option("--layers", options->layers, "Use the first N layers of the model only")->type_name("N")->check(some);
  command->add_option("--loops", options->loops, "Execute N loops only (dense cases)")->type_name("N")->check(some);
  command->add_option("--output", options->output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge explain split/t1s0q1:rolling:serial_aligned/edges          its plan against serial\n"
      "  loopgauge explain serial/t1s1q0/seven --mutant swapped_norms\n"
      "  loopgauge explain serial/t0s0q0/seven --against-profile reordered\n"
      "  loopgauge explain serial/t1s1q0/seven --against-executor optimized\n"
      "  loopgauge explain before.h5 after.h5\n"
      "  loopgauge explain --mutant early_flush --minimize smallest.h5\n"
      "The answer: the operation where the runs part, with its clauses; whether its output is within its own bound for the inputs that\n"
      "it had; between executors or profiles, every operation that is not; the row, both values with their distance in ulps; and the\n"
      "first decision that differs with its margin.\n"
      "Without --against-* or --mutant a case is compared with its serial plan, and a serial case with the split plan.\n"
      "Exit codes: 0 identical (as far as both runs came, which a cancelled request may limit), 1 different, 5 the planted fault changes\n"
      "nothing, others as everywhere.");
  command->callback([options, &exit_code] {
    constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
    require_output(options->output, kOutputs);
    const Finding finding = explain(*options);
    if (options->output == "json") {
      print_json(finding);
    } else {
      print_console(finding);
    }
    exit_code = fault_missed(finding) ? exit_code_of(CaseStatus::not_run) : finding.what.identical() ? 0 : 1;
  });
}

}  // namespace loopgauge::harness
