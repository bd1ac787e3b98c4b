// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/key_logits.hpp"

#include <cmath>
#include <string>

#include "models/error.hpp"
#include "models/spec/attention.hpp"

namespace loopgauge::harness {

KeyLogitTap::KeyLogitTap(const Trace& trace) {
  for (const TraceRequest& request : trace.requests) prompt_lengths_.push_back(request.prompt_length());
}

void KeyLogitTap::record(const TapPoint& point, std::span<const float> values) {
  const RowId row{point.request, point.layer, point.position};
  if (point.operation == "rope.k" && point.loop <= 2) {
    keys_[row].assign(values.begin(), values.end());  // loop 2 comes after loop 1
  } else if (point.operation == "rope.q" && point.loop == 2 &&
             point.position >= prompt_lengths_.at(static_cast<std::size_t>(point.request))) {
    queries_[row].assign(values.begin(), values.end());
  }
}

KeyLogits key_logits(const KeyLogitTap& tap, const RunRecord& record, int request, int layer, int head, int position,
                     const ModelConfig& model) {
  KeyLogits result;
  const RequestRecord& r = record.requests.at(static_cast<std::size_t>(request));
  const auto dim = static_cast<std::size_t>(model.head_dim), first = static_cast<std::size_t>(head) * dim;
  std::span<const float> query = tap.query({request, layer, position});
  if (query.size() < first + dim) return result;
  query = query.subspan(first, dim);
  // A decode query sees encoded the positions below E at committed length `position` (S-TIME-1), which is the frontier before its row.
  const int frontier = r.encoded_frontier.at(static_cast<std::size_t>(position - r.prompt_length));
  const auto plane = static_cast<std::size_t>(layer * kLoops + 1);
  const double scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(model.head_dim)));
  const double unit = spec::lane_sum_bound(model.head_dim) + spec::kScoreTolerance.relative;
  double query_norm = 0.0;
  for (const float q : query) query_norm += double{q} * q;
  result.values.reserve(static_cast<std::size_t>(position) + 1);
  result.errors.reserve(static_cast<std::size_t>(position) + 1);
  for (int j = 0; j <= position; ++j) {
    std::span<const float> key;
    if (j < frontier && plane < r.kv.size()) {
      key = r.kv[plane].k.row(head).subspan(static_cast<std::size_t>(j) * dim, dim);
    } else if (j >= frontier) {
      key = tap.key({request, layer, j});
      if (key.size() >= first + dim) key = key.subspan(first, dim);
    }
    if (key.size() != dim) {
      throw InternalError("request " + std::to_string(request) + ", layer " + std::to_string(layer) + ": the run kept no key of position " +
                          std::to_string(j));
    }
    double dot = 0.0, key_norm = 0.0;
    for (std::size_t d = 0; d < dim; ++d) {
      dot += double{query[d]} * key[d];
      key_norm += double{key[d]} * key[d];
    }
    result.values.push_back(dot * scale);
    result.errors.push_back(unit * std::sqrt(query_norm * key_norm) * scale);  // |q| |k| is at least the sum of the |products|
  }
  return result;
}

}  // namespace loopgauge::harness
