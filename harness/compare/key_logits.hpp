// SPDX-License-Identifier: Apache-2.0
// The scaled attention logits that chose the keys of sparse decode attention (S-SDA-1), recomputed in double precision. A record holds
// the chosen keys but neither queries nor, where positions are encoded later, the BF16 keys that a query read; an observer attached to
// the run keeps both, and the record gives the reconstructed keys.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "models/executor.hpp"
#include "models/model_config.hpp"

namespace loopgauge::harness {

// Attach to a run: keeps rope.q of decode rows at loop 2 and rope.k of every row at loops 1 and 2. Prompt rows' queries are left out.
class KeyLogitTap : public Tap {
 public:
  explicit KeyLogitTap(const Trace& trace);
  void record(const TapPoint& point, std::span<const float> values) override;

  struct RowId {
    int request = 0, layer = 0, position = 0;
    auto operator<=>(const RowId&) const = default;
  };
  // Values [heads * head_dim]; empty when the row did not execute the operation.
  std::span<const float> query(const RowId& row) const { return find(queries_, row); }
  // Of loop 2, or of loop 1 where the row did not execute loop 2 (plane 2 inherits plane 1).
  std::span<const float> key(const RowId& row) const { return find(keys_, row); }

 private:
  using Rows = std::map<RowId, std::vector<float>>;
  static std::span<const float> find(const Rows& rows, const RowId& row) {
    const auto found = rows.find(row);
    return found == rows.end() ? std::span<const float>() : std::span<const float>(found->second);
  }
  std::vector<int> prompt_lengths_;
  Rows queries_, keys_;
};

struct KeyLogits {
  std::vector<double> values;  // [position + 1]; empty when the run holds no query here
  std::vector<double> errors;  // |FP32 logit in any order of additions - value| at most
};

// Logits of loop 2 of the query at `position` (>= prompt length). `record` must hold K/V where the configuration encodes.
// Throws InternalError when a key is in neither the record nor the tap.
KeyLogits key_logits(const KeyLogitTap& tap, const RunRecord& record, int request, int layer, int head, int position,
                     const ModelConfig& model);

}  // namespace loopgauge::harness
