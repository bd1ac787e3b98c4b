// SPDX-License-Identifier: Apache-2.0
// The list of regions, their sizes, what a handoff costs against dense BF16, and what keeps it from being activated (S-PD-2, S-PD-4,
// S-PD-6).
#include "models/handoff/regions.hpp"

#include <gtest/gtest.h>

#include <map>

#include "tests/handoff/handoff_fixture.hpp"

namespace loopgauge::test {
namespace {

using handoff::ActivityMaps;
using handoff::Descriptor;
using handoff::Region;
using handoff::RegionKind;
using handoff::RegionSummary;

std::string spelled(const std::vector<Region>& regions) {
  std::string text;
  for (const Region& region : regions) {
    text += describe(region) + ": " + std::to_string(region.capacity) + (region.rows_known ? "" : " at most") + "\n";
  }
  return text;
}

// small_model(): 2 layers, 2 heads of 4 channels: 16 payload bytes a row, 128 BF16 bytes a row.
TEST(HandoffRegions, OfARollingPromptWhoseFrontierCutsAWindow) {
  AlgorithmConfig config = settings("t1s0q1", EncodingPolicy::rolling, 128);  // P 200, tail 64: E 128
  EXPECT_EQ(spelled(regions_of(descriptor_of(small_model(), config, 200))),
            "validity, positions [0, 128): 16\n"
            "activity of loop 2, positions [0, 128): 16\n"
            "activity of loop 3, positions [0, 128): 16\n"
            "activity of loop 4, positions [0, 128): 16\n"
            "validity, positions [128, 200): 16\n"
            "activity of loop 2, positions [128, 200): 16\n"
            "activity of loop 3, positions [128, 200): 16\n"
            "activity of loop 4, positions [128, 200): 16\n"
            "base_payload of loop 1, positions [0, 128): 2048\n"
            "residual_payload of loop 2, positions [0, 128): 2048\n"
            "residual_payload of loop 3, positions [0, 128): 512\n"
            "residual_payload of loop 4, positions [0, 128): 208\n"
            "parameters of loop 1, positions [0, 128): 2176\n"
            "parameters of loop 2, positions [0, 128): 2176\n"
            "parameters of loop 3, positions [0, 128): 576\n"
            "parameters of loop 4, positions [0, 128): 272\n"
            "rows of loop 1, positions [128, 200): 4608\n"
            "rows of loop 2, positions [128, 200): 4608\n"
            "rows of loop 3, positions [128, 200): 1152\n"
            "rows of loop 4, positions [128, 200): 512\n"
            "final_hidden of loop 4, positions [199, 200): 12\n");
  config.kv_residual_quantization.tail = 100;  // E 64: the first window is cut
  const std::vector<Region> cut = regions_of(descriptor_of(small_model(), config, 200));
  EXPECT_NE(spelled(cut).find("residual_payload of loop 3, positions [0, 64): 512 at most"), std::string::npos);
  EXPECT_NE(spelled(cut).find("rows of loop 4, positions [64, 128): 832 at most"), std::string::npos);
  EXPECT_NE(spelled(cut).find("rows of loop 4, positions [128, 200): 512\n"), std::string::npos);
}

TEST(HandoffRegions, EveryPositionIsEncodedOrARowInEveryLoopAndNeverBoth) {
  for (const char* text : {"t0s0q0", "t1s0q0", "t0s0q1", "t1s0q1"}) {
    for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
      for (const int length : {1, 63, 64, 65, 127, 128, 129, 300, 513}) {
        const Descriptor descriptor = descriptor_of(small_model(), settings(text, policy, 128), length);
        std::map<std::pair<RegionKind, int>, int> next;
        std::size_t total = 0;
        for (const Region& region : regions_of(descriptor)) {
          const bool encoded = region.kind == RegionKind::base_payload || region.kind == RegionKind::residual_payload ||
                               region.kind == RegionKind::parameters;
          if (region.kind != RegionKind::final_hidden) {
            auto [at, is_new] =
                next.try_emplace({region.kind, region.loop}, region.kind == RegionKind::rows ? descriptor.encoded_frontier : 0);
            EXPECT_EQ(region.positions.begin, at->second);
            at->second = region.positions.end;
          }
          if (encoded) {
            EXPECT_LE(region.positions.end, descriptor.encoded_frontier);
          }
          EXPECT_EQ(region.capacity, region_bytes(descriptor, region, region.most_rows));
          total += region.capacity;
        }
        for (const auto& [key, end] : next) {
          const bool encoded =
              key.first == RegionKind::base_payload || key.first == RegionKind::residual_payload || key.first == RegionKind::parameters;
          EXPECT_EQ(end, encoded ? descriptor.encoded_frontier : length);
        }
        EXPECT_GT(total, 0u);
      }
    }
  }
}

// Ouro-1.4B's attention: 24 layers, 16 heads of 128. The bytes are of the exact layout, whatever the rows' values.
TEST(HandoffRegions, AnEncodedPromptOf8KCostsLessThanADenseOneByAFactorOf5_7) {
  ModelConfig model = small_model();
  model.layers = 24, model.heads = 16, model.head_dim = 128, model.hidden = 2048;
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    const Descriptor descriptor = descriptor_of(model, settings("t1s1q1", policy, 256), 8192);
    std::uint64_t bytes = 0;
    std::vector<std::uint64_t> each;
    const auto regions = regions_of(descriptor);
    for (const Region& region : regions) bytes += region.capacity, each.push_back(region.capacity);
    EXPECT_EQ(dense_bytes(descriptor), std::uint64_t{24} * 2 * 16 * 4 * 8192 * 128 * 2);
    const double factor = static_cast<double>(dense_bytes(descriptor)) / static_cast<double>(bytes);
    EXPECT_GE(factor, 5.7) << to_string(policy);
    RecordProperty(std::string(to_string(policy)), std::to_string(factor));
    std::printf("%s: %llu bytes, dense %llu: %.3f\n", std::string(to_string(policy)).c_str(), static_cast<unsigned long long>(bytes),
                static_cast<unsigned long long>(dense_bytes(descriptor)), factor);
    // Of it could leave before loop 4, at best: all but that loop's residual and parameters.
    const double early = static_cast<double>(bytes_final_after(descriptor, regions, each, 3)) / static_cast<double>(bytes);
    EXPECT_GT(early, 0.9);
    EXPECT_LT(early, 1.0);
  }
}

