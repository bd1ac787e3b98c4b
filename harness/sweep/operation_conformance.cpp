// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/operation_conformance.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>

#include "harness/sweep/sampled_products.hpp"
#include "models/error.hpp"
#include "models/spec/attention.hpp"
#include "models/spec/op_list.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/attention.hpp"
#include "reference/ops/codec.hpp"
#include "reference/ops/exit_gate.hpp"
#include "reference/ops/rms_norm.hpp"
#include "reference/ops/rope.hpp"
#include "reference/ops/sparse_decode.hpp"
#include "reference/ops/swiglu.hpp"
#include "reference/ops/token_selection.hpp"
#include "reference/weights.hpp"

namespace loopgauge::harness {

namespace {

using reference::Declared;
using Matrix = reference::Matrix<float>;
using Vector = reference::Vector<float>;
using Row = std::vector<float>;

// A sample of this many rows of the shipped model takes well under a second; large models get fewer, so that what is kept stays below
// this many bytes.
constexpr std::size_t kSampledRows = 16;
constexpr double kSampledBytes = 256e6;

void thin(std::vector<int>& values, std::size_t count) {
  if (values.size() <= count) return;
  std::vector<int> kept;
  for (std::size_t i = 0; i < count; ++i) kept.push_back(values[count == 1 ? values.size() - 1 : i * (values.size() - 1) / (count - 1)]);
  values = std::move(kept);
}

Matrix as_matrix(const Row& row) { return Eigen::Map<const Matrix>(row.data(), 1, static_cast<std::ptrdiff_t>(row.size())); }
Row as_row(const Matrix& matrix) { return Row(matrix.data(), matrix.data() + matrix.size()); }

// What one output is compared by; per element where it depends on it.
struct Bounds {
  std::vector<double> magnitude;  // empty: 0
  double terms = 0.0;
  double input_error = 0.0;
  double declared_relative = 0.0;
};

// Collects the errors of all operations.
class Errors {
 public:
  explicit Errors(bool declared_order) : declared_order_(declared_order) {}

  // `output` of the registry, seen under the name `tap`.
  void compare(std::string_view operation, std::string_view output, std::string_view tap, int loop, const DistancePlace& place,
               std::span<const float> expected, std::span<const float> actual, const Bounds& bounds = {}) {
    const spec::OpSpec* op = spec::find_op(operation);
    const auto* spec =
        op == nullptr ? nullptr : std::find_if(op->outputs.begin(), op->outputs.end(), [&](const auto& o) { return o.name == output; });
    if (spec == nullptr || spec == op->outputs.end())
      throw InternalError("the registry has no " + std::string(operation) + "." + std::string(output));
    const bool exact = spec->tolerance.kind == spec::ToleranceKind::bit_exact;
    const spec::Tolerance& tolerance = exact && !declared_order_ ? spec->relaxed : spec->tolerance;
    OperationErrors& errors = errors_[{op, loop}];
    errors.operation = op->name;
    errors.loop = loop;
    if (expected.size() != actual.size())
      throw InternalError(std::string(tap) + ": " + std::to_string(actual.size()) + " values, expected " + std::to_string(expected.size()));
    std::int64_t different = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const float e = expected[i], a = actual[i];
      if (std::bit_cast<std::uint32_t>(e) == std::bit_cast<std::uint32_t>(a)) continue;
      ++different;
      spec::Element element{.expected = e,
                            .magnitude = bounds.magnitude.empty() ? 0.0 : bounds.magnitude[i],
                            .terms = bounds.terms,
                            .input_error = bounds.input_error,
                            .declared_relative = bounds.declared_relative};
      double ratio = spec::error_ratio(tolerance, element, a);
      // Signed zeros and payloads are bits too.
      if (ratio == 0.0 && tolerance.kind == spec::ToleranceKind::bit_exact && !std::isnan(e))
        ratio = std::numeric_limits<double>::infinity();
      const double absolute = std::fabs(double{a} - double{e});
      if (!std::isfinite(e) || !std::isfinite(a))
        ++errors.non_finite;
      else {
        errors.max_absolute = std::fmax(errors.max_absolute, absolute);
        errors.square_sum += absolute * absolute;
        // Of integers, codes and positions, the distance itself.
        const bool integer = spec->format == spec::Format::int4 || spec->format == spec::Format::int32;
        const double spacing = integer ? 0.0 : spec::ulp(std::fmax(std::fabs(double{e}), std::fabs(double{a})), spec->format);
        errors.ulps.push_back(spacing > 0.0 ? absolute / spacing : absolute);
      }
      if (ratio > errors.largest_ratio || errors.element < 0) {
        errors.largest_ratio = ratio;
        errors.where = place;
        errors.tap = tap;
        errors.element = static_cast<std::int64_t>(i);
        errors.expected = e;
        errors.actual = a;
      }
    }
    errors.elements += std::ssize(expected);
    errors.different += different;
    Share& share = shares_[{op, loop, &*spec}];
    share.different += different;
    share.elements += std::ssize(expected);
    share.allowed = tolerance.kind == spec::ToleranceKind::bit_exact ? 1.0 : tolerance.differing_share;  // bits are judged by the ratio
  }

