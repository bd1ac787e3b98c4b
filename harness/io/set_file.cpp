// SPDX-License-Identifier: Apache-2.0
#include "harness/io/set_file.hpp"

#include <charconv>
#include <sstream>
#include <unordered_set>

#include "harness/io/text_file.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::string_view kNameCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

// `words` stands behind the word `trace`.
SetTrace read_trace_line(std::istringstream& words, const std::string& place) {
  SetTrace trace;
  if (!(words >> trace.name)) throw FileError(place + ": `trace` without a name");
  if (trace.name.front() == '.' || trace.name.find_first_not_of(kNameCharacters) != std::string::npos) {
    throw FileError(place + ": \"" + trace.name + "\" is not a trace name (letters, digits, '.', '_' and '-', not beginning with '.')");
  }
  std::string word;
  bool more = static_cast<bool>(words >> word);
  if (more && word == "window") {
    if (!(words >> word)) throw FileError(place + ": `window` without a number of tokens");
    const auto [end, status] = std::from_chars(word.data(), word.data() + word.size(), trace.window);
    if (status != std::errc{} || end != word.data() + word.size() || trace.window <= 0 || trace.window % 64 != 0) {
      throw FileError(place + ": window \"" + word + "\" is not a positive multiple of 64");
    }
    more = static_cast<bool>(words >> word);
  }
  if (!more) return trace;
  if (word != "modes") {
    throw FileError(place + ": \"" + word +
                    "\" follows the trace name, expected `window <tokens>`, `modes <mode> ...` or the end of the line");
  }
  while (words >> word) trace.modes.push_back(word);
  if (trace.modes.empty()) throw FileError(place + ": `modes` without a mode");
  return trace;
}

}  // namespace

TraceSet read_set(const std::filesystem::path& path) {
  std::istringstream stream(read_text_file(path, "set file"));
  TraceSet set{path, {}, {}};
  std::unordered_set<std::string> names, ids;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    const std::string place = path.string() + ":" + std::to_string(number);
    std::istringstream words(line.substr(0, line.find('#')));
    std::string keyword;
    if (!(words >> keyword)) continue;
    if (keyword == "trace") {
      SetTrace trace = read_trace_line(words, place);
      trace.line = number;
      if (!names.insert(trace.name).second) throw FileError(place + ": trace " + trace.name + " is listed twice");
      set.traces.push_back(std::move(trace));
    } else if (keyword == "case") {
      std::string id, extra;
      if (!(words >> id)) throw FileError(place + ": `case` without an id");
      if (words >> extra) throw FileError(place + ": \"" + extra + "\" follows the case id, expected one id a line");
      if (!ids.insert(id).second) throw FileError(place + ": case " + id + " is listed twice");
      set.cases.push_back({std::move(id), number});
    } else {
      throw FileError(place + ": begins with \"" + keyword + "\", expected `trace <name>` or `case <id>`");
    }
  }
  if (set.traces.empty() && set.cases.empty()) throw FileError(path.string() + ": lists neither traces nor cases");
  return set;
}

}  // namespace loopgauge::harness
