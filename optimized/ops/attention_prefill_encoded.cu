// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill_encoded.cuh"

#include <cuda_fp16.h>

#include "optimized/kv/reconstruct.cuh"
#include "optimized/ops/warpgroup_attention.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = (kGroups + 2) * kGroupThreads;
constexpr int kStages = 2;  // reconstructed pages, of K and of V
constexpr int kCopies = 2;  // encoded pages, of K and of V
static_assert(kPrefillSplitPages % (2 * kStages) == 0);  // so that the stages of any split begin in phase 0

// K or V of one page as it is stored.
template <int kHeadDim>
struct alignas(16) EncodedPage {
  std::uint8_t payload[kLoops][kPageTokens * kHeadDim / 2];  // rows of each stream, from the page's first
  // half2 words (minimum, scale). K: of the one or two groups that the rows belong to. V: of each row.
  std::uint32_t parameters[kLoops][2 * kHeadDim];
  // Of streams from `full_streams` on a byte each, that of the first stream lowest: the row's index in `payload`, kSecondGroup more in the second group of
  // K; kAbsent without a row.
  std::uint32_t places[kPageTokens];
  std::uint32_t full_streams;  // the first ones, that hold every row of the page, in one group of K
};
constexpr std::uint32_t kSecondGroup = 64, kAbsent = 128;

struct PageTables {
  PageTableEntry entry;
  ActivityMap map;
};
static_assert(sizeof(PageTables) == sizeof(PageTableEntry) + sizeof(ActivityMap) && sizeof(PageTables) % 4 == 0 && sizeof(PageTables) <= 32 * 4);

template <int kHeadDim>
inline constexpr int kValueParameters = kHeadDim / kGroupSize;  // of a row of V
template <int kHeadDim>
inline constexpr int kStageBytes = 2 * kTileBytes<kHeadDim>;  // high and low part
template <int kHeadDim>
inline constexpr int kRingBytes = 2 * kStages * kStageBytes<kHeadDim>;  // of K, then of V
template <int kHeadDim>
inline constexpr int kSharedBytes = kSwizzleBytes + kRingBytes<kHeadDim> + 2 * kCopies * static_cast<int>(sizeof(EncodedPage<kHeadDim>));

struct RingBarriers {
  std::uint64_t filled[kStages], emptied[kStages];
};

// Pages as the two reconstructing warpgroups leave them.
template <int kHeadDim>
struct PageRing {
  std::uint32_t stages;
  RingBarriers *key_barriers, *value_barriers;

  __device__ __forceinline__ std::uint32_t keys(int page) const {
    return stages + static_cast<std::uint32_t>(page % kStages * kStageBytes<kHeadDim>);
  }
  __device__ __forceinline__ std::uint32_t values(int page) const { return keys(page) + kStages * kStageBytes<kHeadDim>; }
  static __device__ __forceinline__ void wait(RingBarriers* barriers, int page) { barrier_wait(&barriers->filled[page % kStages], page / kStages & 1); }
  static __device__ __forceinline__ void release(RingBarriers* barriers, int page) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers->emptied[page % kStages]);
  }
  __device__ __forceinline__ void wait_for_keys(int page) const { wait(key_barriers, page); }
  __device__ __forceinline__ void wait_for_values(int page) const { wait(value_barriers, page); }
  __device__ __forceinline__ void release_keys(int page) const { release(key_barriers, page); }
  __device__ __forceinline__ void release_values(int page) const { release(value_barriers, page); }
};

__device__ __forceinline__ void copy_word_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t left, std::uint32_t right) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(left), "r"(right) : "memory");
}

// Parameters of four channels whose codes stand side by side in a word; scale[j] is divided by 16^j, which the place of code j multiplies it by.
struct FourParameters {
  float minimum[4], scale[4];

