// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill_encoded.cuh"

#include <cuda_fp16.h>

#include "optimized/ops/warpgroup_attention.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = (kGroups + 2) * kGroupThreads;
constexpr int kStages = 2;  // reconstructed pages, of K and of V
constexpr int kCopies = 2;  // encoded pages, of K and of V

// K or V of one page as it is stored.
template <int kHeadDim>
struct EncodedPage {
  std::uint8_t payload[kLoops][kPageTokens * kHeadDim / 2];  // rows of each stream, from the page's first
  // half2 words (minimum, scale). K: of the one or two groups that the rows belong to, the even fours of a group before the odd ones, so that
  // eight channels of each thread are two reads without conflicts. V: of each row.
  std::uint32_t parameters[kLoops][2 * kHeadDim];
  // A byte of each stream, the first lowest: the row's index in `payload`, kSecondGroup more in the second group of K; kAbsent without a row.
  std::uint32_t places[kPageTokens];
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
__device__ __forceinline__ void store_shared(std::uint32_t address, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// A code (byte `byte` of `codes`) as FP32: 2^23 + code has it in its last bits.
__device__ __forceinline__ float code_value(std::uint32_t codes, int byte) {
  return __fsub_rn(__uint_as_float(__byte_perm(codes, 0x4B000000u, 0x7650u + static_cast<std::uint32_t>(byte))), 8388608.0f);
}
// The product is exact (4 bits of 11), so that fused it has the bits of its two steps.
__device__ __forceinline__ float decode(float code, std::uint32_t pair) {
  const float minimum = __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFFu)));
  const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  return __fmaf_rn(code, scale, minimum);
}

