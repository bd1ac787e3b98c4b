// SPDX-License-Identifier: Apache-2.0
// Extents of a record: everything else indexes by them.
#include <string>

#include "harness/compare/audit_context.hpp"

namespace loopgauge::harness {
namespace {

class ShapeCheck {
 public:
  explicit ShapeCheck(AuditContext& context) : context_(context) {}

  void count(std::int64_t actual, std::int64_t expected, const std::string& what, int loop = 0, int layer = -1) {
    const bool holds = actual == expected;
    context_.log.require(holds, Rule::record_shape, context_.place(loop, layer), static_cast<double>(expected), static_cast<double>(actual),
                         0, what);
    ok_ = ok_ && holds;
  }

  // An absent tensor is legal: not every run records everything.
  template <class T>
  void tensor(const Tensor<T>& tensor, const std::vector<std::int64_t>& expected, const std::string& what, int loop = 0, int layer = -1) {
    if (tensor.empty()) return;
    count(static_cast<std::int64_t>(tensor.shape.size()), static_cast<std::int64_t>(expected.size()), "rank of " + what, loop, layer);
    for (std::size_t axis = 0; ok_ && axis < expected.size(); ++axis) {
      count(tensor.extent(axis), expected[axis], "extent " + std::to_string(axis) + " of " + what, loop, layer);
    }
  }

  bool ok() const { return ok_; }

 private:
  AuditContext& context_;
  bool ok_ = true;
};

void codec_shapes(ShapeCheck& check, const RequestRecord& record, const ModelConfig& model) {
  const std::int64_t parts = (model.head_dim + kGroupSize - 1) / kGroupSize;
  for (const CodecBlock& block : record.blocks) {
    for (int depth = 0; depth < kLoops; ++depth) {
      const CodecStream& stream = block.streams[static_cast<std::size_t>(depth)];
      const auto rows = static_cast<std::int64_t>(stream.rows.size());
      if (rows == 0 && stream.layers.empty()) continue;
      check.count(static_cast<std::int64_t>(stream.layers.size()), model.layers, "number of layers of a codec stream", depth + 1);
      const std::int64_t groups = (rows + kGroupSize - 1) / kGroupSize;
      for (std::size_t l = 0; l < stream.layers.size(); ++l) {
        const CodecLayer& layer = stream.layers[l];
        const int at = static_cast<int>(l);
        check.count(layer.k_codes.empty() ? 0 : 1, 1, "presence of k_codes", depth + 1, at);
        check.tensor(layer.k_codes, {model.heads, rows, model.head_dim}, "k_codes", depth + 1, at);
        check.tensor(layer.k_min, {model.heads, groups, model.head_dim}, "k_min", depth + 1, at);
        check.tensor(layer.k_scale, {model.heads, groups, model.head_dim}, "k_scale", depth + 1, at);
        check.tensor(layer.v_codes, {model.heads, rows, model.head_dim}, "v_codes", depth + 1, at);
        check.tensor(layer.v_min, {model.heads, rows, parts}, "v_min", depth + 1, at);
        check.tensor(layer.v_scale, {model.heads, rows, parts}, "v_scale", depth + 1, at);
      }
    }
  }
}

}  // namespace

bool audit_shapes(AuditContext& c) {
  const RequestRecord& record = c.record;
  const ModelConfig& model = c.checkpoint.config;
  ShapeCheck check(c);
  check.count(record.prompt_length, c.request.prompt_length(), "prompt length");
  const auto emitted = static_cast<std::int64_t>(record.tokens.size());
  if (c.request.teacher_forced()) {
    if (!c.has_events) check.count(emitted, c.request.max_new_tokens, "number of tokens");
    check.count(record.fed, emitted, "number of forwarded tokens");
  } else {
    check.count(record.fed, std::max<std::int64_t>(0, emitted - 1), "number of forwarded tokens");
    check.count(emitted <= c.request.max_new_tokens ? 0 : emitted - c.request.max_new_tokens, 0, "number of tokens above max_new_tokens");
  }
  check.count(static_cast<std::int64_t>(record.exit_depths.size()), emitted, "number of exit depths");
  check.count(static_cast<std::int64_t>(record.encoded_frontier.size()), 1 + record.fed, "number of encoded frontiers");
  if (!check.ok()) return false;

  const std::int64_t positions = c.positions();
  check.tensor(record.logits, {1 + record.fed, model.vocab}, "logits");
  for (int depth = 0; depth < kLoops; ++depth) {
    check.tensor(record.hidden[static_cast<std::size_t>(depth)], {positions, model.hidden}, "hidden", depth + 1);
  }
  check.tensor(record.gate, {positions, kLoops}, "gate");
  for (std::size_t i = 0; i < 2; ++i) {
    if (!record.scores[i].empty()) {
      check.count(static_cast<std::int64_t>(record.scores[i].size()), record.prompt_length, "number of scores", static_cast<int>(i) + 3);
    }
  }
  if (!record.kv.empty())
    check.count(static_cast<std::int64_t>(record.kv.size()), std::int64_t{model.layers} * kLoops, "number of K/V planes");
  for (std::size_t i = 0; i < record.kv.size(); ++i) {
    const int loop = static_cast<int>(i) % kLoops + 1;
    const int layer = static_cast<int>(i) / kLoops;
    check.tensor(record.kv[i].k, {model.heads, positions, model.head_dim}, "k", loop, layer);
    check.tensor(record.kv[i].v, {model.heads, positions, model.head_dim}, "v", loop, layer);
  }
  for (const StepKeys& step : record.keys) check.tensor(step.mass, {model.layers, model.heads}, "mass");
  codec_shapes(check, record, model);
  return check.ok();
}

}  // namespace loopgauge::harness
