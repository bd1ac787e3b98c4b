// SPDX-License-Identifier: Apache-2.0
// Everything the CUDA runtime keeps of one request between submissions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/run_record.hpp"
#include "models/trace.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

// Device state of one prompt window between its loops.
struct WindowState {
  DeviceBuffer states;                                   // [window, hidden] BF16: H of the last completed loop, inherited where not executed
  DeviceBuffer scores;                                   // [2][window] FP32, loops 3 and 4: of the previous loop's active rows, compact
  std::array<int, 2> scored{};                           // rows scored so far
};

// The decode row that is on its way through the loops.
struct DecodeRow {
  int position = -1;
  int last_loop = kLoops;                                // lowered when the exit rule decides
  bool depth_given = false;                              // last_loop comes from the decisions that are replayed
  bool committed = false;
  int reference = -1;                                    // slot of the attention reference state; negative: none
  ReferenceStore::Key key;
};

struct RequestState {
  const TraceRequest* request = nullptr;
  int index = 0;                                         // in the trace
  int prompt_length = 0;
  int capacity = 0;                                      // prompt plus every token that may be forwarded
  int slot = -1;                                         // of the K/V cache, and row of the run's decode arrays; negative: not open
  std::uint64_t generation = 0;
  std::array<std::vector<std::vector<std::int32_t>>, kLoops> active;  // per loop and window: ascending positions that execute the loop
  std::vector<std::optional<WindowState>> windows;       // between the first and the last loop of the window
  int committed = 0;
  int encoded = 0;                                       // encoded frontier reached so far
  int encoded_ahead = 0;                                 // end of what a planted fault has encoded beyond it
  std::uint64_t incarnations = 0;
  bool stopped = false;                                  // EOS was emitted
  bool finished = false;                                 // harvested and closed
  DecodeRow row;
  std::optional<std::pair<int, ReferenceStore::Key>> previous_reference;  // kept by a planted fault
  RequestRecord record;                                  // filled as the run proceeds

  int fed_limit() const { return capacity - prompt_length; }
  std::string name() const { return "request " + std::to_string(index); }
};

}  // namespace loopgauge::optimized
