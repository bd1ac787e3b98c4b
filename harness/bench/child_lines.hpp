// SPDX-License-Identifier: Apache-2.0
// Another program, whose standard output is read line by line while it runs.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace loopgauge::harness {

struct ChildResult {
  int exit_code = -1;         // 128 + signal where one ended it; 127: it could not be started
  bool timed_out = false;     // it ran longer than it may and was ended
  std::string last_error;     // the last line of its standard error that is not empty
};

enum class ChildErrors { shown, kept_back };

// Starts `arguments` (the first is the program, looked for on PATH) with nothing to read and calls line() for every line of its standard output; its standard
// error appears on this program's, or does not. Ends it, and throws Interrupted, once a signal has arrived; what line() throws ends it too. `seconds`: how long
// it may run.
ChildResult run_child(const std::vector<std::string>& arguments, double seconds, const std::function<void(const std::string&)>& line,
                      ChildErrors errors = ChildErrors::shown);

}  // namespace loopgauge::harness
