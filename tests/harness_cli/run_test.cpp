// SPDX-License-Identifier: Apache-2.0
// `loopgauge run` through the real program: what it prints, what it dumps, and that both are reproducible.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "harness/case.hpp"
#include "harness/io/digest.hpp"
#include "harness/io/dump_file.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

using test::run_program;
using test::TemporaryFolder;

const std::string kSeven = std::string(LOOPGAUGE_SOURCE_DIR) + "/data/traces/seven.h5";

nlohmann::json run_json(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "run");
  arguments.insert(arguments.end(), {"--output", "json"});
  const auto result = run_program(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return nlohmann::json::parse(result.out);
}

TEST(Run, ADumpHoldsWhatASecondRunDigests) {
  const TemporaryFolder folder;
  const std::string id = "serial/t1s1q1:rolling:serial_aligned/seven";
  const std::string dump = (folder / "seven.h5").string();
  ASSERT_EQ(run_program({"run", id, "--dump", dump}).exit_code, 0);

  DumpInfo info;
  const auto dumped = digests(read_dump(dump, info));
  const nlohmann::json second = run_json({id, "--digest"});
  EXPECT_EQ(second.at("digests").at("version"), std::string(kDigestVersion));
  EXPECT_EQ(second.at("digests").at("sha256"), nlohmann::json(dumped));

  EXPECT_EQ(info.case_id, id);
  EXPECT_EQ(info.mode, "serial");
  EXPECT_EQ(info.switches, "t1s1q1");
  EXPECT_EQ(info.policy, "rolling");
  EXPECT_EQ(info.executor, "reference");
  EXPECT_EQ(info.profile, "declared");
  EXPECT_EQ(info.model_sha256, second.at("model_sha256"));
}

TEST(Run, ForcedDecisionsAreTakenFromTheFile) {
  const TemporaryFolder folder;
  const std::string own = (folder / "own.h5").string(), other = (folder / "other.h5").string(), forced = (folder / "forced.h5").string();
  const std::string id = "serial/t1s1q0/seven";
  ASSERT_EQ(run_program({"run", id, "--dump", own}).exit_code, 0);
  // A run's own decisions change nothing but its name.
  const auto repeated = run_json({id, "--decisions", own, "--digest"});
  EXPECT_EQ(repeated.at("digests"), run_json({id, "--digest"}).at("digests"));
  EXPECT_EQ(repeated.at("executor"), "reference+forced_decisions");
  EXPECT_EQ(repeated.at("forced_decisions").at("token_sets"), 2);
  EXPECT_EQ(repeated.at("forced_decisions").at("key_steps"), 8);

  // Other decisions are taken, whatever the scores say.
  DumpInfo info;
  RunRecord record = read_dump(own, info);
  auto& active = record.requests[0].active;
  ASSERT_EQ(active[0].size(), 2u);
  ASSERT_EQ(active[1].size(), 1u);
  active[0] = active[0] == std::vector<std::int32_t>{4, 5} ? std::vector<std::int32_t>{3, 6} : std::vector<std::int32_t>{4, 5};
  active[1] = {active[0][0]};
  const EffectiveConfig config =
      EffectiveConfig::resolve(parse_case_id(id).config, load_model_config(LOOPGAUGE_SOURCE_DIR "/models/ouro-tiny"));
  write_dump(other, record, config, {});
  ASSERT_EQ(run_program({"run", id, "--decisions", other, "--dump", forced}).exit_code, 0);
  EXPECT_EQ(read_dump(forced, info).requests[0].active, active);
  EXPECT_EQ(info.executor, "reference+forced_decisions");
}

// A dump of a run that speculated is of version 2: it has rounds beside the same decisions.
TEST(Run, DecisionsOfASpeculatingRunAreTaken) {
  const TemporaryFolder folder;
  const std::string dump = (folder / "speculated.h5").string();
  for (const char* settings : {"t1s1q0", "t1s1q1:rolling:serial_aligned:w64"}) {
    const std::string rest = std::string("/") + settings + "/seven";
    ASSERT_EQ(run_program({"run", "block_spec.d2.k4" + rest, "--dump", dump}).exit_code, 0);
    DumpInfo info;
    ASSERT_FALSE(read_dump(dump, info).requests[0].rounds.empty());
    const auto plain = run_json({"serial" + rest, "--digest"});
    for (const char* mode : {"serial", "pd", "block_spec.d1.k2"}) {
      const auto forced = run_json({mode + rest, "--decisions", dump, "--digest"});
      EXPECT_EQ(forced.at("digests"), plain.at("digests")) << mode << rest;
      EXPECT_EQ(forced.at("forced_decisions").at("key_steps"), 8) << mode << rest;
    }
  }
}

