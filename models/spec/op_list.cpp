// SPDX-License-Identifier: Apache-2.0
#include "models/spec/op_list.hpp"

#include <array>

#include "models/spec/attention.hpp"
#include "models/spec/compact_rows.hpp"
#include "models/spec/draw_tokens.hpp"
#include "models/spec/embedding.hpp"
#include "models/spec/exit_gate.hpp"
#include "models/spec/exit_step.hpp"
#include "models/spec/head_argmax.hpp"
#include "models/spec/inherit.hpp"
#include "models/spec/kv_append.hpp"
#include "models/spec/linear.hpp"
#include "models/spec/quantize_int4_group.hpp"
#include "models/spec/reference_statistics.hpp"
#include "models/spec/residual_add.hpp"
#include "models/spec/residual_decode.hpp"
#include "models/spec/residual_encode.hpp"
#include "models/spec/rms_norm.hpp"
#include "models/spec/rope.hpp"
#include "models/spec/seal_blocks.hpp"
#include "models/spec/select_tokens.hpp"
#include "models/spec/sparse_correction.hpp"
#include "models/spec/swiglu.hpp"
#include "models/spec/update_score.hpp"

namespace loopgauge::spec {
namespace {

constexpr std::array<const OpSpec*, 22> kOps{
    &kEmbedding,        &kRmsNorm,           &kLinear,         &kRope,           &kKvAppend,
    &kAttentionDense,   &kResidualAdd,       &kSwiglu,         &kExitGate,       &kHeadArgmax,
    &kUpdateScore,      &kSelectTokens,      &kCompactRows,    &kInherit,        &kReferenceStatistics,
    &kSparseCorrection, &kQuantizeInt4Group, &kResidualEncode, &kResidualDecode, &kSealBlocks,
    &kExitStep,         &kDrawTokens,
};

}  // namespace

std::span<const OpSpec* const> op_list() { return kOps; }

const OpSpec* find_op(std::string_view name) {
  for (const OpSpec* op : kOps) {
    if (op->name == name) return op;
  }
  return nullptr;
}

List<TapOwner, 2> find_tap(std::string_view tap) {
  TapOwner found[2];
  std::size_t count = 0;
  for (const OpSpec* op : kOps) {
    for (const OutputSpec& output : op->outputs) {
      for (const std::string_view name : output.taps) {
        if (name == tap && count < 2) found[count++] = {op, &output};
      }
    }
  }
  if (count == 0) return {};
  if (count == 1) return {found[0]};
  return {found[0], found[1]};
}

}  // namespace loopgauge::spec
