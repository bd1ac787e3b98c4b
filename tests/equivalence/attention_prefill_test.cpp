// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill.cuh"

#include <gtest/gtest.h>

#include <algorithm>

#include "models/spec/attention.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "tests/equivalence/kv_fixture.hpp"

namespace loopgauge::equivalence {
namespace {

const spec::Tolerance& output_tolerance() { return spec::kAttentionDense.outputs[2].tolerance; }

struct Rows {
  int loop = 1;
  int frontier = 0;
  std::vector<std::int32_t> positions;
  std::vector<std::uint16_t> q;
};

Rows make_rows(const History& history, int loop, int frontier, std::vector<std::int32_t> positions, std::uint32_t seed) {
  Rows rows{loop, frontier, std::move(positions), {}};
  std::mt19937 generator(seed);
  // One fixed q row per position, so that any subset sees the same queries.
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  const std::vector<std::uint16_t> all = random_rows(generator, static_cast<std::size_t>(history.shape().positions) * width);
  for (const std::int32_t position : rows.positions) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(std::max(position, 0)) * width);
    rows.q.insert(rows.q.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
  }
  return rows;
}

std::vector<std::int32_t> range(int begin, int end) {
  std::vector<std::int32_t> positions;
  for (int position = begin; position < end; ++position) positions.push_back(position);
  return positions;
}

std::vector<std::int32_t> active_rows(const History& history, int loop, int begin, int end) {
  std::vector<std::int32_t> positions;
  for (int position = begin; position < end; ++position) {
    if (history.depth(position) >= loop) positions.push_back(position);
  }
  return positions;
}

// With so many heads a launch is cut into whole tiles; with the few of a test's model, into halves.
constexpr int kManyHeads = 1024;

// All of `parts` in one launch, a segment each, cut into tiles as for `heads` heads; their outputs one after the other.
std::vector<std::uint16_t> run(History& history, int layer, std::span<const Rows> parts, Fault fault = Fault::none, int heads = kManyHeads) {
  optimized::DeviceAllocator& allocator = history.allocator();
  std::vector<optimized::PrefillSegment> segments;
  std::vector<std::int32_t> all_positions;
  std::vector<std::uint16_t> all_q;
  bool encoded = false;
  for (const Rows& rows : parts) {
    segments.push_back({history.request(), rows.loop, rows.frontier, static_cast<std::int32_t>(all_positions.size()),
                        static_cast<std::int32_t>(rows.positions.size())});
    all_positions.insert(all_positions.end(), rows.positions.begin(), rows.positions.end());
    all_q.insert(all_q.end(), rows.q.begin(), rows.q.end());
    encoded |= rows.frontier > 0;
  }
  const auto tiles = optimized::make_prefill_tiles(segments, heads);
  DeviceArray<optimized::PrefillTile> device_tiles(allocator, tiles);
  DeviceArray<std::uint16_t> q(allocator, all_q), output(allocator, all_q.size());
  DeviceArray<std::int32_t> positions(allocator, all_positions);
  const int row_count = static_cast<int>(all_positions.size()), length = 1 + *std::max_element(all_positions.begin(), all_positions.end());
  DeviceArray<std::byte> workspace(allocator, optimized::attention_prefill_workspace_bytes(history.kv_shape(), row_count, length));
  optimized::attention_prefill({.kv = history.cache().view(),
                                .layer = layer,
                                .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                .q_row_stride = history.model().projection_width(),
                                .positions = positions.data(),
                                .tiles = device_tiles.data(),
                                .tile_count = static_cast<int>(tiles.size()),
                                .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                .encoded_history = encoded,
                                .row_count = row_count,
                                .max_length = length,
                                .workspace = workspace.data(),
                                .fault = fault},
                               history.stream());
  return output.download();
}
std::vector<std::uint16_t> run(History& history, int layer, const Rows& rows, Fault fault = Fault::none, int heads = kManyHeads) {
  return run(history, layer, std::span(&rows, 1), fault, heads);
}

void compare(History& history, const Rows& rows, int layer, ErrorCheck& check) {
  const auto actual = run(history, layer, rows);
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  const auto head_dim = static_cast<std::size_t>(history.model().head_dim);
  for (std::size_t i = 0; i < rows.positions.size(); ++i) {
    const int position = rows.positions[i];
    if (position < 0) {
      for (std::size_t d = 0; d < width; ++d) EXPECT_EQ(actual[i * width + d], 0xFFFF) << "padding row " << i;
      continue;
    }
    for (int head = 0; head < history.model().heads; ++head) {
      const std::size_t offset = i * width + static_cast<std::size_t>(head) * head_dim;
      const auto query = widen(std::span(rows.q).subspan(offset, head_dim));
      const ExpectedAttention expected = expected_attention(history, query, layer, rows.loop, head, position, rows.frontier);
      // Scores against reconstructed K use two BF16 parts (2^-17 of sum |q||k|, which score_error bounds with 2^-22 and more per unit).
      const double parts = rows.frontier > 0 ? 0x1p-16 : 0x1p-17;
      for (std::size_t d = 0; d < head_dim; ++d) {
        check.add(output_tolerance(),
                  {.expected = reference::round_to_bfloat16(expected.output[d]),
                   .magnitude = expected.magnitude[d],
                   .terms = static_cast<double>(position + 1),
                   .input_error = expected.score_error,
                   .declared_relative = parts},
                  to_float(actual[offset + d]),
                  "position " + std::to_string(position) + " loop " + std::to_string(rows.loop) + " head " + std::to_string(head) +
                      " channel " + std::to_string(d));
      }
    }
  }
}

struct Case {
  int heads, head_dim, positions;
  bool dense;
};

class AttentionPrefill : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionPrefill, DenseAndCompactRowsMatchTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const Case& c = GetParam();
  History history({.heads = c.heads,
                   .head_dim = c.head_dim,
                   .layers = 2,
                   .positions = c.positions,
                   .prompt = c.positions,
                   .dense = c.dense,
                   .fragmented = true});
  ErrorCheck check;
  for (int loop = 1; loop <= kLoops; ++loop) {
    const auto positions = active_rows(history, loop, 0, c.positions);
    if (!positions.empty()) compare(history, make_rows(history, loop, 0, positions, 21), loop % 2, check);
  }
  check.expect_within("attention_prefill " + std::to_string(c.positions), output_tolerance().differing_share);
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionPrefill,
                         ::testing::Values(Case{3, 128, 320, false}, Case{3, 64, 321, false}, Case{16, 128, 130, false},
                                           Case{3, 128, 200, true}, Case{2, 64, 1, true}, Case{2, 128, 7, false}, Case{2, 64, 63, true},
                                           Case{2, 128, 64, true}, Case{2, 64, 65, false}, Case{2, 128, 127, true}, Case{2, 64, 128, false},
                                           Case{2, 128, 129, true}, Case{2, 64, 191, true}, Case{2, 128, 192, false},
                                           Case{2, 128, 1000, false}));