TEST(Run, DecisionsThatTheConfigurationCannotHaveMadeAreRefused) {
  const TemporaryFolder folder;
  const std::string own = (folder / "own.h5").string();
  ASSERT_EQ(run_program({"run", "serial/t1s1q0/seven", "--dump", own}).exit_code, 0);
  const auto refusal = [&](const std::string& id, int exit_code, const std::string& sentence) {
    const auto result = run_program({"run", id, "--decisions", own});
    EXPECT_EQ(result.exit_code, exit_code) << id;
    EXPECT_NE(result.err.find(sentence), std::string::npos) << result.err;
  };
  refusal("serial/t0s0q0/seven", 2, "nothing to force from");
  refusal("serial/t1s0q0/one", 3, "holds decisions for trace seven, the run replays one");
  refusal("serial/t1s0q0:retention10000-10000-5000-1000/seven", 3, "selects 2 tokens in window 0, this configuration selects 4");
  refusal("serial/t0s1q0:keys5000/seven", 3, "expected [3, 4]");
}

TEST(Run, AMissingTraceIsNamedWithWhereToLook) {
  const auto result = run_program({"run", "serial/t0s0q0/no-such-trace"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("trace 'no-such-trace' is not a shipped one"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("loopgauge list --set full"), std::string::npos) << result.err;
}

TEST(Run, ADumpThatCannotBeWrittenIsRefusedBeforeTheRun) {
  const TemporaryFolder folder;
  const auto result = run_program({"run", "serial/t0s0q0/seven", "--dump", folder.path().string()});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("--dump " + folder.path().string() + ": is not a regular file"), std::string::npos) << result.err;
  // A folder that takes no files is met before the model is even looked for; so it is by the other commands that work before they write.
  const std::string unwritable = "/proc/out.h5", id = "serial/t0s0q0/seven", model = "no-such-model";
  for (const std::vector<std::string>& words : {std::vector<std::string>{"run", id, "--checkpoint", model, "--dump", unwritable},
                                               {"explain", id, "--checkpoint", model, "--mutant", "swapped_norms", "--minimize", unwritable},
                                               {"report", "merge", "no-such-a.h5", "no-such-b.h5", "-o", unwritable}}) {
    const auto refused = run_program(words);
    EXPECT_EQ(refused.exit_code, 3) << words[0];
    EXPECT_NE(refused.err.find("out.h5: its folder does not accept new files"), std::string::npos) << words[0] << ": " << refused.err;
  }
  // A name that the file system cannot have is an input like any other.
  const std::string no_name(300, 'x');
  for (const std::vector<std::string>& words : {std::vector<std::string>{"run", id, "--dump", no_name}, {"run", "serial/t0s0q0/" + no_name}, {"list", "--set", no_name}}) {
    const auto refused = run_program(words);
    EXPECT_EQ(refused.exit_code, 3) << refused.err;
    EXPECT_NE(refused.err.find("File name too long"), std::string::npos) << refused.err;
  }
}

TEST(Run, SplitAndSerialPlansGiveTheSameBits) {
  for (const char* settings : {"t0s0q0", "t1s1q0", "t1s1q1:streaming:serial_aligned:w64"}) {
    const auto serial = run_json({std::string("serial/") + settings + "/boundary-short", "--digest"});
    const auto split = run_json({std::string("split.p20/") + settings + "/boundary-short", "--digest"});
    EXPECT_EQ(serial.at("digests"), split.at("digests")) << settings;
    EXPECT_EQ(split.at("mode"), "split.p20");
  }
}

TEST(Run, EveryModeGivesTheSameBitsAndSaysWhatItDid) {
  const std::string settings = "/t1s1q1:streaming:serial_aligned:w64/shared-prefix";
  const auto serial = run_json({"serial" + settings, "--digest"});
  EXPECT_EQ(serial.at("counters").at("most_in_flight"), 1);
  for (const char* mode : {"wcpb+prefix.encoded+async", "mixed+prefix.encoded.k1+preempt.p5", "split+graph"}) {
    const auto run = run_json({mode + settings, "--digest"});
    EXPECT_EQ(run.at("digests"), serial.at("digests")) << mode;
    EXPECT_EQ(run.at("mode"), mode);
    EXPECT_EQ(run.at("held_at_drain"), "") << mode;
    const auto& counters = run.at("counters");
    EXPECT_EQ(counters.at("reused_windows").get<int>() > 0, std::string(mode).find("prefix") != std::string::npos) << mode;
    EXPECT_EQ(counters.at("preemptions").get<int>() > 0, std::string(mode).find("preempt") != std::string::npos) << mode;
    EXPECT_EQ(counters.at("most_in_flight"), std::string(mode).find("async") != std::string::npos ? 2 : 1) << mode;
  }
}

TEST(Run, APlannedFailureCostsWorkAndNothingElse) {
  const auto whole = run_json({"wcpb/t1s0q0:w64/interrupted", "--digest"});
  for (const char* failure : {"allocation@3", "launch@4"}) {
    const auto run = run_json({"wcpb/t1s0q0:w64/interrupted", "--digest", "--fail", failure});
    EXPECT_EQ(run.at("digests"), whole.at("digests")) << failure;
    EXPECT_EQ(run.at("counters").at("failures"), 1) << failure;
    EXPECT_GT(run.at("counters").at("recomputed_rows").get<int>(), 0) << failure;
  }
}

TEST(Run, SaysThatAPlannedFailureDidNotHappen) {
  // Submissions 33 to 36 of this plan are past the end that the request reads late.
  const auto result = test::run_program({"run", "async/t0s0q0:w64/late-end", "--fail", "launch@35"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("launch@35 did not happen"), std::string::npos) << result.out;
}

TEST(Run, ExplainFindsNothingWhereAModeDoesOtherWorkForTheSameResults) {
  for (const char* id : {"prefix/t0s0q0:w64/shared-prefix", "async/t0s0q0:w64/late-end", "mixed/t1s0q0:w64/cancelled"}) {
    const auto result = run_program({"explain", id});
    EXPECT_EQ(result.exit_code, 0) << id << "\n" << result.out << result.err;
  }
}

TEST(Run, ExplainSaysThatAPlantedFaultWasNotFound) {
  // One row of a prompt of one token: nothing is sealed, early or late.
  const auto result = run_program({"explain", "serial/t1s1q1:rolling:serial_aligned/one", "--mutant", "early_flush"});
  EXPECT_EQ(result.exit_code, 5) << result.err;
  EXPECT_NE(result.out.find("fault not found"), std::string::npos) << result.out;
}

TEST(Run, ACancelledRequestIsNamedAndDumped) {
  const TemporaryFolder folder;
  const std::string dump = (folder / "cancelled.h5").string();
  const auto result = run_program({"run", "async/t0s0q0:w64/cancelled", "--dump", dump});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("forwarded, cancelled\n"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("held at the end: nothing"), std::string::npos) << result.out;
  DumpInfo info;
  const RunRecord record = read_dump(dump, info);
  ASSERT_EQ(record.requests.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(record.requests[i].outcome, i < 3 ? RequestOutcome::cancelled : RequestOutcome::completed) << i;
    EXPECT_EQ(record.requests[i].executions.size(),
              static_cast<std::size_t>(record.requests[i].prompt_length + record.requests[i].fed) * kLoops)
        << i;
  }
}

TEST(Run, ProfilesAndSwitchesChangeTheResult) {
  const auto base = run_json({"serial/t0s0q0/seven", "--digest"});
  const auto logits = [](const nlohmann::json& run) { return run.at("digests").at("sha256").at("logits"); };
  EXPECT_NE(logits(base), logits(run_json({"serial/t0s0q0/seven", "--digest", "--profile", "double"})));
  EXPECT_NE(logits(base), logits(run_json({"serial/t1s0q0/seven", "--digest"})));
  EXPECT_EQ(logits(base), logits(run_json({"--trace", kSeven, "--digest"})));
}

TEST(Run, FlagsAndCaseIdAreTheSameCase) {
  const auto by_flags =
      run_json({"--trace", kSeven, "--mode", "split", "--switches", "t1s0q1", "--policy", "streaming", "--window", "64", "--tail", "0"});
  EXPECT_EQ(by_flags.at("case"), "split/t1s0q1:streaming:serial_aligned:w64:tail0/seven");
  const auto by_id = run_json({"split/t1s0q1:streaming:serial_aligned:w64:tail0/seven"});
  EXPECT_EQ(by_flags.at("config"), by_id.at("config"));
  EXPECT_EQ(by_flags.at("requests"), by_id.at("requests"));
}

TEST(Run, TheConfigurationFileReachesTheRunAndFlagsWin) {
  const TemporaryFolder folder;
  test::write_file(folder / "a.toml", "window = 128\n[kv_residual_quantization]\nenabled = true\npolicy = \"fixed_prompt\"\n");
  const std::string config = (folder / "a.toml").string();
  EXPECT_EQ(run_json({"--trace", kSeven, "--config", config}).at("case"), "serial/t0s0q1:fixed_prompt:serial_aligned:w128/seven");
  EXPECT_EQ(run_json({"--trace", kSeven, "--config", config, "--window", "64"}).at("case"),
            "serial/t0s0q1:fixed_prompt:serial_aligned:w64/seven");
}

TEST(Run, ForcedTokensAreReportedWithTheirText) {
  const auto run = run_json({"serial/t0s0q0/seven"});
  const auto& request = run.at("requests").at(0);
  EXPECT_EQ(request.at("prompt_length"), 7);
  EXPECT_TRUE(request.at("forced").get<bool>());
  EXPECT_EQ(request.at("fed"), request.at("tokens").size());
  EXPECT_FALSE(request.at("text").get<std::string>().empty());
  const auto console = run_program({"run", "serial/t0s0q0/seven"});
  EXPECT_NE(console.out.find("case      serial/t0s0q0/seven\n"), std::string::npos);
  EXPECT_NE(console.out.find("text     " + request.at("text").get<std::string>()), std::string::npos) << console.out;
  EXPECT_EQ(console.err, "");  // progress is for terminals
}

TEST(Run, ExitDepthsOfTheTraceAreFollowed) {
  const auto run = run_json({"serial/t0s0q0:exit=trace/exit-depths"});
  std::set<int> depths;
  for (int depth : run.at("requests").at(0).at("exit_depths")) depths.insert(depth);
  EXPECT_EQ(depths, (std::set<int>{1, 2, 3, 4}));
}

TEST(Run, TheEnumeratedThresholdEndsTokensAtSeveralLoops) {
  const auto run = run_json({"serial/t0s0q0:exit=threshold0.5/exit-threshold"});
  std::set<int> depths;
  for (int depth : run.at("requests").at(0).at("exit_depths")) depths.insert(depth);
  EXPECT_GE(depths.size(), 2u);
}

TEST(Run, DumpOnlyKeepsTheChosenGroups) {
  const TemporaryFolder folder;
  const std::string dump = (folder / "gate.h5").string();
  // The case id may follow the list.
  ASSERT_EQ(run_program({"run", "--dump", dump, "--dump-only", "gate,logits", "serial/t0s0q0/seven"}).exit_code, 0);
  DumpInfo info;
  const RunRecord record = read_dump(dump, info);
  EXPECT_FALSE(record.requests.at(0).gate.empty());
  EXPECT_FALSE(record.requests.at(0).logits.empty());
  EXPECT_TRUE(record.requests.at(0).hidden[0].empty());
  EXPECT_TRUE(record.requests.at(0).kv.empty());
}

TEST(Run, AMutantIsMarkedAndDiffers) {
  const auto clean = run_json({"serial/t0s0q0/seven", "--digest"});
  const auto mutant = run_json({"serial/t0s0q0/seven", "--digest", "--mutant", "swapped_norms"});
  EXPECT_EQ(mutant.at("executor"), "reference+swapped_norms");
  EXPECT_NE(clean.at("digests").at("sha256").at("all"), mutant.at("digests").at("sha256").at("all"));
}

}  // namespace
}  // namespace loopgauge::harness
