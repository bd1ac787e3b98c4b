// SPDX-License-Identifier: Apache-2.0
#include "models/prefix_identity.hpp"

#include "models/error.hpp"
#include "models/sha256.hpp"

namespace loopgauge {

std::string prefix_identity(std::string_view model_sha256, const EffectiveConfig& config, PrefixEncoding encoding,
                            std::span<const std::int32_t> tokens) {
  if (tokens.empty() || tokens.size() % static_cast<std::size_t>(config.window()) != 0) {
    throw InternalError("a prefix of " + std::to_string(tokens.size()) + " tokens is no whole number of windows of " + std::to_string(config.window()));
  }
  // Fields are told apart by a byte that neither of the texts contains; token ids are little-endian 32-bit words.
  Sha256 hash;
  const auto field = [&](std::string_view text) {
    hash.update(text.data(), text.size());
    hash.update("\n", 1);
  };
  field("loopgauge-prefix-v1");
  field(model_sha256);
  field(config.canonical_json());
  field(encoding == PrefixEncoding::planes ? "planes" : "blocks");
  for (const std::int32_t token : tokens) {
    const auto word = static_cast<std::uint32_t>(token);
    const unsigned char bytes[4] = {static_cast<unsigned char>(word), static_cast<unsigned char>(word >> 8), static_cast<unsigned char>(word >> 16),
                                    static_cast<unsigned char>(word >> 24)};
    hash.update(bytes, sizeof bytes);
  }
  return hash.hex_digest();
}

PrefixEncoding published_encoding(const EffectiveConfig& config) {
  return config.q().enabled && config.q().policy == EncodingPolicy::streaming ? PrefixEncoding::blocks : PrefixEncoding::planes;
}

}  // namespace loopgauge
