// SPDX-License-Identifier: Apache-2.0
#include "models/handoff/planted_fault.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/handoff/handoff_fixture.hpp"

namespace loopgauge::test {
namespace {

using handoff::Region;
using handoff::RegionKind;

// Every region full.
std::vector<handoff::RegionSummary> full(const std::vector<Region>& regions) {
  std::vector<handoff::RegionSummary> summaries;
  for (const Region& region : regions) summaries.push_back({region.capacity, 0});
  return summaries;
}

TEST(PlantedHandoffFault, ForgetsWhatItsNameSaysAndNothingElse) {
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    for (const char* text : {"t0s0q0", "t1s1q1"}) {
      const auto regions = regions_of(descriptor_of(small_model(), settings(text, policy), 300));
      auto summaries = full(regions);
      EXPECT_TRUE(forgotten_bytes(Fault::none, regions, summaries).empty());
      EXPECT_TRUE(forgotten_bytes(Fault::handoff_wrong_activity, regions, summaries).empty());
      const std::size_t hidden = regions.size() - 1;
      EXPECT_EQ(forgotten_bytes(Fault::handoff_without_hidden, regions, summaries), (std::vector<handoff::ForgottenBytes>{{hidden, 0}}));
      std::size_t rows = 0;
      for (const auto& [region, begin] : forgotten_bytes(Fault::handoff_without_rows, regions, summaries)) {
        EXPECT_EQ(regions[region].kind, RegionKind::rows);
        EXPECT_EQ(begin, 0u);
        ++rows;
      }
      EXPECT_EQ(rows, static_cast<std::size_t>(std::count_if(regions.begin(), regions.end(), [](const Region& r) { return r.kind == RegionKind::rows; })));

      // The last partition is of the last region that has a byte.
      EXPECT_EQ(forgotten_bytes(Fault::handoff_incomplete, regions, summaries),
                (std::vector<handoff::ForgottenBytes>{{hidden - 1, regions[hidden - 1].capacity / 2}}));
      summaries[hidden - 1].bytes = 0;
      EXPECT_EQ(forgotten_bytes(Fault::handoff_incomplete, regions, summaries),
                (std::vector<handoff::ForgottenBytes>{{hidden - 2, regions[hidden - 2].capacity / 2}}));
    }
  }
}

TEST(PlantedHandoffFault, ParametersAreThoseOfTheBlockBeforeAndNoSourceIsOverwritten) {
  const auto regions = regions_of(descriptor_of(small_model(), settings("t1s1q1"), 300));
  EXPECT_TRUE(repeated_bytes(Fault::handoff_incomplete, regions).empty());
  const auto repeated = repeated_bytes(Fault::handoff_stale_parameters, regions);
  ASSERT_FALSE(repeated.empty());
  std::vector<bool> written(regions.size());
  for (const auto& [from, to, bytes] : repeated) {
    EXPECT_EQ(regions[from].kind, RegionKind::parameters);
    EXPECT_EQ(regions[to].kind, RegionKind::parameters);
    EXPECT_EQ(regions[from].loop, regions[to].loop);
    EXPECT_EQ(regions[from].positions.end, regions[to].positions.begin);
    EXPECT_LE(bytes, std::min(regions[from].capacity, regions[to].capacity));
    EXPECT_FALSE(written[from]);
    written[to] = true;
  }
}

TEST(PlantedHandoffFault, WrongActivityKeepsTheSizesAndStaysWithinLoop3) {
  const handoff::Descriptor descriptor = descriptor_of(small_model(), settings("t1s1q1"), 300);
  const auto regions = regions_of(descriptor);
  handoff::ActivityMaps maps(descriptor);
  for (int position = 0; position < 300; ++position) {
    maps.set_active(1, position), maps.set_active(2, position);
    if (position % 2 == 0) maps.set_active(3, position);
    if (position % 8 == 0) maps.set_active(4, position);
  }
  const auto rows = [](const handoff::ActivityMaps& of, int loop, PositionRange range) { return of.rows(loop, range); };
  const handoff::ActivityMaps same = planted_activity(Fault::handoff_incomplete, descriptor, regions, maps);
  const handoff::ActivityMaps wrong = planted_activity(Fault::handoff_wrong_activity, descriptor, regions, maps);
  const PositionRange all{0, 300};
  for (int loop = 1; loop <= 4; ++loop) {
    EXPECT_EQ(rows(same, loop, all), rows(maps, loop, all));
    if (loop < 4) {
      EXPECT_EQ(rows(wrong, loop, all), rows(maps, loop, all));
    }
  }
  EXPECT_NE(rows(wrong, 4, all), rows(maps, 4, all));
  for (const std::int32_t position : rows(wrong, 4, all)) EXPECT_TRUE(maps.active(3, position)) << position;
  for (const Region& region : regions) {
    if (region.loop == 4 && (region.kind == RegionKind::rows || region.kind == RegionKind::residual_payload)) {
      EXPECT_EQ(rows(wrong, 4, region.positions).size(), rows(maps, 4, region.positions).size()) << describe(region);
    }
  }
}

}  // namespace
}  // namespace loopgauge::test
