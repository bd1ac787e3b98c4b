// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/select_keys.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "models/algorithm_config.hpp"
#include "reference/ops/sparse_decode.hpp"
#include "tests/equivalence/kv_fixture.hpp"

namespace loopgauge::equivalence {
namespace {

using Make = std::function<float(std::mt19937&, int)>;

struct Kind {
  const char* name;
  Make make;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> list{
      {"normal", [](std::mt19937& g, int) { return std::normal_distribution<float>()(g); }},
      {"many ties", [](std::mt19937& g, int) { return static_cast<float>(static_cast<int>(g() % 5)) - 2.0f; }},
      {"all equal", [](std::mt19937&, int) { return -3.25f; }},
      {"signed zeros", [](std::mt19937& g, int) { return g() % 2 ? 0.0f : -0.0f; }},
      {"zeros and neighbours",
       [](std::mt19937& g, int) {
         const float values[] = {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), -std::numeric_limits<float>::denorm_min()};
         return values[g() % 4];
       }},
      {"wide range", [](std::mt19937& g, int) { return std::ldexp(g() % 2 ? 1.0f : -1.0f, static_cast<int>(g() % 250) - 125); }},
      {"neighbouring floats", [](std::mt19937& g, int) { return std::bit_cast<float>(0x40490FDBu + static_cast<std::uint32_t>(g() % 9)); }},
      {"equal leading bits", [](std::mt19937& g, int) { return std::bit_cast<float>(0x3F800000u + static_cast<std::uint32_t>(g() & 0x1FFFFFu)); }},
      {"equal leading bits but for a few",
       [](std::mt19937& g, int) { return g() % 64 ? std::bit_cast<float>(0xBF800000u + static_cast<std::uint32_t>(g() & 0x1FFFFFu)) : 2.0f; }},
      {"ascending", [](std::mt19937&, int i) { return static_cast<float>(i); }},
      {"descending", [](std::mt19937&, int i) { return static_cast<float>(-i); }},
  };
  return list;
}

struct Selection {
  std::vector<std::vector<int>> keys;  // [rows * heads]
  std::uint64_t fault = 0;
};

constexpr int kHeads = 3;
constexpr int kMaxLength = 4500;

// logits [rows][heads][length of the row], row i in reference slot `slots[i]`.
Selection run(const std::vector<std::vector<std::vector<float>>>& logits, int bp, const std::vector<int>& slots, int layer,
              Fault planted = Fault::none, int max_length = kMaxLength) {
  optimized::DeviceAllocator allocator = poisoning_allocator();
  const optimized::KvShape shape{2, kHeads, 64};
  const int slot_count = *std::max_element(slots.begin(), slots.end()) + 1;
  optimized::ReferenceStore store(shape, slot_count, max_length, allocator);
  const auto stride = static_cast<std::int64_t>(max_length);
  std::vector<float> flat(logits.size() * kHeads * static_cast<std::size_t>(stride), std::numeric_limits<float>::quiet_NaN());
  std::vector<optimized::QueryRow> rows;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    rows.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(logits[i][0].size()) - 1, 2, 0, slots[i]});
    for (std::size_t head = 0; head < kHeads; ++head) {
      std::copy(logits[i][head].begin(), logits[i][head].end(),
                flat.begin() + static_cast<std::ptrdiff_t>((i * kHeads + head) * static_cast<std::size_t>(stride)));
    }
  }
  DeviceArray<float> device_logits(allocator, flat);
  DeviceArray<optimized::QueryRow> device_rows(allocator, rows);
  DeviceArray<std::uint64_t> fault(allocator, std::vector<std::uint64_t>{optimized::kNoNumericFault});
  const optimized::ReferenceView view = store.view();
  optimized::select_keys({.shape = shape,
                          .layer = layer,
                          .rows = device_rows.data(),
                          .row_count = static_cast<int>(rows.size()),
                          .key_fraction_bp = bp,
                          .logits = device_logits.data(),
                          .logit_stride = stride,
                          .reference = view,
                          .numeric_fault = fault.data(),
                          .fault = planted},
                         nullptr);
  Selection result;
  result.fault = fault.download().front();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    for (int head = 0; head < kHeads; ++head) {
      const int n = rows[i].position + 1;
      std::vector<std::uint64_t> masks(static_cast<std::size_t>(optimized::page_count(n)));
      const std::size_t offset = optimized::reference_index(shape, slots[i], layer, head) * view.mask_pages;
      LOOPGAUGE_CUDA_CHECK(cudaMemcpy(masks.data(), view.selected + offset, masks.size() * 8, cudaMemcpyDeviceToHost));
      std::vector<int> keys;
      for (std::size_t page = 0; page < masks.size(); ++page) {
        for (int bit = 0; bit < 64; ++bit) {
          if (masks[page] >> bit & 1) keys.push_back(static_cast<int>(page) * 64 + bit);
        }
      }
      result.keys.push_back(std::move(keys));
    }
  }
  return result;
}