  std::vector<OperationErrors> take() {
    std::vector<OperationErrors> result;
    for (const auto& [key, share] : shares_) {
      // One element is granted, so that a single one of a few does not decide.
      double& largest = errors_.at({std::get<0>(key), std::get<1>(key)}).largest_share;
      largest = std::fmax(largest, static_cast<double>(std::max<std::int64_t>(0, share.different - 1)) /
                                       (share.allowed * static_cast<double>(share.elements)));
    }
    for (const spec::OpSpec* op : spec::op_list()) {
      for (auto& [key, errors] : errors_) {
        if (key.first == op) result.push_back(std::move(errors));
      }
    }
    return result;
  }

 private:
  struct Share {
    std::int64_t different = 0, elements = 0;
    double allowed = 1.0;
  };

  bool declared_order_;
  std::map<std::pair<const spec::OpSpec*, int>, OperationErrors> errors_;
  std::map<std::tuple<const spec::OpSpec*, int, const spec::OutputSpec*>, Share> shares_;
};

}  // namespace

struct OperationReference::Parts {
  const ModelConfig& model;
  reference::Weights<float> weights;
};

namespace {

// The operations of one row, in order.
class RowCheck {
 public:
  RowCheck(const ModelConfig& model, const reference::Weights<float>& weights, const reference::RopeTable<Declared>& rope,
           SampledProducts& products, const OperationTap& tap, const RunRecord& record, const TraceRequest& request,
           const EffectiveConfig& config, int index, int position, Errors& errors)
      : model_(model),
        weights_(weights),
        rope_(rope),
        products_(products),
        tap_(tap),
        record_(record.requests.at(static_cast<std::size_t>(index))),
        request_(request),
        config_(config),
        request_index_(index),
        position_(position),
        errors_(errors),
        scale_(reference::attention_scale<Declared>(model.head_dim)) {}

  // Asks for the products that run() compares with.
  void add_products() {
    for (int loop = 1; loop <= model_.loops; ++loop) {
      for (int layer = 0; layer < model_.layers; ++layer) {
        const auto& w = weights_.layers[static_cast<std::size_t>(layer)];
        const auto add = [&](std::string_view tap, std::initializer_list<const reference::WeightView*> all) {
          const Row* x = seen(loop, layer, tap);
          for (const auto* weight : all) {
            if (x != nullptr) products_.add(*x, *weight, reference::OutputRounding::bf16);
          }
        };
        add("rms_norm.input_layernorm", {&w.q_proj, &w.k_proj, &w.v_proj});
        add("attention.output", {&w.o_proj});
        add("rms_norm.post_attention_layernorm", {&w.gate_proj, &w.up_proj});
        add("swiglu", {&w.down_proj});
      }
    }
    if (const std::span<const float> x = hidden_of_logits(); !x.empty()) products_.add(x, weights_.lm_head, reference::OutputRounding::fp32);
  }

  void run() {
    check_embedding();
    for (int loop = 1; loop <= model_.loops; ++loop) {
      const Row* x = loop == 1 ? seen(0, -1, "embedding") : seen(loop - 1, -1, "rms_norm.norm");
      for (int layer = 0; layer < model_.layers && x != nullptr; ++layer) x = check_layer(loop, layer, *x);
      if (x != nullptr) check_norm(loop, -1, "rms_norm.norm", *x, weights_.norm);
      check_score(loop);
      check_gate(loop);
    }
    check_logits();
  }

 private:
  const Row* seen(int loop, int layer, std::string_view operation) const {
    return tap_.find(request_index_, position_, loop, layer, operation);
  }
  DistancePlace place(int layer = -1, int head = -1) const { return {request_index_, position_, layer, head}; }
  bool decode() const { return position_ >= record_.prompt_length; }

