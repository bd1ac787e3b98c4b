// SPDX-License-Identifier: Apache-2.0
// What lies between two attentions in one launch has the bits of the operations it stands for, one launch each.
#include "optimized/ops/decode_projections.cuh"

#include <future>
#include <memory>

#include "optimized/kv/kv_cache.hpp"
#include "optimized/ops/attention_decode.cuh"
#include "optimized/ops/kv_append.cuh"
#include "optimized/ops/linear_split_k.cuh"
#include "optimized/ops/rms_norm.cuh"
#include "optimized/ops/rope.cuh"
#include "optimized/ops/swiglu.cuh"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::Bfloat16;
using optimized::DeviceBuffer;
using optimized::KvCache;
using optimized::KvShape;
using optimized::QueryRow;

struct Extents {
  int hidden, heads, head_dim, intermediate;
  int width() const { return heads * head_dim; }
};
// ouro-tiny, ouro-small, heads of 64 with an odd share of K a warp, Ouro-1.4B, eight rows so wide that rings are short.
const Extents kExtents[] = {{384, 3, 128, 1024}, {640, 5, 128, 1536}, {512, 12, 64, 1376}, {2048, 16, 128, 5632}, {640, 38, 128, 512}};

// Some columns of every row become subnormal values of either sign, or zeros.
Bits with_subnormal_columns(Bits rows, int hidden) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t column = i % static_cast<std::size_t>(hidden);
    if (column % 16 < 3) rows[i] = static_cast<std::uint16_t>((rows[i] & 0x8000u) | (column % 16 == 2 ? 0u : rows[i] & 0x7Fu));
  }
  return rows;
}

class DecodeProjectionsTest : public DeviceTest {
 protected:
  DeviceBuffer weights(std::size_t count, float scale) { return upload(random_bits(count, ++seed_, scale)); }
  DeviceBuffer norm(const Extents& e) { return upload(with_subnormal_columns(random_bits(static_cast<std::size_t>(e.hidden), ++seed_), e.hidden)); }

  struct Layer {
    DeviceBuffer o_proj, gate_up, down_proj, qkv, after_attention, before_mlp, after_mlp, input;
  };
  Layer make_layer(const Extents& e) {
    const auto hidden = static_cast<std::size_t>(e.hidden), width = static_cast<std::size_t>(e.width()), inner = static_cast<std::size_t>(e.intermediate);
    return {weights(hidden * width, 0.05f), weights(2 * inner * hidden, 0.05f), weights(hidden * inner, 0.05f), weights(3 * width * hidden, 0.05f),
            norm(e), norm(e), norm(e), norm(e)};
  }

  // K/V of the rows, and everything that either way of computing writes.
  struct Side {
    std::unique_ptr<KvCache> kv;
    DeviceBuffer residual, other_residual, projected, activated, qkv, arrivals;
    std::vector<std::uint64_t> pages;
  };
  Side make_side(const Extents& e, const std::vector<QueryRow>& rows, const Bits& residual) {
    Side side;
    const KvShape shape{2, e.heads, e.head_dim};
    side.kv = std::make_unique<KvCache>(shape, allocator_, *stream_);
    std::vector<int> slots;
    for (int request = 0; request < 3; ++request) slots.push_back(side.kv->open_request(300));
    for (const QueryRow& row : rows) {
      if (row.request < 0) continue;
      side.kv->reserve(row.request, row.loop, {row.position, row.position + 1});
      side.kv->set_active(row.request, row.loop, {row.position, row.position + 1});
    }
    side.kv->upload();
    stream_->synchronize();
    for (const QueryRow& row : rows) {
      if (row.request < 0) continue;
      const std::uint64_t page = side.kv->pages(row.request)[static_cast<std::size_t>(row.position / optimized::kPageTokens)].bf16[row.loop - 1];
      side.pages.push_back(page);
      LOOPGAUGE_CUDA_CHECK(cudaMemset(reinterpret_cast<void*>(page), 0xFF, optimized::page_bytes(shape)));
    }
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
    const std::size_t count = rows.size();
    side.residual = upload(residual);
    side.other_residual = poisoned<std::uint16_t>(count * e.hidden);
    side.projected = poisoned<std::uint16_t>(count * e.hidden);
    side.activated = poisoned<std::uint16_t>(count * e.intermediate);
    side.qkv = poisoned<std::uint16_t>(count * 3 * e.width());
    side.arrivals = upload(std::vector<std::uint32_t>(2 * optimized::kProjectionArrivals, 0));
    return side;
  }

