// SPDX-License-Identifier: Apache-2.0
// `loopgauge explain`: where two runs of one case part, or two dumps.
#include <array>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "harness/commands/case_selection.hpp"
#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/compare/explanation.hpp"
#include "harness/compare/significant.hpp"
#include "harness/interrupt.hpp"
#include "harness/io/dump_file.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "harness/replay.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

// The most bytes of one row that are kept as evidence, on either side.
constexpr std::size_t kEvidenceBytes = 64 * 1024;
// Elements shown on either side of the first one that differs.
constexpr std::int64_t kShownElements = 4;

struct ExplainOptions {
  explicit ExplainOptions(CLI::App& command) : settings(command, {SettingGroup::execution}) {}
  SettingOptions settings;
  std::vector<std::string> subjects;  // a case id, or two dump files
  std::string trace_file;
  std::string against_mode, against_executor, against_profile, mutant;
  std::string output = "console";
};

// One of the two runs.
struct Side {
  ModeSpec mode;
  std::string executor;
  Profile profile = Profile::declared;
  Fault fault = Fault::none;

  std::string text() const {
    std::string line = executor + " executor, " + std::string(to_string(profile)) + " profile, " + mode_text(mode) + " plan";
    if (fault != Fault::none) line += ", planted fault " + std::string(to_string(fault));
    return line;
  }
};

struct Finding {
  std::string subject;  // case id or the two files
  std::string expected_side, actual_side;
  std::vector<std::string> notes;
  RecordComparison results;
  std::string decision_margin_text;
  std::optional<Divergence> decision;
  // Of runs only: dumps hold no operation rows.
  std::int64_t rows_compared = 0, rows_different = 0;
  std::optional<DivergentRow> row;
  RowDifference row_difference;
  std::vector<float> expected_row, actual_row;
  bool result_is_first = false;  // the recorded result parts before the first operation row that differs

  bool identical() const { return results.identical() && !row; }
};

// --- from runs -------------------------------------------------------------------------------------------------------------------------

std::pair<Side, Side> sides(const ExplainOptions& options, const Settings& settings, const Case& value) {
  const int given =
      !options.against_mode.empty() + !options.against_executor.empty() + !options.against_profile.empty() + !options.mutant.empty();
  if (given > 1) throw ConfigError("give one of --against-mode, --against-executor, --against-profile, --mutant: they name what differs");
  const Side expected{value.mode, settings.executor, settings.profile, Fault::none};
  Side actual = expected;
  if (!options.mutant.empty()) {
    actual.fault = parse_fault(options.mutant);
  } else if (!options.against_executor.empty()) {
    actual.executor = options.against_executor;
  } else if (!options.against_profile.empty()) {
    actual.profile = parse_profile(options.against_profile);
  } else if (!options.against_mode.empty()) {
    actual.mode = parse_mode(options.against_mode);
  } else if (value.mode != ModeSpec{}) {
    // The case's own plan is in question, serial is what it must equal.
    Side serial = expected;
    serial.mode = parse_mode("serial");
    return {serial, expected};
  } else {
    actual.mode = parse_mode("split");
  }
  if (expected.text() == actual.text()) throw ConfigError("both runs would be the same: " + expected.text());
  return {expected, actual};
}

class Runs {
 public:
  Runs(const Checkpoint& checkpoint, const Trace& trace, const EffectiveConfig& config)
      : checkpoint_(checkpoint), trace_(trace), config_(config) {}

  RunRecord run(const Side& side, Tap& tap) {
    const std::unique_ptr<Executor> executor = make_executor(side.executor, checkpoint_);
    const Plan plan = make_plan(side.mode, trace_, config_);
    RunOptions options;
    options.profile = side.profile;
    options.fault = side.fault;
    options.tap = &tap;
    options.record = RecordGroups::all();
    return replay_watched(*executor, plan, trace_, config_, options, nullptr);
  }

  // Runs until the row is captured and no further.
  void capture(const Side& side, RowCapture& capture) {
    const std::unique_ptr<Executor> executor = make_executor(side.executor, checkpoint_);
    RunOptions options;
    options.profile = side.profile;
    options.fault = side.fault;
    options.tap = &capture;
    options.record = {.logits = false};
    executor->begin(trace_, config_, options);
    for (const Submission& submission : make_plan(side.mode, trace_, config_).submissions) {
      throw_if_interrupted();
      executor->submit(submission);
      if (capture.found()) return;
    }
    executor->finish();  // an executor may show its rows as late as here
  }

 private:
  const Checkpoint& checkpoint_;
  const Trace& trace_;
  const EffectiveConfig& config_;
};