  void check_embedding() {
    const Row* actual = seen(0, -1, "embedding");
    if (actual == nullptr) return;
    const auto step = static_cast<std::size_t>(position_ - record_.prompt_length);
    const std::int32_t token = decode() ? record_.tokens.at(step) : request_.prompt.at(static_cast<std::size_t>(position_));
    Row expected;
    for (int i = 0; i < model_.hidden; ++i) expected.push_back(reference::bfloat16_to_float(weights_.embed_tokens(token, i)));
    errors_.compare("embedding", "y", "embedding", -1, place(), expected, *actual);
  }

  // Output row of the norm as the candidate has it.
  const Row* check_norm(int loop, int layer, std::string_view tap, const Row& x, const Vector& weight) {
    const Row* actual = seen(loop, layer, tap);
    if (actual == nullptr) return nullptr;
    Matrix expected;
    reference::rms_norm<Declared>(as_matrix(x), weight, model_.rms_norm_eps, expected);
    errors_.compare("rms_norm", "y", tap, loop, place(layer), as_row(expected), *actual);
    return actual;
  }

  const Row* check_linear(int loop, int layer, std::string_view tap, const Row* x, const reference::WeightView& weight) {
    const Row* actual = seen(loop, layer, tap);
    if (x == nullptr || actual == nullptr) return actual;
    const SampledProducts::Product expected = products_.of(*x, weight);
    errors_.compare("linear", "y", tap, loop, place(layer), expected.y, *actual,
                    {expected.magnitude, static_cast<double>(weight.cols()), 0.0, 0.0});
    return actual;
  }

  void check_rope(int loop, int layer, std::string_view tap, const Row* x) {
    const Row* actual = seen(loop, layer, tap);
    if (x == nullptr || actual == nullptr) return;
    Matrix expected = as_matrix(*x);
    const int positions[] = {position_};
    reference::rope<Declared>(expected, positions, model_.head_dim, rope_);
    errors_.compare("rope", "y", tap, loop, place(layer), as_row(expected), *actual);
  }

  const Row* check_residual(int loop, int layer, std::string_view tap, const Row* x, const Row* addend) {
    const Row* actual = seen(loop, layer, tap);
    if (x == nullptr || addend == nullptr || actual == nullptr) return actual;
    Row expected;
    for (std::size_t i = 0; i < x->size(); ++i) expected.push_back(reference::round_to_bfloat16((*x)[i] + (*addend)[i]));
    errors_.compare("residual_add", "y", tap, loop, place(layer), expected, *actual);
    return actual;
  }

  // Residual stream after the layer; null when the row did not execute the loop.
  const Row* check_layer(int loop, int layer, const Row& x) {
    const auto& w = weights_.layers[static_cast<std::size_t>(layer)];
    const Row* normed = check_norm(loop, layer, "rms_norm.input_layernorm", x, w.input_layernorm);
    if (normed == nullptr) return nullptr;
    const Row* q = check_linear(loop, layer, "linear.q_proj", normed, w.q_proj);
    const Row* k = check_linear(loop, layer, "linear.k_proj", normed, w.k_proj);
    check_linear(loop, layer, "linear.v_proj", normed, w.v_proj);
    check_rope(loop, layer, "rope.q", q);
    check_rope(loop, layer, "rope.k", k);
    check_attention(loop, layer);
    const Row* projected = check_linear(loop, layer, "linear.o_proj", seen(loop, layer, "attention.output"), w.o_proj);
    if (projected == nullptr) return nullptr;
    const Row* added = check_residual(loop, layer, "residual_add.attention", &x,
                                      check_norm(loop, layer, "rms_norm.input_layernorm_2", *projected, w.input_layernorm_2));
    if (added == nullptr) return nullptr;
    const Row* mlp = check_norm(loop, layer, "rms_norm.post_attention_layernorm", *added, w.post_attention_layernorm);
    const Row* gate = check_linear(loop, layer, "linear.gate_proj", mlp, w.gate_proj);
    const Row* up = check_linear(loop, layer, "linear.up_proj", mlp, w.up_proj);
    const Row* activated = seen(loop, layer, "swiglu");
    if (gate != nullptr && up != nullptr && activated != nullptr) {
      Matrix expected;
      reference::swiglu<Declared>(as_matrix(*gate), as_matrix(*up), expected);
      errors_.compare("swiglu", "y", "swiglu", loop, place(layer), as_row(expected), *activated);
    }
    const Row* down = check_linear(loop, layer, "linear.down_proj", activated, w.down_proj);
    if (down == nullptr) return nullptr;
    return check_residual(loop, layer, "residual_add.mlp", added,
                          check_norm(loop, layer, "rms_norm.post_attention_layernorm_2", *down, w.post_attention_layernorm_2));
  }