  Bits page_bits(const Side& side, std::size_t i, const Extents& e) {
    stream_->synchronize();
    Bits bits(optimized::page_bytes({2, e.heads, e.head_dim}) / 2);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(bits.data(), reinterpret_cast<const void*>(side.pages[i]), bits.size() * 2, cudaMemcpyDeviceToHost));
    return bits;
  }

  void expect_that_threads_launch(const Extents& e, int launches);

  std::uint32_t seed_ = 500;
};

TEST_F(DecodeProjectionsTest, HaveTheBitsOfTheOperationsOneByOne) {
  constexpr float kEpsilon = 1e-6f;
  for (const Extents& e : kExtents) {
    const Layer layer = make_layer(e);
    const optimized::RopeTable table = optimized::make_rope_table(300, e.head_dim, 1e4);
    const DeviceBuffer cosine = upload(table.cosine), sine = upload(table.sine);
    for (const int count : {1, 2, 3, 5, 8}) {
      ASSERT_TRUE(optimized::decode_projections_cover(count, e.hidden, e.heads, e.head_dim, e.intermediate));
      const std::string what = std::to_string(e.hidden) + " x " + std::to_string(e.heads) + " x " + std::to_string(e.head_dim) + ", " + std::to_string(count) + " rows";
      // Positions at the borders of pages, several requests and loops, and a row of padding when there are five.
      std::vector<QueryRow> rows;
      for (int i = 0; i < count; ++i) rows.push_back({i % 3, 60 + 3 * i, 1 + i % 4, 0, -1});
      if (count == 5) rows[3].request = -1;
      std::vector<std::int32_t> places;
      for (const QueryRow& row : rows) places.push_back(row.position);
      const DeviceBuffer device_rows = upload(rows), positions = upload(places);
      const Bits residual = with_subnormal_columns(random_bits(static_cast<std::size_t>(count) * e.hidden, ++seed_), e.hidden);
      const DeviceBuffer attended = weights(static_cast<std::size_t>(count) * e.width(), 1.0f);
      Side fused = make_side(e, rows, residual), apart = make_side(e, rows, residual);

      optimized::DecodeProjectionsArguments a;
      a.rows = count;
      a.hidden = e.hidden;
      a.heads = e.heads;
      a.head_dim = e.head_dim;
      a.intermediate = e.intermediate;
      a.epsilon = kEpsilon;
      a.query_rows = device_rows.as<QueryRow>();
      a.positions = positions.as<std::int32_t>();
      a.cosine = cosine.as<Bfloat16>();
      a.sine = sine.as<Bfloat16>();
      a.kv = fused.kv->view();
      a.residual = fused.residual.as<Bfloat16>();
      a.residual_after_attention = fused.other_residual.as<Bfloat16>();
      a.projected = fused.projected.as<Bfloat16>();
      a.activated = fused.activated.as<Bfloat16>();
      a.qkv = fused.qkv.as<Bfloat16>();

      DeviceBuffer normed = poisoned<std::uint16_t>(static_cast<std::size_t>(count) * e.hidden);
      DeviceBuffer gate_up = poisoned<std::uint16_t>(static_cast<std::size_t>(count) * 2 * e.intermediate);
      Bfloat16 *const x = apart.residual.as<Bfloat16>(), *const n = normed.as<Bfloat16>(), *const qkv = apart.qkv.as<Bfloat16>(),
               *const projected = apart.projected.as<Bfloat16>();
      const int width = e.width();
      const auto next_layer = [&](int index) {
        optimized::rms_norm(x, layer.input.as<Bfloat16>(), n, count, e.hidden, kEpsilon, *stream_);
        optimized::linear_split_k(n, e.hidden, layer.qkv.as<Bfloat16>(), qkv, count, e.hidden, 3 * width, *stream_);
        optimized::rope(qkv, 3 * width, positions.as<std::int32_t>(), cosine.as<Bfloat16>(), sine.as<Bfloat16>(), count, 2 * e.heads, e.head_dim, *stream_);
        optimized::kv_append(qkv + width, qkv + 2 * width, 3 * width, device_rows.as<QueryRow>(), apart.kv->view(), index, count, *stream_);
      };
      const auto to_the_mlp_output = [&] {
        optimized::linear_split_k(attended.as<Bfloat16>(), width, layer.o_proj.as<Bfloat16>(), projected, count, width, e.hidden, *stream_);
        optimized::rms_norm_residual_add(projected, layer.after_attention.as<Bfloat16>(), x, count, e.hidden, kEpsilon, *stream_);
        optimized::rms_norm(x, layer.before_mlp.as<Bfloat16>(), n, count, e.hidden, kEpsilon, *stream_);
        optimized::linear_split_k(n, e.hidden, layer.gate_up.as<Bfloat16>(), gate_up.as<Bfloat16>(), count, e.hidden, 2 * e.intermediate, *stream_);
        optimized::swiglu(gate_up.as<Bfloat16>(), apart.activated.as<Bfloat16>(), count, e.intermediate, *stream_);
        optimized::linear_split_k(apart.activated.as<Bfloat16>(), e.intermediate, layer.down_proj.as<Bfloat16>(), projected, count, e.intermediate, e.hidden,
                                  *stream_);
      };
      const auto expect_same = [&](const DeviceBuffer& expected, const DeviceBuffer& actual, int elements, const char* name) {
        const auto size = static_cast<std::size_t>(count) * elements;
        EXPECT_TRUE(same_bits(download<std::uint16_t>(expected, size), download<std::uint16_t>(actual, size))) << name << ", " << what;
      };
      const auto expect_same_queries_and_pages = [&](const char* name) {
        const auto size = static_cast<std::size_t>(count) * 3 * width;
        const Bits expected = download<std::uint16_t>(apart.qkv, size), actual = download<std::uint16_t>(fused.qkv, size);
        for (int row = 0; row < count; ++row) {
          const auto q = [&](const Bits& bits) { return Bits(bits.begin() + row * 3 * width, bits.begin() + row * 3 * width + width); };
          EXPECT_TRUE(same_bits(q(expected), q(actual))) << name << ", q of row " << row << ", " << what;
        }
        for (std::size_t i = 0; i < fused.pages.size(); ++i) EXPECT_TRUE(same_bits(page_bits(apart, i, e), page_bits(fused, i, e))) << name << ", page " << i << ", " << what;
      };

      // The beginning of a loop.
      a.input_norm = layer.input.as<Bfloat16>();
      a.qkv_weight = layer.qkv.as<Bfloat16>();
      a.next_layer = 0;
      a.arrivals = fused.arrivals.as<std::uint32_t>();
      optimized::decode_projections(a, *stream_);
      next_layer(0);
      expect_same_queries_and_pages("beginning");
      expect_same(apart.residual, fused.residual, e.hidden, "residual at the beginning");

      // Between two layers.
      a.attended = attended.as<Bfloat16>();
      a.o_proj = layer.o_proj.as<Bfloat16>();
      a.norm_after_attention = layer.after_attention.as<Bfloat16>();
      a.norm_before_mlp = layer.before_mlp.as<Bfloat16>();
      a.gate_up = layer.gate_up.as<Bfloat16>();
      a.down_proj = layer.down_proj.as<Bfloat16>();
      a.norm_after_mlp = layer.after_mlp.as<Bfloat16>();
      a.next_layer = 1;
      optimized::decode_projections(a, *stream_);
      to_the_mlp_output();
      expect_same(apart.residual, fused.other_residual, e.hidden, "residual after attention");
      expect_same(apart.activated, fused.activated, e.intermediate, "activated");
      expect_same(apart.projected, fused.projected, e.hidden, "down_proj");
      optimized::rms_norm_residual_add(projected, layer.after_mlp.as<Bfloat16>(), x, count, e.hidden, kEpsilon, *stream_);
      next_layer(1);
      expect_same_queries_and_pages("between two layers");
      expect_same(apart.residual, fused.residual, e.hidden, "residual between two layers");

      // The end of a loop.
      a.qkv_weight = nullptr;
      a.arrivals = fused.arrivals.as<std::uint32_t>() + optimized::kProjectionArrivals;
      optimized::decode_projections(a, *stream_);
      to_the_mlp_output();
      expect_same(apart.residual, fused.other_residual, e.hidden, "residual after the last attention");
      expect_same(apart.projected, fused.projected, e.hidden, "down_proj of the last layer");
    }
  }
}

