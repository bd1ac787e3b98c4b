// SPDX-License-Identifier: Apache-2.0
// `model` and `doctor` as a user calls them, inside this process.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "harness/commands/command.hpp"
#include "harness/floating_point.hpp"
#include "harness/io/data_paths.hpp"
#include "tests/models/checkpoint_folder.hpp"

namespace loopgauge::harness {
namespace {

using test::SmallModel;
using test::TemporaryFolder;
using test::write_file;
namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string output;
};

// Runs `loopgauge ARGUMENTS`; Errors and parse errors pass through.
Outcome loopgauge(std::vector<std::string> arguments) {
  CLI::App app;
  Outcome outcome;
  add_model_command(app, outcome.exit_code);
  add_doctor_command(app, outcome.exit_code);
  std::ostringstream captured;
  std::streambuf* const original = std::cout.rdbuf(captured.rdbuf());
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (...) {
    std::cout.rdbuf(original);
    throw;
  }
  std::cout.rdbuf(original);
  outcome.output = captured.str();
  return outcome;
}

nlohmann::json findings(const Outcome& outcome) { return nlohmann::json::parse(outcome.output).at("findings"); }

// Messages of an area's faults.
std::vector<std::string> faults(const Outcome& outcome, const std::string& area) {
  std::vector<std::string> messages;
  for (const auto& finding : findings(outcome)) {
    if (finding.at("area") == area && finding.at("status") == "fault") messages.push_back(finding.at("message"));
  }
  return messages;
}

class ModelCommandsTest : public ::testing::Test {
 protected:
  std::string path(const char* name) const { return (folder.path() / name).string(); }
  TemporaryFolder folder;
};

TEST_F(ModelCommandsTest, InfoOfTheShippedModel) {
  const Outcome outcome = loopgauge({"model", "info", "--output", "json"});
  EXPECT_EQ(outcome.exit_code, 0);
  const auto info = nlohmann::json::parse(outcome.output);
  EXPECT_EQ(info.at("sha256"), "4598aa90855a14cf492ab3dfa7c86cd45a49b4b37d2eac42ce741adfbbf876c8");
  EXPECT_EQ(info.at("parameters"), 7287553);
  EXPECT_EQ(info.at("weight_bytes"), 14575106);
  EXPECT_EQ(info.at("kv_bytes_per_token"), 4 * 4 * 2 * 2 * 384);
  EXPECT_EQ(info.at("rms_norm_eps").dump(), "1e-06");
}

TEST_F(ModelCommandsTest, SynthThenInfo) {
  EXPECT_EQ(loopgauge({"model",      "synth", "--layers",           "3", "--hidden",      "20",   "--heads", "2",
                       "--head-dim", "6",     "--intermediate",     "9", "--vocab",       "100",  "--loops", "5",
                       "--seed",     "3",     "--outlier-channels", "2", "--shard-bytes", "4000", "-o",      path("m")})
                .exit_code,
            0);
  const auto info = nlohmann::json::parse(loopgauge({"model", "info", "--checkpoint", path("m"), "--output", "json"}).output);
  EXPECT_EQ(info.at("layers"), 3);
  EXPECT_EQ(info.at("hidden"), 20);
  EXPECT_EQ(info.at("heads"), 2);
  EXPECT_EQ(info.at("head_dim"), 6);
  EXPECT_EQ(info.at("intermediate"), 9);
  EXPECT_EQ(info.at("vocab"), 100);
  EXPECT_EQ(info.at("loops"), 5);
  EXPECT_EQ(info.at("bos_token_id"), -1);  // the preset's 256 does not exist in this vocabulary
  EXPECT_THROW(loopgauge({"model", "synth", "-o", path("m")}), FileError);
  EXPECT_EQ(loopgauge({"model", "synth", "--force", "-o", path("m")}).exit_code, 0);
}

TEST_F(ModelCommandsTest, UsageErrors) {
  EXPECT_THROW(loopgauge({"model"}), CLI::ParseError);
  EXPECT_THROW(loopgauge({"model", "synth"}), CLI::ParseError);
  EXPECT_THROW(loopgauge({"model", "synth", "--layers", "0", "-o", path("m")}), CLI::ParseError);
  EXPECT_THROW(loopgauge({"model", "synth", "--heads", "many", "-o", path("m")}), CLI::ParseError);
  EXPECT_THROW(loopgauge({"model", "synth", "--head-dim", "7", "-o", path("m")}), ConfigError);
  EXPECT_THROW(loopgauge({"model", "synth", "--preset", "huge", "-o", path("m")}), ConfigError);
  EXPECT_THROW(loopgauge({"model", "info", "--output", "xml"}), ConfigError);
  EXPECT_THROW(loopgauge({"model", "info", "--checkpoint", path("absent")}), CheckpointError);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_F(ModelCommandsTest, DoctorFindsNothingWrongWithTheShippedModel) {
  const Outcome outcome = loopgauge({"doctor", "--output", "json"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  std::map<std::string, std::string> status;
  for (const auto& finding : findings(outcome)) status[finding.at("area")] = finding.at("status");
  EXPECT_EQ(status.at("checkpoint"), "ok");
  EXPECT_EQ(status.at("configuration"), "ok");
  EXPECT_EQ(status.at("libraries"), "ok");
  EXPECT_EQ(status.at("floating point"), "ok");
  EXPECT_TRUE(status.at("device") == "ok" || status.at("device") == "not available");
}

TEST_F(ModelCommandsTest, DoctorListsEveryFault) {
  SmallModel model;
  model.tensors.erase("model.norm.weight");
  model.tensors["extra.weight"] = {"BF16", {1}, std::string(2, '\0')};
  model.write(folder.path());
  write_file(path("t.h5"), "not HDF5");
  const Outcome outcome = loopgauge(
      {"doctor", "--checkpoint", folder.path().string(), "--trace", path("t.h5"), path("absent.h5"), "--tail", "3", "--output", "json"});
  EXPECT_EQ(outcome.exit_code, 3);
  ASSERT_EQ(faults(outcome, "checkpoint").size(), 2u) << outcome.output;
  EXPECT_NE(faults(outcome, "checkpoint")[0].find("extra.weight"), std::string::npos);
  EXPECT_NE(faults(outcome, "checkpoint")[1].find("model.norm.weight"), std::string::npos);
  ASSERT_EQ(faults(outcome, "configuration").size(), 1u);
  EXPECT_NE(faults(outcome, "configuration")[0].find("--tail"), std::string::npos);
  ASSERT_EQ(faults(outcome, "trace").size(), 2u);
  EXPECT_EQ(nlohmann::json::parse(outcome.output).at("faults"), 5);
}

TEST_F(ModelCommandsTest, DoctorExitCodeOfAFaultyConfiguration) {
  EXPECT_EQ(loopgauge({"doctor", "--window", "100"}).exit_code, 2);
  EXPECT_EQ(loopgauge({"doctor", "--switches", "t1s0q0", "--retention", "10000,10000,1000,2500"}).exit_code, 2);
}

TEST_F(ModelCommandsTest, DoctorComparesConfigurationAndModel) {
  SmallModel model;
  model.config["total_ut_steps"] = 3;
  model.write(folder.path());
  EXPECT_EQ(loopgauge({"doctor", "--checkpoint", folder.path().string(), "--switches", "t1s0q0"}).exit_code, 2);
}

TEST_F(ModelCommandsTest, DoctorComparesTraceAndModel) {
  SmallModel().write(folder.path());  // vocabulary 7, 32 positions
  const std::string trace = (data_directory() / "traces" / "copy.h5").string();
  EXPECT_EQ(loopgauge({"doctor", "--trace", trace}).exit_code, 0);
  const Outcome outcome = loopgauge({"doctor", "--checkpoint", folder.path().string(), "--trace", trace, "--output", "json"});
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_FALSE(faults(outcome, "trace").empty());
}

class DataPathsTest : public ModelCommandsTest {
 protected:
  void TearDown() override { unsetenv("LOOPGAUGE_HOME"); }
};

TEST_F(DataPathsTest, ShippedFilesAreFoundFromTheBuildFolder) {
  unsetenv("LOOPGAUGE_HOME");
  EXPECT_TRUE(fs::equivalent(default_checkpoint(), fs::path(LOOPGAUGE_SOURCE_DIR) / "models" / "ouro-tiny"));
  EXPECT_TRUE(fs::equivalent(data_directory(), fs::path(LOOPGAUGE_SOURCE_DIR) / "data"));
}

TEST_F(DataPathsTest, HomeIsTheOnlyPlaceWhenItIsSet) {
  setenv("LOOPGAUGE_HOME", folder.path().c_str(), 1);
  try {
    default_checkpoint();
    FAIL() << "found a model in an empty folder";
  } catch (const FileError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("tried " + path("models/ouro-tiny/config.json")), std::string::npos) << message;
    EXPECT_EQ(message.find(LOOPGAUGE_SOURCE_DIR), std::string::npos) << message;
    EXPECT_NE(message.find("--checkpoint"), std::string::npos) << message;
  }
  EXPECT_THROW(data_directory(), FileError);
  fs::create_directories(folder.path() / "models" / "ouro-tiny");
  write_file(path("models/ouro-tiny/config.json"), "{}");
  EXPECT_EQ(default_checkpoint(), folder.path() / "models" / "ouro-tiny");
  EXPECT_EQ(loopgauge({"doctor"}).exit_code, 3);  // examined, and found wanting
}

// The probe can fail: another rounding mode is what it is there to find.
TEST(FloatingPoint, FindsAnotherRoundingMode) {
  EXPECT_TRUE(floating_point_faults().empty());
  std::fesetround(FE_UPWARD);
  const std::vector<std::string> faults = floating_point_faults();
  std::fesetround(FE_TONEAREST);
  ASSERT_FALSE(faults.empty());
  EXPECT_NE(std::string::npos, (faults[0] + faults.back()).find("rounding mode"));
}

#ifdef __SSE2__
TEST(FloatingPoint, FindsFlushedSubnormals) {
  const unsigned saved = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(saved | 0x8040);  // flush to zero, denormals are zero
  const std::vector<std::string> faults = floating_point_faults();
  __builtin_ia32_ldmxcsr(saved);
  EXPECT_EQ(faults, (std::vector<std::string>{"subnormal operands are read as zero", "subnormal results are flushed to zero"}));
}
#endif

}  // namespace
}  // namespace loopgauge::harness