Finding explain_case(const ExplainOptions& options) {
  const Settings settings = options.settings.resolve();
  Case value = parse_case_id(options.subjects.front());
  const Trace trace = read_trace(options.trace_file.empty() ? trace_path(value.trace) : std::filesystem::path(options.trace_file));
  if (value.trace != trace.name)
    throw ConfigError("the case names trace '" + value.trace + "', but the file holds trace '" + trace.name + "'");
  const auto [expected_side, actual_side] = sides(options, settings, value);
  for (const Side* side : {&expected_side, &actual_side}) {
    Case checked = value;
    checked.mode = side->mode;
    require_runnable(checked);
  }
  const Checkpoint checkpoint = load_checkpoint(settings.checkpoint);
  const EffectiveConfig config = EffectiveConfig::resolve(value.config, checkpoint.config);
  if (const auto faults = trace_faults(trace, checkpoint.config); !faults.empty()) {
    throw TraceError("trace " + trace.name + " does not fit the model: " + faults[0]);
  }

  Finding finding;
  finding.subject = case_id(value);
  finding.expected_side = expected_side.text();
  finding.actual_side = actual_side.text();
  Runs runs(checkpoint, trace, config);
  RowDigests digests;
  const RunRecord expected = runs.run(expected_side, digests);
  RowComparer comparer(digests);
  const RunRecord actual = runs.run(actual_side, comparer);
  finding.results = compare_records(expected, actual, config.window());
  finding.decision = first_decision(finding.results);
  if (finding.decision) finding.decision_margin_text = decision_margin(*finding.decision, expected, config.values());
  finding.row = comparer.first();
  finding.rows_compared = comparer.compared();
  finding.rows_different = comparer.different();
  if (!finding.row) return finding;

  const DivergentRow& row = *finding.row;
  RowCapture on_expected(row.id, kEvidenceBytes), on_actual(row.id, kEvidenceBytes);
  if (row.expected_submission >= 0) runs.capture(expected_side, on_expected);
  if (row.actual_submission >= 0) runs.capture(actual_side, on_actual);
  finding.expected_row = on_expected.values();
  finding.actual_row = on_actual.values();
  finding.row_difference = row_difference(row.id.operation, finding.expected_row, finding.actual_row,
                                          std::max(on_expected.width(), on_actual.width()), checkpoint.config);
  const auto& first = finding.results.requests.at(static_cast<std::size_t>(row.id.request));
  finding.result_is_first =
      first && happens_before(*first, row.id, expected.requests[static_cast<std::size_t>(row.id.request)], config.window());
  return finding;
}

// --- from dumps ------------------------------------------------------------------------------------------------------------------------

Finding explain_dumps(const ExplainOptions& options) {
  DumpInfo expected_info, actual_info;
  const RunRecord expected = read_dump(options.subjects[0], expected_info);
  const RunRecord actual = read_dump(options.subjects[1], actual_info);
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
  finding.results = compare_records(expected, actual, expected_info.window);
  finding.decision = first_decision(finding.results);
  AlgorithmConfig config;  // what a margin needs
  config.window = expected_info.window;
  config.exit.threshold = static_cast<float>(expected_info.threshold);
  if (expected_info.exit == "threshold") config.exit.mode = ExitMode::threshold;
  if (expected_info.exit == "delayed") config.exit.mode = ExitMode::delayed;
  if (finding.decision) finding.decision_margin_text = decision_margin(*finding.decision, expected, config);
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
  const DivergentRow& row = *finding.row;
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
  const RowDifference& d = finding.row_difference;
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
  const std::int64_t end = std::min<std::int64_t>(
      static_cast<std::int64_t>(std::min(finding.expected_row.size(), finding.actual_row.size())), d.element + kShownElements + 1);
  for (const auto& [name, values] : {std::pair{"expected", &finding.expected_row}, std::pair{"actual  ", &finding.actual_row}}) {
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
  if (finding.rows_compared > 0) {
    std::cout << "rows      " << finding.rows_compared << " operation rows compared, " << finding.rows_different << " differ\n";
  }
  std::cout << "\n";
  if (finding.row && !finding.result_is_first) {
    std::cout << "first divergence, an operation\n";
    print_row(finding);
    if (finding.results.first) {
      std::cout << "\nfirst recorded result that differs\n";
      print_result(*finding.results.first);
    }
  } else if (finding.results.first) {
    std::cout << "first divergence, a recorded result\n";
    print_result(*finding.results.first);
    if (finding.row) {
      std::cout << "\nfirst operation row that differs, later\n";
      print_row(finding);
    }
  }
  if (finding.decision) {
    std::cout << "\nfirst decision that differs\n";
    print_result(*finding.decision);
    if (!finding.decision_margin_text.empty()) std::cout << "  margin      " << finding.decision_margin_text << "\n";
  }
  std::cout << "\n";
  for (const GroupComparison& group : finding.results.groups) {
    if (group.status == GroupStatus::absent) continue;
    std::cout << "  " << to_string(group.group) << std::string(18 - to_string(group.group).size(), ' ') << to_string(group.status);
    if (group.compared > 0) std::cout << ", " << group.different << " of " << group.compared << " differ";
    std::cout << "\n";
  }
  std::cout << (finding.identical() ? "identical\n" : "different\n");
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
                              {"identical", finding.identical()},
                              {"rows_compared", finding.rows_compared},
                              {"rows_different", finding.rows_different}};
  if (finding.row) {
    const RowId& id = finding.row->id;
    const RowDifference& d = finding.row_difference;
    nlohmann::ordered_json row{{"operation", id.operation},
                               {"clauses", operation_clauses(id.operation)},
                               {"request", id.request},
                               {"loop", id.loop},
                               {"layer", id.layer},
                               {"position", id.position},
                               {"expected_submission", finding.row->expected_submission},
                               {"actual_submission", finding.row->actual_submission},
                               {"width", d.width},
                               {"element", d.element},
                               {"head", d.head},
                               {"expected", d.expected},
                               {"actual", d.actual},
                               {"elements_different", d.different},
                               {"max_abs", d.max_abs},
                               {"expected_row", finding.expected_row},
                               {"actual_row", finding.actual_row}};
    if (d.ulps != kNoUlpDistance) row["ulps"] = d.ulps;
    json["first_row"] = std::move(row);
    json["result_is_first"] = finding.result_is_first;
  }
  if (finding.results.first) json["first_result"] = json_of(*finding.results.first);
  if (finding.decision) {
    json["first_decision"] = json_of(*finding.decision);
    json["first_decision"]["margin"] = finding.decision_margin_text;
  }
  json["groups"] = nlohmann::ordered_json::object();
  for (const GroupComparison& group : finding.results.groups) {
    json["groups"][std::string(to_string(group.group))] = {
        {"status", to_string(group.status)}, {"compared", group.compared}, {"different", group.different}};
  }
  std::cout << json.dump(2) << "\n";
}