// Executors of several threads launch the same kernel, with as much shared memory as their rows need, and blocks of each wait for one another.
void DecodeProjectionsTest::expect_that_threads_launch(const Extents& e, int launches) {
  const Layer layer = make_layer(e);
  const optimized::RopeTable table = optimized::make_rope_table(300, e.head_dim, 1e4);
  const DeviceBuffer cosine = upload(table.cosine), sine = upload(table.sine);
  std::vector<Side> sides;
  std::vector<DeviceBuffer> device_rows, positions, attended;
  const int counts[] = {1, 8};
  for (const int count : counts) {
    std::vector<QueryRow> rows;
    std::vector<std::int32_t> places;
    for (int i = 0; i < count; ++i) {
      rows.push_back({0, i, 1, 0, -1});
      places.push_back(i);
    }
    sides.push_back(make_side(e, rows, random_bits(static_cast<std::size_t>(count) * e.hidden, ++seed_)));
    device_rows.push_back(upload(rows));
    positions.push_back(upload(places));
    attended.push_back(weights(static_cast<std::size_t>(count) * e.width(), 1.0f));
  }
  const auto launch = [&](std::size_t which) {
    optimized::DecodeProjectionsArguments a;
    a.rows = counts[which];
    a.hidden = e.hidden;
    a.heads = e.heads;
    a.head_dim = e.head_dim;
    a.intermediate = e.intermediate;
    a.epsilon = 1e-6f;
    a.input_norm = layer.input.as<Bfloat16>();
    a.qkv_weight = layer.qkv.as<Bfloat16>();
    a.query_rows = device_rows[which].as<QueryRow>();
    a.positions = positions[which].as<std::int32_t>();
    a.cosine = cosine.as<Bfloat16>();
    a.sine = sine.as<Bfloat16>();
    a.kv = sides[which].kv->view();
    a.attended = attended[which].as<Bfloat16>();
    a.o_proj = layer.o_proj.as<Bfloat16>();
    a.norm_after_attention = layer.after_attention.as<Bfloat16>();
    a.norm_before_mlp = layer.before_mlp.as<Bfloat16>();
    a.gate_up = layer.gate_up.as<Bfloat16>();
    a.down_proj = layer.down_proj.as<Bfloat16>();
    a.norm_after_mlp = layer.after_mlp.as<Bfloat16>();
    a.residual = sides[which].residual.as<Bfloat16>();
    a.residual_after_attention = sides[which].other_residual.as<Bfloat16>();
    a.projected = sides[which].projected.as<Bfloat16>();
    a.activated = sides[which].activated.as<Bfloat16>();
    a.qkv = sides[which].qkv.as<Bfloat16>();
    a.arrivals = sides[which].arrivals.as<std::uint32_t>();
    const optimized::Stream stream;
    try {
      for (int i = 0; i < launches; ++i) {
        LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(a.arrivals, 0, optimized::kProjectionArrivals * sizeof(std::uint32_t), stream));
        optimized::decode_projections(a, stream);
      }
      stream.synchronize();
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  auto first = std::async(std::launch::async, launch, 0), second = std::async(std::launch::async, launch, 1);
  EXPECT_EQ(first.get(), "");
  EXPECT_EQ(second.get(), "");
}

TEST_F(DecodeProjectionsTest, ThreadsLaunchWithDifferentNumbersOfRows) { expect_that_threads_launch(kExtents[0], 500); }

// A multiprocessor has no room for a block of each: that neither waits for blocks that the other keeps out is what a cooperative launch promises.
TEST_F(DecodeProjectionsTest, ThreadsLaunchWhatFillsTheDevice) { expect_that_threads_launch(kExtents[3], 200); }

// Attention that is told what the projections write may begin before they have ended. It reads older keys at once, and the new ones, of its own row and of
// another row of the request, when they are there.
TEST_F(DecodeProjectionsTest, AttentionThatBeginsEarlyHasTheBitsOfOneThatWaits) {
  const Extents e = kExtents[3];
  const Layer layer = make_layer(e);
  const KvShape shape{1, e.heads, e.head_dim};
  constexpr int kPosition = 4200;  // enough splits for as many CTAs as fit the device
  const optimized::RopeTable table = optimized::make_rope_table(kPosition + 8, e.head_dim, 1e4);
  const DeviceBuffer cosine = upload(table.cosine), sine = upload(table.sine);
  KvCache kv(shape, allocator_, *stream_);
  kv.open_request(kPosition + 8);
  kv.reserve(0, 1, {0, kPosition + 8});
  kv.set_active(0, 1, {0, kPosition + 8});
  kv.upload();
  stream_->synchronize();
  const Bits page = random_bits(optimized::page_bytes(shape) / 2, ++seed_);
  for (const auto& entry : kv.pages(0)) {
    if (entry.bf16[0] != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpy(reinterpret_cast<void*>(entry.bf16[0]), page.data(), page.size() * 2, cudaMemcpyHostToDevice));
  }

  for (const int count : {1, 2, 8}) {
    std::vector<QueryRow> rows;
    std::vector<std::int32_t> places;
    for (int i = 0; i < count; ++i) {
      rows.push_back({0, kPosition + i, 1, 0, -1});
      places.push_back(kPosition + i);
    }
    const DeviceBuffer device_rows = upload(rows), positions = upload(places);
    const std::size_t width = static_cast<std::size_t>(count) * e.width();
    DeviceBuffer qkv = poisoned<std::uint16_t>(3 * width), output = poisoned<std::uint16_t>(width);
    DeviceBuffer workspace = poisoned<std::byte>(optimized::attention_decode_workspace_bytes(shape, count));
    DeviceBuffer arrivals = upload(std::vector<std::uint32_t>(optimized::kProjectionArrivals, 0));
    DeviceBuffer attention_arrivals = upload(std::vector<std::uint32_t>(static_cast<std::size_t>(count) * e.heads, 0));
    const auto attended = [&](std::uint32_t seed, bool early) {
      DeviceBuffer residual = upload(random_bits(static_cast<std::size_t>(count) * e.hidden, seed));
      optimized::DecodeProjectionsArguments a;
      a.rows = count;
      a.hidden = e.hidden;
      a.heads = e.heads;
      a.head_dim = e.head_dim;
      a.intermediate = e.intermediate;
      a.epsilon = 1e-6f;
      a.input_norm = layer.input.as<Bfloat16>();
      a.qkv_weight = layer.qkv.as<Bfloat16>();
      a.query_rows = device_rows.as<QueryRow>();
      a.positions = positions.as<std::int32_t>();
      a.cosine = cosine.as<Bfloat16>();
      a.sine = sine.as<Bfloat16>();
      a.kv = kv.view();
      a.residual = residual.as<Bfloat16>();
      a.qkv = qkv.as<Bfloat16>();
      a.arrivals = arrivals.as<std::uint32_t>();
      optimized::AttentionDecodeArguments b;
      b.kv = kv.view();
      b.q = a.qkv;
      b.q_row_stride = 3 * static_cast<std::int64_t>(e.width());
      b.rows = a.query_rows;
      b.row_count = count;
      b.max_length = kPosition + count;
      b.encoded_history = false;
      b.output = output.as<Bfloat16>();
      b.workspace = workspace.as<std::byte>();
      b.arrivals = attention_arrivals.as<std::uint32_t>();
      if (early) {
        b.written_rows = a.query_rows;
        b.written_count = count;
      }
      optimized::decode_projections(a, *stream_);
      if (!early) stream_->synchronize();
      optimized::attention_decode(b, *stream_);
      return download<std::uint16_t>(output, width);
    };
    for (std::uint32_t round = 0; round < 20; ++round) {  // each round's new keys replace those of the round before
      const Bits early = attended(seed_ + round, true);
      EXPECT_TRUE(same_bits(attended(seed_ + round, false), early)) << count << " rows, round " << round;
    }
  }
}

TEST_F(DecodeProjectionsTest, NamesTheExtentsThatItCovers) {
  EXPECT_TRUE(optimized::decode_projections_cover(8, 2048, 16, 128, 5632));
  EXPECT_FALSE(optimized::decode_projections_cover(9, 2048, 16, 128, 5632)) << "more rows than a tensor-core step has columns";
  EXPECT_FALSE(optimized::decode_projections_cover(0, 2048, 16, 128, 5632));
  EXPECT_FALSE(optimized::decode_projections_cover(1, 128, 1, 128, 512)) << "a warp without a share of K";
  EXPECT_FALSE(optimized::decode_projections_cover(1, 2048, 16, 128, 5640)) << "part of a chunk";
  EXPECT_TRUE(optimized::decode_projections_cover(1, 256, 8, 32, 256));
  EXPECT_FALSE(optimized::decode_projections_cover(1, 256, 16, 16, 256)) << "heads of one tile";
  EXPECT_FALSE(optimized::decode_projections_cover(1, 16384, 128, 128, 131072)) << "up values 2^31 elements behind their gates";
  EXPECT_FALSE(optimized::decode_projections_cover(8, 8192, 64, 128, 28672)) << "rows that do not fit shared memory";

  optimized::DecodeProjectionsArguments arguments;
  arguments.rows = 8;
  arguments.hidden = 8192;
  arguments.heads = 64;
  arguments.head_dim = 128;
  arguments.intermediate = 28672;
  EXPECT_THROW(optimized::decode_projections(arguments, *stream_), UnsupportedError);
}

}  // namespace
}  // namespace loopgauge::test
