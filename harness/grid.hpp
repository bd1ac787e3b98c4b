// SPDX-License-Identifier: Apache-2.0
// Grids of settings: the cross product of values for the knobs of the method, for measuring what each of them costs.
//
//   grid  = axis { " " axis }
//   axis  = key "=" value { "," value }
//     switches    t0s0q0 to t1s1q1 (t1s1q1)
//     policy      fixed_prompt, rolling, streaming                      with q1
//     timing      serial_aligned, execution_dependent                   with q1
//     flush       committed, eager                                      with q1 and timing=execution_dependent
//     tail        tokens                                                with q1
//     window      tokens                                                with t1 or q1
//     retention   <bp>-<bp>-<bp>-<bp>, loops 1 to 4                     with t1
//     reserve     none, final_prompt_token                              with t1
//     keys        basis points                                          with s1
//
// An axis that is left out has the default. A knob varies only the settings in which it has an effect; equal settings are one. A knob
// without effect in all of them is an error.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "harness/case.hpp"

namespace loopgauge::harness {

// The settings of several grids in order, without repetitions, t0s0q0 before all: drift is measured against it. Throws ConfigError naming
// grid, axis and value.
std::vector<AlgorithmConfig> grid_settings(std::span<const std::string> grids);

// Every trace under every setting in every mode, trace by trace, then setting by setting. `modes` empty: those of the trace, else serial. A
// mode that is illegal with a setting is an error: a grid says what is wanted.
std::vector<Case> grid_cases(std::span<const CaseTrace> traces, std::span<const AlgorithmConfig> settings, std::span<const ModeSpec> modes);

}  // namespace loopgauge::harness