  // The record holds K/V as this row read it: what is encoded at the end is what the row saw encoded.
  bool planes_as_read() const {
    if (record_.kv.empty()) return false;
    if (!config_.q().enabled) return true;
    const int final_frontier = record_.encoded_frontier.empty() ? 0 : record_.encoded_frontier.back();
    int visible = 0;
    if (decode())
      visible = record_.encoded_frontier.at(static_cast<std::size_t>(position_ - record_.prompt_length));
    else if (config_.q().policy == EncodingPolicy::streaming)
      visible = position_ / config_.window() * config_.window();
    // Causal: what lies beyond the row does not matter.
    return std::min(visible, position_ + 1) == std::min(final_frontier, position_ + 1);
  }

  struct HeadAttention {
    std::vector<float> logits, probabilities, output;  // output not rounded
    double score_error = 0.0;
    std::vector<double> magnitude;  // sum of p |V|
  };

  reference::PlaneView<float> view(int loop, int layer, int head, bool key) const {
    const KvPlane& plane = record_.kv[static_cast<std::size_t>(layer * kLoops + loop - 1)];
    return {(key ? plane.k : plane.v).row(head).data(), nullptr, 0, model_.head_dim};
  }

  double score_error(const float* q, const reference::PlaneView<float>& keys, std::span<const int> positions) const {
    double largest = 0.0;
    for (const int j : positions) {
      double magnitude = 0.0;
      for (int d = 0; d < model_.head_dim; ++d) magnitude += std::fabs(double{q[d]} * keys.row(j)[d]);
      spec::Element element;
      element.magnitude = magnitude * scale_;
      element.terms = model_.head_dim;
      element.declared_relative = spec::kTwoBf16Parts;
      largest = std::fmax(largest, spec::bound(spec::kScoreTolerance, element, 0.0));
    }
    return largest;
  }

  HeadAttention dense(int loop, int layer, int head, const Row& q) const {
    HeadAttention result;
    const int n = position_ + 1;
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    result.logits.resize(static_cast<std::size_t>(n));
    result.probabilities.resize(static_cast<std::size_t>(n));
    result.output.resize(dim);
    const auto keys = view(loop, layer, head, true), values = view(loop, layer, head, false);
    const float* query = q.data() + static_cast<std::size_t>(head) * dim;
    reference::attention_dense<Declared>(query, keys, values, n, scale_, result.logits.data(), result.probabilities.data(),
                                         result.output.data());
    std::vector<int> positions(static_cast<std::size_t>(n));
    for (int j = 0; j < n; ++j) positions[static_cast<std::size_t>(j)] = j;
    result.score_error = score_error(query, keys, positions);
    result.magnitude.assign(dim, 0.0);
    for (int j = 0; j < n; ++j) {
      for (std::size_t d = 0; d < dim; ++d)
        result.magnitude[d] += result.probabilities[static_cast<std::size_t>(j)] * std::fabs(double{values.row(j)[d]});
    }
    return result;
  }

  void check_attention(int loop, int layer) {
    const Row *q = seen(loop, layer, "rope.q"), *actual = seen(loop, layer, "attention.output");
    if (q == nullptr || actual == nullptr || !planes_as_read()) return;
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    const bool sparse = config_.s().enabled && decode();
    for (int head = 0; head < model_.heads; ++head) {
      const std::span<const float> output = std::span(*actual).subspan(static_cast<std::size_t>(head) * dim, dim);
      if (sparse && loop >= 3) {
        check_correction(loop, layer, head, *q, output);
        continue;
      }
      const HeadAttention attention = dense(loop, layer, head, *q);
      Row expected;
      for (const float value : attention.output) expected.push_back(reference::round_to_bfloat16(value));
      errors_.compare("attention_dense", "o", "attention.output", loop, place(layer, head), expected, output,
                      {attention.magnitude, static_cast<double>(position_ + 1), attention.score_error, spec::kTwoBf16Parts});
      if (sparse && loop == 2) check_statistics(layer, head, attention);
    }
  }

  std::vector<int> keys_of(int layer, int head) const {
    const auto step = static_cast<std::size_t>(position_ - record_.prompt_length);
    if (step >= record_.keys.size() || static_cast<std::size_t>(layer) >= record_.keys[step].layers.size()) return {};
    const auto keys = record_.keys[step].layers[static_cast<std::size_t>(layer)].row(head);
    return {keys.begin(), keys.end()};
  }

