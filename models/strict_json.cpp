// SPDX-License-Identifier: Apache-2.0
#include "models/strict_json.hpp"

#include <fstream>
#include <set>
#include <system_error>
#include <vector>

#include "models/error.hpp"

namespace loopgauge {

using nlohmann::json;

std::string shown(const json& value) {
  // Non-ASCII is escaped, so a cut never splits a character.
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

json parse_json_object(std::string_view text, const std::string& label) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaximumJsonDepth) {
          throw CheckpointError(label + ": JSON is nested deeper than " + std::to_string(kMaximumJsonDepth) + " levels");
        }
        if (event == json::parse_event_t::object_start) keys_of_open_objects.emplace_back();
        break;
      case json::parse_event_t::object_end:
        keys_of_open_objects.pop_back();
        break;
      case json::parse_event_t::key:
        if (!keys_of_open_objects.back().insert(value.get<std::string>()).second) {
          throw CheckpointError(label + ": JSON key " + shown(value) + " appears twice in one object");
        }
        break;
      default:
        break;
    }
    return true;
  };
  json document;
  try {
    document = json::parse(text.begin(), text.end(), check);
  } catch (const json::exception& error) {
    throw CheckpointError(label + ": not valid JSON (" + error.what() + ")");
  }
  if (!document.is_object()) throw CheckpointError(label + ": expected a JSON object, found " + shown(document));
  return document;
}

json read_json_object(const std::filesystem::path& file, std::uint64_t maximum_bytes) {
  const std::string label = file.string();
  std::error_code error;
  if (!std::filesystem::exists(file, error)) throw CheckpointError(label + ": no such file");
  if (!std::filesystem::is_regular_file(file, error)) throw CheckpointError(label + ": not a regular file");
  const std::uintmax_t bytes = std::filesystem::file_size(file, error);
  if (error) throw CheckpointError(label + ": cannot read its size (" + error.message() + ")");
  if (bytes > maximum_bytes) {
    throw CheckpointError(label + ": has " + std::to_string(bytes) + " bytes, at most " + std::to_string(maximum_bytes) + " are read");
  }
  std::string text(static_cast<std::size_t>(bytes), '\0');
  std::ifstream stream(file, std::ios::binary);
  if (!stream.read(text.data(), static_cast<std::streamsize>(text.size()))) throw CheckpointError(label + ": cannot be read");
  return parse_json_object(text, label);
}

}  // namespace loopgauge
