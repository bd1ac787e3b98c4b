// SPDX-License-Identifier: Apache-2.0
#include "tests/compare/hand_made_record.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace loopgauge::harness {
namespace {

constexpr int kHidden = 8;
constexpr int kHeadDim = 2;
constexpr int kVocab = 4;

Bfloat16Bits bits(float value) { return static_cast<Bfloat16Bits>(std::bit_cast<std::uint32_t>(value) >> 16); }

// Small integers with both signs, different for every (salt, i).
float small_integer(int salt, int i) { return static_cast<float>((i * 7 + salt * 5 + (i * i) % 11) % 5 - 2); }

Tensor<Bfloat16Bits> integers(std::vector<std::int64_t> shape, int salt) {
  Tensor<Bfloat16Bits> tensor(std::move(shape));
  for (std::size_t i = 0; i < tensor.data.size(); ++i) tensor.data[i] = bits(small_integer(salt, static_cast<int>(i)));
  return tensor;
}

// +1 or -1, by a mixing of all indices, so that rows differ between loops and positions.
float sign(int loop, int position, int i) {
  std::uint32_t x = static_cast<std::uint32_t>(loop * 73856093) ^ static_cast<std::uint32_t>(position * 19349663) ^
                    static_cast<std::uint32_t>(i * 83492791);
  x ^= x >> 13;
  x *= 0x5bd1e995u;
  x ^= x >> 15;
  return (x & 1u) != 0 ? 1.0f : -1.0f;
}

Checkpoint make_checkpoint() {
  Checkpoint checkpoint;
  checkpoint.config.layers = 1;
  checkpoint.config.loops = kLoops;
  checkpoint.config.hidden = kHidden;
  checkpoint.config.heads = 1;
  checkpoint.config.head_dim = kHeadDim;
  checkpoint.config.intermediate = 4;
  checkpoint.config.vocab = kVocab;
  checkpoint.config.max_positions = 128;
  checkpoint.config.rms_norm_eps = 1e-6f;
  checkpoint.config.rope_theta = 10000.0;
  checkpoint.embed_tokens = Tensor<Bfloat16Bits>({kVocab, kHidden});
  for (int token = 0; token < kVocab; ++token) {
    for (int i = 0; i < kHidden; ++i) checkpoint.embed_tokens.row(token)[static_cast<std::size_t>(i)] = bits(sign(0, token, i));
  }
  checkpoint.layers.resize(1);
  checkpoint.layers[0].k_proj = integers({kHeadDim, kHidden}, 1);
  checkpoint.layers[0].v_proj = integers({kHeadDim, kHidden}, 2);
  checkpoint.layers[0].input_layernorm = Tensor<Bfloat16Bits>({kHidden}, bits(1.0f));
  checkpoint.norm = Tensor<Bfloat16Bits>({kHidden}, bits(1.0f));
  checkpoint.early_exit_gate = integers({1, kHidden}, 3);
  checkpoint.early_exit_bias = Tensor<Bfloat16Bits>({1}, bits(0.5f));
  checkpoint.lm_head = integers({kVocab, kHidden}, 4);
  return checkpoint;
}

// Integers below 2^24: every order of additions gives the same FP32 number.
float dot(std::span<const float> x, std::span<const Bfloat16Bits> weight) {
  float sum = 0.0f;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * std::bit_cast<float>(static_cast<std::uint32_t>(weight[i]) << 16);
  return sum;
}

// One group of the codec, written here a third time. FP16 rounding through the compiler's half type.
struct Group {
  float minimum, scale;
  std::vector<std::uint8_t> codes;
};
float half(float value) { return static_cast<float>(static_cast<_Float16>(value)); }
Group encode(const std::vector<float>& values) {
  const float least = *std::min_element(values.begin(), values.end());
  const float greatest = *std::max_element(values.begin(), values.end());
  const float scale = (greatest - least) / 15.0f;
  Group group{half(least) + 0.0f, half(scale), {}};
  for (const float x : values) {
    const float step = group.scale == 0.0f ? 0.0f : std::nearbyint((x - least) / scale);
    group.codes.push_back(static_cast<std::uint8_t>(std::clamp(step, 0.0f, 15.0f)));
  }
  return group;
}

class Builder {
 public:
  Builder(HandMade& made, bool forced) : m_(made), r_(made.record.requests.emplace_back()) {
    r_.prompt_length = kHandPrompt;
    r_.fed = forced ? kHandForced : kHandForced - 1;
    positions_ = r_.prompt_length + r_.fed;
  }