// What one warpgroup does: K or V of all pages of a tile, one after the other, into its half of the ring. A thread makes 8 channels of some rows.
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
    word_ = thread % kWords;
    first_row_ = thread / kWords;
    target_ = stages + static_cast<std::uint32_t>(word_ / 8 * kPageTokens * kSwizzledRowBytes + first_row_ * kSwizzledRowBytes +
                                                  ((word_ % 8) ^ (first_row_ % 8)) * 16);
  }

  __device__ __forceinline__ void run(int pages, int encoded_pages, int keys_end) {
    copy_tables(0, encoded_pages);
    commit_copies();
    wait_copies<0>();
    synchronize();
    copy_streams(0, encoded_pages);
    copy_tables(1, encoded_pages);
    commit_copies();
    for (int page = 0; page < encoded_pages; ++page) {
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
    for (int page = encoded_pages; page < pages; ++page) {
      wait_for_stage(page);
      copy_bf16(page, page_mask(page, 0, keys_end));
      commit_copies();
      wait_copies<0>();
      publish_to_products();
      barrier_arrive(&barriers_->filled[page % kStages]);
    }
  }

 private:
  static constexpr int kWords = kHeadDim / 8;  // of a row, 8 codes each; 16 bytes of BF16
  static constexpr int kRowsPerPass = kGroupThreads / kWords, kPasses = kPageTokens / kRowsPerPass;
  static_assert(kRowsPerPass % 8 == 0);  // so that rows of later passes have the same place in the swizzle

  __device__ __forceinline__ void synchronize() const {
    asm volatile("bar.sync %0, %1;" ::"n"(kTensor == KvTensor::k ? 1 : 2), "n"(kGroupThreads) : "memory");
  }
  __device__ __forceinline__ void wait_for_stage(int page) const {
    if (page >= kStages) barrier_wait(&barriers_->emptied[page % kStages], (page / kStages - 1) & 1);
  }
  __device__ __forceinline__ std::uint32_t stage(int page) const { return target_ + static_cast<std::uint32_t>(page % kStages * kStageBytes<kHeadDim>); }

  __device__ __forceinline__ void copy_tables(int page, int encoded_pages) const {
    constexpr int kEntryWords = static_cast<int>(sizeof(PageTableEntry)) / 4, kTableWords = static_cast<int>(sizeof(PageTables)) / 4;
    if (warp_ != 0 || lane_ >= kTableWords || page >= encoded_pages) return;
    const auto* word = lane_ < kEntryWords ? reinterpret_cast<const std::uint32_t*>(request_.pages + page) + lane_
                                           : reinterpret_cast<const std::uint32_t*>(request_.maps + page) + (lane_ - kEntryWords);
    copy_word_async(reinterpret_cast<std::uint32_t*>(tables_ + page % kCopies) + lane_, word);
  }

  // A warp copies a stream.
  __device__ __forceinline__ void copy_streams(int page, int encoded_pages) const {
    const int stream = warp_ + 1;
    if (stream > reading_ || page >= encoded_pages) return;
    const PageTables& tables = tables_[page % kCopies];
    EncodedPage<kHeadDim>& to = copies_[page % kCopies];
    const std::uint64_t active = tables.map.active[warp_];
    const int first = static_cast<int>(tables.map.rank[warp_]), rows = __popcll(active);
    for (int row = lane_; row < kPageTokens; row += 32) {
      const int index = bits_below(active, row);
      const std::uint32_t group = first % kGroupSize + index < kGroupSize ? 0 : kSecondGroup;
      reinterpret_cast<std::uint8_t*>(to.places + row)[warp_] =
          static_cast<std::uint8_t>((active >> row) & 1u ? static_cast<std::uint32_t>(index) + group : kAbsent);
    }
    if (rows == 0) return;
    const StreamTile tile = stream_tile(shape_, tables.entry, tables.map, layer_, stream, kTensor, head_);
    const std::uint8_t* payload = tile.payload + static_cast<std::size_t>(first) * (kHeadDim / 2);
    const std::uint32_t target = shared_address(to.payload[warp_]);
    for (int i = lane_; i < rows * (kHeadDim / 32); i += 32) copy_async(target + static_cast<std::uint32_t>(16 * i), payload + 16 * i);
    std::uint32_t* parameters = to.parameters[warp_];
    if constexpr (kTensor == KvTensor::k) {
      constexpr int kFours = kHeadDim / 4;  // 16 bytes
      const std::uint32_t* words = tile.parameters + static_cast<std::size_t>(first / kGroupSize) * kHeadDim;
      const int groups = (first % kGroupSize + rows + kGroupSize - 1) / kGroupSize;
      for (int i = lane_; i < groups * kFours; i += 32) {
        const int four = i % kFours, place = four % 2 * (kFours / 2) + four / 2;
        copy_async(shared_address(parameters + i / kFours * kHeadDim + 4 * place), words + 4 * i);
      }
    } else {
      const std::uint32_t* words = tile.parameters + static_cast<std::size_t>(first) * kValueParameters<kHeadDim>;
      for (int i = lane_; i < rows * kValueParameters<kHeadDim>; i += 32) copy_word_async(parameters + i, words + i);
    }
  }

  // values = or += what stream `stream` (from 0) says of the row.
  template <bool kBase>
  __device__ __forceinline__ void add_stream(float (&values)[8], const EncodedPage<kHeadDim>& from, int stream, std::uint32_t place) const {
    const int index = static_cast<int>(place % kSecondGroup);
    const std::uint32_t codes = *reinterpret_cast<const std::uint32_t*>(from.payload[stream] + index * (kHeadDim / 2) + 4 * word_);
    std::uint32_t pairs[8];
    if constexpr (kTensor == KvTensor::k) {
      const std::uint32_t* group = from.parameters[stream] + place / kSecondGroup * kHeadDim + 4 * word_;
      const uint4 even = *reinterpret_cast<const uint4*>(group), odd = *reinterpret_cast<const uint4*>(group + kHeadDim / 2);
      pairs[0] = even.x, pairs[1] = even.y, pairs[2] = even.z, pairs[3] = even.w;
      pairs[4] = odd.x, pairs[5] = odd.y, pairs[6] = odd.z, pairs[7] = odd.w;
    } else {
      const std::uint32_t pair = from.parameters[stream][index * kValueParameters<kHeadDim> + word_ / (kGroupSize / 8)];
#pragma unroll
      for (int j = 0; j < 8; ++j) pairs[j] = pair;
    }
    const std::uint32_t even = codes & 0x0F0F0F0Fu, odd = codes >> 4 & 0x0F0F0F0Fu;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float decoded = decode(code_value(j % 2 == 0 ? even : odd, j / 2), pairs[j]);
      values[j] = kBase ? decoded : __fadd_rn(values[j], decoded);
    }
  }

  __device__ __forceinline__ void reconstruct(int page) const {
    const EncodedPage<kHeadDim>& from = copies_[page % kCopies];
    const std::uint32_t target = stage(page);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint32_t places = from.places[first_row_ + pass * kRowsPerPass];
      float values[8] = {};
      if ((places & kAbsent) == 0) add_stream<true>(values, from, 0, places & 0x7Fu);
#pragma unroll 1
      for (int stream = 1; stream < reading_; ++stream) {
        const std::uint32_t place = places >> (8 * stream) & 0xFFu;
        if ((place & kAbsent) == 0) add_stream<false>(values, from, stream, place);
      }
      std::uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) split_bf16(values[2 * j], values[2 * j + 1], high[j], low[j]);
      const std::uint32_t row = target + static_cast<std::uint32_t>(pass * kRowsPerPass * kSwizzledRowBytes);
      store_shared(row, high);
      store_shared(row + kTileBytes<kHeadDim>, low);
    }
  }

  // Starts the copies of a page that is not encoded: every row from the plane that holds its logical version, rows not in `keys` as zeros. Under
  // the planted fault rows of the tile itself are read at their own loop.
  __device__ __forceinline__ void copy_bf16(int page, std::uint64_t keys) const {
    PageSource source;
    source.load(request_, page);
    const std::size_t offset = page_tile_offset(shape_, layer_, kTensor, head_) + static_cast<std::size_t>(8 * word_);
    const std::uint32_t target = stage(page);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row_ + pass * kRowsPerPass;
      const bool valid = (keys >> row) & 1u;
      int reader = reading_;
      if (reading_ != own_loop_) {
        for (const std::int32_t position : positions_.rows) {
          if (position == page * kPageTokens + row) reader = own_loop_;
        }
      }
      // An address is needed even where nothing is read.
      const std::uint64_t plane = valid ? source.resident(row, reader) : source.planes[0];
      const std::uint32_t to = target + static_cast<std::uint32_t>(pass * kRowsPerPass * kSwizzledRowBytes);
      copy_async(to, plane + (offset + static_cast<std::size_t>(row) * kHeadDim) * sizeof(__nv_bfloat16), valid);
      store_shared(to + kTileBytes<kHeadDim>, {0, 0, 0, 0});
    }
  }

  const KvShape shape_;
  const RequestTable request_;
  const TilePositions& positions_;
  RingBarriers* const barriers_;
  EncodedPage<kHeadDim>* const copies_;  // [kCopies]
  PageTables* const tables_;             // [kCopies]
  const int layer_, head_, own_loop_, reading_;
  int warp_, lane_, word_, first_row_;
  std::uint32_t target_;  // of this thread's first row and word in the first stage
};

