// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/sparse_correction.cuh"

#include <gtest/gtest.h>

#include <algorithm>

#include "models/spec/sparse_correction.hpp"
#include "optimized/ops/attention_decode.cuh"
#include "optimized/ops/reference_statistics.cuh"
#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/sparse_decode.hpp"
#include "tests/equivalence/kv_fixture.hpp"
#include "tests/equivalence/late_rows.hpp"

namespace loopgauge::equivalence {
namespace {

constexpr int kLayer = 1;
const spec::Tolerance& output_tolerance() { return spec::kSparseCorrection.outputs[0].tolerance; }

// Reference state of one row, all heads, on the host; upload() puts it into a slot.
struct RowState {
  std::vector<reference::HeadReference<float>> heads;
};

RowState random_state(const History& history, int position, int bp, std::mt19937& generator) {
  RowState state;
  std::uniform_real_distribution<float> uniform(0.05f, 1.0f);
  std::normal_distribution<float> normal;
  for (int head = 0; head < history.model().heads; ++head) {
    reference::HeadReference<float> reference_state;
    std::vector<int> all(static_cast<std::size_t>(position + 1));
    for (int i = 0; i <= position; ++i) all[static_cast<std::size_t>(i)] = i;
    std::shuffle(all.begin(), all.end(), generator);
    all.resize(static_cast<std::size_t>(budget(bp, position + 1)));
    std::sort(all.begin(), all.end());
    reference_state.keys = all;
    reference_state.mass = uniform(generator);
    for (int d = 0; d < history.model().head_dim; ++d) {
      reference_state.output.push_back(normal(generator));
      reference_state.partial.push_back(normal(generator) * 0.5f);
    }
    state.heads.push_back(std::move(reference_state));
  }
  return state;
}

void upload(const optimized::KvShape& shape, const optimized::ReferenceView& view, int slot, const RowState& state, int position) {
  for (int head = 0; head < shape.heads; ++head) {
    const auto& source = state.heads[static_cast<std::size_t>(head)];
    const std::size_t index = optimized::reference_index(shape, slot, kLayer, head);
    std::vector<std::uint64_t> masks(static_cast<std::size_t>(optimized::page_count(position + 1)));
    for (const int key : source.keys) masks[static_cast<std::size_t>(key / 64)] |= std::uint64_t{1} << (key % 64);
    const auto copy = [](void* target, const void* from, std::size_t bytes) {
      LOOPGAUGE_CUDA_CHECK(cudaMemcpy(target, from, bytes, cudaMemcpyHostToDevice));
    };
    copy(view.selected + index * view.mask_pages, masks.data(), masks.size() * 8);
    copy(view.mass + index, &source.mass, 4);
    copy(view.o_ref + index * static_cast<std::size_t>(shape.head_dim), source.output.data(), source.output.size() * 4);
    copy(view.c_ref + index * static_cast<std::size_t>(shape.head_dim), source.partial.data(), source.partial.size() * 4);
  }
}

std::vector<std::uint16_t> run(History& history, const optimized::ReferenceView& view, const Batch& batch, int max_length,
                               Fault fault = Fault::none, bool encoded_history = true, bool early = false) {
  optimized::DeviceAllocator& allocator = history.allocator();
  const auto rows = static_cast<int>(batch.rows.size());
  DeviceArray<std::uint16_t> q(allocator, batch.q), output(allocator, batch.q.size());
  DeviceArray<optimized::QueryRow> device_rows(allocator, batch.rows);
  DeviceArray<std::uint8_t> workspace(allocator, optimized::sparse_correction_workspace_bytes(history.kv_shape(), rows));
  DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(batch.rows.size() * static_cast<std::size_t>(history.model().heads)));
  LateRows late(history, kLayer, device_rows.data(), rows, q);
  if (early) late.launch();
  optimized::sparse_correction({.kv = history.cache().view(),
                                .layer = kLayer,
                                .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                .q_row_stride = history.model().projection_width(),
                                .rows = device_rows.data(),
                                .row_count = rows,
                                .max_length = max_length,
                                .reference = view,
                                .encoded_history = encoded_history,
                                .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                .workspace = workspace.data(),
                                .arrivals = arrivals.data(),
                                .written_rows = early ? device_rows.data() : nullptr,
                                .fault = fault},
                               history.stream());
  for (const std::uint32_t count : arrivals.download()) EXPECT_EQ(count, 0u) << "arrivals of the next launch";
  return output.download();
}

void compare(History& history, const Batch& batch, const std::vector<RowState>& states, const std::vector<std::uint16_t>& actual, int frontier,
             ErrorCheck& check) {
  const optimized::KvShape shape = history.kv_shape();
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  for (std::size_t i = 0; i < batch.rows.size(); ++i) {
    const auto& row = batch.rows[i];
    for (int head = 0; head < shape.heads; ++head) {
      const std::size_t offset = i * width + static_cast<std::size_t>(head) * head_dim;
      const auto query = widen(std::span(batch.q).subspan(offset, head_dim));
      const auto& state = states[i].heads[static_cast<std::size_t>(head)];
      const auto keys = history.keys(kLayer, row.loop, head, frontier), values = history.values(kLayer, row.loop, head, frontier);
      const float scale = reference::attention_scale<reference::Declared>(shape.head_dim);
      std::vector<float> expected(head_dim), probabilities(state.keys.size()), local(head_dim);
      reference::sparse_correction<reference::Declared>(query.data(), keys, values, state, scale, expected.data());
      reference::attention_listed<reference::Declared>(query.data(), keys, values, state.keys, scale, probabilities.data(), local.data());
      const double error = score_error_bound(history, query, kLayer, row.loop, head, state.keys, frontier);
      for (std::size_t d = 0; d < head_dim; ++d) {
        double magnitude = 0.0;
        for (std::size_t j = 0; j < state.keys.size(); ++j) {
          magnitude += static_cast<double>(probabilities[j]) * std::fabs(values.row(state.keys[j])[d]);
        }
        check.add(output_tolerance(),
                  {.expected = reference::round_to_bfloat16(expected[d]),
                   .magnitude = std::fabs(state.output[d]) + std::fabs(state.partial[d]) + state.mass * magnitude,
                   .terms = static_cast<double>(state.keys.size()),
                   .input_error = error},
                  to_float(actual[offset + d]),
                  "position " + std::to_string(row.position) + " loop " + std::to_string(row.loop) + " head " + std::to_string(head));
      }
    }
  }
}

struct Case {
  int heads, head_dim, positions, bp;
  bool encoded;
  int first_block = 256;
};

class SparseCorrection : public ::testing::TestWithParam<Case> {};

TEST_P(SparseCorrection, MatchesTheReferenceGivenItsState) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const Case& c = GetParam();
  History history({.heads = c.heads, .head_dim = c.head_dim, .positions = c.positions, .prompt = c.positions / 2, .fragmented = true});
  int frontier = 0;
  if (c.encoded) {
    frontier = (c.positions - 1) / 64 * 64;
    std::vector<PositionRange> blocks{{0, std::min(frontier, c.first_block)}};
    for (int begin = c.first_block; begin < frontier; begin += 64) blocks.push_back({begin, begin + 64});
    history.encode(blocks);
  }
  std::mt19937 generator(51);
  const optimized::KvShape shape = history.kv_shape();
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  optimized::ReferenceStore store(shape, 5, c.positions, history.allocator());
  Batch batch;
  std::vector<RowState> states;
  for (const int position : {frontier, c.positions - 1}) {
    for (int loop = 3; loop <= 4; ++loop) {
      const int slot = 4 - static_cast<int>(batch.rows.size());
      batch.rows.push_back({history.request(), position, loop, frontier, slot});
      states.push_back(random_state(history, position, c.bp, generator));
      upload(shape, store.view(), slot, states.back(), position);
    }
  }
  batch.q = random_rows(generator, batch.rows.size() * width);
  const auto actual = run(history, store.view(), batch, c.positions);
  if (!c.encoded) {
    EXPECT_EQ(run(history, store.view(), batch, c.positions, Fault::none, false), actual) << "the kernel that reads BF16 only";
  }
  ErrorCheck check;
  compare(history, batch, states, actual, frontier, check);
  check.expect_within("sparse_correction", output_tolerance().differing_share);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SparseCorrection,
                         ::testing::Values(Case{3, 128, 1000, 1000, false}, Case{3, 64, 1000, 1000, false}, Case{3, 128, 1000, 1000, true},
                                           Case{3, 64, 700, 1000, true}, Case{16, 128, 260, 1000, true}, Case{2, 128, 2100, 50, true},
                                           Case{2, 64, 129, 10000, true}, Case{2, 128, 1, 1000, false}, Case{2, 64, 65, 1, false},
                                           // groups of K that begin and end anywhere in a page
                                           Case{3, 128, 1500, 3000, true, 1408}, Case{3, 64, 1500, 10000, true, 1024},
                                           // a group of chains for each of many CTAs
                                           Case{1, 64, 8500, 1000, true}, Case{1, 128, 8500, 1000, false},
                                           // more units than chains, so that a chain goes from encoded keys to BF16 ones
                                           Case{1, 64, 17000, 500, true}, Case{1, 128, 17000, 500, true}, Case{1, 128, 17000, 500, false}));

