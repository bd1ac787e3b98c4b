// SPDX-License-Identifier: Apache-2.0
// The audit on what the reference really records: nothing to find in a clean run of any setting, the planted faults that a single record
// can show found, and the others found by comparison with a clean record.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <set>

#include "harness/compare/audit.hpp"
#include "harness/compare/record_compare.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::harness {
namespace {

Tensor<Bfloat16Bits> random_weights(std::mt19937& generator, std::vector<std::int64_t> shape, float scale, float mean = 0.0f) {
  Tensor<Bfloat16Bits> tensor(std::move(shape));
  for (auto& bits : tensor.data) {
    // Sum of four uniform numbers: near normal, the same everywhere.
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(generator() >> 8) * 0x1p-24f - 0.5f;
    bits = static_cast<Bfloat16Bits>(std::bit_cast<std::uint32_t>(mean + scale * sum * 1.732f) >> 16);
  }
  return tensor;
}

// Two layers, two heads of 80 channels: V has a group of 64 and one of 16, the projection is wider than the model.
Checkpoint small_checkpoint() {
  Checkpoint checkpoint;
  checkpoint.config = {.layers = 2,
                       .loops = 4,
                       .hidden = 48,
                       .heads = 2,
                       .head_dim = 80,
                       .intermediate = 64,
                       .vocab = 40,
                       .max_positions = 512,
                       .rms_norm_eps = 1e-6f,
                       .rope_theta = 10000.0,
                       .bos_token_id = -1,
                       .eos_token_id = -1};
  std::mt19937 generator(7);
  const ModelConfig& m = checkpoint.config;
  const std::int64_t width = m.projection_width();
  const auto random = [&](std::vector<std::int64_t> shape, float scale, float mean = 0.0f) {
    return random_weights(generator, std::move(shape), scale, mean);
  };
  checkpoint.embed_tokens = random({m.vocab, m.hidden}, 1.0f);
  for (int l = 0; l < m.layers; ++l) {
    LayerWeights layer;
    layer.q_proj = random({width, m.hidden}, 0.2f);
    layer.k_proj = random({width, m.hidden}, 0.2f);
    layer.v_proj = random({width, m.hidden}, 0.15f);
    layer.o_proj = random({m.hidden, width}, 0.08f);
    layer.gate_proj = random({m.intermediate, m.hidden}, 0.15f);
    layer.up_proj = random({m.intermediate, m.hidden}, 0.15f);
    layer.down_proj = random({m.hidden, m.intermediate}, 0.12f);
    layer.input_layernorm = random({m.hidden}, 0.1f, 1.0f);
    layer.input_layernorm_2 = random({m.hidden}, 0.05f, 0.5f);
    layer.post_attention_layernorm = random({m.hidden}, 0.1f, 1.2f);
    layer.post_attention_layernorm_2 = random({m.hidden}, 0.05f, 0.4f);
    checkpoint.layers.push_back(std::move(layer));
  }
  checkpoint.norm = random({m.hidden}, 0.1f, 1.0f);
  checkpoint.early_exit_gate = random({1, m.hidden}, 0.2f);
  checkpoint.early_exit_bias = random({1}, 0.1f, -0.5f);
  checkpoint.lm_head = random({m.vocab, m.hidden}, 0.4f);
  return checkpoint;
}

// Prompts of one token, of a window and a bit, of three windows and one token; forced tokens across two flushes; a free run.
Trace small_trace() {
  Trace trace;
  trace.name = "small";
  trace.vocab_size = 40;
  std::mt19937 generator(11);
  for (const auto& [prompt, forced, free] : {std::tuple{1, 5, 0}, std::tuple{70, 75, 0}, std::tuple{193, 0, 9}}) {
    TraceRequest request;
    request.id = static_cast<int>(trace.requests.size());
    request.max_new_tokens = forced + free;
    for (int i = 0; i < prompt; ++i) request.prompt.push_back(static_cast<std::int32_t>(generator() % 40));
    for (int i = 0; i < forced; ++i) request.forced.push_back(static_cast<std::int32_t>(generator() % 40));
    for (int i = 0; i < request.max_new_tokens; ++i) request.exit_depths.push_back(static_cast<std::uint8_t>(1 + generator() % 4));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

AlgorithmConfig setting(std::string_view switches, EncodingPolicy policy, std::string_view exit, int tail) {
  AlgorithmConfig config;
  apply_switches(config, switches);
  config.window = 64;
  config.kv_residual_quantization.policy = policy;
  config.kv_residual_quantization.tail = tail;
  config.exit = parse_exit_rule(exit);
  return config;
}

RunRecord run(const Checkpoint& checkpoint, const Trace& trace, const EffectiveConfig& config, Profile profile, Fault fault = Fault::none) {
  const auto executor = reference::make_reference_executor(checkpoint);
  RunOptions options;
  options.profile = profile;
  options.fault = fault;
  options.record = RecordGroups::all();
  return replay(*executor, make_plan(ModeSpec{}, trace, config), trace, config, options);
}

std::string texts(const AuditResult& result) {
  std::string all;
  for (const AuditFinding& finding : result.findings) all += finding.text + " (" + std::to_string(finding.count) + " times)\n";
  return all;
}

constexpr AuditOptions kEverything{.max_multiplications = std::int64_t{1} << 62};

class ReferenceAudit : public testing::TestWithParam<Profile> {};

TEST_P(ReferenceAudit, CleanInEverySettingPolicyAndExitRule) {
  const Checkpoint checkpoint = small_checkpoint();
  Trace trace = small_trace();
  TraceRequest sampled = trace.requests.front();
  sampled.id = static_cast<int>(trace.requests.size());
  sampled.forced.clear();
  sampled.temperature = 0.8f;
  sampled.seed = 3;
  trace.requests.push_back(std::move(sampled));
  std::map<std::string_view, std::int64_t> checks;
  for (const std::string_view ts : {"t0s0", "t0s1", "t1s0", "t1s1"}) {
    for (const std::string_view q : {"q0", "q1"}) {
      for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
        if (q == "q0" && policy != EncodingPolicy::rolling) continue;
        // Every exit rule and tail with everything on, the plain ones elsewhere.
        const bool all_on = ts == "t1s1" && q == "q1";
        for (const std::string_view exit : {"full", "trace", "threshold:0.7", "delayed:0.7"}) {
          if (exit != "full" && !all_on) continue;
          for (const int tail : {64, 0, 10}) {
            if (tail != 64 && !(all_on && exit == "trace")) continue;
            const std::string switches = std::string(ts) + std::string(q);
            const EffectiveConfig config = EffectiveConfig::resolve(setting(switches, policy, exit, tail), checkpoint.config);
            const RunRecord record = run(checkpoint, trace, config, GetParam());
            const AuditResult result = audit(record, trace, config, checkpoint, kEverything);
            EXPECT_TRUE(result.clean()) << switches << " " << to_string(policy) << " " << exit << " tail " << tail << "\n" << texts(result);
            for (const AuditCoverage& coverage : result.coverage) checks[coverage.rule] += coverage.checks;
          }
        }
      }
    }
  }
  for (const auto& [rule, count] : checks) {
    const bool of_bfloat16 = rule == "hidden_bfloat16" || rule == "kv_bfloat16";
    if (of_bfloat16 && GetParam() == Profile::double_precision) continue;
    EXPECT_GT(count, 0) << rule;
  }
}

INSTANTIATE_TEST_SUITE_P(Profiles, ReferenceAudit, testing::Values(Profile::declared, Profile::reordered, Profile::double_precision),
                         [](const auto& instance) { return std::string(to_string(instance.param)); });

TEST(ReferenceAuditShipped, CleanOnTheShippedModel) {
  const std::string root = LOOPGAUGE_SOURCE_DIR;
  const Checkpoint checkpoint = load_checkpoint(root + "/models/ouro-tiny");
  const Trace trace = read_trace(root + "/data/traces/edges.h5");
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    AlgorithmConfig requested;
    apply_switches(requested, "t1s1q1");
    requested.kv_residual_quantization.policy = policy;
    requested.window = 64;  // the longest prompt has 129 tokens: more than one window
    const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint.config);
    const AuditResult result = audit(run(checkpoint, trace, config, Profile::declared), trace, config, checkpoint);
    EXPECT_TRUE(result.clean()) << to_string(policy) << "\n" << texts(result);
  }
}