  void build() {
    for (auto& hidden : r_.hidden) hidden = Tensor<float>({positions_, kHidden});
    for (int loop = 1; loop <= kLoops; ++loop) {
      if (loop >= 3 && m_.config.selects_tokens()) select(loop);
      for (int p = 0; p < positions_; ++p) {
        for (int i = 0; i < kHidden; ++i)
          hidden(loop, p)[static_cast<std::size_t>(i)] = ran(loop, p) ? sign(loop, p, i) : hidden(loop - 1, p)[static_cast<std::size_t>(i)];
      }
    }
    r_.gate = Tensor<float>({positions_, kLoops});
    for (int p = 0; p < positions_; ++p) {
      for (int loop = 1; loop <= kLoops; ++loop) {
        r_.gate.row(p)[static_cast<std::size_t>(loop - 1)] = dot(hidden(loop, p), m_.checkpoint.early_exit_gate.row(0)) + 0.5f;
      }
    }
    r_.logits = Tensor<float>({1 + r_.fed, kVocab});
    for (int j = 0; j <= r_.fed; ++j) {
      for (int v = 0; v < kVocab; ++v)
        r_.logits.row(j)[static_cast<std::size_t>(v)] = dot(hidden(kLoops, kHandPrompt - 1 + j), m_.checkpoint.lm_head.row(v));
    }
    tokens();
    r_.kv.resize(kLoops);
    for (auto& plane : r_.kv) plane.k = plane.v = Tensor<float>({1, positions_, kHeadDim});
    for (int loop = 1; loop <= kLoops; ++loop) {
      for (int p = 0; p < positions_; ++p) originals(loop, p);
    }
    r_.encoded_frontier.assign(static_cast<std::size_t>(1 + r_.fed), m_.config.q().enabled ? 64 : 0);
    if (m_.config.q().enabled) encode_block();
    if (m_.config.s().enabled) {
      for (int j = 0; j < r_.fed; ++j) {
        StepKeys step;
        step.layers.emplace_back(std::vector<std::int64_t>{1, 8});  // ceil(71 / 10) = ceil(73 / 10) = 8
        for (int i = 0; i < 8; ++i) step.layers[0].data[static_cast<std::size_t>(i)] = 3 * i;
        step.mass = Tensor<float>({1, 1}, 0.5f);
        r_.keys.push_back(step);
      }
    }
  }

 private:
  std::span<float> hidden(int loop, int p) { return r_.hidden[static_cast<std::size_t>(loop - 1)].row(p); }

  bool ran(int loop, int p) const {
    if (loop < 3 || p >= kHandPrompt || !m_.config.selects_tokens()) return true;
    const auto& active = r_.active[static_cast<std::size_t>(loop - 3)];
    return std::find(active.begin(), active.end(), p) != active.end();
  }

