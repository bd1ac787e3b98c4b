// SPDX-License-Identifier: Apache-2.0
// Case ids are promises: every configuration has one spelling, it reads back as the same configuration, and the spellings listed here
// never change.
#include <gtest/gtest.h>

#include <random>

#include "harness/case.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::string error_of(std::string_view id) {
  try {
    parse_case_id(id);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

void expect_error(std::string_view id, const std::vector<std::string>& parts) {
  const std::string message = error_of(id);
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << id << ": '" << part << "' is not in: " << message;
}

bool same_config(const AlgorithmConfig& a, const AlgorithmConfig& b) {
  const ModelConfig model = [] {
    ModelConfig config;
    config.loops = kLoops;
    return config;
  }();
  return EffectiveConfig::resolve(a, model) == EffectiveConfig::resolve(b, model);
}

TEST(CaseId, PublishedSpellings) {
  Case value;
  value.trace = "text-512";
  EXPECT_EQ(case_id(value), "serial/t0s0q0/text-512");
  value.config.token_sparse_prefill.enabled = true;
  EXPECT_EQ(case_id(value), "serial/t1s0q0/text-512");
  value.config.sparse_decode_attention.enabled = true;
  value.config.kv_residual_quantization.enabled = true;
  EXPECT_EQ(case_id(value), "serial/t1s1q1:rolling:serial_aligned/text-512");

  value.mode.name = "split";
  value.mode.piece_tokens = 100;
  value.config.window = 64;
  value.config.token_sparse_prefill.retention_bp = {10000, 10000, 5000, 2500};
  value.config.sparse_decode_attention.key_fraction_bp = 500;
  value.config.kv_residual_quantization = {true, EncodingPolicy::streaming, EncodingTiming::execution_dependent, FlushRule::eager, 32};
  value.config.exit = {ExitMode::threshold, 0.9f, 2};
  EXPECT_EQ(case_id(value),
            "split.p100/t1s1q1:streaming:execution_dependent:w64:retention10000-10000-5000-2500:keys500:tail32:flush=eager:"
            "exit=threshold0.9:minloops2/text-512");

  value = Case{};
  value.trace = "exit-depths";
  value.config.exit.mode = ExitMode::trace;
  EXPECT_EQ(case_id(value), "serial/t0s0q0:exit=trace/exit-depths");
  value.config.exit = {ExitMode::delayed, 0.25f, 1};
  EXPECT_EQ(case_id(value), "serial/t0s0q0:exit=delayed0.25/exit-depths");
}

TEST(CaseId, ModesOfTheSpecification) {
  for (std::string_view mode : {"serial", "split", "split.p1", "mixed", "wcpb", "async", "graph", "block_spec.d2.k4", "block_spec.d1.k8",
                                "pipeline_spec.d2", "pd", "prefix", "prefix.encoded", "preempt"}) {
    EXPECT_EQ(mode_text(parse_mode(mode)), mode);
  }
  EXPECT_EQ(parse_mode("block_spec.d1.k8").draft_depth, 1);
  EXPECT_EQ(parse_mode("block_spec.d1.k8").draft_length, 8);
  EXPECT_TRUE(parse_mode("prefix.encoded").encoded_prefix);
}

TEST(CaseId, ReadsTheExamplesOfTheGrammar) {
  const Case value = parse_case_id("split/t1s1q1:streaming:serial_aligned/needle-1k");
  EXPECT_EQ(value.mode, ModeSpec{.name = "split"});
  EXPECT_EQ(value.trace, "needle-1k");
  EXPECT_TRUE(value.config.token_sparse_prefill.enabled && value.config.sparse_decode_attention.enabled);
  EXPECT_EQ(value.config.kv_residual_quantization.policy, EncodingPolicy::streaming);
  EXPECT_EQ(value.config.kv_residual_quantization.timing, EncodingTiming::serial_aligned);
  EXPECT_EQ(value.config.window, 256);

  const Case tail = parse_case_id("serial/t1s1q1:streaming:serial_aligned:w64:tail32/kv-700");
  EXPECT_EQ(tail.config.window, 64);
  EXPECT_EQ(tail.config.kv_residual_quantization.tail, 32);
  EXPECT_EQ(parse_case_id("serial/t0s1q0:keys10000/a").config.sparse_decode_attention.key_fraction_bp, 10000);
  EXPECT_EQ(parse_case_id("serial/t0s0q0:exit=threshold0.5/a").config.exit.threshold, 0.5f);
}

TEST(CaseId, RandomConfigurationsComeBackExactly) {
  std::mt19937 generator(7);
  const auto below = [&](int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); };
  const EncodingPolicy policies[] = {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming};
  for (int i = 0; i < 2000; ++i) {
    Case value;
    value.mode.name = below(2) == 0 ? "serial" : "split";
    if (value.mode.name == "split") value.mode.piece_tokens = below(3) * 33;
    value.trace = "t-" + std::to_string(i) + "_x.y";
    AlgorithmConfig& config = value.config;
    config.window = 64 * (1 + below(8));
    if ((config.token_sparse_prefill.enabled = below(2) == 0))
      config.token_sparse_prefill.retention_bp = {10000, 10000, 5000 + below(5000), 1 + below(5000)};
    if ((config.sparse_decode_attention.enabled = below(2) == 0)) config.sparse_decode_attention.key_fraction_bp = 1 + below(10000);
    if ((config.kv_residual_quantization.enabled = below(2) == 0)) {
      config.kv_residual_quantization = {true, policies[below(3)],
                                         below(2) == 0 ? EncodingTiming::serial_aligned : EncodingTiming::execution_dependent,
                                         below(2) == 0 ? FlushRule::committed : FlushRule::eager, below(300)};
    }
    config.exit.mode = static_cast<ExitMode>(below(4));
    if (config.exit.mode == ExitMode::threshold || config.exit.mode == ExitMode::delayed) {
      config.exit.threshold = static_cast<float>(generator()) / 4294967296.0f;
      config.exit.min_loops = 1 + below(4);
    }
    const std::string id = case_id(value);
    const Case back = parse_case_id(id);
    EXPECT_EQ(case_id(back), id);
    EXPECT_EQ(back.mode, value.mode) << id;
    EXPECT_EQ(back.trace, value.trace) << id;
    EXPECT_TRUE(same_config(back.config, value.config)) << id;
    // No character that a shell would expand or split at.
    EXPECT_EQ(id.find_first_of(" \t\n*?[]{}()<>|&;$`\"'\\!#~"), std::string::npos) << id;
  }
}