TEST(SelectKeysDevice, SetsAreTheReferences) {
  LOOPGAUGE_REQUIRE_DEVICE();
  std::mt19937 generator(31);
  for (const Kind& kind : kinds()) {
    std::vector<std::vector<std::vector<float>>> logits;
    for (const int n : {1, 2, 7, 10, 11, 63, 64, 65, 127, 128, 129, 191, 192, 1000, 2047, 2048, 2049, 4096, 4097, 4500}) {
      auto& row = logits.emplace_back(kHeads, std::vector<float>(static_cast<std::size_t>(n)));
      for (auto& head : row) {
        for (int i = 0; i < n; ++i) head[static_cast<std::size_t>(i)] = kind.make(generator, i);
      }
    }
    std::vector<int> slots(logits.size());
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int>((i * 7 + 3) % slots.size());
    for (const int bp : {1, 1000, 3333, 9999, 10000}) {
      const Selection actual = run(logits, bp, slots, 1);
      EXPECT_EQ(actual.fault, optimized::kNoNumericFault) << kind.name;
      for (std::size_t i = 0; i < logits.size(); ++i) {
        for (std::size_t head = 0; head < kHeads; ++head) {
          const auto& values = logits[i][head];
          const auto expected = reference::select_keys<float>(values, budget(bp, static_cast<int>(values.size())));
          EXPECT_EQ(actual.keys[i * kHeads + head], expected) << kind.name << ", n " << values.size() << ", bp " << bp << ", head " << head;
        }
      }
    }
  }
}

// More pages than threads: what equals the threshold is counted in chunks of pages. More keys that share leading digits than are kept as candidates.
TEST(SelectKeysDevice, SetsOfLongRowsAreTheReferences) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kLongest = 65472;
  std::mt19937 generator(32);
  for (const Kind& kind : kinds()) {
    std::vector<std::vector<std::vector<float>>> logits;
    for (const int n : {32768, 32769, kLongest}) {
      auto& row = logits.emplace_back(kHeads, std::vector<float>(static_cast<std::size_t>(n)));
      for (auto& head : row) {
        for (int i = 0; i < n; ++i) head[static_cast<std::size_t>(i)] = kind.make(generator, i);
      }
    }
    for (const int bp : {1, 1000, 9999}) {
      const Selection actual = run(logits, bp, {1, 2, 0}, 1, Fault::none, kLongest);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        for (std::size_t head = 0; head < kHeads; ++head) {
          const auto& values = logits[i][head];
          EXPECT_EQ(actual.keys[i * kHeads + head], reference::select_keys<float>(values, budget(bp, static_cast<int>(values.size()))))
              << kind.name << ", n " << values.size() << ", bp " << bp << ", head " << head;
        }
      }
    }
  }
}

TEST(SelectKeysDevice, NonFiniteLogitsAreReported) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<std::vector<std::vector<float>>> logits(3, std::vector<std::vector<float>>(kHeads, std::vector<float>(200, 1.0f)));
    logits[1][2][150] = bad;
    const Selection actual = run(logits, 1000, {0, 1, 2}, 1);
    ASSERT_NE(actual.fault, optimized::kNoNumericFault);
    const optimized::NumericFault fault = optimized::unpack_numeric_fault(actual.fault);
    EXPECT_EQ(fault.kind, optimized::NumericFaultKind::logit);
    EXPECT_EQ(fault.request, 1);
    EXPECT_EQ(fault.layer, 1);
    EXPECT_EQ(fault.position, 199);
    EXPECT_EQ(fault.head, 2);
  }
}

TEST(SelectKeysDevice, TiesByArrivalAreDetected) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const std::vector<std::vector<std::vector<float>>> logits(1, std::vector<std::vector<float>>(kHeads, std::vector<float>(200, 1.0f)));
  std::vector<int> first(20);
  for (int i = 0; i < 20; ++i) first[static_cast<std::size_t>(i)] = i;
  EXPECT_EQ(run(logits, 1000, {0}, 1).keys[0], first);
  const auto last = run(logits, 1000, {0}, 1, Fault::threshold_tie_by_arrival).keys[0];
  EXPECT_EQ(last.size(), 20u);
  EXPECT_NE(last, first);
}

}  // namespace
}  // namespace loopgauge::equivalence
