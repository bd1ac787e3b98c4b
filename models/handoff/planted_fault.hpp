// SPDX-License-Identifier: Apache-2.0
// The planted faults of handoffs (models/fault.hpp): what a receiver without checks would go on with, in terms of regions. An executor applies it to
// regions that it has checked and not yet imported.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "models/fault.hpp"
#include "models/handoff/regions.hpp"

namespace loopgauge::handoff {

// Bytes [begin, capacity) of a region that hold zeros instead of what arrived.
struct ForgottenBytes {
  std::size_t region = 0;
  std::size_t begin = 0;
  bool operator==(const ForgottenBytes&) const = default;
};
// handoff_incomplete, handoff_without_rows and handoff_without_hidden; of any other fault nothing.
std::vector<ForgottenBytes> forgotten_bytes(Fault fault, std::span<const Region> regions, std::span<const RegionSummary> summaries);

// The first `bytes` bytes of region `to` are those of region `from`.
struct RepeatedBytes {
  std::size_t from = 0, to = 0;
  std::size_t bytes = 0;
  bool operator==(const RepeatedBytes&) const = default;
};
// handoff_stale_parameters, in an order in which no source has been overwritten; of any other fault nothing.
std::vector<RepeatedBytes> repeated_bytes(Fault fault, std::span<const Region> regions);

// handoff_wrong_activity: loop 4 names as many rows of every range as it did, so that regions keep their sizes, but the last ones of those that
// executed loop 3. Of any other fault the maps as they are.
ActivityMaps planted_activity(Fault fault, const Descriptor& descriptor, std::span<const Region> regions, const ActivityMaps& maps);

}  // namespace loopgauge::handoff