TEST(HandoffRegions, ChecksumSeesEveryBitEveryCutAndEveryExchange) {
  std::mt19937 generator(3);
  std::vector<std::byte> bytes(100);
  for (auto& byte : bytes) byte = static_cast<std::byte>(generator());
  const std::uint64_t sum = handoff::region_checksum(bytes);
  for (std::size_t i = 0; i < bytes.size() * 8; ++i) {
    auto changed = bytes;
    changed[i / 8] ^= static_cast<std::byte>(1u << (i % 8));
    EXPECT_NE(handoff::region_checksum(changed), sum) << i;
  }
  for (std::size_t count = 0; count < bytes.size(); ++count) EXPECT_NE(handoff::region_checksum(std::span(bytes).first(count)), sum);
  auto exchanged = bytes;
  std::swap_ranges(exchanged.begin(), exchanged.begin() + 8, exchanged.begin() + 8);
  EXPECT_NE(handoff::region_checksum(exchanged), sum);
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_NE(handoff::region_checksum(longer), sum);
  // Pinned: the sum is a part of the format.
  EXPECT_EQ(handoff::region_checksum({}), handoff::checksum_mix(0));
  EXPECT_EQ(handoff::checksum_mix(1), 0x5692161D100B05E5u);
  const std::byte one[]{std::byte{1}};
  EXPECT_EQ(handoff::region_checksum(one), handoff::checksum_mix(1) + handoff::checksum_mix(1 + 0x9E3779B97F4A7C15u));
}

// Regions with random bytes and the activity of a legal selection.
struct Filled {
  Descriptor descriptor;
  std::vector<Region> regions;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<RegionSummary> summaries;

  std::string fault() {
    std::vector<std::span<const std::byte>> data(bytes.begin(), bytes.end());
    return activation_fault(descriptor, regions, summaries, data);
  }
  void seal() {
    for (std::size_t i = 0; i < regions.size(); ++i) {
      summaries[i].checksum = handoff::region_checksum(std::span(bytes[i]).first(static_cast<std::size_t>(summaries[i].bytes)));
    }
  }
  std::size_t find(RegionKind kind, int loop) const {
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (regions[i].kind == kind && regions[i].loop == loop) return i;
    }
    ADD_FAILURE() << "no such region";
    return 0;
  }
};

