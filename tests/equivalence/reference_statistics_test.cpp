// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/reference_statistics.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "models/spec/reference_statistics.hpp"
#include "optimized/ops/attention_decode.cuh"
#include "optimized/ops/select_keys.cuh"
#include "reference/ops/sparse_decode.hpp"
#include "tests/equivalence/kv_fixture.hpp"

namespace loopgauge::equivalence {
namespace {

constexpr int kLayer = 1;
constexpr int kBp = 1000;
constexpr int kEveryKey = 10000;

const spec::Tolerance& tolerance_of(std::size_t output) { return spec::kReferenceStatistics.outputs[output].tolerance; }

struct Case {
  int heads, head_dim, positions;
  bool encoded;
  int bp = kBp;
};

class ReferenceStatistics : public ::testing::TestWithParam<Case> {};

TEST_P(ReferenceStatistics, LogitsSelectionMassAndContributions) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const Case& c = GetParam();
  History history({.heads = c.heads, .head_dim = c.head_dim, .positions = c.positions, .prompt = c.positions / 2, .fragmented = true});
  int frontier = 0;
  if (c.encoded) {
    frontier = (c.positions - 1) / 64 * 64;
    history.encode({{0, frontier}});
  }
  optimized::DeviceAllocator& allocator = history.allocator();
  const optimized::KvShape shape = history.kv_shape();
  std::vector<optimized::QueryRow> rows;
  for (const int position : {frontier, c.positions / 2, c.positions - 1}) {
    if (position >= frontier) rows.push_back({history.request(), position, 2, frontier, 2 - static_cast<int>(rows.size())});
  }
  const int row_count = static_cast<int>(rows.size());
  std::mt19937 generator(41);
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const auto q_host = random_rows(generator, rows.size() * width);
  optimized::ReferenceStore store(shape, 3, c.positions, allocator);
  DeviceArray<std::uint16_t> q(allocator, q_host), output(allocator, q_host.size()), plain(allocator, q_host.size());
  DeviceArray<optimized::QueryRow> device_rows(allocator, rows);
  DeviceArray<std::uint8_t> workspace(allocator, optimized::reference_statistics_workspace_bytes(shape, row_count));
  DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(rows.size() * static_cast<std::size_t>(shape.heads)));
  DeviceArray<float> logits(allocator, rows.size() * static_cast<std::size_t>(shape.heads * c.positions));
  const auto* q_data = reinterpret_cast<const __nv_bfloat16*>(q.data());
  const optimized::ReferenceStatisticsArguments arguments{.kv = history.cache().view(),
                                                          .layer = kLayer,
                                                          .q = q_data,
                                                          .q_row_stride = static_cast<std::int64_t>(width),
                                                          .rows = device_rows.data(),
                                                          .row_count = row_count,
                                                          .max_length = c.positions,
                                                          .reference = store.view(),
                                                          .logits = logits.data(),
                                                          .logit_stride = c.positions,
                                                          .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                                          .workspace = workspace.data(),
                                                          .arrivals = arrivals.data(),
                                                          .numeric_fault = history.numeric_fault()};
  optimized::reference_statistics(arguments, history.stream());
  optimized::select_keys({.shape = shape,
                          .layer = kLayer,
                          .rows = device_rows.data(),
                          .row_count = row_count,
                          .key_fraction_bp = c.bp,
                          .logits = logits.data(),
                          .logit_stride = c.positions,
                          .reference = store.view(),
                          .numeric_fault = history.numeric_fault()},
                         history.stream());
  optimized::reference_contribution(arguments, history.stream());
  ASSERT_EQ(history.numeric_fault_word(), optimized::kNoNumericFault);

