// SPDX-License-Identifier: Apache-2.0
// Error statistics of one tensor against another. Non-finite values are counted apart, so that a NaN never hides the largest finite error.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "harness/compare/ulp_distance.hpp"

namespace loopgauge::harness {

// Percentiles are nearest rank: the ceil(q * count)-th smallest value, so each is a value that occurred and the last one is the maximum.
inline constexpr std::array<double, 5> kPercentiles{0.50, 0.90, 0.99, 0.999, 1.0};

struct ErrorStats {
  std::int64_t count = 0;      // elements on both sides
  std::int64_t different = 0;  // elements that are not the same number (bits; two NaNs are equal whatever their payload)
  std::int64_t expected_nan = 0, actual_nan = 0;
  std::int64_t expected_inf = 0, actual_inf = 0;
  // Over the pairs in which both sides are finite:
  double max_abs = 0.0;
  std::int64_t max_abs_index = -1;  // flat row-major index; -1: no finite pair
  std::uint64_t max_ulp = 0;        // in units of `format`
  std::int64_t max_ulp_index = -1;
  double rms = 0.0;
  std::array<double, 5> abs_percentiles{};  // of |expected - actual|, in the order of kPercentiles
  UlpFormat format = UlpFormat::float32;
};

// Throws InternalError when the sizes differ: shapes are compared before values.
ErrorStats error_stats(std::span<const float> expected, std::span<const float> actual, UlpFormat format = UlpFormat::float32);

// Nearest-rank percentile of ascending values: the smallest of them that a share q of the values does not exceed; q in (0, 1]. NaN when empty.
double percentile_of_sorted(std::span<const double> ascending, double q);

// The same for showing a tail, q above 1/2: NaN where no value lies above it, since it would be the largest value under another name. The 90th percentile
// needs 10 values, the 99th 100.
double tail_percentile_of_sorted(std::span<const double> ascending, double q);

// Middle of ascending values, of an even number the mean of the middle two. NaN when empty. Of repeated measurements; the 50th percentile is a rank.
double median_of_sorted(std::span<const double> ascending);

}  // namespace loopgauge::harness
