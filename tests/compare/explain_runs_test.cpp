// SPDX-License-Identifier: Apache-2.0
// explain on the shipped model: every fault of the reference is led back to its operation, observing changes nothing, and the smallest case
// still fails.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "harness/compare/key_logits.hpp"
#include "harness/explain/explain_runs.hpp"
#include "harness/explain/minimize.hpp"
#include "harness/io/digest.hpp"
#include "harness/io/set_file.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "harness/replay.hpp"
#include "harness/sweep/operation_conformance.hpp"
#include "models/error.hpp"
#include "tests/harness_cli/process.hpp"
#include "tests/reference/executor/tiny_model.hpp"

namespace loopgauge::harness {
namespace {

std::vector<FaultInfo> faults_of_the_reference() {
  std::vector<FaultInfo> faults;
  for (const FaultInfo& info : planted_faults()) {
    if (info.in_reference) faults.push_back(info);
  }
  return faults;
}

// Processor time of the programs that have ended: what a command takes, whatever else the machine does.
double children_seconds() {
  rusage usage{};
  getrusage(RUSAGE_CHILDREN, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class ExplainMutant : public ::testing::TestWithParam<FaultInfo> {};

// One command, without so much as a case: the shipped model, the first shipped case in which the fault acts.
TEST_P(ExplainMutant, IsLedBackToItsOperationWithinAMinute) {
  const double start = children_seconds();
  const test::ProcessResult result = test::run_program({"explain", "--mutant", std::string(GetParam().name), "--output", "json"});
  const double seconds = children_seconds() - start;
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.out.find("\"operation\": \"" + std::string(GetParam().operation) + "\""), std::string::npos)
      << "expected " << GetParam().operation << "\n"
      << result.out.substr(0, 4000);
  EXPECT_LT(seconds, 60.0);
}

INSTANTIATE_TEST_SUITE_P(All, ExplainMutant, ::testing::ValuesIn(faults_of_the_reference()),
                         [](const auto& fault) { return std::string(fault.param.name); });

Trace two_requests() { return test::trace_of({test::request(0, 130, 20), test::request(1, 65, 5)}); }

struct Subject {
  explicit Subject(const char* switches, Fault fault, Trace of = two_requests()) : trace(std::move(of)) {
    AlgorithmConfig requested;
    apply_switches(requested, switches);
    config = std::make_unique<EffectiveConfig>(EffectiveConfig::resolve(requested, checkpoint.config));
    actual.fault = fault;
  }
  ExplainSubject subject() const { return {checkpoint, trace, *config, expected, actual}; }

  Checkpoint checkpoint = test::tiny_checkpoint();
  Trace trace;
  std::unique_ptr<EffectiveConfig> config;
  RunSide expected, actual;
};

TEST(ExplainRuns, TheOwnBoundTellsAWrongOperationFromInheritedNoise) {
  const Explanation wrong = explain_runs(Subject("t0s0q0", Fault::swapped_norms).subject());
  EXPECT_EQ(wrong.operation.name, "rms_norm");
  EXPECT_EQ(wrong.bound.state, OwnBound::State::beyond) << wrong.bound.text();
  EXPECT_GT(wrong.bound.ratio, 1.0);

  Subject noise("t0s0q0", Fault::none);
  noise.actual.profile = Profile::reordered;
  const Explanation order = explain_runs(noise.subject());
  EXPECT_FALSE(order.identical());
  EXPECT_EQ(order.bound.state, OwnBound::State::within) << order.operation.name << ": " << order.bound.text();
  EXPECT_LE(order.bound.ratio, 1.0);

  const Explanation exact = explain_runs(Subject("t1s0q0", Fault::double_final_norm).subject());
  EXPECT_EQ(exact.operation.name, "inherit");
  EXPECT_EQ(exact.bound.state, OwnBound::State::exact) << exact.bound.text();

  noise.actual.profile = Profile::double_precision;
  EXPECT_EQ(explain_runs(noise.subject()).bound.state, OwnBound::State::not_checked);
}

// Rejected candidates stand where committed rows stand: between a plan that speculates and another the results decide.
TEST(ExplainRuns, RejectedCandidatesAreNoDifference) {
  Subject subject("t0s1q0", Fault::none);
  subject.actual.mode = {.schedule = "block_spec", .draft_depth = 2, .draft_length = 3};
  const Explanation same = explain_runs(subject.subject());
  EXPECT_TRUE(same.identical());
  EXPECT_EQ(same.rows_compared, 0);
  subject.actual.fault = Fault::plane_not_truncated;
  const Explanation other = explain_runs(subject.subject());
  EXPECT_FALSE(other.identical());
  EXPECT_FALSE(other.row);
  EXPECT_TRUE(other.results.first);
  subject.expected.mode = subject.actual.mode;  // both have the same candidates
  EXPECT_TRUE(explain_runs(subject.subject()).row);
}

// Between executors that add in other orders everything differs from the first sum on: the fault is found by the bounds.
TEST(ExplainRuns, AFaultAmongOrderNoiseIsFoundByTheBounds) {
  struct Case {
    const char* switches;
    Fault fault;
    const char* operation;
    int loop;
  };
  for (const Case& c :
       {Case{"t0s0q0", Fault::swapped_norms, "rms_norm", 1}, Case{"t0s0q0", Fault::loop_off_by_one, "attention_dense", 2},
        Case{"t0s1q0", Fault::loop3_reference_at_loop4, "sparse_correction", 4},
        Case{"t1s0q0", Fault::contiguous_causal_mask, "attention_dense", 3}, Case{"t1s0q0", Fault::aliased_hidden_rows, "update_score", 4},
        Case{"t0s0q0", Fault::exit_weighted_logits, "head_argmax", 4}, Case{"t0s0q1", Fault::scale_by_reciprocal, "residual_encode", 1},
        Case{"t0s0q0", Fault::none, "", 0}}) {
    Subject subject(c.switches, c.fault);
    subject.actual.profile = Profile::reordered;
    const Explanation explanation = explain_runs(subject.subject());
    if (c.fault == Fault::none) {
      EXPECT_GT(explanation.operations_checked, 20);
      EXPECT_TRUE(explanation.faulty.empty());
      EXPECT_EQ(explanation.bound.state, OwnBound::State::within);
      continue;
    }
    EXPECT_EQ(explanation.operation.name, c.operation) << to_string(c.fault);
    EXPECT_EQ(explanation.operation.loop, c.loop) << to_string(c.fault);
    EXPECT_EQ(explanation.bound.state, OwnBound::State::beyond) << to_string(c.fault);
  }
}

TEST(ExplainRuns, EqualRunsBlameNothing) {
  Subject same("t1s1q1", Fault::none);
  same.actual.mode = parse_mode("split");
  const Explanation explanation = explain_runs(same.subject());
  EXPECT_TRUE(explanation.identical());
  EXPECT_TRUE(explanation.operation.name.empty());
  EXPECT_GT(explanation.rows_compared, 0);
}

// S-INV-2: whatever explain attaches, the run keeps its bits.
TEST(ExplainRuns, ObserversChangeNoResult) {
  for (const char* switches : {"t0s0q0", "t1s1q1"}) {
    const Subject subject(switches, Fault::none);
    const auto run = [&](Tap* tap) {
      const auto executor = reference::make_reference_executor(subject.checkpoint);
      RunOptions options;
      options.record = RecordGroups::all();
      options.tap = tap;
      return digests(replay_watched(*executor, make_plan(ModeSpec{}, subject.trace, *subject.config), subject.trace, *subject.config,
                                    options, nullptr));
    };
    const auto plain = run(nullptr);
    RowDigests rows;
    EXPECT_EQ(run(&rows), plain) << switches;
    ASSERT_GT(rows.rows(), 0);
    RowComparer comparer(rows);
    EXPECT_EQ(run(&comparer), plain) << switches;
    EXPECT_FALSE(comparer.first());
    RowCapture capture({0, 140, 3, 1, "attention.output", 0}, kEvidenceBytes);
    EXPECT_EQ(run(&capture), plain) << switches;
    EXPECT_TRUE(capture.found());
    OperationTap operations({{0, 140}, {3}});
    EXPECT_EQ(run(&operations), plain) << switches;
    EXPECT_NE(operations.find(0, 140, 3, 1, "attention.output"), nullptr);
    KeyLogitTap keys(subject.trace);
    EXPECT_EQ(run(&keys), plain) << switches;
  }
}

TEST(Minimize, TheSmallestCaseStillPartsAtTheOperation) {
  struct Case {
    const char* switches;
    Fault fault;
    const char* operation;
    int layers, prompt, new_tokens;  // at most
  };
  for (const Case& c :
       {Case{"t1s1q1", Fault::swapped_norms, "rms_norm", 1, 1, 0}, Case{"t1s0q1", Fault::loop_off_by_one, "attention_dense", 1, 1, 1},
        Case{"t1s1q1", Fault::loop3_reference_at_loop4, "sparse_correction", 1, 20, 2},
        Case{"t1s1q1", Fault::double_final_norm, "inherit", 1, 10, 0}, Case{"t1s0q1", Fault::early_flush, "seal_blocks", 1, 128, 64}}) {
    const Subject subject(c.switches, c.fault);
    const MinimizedCase smallest = minimize(subject.subject(), c.operation, 0, {});
    EXPECT_FALSE(smallest.out_of_time) << c.operation;
    ASSERT_EQ(smallest.trace.requests.size(), 1u) << c.operation;
    EXPECT_LE(smallest.layers, c.layers) << c.operation;
    EXPECT_LE(smallest.trace.requests[0].prompt_length(), c.prompt) << c.operation;
    EXPECT_LE(smallest.trace.requests[0].max_new_tokens, c.new_tokens) << c.operation;
    EXPECT_TRUE(trace_faults(smallest.trace).empty()) << c.operation;
    // What it says is true.
    const Checkpoint cut = cut_checkpoint(subject.checkpoint, smallest.layers, smallest.loops);
    const EffectiveConfig config = EffectiveConfig::resolve(smallest.config, cut.config);
    const Explanation again = find_divergence({cut, smallest.trace, config, subject.expected, subject.actual});
    EXPECT_EQ(again.operation.name, c.operation);
  }
}

TEST(Minimize, WritesATraceAndTheCommandThatExplainsIt) {
  const test::TemporaryFolder folder;
  const std::string file = folder / "smallest.h5";
  const test::ProcessResult result =
      test::run_program({"explain", "serial/t1s1q0/seven", "--mutant", "loop_off_by_one", "--minimize", file});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  const std::size_t at = result.out.find("loopgauge explain ");
  ASSERT_NE(at, std::string::npos) << result.out;
  std::vector<std::string> words;
  std::string word;
  for (const char c : result.out.substr(at, result.out.find('\n', at) - at) + " ") {
    if (c != ' ') {
      word += c;
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  words.erase(words.begin());  // the program itself
  const test::ProcessResult again = test::run_program(words);
  EXPECT_EQ(again.exit_code, 1) << again.err;
  // With S on the keys of loop 2 come before its output.
  for (const std::string& out : {result.out, again.out}) EXPECT_NE(out.find("\noperation reference_statistics "), std::string::npos) << out;
  EXPECT_LE(read_trace(file).requests.at(0).prompt_length(), 7);
}

TEST(CutCheckpoint, RefusesMoreThanThereIs) {
  const Checkpoint checkpoint = test::tiny_checkpoint();
  EXPECT_EQ(cut_checkpoint(checkpoint, 0, 0).layers.size(), 2u);
  EXPECT_EQ(cut_checkpoint(checkpoint, 1, 3).config.loops, 3);
  EXPECT_THROW(cut_checkpoint(checkpoint, 3, 0), ConfigError);
  EXPECT_THROW(cut_checkpoint(checkpoint, 0, 5), ConfigError);
}

}  // namespace
}  // namespace loopgauge::harness