TEST(AttentionPrefillDevice, EncodedHistoryMatchesTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = 600, .prompt = 600, .fragmented = true});
    history.encode({{0, 256}, {256, 512}});
    ErrorCheck check;
    for (int loop = 1; loop <= kLoops; ++loop) {
      compare(history, make_rows(history, loop, 512, active_rows(history, loop, 512, 600), 22), 1, check);
    }
    check.expect_within("attention_prefill, encoded history, head_dim " + std::to_string(head_dim), 1.0);
  }
}

// Rows that exit anywhere, in one block: the rows of a page in a late stream then belong to two groups of K.
TEST(AttentionPrefillDevice, StreamsWithoutSomeRowsMatchTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.heads = 2, .head_dim = head_dim, .positions = 500, .prompt = 0, .seed = 5, .fragmented = true});
    history.encode({{0, 384}});
    ErrorCheck check;
    for (int loop = 1; loop <= kLoops; ++loop) {
      compare(history, make_rows(history, loop, 384, active_rows(history, loop, 384, 500), 29), 0, check);
    }
    check.expect_within("attention_prefill, rows that exit anywhere, head_dim " + std::to_string(head_dim), 1.0);
  }
}

TEST(AttentionPrefillDevice, BitsDoNotDependOnTilesOrPlace) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int frontier : {0, 256}) {
    HistoryShape shape{.positions = 400, .prompt = 400, .seed = 9};
    History history(shape);
    shape.fragmented = true;
    History fragmented(shape);
    if (frontier > 0) {
      history.encode({{0, 256}});
      fragmented.encode({{0, 256}});
    }
    const auto width = static_cast<std::size_t>(history.model().projection_width());
    const auto whole_positions = range(256, 400);
    const auto whole = run(history, 0, make_rows(history, 2, frontier, whole_positions, 23));
    EXPECT_EQ(run(fragmented, 0, make_rows(fragmented, 2, frontier, whole_positions, 23)), whole);
    for (const auto& part : {range(256, 257), range(257, 300), range(300, 400), std::vector<std::int32_t>{256, 263, 300, 301, 399}}) {
      const auto output = run(history, 0, make_rows(history, 2, frontier, part, 23));
      for (std::size_t i = 0; i < part.size(); ++i) {
        const auto expected = whole.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(part[i] - 256) * width);
        EXPECT_TRUE(
            std::equal(expected, expected + static_cast<std::ptrdiff_t>(width), output.begin() + static_cast<std::ptrdiff_t>(i * width)))
            << "position " << part[i] << " of a part that starts at " << part[0];
      }
    }
  }
}

