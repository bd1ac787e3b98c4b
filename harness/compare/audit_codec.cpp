// SPDX-License-Identifier: Apache-2.0
// Sealed blocks: which rows they hold, whether codes and parameters are a codec's, and whether readers see the chain of decodes.
#include <bit>
#include <cmath>

#include "harness/compare/audit_context.hpp"
#include "harness/compare/bounded.hpp"
#include "harness/compare/float_bits.hpp"

namespace loopgauge::harness {
namespace {

// S-KVQ-4: the product is exact in FP32, the addition rounds once.
float decoded(std::uint8_t code, float scale, float minimum) { return static_cast<float>(code) * scale + minimum; }

// Codes below 16, FP16 parameters, and both extremes of every group. `codes` are the group's values.
struct GroupCheck {
  const AuditContext& c;
  int loop, layer;

  void parameters(float minimum, float scale, int position, int head, std::int64_t element) const {
    const AuditPlace place = c.place(loop, layer, position, head, element);
    c.log.require(is_float16(minimum), Rule::codec_parameters, place, 0, minimum, 0, "minimum, which must be a finite FP16 number and");
    c.log.require(is_float16(scale) && scale >= 0.0f, Rule::codec_parameters, place, 0, scale, 0,
                  "scale, which must be a finite FP16 number >= 0 and");
    // The sign of a zero says nothing: +0 is stored of a zero, -0 of a negative number that FP16 rounds to zero (S-KVQ-6).
  }

