// SPDX-License-Identifier: Apache-2.0
#include "harness/io/set_file.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::string_view kNameCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

}  // namespace

std::vector<std::string> read_set(const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream) throw FileError(path.string() + ": the set file is missing or not readable");
  std::vector<std::string> names;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    const std::string place = path.string() + ":" + std::to_string(number);
    std::istringstream words(line.substr(0, line.find('#')));
    std::string keyword, name, extra;
    if (!(words >> keyword)) continue;
    if (keyword != "trace") throw FileError(place + ": begins with \"" + keyword + "\", expected `trace <name>`");
    if (!(words >> name)) throw FileError(place + ": `trace` without a name");
    if (words >> extra) throw FileError(place + ": \"" + extra + "\" follows the trace name, expected one name a line");
    if (name.front() == '.' || name.find_first_not_of(kNameCharacters) != std::string::npos) {
      throw FileError(place + ": \"" + name + "\" is not a trace name (letters, digits, '.', '_' and '-', not beginning with '.')");
    }
    if (std::find(names.begin(), names.end(), name) != names.end()) throw FileError(place + ": trace " + name + " is listed twice");
    names.push_back(name);
  }
  if (stream.bad()) throw FileError(path.string() + ": reading failed");
  if (names.empty()) throw FileError(path.string() + ": lists no traces");
  return names;
}

}  // namespace loopgauge::harness