TEST(CaseId, SettingsOfSwitchedOffGroupsAreNoPartOfACase) {
  Case value;
  value.trace = "a";
  value.config.token_sparse_prefill.retention_bp = {10000, 10000, 1, 1};
  value.config.sparse_decode_attention.key_fraction_bp = 1;
  value.config.kv_residual_quantization.policy = EncodingPolicy::streaming;
  value.config.exit.min_loops = 3;
  EXPECT_EQ(case_id(value), "serial/t0s0q0/a");
  EXPECT_FALSE(same_config(value.config, AlgorithmConfig{}));
  EXPECT_TRUE(same_config(normalized(value.config), AlgorithmConfig{}));
}

TEST(CaseId, ErrorsNameThePartAndTheAcceptedWords) {
  expect_error("", {"''", "<mode>/<settings>/<trace>"});
  expect_error("serial/t0s0q0", {"'serial/t0s0q0'", "<mode>/<settings>/<trace>"});
  expect_error("serial/t0s0q0/a/b", {"<mode>/<settings>/<trace>"});
  expect_error("seriel/t0s0q0/a", {"'seriel'", "serial, split"});
  expect_error("serial.p4/t0s0q0/a", {"'p4'", "takes no parameter"});
  expect_error("split.q4/t0s0q0/a", {"'q4'", "split.p<tokens>"});
  expect_error("split.p/t0s0q0/a", {"'p'", "whole number"});
  expect_error("split.p-4/t0s0q0/a", {"'p-4'", "whole number"});
  expect_error("split.p99999999999/t0s0q0/a", {"p99999999999", "2147483647"});
  expect_error("block_spec/t0s0q0/a", {"write 'block_spec.d2.k4'"});
  expect_error("serial/t2s0q0/a", {"'t2s0q0'"});
  expect_error("serial/t0s0q0:streaming:serial_aligned/a", {"'streaming'"});
  expect_error("serial/t0s0q1/a", {"q1 needs :policy:timing"});
  expect_error("serial/t0s0q1:rolling/a", {"q1 needs :policy:timing"});
  expect_error("serial/t0s0q1:roling:serial_aligned/a", {"'roling'", "fixed_prompt, rolling, streaming"});
  expect_error("serial/t0s0q1:rolling:later/a", {"'later'", "serial_aligned, execution_dependent"});
  expect_error("serial/t0s0q0:x5/a", {"'x5'", "w<tokens>", "tail<tokens>"});
  expect_error("serial/t0s0q0:w/a", {"'w'", "whole number"});
  expect_error("serial/t0s0q0:tail32/a", {"'tail32'", "q1"});
  expect_error("serial/t0s0q0:keys500/a", {"'keys500'", "s1"});
  expect_error("serial/t0s0q0:retention10000-10000-1-1/a", {"t1"});
  expect_error("serial/t1s0q0:retention10000-10000/a", {"four basis points"});
  expect_error("serial/t0s0q0:exit=never/a", {"'exit=never'", "exit=trace"});
  expect_error("serial/t0s0q0:exit=threshold/a", {"threshold between 0 and 1"});
  expect_error("serial/t0s0q0:exit=threshold1.5/a", {"'1.5'"});
  expect_error("serial/t0s0q0:exit=thresholdnan/a", {"'nan'"});
  expect_error("serial/t0s0q0:minloops2/a", {"'minloops2'", "exit=threshold"});
  expect_error("serial/t0s0q0:w64:w128/a", {"'w'", "twice"});
  expect_error("serial/t0s0q0/a b", {"'a b'"});
  expect_error("serial/t0s0q0/", {"''"});
}

TEST(CaseId, OtherSpellingsAreRefusedWithTheRightOne) {
  expect_error("serial/t0s0q0:w256/a", {"write 'serial/t0s0q0/a'"});
  expect_error("serial/t0s0q0:w064/a", {"write 'serial/t0s0q0:w64/a'"});
  expect_error("serial/t0s0q0:exit=threshold.90/a", {"write 'serial/t0s0q0:exit=threshold0.9/a'"});
  expect_error("serial/t0s1q1:rolling:serial_aligned:tail32:keys500/a", {"write 'serial/t0s1q1:rolling:serial_aligned:keys500:tail32/a'"});
}

TEST(CaseId, WhatHasNoSpellingIsAnError) {
  Case value;
  value.trace = "name with spaces";
  EXPECT_THROW(case_id(value), ConfigError);
  value.trace = "a";
  value.mode.name = "unheard_of";
  EXPECT_THROW(case_id(value), ConfigError);
  value.mode.name = "serial";
  value.config.window = -64;
  EXPECT_THROW(case_id(value), ConfigError);
  value.config.window = 256;
  value.config.exit = {ExitMode::threshold, 2.0f, 1};
  EXPECT_THROW(case_id(value), ConfigError);
}

}  // namespace
}  // namespace loopgauge::harness