Filled filled() {
  AlgorithmConfig config = settings("t1s0q1", EncodingPolicy::rolling, 128);
  config.kv_residual_quantization.tail = 100;
  Filled f{descriptor_of(small_model(), config, 200), {}, {}, {}};
  f.regions = regions_of(f.descriptor);
  ActivityMaps maps(f.descriptor);
  std::mt19937 generator(5);
  for (int position = 0; position < 200; ++position) maps.set_active(1, position), maps.set_active(2, position);
  for (int i = 0; i < 32; ++i) maps.set_active(3, 4 * i);
  for (int i = 0; i < 13; ++i) maps.set_active(4, 8 * i);
  for (int i = 0; i < 18; ++i) maps.set_active(3, 128 + i);
  for (int i = 0; i < 8; ++i) maps.set_active(4, 128 + i);
  for (const Region& region : f.regions) {
    std::vector<std::byte> bytes(region.capacity);
    for (auto& byte : bytes) byte = static_cast<std::byte>(generator());
    const int loop = std::max(1, region.loop);
    if (region.kind == RegionKind::validity || region.kind == RegionKind::activity) bytes = maps.words(loop, region.positions.begin / 128);
    const int rows = region.kind == RegionKind::final_hidden ? 1 : static_cast<int>(maps.rows(loop, region.positions).size());
    f.summaries.push_back({region_bytes(f.descriptor, region, rows), 0});
    f.bytes.push_back(std::move(bytes));
  }
  f.seal();
  return f;
}

TEST(HandoffActivation, TakesWhatIsComplete) {
  Filled f = filled();
  EXPECT_EQ(f.fault(), "");
  EXPECT_LT(f.summaries[f.find(RegionKind::residual_payload, 3)].bytes, f.regions[f.find(RegionKind::residual_payload, 3)].capacity);
}

TEST(HandoffActivation, SeesADamagedByteInEveryRegion) {
  for (std::size_t i = 0; i < filled().regions.size(); ++i) {
    Filled f = filled();
    f.bytes[i][f.summaries[i].bytes / 2] ^= std::byte{16};
    EXPECT_EQ(f.fault(), describe(f.regions[i]) + ": the checksum does not fit the bytes that arrived");
  }
}

TEST(HandoffActivation, SeesActivityThatNoPromptCanHave) {
  const auto with = [](RegionKind kind, int loop, std::size_t byte, int bit) {
    Filled f = filled();
    f.bytes[f.find(kind, loop)][byte] ^= static_cast<std::byte>(1u << bit);
    f.seal();
    return f.fault();
  };
  EXPECT_EQ(with(RegionKind::validity, 0, 1, 2), "position 10 is not valid");
  EXPECT_EQ(with(RegionKind::activity, 2, 0, 0), "position 0 executed loop 3 without loop 2");
  EXPECT_EQ(with(RegionKind::activity, 3, 0, 1), "window 0, loop 3 has 33 active rows, its budget is 32");
  EXPECT_EQ(with(RegionKind::activity, 4, 0, 0), "window 0, loop 4 has 12 active rows, its budget is 13");
  Filled f = filled();
  f.bytes[4].back() |= std::byte{0x80};  // validity of the second window, which has 72 positions
  f.seal();
  EXPECT_EQ(f.fault(), "an activity bitmap has a bit beyond its window");
}

TEST(HandoffActivation, SeesSizesThatTheActivityDoesNotGive) {
  Filled f = filled();
  const std::size_t cut = f.find(RegionKind::residual_payload, 3);
  f.summaries[cut].bytes += 16;
  f.seal();
  EXPECT_EQ(f.fault(), "residual_payload of loop 3, positions [0, 64): 272 bytes, its 16 rows need 256");
  f = filled();
  f.summaries[cut].bytes = f.bytes[cut].size() + 1;
  EXPECT_NE(f.fault().find("bytes are more than the reserved"), std::string::npos);
  f = filled();
  f.summaries.pop_back();
  EXPECT_NE(f.fault().find("regions are committed"), std::string::npos);
  f = filled();
  f.summaries[0].bytes = 8;
  f.seal();
  EXPECT_EQ(f.fault(), "validity, positions [0, 128): 8 bytes of a bitmap");
}

TEST(HandoffRegions, ADescriptorThatAsksForTooMuchIsRefused) {
  ModelConfig model = small_model();
  model.layers = kMaximumLayers, model.heads = kMaximumHeads, model.head_dim = kMaximumHeadDim, model.max_positions = kMaximumPositions;
  EXPECT_THROW(regions_of(descriptor_of(model, settings("t0s0q0"), 1 << 20)), handoff::HandoffError);
  EXPECT_THROW(regions_of(descriptor_of(small_model(), settings("t0s0q0", EncodingPolicy::rolling, 64), 1 << 23)), handoff::HandoffError);
}

}  // namespace
}  // namespace loopgauge::test
