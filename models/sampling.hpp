// SPDX-License-Identifier: Apache-2.0
// The random numbers of seeded sampling (S-SAMP-2): a function of the request, the position that is decided and what is decided about it,
// so that neither batching nor the mode of execution has a part in them.
#pragma once

#include <cstdint>

#include "models/philox.hpp"

namespace loopgauge {

enum class SamplingPurpose : std::uint32_t {
  target = 0,      // a token drawn from the target distribution: every token of serial decoding, bonus tokens
  draft = 1,       // a candidate drawn from a draft's distribution
  acceptance = 2,  // whether a candidate is accepted
  residual = 3,    // the token in place of a rejected candidate
};

// In [0, 1), a multiple of 2^-24. `position` is that of the token that is decided, `request_id` is TraceRequest::id.
constexpr float uniform_draw(std::uint64_t seed, int request_id, int position, SamplingPurpose purpose) {
  const std::array<std::uint32_t, 4> counter{static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(purpose),
                                             static_cast<std::uint32_t>(request_id), 0};
  const std::array<std::uint32_t, 2> key{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  return static_cast<float>(philox4x32_10(counter, key)[0] >> 8) * 0x1p-24f;
}

}  // namespace loopgauge
