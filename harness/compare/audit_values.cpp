// SPDX-License-Identifier: Apache-2.0
// Values that follow from recorded values: logits and gate from hidden rows, scores from pairs of them, inherited rows from their
// predecessors.
#include <bit>
#include <cmath>
#include <cstring>

#include "harness/compare/audit_context.hpp"
#include "harness/compare/bounded.hpp"
#include "harness/compare/float_bits.hpp"

namespace loopgauge::harness {
namespace {

struct Dot {
  double value = 0.0;
  double magnitude = 0.0;  // sum of |a b|
};

Dot dot(std::span<const float> a, const Bfloat16Bits* b) {
  Dot result;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double product = static_cast<double>(a[i]) * static_cast<double>(bfloat16_from_bits(b[i]));
    result.value += product;
    result.magnitude += std::fabs(product);
  }
  return result;
}

double norm(std::span<const float> x) {
  double sum = 0.0;
  for (const float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

bool same_bits(std::span<const float> a, std::span<const float> b) { return std::memcmp(a.data(), b.data(), a.size_bytes()) == 0; }

std::size_t first_difference(std::span<const float> a, std::span<const float> b) {
  std::size_t i = 0;
  while (std::bit_cast<std::uint32_t>(a[i]) == std::bit_cast<std::uint32_t>(b[i])) ++i;
  return i;
}

// FP32 dot of C terms in any order. In the double profile the executor used unrounded rows while the record rounds them: one more
// rounding of each product and of the result.
double dot_bound(const AuditContext& c, double magnitude, int terms) {
  return (sum_bound(terms + 1) + (c.rounds_bfloat16 ? 0.0 : 2 * kFloatUnit)) * magnitude;
}

void logits(const AuditContext& c) {
  const RequestRecord& record = c.record;
  if (record.logits.empty()) return;
  for (std::int64_t j = 0; j < record.logits.extent(0); ++j) {
    const auto row = record.logits.row(j);
    c.log.checked(Rule::finite_logits, static_cast<std::int64_t>(row.size()));
    for (std::size_t v = 0; v < row.size(); ++v) {
      if (std::isfinite(row[v])) continue;
      c.log.violation(Rule::finite_logits, c.place(0, -1, c.prompt() - 1 + static_cast<int>(j), -1, static_cast<std::int64_t>(v)), 0,
                      row[v], 0, "logit");
    }
  }
  const int loops = c.config.loops();
  const auto& last = record.hidden[static_cast<std::size_t>(loops - 1)];
  if (last.empty()) return;
  const ModelConfig& model = c.checkpoint.config;
  const std::int64_t rows = record.logits.extent(0);
  const std::int64_t affordable = std::max<std::int64_t>(1, c.multiplications / (std::int64_t{model.vocab} * model.hidden));
  const std::int64_t stride = (rows + affordable - 1) / affordable;
  for (std::int64_t j = 0; j < rows; j += stride) {
    const int position = c.prompt() - 1 + static_cast<int>(j);
    const auto hidden = last.row(position);
    for (int v = 0; v < model.vocab; ++v) {
      const Dot exact = dot(hidden, c.checkpoint.lm_head.row(v).data());
      const double bound = dot_bound(c, exact.magnitude, model.hidden);
      const double found = record.logits.row(j)[static_cast<std::size_t>(v)];
      c.log.require(std::fabs(found - exact.value) <= bound, Rule::logits_head, c.place(loops, -1, position, -1, v), exact.value, found,
                    bound, "logit");
    }
  }
}

void gate(const AuditContext& c) {
  const RequestRecord& record = c.record;
  if (record.gate.empty()) return;
  const double bias = bfloat16_from_bits(c.checkpoint.early_exit_bias.data.at(0));
  for (int p = 0; p < c.positions(); ++p) {
    const auto gates = record.gate.row(p);
    for (int loop = 1; loop <= c.config.loops(); ++loop) {
      const auto at = static_cast<std::size_t>(loop - 1);
      if (loop > 1 && !c.ran(loop, p)) {
        c.log.require(std::bit_cast<std::uint32_t>(gates[at]) == std::bit_cast<std::uint32_t>(gates[at - 1]), Rule::inherited_gate,
                      c.place(loop, -1, p), gates[at - 1], gates[at], 0, "gate");
        continue;
      }
      if (record.hidden[at].empty()) continue;
      const Dot exact = dot(record.hidden[at].row(p), c.checkpoint.early_exit_gate.data.data());
      const double bound = dot_bound(c, exact.magnitude + std::fabs(bias), c.checkpoint.config.hidden + 1);
      c.log.require(std::fabs(gates[at] - (exact.value + bias)) <= bound, Rule::gate_value, c.place(loop, -1, p), exact.value + bias,
                    gates[at], bound, "gate");
    }
  }
}

void hidden(const AuditContext& c) {
  const RequestRecord& record = c.record;
  const int width = c.checkpoint.config.hidden;
  for (int loop = 1; loop <= kLoops; ++loop) {
    const auto& rows = record.hidden[static_cast<std::size_t>(loop - 1)];
    if (rows.empty()) continue;
    for (int p = 0; p < c.positions(); ++p) {
      const auto row = rows.row(p);
      if (c.rounds_bfloat16) {
        c.log.checked(Rule::hidden_bfloat16, width);
        for (std::size_t i = 0; i < row.size(); ++i) {
          if (is_bfloat16(row[i])) continue;
          c.log.violation(Rule::hidden_bfloat16, c.place(loop, -1, p, -1, static_cast<std::int64_t>(i)), round_to_bfloat16(row[i]), row[i],
                          0, "hidden");
        }
      }
      if (c.ran(loop, p)) {
        // x * inv has mean square ms / (ms + eps) <= 1. Two BF16 roundings change an element by at most (1 + u)^2, its square by
        // (1 + u)^4. Nothing below is promised: a pre-norm row of magnitude near sqrt(eps) legally gives less.
        double sum = 0.0;
        for (std::size_t i = 0; i < row.size(); ++i) {
          const double weight = bfloat16_from_bits(c.checkpoint.norm.data[i]);
          if (weight != 0.0) sum += (row[i] / weight) * (row[i] / weight);
        }
        const double limit = std::pow(1 + kBfloat16Unit, 4) * (1 + sum_bound(width + 8));
        c.log.require(sum / width <= limit, Rule::final_norm_magnitude, c.place(loop, -1, p), 1.0, sum / width, limit - 1,
                      "mean square of hidden / norm weight");
        continue;
      }
      const auto& before = record.hidden[static_cast<std::size_t>(loop - 2)];
      if (before.empty()) continue;
      c.log.checked(Rule::inherited_hidden);
      if (same_bits(before.row(p), row)) continue;
      const std::size_t i = first_difference(before.row(p), row);
      c.log.violation(Rule::inherited_hidden, c.place(loop, -1, p, -1, static_cast<std::int64_t>(i)), before.row(p)[i], row[i], 0,
                      "hidden");
    }
  }
}

void inherited_kv(const AuditContext& c) {
  const auto& planes = c.record.kv;
  const auto heads = c.checkpoint.config.heads;
  const auto width = static_cast<std::size_t>(c.checkpoint.config.head_dim);
  for (std::size_t i = 0; i < planes.size(); ++i) {
    const int loop = static_cast<int>(i) % kLoops + 1;
    const int layer = static_cast<int>(i) / kLoops;
    if (loop == 1) continue;
    const auto check = [&](const Tensor<float>& before, const Tensor<float>& now, std::string_view name) {
      if (before.empty() || now.empty()) return;
      for (int p = 0; p < c.positions(); ++p) {
        if (c.ran(loop, p)) continue;
        for (int head = 0; head < heads; ++head) {
          const auto a = before.row(head).subspan(static_cast<std::size_t>(p) * width, width);
          const auto b = now.row(head).subspan(static_cast<std::size_t>(p) * width, width);
          c.log.checked(Rule::inherited_kv);
          if (same_bits(a, b)) continue;
          const std::size_t e = first_difference(a, b);
          c.log.violation(Rule::inherited_kv, c.place(loop, layer, p, head, static_cast<std::int64_t>(e)), a[e], b[e], 0, name);
        }
      }
    };
    check(planes[i - 1].k, planes[i].k, "k");
    check(planes[i - 1].v, planes[i].v, "v");
  }
}

void scores(const AuditContext& c) {
  if (!c.config.selects_tokens()) return;
  const int window = c.config.window();
  const int width = c.checkpoint.config.hidden;
  for (int loop = 3; loop <= kLoops; ++loop) {
    const auto& found = c.record.scores[static_cast<std::size_t>(loop - 3)];
    const auto& new_rows = c.record.hidden[static_cast<std::size_t>(loop - 2)];
    const auto& old_rows = c.record.hidden[static_cast<std::size_t>(loop - 3)];
    if (found.empty()) continue;
    const bool have_rows = !new_rows.empty() && !old_rows.empty();
    for (int begin = 0; begin < c.prompt(); begin += window) {
      const int end = std::min(begin + window, c.prompt());
      int eligible = 0, zero = 0;
      bool unchanged = have_rows;  // every eligible row really has the same bits before and after
      for (int p = begin; p < end; ++p) {
        if (!c.ran(loop - 1, p)) continue;
        ++eligible;
        zero += found[static_cast<std::size_t>(p)] == 0.0f;
        unchanged = unchanged && same_bits(new_rows.row(p), old_rows.row(p));
      }
      c.log.checked(Rule::score_aliased);
      if (zero == eligible && !unchanged) {
        c.log.violation(Rule::score_aliased, c.place(loop, -1, begin), 0, zero, 0, "number of zero scores in the window at this position");
        continue;
      }
      if (!have_rows) continue;
      for (int p = begin; p < end; ++p) {
        if (!c.ran(loop - 1, p)) continue;
        const auto a = new_rows.row(p);
        const auto b = old_rows.row(p);
        double squares = 0.0;
        for (std::size_t i = 0; i < a.size(); ++i) squares += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
        const double difference = std::sqrt(squares);
        const double size = std::max(norm(a), 1e-12);
        const double exact = difference / size;
        // Sums of non-negative terms have a relative error of at most the bound of their additions and roundings; a square root halves
        // it; two norms, the quotient and the constant 1e-12 add up to less than the whole bound. Squares of differences below 2^-63
        // may underflow: each loses at most 2^-150. The double profile took unrounded rows, each within u of the recorded ones.
        double bound = exact * sum_bound(width + 8) + std::sqrt(width * 0x1p-149) / size;
        if (!c.rounds_bfloat16) bound += 2 * kFloatUnit * (norm(a) + norm(b)) / size;
        c.log.require(std::fabs(found[static_cast<std::size_t>(p)] - exact) <= bound, Rule::score_value, c.place(loop, -1, p), exact,
                      found[static_cast<std::size_t>(p)], bound, "score");
      }
    }
  }
}

}  // namespace

void audit_values(const AuditContext& context) {
  logits(context);
  gate(context);
  hidden(context);
  inherited_kv(context);
  scores(context);
}

}  // namespace loopgauge::harness