  __device__ __forceinline__ void set(int j, std::uint32_t pair) {
    const float2 whole = minimum_and_scale(pair);
    minimum[j] = whole.x;
    scale[j] = j == 0 ? whole.y : __fmul_rn(whole.y, j == 1 ? 0x1p-4f : j == 2 ? 0x1p-8f : 0x1p-12f);
  }
};
// values = or += what four codes stand for. 2^23 + code * 16^j has them in its last bits, and the product with the scale is exact (4 bits of 11), so that
// fused it has the bits of its two steps.
template <bool kFirst>
__device__ __forceinline__ void add_codes(float (&values)[4], std::uint32_t codes, const FourParameters& parameters) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    std::uint32_t word;  // (codes & mask) | bits of 2^23, in one instruction
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(word) : "r"(codes), "r"(0xFu << (4 * j)), "r"(0x4B000000u));
    const float decoded = __fmaf_rn(__fsub_rn(__uint_as_float(word), 8388608.0f), parameters.scale[j], parameters.minimum[j]);
    values[j] = kFirst ? decoded : __fadd_rn(values[j], decoded);
  }
}

// What one warpgroup does: K or V of all pages of a tile, one after the other, into its half of the ring. A thread makes four channels of
// every kRowsPerPass-th row.
template <int kHeadDim, KvTensor kTensor>
class PageMaker {
 public:
  __device__ __forceinline__ PageMaker(const AttentionPrefillArguments& arguments, const PrefillTile& tile, int head,
                                       const TilePositions& positions, std::uint32_t stages, RingBarriers* barriers,
                                       EncodedPage<kHeadDim>* copies, PageTables* tables)
      : shape_(arguments.kv.shape),
        request_(arguments.kv.requests[tile.request]),
        positions_(positions),
        barriers_(barriers),
        copies_(copies),
        tables_(tables),
        layer_(arguments.layer),
        head_(head),
        own_loop_(tile.loop),
        reading_(arguments.fault == Fault::loop_off_by_one && tile.loop > 1 ? tile.loop - 1 : tile.loop) {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    warp_ = uniform(thread / 32);
    lane_ = thread % 32;
    four_ = thread % kFours;
    first_row_ = thread / kFours;
    stages_ = stages;
    target_ = place(four_ / 2, first_row_) + static_cast<std::uint32_t>(four_ % 2 * 8);
  }

  // Pages [first_page, pages), those below encoded_pages encoded.
  __device__ __forceinline__ void run(int first_page, int pages, int encoded_pages, int keys_end) {
    first_page_ = first_page;
    copy_tables(first_page, encoded_pages);
    commit_copies();
    wait_copies<0>();
    synchronize();
    copy_streams(first_page, encoded_pages);
    copy_tables(first_page + 1, encoded_pages);
    commit_copies();
    for (int page = first_page; page < encoded_pages; ++page) {
      wait_copies<0>();
      synchronize();  // what the group has copied is visible, and everyone has left the page before
      copy_streams(page + 1, encoded_pages);
      copy_tables(page + 2, encoded_pages);
      commit_copies();
      wait_for_stage(page);
      reconstruct(page);
      publish_to_products();
      barrier_arrive(&barriers_->filled[page % kStages]);
    }
    for (int page = max(first_page, encoded_pages); page < pages; ++page) {
      wait_for_stage(page);
      copy_bf16(page, page_mask(page, 0, keys_end));
      commit_copies();
      wait_copies<0>();
      publish_to_products();
      barrier_arrive(&barriers_->filled[page % kStages]);
    }
  }

 private:
  static constexpr int kFours = kHeadDim / 4;  // of a row
  static constexpr int kRowsPerPass = kGroupThreads / kFours, kRowsAtOnce = 4;
  static_assert(kRowsPerPass == 4 || kRowsPerPass == 8);

  __device__ __forceinline__ void synchronize() const {
    asm volatile("bar.sync %0, %1;" ::"n"(kTensor == KvTensor::k ? 1 : 2), "n"(kGroupThreads) : "memory");
  }
  __device__ __forceinline__ void wait_for_stage(int page) const {
    if (page - first_page_ >= kStages) barrier_wait(&barriers_->emptied[page % kStages], (page / kStages - 1) & 1);
  }
  // Of 16 bytes of a row in the first stage.
  __device__ __forceinline__ std::uint32_t place(int chunk, int row) const {
    return stages_ + static_cast<std::uint32_t>(chunk / 8 * kPageTokens * kSwizzledRowBytes + row * kSwizzledRowBytes + ((chunk % 8) ^ (row % 8)) * 16);
  }
  __device__ __forceinline__ static std::uint32_t stage_offset(int page) { return static_cast<std::uint32_t>(page % kStages * kStageBytes<kHeadDim>); }