// grid (heads, tiles), kThreads threads, one CTA on a multiprocessor.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attention_prefill_encoded_kernel(AttentionPrefillArguments arguments) {
  extern __shared__ std::uint8_t unaligned_stages[];
  __shared__ RingBarriers barriers[2];
  __shared__ TilePositions positions;
  __shared__ __align__(16) PageTables tables[2][kCopies];

  const PrefillTile tile = arguments.tiles[arguments.tile_count - 1 - blockIdx.y];  // longest histories start first
  if (tile.encoded_frontier == 0) return;
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
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
  if (last < 0) return;
  const int pages = uniform(last / kPageTokens + 1);

  if (thread >= kGroups * kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int encoded_pages = uniform(min(pages, tile.encoded_frontier / kPageTokens));
    if (thread < (kGroups + 1) * kGroupThreads) {
      PageMaker<kHeadDim, KvTensor::k>(arguments, tile, head, positions, ring.keys(0), ring.key_barriers, copies, tables[0])
          .run(pages, encoded_pages, last + 1);
    } else {
      PageMaker<kHeadDim, KvTensor::v>(arguments, tile, head, positions, ring.values(0), ring.value_barriers, copies + kCopies, tables[1])
          .run(pages, encoded_pages, last + 1);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
  attend<kHeadDim, true>(arguments, tile, head, positions, pages, ring);
}

template <int kHeadDim>
void launch(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  const auto kernel = attention_prefill_encoded_kernel<kHeadDim>;
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kHeadDim>));
  kernel<<<dim3(arguments.kv.shape.heads, arguments.tile_count), kThreads, kSharedBytes<kHeadDim>, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_prefill_encoded");
}

}  // namespace

void attention_prefill_encoded(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  arguments.kv.shape.head_dim == 128 ? launch<128>(arguments, stream) : launch<64>(arguments, stream);
}

}  // namespace loopgauge::optimized
