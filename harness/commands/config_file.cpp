// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/config_file.hpp"

#include <algorithm>
#include <sstream>
#include <string_view>
#include <unordered_map>

#include "harness/io/text_file.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

bool is_name(std::string_view text) {
  const auto allowed = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
  return !text.empty() && std::all_of(text.begin(), text.end(), allowed);
}

class LineReader {
 public:
  LineReader(const std::filesystem::path& path, int line) : where_(path.string() + ":" + std::to_string(line) + ": ") {}

  [[noreturn]] void fail(const std::string& what) const { throw ConfigError(where_ + what); }

  // The value of an assignment: `text` is everything after '='.
  std::string value(std::string_view text) const {
    if (text.empty()) fail("a key has no value");
    if (text.front() == '"' || text.front() == '\'') return quoted_value(text);
    if (text.front() == '[') return array_value(text);
    return std::string(bare_value(without_comment(text)));
  }

  std::string_view without_comment(std::string_view text) const { return trimmed(text.substr(0, text.find('#'))); }

 private:
  std::string quoted_value(std::string_view text) const {
    const std::size_t end = text.find(text.front(), 1);
    if (end == std::string_view::npos) fail("a quoted value has no closing quote");
    if (!without_comment(text.substr(end + 1)).empty()) fail("text follows a quoted value");
    const std::string_view content = text.substr(1, end - 1);
    if (text.front() == '"' && content.find('\\') != std::string_view::npos)
      fail("escapes are not supported; use '...' for text with a backslash");
    return std::string(content);
  }

  std::string array_value(std::string_view text) const {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) fail("an array is not closed on its line");
    if (!without_comment(text.substr(end + 1)).empty()) fail("text follows an array");
    std::string joined;
    std::string_view rest = text.substr(1, end - 1);
    while (true) {
      const std::size_t comma = rest.find(',');
      const std::string_view element = trimmed(rest.substr(0, comma));
      if (element.find_first_of("\"'") != std::string_view::npos) fail("an array holds numbers; several words go on the command line");
      joined += std::string(bare_value(element));
      if (comma == std::string_view::npos) return joined;
      joined += ',';
      rest.remove_prefix(comma + 1);
    }
  }

  std::string_view bare_value(std::string_view text) const {
    if (text.empty()) fail("a value is empty");
    if (text.find_first_of(" \t\"'[]=,") != std::string_view::npos) fail("value '" + std::string(text) + "' needs quotes");
    return text;
  }

  std::string where_;
};

}  // namespace

std::vector<ConfigEntry> read_config_file(const std::filesystem::path& path) {
  std::istringstream file(read_text_file(path, "configuration file"));
  std::vector<ConfigEntry> entries;
  std::unordered_map<std::string, int> lines;  // by key
  std::string section;
  int number = 0;
  for (std::string raw; std::getline(file, raw);) {
    const LineReader reader(path, ++number);
    // Before any message quotes the line: a terminal would obey what a binary file holds.
    if (std::any_of(raw.begin(), raw.end(), [](unsigned char c) { return (c < 0x20 && c != '\t' && c != '\r') || c == 0x7f; })) {
      reader.fail("holds a control character; a configuration file is text");
    }
    const std::string_view line = trimmed(raw);
    if (line.empty() || line.front() == '#') continue;
    if (line.front() == '[') {
      const std::string_view header = reader.without_comment(line);
      if (header.back() != ']' || !is_name(trimmed(header.substr(1, header.size() - 2)))) {
        reader.fail("'" + std::string(header) + "' is not a section header such as [token_sparse_prefill]");
      }
      section = trimmed(header.substr(1, header.size() - 2));
      continue;
    }
    const std::size_t equals = line.find('=');
    const std::string_view name = trimmed(line.substr(0, equals));
    if (equals == std::string_view::npos || !is_name(name)) reader.fail("'" + std::string(line) + "' is not of the form key = value");
    const std::string key = section.empty() ? std::string(name) : section + "." + std::string(name);
    const auto [earlier, is_new] = lines.emplace(key, number);
    if (!is_new) reader.fail("key '" + key + "' was already given in line " + std::to_string(earlier->second));
    entries.push_back({key, reader.value(trimmed(line.substr(equals + 1))), number});
  }
  return entries;
}

}  // namespace loopgauge::harness
