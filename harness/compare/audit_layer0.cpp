// SPDX-License-Identifier: Apache-2.0
// K and V of layer 0 at loop r follow from the recorded hidden row of loop r - 1 (the embedding at loop 1): norm, projection, RoPE. They
// are recomputed in double precision with the declared rounding points; where a rounding boundary lies within the reach of the order of
// additions, the element may be either neighbour, everywhere else it is known exactly.
#include <cmath>

#include "harness/compare/audit_context.hpp"
#include "harness/compare/bounded.hpp"

namespace loopgauge::harness {
namespace {

std::vector<double> as_double(const Tensor<Bfloat16Bits>& tensor) {
  std::vector<double> values;
  values.reserve(tensor.data.size());
  for (const Bfloat16Bits bits : tensor.data) values.push_back(bfloat16_from_bits(bits));
  return values;
}

class Layer0 {
 public:
  explicit Layer0(const AuditContext& context)
      : model_(context.checkpoint.config),
        weights_(context.checkpoint.layers.front()),
        rounds_(context.rounds_bfloat16),
        k_weights_(as_double(weights_.k_proj)),
        v_weights_(as_double(weights_.v_proj)) {
    const int half = model_.head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const double frequency = std::pow(model_.rope_theta, -2.0 * i / model_.head_dim);
      frequency_.push_back(rounds_ ? static_cast<double>(static_cast<float>(frequency)) : frequency);
    }
  }

  // K and V rows [heads * head_dim] of the token at `position` whose input row is `x`.
  void compute(std::span<const float> x, int position, std::vector<Bounded>& k, std::vector<Bounded>& v) const {
    const std::vector<Bounded> normed = input_norm(x);
    k = projection(normed, k_weights_);
    v = projection(normed, v_weights_);
    rotate(k, position);
  }

 private:
  Bounded round(const Bounded& x) const { return rounds_ ? round_to_bfloat16(x) : x; }

  std::vector<Bounded> input_norm(std::span<const float> x) const {
    const double eps = model_.rms_norm_eps;
    double sum = 0.0;
    for (const float value : x) sum += static_cast<double>(value) * value;
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
    // The sum of squares has at most sum_bound(C) of relative error, division and addition one unit each, the square root halves all
    // of it, root and reciprocal add one unit each.
    const double relative = sum_bound(static_cast<double>(x.size()) + 2) / 2 + 3 * kFloatUnit;
    const double input = rounds_ ? 0.0 : kFloatUnit;  // of the record's rounding of unrounded rows
    std::vector<Bounded> out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double scaled = static_cast<double>(x[i]) * inverse;
      const Bounded y = round({scaled, std::fabs(scaled) * (relative + kFloatUnit + 2 * input)});
      const double weight = bfloat16_from_bits(weights_.input_layernorm.data[i]);
      out[i] = round({y.value * weight, y.error * std::fabs(weight)});
    }
    return out;
  }

  std::vector<Bounded> projection(const std::vector<Bounded>& x, const std::vector<double>& weight) const {
    const std::size_t width = x.size();
    const double relative = sum_bound(static_cast<double>(width));
    std::vector<std::size_t> uncertain;  // few: most elements are known exactly
    for (std::size_t i = 0; i < width; ++i) {
      if (x[i].error != 0.0) uncertain.push_back(i);
    }
    std::vector<Bounded> out(weight.size() / width);
    for (std::size_t o = 0; o < out.size(); ++o) {
      const double* row = weight.data() + o * width;
      double sum = 0.0, magnitude = 0.0, error = 0.0;
      for (std::size_t i = 0; i < width; ++i) {
        const double product = x[i].value * row[i];
        sum += product;
        magnitude += std::fabs(product);
      }
      for (const std::size_t i : uncertain) error += x[i].error * std::fabs(row[i]);
      out[o] = round({sum, error + relative * magnitude});
    }
    return out;
  }

  void rotate(std::vector<Bounded>& k, int position) const {
    const auto half = static_cast<std::size_t>(model_.head_dim / 2);
    for (std::size_t i = 0; i < half; ++i) {
      const double product = position * frequency_[i];
      const double angle = rounds_ ? static_cast<double>(static_cast<float>(product)) : product;
      const double cosine = rounds_ ? round_to_bfloat16(std::cos(angle)) : std::cos(angle);
      const double sine = rounds_ ? round_to_bfloat16(std::sin(angle)) : std::sin(angle);
      for (std::size_t head = 0; head < static_cast<std::size_t>(model_.heads); ++head) {
        Bounded& low = k[head * 2 * half + i];
        Bounded& high = k[head * 2 * half + half + i];
        const Bounded a = low, b = high;
        low = sum(scaled(a, cosine), scaled(b, -sine));
        high = sum(scaled(b, cosine), scaled(a, sine));
      }
    }
  }

  Bounded scaled(const Bounded& x, double factor) const { return round({x.value * factor, x.error * std::fabs(factor)}); }

  // bf16 of an FP32 sum. Known operands give a known result: round_to_bfloat16 rounds to FP32 first, as the operation does.
  Bounded sum(const Bounded& a, const Bounded& b) const {
    const double error = a.error + b.error;
    return round({a.value + b.value, error == 0.0 ? 0.0 : error + kFloatUnit * std::fabs(a.value + b.value)});
  }