  optimized::attention_decode({.kv = history.cache().view(),
                               .layer = kLayer,
                               .q = q_data,
                               .q_row_stride = static_cast<std::int64_t>(width),
                               .rows = device_rows.data(),
                               .row_count = row_count,
                               .max_length = c.positions,
                               .output = reinterpret_cast<__nv_bfloat16*>(plain.data()),
                               .workspace = workspace.data(),
                               .arrivals = arrivals.data()},
                              history.stream());
  EXPECT_EQ(output.download(), plain.download()) << "bf16(O_ref) and attention_decode";
  if (!c.encoded) {
    const auto state_floats = static_cast<std::size_t>(3 * shape.layers * shape.heads) * head_dim;
    const auto c_ref_of = [&] {
      std::vector<float> values(state_floats);
      LOOPGAUGE_CUDA_CHECK(cudaMemcpy(values.data(), store.view().c_ref, state_floats * 4, cudaMemcpyDeviceToHost));
      return values;
    };
    const auto expected_c_ref = c_ref_of();
    const auto expected_logits = logits.download();
    logits.poison();
    output.poison();
    optimized::ReferenceStatisticsArguments narrow = arguments;
    narrow.encoded_history = false;
    optimized::reference_statistics(narrow, history.stream());
    optimized::reference_contribution(narrow, history.stream());
    const auto bits = [](const std::vector<float>& values) {
      std::vector<std::uint32_t> result;
      for (const float value : values) result.push_back(std::bit_cast<std::uint32_t>(value));
      return result;
    };
    EXPECT_EQ(output.download(), plain.download()) << "the kernel that reads BF16 only";
    EXPECT_EQ(bits(logits.download()), bits(expected_logits)) << "the kernel that reads BF16 only";
    EXPECT_EQ(bits(c_ref_of()), bits(expected_c_ref)) << "the kernel that reads BF16 only";
  }

  const auto actual_logits = logits.download();
  const auto fetch = [](const float* source, std::size_t count) {
    std::vector<float> values(count);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(values.data(), source, count * 4, cudaMemcpyDeviceToHost));
    return values;
  };
  const optimized::ReferenceView view = store.view();
  ErrorCheck scores, mass, c_ref, o_ref;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int position = rows[i].position, n = position + 1;
    for (int head = 0; head < shape.heads; ++head) {
      const std::string where = "position " + std::to_string(position) + " head " + std::to_string(head);
      const auto query = widen(std::span(q_host).subspan(i * width + static_cast<std::size_t>(head) * head_dim, head_dim));
      const ExpectedAttention expected = expected_attention(history, query, kLayer, 2, head, position, frontier);
      const float* row_logits = actual_logits.data() + (i * static_cast<std::size_t>(shape.heads) + static_cast<std::size_t>(head)) *
                                                           static_cast<std::size_t>(c.positions);
      for (int j = 0; j < n; ++j) {
        const int key[] = {j};
        const double limit = score_error_bound(history, query, kLayer, 2, head, key, frontier);
        EXPECT_LE(std::fabs(row_logits[j] - expected.logits[static_cast<std::size_t>(j)]), limit) << where << " key " << j;
        scores.add({.kind = spec::ToleranceKind::norm_bound, .relative = 1.0},
                   {.expected = expected.logits[static_cast<std::size_t>(j)], .magnitude = limit}, row_logits[j], where);
      }
      // The set that the device's own logits give.
      const std::size_t state = optimized::reference_index(shape, rows[i].reference, kLayer, head);
      std::vector<std::uint64_t> masks(static_cast<std::size_t>(optimized::page_count(n)));
      LOOPGAUGE_CUDA_CHECK(cudaMemcpy(masks.data(), view.selected + state * view.mask_pages, masks.size() * 8, cudaMemcpyDeviceToHost));
      reference::HeadReference<float> reference_state;
      for (int j = 0; j < n; ++j) {
        if (masks[static_cast<std::size_t>(j / 64)] >> (j % 64) & 1) reference_state.keys.push_back(j);
      }
      EXPECT_EQ(reference_state.keys, reference::select_keys<float>(std::span(row_logits, static_cast<std::size_t>(n)), budget(c.bp, n)))
          << where;
      reference_state.output = expected.output;
      const auto values = history.values(kLayer, 2, head, frontier);
      reference::summarize_reference<reference::Declared>(expected.probabilities, values, reference_state);

      const double terms = n;
      mass.add(tolerance_of(1),
               {.expected = reference_state.mass, .magnitude = reference_state.mass, .terms = terms, .input_error = expected.score_error},
               fetch(view.mass + state, 1)[0], where);
      const auto actual_c = fetch(view.c_ref + state * head_dim, head_dim), actual_o = fetch(view.o_ref + state * head_dim, head_dim);
      for (std::size_t d = 0; d < head_dim; ++d) {
        double selected_magnitude = 0.0;
        for (const int key : reference_state.keys) {
          selected_magnitude += static_cast<double>(expected.probabilities[static_cast<std::size_t>(key)]) * std::fabs(values.row(key)[d]);
        }
        c_ref.add(
            tolerance_of(2),
            {.expected = reference_state.partial[d], .magnitude = selected_magnitude, .terms = terms, .input_error = expected.score_error},
            actual_c[d], where);
        o_ref.add(tolerance_of(3),
                  {.expected = expected.output[d], .magnitude = expected.magnitude[d], .terms = terms, .input_error = expected.score_error},
                  actual_o[d], where);
      }
    }
  }
  scores.expect_within("reference_statistics logits");
  mass.expect_within("reference_statistics m");
  c_ref.expect_within("reference_statistics C_ref");
  o_ref.expect_within("reference_statistics O_ref");
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReferenceStatistics,
                         ::testing::Values(Case{3, 128, 1000, false}, Case{3, 64, 700, false}, Case{3, 128, 700, true},
                                           Case{3, 64, 1000, true}, Case{16, 128, 260, true}, Case{2, 128, 1, false},
                                           Case{2, 64, 64, false}, Case{2, 128, 65, true}, Case{1, 64, 8500, true}, Case{2, 128, 700, true, kEveryKey},
                                           Case{2, 64, 700, false, kEveryKey}, Case{2, 64, 700, true, 1}, Case{2, 128, 2049, true},
                                           Case{1, 64, 65472, true}));

