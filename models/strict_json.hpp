// SPDX-License-Identifier: Apache-2.0
// JSON of a checkpoint folder, parsed strictly: the parser's usual leniencies would let two readers of one file disagree.
// Internal to models/: the only header here that shows the JSON library.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace loopgauge {

inline constexpr int kMaximumJsonDepth = 16;

// Parses `text` as one JSON object. Throws CheckpointError beginning with `label` on a syntax error, on a key that one object holds
// twice (the usual parsers keep the last), on nesting deeper than kMaximumJsonDepth and on any other top-level value.
nlohmann::json parse_json_object(std::string_view text, const std::string& label);

// The same for a file of at most `maximum_bytes`; the label is the path.
nlohmann::json read_json_object(const std::filesystem::path& file, std::uint64_t maximum_bytes);

// `value` as it reads in a message: one line, at most 80 characters of JSON.
std::string shown(const nlohmann::json& value);

}  // namespace loopgauge