  const ModelConfig& model_;
  const LayerWeights& weights_;
  bool rounds_;
  std::vector<double> k_weights_, v_weights_;  // [heads * head_dim, hidden]
  std::vector<double> frequency_;
};

// What one stored group adds to |X_hat[r] - X[r]|: half a step, what FP16 rounding of scale and minimum costs, and FP32 roundings of the
// subtraction, the quotient, the decode and the chain (each within a unit of a number no larger than the sum below).
double reconstruction_bound(double original, double minimum, double scale) {
  const double scale_rounding = std::max(scale * kHalfUnit / (1 - kHalfUnit), kHalfSubnormal);
  const double minimum_rounding = std::max(std::fabs(minimum) * kHalfUnit / (1 - kHalfUnit), kHalfSubnormal);
  const double step = scale + scale_rounding;  // the FP32 scale is at most this
  return step / 2 + 15 * scale_rounding + minimum_rounding + 8 * kFloatUnit * (std::fabs(original) + std::fabs(minimum) + 16 * step);
}

struct StoredRow {
  const CodecLayer* layer = nullptr;  // nullptr: not encoded
  std::size_t row = 0;
};

StoredRow stored_row(const RequestRecord& record, int loop, int position) {
  for (const CodecBlock& block : record.blocks) {
    if (position < block.positions.begin || position >= block.positions.end) continue;
    const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
    const auto at = std::lower_bound(stream.rows.begin(), stream.rows.end(), position);
    if (at == stream.rows.end() || *at != position) return {};
    return {&stream.layers.front(), static_cast<std::size_t>(at - stream.rows.begin())};
  }
  return {};
}

}  // namespace

void audit_layer0(const AuditContext& c) {
  const RequestRecord& record = c.record;
  const ModelConfig& model = c.checkpoint.config;
  if (record.kv.empty() || model.layers == 0) return;
  const Layer0 layer0(c);
  const auto width = static_cast<std::size_t>(model.head_dim);
  const std::size_t parts = (width + kGroupSize - 1) / kGroupSize;
  const std::int64_t cost = std::int64_t{2} * model.hidden * model.projection_width();
  const std::int64_t affordable = std::max<std::int64_t>(1, c.multiplications / (cost * kLoops));
  const int stride = static_cast<int>((c.positions() + affordable - 1) / affordable);
  const int encoded = record.encoded_frontier.back();
  // Rows rewritten under stored parameters have clamped codes: their error has no such bound.
  const bool bounded_codes = c.config.q().flush != FlushRule::eager;
  std::vector<Bounded> k, v;
  std::vector<float> embedding(static_cast<std::size_t>(model.hidden));

  for (int p = 0; p < c.positions(); p += stride) {
    for (int loop = 1; loop <= kLoops; ++loop) {
      if (!c.ran(loop, p)) continue;
      std::span<const float> input;
      if (loop == 1) {
        const std::int32_t token =
            p < c.prompt() ? c.request.prompt[static_cast<std::size_t>(p)] : record.tokens[static_cast<std::size_t>(p - c.prompt())];
        if (token < 0 || token >= model.vocab) continue;
        const auto bits = c.checkpoint.embed_tokens.row(token);
        for (std::size_t i = 0; i < embedding.size(); ++i) embedding[i] = bfloat16_from_bits(bits[i]);
        input = embedding;
      } else {
        const auto& rows = record.hidden[static_cast<std::size_t>(loop - 2)];
        if (rows.empty()) continue;
        input = rows.row(p);
      }
      const KvPlane& plane = record.kv[static_cast<std::size_t>(loop - 1)];
      if (plane.k.empty() || plane.v.empty()) continue;
      const StoredRow stored = p < encoded ? stored_row(record, loop, p) : StoredRow{};
      if (p < encoded && (stored.layer == nullptr || !bounded_codes)) continue;
      layer0.compute(input, p, k, v);

      const auto compare = [&](const std::vector<Bounded>& wanted, const Tensor<float>& tensor, bool keys) {
        for (int head = 0; head < model.heads; ++head) {
          const auto row = tensor.row(head).subspan(static_cast<std::size_t>(p) * width, width);
          for (std::size_t d = 0; d < width; ++d) {
            const Bounded& exact = wanted[static_cast<std::size_t>(head) * width + d];
            double bound = exact.error + (c.rounds_bfloat16 ? 0.0 : kFloatUnit * std::fabs(exact.value));
            if (stored.layer != nullptr) {
              const std::size_t at = keys ? (stored.row / kGroupSize) * width + d : stored.row * parts + d / kGroupSize;
              const float minimum = (keys ? stored.layer->k_min : stored.layer->v_min).row(head)[at];
              const float scale = (keys ? stored.layer->k_scale : stored.layer->v_scale).row(head)[at];
              bound += reconstruction_bound(exact.value, minimum, scale);
            }
            c.log.require(std::fabs(row[d] - exact.value) <= bound, stored.layer != nullptr ? Rule::codec_error : Rule::layer0_kv,
                          c.place(loop, 0, p, head, static_cast<std::int64_t>(d)), exact.value, row[d], bound, keys ? "k" : "v");
          }
        }
      };
      compare(k, plane.k, true);
      compare(v, plane.v, false);
    }
  }
}

}  // namespace loopgauge::harness