  __device__ __forceinline__ void copy_tables(int page, int encoded_pages) const {
    constexpr int kEntryWords = static_cast<int>(sizeof(PageTableEntry)) / 4, kTableWords = static_cast<int>(sizeof(PageTables)) / 4;
    if (warp_ != 0 || lane_ >= kTableWords || page >= encoded_pages) return;
    const auto* word = lane_ < kEntryWords ? reinterpret_cast<const std::uint32_t*>(request_.pages + page) + lane_
                                           : reinterpret_cast<const std::uint32_t*>(request_.maps + page) + (lane_ - kEntryWords);
    copy_word_async(reinterpret_cast<std::uint32_t*>(tables_ + page % kCopies) + lane_, word);
  }

  __device__ __forceinline__ void copy_streams(int page, int encoded_pages) const {
    if (page >= encoded_pages) return;
    const PageTables& tables = tables_[page % kCopies];
    EncodedPage<kHeadDim>& to = copies_[page % kCopies];
    const int thread = 32 * warp_ + lane_;
    // Each lane finds one stream, and all threads copy every stream.
    StreamTile tile{};
    int first = 0, rows = 0;
    if (lane_ < reading_) {
      first = static_cast<int>(tables.map.rank[lane_]);
      rows = __popcll(tables.map.active[lane_]);
      tile = stream_tile(shape_, tables.entry, tables.map, layer_, lane_ + 1, kTensor, head_);
      tile.payload += static_cast<std::size_t>(first) * (kHeadDim / 2);
      tile.parameters += kTensor == KvTensor::k ? static_cast<std::size_t>(first / kGroupSize) * kHeadDim
                                                : static_cast<std::size_t>(first) * kValueParameters<kHeadDim>;
    }
    const int full = __ffs(static_cast<int>(~__ballot_sync(~0u, rows == kPageTokens && first % kGroupSize == 0))) - 1;
    for (int stream = 0; stream < reading_; ++stream) {
      const auto* payload = reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0u, reinterpret_cast<std::uintptr_t>(tile.payload), stream));
      const auto* words = reinterpret_cast<const std::uint32_t*>(__shfl_sync(~0u, reinterpret_cast<std::uintptr_t>(tile.parameters), stream));
      const int count = __shfl_sync(~0u, rows, stream), offset = __shfl_sync(~0u, first, stream) % kGroupSize;
      const std::uint32_t target = shared_address(to.payload[stream]);
      for (int i = thread; i < count * (kHeadDim / 32); i += kGroupThreads) copy_async(target + static_cast<std::uint32_t>(16 * i), payload + 16 * i);
      std::uint32_t* parameters = to.parameters[stream];
      if constexpr (kTensor == KvTensor::k) {
        const int groups = (offset + count + kGroupSize - 1) / kGroupSize;
        if (count > 0 && thread < groups * kFours) copy_async(shared_address(parameters + 4 * thread), words + 4 * thread);
      } else if (thread < count * kValueParameters<kHeadDim>) {
        copy_word_async(parameters + thread, words + thread);
      }
    }
    if (thread == 0) to.full_streams = static_cast<std::uint32_t>(full);
    if (full >= reading_ || thread >= kPageTokens) return;
    std::uint32_t places = 0;
    for (int stream = full; stream < reading_; ++stream) {
      const std::uint64_t active = tables.map.active[stream];
      const auto index = static_cast<std::uint32_t>(bits_below(active, thread));
      const std::uint32_t group = tables.map.rank[stream] % kGroupSize + index < kGroupSize ? 0 : kSecondGroup;
      places |= ((active >> thread) & 1u ? index + group : kAbsent) << (8 * stream);
    }
    to.places[thread] = places;
  }

  __device__ __forceinline__ std::uint32_t codes(const EncodedPage<kHeadDim>& from, int stream, int index) const {
    return *reinterpret_cast<const std::uint16_t*>(from.payload[stream] + index * (kHeadDim / 2) + 2 * four_);
  }
  // K: of a group (0 or 1); V: of the row at `index`.
  __device__ __forceinline__ FourParameters parameters(const EncodedPage<kHeadDim>& from, int stream, int group, int index) const {
    FourParameters result;
    if constexpr (kTensor == KvTensor::k) {
      const uint4 pairs = *reinterpret_cast<const uint4*>(from.parameters[stream] + group * kHeadDim + 4 * four_);
      result.set(0, pairs.x), result.set(1, pairs.y), result.set(2, pairs.z), result.set(3, pairs.w);
    } else {
      const std::uint32_t pair = from.parameters[stream][index * kValueParameters<kHeadDim> + four_ / (kGroupSize / 4)];
#pragma unroll
      for (int j = 0; j < 4; ++j) result.set(j, pair);
    }
    return result;
  }

  // Of a full stream: rows `row`, and every kRowsPerPass-th after it.
  template <bool kFirst>
  __device__ __forceinline__ void add_rows(float (&values)[kRowsAtOnce][4], const EncodedPage<kHeadDim>& from, int stream, int row) const {
    FourParameters of_rows = parameters(from, stream, 0, row);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (kTensor == KvTensor::v && i > 0) of_rows = parameters(from, stream, 0, row + i * kRowsPerPass);
      add_codes<kFirst>(values[i], codes(from, stream, row + i * kRowsPerPass), of_rows);
    }
  }

  __device__ __forceinline__ void reconstruct(int page) const {
    const EncodedPage<kHeadDim>& from = copies_[page % kCopies];
    const std::uint32_t target = target_ + stage_offset(page);
    const int full = min(static_cast<int>(from.full_streams), reading_);
#pragma unroll 1
    for (int row = first_row_; row < kPageTokens; row += kRowsAtOnce * kRowsPerPass) {
      float values[kRowsAtOnce][4] = {};
      if (full > 0) add_rows<true>(values, from, 0, row);
#pragma unroll 1
      for (int stream = 1; stream < full; ++stream) add_rows<false>(values, from, stream, row);
      if (full < reading_) {
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          const std::uint32_t places = from.places[row + i * kRowsPerPass];
#pragma unroll 1
          for (int stream = full; stream < reading_; ++stream) {
            const std::uint32_t place = places >> (8 * stream) & 0xFFu;
            if ((place & kAbsent) != 0) continue;
            const int index = static_cast<int>(place % kSecondGroup);
            add_codes<false>(values[i], codes(from, stream, index), parameters(from, stream, static_cast<int>(place / kSecondGroup), index));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        std::uint32_t high[2], low[2];
        split_bf16(values[i][0], values[i][1], high[0], low[0]);
        split_bf16(values[i][2], values[i][3], high[1], low[1]);
        // Rows that are 4 further on, and not 8, have another place in the swizzle.
        const std::uint32_t swizzle = kRowsPerPass == 4 && i % 2 == 1 ? 64 : 0;
        const std::uint32_t to = (target + static_cast<std::uint32_t>((row - first_row_ + i * kRowsPerPass) * kSwizzledRowBytes)) ^ swizzle;
        store_shared(to, high[0], high[1]);
        store_shared(to + kTileBytes<kHeadDim>, low[0], low[1]);
      }
    }
  }

  // Starts the copies of a page that is not encoded: every row from the plane that holds its logical version, rows not in `keys` as zeros. Under
  // the planted fault rows of the tile itself are read at their own loop.
  __device__ __forceinline__ void copy_bf16(int page, std::uint64_t keys) const {
    PageSource source;
    source.load(request_, page);
    constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, in a row
    const int chunk = static_cast<int>(threadIdx.x) % kGroupThreads % kChunks;
    const std::size_t offset = page_tile_offset(shape_, layer_, kTensor, head_) + static_cast<std::size_t>(8 * chunk);
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) % kGroupThreads / kChunks; row < kPageTokens; row += kGroupThreads / kChunks) {
      const bool valid = (keys >> row) & 1u;
      int reader = reading_;
      if (reading_ != own_loop_) {
        for (const std::int32_t position : positions_.rows) {
          if (position == page * kPageTokens + row) reader = own_loop_;
        }
      }
      // An address is needed even where nothing is read.
      const std::uint64_t plane = valid ? source.resident(row, reader) : source.planes[0];
      const std::uint32_t to = place(chunk, row) + stage_offset(page);
      copy_async(to, plane + (offset + static_cast<std::size_t>(row) * kHeadDim) * sizeof(__nv_bfloat16), valid);
      store_shared(to + kTileBytes<kHeadDim>, 0, 0);
      store_shared(to + kTileBytes<kHeadDim> + 8, 0, 0);
    }
  }

  const KvShape shape_;
  const RequestTable request_;
  const TilePositions& positions_;
  RingBarriers* const barriers_;
  EncodedPage<kHeadDim>* const copies_;  // [kCopies]
  PageTables* const tables_;             // [kCopies]
  const int layer_, head_, own_loop_, reading_;
  int warp_, lane_, four_, first_row_, first_page_ = 0;
  std::uint32_t stages_, target_;  // where the first stage and this thread's first four channels in it are
};