  void check_statistics(int layer, int head, const HeadAttention& attention) {
    const Row *mass = seen(2, layer, "sparse_decode.mass"), *partial = seen(2, layer, "sparse_decode.c_ref");
    reference::HeadReference<float> expected;
    expected.keys = keys_of(layer, head);
    if (mass == nullptr || partial == nullptr || expected.keys.empty()) return;
    const auto values = view(2, layer, head, false);
    reference::summarize_reference<Declared>(attention.probabilities, values, expected);
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    std::vector<double> magnitude(dim, 0.0);
    for (const int j : expected.keys) {
      for (std::size_t d = 0; d < dim; ++d)
        magnitude[d] += attention.probabilities[static_cast<std::size_t>(j)] * std::fabs(double{values.row(j)[d]});
    }
    const auto terms = static_cast<double>(position_ + 1);
    errors_.compare("reference_statistics", "m", "sparse_decode.mass", 2, place(layer, head), std::span(&expected.mass, 1),
                    std::span(*mass).subspan(static_cast<std::size_t>(head), 1),
                    {{expected.mass}, terms, attention.score_error, spec::kTwoBf16Parts});
    errors_.compare("reference_statistics", "C_ref", "sparse_decode.c_ref", 2, place(layer, head), expected.partial,
                    std::span(*partial).subspan(static_cast<std::size_t>(head) * dim, dim),
                    {magnitude, terms, attention.score_error, spec::kTwoBf16Parts});
  }

  // m and C_ref are the candidate's; O_ref is not observed and recomputed from loop 2's query, with the bound of its own error.
  void check_correction(int loop, int layer, int head, const Row& q, std::span<const float> actual) {
    const Row *mass = seen(2, layer, "sparse_decode.mass"), *partial = seen(2, layer, "sparse_decode.c_ref"),
              *source_q = seen(2, layer, "rope.q");
    reference::HeadReference<float> source;
    source.keys = keys_of(layer, head);
    if (mass == nullptr || partial == nullptr || source_q == nullptr || source.keys.empty()) return;
    const auto dim = static_cast<std::size_t>(model_.head_dim), first = static_cast<std::size_t>(head) * dim;
    const HeadAttention at_source = dense(2, layer, head, *source_q);
    source.mass = (*mass)[static_cast<std::size_t>(head)];
    source.output = at_source.output;
    source.partial.assign(partial->begin() + static_cast<std::ptrdiff_t>(first),
                          partial->begin() + static_cast<std::ptrdiff_t>(first + dim));
    const auto keys = view(loop, layer, head, true), values = view(loop, layer, head, false);
    Row expected(dim), probabilities(source.keys.size()), local(dim);
    reference::sparse_correction<Declared>(q.data() + first, keys, values, source, scale_, expected.data());
    for (float& value : expected) value = reference::round_to_bfloat16(value);
    reference::attention_listed<Declared>(q.data() + first, keys, values, source.keys, scale_, probabilities.data(), local.data());
    std::vector<double> magnitude(dim);
    for (std::size_t d = 0; d < dim; ++d) {
      magnitude[d] = at_source.magnitude[d] + std::fabs(double{source.partial[d]});
      for (std::size_t i = 0; i < source.keys.size(); ++i)
        magnitude[d] += double{source.mass} * probabilities[i] * std::fabs(double{values.row(source.keys[i])[d]});
    }
    const double error = std::fmax(at_source.score_error, score_error(q.data() + first, keys, source.keys));
    errors_.compare("sparse_correction", "o", "attention.output", loop, place(layer, head), expected, actual,
                    {magnitude, static_cast<double>(position_ + 1), error, spec::kTwoBf16Parts});
  }

  std::span<const float> hidden(int loop) const {
    const Tensor<float>& rows = record_.hidden[static_cast<std::size_t>(loop - 1)];
    return rows.empty() ? std::span<const float>() : rows.row(position_);
  }

  // The score that decided about loop `loop`.
  void check_score(int loop) {
    if (loop < 3 || decode() || !config_.selects_tokens()) return;
    const auto& scores = record_.scores[static_cast<std::size_t>(loop - 3)];
    if (scores.empty() || std::isnan(scores[static_cast<std::size_t>(position_)]) || hidden(loop - 1).empty()) return;
    const float expected = reference::update_score<Declared>(hidden(loop - 1).data(), hidden(loop - 2).data(), model_.hidden);
    errors_.compare("update_score", "score", "update_score", loop, place(), std::span(&expected, 1),
                    std::span(scores).subspan(static_cast<std::size_t>(position_), 1),
                    {{double{expected}}, static_cast<double>(model_.hidden), 0.0, 0.0});
  }

