// SPDX-License-Identifier: Apache-2.0
#include "harness/io/data_paths.hpp"

#include <cstdlib>
#include <string>
#include <system_error>
#include <vector>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> homes() {
  if (const char* home = std::getenv("LOOPGAUGE_HOME"); home != nullptr && *home != '\0') return {home};
  std::vector<fs::path> candidates;
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    // A build folder lies in the source tree, however deep; an installation puts bin/ beside share/.
    constexpr int kLevels = 4;
    fs::path folder = executable.parent_path();
    for (int level = 0; level < kLevels; ++level) {
      candidates.push_back(folder);
      candidates.push_back(folder / "share" / "loopgauge");
      if (folder == folder.parent_path()) break;
      folder = folder.parent_path();
    }
  }
  candidates.emplace_back(LOOPGAUGE_SOURCE_DIR);
  return candidates;
}

// The first home that has `marker`, with `relative` appended.
fs::path find(const fs::path& relative, const fs::path& marker, const std::string& what, const std::string& remedy) {
  std::string tried;
  for (const fs::path& home : homes()) {
    std::error_code error;
    if (fs::exists(home / marker, error)) return home / relative;
    tried += (tried.empty() ? "" : ", ") + (home / marker).string();
  }
  throw FileError("not found: the shipped " + what + " (tried " + tried + "); " + remedy);
}

}  // namespace

fs::path default_checkpoint() {
  return find("models/ouro-tiny", "models/ouro-tiny/config.json", "model",
              "pass --checkpoint DIR, or set LOOPGAUGE_HOME to a directory that has models/ouro-tiny");
}

fs::path data_directory() {
  return find("data", "data/README.md", "traces", "pass --traces FILES, or set LOOPGAUGE_HOME to a directory that has data");
}

fs::path peers_script() {
  return find("harness/bench/peers.py", "harness/bench/peers.py", "script of bench peers", "set LOOPGAUGE_HOME to a directory that has harness/bench/peers.py");
}

}  // namespace loopgauge::harness
