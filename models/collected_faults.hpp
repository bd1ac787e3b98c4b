// SPDX-License-Identifier: Apache-2.0
// Checks that go on after a fault: `doctor` lists every fault of a checkpoint, loading throws the first.
// Internal to models/.
#pragma once

#include <string>
#include <vector>

#include "models/error.hpp"

namespace loopgauge {

// Runs one check; false when it threw a CheckpointError, whose sentence is then the last of `faults`.
template <class Step>
bool collect(std::vector<std::string>& faults, const Step& step) {
  try {
    step();
  } catch (const CheckpointError& error) {
    faults.push_back(error.what());
    return false;
  }
  return true;
}

inline void throw_first(const std::vector<std::string>& faults) {
  if (faults.empty()) return;
  const std::size_t others = faults.size() - 1;
  throw CheckpointError(faults.front() +
                        (others == 0 ? "" : " (and " + std::to_string(others) + (others == 1 ? " more fault)" : " more faults)")));
}

}  // namespace loopgauge