  void check_gate(int loop) {
    if (record_.gate.empty() || hidden(loop).empty()) return;
    const float expected =
        reference::exit_gate<Declared>(hidden(loop).data(), weights_.early_exit_gate.data(), weights_.early_exit_bias, model_.hidden);
    double magnitude = std::fabs(double{weights_.early_exit_bias});
    for (int i = 0; i < model_.hidden; ++i)
      magnitude += std::fabs(double{hidden(loop)[static_cast<std::size_t>(i)]} * weights_.early_exit_gate[i]);
    errors_.compare("exit_gate", "g", "exit_gate", loop, place(), std::span(&expected, 1),
                    record_.gate.row(position_).subspan(static_cast<std::size_t>(loop - 1), 1),
                    {{magnitude}, static_cast<double>(model_.hidden), 0.0, 0.0});
  }

  int logits_row() const { return position_ - record_.prompt_length + 1; }
  int depth_of_logits() const { return decode() ? record_.exit_depths.at(static_cast<std::size_t>(logits_row() - 1)) : model_.loops; }
  // Empty where the position has no logits to check.
  std::span<const float> hidden_of_logits() const {
    const int row = logits_row();
    if (row < 0 || record_.logits.empty() || row >= record_.logits.extent(0)) return {};
    return depth_of_logits() < 1 ? std::span<const float>() : hidden(depth_of_logits());
  }

  void check_logits() {
    const std::span<const float> x = hidden_of_logits();
    if (x.empty()) return;
    const SampledProducts::Product expected = products_.of(x, weights_.lm_head);
    errors_.compare("head_argmax", "logits", "logits", depth_of_logits(), place(), expected.y, record_.logits.row(logits_row()),
                    {expected.magnitude, static_cast<double>(model_.hidden), 0.0, 0.0});
  }

  const ModelConfig& model_;
  const reference::Weights<float>& weights_;
  const reference::RopeTable<Declared>& rope_;
  SampledProducts& products_;
  const OperationTap& tap_;
  const RequestRecord& record_;
  const TraceRequest& request_;
  const EffectiveConfig& config_;
  int request_index_, position_;
  Errors& errors_;
  float scale_;
};

// Groups of sealed blocks are encoded again from the rows that the candidate showed: codes and parameters, bit for bit.
class CodecCheck {
 public:
  CodecCheck(const ModelConfig& model, const OperationTap& tap, const RequestRecord& record, int request, Errors& errors)
      : model_(model), tap_(tap), record_(record), request_(request), errors_(errors) {}

  void run() {
    const auto at = static_cast<std::size_t>(request_);
    for (const CodecBlock& block : record_.blocks) {
      for (int loop = 1; loop <= kLoops; ++loop) {
        const std::size_t layers = block.streams[static_cast<std::size_t>(loop - 1)].layers.size();
        for (int layer = 0; layer < static_cast<int>(layers); ++layer) {
          for (const int position : tap_.positions()[at]) check_values(block, loop, layer, position);
          check_keys(block, loop, layer, tap_.key_range(at));
        }
      }
    }
  }

 private:
  // X_hat of one head after the first `loops` streams; empty without any. [head_dim]
  Row reconstruct(const CodecBlock& block, int loops, int layer, bool key, int head, int position) const {
    const auto dim = static_cast<std::size_t>(model_.head_dim), parts = (dim + kGroupSize - 1) / kGroupSize;
    Row x;
    for (int loop = 1; loop <= loops; ++loop) {
      const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
      const auto found = std::lower_bound(stream.rows.begin(), stream.rows.end(), position);
      if (found == stream.rows.end() || *found != position) continue;  // inherits
      const auto row = static_cast<std::size_t>(found - stream.rows.begin());
      const CodecLayer& codec = stream.layers.at(static_cast<std::size_t>(layer));
      const auto codes = (key ? codec.k_codes : codec.v_codes).row(head).subspan(row * dim, dim);
      const auto low = (key ? codec.k_min : codec.v_min).row(head), scale = (key ? codec.k_scale : codec.v_scale).row(head);
      const bool base = !x.empty();
      x.resize(dim);
      for (std::size_t d = 0; d < dim; ++d) {
        const std::size_t parameter = key ? row / kGroupSize * dim + d : row * parts + d / kGroupSize;
        const float decoded = reference::decode_value(codes[d], low[parameter], scale[parameter]);
        x[d] = base ? x[d] + decoded : decoded;
      }
    }
    return x;
  }

