// SPDX-License-Identifier: Apache-2.0
// Case ids are promises: every configuration has one spelling, it reads back as the same configuration, and the spellings listed here
// never change.
#include <gtest/gtest.h>

#include <functional>
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

ModeSpec random_mode(const std::function<int(int)>& below) {
  ModeSpec mode;
  mode.schedule = schedule_names()[static_cast<std::size_t>(below(static_cast<int>(schedule_names().size())))];
  if (mode.schedule == "split") mode.piece_tokens = below(3) * 33;
  if (mode.schedule == "mixed") mode.token_budget = below(2) == 0 ? 256 : below(1000);
  if (mode.schedule == "wcpb") mode.chunk_windows = below(4);
  if (mode.schedule == "block_spec" || mode.schedule == "pipeline_spec") mode.draft_depth = below(5);
  if (mode.schedule == "block_spec") mode.draft_length = below(9);
  if ((mode.prefix = below(2) == 0)) mode.encoded_prefix = below(2) == 0, mode.published_windows = below(2) * below(9);
  mode.pd = below(2) == 0;
  if ((mode.preempt = below(2) == 0)) mode.preempt_loops = below(7);
  mode.async = below(2) == 0;
  mode.graph = below(2) == 0;
  return mode;
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

  value.mode.schedule = "split";
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
  for (std::string_view mode : {"serial",
                                "split",
                                "split.p1",
                                "mixed",
                                "mixed.b64",
                                "wcpb",
                                "wcpb.c3",
                                "async",
                                "graph",
                                "block_spec.d2.k4",
                                "block_spec.d1.k8",
                                "pipeline_spec.d2",
                                "pd",
                                "prefix",
                                "prefix.encoded",
                                "prefix.k4",
                                "prefix.encoded.k4",
                                "preempt",
                                "preempt.p1",
                                "async+graph",
                                "wcpb+prefix+async",
                                "wcpb+prefix+pd",
                                "pd+async+graph",
                                "block_spec.d2.k4+pd",
                                "mixed+prefix+preempt",
                                "split.p20+async",
                                "mixed.b64+prefix.encoded.k4+preempt.p5+async+graph"}) {
    EXPECT_EQ(mode_text(parse_mode(mode)), mode);
  }
  const ModeSpec all = parse_mode("mixed.b64+prefix.encoded.k4+preempt.p5+async+graph");
  EXPECT_EQ(all.schedule, "mixed");
  EXPECT_EQ(all.token_budget, 64);
  EXPECT_TRUE(all.prefix && all.encoded_prefix && all.preempt && all.async && all.graph);
  EXPECT_EQ(all.published_windows, 4);
  EXPECT_EQ(all.preempt_loops, 5);
  const ModeSpec async = parse_mode("async");
  EXPECT_EQ(async.schedule, "serial");
  EXPECT_TRUE(async.async);
  EXPECT_FALSE(async.graph || async.prefix || async.preempt);
  EXPECT_EQ(parse_mode("block_spec.d1.k8").draft_depth, 1);
  EXPECT_EQ(parse_mode("block_spec.d1.k8").draft_length, 8);
  EXPECT_TRUE(parse_mode("prefix.encoded").encoded_prefix);
}

TEST(CaseId, ReadsTheExamplesOfTheGrammar) {
  const Case value = parse_case_id("split/t1s1q1:streaming:serial_aligned/needle-1k");
  EXPECT_EQ(value.mode, ModeSpec{.schedule = "split"});
  EXPECT_EQ(value.trace, "needle-1k");
  EXPECT_TRUE(value.config.token_sparse_prefill.enabled && value.config.sparse_decode_attention.enabled);
  EXPECT_EQ(value.config.kv_residual_quantization.policy, EncodingPolicy::streaming);
  EXPECT_EQ(value.config.kv_residual_quantization.timing, EncodingTiming::serial_aligned);
  EXPECT_EQ(value.config.window, 256);

  const Case tail = parse_case_id("serial/t1s1q1:streaming:serial_aligned:w64:tail32/kv-700");
  EXPECT_EQ(tail.config.window, 64);
  EXPECT_EQ(tail.config.kv_residual_quantization.tail, 32);
  const Case reserved = parse_case_id("serial/t1s1q0:retention10000-10000-5000-2500:reserve=final_prompt_token:keys500/a");
  EXPECT_EQ(reserved.config.token_sparse_prefill.reserve, SlotReservation::final_prompt_token);
  EXPECT_EQ(parse_case_id("serial/t0s1q0:keys10000/a").config.sparse_decode_attention.key_fraction_bp, 10000);
  EXPECT_EQ(parse_case_id("serial/t0s0q0:exit=threshold0.5/a").config.exit.threshold, 0.5f);
}

