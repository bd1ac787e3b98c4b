// SPDX-License-Identifier: Apache-2.0
// One line of progress on standard error, only when that is a terminal: logs and pipes never see it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace loopgauge::harness {

class Progress {
 public:
  // `label` names the work ("run serial/t0s0q0/one"), `total` its steps.
  Progress(std::string label, std::int64_t total);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Steps done so far and what is being done now. Redraws at most ten times a second.
  void update(std::int64_t done, std::string_view now = {});
  // Clears the line, so that other output can be printed; the next update draws it again.
  void clear();

 private:
  std::string label_;
  std::int64_t total_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_draw_{};
};

}  // namespace loopgauge::harness