// S-SDA: with every key selected, m is 1 and the correction is current dense attention up to rounding.
TEST(SparseCorrectionDevice, AllKeysGiveDenseAttention) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 500, .prompt = 300});
  history.encode({{0, 256}});
  const optimized::KvShape shape = history.kv_shape();
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  std::mt19937 generator(52);
  optimized::ReferenceStore store(shape, 1, 500, history.allocator());
  Batch batch{{{history.request(), 499, 2, 256, 0}}, random_rows(generator, width)};
  optimized::DeviceAllocator& allocator = history.allocator();
  DeviceArray<std::uint16_t> q(allocator, batch.q), output(allocator, width), dense(allocator, width);
  DeviceArray<optimized::QueryRow> rows(allocator, batch.rows);
  DeviceArray<std::uint8_t> workspace(allocator, optimized::reference_statistics_workspace_bytes(shape, 1));
  DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(static_cast<std::size_t>(shape.heads)));
  DeviceArray<float> logits(allocator, static_cast<std::size_t>(shape.heads) * 500);
  const optimized::ReferenceStatisticsArguments arguments{.kv = history.cache().view(),
                                                          .layer = kLayer,
                                                          .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                                          .q_row_stride = static_cast<std::int64_t>(width),
                                                          .rows = rows.data(),
                                                          .row_count = 1,
                                                          .max_length = 500,
                                                          .reference = store.view(),
                                                          .logits = logits.data(),
                                                          .logit_stride = 500,
                                                          .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                                          .workspace = workspace.data(),
                                                          .arrivals = arrivals.data(),
                                                          .numeric_fault = history.numeric_fault()};
  optimized::reference_statistics(arguments, history.stream());
  for (int head = 0; head < shape.heads; ++head) {
    const std::vector<std::uint64_t> masks = [] {
      std::vector<std::uint64_t> full(8, ~std::uint64_t{0});
      full[7] = optimized::page_mask(7, 0, 500);
      return full;
    }();
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(store.view().selected + optimized::reference_index(shape, 0, kLayer, head) * store.view().mask_pages,
                                    masks.data(), masks.size() * 8, cudaMemcpyHostToDevice));
  }
  optimized::reference_contribution(arguments, history.stream());
  LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
  for (int head = 0; head < shape.heads; ++head) {
    float mass = 0.0f;
    LOOPGAUGE_CUDA_CHECK(
        cudaMemcpy(&mass, store.view().mass + optimized::reference_index(shape, 0, kLayer, head), 4, cudaMemcpyDeviceToHost));
    EXPECT_NEAR(mass, 1.0f, 1e-5f);
  }
  batch.rows[0].loop = 3;
  const auto corrected = run(history, store.view(), batch, 500);
  DeviceArray<optimized::QueryRow> loop3_rows(allocator, batch.rows);
  optimized::attention_decode({.kv = history.cache().view(),
                               .layer = kLayer,
                               .q = arguments.q,
                               .q_row_stride = arguments.q_row_stride,
                               .rows = loop3_rows.data(),
                               .row_count = 1,
                               .max_length = 500,
                               .output = reinterpret_cast<__nv_bfloat16*>(dense.data()),
                               .workspace = workspace.data(),
                               .arrivals = arrivals.data()},
                              history.stream());
  const auto expected = dense.download();
  for (std::size_t i = 0; i < width; ++i) {
    const float a = to_float(corrected[i]), e = to_float(expected[i]);
    EXPECT_LE(std::fabs(a - e), spec::ulp(std::max(std::fabs(a), std::fabs(e)), spec::Format::bf16) + 1e-4) << i;
  }
}

