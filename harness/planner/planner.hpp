// SPDX-License-Identifier: Apache-2.0
// Planners: one file per execution mode, each turning a trace into the submissions of SPEC.md, "Execution modes". A plan depends on
// lengths, the window and the mode only, never on token values or results: every row that a request could need is planned, and
// executors skip the rows of a request that has stopped and the loops after an exit.
#pragma once

#include "harness/case.hpp"
#include "models/plan.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

// The plan of `mode` for `trace`, legal by plan_fault. Plan::mode is mode_text(mode). Throws UnsupportedError for a mode without a
// planner in this version and for a trace with events (cancel, preempt, resume, reuse_id), ConfigError for an invalid mode parameter.
Plan make_plan(const ModeSpec& mode, const Trace& trace, const EffectiveConfig& config);

// serial: requests one after the other by (arrival, index). One submission per prompt window with all its loops, then one per decode
// token with all its loops.
Plan make_serial_plan(const Trace& trace, const EffectiveConfig& config);

// split: one loop per submission. A request's steps are (window, loop) in window-major order, then (decode token, loop); with
// piece_tokens > 0 a prefill step is cut into consecutive pieces of at most so many positions, all pieces of (window, r) before any of
// (window, r + 1). Requests interleave round-robin: the live requests take turns in index order, one submission each, so that one
// request decodes while another is still in its prompt. A request is live from the submission index `arrival`; when no request is
// live the index moves on to the next arrival (a plan holds no empty submission).
Plan make_split_plan(const Trace& trace, const EffectiveConfig& config, int piece_tokens);

}  // namespace loopgauge::harness
