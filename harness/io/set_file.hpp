// SPDX-License-Identifier: Apache-2.0
// Set files: what a sweep replays. One line each; `#` starts a comment; blank lines are ignored.
//
//   trace <name> [window <tokens>] [modes <mode> ...]     a trace under every setting, optionally with another window and other modes than
//                                                         the default ones
//   case <id>                                             one case
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace loopgauge::harness {

struct SetTrace {
  std::string name;                     // letters, digits, '.', '_' and '-'; stands for `<name>.h5` among the traces
  int window = 0;                       // 0: the default
  std::vector<std::string> modes = {};  // not interpreted here; empty: the default ones
  int line = 0;                         // of the file, from 1
  bool operator==(const SetTrace&) const = default;
};

struct SetCase {
  std::string id;                       // not interpreted here
  int line = 0;
  bool operator==(const SetCase&) const = default;
};

struct TraceSet {
  std::filesystem::path path;
  std::vector<SetTrace> traces;         // in file order
  std::vector<SetCase> cases;
};

// Throws FileError naming file and line for anything else, for a trace or case listed twice and for an empty set.
TraceSet read_set(const std::filesystem::path& path);

}  // namespace loopgauge::harness
