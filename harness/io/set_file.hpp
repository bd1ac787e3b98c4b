// SPDX-License-Identifier: Apache-2.0
// Set files: which traces a sweep replays. One `trace <name>` a line; `#` starts a comment; blank lines are ignored.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace loopgauge::harness {

// Trace names in file order. A name is letters, digits, '.', '_' and '-', and stands for `<name>.h5` among the traces.
// Throws FileError naming file and line for anything else, for a name listed twice and for a set without traces.
std::vector<std::string> read_set(const std::filesystem::path& path);

}  // namespace loopgauge::harness
