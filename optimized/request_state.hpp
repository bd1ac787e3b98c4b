// SPDX-License-Identifier: Apache-2.0
// Everything the CUDA runtime keeps of one request between submissions. What is issued runs ahead of what has been read: `committed`, `encoded`
// and `row` say what has been issued, the record holds what has been read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "models/run_record.hpp"
#include "models/trace.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/ops/speculative_rows.cuh"
#include "optimized/runtime/device_allocator.hpp"
#include "optimized/snapshot.hpp"

namespace loopgauge::optimized {

// Device state of one prompt window between its loops.
struct WindowState {
  DeviceBuffer states;                                   // [window, hidden] BF16: H of the last completed loop, inherited where not executed
  DeviceBuffer scores;                                   // [2][window] FP32, loops 3 and 4: of the previous loop's active rows, compact
  DeviceBuffer positions;                                // [3][window] int32: all of the window, what loop 3 and what loop 4 selected; ascending
  std::array<int, 2> scored{};                           // rows scored so far
};

// The decode row that is on its way through the loops.
struct DecodeRow {
  int position = -1;
  int last_loop = kLoops;                                // lowered when the host learns what the exit rule has decided
  int completed = 0;                                     // loops issued
  bool depth_given = false;                              // last_loop comes from the decisions that are replayed
  bool committed = false;                                // all its loops are issued
  int reference = -1;                                    // slot of the attention reference state; negative: none
  ReferenceStore::Key key;
  bool reference_given_away = false;                     // by a planted fault
};

// A speculative row that is on its way (S-SPEC). The host knows the token that it is fed; with several submissions in flight it knows of rows of
// a round nothing but the loops, and of tokens of a pipeline not even that.
struct LiveRow {
  int position = -1;
  std::int32_t token = 0;
  int completed = 0;                                     // loops issued
  int reference = -1;                                    // slot of its own attention reference state, from loop 2 on; negative: none
  ReferenceStore::Key key;
  int state = 0;                                         // its place among the request's decode states, the same until it is gone
  bool drawn = false;                                    // its token was drawn from a draft's distribution, which is kept at that place
};

struct RequestState {
  const TraceRequest* request = nullptr;
  int index = 0;                                         // in the trace
  int prompt_length = 0;
  int capacity = 0;                                      // prompt plus every token that may be forwarded
  int slot = -1;                                         // of the K/V cache, and row of the run's decode arrays; negative: not open
  std::uint64_t generation = 0;
  // Loops 3 and 4, per window: positions that the selection found, once they have been read; empty before.
  std::array<std::vector<std::vector<std::int32_t>>, kLoops> active;
  std::vector<std::optional<WindowState>> windows;       // between the first and the last loop of the window
  std::vector<int> begun_loops;                          // per window: the last loop that has been issued for a part of it
  std::vector<int> completed_loops;                      // per window: the last loop that has been issued for all of it
  int complete_windows = 0;                              // issued through their last loop
  int held_windows = 0;                                  // published ones that the request reads
  int committed = 0;                                     // positions that have been issued through their last loop; 0 before the prompt is complete
  int encoded = 0;                                       // encoded frontier reached so far
  int encoded_ahead = 0;                                 // end of what is encoded beyond it beside its BF16 rows: for later rows of a round, before it
                                                         // is decided, by a planted fault
  int unreadable = kNoPosition;                          // encoded positions from here on are read as BF16 until they are encoded again (S-SPEC-9)
  std::uint64_t incarnations = 0;
  bool stopped = false;                                  // EOS was emitted and has been read
  bool finished = false;                                 // nothing more runs, what has not been read is dropped, nothing is held
  bool cancelled = false;                                // finished before its end; what was decided for its windows is still recorded
  bool handed_over = false;                              // finished here with its prompt; what was observed of that is still recorded
  std::vector<std::byte> snapshot;                       // of a preempted request
  DecodeRow row;
  std::vector<LiveRow> live;                             // of the round or pipeline that is on its way, at consecutive positions from the pending one
  // Speculation with several submissions in flight: `committed` counts rows whose results have been read.
  int unread_rounds = 0;                                 // that were issued and have not been read
  int first_step = 0;                                    // of the run's speculation steps
  std::vector<std::pair<int, ReferenceStore::Key>> live_references;       // by place of a live row
  std::optional<SpeculationState> settled;               // what the device has decided, where everything that was issued has run
  std::optional<std::pair<int, ReferenceStore::Key>> previous_reference;  // kept by a planted fault
  std::map<int, std::pair<int, ReferenceStore::Key>> stale_references;    // by position: of rows that were given up, kept by a planted fault
  std::set<int> stale_rows;                              // positions whose rows of loop 3 a planted fault takes for those of whoever comes to stand there
  RequestRecord record;                                  // filled as results are read

  // Results that have not been read are part of no record.
  bool drops_results() const { return finished && !cancelled && !handed_over; }
  int fed_limit() const { return capacity - prompt_length; }
  // Positions that belong to the result whatever has not been read yet: the token fed to each is known.
  int verified() const {
    const int known = prompt_length + static_cast<int>(record.tokens.size());
    return committed < known ? committed : known;
  }
  std::string name() const { return "request " + std::to_string(index); }
};

}  // namespace loopgauge::optimized