  // What stream `loop` encodes of one head of a row; empty when the row was not observed.
  Row target(const CodecBlock& block, int loop, int layer, bool key, int head, int position) const {
    const Row* x = tap_.find(request_, position, loop, layer, key ? "rope.k" : "linear.v_proj");
    if (x == nullptr) return {};
    const auto first = x->begin() + static_cast<std::ptrdiff_t>(head) * model_.head_dim;
    Row result(first, first + model_.head_dim);
    const Row base = reconstruct(block, loop - 1, layer, key, head, position);
    for (std::size_t d = 0; d < base.size(); ++d) result[d] -= base[d];
    return result;
  }

  struct Group {
    Row codes, low, scale;
  };
  static void encode(std::span<const float> values, Group& expected) {
    std::vector<std::uint8_t> codes(values.size());
    const auto group = reference::encode_group(values.data(), 1, static_cast<int>(values.size()), codes.data());
    expected.codes.insert(expected.codes.end(), codes.begin(), codes.end());
    expected.low.push_back(group.min16);
    expected.scale.push_back(group.scale16);
  }
  void compare(const char* tensor, int loop, const DistancePlace& place, const Group& expected, const Group& actual) {
    errors_.compare("residual_encode", "codes", std::string(tensor) + "_codes", loop, place, expected.codes, actual.codes);
    errors_.compare("residual_encode", "lo16", std::string(tensor) + "_min", loop, place, expected.low, actual.low);
    errors_.compare("residual_encode", "scale16", std::string(tensor) + "_scale", loop, place, expected.scale, actual.scale);
  }

  // The V groups of one row.
  void check_values(const CodecBlock& block, int loop, int layer, int position) {
    const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
    const auto found = std::lower_bound(stream.rows.begin(), stream.rows.end(), position);
    if (found == stream.rows.end() || *found != position) return;
    const auto row = static_cast<std::size_t>(found - stream.rows.begin()), dim = static_cast<std::size_t>(model_.head_dim);
    const std::size_t parts = (dim + kGroupSize - 1) / kGroupSize;
    const CodecLayer& codec = stream.layers[static_cast<std::size_t>(layer)];
    for (int head = 0; head < model_.heads; ++head) {
      const Row values = target(block, loop, layer, false, head, position);
      if (values.empty()) return;
      Group expected, actual;
      for (std::size_t begin = 0; begin < dim; begin += kGroupSize)
        encode(std::span(values).subspan(begin, std::min<std::size_t>(kGroupSize, dim - begin)), expected);
      const auto codes = codec.v_codes.row(head).subspan(row * dim, dim);
      const auto low = codec.v_min.row(head).subspan(row * parts, parts), scale = codec.v_scale.row(head).subspan(row * parts, parts);
      actual = {Row(codes.begin(), codes.end()), Row(low.begin(), low.end()), Row(scale.begin(), scale.end())};
      compare("v", loop, {request_, position, layer, head}, expected, actual);
    }
  }

  // The K groups whose rows all lie in `range`.
  void check_keys(const CodecBlock& block, int loop, int layer, PositionRange range) {
    const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
    const auto dim = static_cast<std::size_t>(model_.head_dim);
    const CodecLayer& codec = stream.layers[static_cast<std::size_t>(layer)];
    for (std::size_t begin = 0; begin < stream.rows.size(); begin += kGroupSize) {
      const std::size_t count = std::min<std::size_t>(kGroupSize, stream.rows.size() - begin);
      if (stream.rows[begin] < range.begin || stream.rows[begin + count - 1] >= range.end) continue;
      for (int head = 0; head < model_.heads; ++head) {
        std::vector<Row> rows;
        for (std::size_t i = 0; i < count; ++i) {
          rows.push_back(target(block, loop, layer, true, head, stream.rows[begin + i]));
          if (rows.back().empty()) return;
        }
        Group expected, actual;
        const auto codes = codec.k_codes.row(head);
        for (std::size_t d = 0; d < dim; ++d) {
          Row channel;
          for (std::size_t i = 0; i < count; ++i) {
            channel.push_back(rows[i][d]);
            actual.codes.push_back(codes[(begin + i) * dim + d]);
          }
          encode(channel, expected);
        }
        const auto low = codec.k_min.row(head).subspan(begin / kGroupSize * dim, dim);
        const auto scale = codec.k_scale.row(head).subspan(begin / kGroupSize * dim, dim);
        actual.low.assign(low.begin(), low.end());
        actual.scale.assign(scale.begin(), scale.end());
        compare("k", loop, {request_, stream.rows[begin], layer, head}, expected, actual);
      }
    }
  }

