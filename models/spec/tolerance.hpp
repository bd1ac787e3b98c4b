// SPDX-License-Identifier: Apache-2.0
// Tolerances as data. Each is declared once, beside its operation (models/spec/<operation>.hpp), with its derivation; tests, the harness
// and reports only evaluate them. A check is always error / bound <= 1, and the ratio is what gets reported.
//
// Derivations use the unit roundoffs u below and gamma(n) = n u / (1 - n u), the classical bound for n accumulated roundings. The two
// sides are the reference, whose order of additions is declared (S-SUM-1..3), and an executor that adds the same terms in FP32 in any
// order. Tensor cores truncate aligned partial sums instead of rounding them, so the executor's unit is 2 u.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

namespace loopgauge::spec {

enum class Format { bf16, fp16, fp32, int4, uint8, int32 };

constexpr std::string_view to_string(Format format) {
  switch (format) {
    case Format::bf16:
      return "bf16";
    case Format::fp16:
      return "fp16";
    case Format::fp32:
      return "fp32";
    case Format::int4:
      return "int4";
    case Format::uint8:
      return "uint8";
    case Format::int32:
      return "int32";
  }
  return "";
}

// Significant bits, the leading one included. 0 for integers.
constexpr int significant_bits(Format format) {
  switch (format) {
    case Format::bf16:
      return 8;
    case Format::fp16:
      return 11;
    case Format::fp32:
      return 24;
    default:
      return 0;
  }
}

// Half the relative spacing: 2^-8 (bf16), 2^-11 (fp16), 2^-24 (fp32).
constexpr double unit_roundoff(Format format) {
  double u = 1.0;
  for (int i = 0; i < significant_bits(format); ++i) u /= 2;
  return u;
}

// Spacing of the floating-point `format` at `value`; the subnormal spacing below the smallest normal number.
inline double ulp(double value, Format format) {
  const int least_exponent = format == Format::fp16 ? -14 : -126;
  const int exponent = value == 0.0 || !std::isfinite(value) ? least_exponent : std::ilogb(value);
  return std::ldexp(1.0, (exponent < least_exponent ? least_exponent : exponent) - (significant_bits(format) - 1));
}

constexpr double gamma(double roundings, double u) { return roundings * u / (1.0 - roundings * u); }

// |difference| <= bound * sum of |terms| between two FP32 evaluations of one sum of `terms` terms.
// dot and lane_sum of the reference: each lane adds at most ceil(terms / 16) values, the first one exactly, then 4 levels of the tree.
constexpr double lane_sum_bound(double terms) {
  const double chain = static_cast<double>((static_cast<std::int64_t>(terms) + 15) / 16) + 3.0;
  return gamma(chain, unit_roundoff(Format::fp32)) + gamma(terms, 2 * unit_roundoff(Format::fp32));
}
// running_sum of the reference: one chain of `terms` additions of rounded products.
constexpr double running_sum_bound(double terms) {
  return gamma(terms + 1, unit_roundoff(Format::fp32)) + gamma(terms, 2 * unit_roundoff(Format::fp32));
}

enum class ToleranceKind {
  bit_exact,        // the same bits
  ulp,              // at most `ulps` spacings of the output format
  norm_bound,       // ulps and an error bound in proportion to a magnitude such as sum |a| |b|
  inherited,        // like norm_bound, and part of it comes from the error of an earlier operation in the same record
  decision_margin,  // a discrete outcome: equal, or the margin of what differs is within the error of the compared values
  statistical,      // a distance judged against the distance of two legitimate executions
};

constexpr std::string_view to_string(ToleranceKind kind) {
  switch (kind) {
    case ToleranceKind::bit_exact:
      return "bit_exact";
    case ToleranceKind::ulp:
      return "ulp";
    case ToleranceKind::norm_bound:
      return "norm_bound";
    case ToleranceKind::inherited:
      return "inherited";
    case ToleranceKind::decision_margin:
      return "decision_margin";
    case ToleranceKind::statistical:
      return "statistical";
  }
  return "";
}

struct Tolerance {
  ToleranceKind kind = ToleranceKind::bit_exact;

  // Numbers of ulp, norm_bound and inherited; see bound().
  double ulps = 0.0;             // spacings of `format`
  Format format = Format::fp32;  // of the output
  int lane_sums = 0;             // sums over the terms in S-SUM-1 or S-SUM-2 order that enter relative to the magnitude
  int running_sums = 0;          // the same in S-SUM-3 order
  double relative = 0.0;         // remaining roundings, relative to the magnitude
  double input_gain = 0.0;       // relative error per unit of input error
  double differing_share = 1.0;  // second limit: share of the elements that may differ at all

  // decision_margin: explained if margin <= margin_factor * bound of the compared value.
  double margin_factor = 0.0;
  std::string_view compared_value{};  // "operation.output" whose bound counts

  // statistical: distance(executor, reference) <= ratio * distance(reordered, declared), per metric and percentile.
  double ratio = 0.0;

  std::string_view magnitude{};      // what Element::magnitude and Element::input_error are, in words
  std::string_view domain{};         // where the derivation holds
  std::string_view justification{};  // the derivation; never empty
};

// One element under comparison.
struct Element {
  double expected = 0.0;
  double magnitude = 0.0;          // see Tolerance::magnitude
  double terms = 0.0;              // terms of the sum
  double input_error = 0.0;        // absolute error of the inherited input
  double declared_relative = 0.0;  // narrower operands that the specification allows and the report declares (S-KVQ-13, S-ATT-5)
};

// Largest allowed |actual - expected|. 0 for bit_exact. `actual` decides the spacing when it is the larger of the two.
inline double bound(const Tolerance& tolerance, const Element& element, double actual) {
  if (tolerance.kind == ToleranceKind::bit_exact) return 0.0;
  const double larger = std::fmax(std::fabs(element.expected), std::fabs(actual));
  const double relative = tolerance.lane_sums * lane_sum_bound(element.terms) + tolerance.running_sums * running_sum_bound(element.terms) +
                          tolerance.relative + tolerance.input_gain * element.input_error + element.declared_relative;
  const double spacing = tolerance.ulps == 0.0 ? 0.0 : tolerance.ulps * ulp(larger, tolerance.format);
  return spacing + relative * element.magnitude;
}

// |actual - expected| / bound: passes at <= 1. 0 when the two are equal as numbers or both NaN, infinite when a difference has no bound
// (a bit_exact output, one side not finite). Signed zeros are compared by the callers that compare bits.
inline double error_ratio(const Tolerance& tolerance, const Element& element, double actual) {
  if (actual == element.expected || (std::isnan(actual) && std::isnan(element.expected))) return 0.0;
  const double error = std::fabs(actual - element.expected);
  const double limit = bound(tolerance, element, actual);
  if (!std::isfinite(error) || !std::isfinite(limit) || limit <= 0.0) return std::numeric_limits<double>::infinity();
  return error / limit;
}

// For decision_margin: margin / (margin_factor * bound of the compared value): explained at <= 1.
inline double margin_ratio(const Tolerance& tolerance, double margin, double value_bound) {
  if (margin <= 0.0) return 0.0;
  const double limit = tolerance.margin_factor * value_bound;
  return limit > 0.0 ? margin / limit : std::numeric_limits<double>::infinity();
}

}  // namespace loopgauge::spec