// What the splits of a row leave, in arguments.workspace: values [rows][heads][splits][head_dim], then base (of the exponents, to base 2) and sum [rows][heads]
// [splits][2], FP32.
struct Partials {
  float* values;
  float2* statistics;
  int heads, splits;

  __device__ __forceinline__ Partials(const AttentionPrefillArguments& arguments, int head_dim)
      : values(static_cast<float*>(arguments.workspace)), heads(arguments.kv.shape.heads), splits(prefill_splits(arguments.max_length)) {
    statistics = reinterpret_cast<float2*>(values + index(arguments.row_count, 0, 0) * static_cast<std::size_t>(head_dim));
  }
  __device__ __forceinline__ std::size_t index(int row, int head, int split) const {
    return (static_cast<std::size_t>(row) * heads + head) * splits + split;
  }
};

// grid (heads, tiles, splits), kThreads threads, one CTA on a multiprocessor.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attention_prefill_encoded_kernel(AttentionPrefillArguments arguments) {
  extern __shared__ std::uint8_t unaligned_stages[];
  __shared__ RingBarriers barriers[2];
  __shared__ TilePositions positions;
  __shared__ __align__(16) PageTables tables[2][kCopies];

  const PrefillTile tile = arguments.tiles[arguments.tile_count - 1 - blockIdx.y];  // longest histories start first
  if (tile.encoded_frontier == 0) return;
  const int head = static_cast<int>(blockIdx.x), split = static_cast<int>(blockIdx.z), thread = static_cast<int>(threadIdx.x);
  const std::uint32_t padding = (kSwizzleBytes - shared_address(unaligned_stages) % kSwizzleBytes) % kSwizzleBytes;
  const std::uint32_t stages = uniform(shared_address(unaligned_stages) + padding);
  auto* const copies = reinterpret_cast<EncodedPage<kHeadDim>*>(unaligned_stages + padding + kRingBytes<kHeadDim>);
  const PageRing<kHeadDim> ring{stages, &barriers[0], &barriers[1]};

  if (thread == 0) {
    for (RingBarriers& ring_barriers : barriers) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(&ring_barriers.filled[i], kGroupThreads);
        barrier_init(&ring_barriers.emptied[i], kGroups * kGroupThreads / 32);
      }
    }
    publish_to_products();
  }
  positions.load(arguments.positions, tile);
  const int last = max(positions.last[0], positions.last[1]);
  const int first_page = split * kPrefillSplitPages, pages = uniform(min(last < 0 ? 0 : last / kPageTokens + 1, first_page + kPrefillSplitPages));
  if (pages <= first_page) return;

  if (thread >= kGroups * kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    const int encoded_pages = uniform(min(pages, tile.encoded_frontier / kPageTokens));
    if (thread < (kGroups + 1) * kGroupThreads) {
      PageMaker<kHeadDim, KvTensor::k>(arguments, tile, head, positions, ring.keys(0), ring.key_barriers, copies, tables[0])
          .run(first_page, pages, encoded_pages, last + 1);
    } else {
      PageMaker<kHeadDim, KvTensor::v>(arguments, tile, head, positions, ring.values(0), ring.value_barriers, copies + kCopies, tables[1])
          .run(first_page, pages, encoded_pages, last + 1);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
  attend<kHeadDim, true>(arguments, tile, head, positions, first_page, pages, ring,
                         [&](int row, int position, float base, float sum, const auto& values, int half) {
                           if (position < first_page * kPageTokens) return;
                           if (position < kPrefillSplitTokens) return write_output<kHeadDim>(arguments, head, row, sum, values, half);
                           const Partials partials(arguments, kHeadDim);
                           const std::size_t index = partials.index(row, head, split);
                           const int first = 2 * (thread % 4);
                           if (first == 0) partials.statistics[index] = make_float2(base, sum);
#pragma unroll
                           for (int n = 0; n < kHeadDim / 8; ++n) {
                             *reinterpret_cast<float2*>(partials.values + index * kHeadDim + 8 * n + first) =
                                 make_float2(values[n][2 * half], values[n][2 * half + 1]);
                           }
                         });
}

constexpr int kCombinedRows = 8;  // of one CTA, a warp each

// grid (kPrefillTileRows / kCombinedRows, tiles, heads): rows that have several splits, ascending.
template <int kHeadDim>
__global__ void __launch_bounds__(32 * kCombinedRows) combine_splits_kernel(AttentionPrefillArguments arguments) {
  const PrefillTile tile = arguments.tiles[blockIdx.y];
  const int of_tile = static_cast<int>(blockIdx.x * kCombinedRows + threadIdx.x / 32), head = static_cast<int>(blockIdx.z);
  if (tile.encoded_frontier == 0 || of_tile >= tile.row_count) return;
  const int row = tile.row_begin + of_tile, position = arguments.positions[row];
  if (position < kPrefillSplitTokens) return;
  const Partials partials(arguments, kHeadDim);
  const int splits = prefill_splits(position + 1);
  const float2* statistics = partials.statistics + partials.index(row, head, 0);
  float base = statistics[0].x;
  for (int split = 1; split < splits; ++split) base = fmaxf(base, statistics[split].x);
  constexpr int kChannels = kHeadDim / 32;
  const int first = kChannels * static_cast<int>(threadIdx.x % 32);
  const float* values = partials.values + partials.index(row, head, 0) * kHeadDim + first;
  float sum = 0.0f, output[kChannels] = {};
  for (int split = 0; split < splits; ++split) {
    const float weight = exp2_approximate(__fsub_rn(statistics[split].x, base));
    sum = __fmaf_rn(weight, statistics[split].y, sum);
#pragma unroll
    for (int i = 0; i < kChannels; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(values + static_cast<std::size_t>(split) * kHeadDim + i);
      output[i] = __fmaf_rn(weight, pair.x, output[i]);
      output[i + 1] = __fmaf_rn(weight, pair.y, output[i + 1]);
    }
  }
  __nv_bfloat16* target = arguments.output + (static_cast<std::int64_t>(row) * arguments.kv.shape.heads + head) * kHeadDim + first;
#pragma unroll
  for (int i = 0; i < kChannels; i += 2) {
    *reinterpret_cast<std::uint32_t*>(target + i) = pack_bf16(__fdiv_rn(output[i], sum), __fdiv_rn(output[i + 1], sum));
  }
}

template <int kHeadDim>
void launch(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  const auto kernel = attention_prefill_encoded_kernel<kHeadDim>;
  const int heads = arguments.kv.shape.heads, splits = prefill_splits(arguments.max_length);
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kHeadDim>));
  kernel<<<dim3(heads, arguments.tile_count, splits), kThreads, kSharedBytes<kHeadDim>, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_prefill_encoded");
  if (splits == 1) return;
  combine_splits_kernel<kHeadDim><<<dim3(kPrefillTileRows / kCombinedRows, arguments.tile_count, heads), 32 * kCombinedRows, 0, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_prefill_encoded, splits");
}

}  // namespace

void attention_prefill_encoded(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  arguments.kv.shape.head_dim == 128 ? launch<128>(arguments, stream) : launch<64>(arguments, stream);
}

}  // namespace loopgauge::optimized