TEST(SparseCorrectionDevice, BitsDoNotDependOnTheBatch) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 1500, .prompt = 700});
  history.encode({{0, 256}, {256, 1024}});
  std::mt19937 generator(53);
  const optimized::KvShape shape = history.kv_shape();
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  optimized::ReferenceStore store(shape, 4, 1500, history.allocator());
  Batch batch;
  for (int i = 0; i < 4; ++i) {
    const int position = 1024 + 150 * i;
    batch.rows.push_back({history.request(), position, 3 + i % 2, 1024, i});
    upload(shape, store.view(), i, random_state(history, position, 1000, generator), position);
  }
  batch.q = random_rows(generator, batch.rows.size() * width);
  const auto together = run(history, store.view(), batch, 1500);
  EXPECT_EQ(run(history, store.view(), batch, 5000), together);
  for (std::size_t i = 0; i < batch.rows.size(); ++i) {
    const auto begin = batch.q.begin() + static_cast<std::ptrdiff_t>(i * width);
    const Batch alone{{batch.rows[i]}, {begin, begin + static_cast<std::ptrdiff_t>(width)}};
    const auto output = run(history, store.view(), alone, batch.rows[i].position + 1);
    EXPECT_TRUE(std::equal(output.begin(), output.end(), together.begin() + static_cast<std::ptrdiff_t>(i * width))) << "row " << i;
  }
}