// Tiles have 128 rows in two groups of 64, pages 64 keys: every count and start around those, and gaps that leave a group on its own pages.
TEST(AttentionPrefillDevice, AnyRowsHaveTheBitsOfTheWholePrompt) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    constexpr int kPositions = 450;
    History history({.heads = 2, .head_dim = head_dim, .positions = kPositions, .prompt = kPositions, .seed = 11, .fragmented = true});
    const Rows all = make_rows(history, 2, 0, range(0, kPositions), 27);
    ErrorCheck check;
    compare(history, all, 1, check);
    check.expect_within("attention_prefill, whole prompt, head_dim " + std::to_string(head_dim), output_tolerance().differing_share);
    const auto whole = run(history, 1, all);
    EXPECT_EQ(run(history, 1, all, Fault::none, history.model().heads), whole);
    const auto width = static_cast<std::size_t>(history.model().projection_width());
    for (const int step : {1, 2, 3}) {
      for (const int count : {1, 63, 64, 65, 127, 128, 129}) {
        for (const int begin : {0, 1, 63, 64, kPositions - 1 - (count - 1) * step}) {
          if (begin < 0 || begin + (count - 1) * step >= kPositions) continue;
          std::vector<std::int32_t> positions;
          for (int i = 0; i < count; ++i) positions.push_back(begin + i * step);
          const auto output = run(history, 1, make_rows(history, 2, 0, positions, 27));
          for (std::size_t i = 0; i < positions.size(); ++i) {
            const auto expected = whole.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(positions[i]) * width);
            ASSERT_TRUE(std::equal(expected, expected + static_cast<std::ptrdiff_t>(width), output.begin() + static_cast<std::ptrdiff_t>(i * width)))
                << "head_dim " << head_dim << ", position " << positions[i] << " of " << count << " rows from " << begin << " by " << step;
          }
        }
      }
    }
  }
}

// The same beside encoded history: the pages at and beyond the frontier are BF16, from one to all of what the rows may read.
TEST(AttentionPrefillDevice, AnyRowsOverEncodedHistoryHaveTheBitsOfAllRows) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    constexpr int kPositions = 450;
    History history({.heads = 2, .head_dim = head_dim, .positions = kPositions, .prompt = kPositions, .seed = 13, .keep_planes = true});
    history.encode({{0, 64}, {64, 320}});
    for (const int frontier : {64, 320}) {
      for (const int loop : {1, 4}) {
        const Rows all = make_rows(history, loop, frontier, range(frontier, kPositions), 30);
        const auto whole = run(history, 1, all);
        EXPECT_EQ(run(history, 1, all, Fault::none, history.model().heads), whole);
        const auto width = static_cast<std::size_t>(history.model().projection_width());
        for (const int count : {1, 63, 64, 65, 127, 128, 129}) {
          for (const int begin : {frontier, frontier + 1, kPositions - count}) {
            if (begin < frontier || begin + count > kPositions) continue;
            const auto output = run(history, 1, make_rows(history, loop, frontier, range(begin, begin + count), 30));
            const auto expected = whole.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(begin - frontier) * width);
            ASSERT_TRUE(std::equal(output.begin(), output.end(), expected))
                << "head_dim " << head_dim << ", loop " << loop << ", encoded below " << frontier << ", " << count << " rows from " << begin;
          }
        }
      }
    }
  }
}

