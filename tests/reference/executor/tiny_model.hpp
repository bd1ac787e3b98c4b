// SPDX-License-Identifier: Apache-2.0
// A small random model, traces, plans and observers for tests of whole reference runs.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"
#include "models/plan.hpp"
#include "reference/reference_executor.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::test {

// 2 layers, 2 heads of 16, four loops. Head dimension 16 makes every V group shorter than 64.
inline Checkpoint tiny_checkpoint(std::uint64_t seed = 1) {
  Checkpoint c;
  c.config.layers = 2, c.config.loops = 4, c.config.hidden = 48, c.config.heads = 2, c.config.head_dim = 16;
  c.config.intermediate = 40, c.config.vocab = 37, c.config.max_positions = 2048;
  c.config.rms_norm_eps = 1e-6f, c.config.rope_theta = 10000.0;
  c.sha256 = std::string(64, '7');
  Random random(seed);
  const auto fill = [&random](std::vector<std::int64_t> shape, float scale, float offset) {
    Tensor<Bfloat16Bits> tensor(std::move(shape));
    for (Bfloat16Bits& word : tensor.data) word = bf16_bits(plain_bf16(offset + scale * random.uniform()));
    return tensor;
  };
  const auto linear = [&](std::int64_t out, std::int64_t in) { return fill({out, in}, 2.0f / std::sqrt(static_cast<float>(in)), 0.0f); };
  const auto norm = [&] { return fill({48}, 0.3f, 1.0f); };
  c.embed_tokens = fill({37, 48}, 1.5f, 0.0f);
  for (int i = 0; i < 2; ++i) {
    LayerWeights w;
    w.q_proj = linear(32, 48), w.k_proj = linear(32, 48), w.v_proj = linear(32, 48), w.o_proj = linear(48, 32);
    w.gate_proj = linear(40, 48), w.up_proj = linear(40, 48), w.down_proj = linear(48, 40);
    w.input_layernorm = norm(), w.input_layernorm_2 = norm(), w.post_attention_layernorm = norm(), w.post_attention_layernorm_2 = norm();
    c.layers.push_back(std::move(w));
  }
  c.norm = norm();
  c.early_exit_gate = fill({1, 48}, 0.2f, 0.0f);
  c.early_exit_bias = fill({1}, 0.5f, 0.0f);
  c.lm_head = linear(37, 48);
  return c;
}

inline TraceRequest request(int id, int prompt_length, int forced, std::uint64_t seed = 5) {
  Random random(seed + static_cast<std::uint64_t>(id) * 1000);
  TraceRequest r;
  r.id = id;
  for (int i = 0; i < prompt_length; ++i) r.prompt.push_back(random.below(37));
  for (int i = 0; i < forced; ++i) r.forced.push_back(random.below(37));
  r.max_new_tokens = forced;
  return r;
}

inline Trace trace_of(std::vector<TraceRequest> requests) {
  Trace trace;
  trace.name = "tiny";
  trace.vocab_size = 37;
  trace.requests = std::move(requests);
  return trace;
}

inline int forwarded(const TraceRequest& r) {
  return r.teacher_forced() ? static_cast<int>(r.forced.size()) : std::max(0, r.max_new_tokens - 1);
}

inline Plan serial_plan(const Trace& trace, const EffectiveConfig& config) {
  Plan plan{"serial", {}};
  for (int i = 0; i < static_cast<int>(trace.requests.size()); ++i) {
    const TraceRequest& r = trace.requests[static_cast<std::size_t>(i)];
    for (int w = 0; w < window_count(r.prompt_length(), config.window()); ++w) {
      const PositionRange range = window_range(w, r.prompt_length(), config.window());
      plan.submissions.push_back({{{i, RowKind::prefill, range.begin, range.end, 1, config.loops()}}});
    }
    for (int j = 0; j < forwarded(r); ++j) {
      plan.submissions.push_back({{{i, RowKind::decode, r.prompt_length() + j, r.prompt_length() + j + 1, 1, config.loops()}}});
    }
  }
  return plan;
}

// Every row of the tapped outputs.
class Recorder : public Tap {
 public:
  using Key = std::tuple<std::string, int, int, int, int>;  // operation, request, position, loop, layer
  void record(const TapPoint& point, std::span<const float> values) override {
    const Key key{std::string(point.operation), point.request, point.position, point.loop, point.layer};
    EXPECT_FALSE(rows_.contains(key)) << point.operation << " at position " << point.position << ", loop " << point.loop << " twice";
    rows_[key].assign(values.begin(), values.end());
  }
  const std::vector<float>& at(const char* operation, int position, int loop, int layer, int request = 0) const {
    return rows_.at({operation, request, position, loop, layer});
  }
  bool has(const char* operation, int position, int loop, int layer, int request = 0) const {
    return rows_.contains({operation, request, position, loop, layer});
  }
  const std::map<Key, std::vector<float>>& rows() const { return rows_; }

 private:
  std::map<Key, std::vector<float>> rows_;
};

