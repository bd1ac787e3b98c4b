// SPDX-License-Identifier: Apache-2.0
#include "models/handoff/planted_fault.hpp"

#include <algorithm>

namespace loopgauge::handoff {

std::vector<ForgottenBytes> forgotten_bytes(Fault fault, std::span<const Region> regions, std::span<const RegionSummary> summaries) {
  std::vector<ForgottenBytes> forgotten;
  if (fault == Fault::handoff_incomplete) {  // the second half of the last region of K and V; the final hidden row comes after it
    std::size_t last = regions.size() - 2;
    while (!is_bitmap(regions[last]) && summaries[last].bytes == 0) --last;
    forgotten.push_back({last, static_cast<std::size_t>(summaries[last].bytes / 2)});
  }
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if ((fault == Fault::handoff_without_rows && regions[i].kind == RegionKind::rows) ||
        (fault == Fault::handoff_without_hidden && regions[i].kind == RegionKind::final_hidden)) {
      forgotten.push_back({i, 0});
    }
  }
  return forgotten;
}

std::vector<RepeatedBytes> repeated_bytes(Fault fault, std::span<const Region> regions) {
  std::vector<RepeatedBytes> repeated;
  if (fault != Fault::handoff_stale_parameters) return repeated;
  for (std::size_t i = regions.size(); i-- > 0;) {
    if (regions[i].kind != RegionKind::parameters) continue;
    for (std::size_t before = i; before-- > 0;) {
      if (regions[before].kind != RegionKind::parameters || regions[before].loop != regions[i].loop) continue;
      repeated.push_back({before, i, std::min(regions[before].capacity, regions[i].capacity)});
      break;
    }
  }
  return repeated;
}

ActivityMaps planted_activity(Fault fault, const Descriptor& descriptor, std::span<const Region> regions, const ActivityMaps& maps) {
  if (fault != Fault::handoff_wrong_activity) return maps;
  ActivityMaps wrong(descriptor);
  for (int loop = 1; loop <= 3; ++loop) {
    for (const std::int32_t position : maps.rows(loop, {0, descriptor.prompt_length})) wrong.set_active(loop, position);
  }
  for (const Region& region : regions) {
    if (region.loop != 4 || (region.kind != RegionKind::rows && region.kind != RegionKind::residual_payload)) continue;
    const std::vector<std::int32_t> candidates = maps.rows(3, region.positions);
    const std::size_t count = maps.rows(4, region.positions).size();
    for (std::size_t at = candidates.size() - count; at < candidates.size(); ++at) wrong.set_active(4, candidates[at]);
  }
  return wrong;
}

}  // namespace loopgauge::handoff
