// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/error_stats.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "harness/compare/float_bits.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

// From 0, of at least one value.
std::size_t nearest_rank(std::size_t count, double q) {
  const auto rank = static_cast<std::int64_t>(std::ceil(q * static_cast<double>(count)));
  return static_cast<std::size_t>(std::clamp<std::int64_t>(rank - 1, 0, static_cast<std::int64_t>(count) - 1));
}

}  // namespace

double percentile_of_sorted(std::span<const double> ascending, double q) {
  if (ascending.empty()) return std::numeric_limits<double>::quiet_NaN();
  return ascending[nearest_rank(ascending.size(), q)];
}

double tail_percentile_of_sorted(std::span<const double> ascending, double q) {
  if (ascending.empty() || nearest_rank(ascending.size(), q) + 1 == ascending.size()) return std::numeric_limits<double>::quiet_NaN();
  return percentile_of_sorted(ascending, q);
}

double median_of_sorted(std::span<const double> ascending) {
  if (ascending.empty()) return std::numeric_limits<double>::quiet_NaN();
  const std::size_t middle = ascending.size() / 2;
  return ascending.size() % 2 == 1 ? ascending[middle] : 0.5 * (ascending[middle - 1] + ascending[middle]);
}

ErrorStats error_stats(std::span<const float> expected, std::span<const float> actual, UlpFormat format) {
  if (expected.size() != actual.size()) {
    throw InternalError("error statistics of " + std::to_string(actual.size()) + " elements against " + std::to_string(expected.size()));
  }
  ErrorStats stats;
  stats.count = static_cast<std::int64_t>(expected.size());
  stats.format = format;
  std::vector<double> errors;
  errors.reserve(expected.size());
  double squares = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const float e = expected[i];
    const float a = actual[i];
    stats.expected_nan += std::isnan(e);
    stats.actual_nan += std::isnan(a);
    stats.expected_inf += std::isinf(e);
    stats.actual_inf += std::isinf(a);
    stats.different += !same_float(e, a);
    if (!std::isfinite(e) || !std::isfinite(a)) continue;
    const double error = std::fabs(static_cast<double>(e) - static_cast<double>(a));
    errors.push_back(error);
    squares += error * error;
    if (stats.max_abs_index < 0 || error > stats.max_abs) {
      stats.max_abs = error;
      stats.max_abs_index = static_cast<std::int64_t>(i);
    }
    const std::uint64_t ulps = ulp_distance(e, a, format);
    if (stats.max_ulp_index < 0 || ulps > stats.max_ulp) {
      stats.max_ulp = ulps;
      stats.max_ulp_index = static_cast<std::int64_t>(i);
    }
  }
  if (errors.empty()) {
    stats.rms = std::numeric_limits<double>::quiet_NaN();
    stats.abs_percentiles.fill(std::numeric_limits<double>::quiet_NaN());
    return stats;
  }
  stats.rms = std::sqrt(squares / static_cast<double>(errors.size()));
  std::sort(errors.begin(), errors.end());
  for (std::size_t k = 0; k < kPercentiles.size(); ++k) stats.abs_percentiles[k] = percentile_of_sorted(errors, kPercentiles[k]);
  return stats;
}

}  // namespace loopgauge::harness