// Which rules of the audit a planted fault breaks; empty: one record looks right by itself, only comparison shows the fault.
const std::map<std::string_view, std::set<std::string>> kFoundByAudit{
    {"aliased_hidden_rows", {"score_aliased"}},
    {"contiguous_causal_mask", {}},
    {"absent_residual_as_code_zero", {"inherited_kv", "decode_chain"}},
    {"unreconstructed_predecessor", {"codec_error"}},
    {"loop3_reference_at_loop4", {}},
    {"swapped_norms", {}},
    {"key_before_rope", {"layer0_kv", "codec_error"}},
    {"loop_off_by_one", {}},
    {"early_flush", {"frontier"}},
    {"double_final_norm", {"inherited_hidden"}},
    {"one_slot_per_layer", {}},
    {"constant_layer_stride", {}},
    {"mask_without_own_token", {}},
    {"rope_frequency_in_bfloat16", {"codec_error", "layer0_kv"}},
    {"rope_of_compact_rows", {"codec_error", "layer0_kv"}},
    {"final_norm_only_at_end", {"final_norm_magnitude"}},
    {"exit_weighted_logits", {"logits_head"}},
    {"reserved_last_token", {"active_top"}},
    {"budget_of_previous_set", {"active_budget"}},
    {"keys_ranked_in_bfloat16", {}},
    {"correction_in_bfloat16", {}},
    {"codes_from_stored_parameters", {}},
    {"scale_by_reciprocal", {}},
    {"reconstruction_in_bfloat16", {"decode_chain"}},
    {"one_ulp_in_residual_add", {}},
};

