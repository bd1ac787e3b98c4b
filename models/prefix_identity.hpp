// SPDX-License-Identifier: Apache-2.0
// Identity of a completed prompt window that a later request may begin with (S-PFX-1).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "models/algorithm_config.hpp"

namespace loopgauge {

// How the window's K/V is kept (S-PFX-2).
enum class PrefixEncoding { planes, blocks };  // BF16 planes and activity; sealed INT4 blocks

// SHA-256, 64 lower-case hex digits, over model, effective configuration, encoding and every token from position 0 through the window's
// end: windows that differ in anything that their K/V depends on have different identities. `tokens` holds whole windows.
std::string prefix_identity(std::string_view model_sha256, const EffectiveConfig& config, PrefixEncoding encoding,
                            std::span<const std::int32_t> tokens);

// What a run under this configuration publishes: blocks under `streaming`, planes otherwise.
PrefixEncoding published_encoding(const EffectiveConfig& config);

}  // namespace loopgauge