TEST(SparseCorrectionDevice, BitsDoNotDependOnWhenALaunchMayBegin) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = 1300, .prompt = 600, .dense_runs = 384, .keep_planes = true});
    history.encode({{0, 256}, {256, 1216}});
    std::mt19937 generator(57);
    const optimized::KvShape shape = history.kv_shape();
    const std::vector<int> positions{1216, 1247, 1299};
    optimized::ReferenceStore store(shape, static_cast<int>(positions.size()), 1300, history.allocator());
    for (std::size_t i = 0; i < positions.size(); ++i) {  // half of the keys: of every page some, also written ones
      upload(shape, store.view(), static_cast<int>(i), random_state(history, positions[i], 5000, generator), positions[i]);
    }
    for (const bool encoded : {true, false}) {
      Batch batch;
      for (std::size_t i = 0; i < positions.size(); ++i) {
        for (int loop = 3; loop <= kLoops; ++loop) batch.rows.push_back({history.request(), positions[i], loop, encoded ? 1216 : 0, static_cast<int>(i)});
      }
      batch.q = random_rows(generator, batch.rows.size() * static_cast<std::size_t>(history.model().projection_width()));
      const auto expected = run(history, store.view(), batch, 1300, Fault::none, encoded);  // first: a kernel that is not loaded begins late
      EXPECT_EQ(run(history, store.view(), batch, 1300, Fault::none, encoded, true), expected) << "head_dim " << head_dim << (encoded ? ", encoded" : ", BF16");
    }
  }
}

TEST(SparseCorrectionDevice, ZerosAndLargeRowsAmongOthers) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = 420, .dense = true, .keep_planes = true});
    ASSERT_NO_FATAL_FAILURE(encode_zeros_and_large_rows(history));
    std::mt19937 generator(56);
    const optimized::KvShape shape = history.kv_shape();
    optimized::ReferenceStore store(shape, 4, 420, history.allocator());
    Batch batch;
    std::vector<RowState> states;
    for (const int position : {384, 419}) {
      for (int loop = 3; loop <= kLoops; ++loop) {
        const auto slot = static_cast<int>(batch.rows.size());
        batch.rows.push_back({history.request(), position, loop, 384, slot});
        states.push_back(random_state(history, position, loop == 3 ? 3000 : kBasisPoints, generator));
        upload(shape, store.view(), slot, states.back(), position);
      }
    }
    batch.q = random_rows(generator, batch.rows.size() * static_cast<std::size_t>(history.model().projection_width()));
    ErrorCheck check;
    compare(history, batch, states, run(history, store.view(), batch, 420), 384, check);
    check.expect_within("sparse_correction, zeros and large rows among others", output_tolerance().differing_share);
  }
}

