// SPDX-License-Identifier: Apache-2.0
#include "harness/report/render.hpp"

namespace loopgauge::harness {

std::span<const RendererInfo> renderers() {
  static constexpr RendererInfo list[] = {
      {"console", "Tables for a terminal: verdict, failures, status, conformance, speculation, handoffs, drift, memory (default)", render_terminal},
      {"json", "Everything the report holds", render_json},
      {"csv", "One line per case and executor, with the sums of its handoffs", render_csv},
      {"quality", "Tables of quality against dense: KLD, likelihood, tasks, with intervals and paired tests", render_quality},
      {"markdown", "A pull-request comment: verdict, matrix, worst rows, details to unfold", render_markdown},
  };
  return list;
}

}  // namespace loopgauge::harness