Finding explain(const ExplainOptions& options) {
  if (options.subjects.size() == 1) return explain_case(options);
  for (const auto& [flag, value] :
       {std::pair{"--against-mode", &options.against_mode}, std::pair{"--against-executor", &options.against_executor},
        std::pair{"--against-profile", &options.against_profile}, std::pair{"--mutant", &options.mutant},
        std::pair{"--trace", &options.trace_file}}) {
    if (!value->empty()) throw ConfigError(std::string(flag) + " has no effect on two dump files");
  }
  if (const auto flags = options.settings.given_flags(SettingGroup::execution); !flags.empty()) {
    throw ConfigError(flags.front() + " has no effect on two dump files");
  }
  return explain_dumps(options);
}

}  // namespace

void add_explain_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("explain", "Name the first divergence between two runs of a case, or between two dumps");
  const auto options = std::make_shared<ExplainOptions>(*command);
  command->add_option("subject", options->subjects, "A case id, or two dump files (expected, actual)")
      ->type_name("CASE | A.h5 B.h5")
      ->required()
      ->expected(1, 2);
  command->add_option("--trace", options->trace_file, "File of the case's trace, where it is not a shipped one")->type_name("FILE");
  command->add_option("--against-mode", options->against_mode, "Compare with another plan: serial, split, split.p100")->type_name("MODE");
  command->add_option("--against-executor", options->against_executor, "Compare with the other executor: reference, optimized")
      ->type_name("NAME");
  command->add_option("--against-profile", options->against_profile, "Compare with another profile: declared, reordered, double")
      ->type_name("NAME");
  command->add_option("--mutant", options->mutant, "Compare with the same run and a planted fault (loopgauge sweep --list-mutants)")
      ->type_name("NAME");
  command->add_option("--output", options->output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge explain split/t1s0q1:rolling:serial_aligned/edges          its plan against serial\n"
      "  loopgauge explain serial/t1s1q0/seven --mutant swapped_norms\n"
      "  loopgauge explain serial/t0s0q0/seven --against-profile reordered\n"
      "  loopgauge explain serial/t1s1q0/seven --against-executor optimized\n"
      "  loopgauge explain before.h5 after.h5\n"
      "Without --against-* or --mutant a case is compared with its serial plan, and a serial case with the split plan.\n"
      "Exit codes: 0 identical, 1 different, others as everywhere.");
  command->callback([options, &exit_code] {
    constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
    require_output(options->output, kOutputs);
    const Finding finding = explain(*options);
    if (options->output == "json") {
      print_json(finding);
    } else {
      print_console(finding);
    }
    exit_code = finding.identical() ? 0 : 1;
  });
}

}  // namespace loopgauge::harness