// What the reference slots hold of `count` (slot, layer, head) states, as bits.
std::vector<std::uint32_t> state_bits(const optimized::ReferenceView& view, std::size_t count, std::size_t head_dim) {
  std::vector<std::uint32_t> bits;
  const auto append = [&](const void* source, std::size_t bytes) {
    const std::size_t before = bits.size();
    bits.resize(before + bytes / 4);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(bits.data() + before, source, bytes, cudaMemcpyDeviceToHost));
  };
  LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
  append(view.selected, count * view.mask_pages * 8);
  append(view.mass, count * 4);
  append(view.c_ref, count * head_dim * 4);
  return bits;
}

// One launch for several layers, whatever its number of CTAs, leaves the bits of a launch for each.
TEST(ReferenceStatisticsDevice, LayersTogetherHaveTheBitsOfLayersOneByOne) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kLayers = 3, kPositions = 600, kFrontier = 512;
  for (const int row_count : {1, 6, 22}) {  // (row, head) pairs of the launch: 48, 288 (more than are resident), 1056 (a CTA for each)
    History history({.heads = 16, .head_dim = 64, .layers = kLayers, .positions = kPositions, .prompt = 300});
    history.encode({{0, 256}, {256, kFrontier}});
    optimized::DeviceAllocator& allocator = history.allocator();
    const optimized::KvShape shape = history.kv_shape();
    std::vector<optimized::QueryRow> rows;
    for (int i = 0; i < row_count; ++i) rows.push_back({history.request(), kFrontier + 4 * i, 2, kFrontier, row_count - 1 - i});
    std::mt19937 generator(43);
    const auto width = static_cast<std::size_t>(history.model().projection_width());
    DeviceArray<std::uint16_t> q(allocator, random_rows(generator, rows.size() * width)), output(allocator, rows.size() * width);
    DeviceArray<optimized::QueryRow> device_rows(allocator, rows);
    DeviceArray<std::uint8_t> workspace(allocator, optimized::reference_statistics_workspace_bytes(shape, row_count, kLayers));
    DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(static_cast<std::size_t>(kLayers * row_count * shape.heads)));
    const std::size_t layer_logits = rows.size() * static_cast<std::size_t>(shape.heads * kPositions);
    DeviceArray<float> logits(allocator, kLayers * layer_logits);
    const auto run = [&](int group) {
      const optimized::ReferenceStore store(shape, row_count, kPositions, allocator);
      optimized::ReferenceStatisticsArguments arguments{.kv = history.cache().view(),
                                                        .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                                        .q_row_stride = static_cast<std::int64_t>(width),
                                                        .rows = device_rows.data(),
                                                        .row_count = row_count,
                                                        .max_length = kPositions,
                                                        .reference = store.view(),
                                                        .logit_stride = kPositions,
                                                        .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                                        .workspace = workspace.data(),
                                                        .arrivals = arrivals.data(),
                                                        .numeric_fault = history.numeric_fault()};
      logits.poison();
      for (int first = 0; first < kLayers; first += group) {
        const int count = std::min(group, kLayers - first);
        for (int i = 0; i < count; ++i) {
          arguments.layer = first + i;
          arguments.logits = logits.data() + static_cast<std::size_t>(i) * layer_logits;
          optimized::reference_statistics(arguments, history.stream());
        }
        arguments.layer = first;
        arguments.layer_count = count;
        arguments.logits = logits.data();
        optimized::select_keys({.shape = shape,
                                .layer = first,
                                .layer_count = count,
                                .rows = device_rows.data(),
                                .row_count = row_count,
                                .key_fraction_bp = kBp,
                                .logits = logits.data(),
                                .logit_stride = kPositions,
                                .reference = store.view(),
                                .numeric_fault = history.numeric_fault()},
                               history.stream());
        optimized::reference_contribution(arguments, history.stream());
      }
      EXPECT_EQ(history.numeric_fault_word(), optimized::kNoNumericFault);
      for (const std::uint32_t count : arrivals.download()) EXPECT_EQ(count, 0u) << "arrivals of the next launch";
      return state_bits(store.view(), rows.size() * static_cast<std::size_t>(kLayers * shape.heads), static_cast<std::size_t>(shape.head_dim));
    };
    const auto one_by_one = run(1);
    EXPECT_EQ(run(2), one_by_one) << row_count << " rows";
    EXPECT_EQ(run(kLayers), one_by_one) << row_count << " rows";
  }
}