inline AlgorithmConfig switches(const char* text, int window = 64) {
  AlgorithmConfig config;
  apply_switches(config, text);
  config.window = window;
  return config;
}

inline RunOptions with_tap(Tap& tap) {
  RunOptions options;
  options.tap = &tap;
  return options;
}
inline RunOptions with_decisions(Tap& tap, const RunRecord& decisions) {
  RunOptions options = with_tap(tap);
  options.decisions = &decisions;
  return options;
}
inline RunOptions with_fault(Fault fault) {
  RunOptions options;
  options.fault = fault;
  return options;
}
inline RunOptions with_profile(Profile profile) {
  RunOptions options;
  options.profile = profile;
  return options;
}

inline RunRecord run(const Checkpoint& checkpoint, const Trace& trace, const AlgorithmConfig& requested, RunOptions options = {},
                     const Plan* plan = nullptr) {
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint.config);
  const Plan serial = plan == nullptr ? serial_plan(trace, config) : *plan;
  const std::string fault = plan_fault(serial, trace, config);
  EXPECT_EQ(fault, "");
  options.record = RecordGroups::all();
  const auto executor = reference::make_reference_executor(checkpoint);
  return replay(*executor, serial, trace, config, options);
}

// Digest per group of everything a record holds of one request.
inline std::map<std::string, std::string> fingerprint(const RequestRecord& r) {
  std::map<std::string, Sha256> groups;
  const auto add = [&groups](const std::string& name, const auto& values) {
    const std::uint64_t count = values.size();
    groups[name].update(&count, sizeof count);
    if (count > 0) groups[name].update(values.data(), count * sizeof(*values.data()));
  };
  add("tokens", r.tokens), add("logits", r.logits.data), add("gate", r.gate.data), add("exit_depths", r.exit_depths),
      add("frontier", r.encoded_frontier);
  for (int i = 0; i < kLoops; ++i) add("hidden/loop" + std::to_string(i + 1), r.hidden[static_cast<std::size_t>(i)].data);
  for (int i = 0; i < 2; ++i) {
    add("scores/loop" + std::to_string(i + 3), r.scores[static_cast<std::size_t>(i)]);
    add("active/loop" + std::to_string(i + 3), r.active[static_cast<std::size_t>(i)]);
  }
  for (const StepKeys& step : r.keys) {
    for (const auto& layer : step.layers) add("keys", layer.data);
    add("mass", step.mass.data);
  }
  for (const KvPlane& plane : r.kv) add("kv", plane.k.data), add("kv", plane.v.data);
  for (const CodecBlock& block : r.blocks) {
    add("codec", std::vector<int>{block.positions.begin, block.positions.end});
    for (const CodecStream& stream : block.streams) {
      add("codec", stream.rows);
      for (const CodecLayer& layer : stream.layers) {
        add("codec", layer.k_codes.data), add("codec", layer.k_min.data), add("codec", layer.k_scale.data);
        add("codec", layer.v_codes.data), add("codec", layer.v_min.data), add("codec", layer.v_scale.data);
      }
    }
  }
  std::map<std::string, std::string> digests;
  for (auto& [name, sha] : groups) digests[name] = sha.hex_digest().substr(0, 12);
  return digests;
}

inline std::vector<std::string> differing_groups(const RequestRecord& a, const RequestRecord& b) {
  const auto fa = fingerprint(a), fb = fingerprint(b);
  std::set<std::string> names;
  for (const auto& [name, _] : fa) names.insert(name);
  for (const auto& [name, _] : fb) names.insert(name);
  std::vector<std::string> differing;
  for (const std::string& name : names) {
    if (!fa.contains(name) || !fb.contains(name) || fa.at(name) != fb.at(name)) differing.push_back(name);
  }
  return differing;
}

inline const std::vector<std::string> kNone{};

// The [head_dim] row of K or V in a record.
inline std::span<const float> kv_row(const RequestRecord& r, bool key, int layer, int loop, int head, int position) {
  const KvPlane& plane = r.kv.at(static_cast<std::size_t>(layer * kLoops + loop - 1));
  const Tensor<float>& tensor = key ? plane.k : plane.v;
  const std::size_t positions = static_cast<std::size_t>(tensor.extent(1)), head_dim = static_cast<std::size_t>(tensor.extent(2));
  return {tensor.data.data() + (static_cast<std::size_t>(head) * positions + static_cast<std::size_t>(position)) * head_dim, head_dim};
}

inline bool same_kv(const RequestRecord& r, int loop_a, int loop_b, int position) {
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (const bool key : {true, false}) {
        if (!same_bits(kv_row(r, key, layer, loop_a, head, position), kv_row(r, key, layer, loop_b, head, position))) return false;
      }
    }
  }
  return true;
}

inline bool same_hidden(const RequestRecord& r, int loop_a, int loop_b, int position) {
  return same_bits(r.hidden[static_cast<std::size_t>(loop_a - 1)].row(position),
                   r.hidden[static_cast<std::size_t>(loop_b - 1)].row(position));
}

}  // namespace loopgauge::test