// Five groups of a row for five CTAs, for a few, and for one, which then combines a group while it works on the next; short rows leave CTAs without one.
TEST(SparseCorrectionDevice, BitsDoNotDependOnHowManyCtasShareARow) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.heads = 2, .positions = kManyPositions, .prompt = 2000, .keep_planes = true});
  encode_many(history);
  std::mt19937 generator(55);
  const optimized::KvShape shape = history.kv_shape();
  const std::vector<int> positions{130, 1500, 4095, 4096, kManyFrontier, kManyPositions - 1};  // units of encoded rows are longer from 4096 on
  optimized::ReferenceStore store(shape, static_cast<int>(positions.size()), kManyPositions, history.allocator());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    upload(shape, store.view(), static_cast<int>(i), random_state(history, positions[i], 1000, generator), positions[i]);
  }
  for (const bool encoded : {true, false}) {
    Batch batch;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const int frontier = encoded ? std::min(kManyFrontier, positions[i] / 64 * 64) : 0;
      for (int loop = 3; loop <= kLoops; ++loop) batch.rows.push_back({history.request(), positions[i], loop, frontier, static_cast<int>(i)});
    }
    batch.q = random_rows(generator, batch.rows.size() * static_cast<std::size_t>(history.model().projection_width()));
    // (row, head) pairs of the launch: 24, 120, 1056 (a CTA for each)
    expect_bits_of_rows_alone(batch, {1, 5, 44}, encoded ? "encoded" : "BF16",
                              [&](const Batch& rows) { return run(history, store.view(), rows, kManyPositions, Fault::none, encoded); });
  }
}

// The last of so many keys has an infinite value in one channel: no place of a block without a key may multiply that by zero.
TEST(SparseCorrectionDevice, AnInfiniteValueIsNoNaN) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kPosition = 50, kChannel = 5;
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = kPosition + 1, .dense = true});
    const optimized::KvShape shape = history.kv_shape();
    const auto width = static_cast<std::size_t>(history.model().projection_width());
    std::mt19937 generator(57);
    optimized::ReferenceStore store(shape, 1, kPosition + 1, history.allocator());
    const Batch batch{{{history.request(), kPosition, 3, 0, 0}}, random_rows(generator, width)};
    for (int count = kPosition; count > 0; --count) {  // keys 0..count - 1; values of later ones stay infinite
      RowState state = random_state(history, kPosition, kBasisPoints, generator);
      for (int head = 0; head < shape.heads; ++head) {
        state.heads[static_cast<std::size_t>(head)].keys.resize(static_cast<std::size_t>(count));
        const std::size_t element = optimized::page_row_offset(shape, kLayer, optimized::KvTensor::v, head, count - 1) + kChannel;
        const std::uint16_t infinity = 0x7F80;
        LOOPGAUGE_CUDA_CHECK(cudaMemcpy(reinterpret_cast<std::uint16_t*>(history.cache().pages(history.request())[0].bf16[2]) + element, &infinity, 2,
                                        cudaMemcpyHostToDevice));
      }
      upload(shape, store.view(), 0, state, kPosition);
      const auto output = run(history, store.view(), batch, kPosition + 1, Fault::none, false);
      for (std::size_t i = 0; i < width; ++i) {
        const bool infinite = i % static_cast<std::size_t>(head_dim) == kChannel;
        ASSERT_EQ(output[i] == 0x7F80, infinite) << count << " keys, channel " << i << ", bits " << output[i];
        ASSERT_FALSE(std::isnan(to_float(output[i]))) << count << " keys, channel " << i;
      }
    }
  }
}

TEST(SparseCorrectionDevice, PlantedFaultsShow) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 300, .prompt = 200});
  history.encode({{0, 192}});
  std::mt19937 generator(54);
  optimized::ReferenceStore store(history.kv_shape(), 1, 300, history.allocator());
  upload(history.kv_shape(), store.view(), 0, random_state(history, 299, 3000, generator), 299);
  const Batch batch{{{history.request(), 299, 4, 192, 0}},
                    random_rows(generator, static_cast<std::size_t>(history.model().projection_width()))};
  const auto right = run(history, store.view(), batch, 300);
  EXPECT_NE(run(history, store.view(), batch, 300, Fault::loop_off_by_one), right);
  EXPECT_NE(run(history, store.view(), batch, 300, Fault::wrong_compact_rank), right);
}

}  // namespace
}  // namespace loopgauge::equivalence