TEST(ReferenceAuditMutants, AuditFindsWhatOneRecordShowsAndComparisonFindsTheRest) {
  const Checkpoint checkpoint = small_checkpoint();
  const Trace trace = small_trace();
  const EffectiveConfig config = EffectiveConfig::resolve(setting("t1s1q1", EncodingPolicy::rolling, "full", 64), checkpoint.config);
  const RunRecord clean = run(checkpoint, trace, config, Profile::declared);
  for (const FaultInfo& info : planted_faults()) {
    if (!info.in_reference || !info.mode.empty()) continue;
    const auto expected = kFoundByAudit.find(info.name);
    ASSERT_NE(expected, kFoundByAudit.end()) << info.name << " has no row in the table of this test";
    const RunRecord faulty = run(checkpoint, trace, config, Profile::declared, info.fault);
    const RecordComparison comparison = compare_records(clean, faulty, config.window());
    EXPECT_TRUE(comparison.first) << info.name << " changed no bit";
    const AuditResult result = audit(faulty, trace, config, checkpoint, kEverything);
    std::set<std::string> found;
    for (const AuditFinding& finding : result.findings) found.emplace(finding.rule);
    for (const std::string& rule : expected->second)
      EXPECT_TRUE(found.contains(rule)) << info.name << ": " << rule << "\n" << texts(result);
    if (expected->second.empty()) {
      EXPECT_TRUE(found.empty()) << info.name << " is found by audit too: say so in the table\n" << texts(result);
    }
  }
}

}  // namespace
}  // namespace loopgauge::harness