  void extremes(int least, int greatest, float scale, int position, int head, std::int64_t element) const {
    const AuditPlace place = c.place(loop, layer, position, head, element);
    c.log.require(greatest <= 15, Rule::codec_parameters, place, 15, greatest, 0, "code");
    if (scale == 0.0f) {
      c.log.require(greatest == 0, Rule::codec_parameters, place, 0, greatest, 0, "code of a constant group");
      return;
    }
    // (lo - lo) / scale is 0; (hi - lo) / fl((hi - lo) / 15) is 15 within two roundings, so the nearest integer is 15.
    if (c.config.q().flush == FlushRule::eager) return;  // rows rewritten under stored parameters may have left a group without them
    c.log.require(least == 0, Rule::codec_extremes, place, 0, least, 0, "least code of the group");
    c.log.require(greatest == 15, Rule::codec_extremes, place, 15, greatest, 0, "greatest code of the group");
  }
};

void key_groups(const GroupCheck& check, const CodecStream& stream, const CodecLayer& layer) {
  const auto rows = static_cast<std::int64_t>(stream.rows.size());
  const std::int64_t width = layer.k_codes.extent(2);
  for (int head = 0; head < layer.k_codes.extent(0); ++head) {
    const auto codes = layer.k_codes.row(head);
    for (std::int64_t group = 0; group * kGroupSize < rows; ++group) {
      const std::int64_t begin = group * kGroupSize;
      const std::int64_t end = std::min(begin + kGroupSize, rows);
      const int position = stream.rows[static_cast<std::size_t>(begin)];
      for (std::int64_t channel = 0; channel < width; ++channel) {
        int least = 255, greatest = 0;
        for (std::int64_t i = begin; i < end; ++i) {
          const int code = codes[static_cast<std::size_t>(i * width + channel)];
          least = std::min(least, code);
          greatest = std::max(greatest, code);
        }
        const auto at = static_cast<std::size_t>(group * width + channel);
        const float scale = layer.k_scale.row(head)[at];
        check.parameters(layer.k_min.row(head)[at], scale, position, head, channel);
        check.extremes(least, greatest, scale, position, head, channel);
      }
    }
  }
}

void value_groups(const GroupCheck& check, const CodecStream& stream, const CodecLayer& layer) {
  const std::int64_t width = layer.v_codes.extent(2);
  const std::int64_t parts = layer.v_min.extent(2);
  for (int head = 0; head < layer.v_codes.extent(0); ++head) {
    const auto codes = layer.v_codes.row(head);
    for (std::size_t i = 0; i < stream.rows.size(); ++i) {
      for (std::int64_t part = 0; part < parts; ++part) {
        int least = 255, greatest = 0;
        for (std::int64_t d = part * kGroupSize; d < std::min(width, (part + 1) * kGroupSize); ++d) {
          const int code = codes[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(d)];
          least = std::min(least, code);
          greatest = std::max(greatest, code);
        }
        const auto at = i * static_cast<std::size_t>(parts) + static_cast<std::size_t>(part);
        const float scale = layer.v_scale.row(head)[at];
        check.parameters(layer.v_min.row(head)[at], scale, stream.rows[i], head, part * kGroupSize);
        check.extremes(least, greatest, scale, stream.rows[i], head, part * kGroupSize);
      }
    }
  }
}

void stream_rows(const AuditContext& c, const CodecBlock& block) {
  for (int loop = 1; loop <= kLoops; ++loop) {
    const auto& rows = block.streams[static_cast<std::size_t>(loop - 1)].rows;
    std::vector<std::int32_t> wanted;
    for (int p = block.positions.begin; p < std::min(block.positions.end, c.positions()); ++p) {
      if (c.ran(loop, p)) wanted.push_back(p);
    }
    c.log.checked(Rule::stream_rows, static_cast<std::int64_t>(wanted.size()) + 1);
    if (rows == wanted) continue;
    std::size_t i = 0;
    while (i < rows.size() && i < wanted.size() && rows[i] == wanted[i]) ++i;
    c.log.violation(Rule::stream_rows, c.place(loop, -1, i < wanted.size() ? wanted[i] : block.positions.begin),
                    i < wanted.size() ? wanted[i] : -1, i < rows.size() ? rows[i] : -1, 0,
                    "compact row " + std::to_string(i) + " of the stream (-1: none)");
  }
}

// X_hat of every encoded position in one layer, stream by stream, against the logical planes.
void decode_chain(const AuditContext& c, int layer, bool keys) {
  const ModelConfig& model = c.checkpoint.config;
  const auto width = static_cast<std::size_t>(model.head_dim);
  const std::size_t parts = (width + kGroupSize - 1) / kGroupSize;
  for (const CodecBlock& block : c.record.blocks) {
    const int end = std::min(block.positions.end, c.positions());
    const auto length = static_cast<std::size_t>(std::max(0, end - block.positions.begin));
    for (int head = 0; head < model.heads; ++head) {
      // Double holds the sum of FP32 decodes of the double profile, and every FP32 step exactly otherwise.
      std::vector<double> chain(length * width, 0.0);
      for (int loop = 1; loop <= kLoops; ++loop) {
        const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
        for (std::size_t i = 0; i < stream.rows.size(); ++i) {
          const int p = stream.rows[i];
          if (p < block.positions.begin || p >= end) continue;  // stream_rows' finding
          const CodecLayer& codec = stream.layers[static_cast<std::size_t>(layer)];
          double* row = chain.data() + static_cast<std::size_t>(p - block.positions.begin) * width;
          const auto codes = (keys ? codec.k_codes : codec.v_codes).row(head).subspan(i * width, width);
          for (std::size_t d = 0; d < width; ++d) {
            const std::size_t at = keys ? (i / kGroupSize) * width + d : i * parts + d / kGroupSize;
            const float minimum = (keys ? codec.k_min : codec.v_min).row(head)[at];
            const float scale = (keys ? codec.k_scale : codec.v_scale).row(head)[at];
            if (c.rounds_bfloat16) {
              const float step = decoded(codes[d], scale, minimum);
              row[d] = loop == 1 ? step : static_cast<float>(row[d]) + step;
            } else {
              row[d] += static_cast<double>(codes[d]) * scale + minimum;
            }
          }
        }
        const KvPlane& plane = c.record.kv[static_cast<std::size_t>(layer * kLoops + loop - 1)];
        const auto found = (keys ? plane.k : plane.v).row(head);
        for (std::size_t i = 0; i < length; ++i) {
          const int p = block.positions.begin + static_cast<int>(i);
          const auto row = found.subspan(static_cast<std::size_t>(p) * width, width);
          c.log.checked(Rule::decode_chain, static_cast<std::int64_t>(width));
          for (std::size_t d = 0; d < width; ++d) {
            const auto wanted = static_cast<float>(chain[i * width + d]);
            if (row[d] == wanted) continue;
            // The double profile adds in double and is rounded when recorded; its order of additions is free within one FP32 unit.
            if (!c.rounds_bfloat16 && std::fabs(row[d] - wanted) <= 2 * kFloatUnit * std::fabs(wanted)) continue;
            c.log.violation(Rule::decode_chain, c.place(loop, layer, p, head, static_cast<std::int64_t>(d)), wanted, row[d], 0,
                            keys ? "k" : "v");
          }
        }
      }
    }
  }
}

void tail_bfloat16(const AuditContext& c) {
  if (!c.rounds_bfloat16) return;
  const int encoded = c.record.encoded_frontier.back();
  const auto width = static_cast<std::size_t>(c.checkpoint.config.head_dim);
  for (std::size_t i = 0; i < c.record.kv.size(); ++i) {
    const int loop = static_cast<int>(i) % kLoops + 1;
    const int layer = static_cast<int>(i) / kLoops;
    for (const auto* tensor : {&c.record.kv[i].k, &c.record.kv[i].v}) {
      if (tensor->empty()) continue;
      for (int head = 0; head < tensor->extent(0); ++head) {
        const auto rows = tensor->row(head).subspan(static_cast<std::size_t>(encoded) * width);
        c.log.checked(Rule::kv_bfloat16, static_cast<std::int64_t>(rows.size()));
        for (std::size_t e = 0; e < rows.size(); ++e) {
          if (is_bfloat16(rows[e])) continue;
          c.log.violation(Rule::kv_bfloat16,
                          c.place(loop, layer, encoded + static_cast<int>(e / width), head, static_cast<std::int64_t>(e % width)),
                          round_to_bfloat16(rows[e]), rows[e], 0, tensor == &c.record.kv[i].k ? "k" : "v");
        }
      }
    }
  }
}

}  // namespace

void audit_codec(const AuditContext& c) {
  for (const CodecBlock& block : c.record.blocks) {
    stream_rows(c, block);
    for (int loop = 1; loop <= kLoops; ++loop) {
      const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
      for (std::size_t layer = 0; layer < stream.layers.size(); ++layer) {
        const GroupCheck check{c, loop, static_cast<int>(layer)};
        key_groups(check, stream, stream.layers[layer]);
        value_groups(check, stream, stream.layers[layer]);
      }
    }
  }
  if (c.record.kv.empty()) return;
  tail_bfloat16(c);
  if (c.record.blocks.empty()) return;
  for (int layer = 0; layer < c.checkpoint.config.layers; ++layer) {
    decode_chain(c, layer, true);
    decode_chain(c, layer, false);
  }
}

}  // namespace loopgauge::harness
