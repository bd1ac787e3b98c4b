// SPDX-License-Identifier: Apache-2.0
// What the reference knows of one request. RequestStorage is what the request holds on the device: it is allocated when the request begins,
// serialized and destroyed by a preemption, and freed at the request's end. RequestState is the rest: its place in the trace, what is known
// of its progress on the host, and its record.
#pragma once

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "models/run_record.hpp"
#include "models/trace.hpp"
#include "reference/kv/kv_planes.hpp"
#include "reference/ops/exit_gate.hpp"
#include "reference/ops/matrix.hpp"
#include "reference/run/attention_references.hpp"
#include "reference/run/prefix_store.hpp"

namespace loopgauge::reference {

// A prompt window between its first loop and its last. The rows of all loops are kept: selection compares two of them (S-TSEL-3).
template <class Real>
struct WindowState {
  PositionRange positions;
  std::array<Matrix<Real>, kLoops> hidden;      // H[r], [positions, hidden]
  std::array<std::vector<int>, kLoops> active;  // ascending positions that execute the loop; empty before it begins
  std::array<std::vector<Real>, 2> scores;      // loops 3, 4: [positions], NaN where not taken

  WindowState() = default;
  WindowState(PositionRange range, int loops, int hidden_width) : positions(range) {
    constexpr Real kNothing = std::numeric_limits<Real>::quiet_NaN();
    for (int r = 0; r < loops; ++r) hidden[static_cast<std::size_t>(r)] = Matrix<Real>::Constant(range.size(), hidden_width, kNothing);
    for (auto& s : scores) s.assign(static_cast<std::size_t>(range.size()), kNothing);
  }
};

// A decode row on its way through the loops, or the last one that finished.
template <class P>
struct DecodeRow {
  using Real = typename P::Real;
  int position = -1;
  int incarnation = -1;
  std::int32_t token = 0;  // that it was fed
  int completed_loops = 0;
  int last_loop = kLoops;    // lowered when the exit rule decides
  bool depth_given = false;  // by a decision-forced replay: the exit rule does not decide
  bool finished = false;
  ExitHazard<P> hazard;
  int reference = -1;                            // slot of the run's pool from loop 2 to the row's last loop, otherwise -1
  bool reference_given_away = false;             // by Fault::slot_reused_early
  std::array<std::vector<Real>, kLoops> hidden;  // H[r]
  std::vector<Real> draft;                       // speculation with sampling: the distribution that its token was drawn from
};

inline constexpr int kNoPosition = std::numeric_limits<int>::max();

template <class P>
struct RequestStorage {
  using Real = typename P::Real;

  KvPlanes<Real> kv;
  std::vector<std::uint8_t> executed_loops;  // [capacity] last executed loop of each position: the activity maps
  std::vector<int> window_loops;             // completed loops per window
  std::map<int, WindowState<Real>> windows;  // begun and not complete
  std::vector<CodecBlock> blocks;            // under `streaming`, those of unfinished windows hold their first streams only
  int encoded = 0;                           // blocks of all loops cover [0, encoded)
  int committed = 0;                         // S-TERM-6
  std::vector<std::int32_t> tokens;          // of a free run, as chosen: those past an end that has not been read are among them
  int rows_finished = 0;                     // decode rows that executed their last loop
  int incarnations = 0;
  DecodeRow<P> row;
  std::vector<Real> final_hidden;         // H of the last loop at the last prompt position, of a prompt that was handed over or will be
  std::vector<DecodeRow<P>> live;         // speculative rows at consecutive positions from the first that is not committed
  bool ended = false;                     // of a free run: the end of the sequence has been emitted, read or not
  int unreadable = kNoPosition;           // sealed positions from here on are read as BF16 until they are encoded again (S-SPEC-9)
  std::vector<HeldWindow<Real>> held_windows;  // published ones, until the request lets go of its storage
  bool token_lost = false;                // by Fault::resume_without_token
  std::map<int, AttentionReference<Real>> stale_references;  // by position, of Fault::stale_reference_at_position
  std::set<int> stale_rows;                                  // positions whose plane of loop 3 Fault::plane_not_truncated has left

  RequestStorage(const ModelConfig& model, int capacity, int windows_of_prompt, bool quantized)
      : kv(model, capacity, quantized),
        executed_loops(static_cast<std::size_t>(capacity), 0),
        window_loops(static_cast<std::size_t>(windows_of_prompt), 0) {}
};

template <class P>
struct RequestState {
  enum class Phase { waiting, live, preempted, ended, cancelled };

  const TraceRequest* request = nullptr;
  int index = 0;  // in the trace
  int prompt_length = 0;
  int capacity = 0;  // prompt plus every token that may be forwarded
  Phase phase = Phase::waiting;
  int generation = -1;                      // distinguishes whoever bears the same id, one after the other
  bool dirty = false;                       // a failed submission touched it: nothing runs until a rewind
  std::unique_ptr<RequestStorage<P>> held;  // live requests only
  std::vector<std::byte> snapshot;          // preempted requests only
  std::map<int, StepKeys> row_keys;         // observed of the rows on their way, by position
  std::string late_error;                   // of a row that may prove to lie past the end of the sequence
  int late_error_step = 0;                  // the row counts from the first after the prompt
  RequestRecord record;                     // filled as results are read

  bool over() const { return phase == Phase::ended || phase == Phase::cancelled; }
};

}  // namespace loopgauge::reference