  const ModelConfig& model_;
  const OperationTap& tap_;
  const RequestRecord& record_;
  int request_;
  Errors& errors_;
};

}  // namespace

std::vector<PositionRange> sampled_key_ranges(const RunRecord& record) {
  std::vector<PositionRange> ranges;
  for (const RequestRecord& request : record.requests) {
    // The shortest block: in one of at most 64 positions every group of every stream is complete.
    const auto shortest = std::min_element(request.blocks.begin(), request.blocks.end(), [](const CodecBlock& a, const CodecBlock& b) {
      return a.positions.size() < b.positions.size();
    });
    if (shortest == request.blocks.end()) {
      ranges.push_back({});
    } else {
      ranges.push_back({shortest->positions.begin, std::min(shortest->positions.end, shortest->positions.begin + kGroupSize)});
    }
  }
  return ranges;
}

std::vector<std::vector<int>> sampled_positions(const RunRecord& record, const ModelConfig& model) {
  const double row_bytes =
      4.0 * model.loops * model.layers * (7.0 * model.hidden + 7.0 * model.projection_width() + 3.0 * model.intermediate);
  const auto total = static_cast<std::size_t>(std::clamp(kSampledBytes / row_bytes, 4.0, static_cast<double>(kSampledRows)));
  const std::size_t share = std::max<std::size_t>(1, total / std::max<std::size_t>(1, record.requests.size()));
  std::vector<std::vector<int>> sample(record.requests.size());
  std::size_t taken = 0;
  for (std::size_t i = 0; i < record.requests.size() && taken < total; ++i) {
    const RequestRecord& r = record.requests[i];
    std::vector<int> prompt, decode, active(r.active[1].begin(), r.active[1].end());
    for (int p = 0; p < r.prompt_length; ++p) prompt.push_back(p);
    for (int p = r.prompt_length; p < r.prompt_length + r.fed; ++p) decode.push_back(p);
    thin(decode, std::max<std::size_t>(1, share / 2));
    thin(active, std::max<std::size_t>(1, share / 4));
    thin(prompt, std::max<std::size_t>(1, share - std::min(share, decode.size() + active.size())));
    std::vector<int>& all = sample[i];
    for (const auto* part : {&prompt, &active, &decode}) all.insert(all.end(), part->begin(), part->end());
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    taken += all.size();
  }
  return sample;
}

void OperationTap::record(const TapPoint& point, std::span<const float> values) {
  const auto& wanted = positions_.at(static_cast<std::size_t>(point.request));
  const PositionRange keys = key_range(static_cast<std::size_t>(point.request));
  const bool key = point.operation == "rope.k" && point.position >= keys.begin && point.position < keys.end;
  if (!key && !std::binary_search(wanted.begin(), wanted.end(), point.position)) return;
  rows_[{point.request, point.position, point.loop, point.layer, std::string(point.operation)}].assign(values.begin(), values.end());
}

const std::vector<float>* OperationTap::find(int request, int position, int loop, int layer, std::string_view operation) const {
  const auto found = rows_.find({request, position, loop, layer, std::string(operation)});
  return found == rows_.end() ? nullptr : &found->second;
}

OperationReference::OperationReference(const Checkpoint& checkpoint)
    : parts_(new Parts{checkpoint.config, reference::Weights<float>(checkpoint)}) {}
OperationReference::~OperationReference() = default;

std::vector<OperationErrors> OperationReference::check(const OperationTap& tap, const RunRecord& record, const Trace& trace,
                                                       const EffectiveConfig& config, bool declared_order) const {
  int longest = 1;
  for (const RequestRecord& request : record.requests) longest = std::max(longest, request.prompt_length + request.fed);
  const reference::RopeTable<Declared> rope(longest, parts_->model.head_dim, parts_->model.rope_theta);
  Errors errors(declared_order);
  SampledProducts products;
  const auto row_check = [&](std::size_t i, int position) {
    return RowCheck(parts_->model, parts_->weights, rope, products, tap, record, trace.requests.at(i), config, static_cast<int>(i), position,
                    errors);
  };
  for (std::size_t i = 0; i < tap.positions().size(); ++i) {
    for (const int position : tap.positions()[i]) row_check(i, position).add_products();
  }
  products.compute();
  for (std::size_t i = 0; i < tap.positions().size(); ++i) {
    for (const int position : tap.positions()[i]) row_check(i, position).run();
    CodecCheck(parts_->model, tap, record.requests.at(i), static_cast<int>(i), errors).run();
  }
  return errors.take();
}

}  // namespace loopgauge::harness
