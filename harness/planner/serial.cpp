// SPDX-License-Identifier: Apache-2.0
// The undisturbed order: nothing interleaves, every window and every token runs all its loops in one submission.
#include <algorithm>
#include <numeric>

#include "harness/planner/planner.hpp"

namespace loopgauge::harness {

Plan make_serial_plan(const Trace& trace, const EffectiveConfig& config) {
  std::vector<int> order(trace.requests.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return trace.requests[static_cast<std::size_t>(a)].arrival < trace.requests[static_cast<std::size_t>(b)].arrival;
  });

  Plan plan{mode_text({.name = "serial"}), {}};
  const auto submit = [&](int request, RowKind kind, int begin, int end) {
    plan.submissions.push_back({{{request, kind, begin, end, 1, config.loops()}}});
  };
  for (int index : order) {
    const TraceRequest& request = trace.requests[static_cast<std::size_t>(index)];
    const int prompt_length = request.prompt_length();
    for (int w = 0; w < window_count(prompt_length, config.window()); ++w) {
      const PositionRange window = window_range(w, prompt_length, config.window());
      submit(index, RowKind::prefill, window.begin, window.end);
    }
    for (int j = 0; j < fed_tokens(request); ++j) submit(index, RowKind::decode, prompt_length + j, prompt_length + j + 1);
  }
  return plan;
}

}  // namespace loopgauge::harness