// A launch of fewer layers than the group's, as a last group is, may divide the work of a (row, head) where the whole group's does not: it stays within
// the memory that the whole group was given, with the bits of layers one by one.
TEST(ReferenceStatisticsDevice, ALastGroupOfFewerLayersStaysInTheMemoryOfAWholeOne) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kLayers = 2, kGroup = 3, kPositions = 5200, kRows = 200;
  History history({.heads = 2, .head_dim = 64, .layers = kLayers, .positions = kPositions, .prompt = kPositions});
  optimized::DeviceAllocator& allocator = history.allocator();
  const optimized::KvShape shape = history.kv_shape();
  std::vector<optimized::QueryRow> rows;
  for (int i = 0; i < kRows; ++i) rows.push_back({history.request(), kPositions - 1 - i, 2, 0, i});
  std::mt19937 generator(44);
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  DeviceArray<std::uint16_t> q(allocator, random_rows(generator, rows.size() * width)), output(allocator, rows.size() * width);
  DeviceArray<optimized::QueryRow> device_rows(allocator, rows);
  const std::size_t bytes = optimized::reference_statistics_workspace_bytes(shape, kRows, kGroup), guard = std::size_t{8} << 20;
  DeviceArray<std::uint8_t> workspace(allocator, bytes + guard);
  workspace.poison();
  DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(static_cast<std::size_t>(kGroup * kRows * shape.heads)));
  const std::size_t layer_logits = rows.size() * static_cast<std::size_t>(shape.heads * kPositions);
  DeviceArray<float> logits(allocator, kLayers * layer_logits);
  const auto run = [&](int layer_count) {
    const optimized::ReferenceStore store(shape, kRows, kPositions, allocator);
    optimized::ReferenceStatisticsArguments arguments{.kv = history.cache().view(),
                                                      .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                                      .q_row_stride = static_cast<std::int64_t>(width),
                                                      .rows = device_rows.data(),
                                                      .row_count = kRows,
                                                      .max_length = kPositions,
                                                      .reference = store.view(),
                                                      .logit_stride = kPositions,
                                                      .encoded_history = false,
                                                      .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                                      .workspace = workspace.data(),
                                                      .arrivals = arrivals.data(),
                                                      .numeric_fault = history.numeric_fault()};
    logits.poison();
    for (int first = 0; first < kLayers; first += layer_count) {
      for (arguments.layer = first; arguments.layer < first + layer_count; ++arguments.layer) {
        arguments.logits = logits.data() + static_cast<std::size_t>(arguments.layer) * layer_logits;
        optimized::reference_statistics(arguments, history.stream());
      }
      arguments.layer = first;
      arguments.layer_count = layer_count;
      arguments.logits = logits.data() + static_cast<std::size_t>(first) * layer_logits;
      optimized::select_keys({.shape = shape,
                              .layer = first,
                              .layer_count = layer_count,
                              .rows = device_rows.data(),
                              .row_count = kRows,
                              .key_fraction_bp = kBp,
                              .logits = arguments.logits,
                              .logit_stride = kPositions,
                              .reference = store.view(),
                              .numeric_fault = history.numeric_fault()},
                             history.stream());
      optimized::reference_contribution(arguments, history.stream());
    }
    return state_bits(store.view(), rows.size() * static_cast<std::size_t>(kLayers * shape.heads), static_cast<std::size_t>(shape.head_dim));
  };
  const auto one_by_one = run(1);
  EXPECT_EQ(run(kLayers), one_by_one);
  const auto memory = workspace.download();
  EXPECT_TRUE(std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(bytes), memory.end(), [](std::uint8_t byte) { return byte == 0xFF; }));
}