// Keys beyond 2048 and 4096 come in further splits: rows with two and with three of them, as they lie in a launch of all and in others.
TEST(AttentionPrefillDevice, RowsWithSeveralSplitsMatchTheReferenceInAnyLaunch) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    constexpr int kPositions = 4160, kFrontier = 3968;
    History history({.heads = 2, .head_dim = head_dim, .layers = 1, .positions = kPositions, .prompt = kPositions, .seed = 14, .keep_planes = true});
    std::vector<PositionRange> blocks;
    for (int begin = 0; begin < kFrontier; begin += 256) blocks.push_back({begin, std::min(begin + 256, kFrontier)});
    history.encode(blocks);
    for (const int loop : {1, 3}) {
      const std::vector<std::int32_t> positions = active_rows(history, loop, kFrontier, kPositions);
      const Rows all = make_rows(history, loop, kFrontier, positions, 31);
      const auto whole = run(history, 0, all);
      EXPECT_EQ(run(history, 0, all, Fault::none, history.model().heads), whole);
      const auto width = static_cast<std::size_t>(history.model().projection_width());
      for (std::size_t i = 0; i < positions.size(); i += 7) {
        const auto output = run(history, 0, make_rows(history, loop, kFrontier, {positions[i]}, 31));
        EXPECT_TRUE(std::equal(output.begin(), output.end(), whole.begin() + static_cast<std::ptrdiff_t>(i * width)))
            << "head_dim " << head_dim << ", loop " << loop << ", position " << positions[i];
      }
      std::vector<std::int32_t> some;
      for (std::size_t i = 0; i < positions.size(); i += 5) some.push_back(positions[i]);
      ErrorCheck check;
      compare(history, make_rows(history, loop, kFrontier, some, 31), 0, check);
      check.expect_within("attention_prefill, several splits, head_dim " + std::to_string(head_dim), 1.0);
    }
  }
}

// A window of more than a split: further splits have no encoded page, a tile has rows on both sides of a boundary, and rows end a split or begin one.
TEST(AttentionPrefillDevice, RowsAroundTheEndsOfSplitsMatchTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kSplit = optimized::kPrefillSplitTokens;
  for (const int frontier : {64, kSplit}) {
    const int positions = 2 * kSplit + 130;
    History history({.heads = 1, .head_dim = 64, .layers = 1, .positions = positions, .prompt = positions, .seed = 15, .keep_planes = true});
    history.encode({{0, frontier}});
    ErrorCheck check;
    for (const int loop : {1, 2}) {
      std::vector<std::int32_t> some{frontier};
      for (const int end : {kSplit, 2 * kSplit}) {
        for (const int position : {end - 65, end - 64, end - 2, end - 1, end, end + 1, end + 63, end + 64, end + 65}) {
          if (position > some.back()) some.push_back(position);
        }
      }
      compare(history, make_rows(history, loop, frontier, some, 33), 0, check);
      const auto together = run(history, 0, make_rows(history, loop, frontier, range(frontier, positions), 33));
      const auto width = static_cast<std::size_t>(history.model().projection_width());
      for (const std::int32_t position : some) {
        const auto alone = run(history, 0, make_rows(history, loop, frontier, {position}, 33));
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(position - frontier) * width)))
            << "position " << position << ", loop " << loop << ", encoded below " << frontier;
      }
    }
    check.expect_within("attention_prefill, ends of splits, encoded below " + std::to_string(frontier), 1.0);
  }
}

// The longest prompt that bench serves: 32 splits.
TEST(AttentionPrefillDevice, APromptOf65472MatchesTheReference) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kPositions = 65472, kFrontier = kPositions - 64;
  History history({.heads = 1, .head_dim = 64, .layers = 1, .positions = kPositions, .prompt = kPositions, .seed = 16, .keep_planes = true});
  std::vector<PositionRange> blocks;
  for (int begin = 0; begin < kFrontier; begin += 2048) blocks.push_back({begin, std::min(begin + 2048, kFrontier)});
  history.encode(blocks);
  ErrorCheck check;
  compare(history, make_rows(history, 2, 0, {0, 1, 63, 64, 65, 2047, 2048, 2049, 32768, kPositions - 1}, 34), 0, check);
  compare(history, make_rows(history, 2, kFrontier, {kFrontier, kFrontier + 1, kPositions - 1}, 34), 0, check);
  check.expect_within("attention_prefill, 65472 positions", 1.0);
}

