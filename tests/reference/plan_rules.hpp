// SPDX-License-Identifier: Apache-2.0
// What tests of the legality of plans start from: a model of one layer, a trace of prompts, and a plan that is judged for them.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "models/plan.hpp"

namespace loopgauge {

class PlanRulesTest : public testing::Test {
 protected:
  explicit PlanRulesTest(EffectiveConfig config) : config_(std::move(config)) { trace_.vocab_size = 8; }

  static EffectiveConfig resolve_for_small_model(const AlgorithmConfig& requested) {
    ModelConfig model;
    model.layers = 1, model.loops = 4, model.hidden = 8, model.heads = 1, model.head_dim = 8, model.intermediate = 8, model.vocab = 8;
    model.max_positions = 4096;
    return EffectiveConfig::resolve(requested, model);
  }
  void add_request(int prompt, int tokens) {
    TraceRequest request;
    request.id = static_cast<int>(trace_.requests.size());
    request.prompt.assign(static_cast<std::size_t>(prompt), 1);
    request.max_new_tokens = tokens;  // tokens - 1 rows are forwarded
    trace_.requests.push_back(request);
  }

  std::string fault(const Plan& plan) const { return plan_fault(plan, trace_, config_); }
  void expect_fault(const Plan& plan, std::initializer_list<const char*> parts) const {
    const std::string text = fault(plan);
    ASSERT_FALSE(text.empty()) << "accepted";
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << '"' << text << "\" lacks \"" << part << '"';
  }

  Trace trace_;
  EffectiveConfig config_;
};

}  // namespace loopgauge
