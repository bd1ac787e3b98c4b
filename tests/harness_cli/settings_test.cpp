// SPDX-License-Identifier: Apache-2.0
// Precedence and strictness of flags and configuration file, without a model.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "harness/commands/common_options.hpp"
#include "models/error.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

Settings resolve(std::vector<std::string> arguments, const std::string& config_content = "") {
  const test::TemporaryFolder folder;
  if (!config_content.empty()) {
    test::write_file(folder / "a.toml", config_content);
    arguments.insert(arguments.begin(), {"--config", (folder / "a.toml").string()});
  }
  CLI::App app;
  const SettingOptions options(app, {SettingGroup::mode, SettingGroup::algorithm});
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes a vector from its end
  app.parse(arguments);
  return options.resolve();
}

std::string error_of(const std::vector<std::string>& arguments, const std::string& config_content = "") {
  try {
    resolve(arguments, config_content);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Settings, DefaultsAreTheSpecification) {
  const Settings settings = resolve({});
  EXPECT_EQ(settings.mode, ModeSpec{});
  EXPECT_EQ(settings_text(settings.config), "t0s0q0");
  EXPECT_EQ(settings.config.window, 256);
}

TEST(Settings, EveryFlagReachesItsField) {
  const Settings settings = resolve({"--mode",         "split",
                                     "--piece-tokens", "100",
                                     "--switches",     "t1s1q1",
                                     "--window",       "128",
                                     "--retention",    "10000,10000,5000,2500",
                                     "--key-fraction", "500",
                                     "--policy",       "streaming",
                                     "--timing",       "execution_dependent",
                                     "--flush",        "eager",
                                     "--tail",         "32",
                                     "--exit",         "threshold:0.9",
                                     "--min-loops",    "2"});
  EXPECT_EQ(mode_text(settings.mode) + "/" + settings_text(settings.config),
            "split.p100/t1s1q1:streaming:execution_dependent:w128:retention10000-10000-5000-2500:keys500:tail32:flush=eager:"
            "exit=threshold0.9:minloops2");
  const Settings speculative = resolve({"--mode", "block_spec", "--draft-depth", "1", "--draft-length", "8"});
  EXPECT_EQ(mode_text(speculative.mode), "block_spec.d1.k8");
  EXPECT_EQ(mode_text(resolve({"--mode", "split.p64"}).mode), "split.p64");
}

constexpr const char* kEverything =
    "mode = \"split\"\npiece_tokens = 100\nwindow = 128\nexit = \"threshold:0.9\"\nmin_loops = 2\n"
    "[token_sparse_prefill]\nenabled = true\nretention_bp = [10000, 10000, 5000, 2500]\n"
    "[sparse_decode_attention]\nenabled = true\nkey_fraction_bp = 500\n"
    "[kv_residual_quantization]\nenabled = true\npolicy = \"streaming\"\ntiming = \"execution_dependent\"\nflush = \"eager\"\ntail = 32\n";

TEST(Settings, TheFileSaysWhatFlagsSay) {
  const Settings settings = resolve({}, kEverything);
  EXPECT_EQ(mode_text(settings.mode) + "/" + settings_text(settings.config),
            "split.p100/t1s1q1:streaming:execution_dependent:w128:retention10000-10000-5000-2500:keys500:tail32:flush=eager:"
            "exit=threshold0.9:minloops2");
}

TEST(Settings, FlagsWinOverTheFile) {
  EXPECT_EQ(resolve({"--window", "64"}, kEverything).config.window, 64);
  EXPECT_EQ(switches_text(resolve({"--switches", "t0s1q0"}, kEverything).config), "t0s1q0");
  EXPECT_EQ(resolve({"--policy", "rolling"}, kEverything).config.kv_residual_quantization.policy, EncodingPolicy::rolling);
  EXPECT_EQ(resolve({"--exit", "full"}, kEverything).config.exit.mode, ExitMode::full);
  EXPECT_EQ(mode_text(resolve({"--mode", "serial"}, kEverything).mode), "serial");
}

TEST(Settings, EachGroupStandsAlone) {
  EXPECT_EQ(switches_text(resolve({}, "[token_sparse_prefill]\nenabled = true\n").config), "t1s0q0");
  EXPECT_EQ(switches_text(resolve({}, "[sparse_decode_attention]\nenabled = true\n").config), "t0s1q0");
  EXPECT_EQ(switches_text(resolve({}, "[kv_residual_quantization]\nenabled = true\n").config), "t0s0q1");
  // A section may stay in the file while its switch is off.
  EXPECT_EQ(settings_text(resolve({}, "[kv_residual_quantization]\nenabled = false\ntail = 1\n").config), "t0s0q0");
}

TEST(Settings, FlagsWithoutEffectAreErrors) {
  EXPECT_EQ(error_of({"--retention", "10000,10000,1,1"}), "--retention has no effect without t1 (token_sparse_prefill)");
  EXPECT_EQ(error_of({"--reserve", "final_prompt_token"}), "--reserve has no effect without t1 (token_sparse_prefill)");
  EXPECT_EQ(error_of({"--key-fraction", "1"}), "--key-fraction has no effect without s1 (sparse_decode_attention)");
  for (const char* flag : {"--policy=rolling", "--timing=serial_aligned", "--flush=eager", "--tail=1"}) {
    EXPECT_NE(error_of({flag}).find("has no effect without q1 (kv_residual_quantization)"), std::string::npos) << flag;
  }
  EXPECT_NE(error_of({"--min-loops", "2"}).find("without exit threshold or delayed"), std::string::npos);
  EXPECT_NE(error_of({"--piece-tokens", "2"}).find("without mode split"), std::string::npos);
  EXPECT_NE(error_of({"--draft-depth", "2"}).find("without mode block_spec"), std::string::npos);
  EXPECT_NE(error_of({"--mode", "pipeline_spec", "--draft-length", "2"}).find("without mode block_spec"), std::string::npos);
}

TEST(Settings, AModeNamedWithoutItsParametersTakesThemFromElsewhere) {
  EXPECT_EQ(mode_text(resolve({"--mode", "block_spec"}).mode), "block_spec.d2.k4");
  EXPECT_EQ(mode_text(resolve({"--mode", "block_spec+pd"}).mode), "block_spec.d2.k4+pd");
  EXPECT_EQ(mode_text(resolve({"--mode", "pipeline_spec+prefix+async", "--draft-depth", "1"}).mode), "pipeline_spec.d1+prefix+async");
  EXPECT_EQ(mode_text(resolve({"--mode", "split+async", "--piece-tokens", "9"}).mode), "split.p9+async");
  EXPECT_EQ(mode_text(resolve({"--mode", "block_spec+graph"}, "draft_depth = 1\ndraft_length = 3\n").mode), "block_spec.d1.k3+graph");
  EXPECT_EQ(mode_text(resolve({"--mode", "split"}, kEverything).mode), "split.p100");
  EXPECT_NE(error_of({"--mode", "block_spec+serial"}).find("names two schedules"), std::string::npos);
  EXPECT_NE(error_of({"--mode", "block_spec.d1"}).find("write 'block_spec.d1.k4'"), std::string::npos);
}

TEST(Settings, AModesParameterIsGivenOnce) {
  const std::string again = ": mode 'block_spec.d1.k2' gives it already; give it once";
  EXPECT_EQ(error_of({"--mode", "block_spec.d1.k2", "--draft-length", "3"}), "--draft-length" + again);
  EXPECT_EQ(error_of({"--mode", "block_spec.d1.k2", "--draft-depth", "1"}), "--draft-depth" + again);
  EXPECT_EQ(error_of({"--mode", "split.p64+async", "--piece-tokens", "9"}), "--piece-tokens: mode 'split.p64+async' gives it already; give it once");
  EXPECT_NE(error_of({}, "draft_length = 3\nmode = block_spec.d1.k2\n").find("a.toml:1: draft_length" + again), std::string::npos);
  // Flags win over the file, whichever of the two gives the mode.
  EXPECT_EQ(mode_text(resolve({"--draft-length", "3"}, "mode = block_spec.d1.k2\n").mode), "block_spec.d1.k3");
  EXPECT_EQ(mode_text(resolve({"--mode", "block_spec.d1.k2"}, "draft_length = 3\n").mode), "block_spec.d1.k2");
}

TEST(Settings, AParameterOfAnotherModeInTheFileHasNoEffect) {
  EXPECT_EQ(resolve({"--mode", "serial"}, kEverything).mode, ModeSpec{});
  EXPECT_NE(error_of({"--mode", "serial"}, "piece_tokens = many\n").find("a.toml:1: piece_tokens: 'many' is not a whole number"), std::string::npos);
}

TEST(Settings, ErrorsNameFlagOrLine) {
  EXPECT_EQ(error_of({"--window", "wide"}), "--window: 'wide' is not a whole number");
  EXPECT_EQ(error_of({"--window", "2147483648"}), "--window: '2147483648' does not fit 32 bits");
  EXPECT_NE(error_of({"--switches", "tsq"}).find("--switches: "), std::string::npos);
  EXPECT_NE(error_of({"--switches", "t1s0q0", "--retention", "10000,1"}).find("--retention: four basis points"), std::string::npos);
  EXPECT_NE(error_of({"--switches", "t1s0q0", "--retention", "1,2,3,4,5"}).find("--retention: "), std::string::npos);
  EXPECT_NE(error_of({"--exit", "sometimes"}).find("full, threshold, delayed, trace"), std::string::npos);
  EXPECT_NE(error_of({"--mode", "seriel"}).find("serial, split, mixed"), std::string::npos);
  EXPECT_NE(error_of({}, "window = wide\n").find("a.toml:1: window: 'wide' is not a whole number"), std::string::npos);
  EXPECT_NE(error_of({}, "[token_sparse_prefill]\nenabled = yes\n").find("'yes' is neither true nor false"), std::string::npos);
}

TEST(Settings, UnknownKeysAreErrorsThatListTheKnownOnes) {
  const std::string message = error_of({}, "window = 64\nwindwo = 64\n");
  EXPECT_NE(message.find("a.toml:2: unknown key 'windwo'"), std::string::npos) << message;
  EXPECT_NE(message.find("kv_residual_quantization.policy"), std::string::npos) << message;
  EXPECT_NE(error_of({}, "[token_sparse_prefil]\nenabled = true\n").find("unknown key 'token_sparse_prefil.enabled'"), std::string::npos);
  // `checkpoint` belongs to a group that these options do not have.
  EXPECT_NE(error_of({}, "checkpoint = \"x\"\n").find("unknown key 'checkpoint'"), std::string::npos);
}

TEST(Settings, AFlagGivenTwiceIsAUsageError) { EXPECT_THROW(resolve({"--window", "64", "--window", "128"}), CLI::ParseError); }

TEST(Settings, OutputWords) {
  constexpr std::array<std::string_view, 2> kWords{"console", "json"};
  EXPECT_NO_THROW(require_output("json", kWords));
  EXPECT_THROW(require_output("xml", kWords), ConfigError);
}

}  // namespace
}  // namespace loopgauge::harness