// Windows of one request side by side, some with encoded history: a tile's path must not follow from its neighbours.
TEST(AttentionPrefillDevice, WindowsInOneLaunchHaveTheBitsOfEachAlone) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.heads = 2, .head_dim = head_dim, .positions = 512, .prompt = 512, .seed = 12, .keep_planes = true});
    history.encode({{0, 256}});
    std::vector<Rows> parts;
    parts.push_back(make_rows(history, 2, 0, range(0, 200), 28));
    parts.push_back(make_rows(history, 2, 256, range(256, 400), 28));
    parts.push_back(make_rows(history, 3, 0, active_rows(history, 3, 200, 512), 28));
    parts.push_back(make_rows(history, 4, 256, active_rows(history, 4, 300, 512), 28));
    parts.push_back(make_rows(history, 1, 0, range(400, 512), 28));
    for (int i = 0; i < 64; ++i) parts.push_back(make_rows(history, 1 + i % 2, i % 3 == 0 ? 256 : 0, {256 + 4 * i}, 28));
    const auto together = run(history, 0, parts);
    auto place = together.begin();
    for (const Rows& part : parts) {
      const auto alone = run(history, 0, part);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), place)) << "loop " << part.loop << ", encoded below " << part.frontier;
      place += static_cast<std::ptrdiff_t>(alone.size());
    }
  }
}

TEST(PrefillTiles, AreHalvesOnlyWhereThatLeavesNoMultiprocessorWithTwo) {
  const std::vector<optimized::PrefillSegment> segments{{0, 1, 0, 0, 130}, {1, 2, 64, 130, 63}};
  const auto rows = [&](int heads) {
    std::vector<std::pair<int, int>> cut;
    for (const optimized::PrefillTile& tile : optimized::make_prefill_tiles(segments, heads)) cut.emplace_back(tile.row_begin, tile.row_count);
    return cut;
  };
  using Cut = std::vector<std::pair<int, int>>;
  EXPECT_EQ(rows(33), (Cut{{0, 64}, {64, 64}, {128, 2}, {130, 63}}));
  EXPECT_EQ(rows(34), (Cut{{0, 128}, {128, 2}, {130, 63}}));
  EXPECT_TRUE(optimized::make_prefill_tiles({}, 16).empty());
}

TEST(AttentionPrefillDevice, PaddingRowsAreLeftAlone) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 100, .dense = true});
  std::vector<std::int32_t> positions = range(90, 100);
  positions.insert(positions.end(), {-1, -1, -1});
  ErrorCheck check;
  compare(history, make_rows(history, 1, 0, positions, 24), 0, check);
  check.expect_within("attention_prefill with padding", output_tolerance().differing_share);
}

// Padding around the rows of a tile, and a second warpgroup without any row.
TEST(AttentionPrefillDevice, PaddingRowsOverEncodedHistoryAreLeftAlone) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kFrontier = optimized::kPrefillSplitTokens;
  History history({.heads = 2, .head_dim = 64, .layers = 1, .positions = kFrontier + 40, .dense = true, .keep_planes = true});
  history.encode({{0, kFrontier}});
  std::vector<std::int32_t> positions{-1, -1, kFrontier, kFrontier + 1, -1, kFrontier + 39};
  positions.resize(100, -1);
  ErrorCheck check;
  compare(history, make_rows(history, 2, kFrontier, positions, 35), 0, check);
  compare(history, make_rows(history, 2, 0, positions, 35), 0, check);
  check.expect_within("attention_prefill over encoded history with padding", 1.0);
}

// Rows that the prompt has not reached are poison in the same page.
TEST(AttentionPrefillDevice, UnwrittenRowsOfTheLastPageAreNotRead) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 70, .dense = true});  // rows 70..127 of page 1 hold NaN
  for (const std::uint16_t value : run(history, 0, make_rows(history, 3, 0, range(0, 70), 25))) ASSERT_LT(value & 0x7FFF, 0x7F80);
  history.encode({{0, 64}});
  for (const std::uint16_t value : run(history, 0, make_rows(history, 3, 64, range(64, 70), 25))) ASSERT_LT(value & 0x7FFF, 0x7F80);
}

TEST(AttentionPrefillDevice, PlantedFaultShows) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 130, .dense = true});
  const Rows rows = make_rows(history, 3, 0, range(0, 130), 26);
  EXPECT_NE(run(history, 0, rows, Fault::loop_off_by_one), run(history, 0, rows));
  history.encode({{0, 128}});
  const Rows last_rows = make_rows(history, 3, 128, range(128, 130), 26);
  EXPECT_NE(run(history, 0, last_rows, Fault::loop_off_by_one), run(history, 0, last_rows));
}

}  // namespace
}  // namespace loopgauge::equivalence
