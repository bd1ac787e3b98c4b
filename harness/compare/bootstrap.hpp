// SPDX-License-Identifier: Apache-2.0
// The bootstrap of every interval in a report: units (blocks of rows, requests) drawn with replacement, the same draws for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace loopgauge::harness {

// Calls `use` with how often each of `units` units was drawn, once per resample. A single unit resamples only to itself, no spread can be
// estimated from it: `use` is not called then. The generator is specified bit for bit by the C++ standard; the bounded index is the high
// half of a product, so that no library's distribution enters.
void resample(std::size_t units, std::uint64_t seed, int resamples, const std::function<void(const std::vector<int>&)>& use);

}  // namespace loopgauge::harness