  void select(int loop) {
    auto& scores = r_.scores[static_cast<std::size_t>(loop - 3)];
    auto& active = r_.active[static_cast<std::size_t>(loop - 3)];
    scores.assign(kHandPrompt, std::numeric_limits<float>::quiet_NaN());
    for (const auto& [begin, end] : {std::pair{0, 64}, std::pair{64, kHandPrompt}}) {
      std::vector<int> order;
      for (int p = begin; p < end; ++p) {
        if (loop == 4 && !ran(3, p)) continue;
        order.push_back(p);
        int changed = 0;
        for (int i = 0; i < kHidden; ++i)
          changed += hidden(loop - 1, p)[static_cast<std::size_t>(i)] != hidden(loop - 2, p)[static_cast<std::size_t>(i)];
        // A changed element moves by 2, so the difference has norm sqrt(4 changed) and the row norm sqrt(8).
        scores[static_cast<std::size_t>(p)] = std::sqrt(4.0f * static_cast<float>(changed)) / std::sqrt(8.0f);
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)]; });
      // ceil(64 / 4) = 16, ceil(6 / 4) = 2; ceil(64 / 10) = 7, ceil(6 / 10) = 1.
      const std::size_t budget = loop == 3 ? (begin == 0 ? 16 : 2) : (begin == 0 ? 7 : 1);
      std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(budget));
      active.insert(active.end(), order.begin(), order.begin() + static_cast<std::ptrdiff_t>(budget));
    }
  }

  void tokens() {
    const TraceRequest& request = m_.trace.requests[0];
    for (int j = 0; j < kHandForced; ++j) {
      std::int32_t token = 0;
      if (request.teacher_forced()) {
        token = request.forced[static_cast<std::size_t>(j)];
      } else {
        const auto row = r_.logits.row(j);
        token = static_cast<std::int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
      }
      r_.tokens.push_back(token);
      r_.exit_depths.push_back(j < r_.fed ? kLoops : 0);
    }
  }

  void originals(int loop, int p) {
    const auto at = static_cast<std::size_t>(loop - 1);
    const auto k = r_.kv[at].k.row(0).subspan(static_cast<std::size_t>(p) * kHeadDim, kHeadDim);
    const auto v = r_.kv[at].v.row(0).subspan(static_cast<std::size_t>(p) * kHeadDim, kHeadDim);
    if (!ran(loop, p)) {
      for (std::size_t d = 0; d < kHeadDim; ++d) {
        k[d] = r_.kv[at - 1].k.row(0)[static_cast<std::size_t>(p) * kHeadDim + d];
        v[d] = r_.kv[at - 1].v.row(0)[static_cast<std::size_t>(p) * kHeadDim + d];
      }
      return;
    }
    std::vector<float> x(kHidden);
    for (int i = 0; i < kHidden; ++i) {
      const int token =
          p < kHandPrompt ? m_.trace.requests[0].prompt[static_cast<std::size_t>(p)] : r_.tokens[static_cast<std::size_t>(p - kHandPrompt)];
      x[static_cast<std::size_t>(i)] = loop == 1 ? sign(0, token, i) : hidden(loop - 1, p)[static_cast<std::size_t>(i)];
    }
    const LayerWeights& layer = m_.checkpoint.layers[0];
    const float k0 = dot(x, layer.k_proj.row(0)), k1 = dot(x, layer.k_proj.row(1));
    // One frequency, theta^0 = 1: the angle is the position.
    const float cosine = bfloat16(static_cast<float>(std::cos(static_cast<double>(p))));
    const float sine = bfloat16(static_cast<float>(std::sin(static_cast<double>(p))));
    k[0] = bfloat16(bfloat16(k0 * cosine) + bfloat16(-k1 * sine));
    k[1] = bfloat16(bfloat16(k1 * cosine) + bfloat16(k0 * sine));
    v[0] = dot(x, layer.v_proj.row(0));
    v[1] = dot(x, layer.v_proj.row(1));
  }

  // The block [0, 64): one K group of at most 64 compact rows per channel, one V group of two channels per row.
  void encode_block() {
    CodecBlock& block = r_.blocks.emplace_back();
    block.positions = {0, 64};
    std::vector<float> k_hat(64 * kHeadDim, 0.0f), v_hat(64 * kHeadDim, 0.0f);
    for (int loop = 1; loop <= kLoops; ++loop) {
      CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
      for (int p = 0; p < 64; ++p) {
        if (ran(loop, p)) stream.rows.push_back(p);
      }
      const auto rows = static_cast<std::int64_t>(stream.rows.size());
      CodecLayer& layer = stream.layers.emplace_back();
      layer.k_codes = Tensor<std::uint8_t>({1, rows, kHeadDim});
      layer.v_codes = Tensor<std::uint8_t>({1, rows, kHeadDim});
      layer.k_min = Tensor<float>({1, 1, kHeadDim});
      layer.k_scale = Tensor<float>({1, 1, kHeadDim});
      layer.v_min = Tensor<float>({1, rows, 1});
      layer.v_scale = Tensor<float>({1, rows, 1});
      KvPlane& plane = r_.kv[static_cast<std::size_t>(loop - 1)];
      for (std::size_t d = 0; d < kHeadDim; ++d) {
        std::vector<float> values;
        for (const int p : stream.rows)
          values.push_back(plane.k.data[static_cast<std::size_t>(p) * kHeadDim + d] - k_hat[static_cast<std::size_t>(p) * kHeadDim + d]);
        const Group group = encode(values);
        layer.k_min.data[d] = group.minimum;
        layer.k_scale.data[d] = group.scale;
        for (std::size_t i = 0; i < stream.rows.size(); ++i) {
          layer.k_codes.data[i * kHeadDim + d] = group.codes[i];
          float& hat = k_hat[static_cast<std::size_t>(stream.rows[i]) * kHeadDim + d];
          hat = hat + (static_cast<float>(group.codes[i]) * group.scale + group.minimum);
        }
      }
      for (std::size_t i = 0; i < stream.rows.size(); ++i) {
        const auto at = static_cast<std::size_t>(stream.rows[i]) * kHeadDim;
        const Group group = encode({plane.v.data[at] - v_hat[at], plane.v.data[at + 1] - v_hat[at + 1]});
        layer.v_min.data[i] = group.minimum;
        layer.v_scale.data[i] = group.scale;
        for (std::size_t d = 0; d < kHeadDim; ++d) {
          layer.v_codes.data[i * kHeadDim + d] = group.codes[d];
          v_hat[at + d] = v_hat[at + d] + (static_cast<float>(group.codes[d]) * group.scale + group.minimum);
        }
      }
      // Inactive rows of deeper planes still hold what they copied before encoding: readers now see the chain for all of them.
      std::copy(k_hat.begin(), k_hat.end(), plane.k.data.begin());
      std::copy(v_hat.begin(), v_hat.end(), plane.v.data.begin());
    }
  }

  HandMade& m_;
  RequestRecord& r_;
  int positions_ = 0;
};

HandMade make(const AlgorithmConfig& requested, bool forced) {
  Checkpoint checkpoint = make_checkpoint();
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint.config);
  HandMade made{std::move(checkpoint), {}, config, {}};
  made.trace.name = "hand-made";
  made.trace.vocab_size = kVocab;
  TraceRequest& request = made.trace.requests.emplace_back();
  request.max_new_tokens = kHandForced;
  for (int p = 0; p < kHandPrompt; ++p) request.prompt.push_back((p * 3 + p / 5) % kVocab);
  if (forced) request.forced = {2, 0, 3};
  made.record.mode = "serial";
  made.record.executor = "reference";
  made.record.profile = "declared";
  made.record.config_json = config.canonical_json();
  Builder(made, forced).build();
  return made;
}

}  // namespace

float bfloat16(float value) {
  const auto x = std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>((x + 0x7fffu + ((x >> 16) & 1u)) & 0xffff0000u);
}

HandMade make_hand_made_record() {
  AlgorithmConfig config;
  apply_switches(config, "t1s1q1");
  config.window = 64;
  config.kv_residual_quantization.tail = 0;
  return make(config, true);
}

HandMade make_hand_made_free_run() { return make(AlgorithmConfig{}, false); }

}  // namespace loopgauge::harness