TEST(CaseId, RandomConfigurationsComeBackExactly) {
  std::mt19937 generator(7);
  const auto below = [&](int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); };
  const EncodingPolicy policies[] = {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming};
  for (int i = 0; i < 2000; ++i) {
    Case value;
    value.mode = random_mode(below);
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
  expect_error("mixed.p4/t0s0q0/a", {"'p4'", "mixed.b<tokens>"});
  expect_error("wcpb.c/t0s0q0/a", {"'c'", "whole number"});
  expect_error("preempt.k4/t0s0q0/a", {"'k4'", "preempt.p<loops>"});
  expect_error("prefix.coded/t0s0q0/a", {"'coded'", "prefix.encoded", "prefix.k<windows>"});
  expect_error("async.f2/t0s0q0/a", {"'f2'", "async takes no parameter"});
  expect_error("wcpb+/t0s0q0/a", {"part ''", "'wcpb+'", "prefix, pd, preempt, async, graph"});
  expect_error("wcpb+asynk/t0s0q0/a", {"'asynk'", "'wcpb+asynk'", "serial, split, mixed, wcpb"});
  expect_error("async+async/t0s0q0/a", {"'async' twice"});
  expect_error("split+wcpb/t0s0q0/a", {"two schedules", "'split' and 'wcpb'"});
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
  expect_error("serial/t0s1q0:reserve=final_prompt_token/a", {"'reserve=final_prompt_token'", "t1"});
  expect_error("serial/t1s0q0:reserve=last/a", {"slot reservation 'last'", "none, final_prompt_token"});
  expect_error("serial/t1s0q0:reserve=none/a", {"write 'serial/t1s0q0/a'"});
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
  expect_error("serial+async/t0s0q0/a", {"write 'async'"});
  expect_error("async+serial/t0s0q0/a", {"write 'async'"});
  expect_error("graph+async/t0s0q0/a", {"write 'async+graph'"});
  expect_error("prefix+wcpb/t0s0q0/a", {"write 'wcpb+prefix'"});
  expect_error("mixed+preempt+prefix/t0s0q0/a", {"write 'mixed+prefix+preempt'"});
  expect_error("mixed.b256/t0s0q0/a", {"write 'mixed'"});
  expect_error("wcpb.c1/t0s0q0/a", {"write 'wcpb'"});
  expect_error("preempt.p3/t0s0q0/a", {"write 'preempt'"});
  expect_error("prefix.k4.encoded/t0s0q0/a", {"write 'prefix.encoded.k4'"});
  expect_error("prefix.k0/t0s0q0/a", {"write 'prefix'"});
  expect_error("serial/t0s0q0:w064/a", {"write 'serial/t0s0q0:w64/a'"});
  expect_error("serial/t0s0q0:exit=threshold.90/a", {"write 'serial/t0s0q0:exit=threshold0.9/a'"});
  expect_error("serial/t0s0q0:exit=threshold-0/a", {"write 'serial/t0s0q0:exit=threshold0/a'"});
  expect_error("serial/t0s1q1:rolling:serial_aligned:tail32:keys500/a", {"write 'serial/t0s1q1:rolling:serial_aligned:keys500:tail32/a'"});
}

TEST(CaseId, WhatHasNoSpellingIsAnError) {
  Case value;
  value.trace = "name with spaces";
  EXPECT_THROW(case_id(value), ConfigError);
  value.trace = "a";
  value.mode.schedule = "unheard_of";
  EXPECT_THROW(case_id(value), ConfigError);
  value.mode.schedule = "serial";
  value.config.window = -64;
  EXPECT_THROW(case_id(value), ConfigError);
  value.config.window = 256;
  value.config.exit = {ExitMode::threshold, 2.0f, 1};
  EXPECT_THROW(case_id(value), ConfigError);
}

}  // namespace
}  // namespace loopgauge::harness
