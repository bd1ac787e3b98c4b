// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <string>
#include <string_view>

#include "models/error.hpp"

namespace loopgauge::harness {

// Shard i of n, written "i/n" with 1 <= i <= n.
struct Shard {
  int index = 1;
  int count = 1;
};

// Throws ConfigError.
inline Shard parse_shard(std::string_view text) {
  Shard shard;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, shard.index);
  if (first.ec == std::errc{} && first.ptr != end && *first.ptr == '/') {
    const auto second = std::from_chars(first.ptr + 1, end, shard.count);
    if (second.ec == std::errc{} && second.ptr == end && shard.index >= 1 && shard.index <= shard.count) return shard;
  }
  throw ConfigError("shard '" + std::string(text) + "' is not of the form i/n with 1 <= i <= n, such as 1/4");
}

}  // namespace loopgauge::harness