TEST(ReferenceGroup, MemoryOfAGroupHoldsEverySmallerOne) {
  const optimized::KvShape shape{24, 16, 128};
  ASSERT_EQ(optimized::reference_group_layers(shape, 13, 15360), 5);  // 24 layers in fives: the last group has four
  for (const int rows : {1, 3, 8, 13, 16, 21, 22, 64, 65}) {
    for (int group = 1; group <= shape.layers; ++group) {
      for (int layers = 1; layers < group; ++layers) {
        EXPECT_GE(optimized::reference_statistics_workspace_bytes(shape, rows, group), optimized::reference_statistics_workspace_bytes(shape, rows, layers))
            << rows << " rows, " << group << " layers and " << layers;
      }
    }
  }
}

TEST(ReferenceGroup, LayersFitTheBytesAndGroupsAreEven) {
  const optimized::KvShape shape{24, 16, 128};
  EXPECT_EQ(optimized::reference_group_layers(shape, 1, 8192), 24);   // 512 KiB a layer
  EXPECT_EQ(optimized::reference_group_layers(shape, 1, 32768), 24);  // 2 MiB
  EXPECT_EQ(optimized::reference_group_layers(shape, 8, 8192), 12);   // 4 MiB: sixteen fit, two groups of twelve
  EXPECT_EQ(optimized::reference_group_layers(shape, 8, 32768), 4);   // 16 MiB: four fit
  EXPECT_EQ(optimized::reference_group_layers(shape, 8, 40000), 3);
  EXPECT_EQ(optimized::reference_group_layers(shape, 64, 32768), 1);  // 128 MiB: one layer, whatever it takes
}

TEST(ReferenceStatisticsDevice, NonFiniteLogitIsReported) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 100, .dense = true});
  optimized::DeviceAllocator& allocator = history.allocator();
  const optimized::KvShape shape = history.kv_shape();
  const auto width = static_cast<std::size_t>(history.model().projection_width());
  std::vector<std::uint16_t> q_host(width, 0x3F80);
  q_host[width - 1] = 0x7F80;  // +inf in the last head
  optimized::ReferenceStore store(shape, 1, 100, allocator);
  DeviceArray<std::uint16_t> q(allocator, q_host), output(allocator, width);
  DeviceArray<optimized::QueryRow> rows(allocator, std::vector<optimized::QueryRow>{{history.request(), 99, 2, 0, 0}});
  DeviceArray<std::uint8_t> workspace(allocator, optimized::reference_statistics_workspace_bytes(shape, 1));
  DeviceArray<std::uint32_t> arrivals(allocator, std::vector<std::uint32_t>(static_cast<std::size_t>(shape.heads)));
  DeviceArray<float> logits(allocator, static_cast<std::size_t>(shape.heads) * 100);
  optimized::reference_statistics({.kv = history.cache().view(),
                                   .layer = 1,
                                   .q = reinterpret_cast<const __nv_bfloat16*>(q.data()),
                                   .q_row_stride = static_cast<std::int64_t>(width),
                                   .rows = rows.data(),
                                   .row_count = 1,
                                   .max_length = 100,
                                   .reference = store.view(),
                                   .logits = logits.data(),
                                   .logit_stride = 100,
                                   .output = reinterpret_cast<__nv_bfloat16*>(output.data()),
                                   .workspace = workspace.data(),
                                   .arrivals = arrivals.data(),
                                   .numeric_fault = history.numeric_fault()},
                                  history.stream());
  ASSERT_NE(history.numeric_fault_word(), optimized::kNoNumericFault);
  const optimized::NumericFault fault = optimized::unpack_numeric_fault(history.numeric_fault_word());
  EXPECT_EQ(fault.head, shape.heads - 1);
  EXPECT_EQ(fault.position, 99);
  EXPECT_EQ(fault.layer, 1);
}

}  // namespace
}  // namespace loopgauge::equivalence
