// SPDX-License-Identifier: Apache-2.0
// The dense split-KV reader behind attention_decode and reference_statistics: every key 0..position of one query row and head.
//
// A CTA walks splits of 256 absolute positions of one (row, head). What a consumer warp reads at a time gives one partial result (maximum, sum,
// output): 32 BF16 rows, or the encoded rows of a page. The order is fixed by absolute positions alone: the partial results of a split ascending, the
// splits of one residue modulo kChains ascending into a chain, the chains ascending. So neither the number of CTAs of a (row, head), nor the batch,
// nor the length of the grid reaches a bit of the result.
//
// A consumer warp fetches its own stages, with asynchronous copies of 16 bytes: rows of one page may lie in the planes of several loops, and a stage of
// encoded rows needs more addresses than a producer for all finds in time. Without encoded rows eight consumers have a granule each of every split, and
// one more warp combines. Where rows may be encoded a page has more arithmetic than eight warps a multiprocessor hide: two groups of four have a split
// each, a warp a page, and combine in turn.
//
// Encoded rows are multiplied as integers. The codes of a row are unsigned bytes of mma.sync operand A; the other operand holds the digits
// to base 256 of a fixed-point number, q * scale (K, four signed digits) or probability * scale (V, four unsigned digits), one digit a
// column. Integer sums are exact in any order, so that of V sum of code * weight - sum of center * weight cancels exactly, where `center` is the code
// nearest to the value zero: what is rounded is in proportion to the reconstructed values, not to the codes and minima that make them up. Of K it is
// in proportion to these: sum of code * (q * scale), exact but for one rounding of q * scale, and sum of q * minimum in FP32 meet as two FP32 numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "models/fault.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/kv/reconstruct.cuh"
#include "optimized/kv/reference_store.hpp"
#include "optimized/ops/numeric.cuh"
#include "optimized/ops/programmatic_launch.cuh"
#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/uniform.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized::dense {

struct Arguments {
  KvView kv;
  int layer;
  const __nv_bfloat16* q;
  std::int64_t q_row_stride;
  const QueryRow* rows;
  ReferenceView reference;       // statistics only, as the next three
  float* logits;
  std::int64_t logit_stride;
  std::uint64_t* numeric_fault;
  __nv_bfloat16* output;    // [rows, heads * head_dim]
  float* chains;            // [rows, heads, kChains]{output[head_dim]}, then the same of {maximum, sum}
  std::uint32_t* arrivals;  // [rows, heads] of the launch, zero, and zero again afterwards
  Fault fault;
  const QueryRow* written_rows = nullptr;  // [written_count], at most 32: as AttentionDecodeArguments; null: an ordinary launch
  int written_count = 0;
  int rows_of_layer = 0;  // contribution: row i of the launch is row i % rows_of_layer of layer `layer` + i / rows_of_layer
};

inline constexpr int kSplitPages = kSplitTokens / kPageTokens;
inline constexpr int kGranuleRows = 32;  // BF16 rows of one partial result
inline constexpr int kGranules = kSplitTokens / kGranuleRows;
inline constexpr int kStageRows = 16;  // BF16 rows of one stage
inline constexpr int kPagePartials = 3;  // partial results of a page where rows may be encoded: of the encoded ones, of its two granules
inline constexpr int kChains = 16;

inline std::size_t chain_bytes(const KvShape& shape, int row_count) {
  return static_cast<std::size_t>(row_count) * shape.heads * kChains * (shape.head_dim + 2) * sizeof(float);
}

// How a launch is cut. Nothing here reaches a result.
template <int kHeadDim, bool kPacked>
struct Layout {
  static constexpr int kConsumers = 8;  // warps; then, without encoded rows, one that combines
  static constexpr int kGroups = kPacked ? kConsumers / kSplitPages : 1;  // of consumers, each of which has a split of its own
  static constexpr int kThreads = 32 * (kConsumers + (kPacked ? 0 : 1));
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kSlots = 2;  // stages of a ring; of BF16 rows K is there before q, and a CTA fits beside one of decode_projections
  static constexpr int kPayloadBytes = kPageTokens * kHeadDim / 2;
  static constexpr int kSlotBytes = kPacked ? kPayloadBytes + 2 * kHeadDim * 4 : kStageRows * kHeadDim * 2;
  static constexpr int kPartials = kPacked ? kSplitPages * kPagePartials : kGranules;
  static_assert(kSlotBytes % 128 == 0 && kSlotBytes >= kStageRows * kHeadDim * 2);  // sectors of copies stay whole
};

#ifdef __CUDACC__

template <int kHeadDim>
__device__ __forceinline__ constexpr float score_scale() {
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  return kHeadDim == 64 ? 0.125f : static_cast<float>(0.08838834764831844055);  // RN32(1 / sqrt(D)) from double
}
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }
__device__ __forceinline__ float reciprocal(float x) {  // approximate
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<std::uint32_t>(127 + exponent) << 23); }
// floor(log2(x)) of a positive normal x; -127 below.
__device__ __forceinline__ int exponent_of(std::uint32_t bits) { return static_cast<int>(bits >> 23) - 127; }

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, width));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value = __fadd_rn(value, __shfl_xor_sync(~0u, value, width));
  return value;
}
// What exponents are taken against: keys whose logits are all -infinity (or NaN) weigh zero (or NaN), and never NaN by -infinity - -infinity.
__device__ __forceinline__ float finite_reference(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// --- asynchronous copies ---

template <int kBytes>
__device__ __forceinline__ void copy_async(std::uint32_t target, const void* source) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(kBytes) : "memory");
  }
}
__device__ __forceinline__ std::uint64_t shuffle(std::uint64_t value, int lane) { return __shfl_sync(~0u, value, lane); }

// --- shared memory ---

struct alignas(16) StageHeader {  // of a stage of encoded rows of a page, by place
  std::uint64_t rows;        // which rows of the page lie in the stream
  std::uint8_t count;        // how many
  std::uint8_t first_group;  // K: how many before a second group of 64 compact rows begins, whose parameters lie behind those of the first
  bool whole;                // all 64, with parameters that are copied 16 bytes at a time
};
static_assert(sizeof(StageHeader) == 16);

// What one consumer warp keeps of a page of encoded rows.
template <int kHeadDim>
struct PageScratch {
  static constexpr int kHalves = kHeadDim / kGroupSize;
  union {
    alignas(16) std::uint8_t folded[4][kHeadDim + 8];       // K: digits of q * scale: [word of eight channels][even, odd][4]; no two share banks
    alignas(16) std::uint32_t fixed[kHalves][kPageTokens];  // V: probability * scale, places permuted by fixed_place
  };
  alignas(16) std::uint8_t centers[kHalves][kPageTokens];  // likewise
  alignas(16) __nv_bfloat16 q[kHeadDim];
  float weights[kPageTokens];      // by row: dots, then exp(logit - maximum)
  std::uint8_t rows[kPageTokens];  // by place
  std::uint64_t listed;            // which rows those are
  float2 statistics;               // (maximum, sum) of the page
  StageHeader headers[2];          // by slot
};
struct Nothing {};
template <int kHeadDim, bool kPacked>
struct Shared {
  using L = Layout<kHeadDim, kPacked>;
  alignas(128) unsigned char slots[L::kConsumers][L::kSlots][L::kSlotBytes];
  alignas(16) float partial_output[2][L::kPartials][kHeadDim];  // of two splits in turn, or of the two groups
  alignas(16) float chain_output[kChains][kHeadDim];
  float2 partial_statistics[2][L::kPartials];
  float2 chain_statistics[kChains];
  std::uint64_t partials_full[2], partials_empty[2];
  std::conditional_t<kPacked, PageScratch<kHeadDim>, Nothing> scratch[L::kConsumers];
};

// --- which rows a query reads where ---

struct Query {
  KvShape shape;
  const PageTableEntry* pages;
  const ActivityMap* maps;
  int layer, head;
  int position, loop, frontier;
  Fault fault;

  __device__ __forceinline__ int history_loop() const { return fault == Fault::loop_off_by_one && loop > 1 ? loop - 1 : loop; }
  __device__ __forceinline__ int splits() const { return position / kSplitTokens + 1; }
  __device__ __forceinline__ int encoded_end(int page) const {
    const bool shifted = fault == Fault::tail_read_as_encoded && page * kPageTokens <= position && pages[page].base_payload != 0;
    return min(shifted ? frontier + kPageTokens : frontier, position + 1);
  }
  __device__ __forceinline__ bool all_encoded(int split) const { return (split + 1) * kSplitTokens <= min(frontier, position + 1); }
  // Rows of the page, from its first on, that are read encoded.
  __device__ __forceinline__ int encoded_rows(int page) const { return min(max(encoded_end(page) - page * kPageTokens, 0), kPageTokens); }
};

// The splits of one CTA, ascending: those of the chains that fall to it.
struct SplitCursor {
  int rank, ranks, splits;
  int base = 0, chain;
  __device__ __forceinline__ SplitCursor(int rank, int ranks, int splits) : rank(rank), ranks(ranks), splits(splits), chain(rank) {}
  __device__ __forceinline__ int split() const { return base + chain; }
  __device__ __forceinline__ bool valid() const { return split() < splits; }
  __device__ __forceinline__ void next() {
    chain += ranks;
    if (chain >= kChains) {
      chain = rank;
      base += kChains;
    }
  }
};

// Rows [begin, end) of a granule that are read as BF16.
struct RowRange {
  int begin, end;
  __device__ __forceinline__ bool empty() const { return begin >= end; }
  __device__ __forceinline__ RowRange stage(int index) const {
    return {max(begin, index * kStageRows), min(end, (index + 1) * kStageRows)};
  }
};
template <bool kPacked>
__device__ __forceinline__ RowRange bf16_rows(const Query& query, int split, int granule) {
  const int first = split * kSplitTokens + granule * kGranuleRows;
  const int encoded = kPacked ? query.encoded_end(first / kPageTokens) : 0;
  return {min(max(encoded - first, 0), kGranuleRows), min(max(query.position + 1 - first, 0), kGranuleRows)};
}

// --- BF16 rows by asynchronous copies of a warp ---

// K of row `lane` of a granule, where its logical version lies.
template <int kHeadDim>
__device__ __forceinline__ const unsigned char* granule_row_source(const Query& query, int first_position, int lane) {
  const int page = first_position / kPageTokens, row = first_position % kPageTokens + lane;
  const ActivityMap& map = query.maps[page];
  const bool own = first_position + lane == query.position;
  int plane = 1;
#pragma unroll
  for (int deeper = 2; deeper <= kLoops; ++deeper) {
    const bool counts = deeper <= query.history_loop() || (own && deeper <= query.loop);
    if (counts && (map.active[deeper - 1] >> row & 1u) != 0) plane = deeper;
  }
  return reinterpret_cast<const unsigned char*>(query.pages[page].bf16[plane - 1]) +
         (page_tile_offset(query.shape, query.layer, KvTensor::k, query.head) + row * kHeadDim) * 2;
}
// Rows `copied` of a granule, all of one stage; the lane brings the source of row `lane`.
template <int kHeadDim>
__device__ __forceinline__ void copy_stage(unsigned char* target, const unsigned char* row, int stage, RowRange copied, int lane) {
  constexpr int kRowLanes = kHeadDim / 8, kStepRows = 32 / kRowLanes;
  const std::uint32_t lane_target = shared_address(target) + lane * 16;
#pragma unroll
  for (int i = 0; i < kStageRows / kStepRows; ++i) {
    const int of_granule = stage * kStageRows + i * kStepRows + lane / kRowLanes;
    const auto* source = reinterpret_cast<const unsigned char*>(shuffle(reinterpret_cast<std::uint64_t>(row), of_granule)) + lane % kRowLanes * 16;
    if (of_granule >= copied.begin && of_granule < copied.end) copy_async<16>(lane_target + i * 512, source);
  }
}
// From a row's K to its V, in bytes.
__device__ __forceinline__ std::size_t tensor_distance(const KvShape& shape) {
  return page_tile_offset(shape, 0, KvTensor::v, 0) * 2;
}

// --- the ring of a warp where all rows are BF16 ---

// The stages of one granule of every split of a CTA: K, K, V, V. A slot that is left is filled with the stage kSlots further on.
template <class L, int kHeadDim>
struct GranuleRing {
  const Query& query;
  unsigned char (*slots)[L::kSlotBytes];
  int granule;
  bool leads;          // lets the next kernel begin, when its own last stage is requested
  SplitCursor cursor;  // of the next stage to fetch
  RowRange rows{};     // of its granule; none behind the last
  int pass = 0, slot = 0;
  const unsigned char* row = nullptr;  // K of row `lane`

  // The granule at the cursor.
  __device__ __forceinline__ void locate(int lane) {
    pass = 0;
    rows = cursor.valid() ? bf16_rows<false>(query, cursor.split(), granule) : RowRange{0, 0};
    if (!rows.empty()) {
      row = granule_row_source<kHeadDim>(query, cursor.split() * kSplitTokens + granule * kGranuleRows, lane);
    } else if (leads) {
      wait_for_previous_kernel();
      let_next_kernel_begin();  // which requests weights: behind what this warp requested
    }
  }
  __device__ __forceinline__ void fetch(int lane) {
    if (!rows.empty()) {
      const RowRange copied = rows.stage(pass % 2);
      copy_stage<kHeadDim>(slots[slot], row + (pass < 2 ? 0 : tensor_distance(query.shape)), pass % 2, copied, lane);
      pass += rows.end > kStageRows ? 1 : 2;  // the first stage of a granule is never empty
      if (pass == 4) {
        cursor.next();
        locate(lane);
      }
    }
    commit_copies();
    if (++slot == L::kSlots) slot = 0;
  }
  __device__ __forceinline__ void fill(int lane) {
#pragma unroll 1
    for (int i = 0; i < L::kSlots; ++i) fetch(lane);
  }
  // The next stage, while those behind it are under way.
  __device__ __forceinline__ const unsigned char* acquire(int) {
    wait_copies<L::kSlots - 1>();
    __syncwarp();  // what the other lanes have copied
    return slots[slot];
  }
  __device__ __forceinline__ void release(int lane) {
    __syncwarp();
    fetch(lane);
  }
};

// --- the ring of a warp where rows may be encoded ---

// Where a 16-byte chunk of encoded rows lies in a stage. Rows of 64 bytes: with halves swapped in two of four, so that eight lanes of both readers
// fall into different banks.
template <int kHeadDim>
__device__ __forceinline__ int chunk_place(int chunk) { return (kHeadDim == 128 ? chunk ^ (chunk >> 2 & 2) : chunk) * 16; }

// The stages of one warp of a group, in the order in which it uses them: of the encoded rows of its page of a split K of every stream, then V; of its
// granules K, K, V, V each. A slot that is left is filled with the stage kSlots further on.
template <class L, int kHeadDim>
struct PageRing {
  static constexpr int kPasses = 4 * kGranules / kSplitPages;
  const Query& query;
  unsigned char (*slots)[L::kSlotBytes];
  StageHeader* headers;  // by slot
  int page_of_split;
  const __nv_bfloat16* row_q;
  __nv_bfloat16* q;    // there with the first stage
  bool leads;          // lets the next kernel begin, when its own last stage is requested; the other group may have a split more
  SplitCursor cursor;  // of the next stage to fetch; at first a split before the first
  int left = 0;        // stages of encoded rows that its page still has
  int source = 0;      // the lane that knows the next of them
  int pass = kPasses;  // then, of its granules
  int slot = 0, ahead = 0;
  bool waited = false;  // for the kernel in front, which may write BF16 rows and q
  // Stages of encoded rows of four splits, the next first: lanes 8 i..8 i + 7 know the i-th of them, lane % 8 < 4 the K of stream lane % 4 + 1, the others V.
  int described = 3;  // which of them is under way
  const unsigned char* payload = nullptr;  // then, of a granule, K of row `lane`: no page behind BF16 rows has encoded ones
  const unsigned char* parameters = nullptr;
  StageHeader header{};

  __device__ __forceinline__ void describe(int lane) {
    described = 0;
    SplitCursor own = cursor;
#pragma unroll 1
    for (int i = lane / 8 * L::kGroups; i > 0; --i) own.next();
    const int page = own.split() * kSplitPages + page_of_split;
    const int encoded = query.encoded_rows(page);
    if (encoded == 0) return;
    const int stream = lane % 4 + 1;
    const bool keys = lane % 8 < 4;
    const PageTableEntry& entry = query.pages[page];
    const ActivityMap& map = query.maps[page];
    const std::uint64_t rows = page_mask(0, 0, encoded) & map.active[stream - 1];
    const int rank = static_cast<int>(map.rank[stream - 1]), count = __popcll(rows);
    const StreamTile tile = stream_tile(query.shape, entry, map, query.layer, stream, keys ? KvTensor::k : KvTensor::v, query.head);
    const int group = rank / kGroupSize, first_group = min((group + 1) * kGroupSize - rank, count);
    payload = tile.payload + static_cast<std::size_t>(rank) * (kHeadDim / 2);
    parameters = reinterpret_cast<const unsigned char*>(
        tile.parameters + (keys ? static_cast<std::size_t>(group) * kHeadDim : static_cast<std::size_t>(rank) * (kHeadDim / kGroupSize)));
    const bool aligned = keys ? first_group == count : reinterpret_cast<std::uint64_t>(parameters) % 16 == 0;
    header = {rows, static_cast<std::uint8_t>(count), static_cast<std::uint8_t>(first_group), count == kPageTokens && aligned};
  }
  __device__ __forceinline__ void next_split(int lane) {
#pragma unroll
    for (int i = 0; i < L::kGroups; ++i) cursor.next();
    if (!cursor.valid()) {
      if (leads) {
        wait_for_previous_kernel();
        let_next_kernel_begin();  // which requests weights: behind what this warp requested
      }
      return;
    }
    if (++described == 4) describe(lane);
    const int split = cursor.split();
    left = query.encoded_rows(split * kSplitPages + page_of_split) > 0 ? 2 * query.history_loop() : 0;
    source = 8 * described;
    pass = query.all_encoded(split) ? kPasses : 0;
  }

  __device__ __forceinline__ void fetch_encoded(int lane) {
    constexpr int kRowChunks = kHeadDim / 32;  // 16 bytes each
    const bool keys = source % 8 < 4;
    const std::uint32_t own_flags = header.count | header.first_group << 8 | header.whole << 16, flags = __shfl_sync(~0u, own_flags, source);
    const auto* chunks = reinterpret_cast<const unsigned char*>(shuffle(reinterpret_cast<std::uint64_t>(payload), source)) + lane * 16;
    const auto* from = reinterpret_cast<const unsigned char*>(shuffle(reinterpret_cast<std::uint64_t>(parameters), source));
    if (lane == source) headers[slot] = header;
    const std::uint32_t target = shared_address(slots[slot]);
    if (flags >> 16 != 0) {
#pragma unroll
      for (int i = 0; i < kPageTokens * kRowChunks / 32; ++i) copy_async<16>(target + chunk_place<kHeadDim>(lane) + 512 * i, chunks + 512 * i);
      if (kHeadDim == 128 || lane < 16) copy_async<16>(target + L::kPayloadBytes + lane * 16, from + lane * 16);
      return;
    }
    const int count = flags & 255;
#pragma unroll 1
    for (int i = 0; 32 * i + lane < count * kRowChunks; ++i) copy_async<16>(target + chunk_place<kHeadDim>(lane) + 512 * i, chunks + 512 * i);
    if (keys) {
      const int parameter_chunks = (count == 0 ? 0 : (flags >> 8 & 255) < count ? 2 : 1) * (kHeadDim / 4);
#pragma unroll 1
      for (int chunk = lane; chunk < parameter_chunks; chunk += 32) copy_async<16>(target + L::kPayloadBytes + chunk * 16, from + chunk * 16);
    } else {
      constexpr int kBytes = kHeadDim / kGroupSize * 4;  // of a row
#pragma unroll 1
      for (int place = lane; place < count; place += 32) copy_async<kBytes>(target + L::kPayloadBytes + place * kBytes, from + place * kBytes);
    }
  }
  __device__ __forceinline__ void fetch(int lane) {
    bool fetched = false;
    while (left == 0 && !fetched && cursor.valid()) {
      if (pass == kPasses) {
        next_split(lane);
        continue;
      }
      const int granule = 2 * page_of_split + pass / 4;
      const RowRange rows = bf16_rows<true>(query, cursor.split(), granule), copied = rows.stage(pass % 2);
      if (pass % 4 == 0 && !rows.empty()) payload = granule_row_source<kHeadDim>(query, cursor.split() * kSplitTokens + granule * kGranuleRows, lane);
      fetched = !copied.empty();
      if (fetched) {
        if (!waited) wait_for_previous_kernel();
        copy_stage<kHeadDim>(slots[slot], payload + (pass % 4 < 2 ? 0 : tensor_distance(query.shape)), pass % 2, copied, lane);
      }
      ++pass;
    }
    if (left > 0) {
      fetch_encoded(lane);
      const int streams = query.history_loop();
      source += --left == streams ? 5 - streams : 1;  // V behind K
    }
    commit_copies();
    if (++slot == L::kSlots) slot = 0;
  }
  // The next stage, while those behind it are under way; the slot of the one before is filled again.
  __device__ __forceinline__ unsigned char* acquire(int lane) {
    __syncwarp();  // the stage before has been read
#pragma unroll 1
    for (; ahead < L::kSlots; ++ahead) fetch(lane);
    --ahead;
    if (!waited) {
      wait_for_previous_kernel();
      if (lane < kHeadDim / 8) reinterpret_cast<uint4*>(q)[lane] = reinterpret_cast<const uint4*>(row_q)[lane];
      waited = true;
    }
    wait_copies<L::kSlots - 1>();
    __syncwarp();  // what the other lanes have copied
    return slots[slot];
  }
  __device__ __forceinline__ void release(int) {}  // left to the next acquire
};

// --- consumers ---

// What a warp does with a finished logit.
template <bool kStatistics>
struct LogitSink {
  const Query& query;
  int request;
  float* logits;
  std::uint64_t* numeric_fault;
  __device__ __forceinline__ void operator()(int position, float logit) const {
    if constexpr (kStatistics) {
      logits[position] = logit;
      if (!isfinite(logit) && numeric_fault != nullptr) {
        atomicMin(reinterpret_cast<unsigned long long*>(numeric_fault),
                  static_cast<unsigned long long>(
                      pack_numeric_fault({NumericFaultKind::logit, query.loop, request, query.layer, query.position, query.head, 0})));
      }
    }
  }
};

// The lane's channels of q for BF16 rows: eight lanes a row, lane part p holds the 16-byte vectors p, p + 8.
template <int kHeadDim>
__device__ __forceinline__ void load_query(const __nv_bfloat16* q, int lane, float (&values)[kHeadDim / 8]) {
#pragma unroll
  for (int v = 0; v < kHeadDim / 64; ++v) {
    widen_eight(reinterpret_cast<const uint4*>(q)[v * 8 + lane % 8], values + 8 * v);
  }
}

template <int kCount>
__device__ __forceinline__ void halve(float (&values)[kCount], bool upper, int distance) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float given = upper ? values[i] : values[i + kCount / 2], kept = upper ? values[i + kCount / 2] : values[i];
    values[i] = __fadd_rn(kept, __shfl_xor_sync(~0u, given, distance));
  }
}

// The row of a granule whose logit and weight a lane holds.
__device__ __forceinline__ int granule_row(int lane) { return lane % 2 * kStageRows + lane % 8 / 2 * 4 + lane / 8; }

// Into `logit`, that of row granule_row(lane) of a granule, if that is in the stage.
template <int kHeadDim>
__device__ __forceinline__ void stage_logit(const unsigned char* data, const float (&q)[kHeadDim / 8], int stage, float& logit, int lane) {
  constexpr int kRowBytes = kHeadDim * 2;
  constexpr int kVectors = kHeadDim / 64;
  const int part = lane % 8, slot = lane / 8;
  // Step u covers rows 4 u..4 u + 3, eight lanes each. After the exchanges lanes part 2 u and 2 u + 1 hold the dot of row 4 u + slot, and the even
  // one keeps that of the first stage, the odd one that of the second.
  float dots[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    float dot = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 vector = *reinterpret_cast<const uint4*>(data + (4 * u + slot) * kRowBytes + (v * 8 + part) * 16);
      const std::uint32_t pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dot = __fmaf_rn(q[8 * v + 2 * i], low_value(pairs[i]), dot);
        dot = __fmaf_rn(q[8 * v + 2 * i + 1], high_value(pairs[i]), dot);
      }
    }
    dots[u] = dot;
  }
  halve(dots, part & 4, 4);
  float two[2] = {dots[0], dots[1]};
  halve(two, part & 2, 2);
  const float dot = __fadd_rn(two[0], __shfl_xor_sync(~0u, two[0], 1));
  if ((part & 1) == stage) logit = __fmul_rn(dot, score_scale<kHeadDim>());
}

// The same with q in shared memory, in registers for a stage only.
template <int kHeadDim>
__device__ __forceinline__ void stage_logit(const unsigned char* data, const __nv_bfloat16 (&shared_q)[kHeadDim], int stage, float& logit, int lane) {
  float q[kHeadDim / 8];
  load_query<kHeadDim>(shared_q, lane, q);
  stage_logit<kHeadDim>(data, q, stage, logit, lane);
}

// Weights of the keys of a warp, one or two a lane, from their logits: exp(logit - maximum), 0 without a key.
template <int kCount>
__device__ __forceinline__ float warp_weights(const float (&logits)[kCount], const bool (&present)[kCount], float (&weights)[kCount]) {
  float maximum = minus_infinity();
#pragma unroll
  for (int i = 0; i < kCount; ++i) maximum = fmaxf(maximum, present[i] ? logits[i] : minus_infinity());
  maximum = warp_max(maximum);
#pragma unroll
  for (int i = 0; i < kCount; ++i) weights[i] = present[i] ? expf(__fsub_rn(logits[i], finite_reference(maximum))) : 0.0f;
  return maximum;
}

// accumulator += weight * V over rows `copied` of a stage; the lane holds the weight of row granule_row(lane) of the granule.
template <int kHeadDim>
__device__ __forceinline__ void add_stage_values(const unsigned char* data, float weight, int stage, RowRange copied, float (&accumulator)[8], int lane) {
  constexpr int kRowBytes = kHeadDim * 2;
  constexpr int kRowLanes = kHeadDim / 8, kStepRows = 32 / kRowLanes;
  const int chunk = lane % kRowLanes, step_row = lane / kRowLanes;
  const bool whole = copied.end - copied.begin == kStageRows;
#pragma unroll
  for (int s = 0; s < kStageRows / kStepRows; ++s) {
    const int row = s * kStepRows + step_row;  // of the stage
    const float p = __shfl_sync(~0u, weight, row % 4 * 8 + row / 4 * 2 + stage);
    uint4 vector = *reinterpret_cast<const uint4*>(data + row * kRowBytes + chunk * 16);
    if (!whole && (row + stage * kStageRows < copied.begin || row + stage * kStageRows >= copied.end)) vector = make_uint4(0, 0, 0, 0);
    const std::uint32_t pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      accumulator[2 * i] = __fmaf_rn(p, low_value(pairs[i]), accumulator[2 * i]);
      accumulator[2 * i + 1] = __fmaf_rn(p, high_value(pairs[i]), accumulator[2 * i + 1]);
    }
  }
}

// Writes what add_stage_values left in a warp.
template <int kHeadDim>
__device__ __forceinline__ void store_granule(float (&accumulator)[8], float* output, int lane) {
  halve(accumulator, lane & 16, 16);
  float4 quarter = make_float4(accumulator[0], accumulator[1], accumulator[2], accumulator[3]);
  const int channel = lane % (kHeadDim / 8) * 8 + (lane & 16 ? 4 : 0);
  if constexpr (kHeadDim == 128) {
    *reinterpret_cast<float4*>(output + channel) = quarter;
  } else {
    float four[4] = {quarter.x, quarter.y, quarter.z, quarter.w};
    halve(four, lane & 8, 8);
    *reinterpret_cast<float2*>(output + channel + (lane & 8 ? 2 : 0)) = make_float2(four[0], four[1]);
  }
}

// Rows [rows.begin, rows.end) of one granule that are read as BF16. `q`: what stage_logit takes. `claim()` waits until the partial result may be written.
template <int kHeadDim, class Ring, class LaneQuery, class Sink, class Claim>
__device__ __forceinline__ void consume_granule(Ring& ring, const LaneQuery& q, RowRange rows, int first_position, const Sink& sink, Claim&& claim,
                                                float* partial, float2* statistics, int lane) {
  float logits[1] = {}, weights[1] = {}, maximum = 0.0f;
  float output[8] = {};
#pragma unroll 1
  for (int pass = 0; pass < 4; ++pass) {  // K, K, V, V
    const RowRange copied = rows.stage(pass % 2);
    if (pass == 2) {
      const int row = granule_row(lane);
      const bool present[1] = {row >= rows.begin && row < rows.end};  // other rows of a stage were not copied
      if (present[0]) sink(first_position + row, logits[0]);
      maximum = warp_weights(logits, present, weights);
    }
    if (copied.empty()) continue;
    const unsigned char* data = ring.acquire(lane);
    if (pass < 2) {
      stage_logit<kHeadDim>(data, q, pass, logits[0], lane);
    } else {
      add_stage_values<kHeadDim>(data, weights[0], pass % 2, copied, output, lane);
    }
    ring.release(lane);
  }
  const float sum = warp_sum(weights[0]);
  claim();
  store_granule<kHeadDim>(output, partial, lane);
  if (lane == 0) *statistics = make_float2(maximum, sum);
}

// c[16x8] += a[16x32] * b[32x8], exact.
__device__ __forceinline__ void multiply_bytes_signed(int (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                                      std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bytes(int (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                               std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
inline constexpr std::uint32_t kLowNibbles = 0x0F0F0F0Fu, kHighNibbles = 0xF0F0F0F0u;  // the latter are read as 16 * code

template <int kBytes>
__device__ __forceinline__ void load_words(std::uint32_t (&words)[kBytes / 4], const void* source) {
  if constexpr (kBytes == 16) {
    const uint4 data = *static_cast<const uint4*>(source);
    words[0] = data.x, words[1] = data.y, words[2] = data.z, words[3] = data.w;
  } else if constexpr (kBytes == 8) {
    const uint2 data = *static_cast<const uint2*>(source);
    words[0] = data.x, words[1] = data.y;
  } else {
    static_assert(kBytes == 4);
    words[0] = *static_cast<const std::uint32_t*>(source);
  }
}

// Lists the rows of `mask`, place by place.
__device__ __forceinline__ void list_rows(std::uint64_t mask, std::uint8_t* rows, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane + 32 * half;
    if ((mask >> row) & 1u) rows[bits_below(mask, row)] = static_cast<std::uint8_t>(row);
  }
  __syncwarp();
}

// Fault::wrong_compact_rank: every place gets the row whose place is its row.
template <class L, int kHeadDim>
__device__ __forceinline__ void misplace_rows(unsigned char* stage, const std::uint8_t* rows, int count, int lane) {
  constexpr int kRowChunks = kHeadDim / 32;
#pragma unroll 1
  for (int place = 0; place < count; ++place) {  // of a row that is still in its place
    const int row = min(static_cast<int>(rows[place]), count - 1);
    if (lane < kRowChunks) {
      *reinterpret_cast<uint4*>(stage + chunk_place<kHeadDim>(place * kRowChunks + lane)) =
          *reinterpret_cast<const uint4*>(stage + chunk_place<kHeadDim>(row * kRowChunks + lane));
    }
    __syncwarp();
  }
}

// weights[row] += q·dec(K) for the rows of one stage; Fault::absent_residual_as_code_zero: of absent rows below `absent_below` the minima alone.
template <class L, int kHeadDim>
__device__ __forceinline__ void dot_stage(const unsigned char* stage, const StageHeader& header, int count, PageScratch<kHeadDim>& scratch, int absent_below,
                                          Fault fault, int lane) {
  constexpr int kOwn = kHeadDim / 32;        // channels that a lane folds
  constexpr int kLaneBytes = kHeadDim / 8;   // of a payload row
  constexpr int kWords = kLaneBytes / 4;
  const int row_lane = lane / 4, part = lane % 4;
  const unsigned char* payload = stage;
  const int first_group = uniform(static_cast<int>(header.first_group));
  int begin = 0, end = first_group;
#pragma unroll 1
  for (int segment = 0; segment < 2 && begin < count; ++segment, begin = end, end = count) {
    float scaled[kOwn];
    float bias = 0.0f, largest = 0.0f;
    {
      std::uint32_t pairs[kOwn], q_pairs[kOwn / 2];
      load_words<2 * kOwn>(q_pairs, scratch.q + lane * kOwn);
      load_words<4 * kOwn>(pairs, payload + L::kPayloadBytes + (segment * kHeadDim + lane * kOwn) * 4);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float2 minimum_scale = minimum_and_scale(pairs[i]);
        const float q = i % 2 == 0 ? low_value(q_pairs[i / 2]) : high_value(q_pairs[i / 2]);
        scaled[i] = __fmul_rn(q, minimum_scale.y);  // exact: 8 + 11 bits
        bias = __fmaf_rn(q, minimum_scale.x, bias);
        largest = fmaxf(largest, fabsf(scaled[i]));
      }
    }
    bias = warp_sum(bias);
    const std::uint32_t largest_bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (largest_bits >= 0x7F800000u) bias = __int_as_float(0x7FFFFFFF);  // q * scale has no fixed-point form
    // Even channels as q * scale * 2^exponent, below 2^30; odd ones a sixteenth of that, because their codes are read times 16.
    const int exponent = min(max(29 - exponent_of(largest_bits), -100), 100);
    const float even_factor = power_of_two(exponent), odd_factor = power_of_two(exponent - 4), down = power_of_two(-exponent);
    std::uint32_t digits[kOwn];  // four signed bytes each
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int value = __float2int_rn(__fmul_rn(scaled[i], i % 2 == 0 ? even_factor : odd_factor));
      digits[i] = (static_cast<std::uint32_t>(value) + 0x00808080u) ^ 0x00808080u;
    }
    __syncwarp();
    if constexpr (kOwn == 4) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const std::uint32_t low = __byte_perm(digits[odd], digits[2 + odd], 0x5140), high = __byte_perm(digits[odd], digits[2 + odd], 0x7362);
        const std::uint32_t pair[4] = {low, low >> 16, high, high >> 16};
#pragma unroll
        for (int digit = 0; digit < 4; ++digit) {
          *reinterpret_cast<std::uint16_t*>(scratch.folded[digit] + lane / 2 * 8 + odd * 4 + lane % 2 * 2) =
              static_cast<std::uint16_t>(pair[digit]);
        }
      }
    } else {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int digit = 0; digit < 4; ++digit) {
          scratch.folded[digit][lane / 4 * 8 + odd * 4 + lane % 4] = static_cast<std::uint8_t>(digits[odd] >> (8 * digit));
        }
      }
    }
    __syncwarp();
    std::uint32_t columns[kWords][2] = {};  // columns beyond the four digits are zero
    if (row_lane < 4) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        load_words<8>(columns[w], scratch.folded[row_lane] + (part * kWords + w) * 8);
      }
    }
    if (fault == Fault::absent_residual_as_code_zero && segment == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane + 32 * half;
        if (row < absent_below && ((header.rows >> row) & 1u) == 0) scratch.weights[row] = __fadd_rn(scratch.weights[row], bias);
      }
      __syncwarp();
    }
    constexpr int kTiles = 2;  // of 16 rows, together
    int base = begin;
#pragma unroll 1
    do {
      std::uint32_t words[kTiles][2][kWords];  // rows that are not of the segment are read as well, to no effect
      const auto load = [&](auto&& place) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load_words<kLaneBytes>(words[t][half], payload + place(16 * t + 8 * half));
          }
        }
      };
      const int row = base + row_lane;
      const auto place_of = [part](int row) {
        return kHeadDim == 128 ? chunk_place<kHeadDim>(row * 4 + part) : row * (kHeadDim / 2) + part * kLaneBytes;
      };
      if (base + 16 * kTiles <= kPageTokens) {
        load([first = place_of(row)](int further) { return first + further * (kHeadDim / 2); });
      } else {
        load([&](int further) { return place_of(min(row + further, kPageTokens - 1)); });
      }
      int sums[kTiles][4] = {};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const std::uint32_t top = words[t][0][w], bottom = words[t][1][w];
          multiply_bytes_signed(sums[t], top & kLowNibbles, bottom & kLowNibbles, top & kHighNibbles, bottom & kHighNibbles, columns[w][0],
                                columns[w][1]);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        // Lane part 0 has digits 0 and 1, part 1 digits 2 and 3; part 0 completes rows 0..7, part 1 rows 8..15 of the tile.
        const int upper = sums[t][0] + sums[t][1] * 256, lower = sums[t][2] + sums[t][3] * 256;
        const bool odd = part & 1;
        const int own = odd ? lower : upper, other = __shfl_xor_sync(~0u, odd ? upper : lower, 1);
        float dot = __fmul_rn(__fmaf_rn(static_cast<float>(odd ? own : other), 65536.0f, static_cast<float>(odd ? other : own)), down);
        if (fault == Fault::half_precision_stream_dots) dot = __half2float(__float2half_rn(dot));
        const int place = base + 16 * t + row_lane + (odd ? 8 : 0);
        if (part < 2 && place < end) {
          float& target = scratch.weights[scratch.rows[place]];
          target = __fadd_rn(target, __fadd_rn(dot, bias));
        }
      }
      base += 16 * kTiles;
    } while (base < end);
  }
  __syncwarp();
}

// Where the fixed-point weight of a place lies: the four of a lane's operand register side by side.
__device__ __forceinline__ int fixed_place(int place) { return (place & ~15) | (place & 3) << 2 | (place >> 2 & 3); }

// output += sum of weight * dec(V) for the rows of one stage without the offsets, whose weighted sums are added to `offsets`. A lane ends with
// channels channel_of(lane, j) where its column pair belongs to their half.
template <class L, int kHeadDim>
__device__ __forceinline__ void add_stage(const unsigned char* stage, const std::uint32_t* parameters, PageScratch<kHeadDim>& scratch, int count,
                                          float (&output)[kHeadDim / 16], float (&offsets)[kHeadDim / kGroupSize], int lane) {
  constexpr int kHalves = kHeadDim / kGroupSize;
  constexpr int kLaneBytes = kHeadDim / 16;  // of a payload row
  constexpr int kWords = kLaneBytes / 4;
  const int row_lane = lane / 4, part = lane % 4;
  const int half_of_lane = kHalves == 2 ? row_lane / 4 : 0;
  const unsigned char* payload = stage;

  // weight * scale of every place and half as an unsigned fixed-point number, the codes nearest to zero, and what these leave.
  float product[2][kHalves];
  std::uint32_t largest[kHalves] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = lane + 32 * i;
    const bool listed = place < count;
    const float weight = listed ? scratch.weights[scratch.rows[place]] : 0.0f;
    std::uint32_t pairs[kHalves] = {};
    if (listed) load_words<4 * kHalves>(pairs, parameters + place * kHalves);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const float2 minimum_scale = minimum_and_scale(pairs[h]);
      const int center = min(max(__float2int_rn(__fmul_rn(-minimum_scale.x, reciprocal(minimum_scale.y))), 0), 15);
      offsets[h] = __fmaf_rn(weight, __fmaf_rn(static_cast<float>(center), minimum_scale.y, minimum_scale.x), offsets[h]);
      product[i][h] = __fmul_rn(weight, minimum_scale.y);
      largest[h] = max(largest[h], __float_as_uint(product[i][h]));
      scratch.centers[h][fixed_place(place)] = static_cast<std::uint8_t>(center);
    }
  }
  int exponent[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    exponent[h] = min(31 - exponent_of(__reduce_max_sync(~0u, largest[h])), 120);  // largest * 2^exponent < 2^32
    const float factor = power_of_two(exponent[h]);
#pragma unroll
    for (int i = 0; i < 2; ++i) scratch.fixed[h][fixed_place(lane + 32 * i)] = __float2uint_rn(__fmul_rn(product[i][h], factor));
  }
  __syncwarp();

  // Of row `part`; rows four places on have the same halves swapped.
  const unsigned char* lane_payload =
      payload + (kHeadDim == 128 ? chunk_place<kHeadDim>(part * 4 + row_lane / 2) + row_lane % 2 * 8 : part * (kHeadDim / 2) + row_lane * kLaneBytes);
  int sums[4 * kWords][4] = {};
  int center_sums[4] = {};
  const int steps = (count + 31) / 32;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    std::uint32_t columns[2], centers[2];
    std::uint32_t words[2][4][kWords];
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int first = 32 * step + 16 * quad;
      const uint4 fixed = *reinterpret_cast<const uint4*>(&scratch.fixed[half_of_lane][first + 4 * part]);
      const std::uint32_t selector = static_cast<std::uint32_t>(row_lane % 4) * 0x11u + 0x40u;
      columns[quad] = __byte_perm(__byte_perm(fixed.x, fixed.y, selector), __byte_perm(fixed.z, fixed.w, selector), 0x5410);
      centers[quad] = *reinterpret_cast<const std::uint32_t*>(&scratch.centers[half_of_lane][first + 4 * part]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_words<kLaneBytes>(words[quad][i], lane_payload + (first + 4 * i) * (kHeadDim / 2));
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      std::uint32_t bytes[2][4];  // byte b of four rows: channels 2 b and 2 b + 1 of the word
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        const std::uint32_t a = words[quad][0][w], b = words[quad][1][w], c = words[quad][2][w], d = words[quad][3][w];
        const std::uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
        const std::uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
        bytes[quad][0] = __byte_perm(ab_low, cd_low, 0x5410);
        bytes[quad][1] = __byte_perm(ab_low, cd_low, 0x7632);
        bytes[quad][2] = __byte_perm(ab_high, cd_high, 0x5410);
        bytes[quad][3] = __byte_perm(ab_high, cd_high, 0x7632);
      }
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        multiply_bytes(sums[4 * w + b], bytes[0][b], bytes[0][b] & kHighNibbles, bytes[1][b], bytes[1][b] & kHighNibbles, columns[0], columns[1]);
      }
    }
    multiply_bytes(center_sums, centers[0], 0u, centers[1], 0u, columns[0], columns[1]);
  }

  // An even lane has digits 0 and 1 of its half, an odd lane digits 2 and 3; the even one completes even channels, the odd one odd channels.
  const bool odd = part & 1;
  const int own_exponent = kHalves == 2 && half_of_lane == 1 ? exponent[kHalves - 1] : exponent[0];
  const float down = power_of_two(odd ? max(-own_exponent - 4, -126) : -own_exponent);
  const int center_sum = center_sums[0] + center_sums[1] * 256;
#pragma unroll
  for (int j = 0; j < 4 * kWords; ++j) {
    const int high = sums[j][2] + sums[j][3] * 256;
    const int even_channel = sums[j][0] + sums[j][1] * 256 - (high + center_sum);  // a whole byte has both codes
    const int odd_channel = high - center_sum * 16;
    const int own = odd ? odd_channel : even_channel, other = __shfl_xor_sync(~0u, odd ? even_channel : odd_channel, 1);
    const float value = __fmaf_rn(static_cast<float>(odd ? own : other), 65536.0f, static_cast<float>(odd ? other : own));
    output[j] = __fmaf_rn(value, down, output[j]);
  }
  __syncwarp();
}

// Writes what add_stage left in a warp, offsets included.
template <int kHeadDim>
__device__ __forceinline__ void store_values(const float (&output)[kHeadDim / 16], float (&offsets)[kHeadDim / kGroupSize], float* partial, int lane) {
  constexpr int kHalves = kHeadDim / kGroupSize;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {  // together: their latencies overlap
#pragma unroll
    for (int h = 0; h < kHalves; ++h) offsets[h] = __fadd_rn(offsets[h], __shfl_xor_sync(~0u, offsets[h], width));
  }
  const int row_lane = lane / 4, part = lane % 4;
  const int half_of_lane = kHalves == 2 ? row_lane / 4 : 0;
  if (part / 2 == half_of_lane) {
    const float offset = kHalves == 2 && half_of_lane == 1 ? offsets[kHalves - 1] : offsets[0];
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) partial[row_lane * (kHeadDim / 8) + 2 * j + (part & 1)] = __fadd_rn(output[j], offset);
  }
}

// Encoded rows 0..encoded - 1 of one page. claim(): waits until results may be written; between(): called once, in the middle.
template <class L, int kHeadDim, class Sink, class Claim, class Between>
__device__ __forceinline__ void consume_page(PageRing<L, kHeadDim>& ring, const Query& query, PageScratch<kHeadDim>& scratch,
                                             int encoded, int first_position, const Sink& sink, Claim&& claim, Between&& between, float* partial,
                                             float2* statistics, int lane) {
  constexpr int kHalves = kHeadDim / kGroupSize;
  const int streams = query.history_loop();
  scratch.weights[lane] = 0.0f;
  scratch.weights[lane + 32] = 0.0f;
  float output[kHeadDim / 16];
  float offsets[kHalves];
#pragma unroll 1
  for (int step = 0; step < 2 * streams; ++step) {  // K of every stream, then V
    if (step == streams) between();
    unsigned char* stage = ring.acquire(lane);
    const StageHeader& header = ring.headers[ring.slot];
    const std::uint64_t rows = header.rows;
    const int count = uniform(static_cast<int>(header.count));
    if (step == streams) {
      float logits[2], weights[2];
      const bool present[2] = {lane < encoded, lane + 32 < encoded};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane + 32 * half;
        logits[half] = __fmul_rn(scratch.weights[row], score_scale<kHeadDim>());
        if (present[half]) sink(first_position + row, logits[half]);
      }
      const float maximum = warp_weights(logits, present, weights);
      scratch.weights[lane] = weights[0];
      scratch.weights[lane + 32] = weights[1];
      const float sum = warp_sum(__fadd_rn(weights[0], weights[1]));
      if (lane == 0) scratch.statistics = make_float2(maximum, sum);
      for (float& value : output) value = 0.0f;
      for (float& value : offsets) value = 0.0f;
      __syncwarp();
    }
    if (count == 0) continue;
    if (__any_sync(~0u, rows != scratch.listed)) {
      __syncwarp();
      if (lane == 0) scratch.listed = rows;
      list_rows(rows, scratch.rows, lane);
    }
    if (query.fault == Fault::wrong_compact_rank) misplace_rows<L, kHeadDim>(stage, scratch.rows, count, lane);
    if (step < streams) {
      dot_stage<L, kHeadDim>(stage, header, count, scratch, step == 0 ? 0 : encoded, query.fault, lane);
    } else {
      const auto* parameters = reinterpret_cast<const std::uint32_t*>(stage + L::kPayloadBytes);
      add_stage<L, kHeadDim>(stage, parameters, scratch, count, output, offsets, lane);
    }
  }
  claim();
  store_values<kHeadDim>(output, offsets, partial, lane);
  if (lane == 0) *statistics = scratch.statistics;
}

// --- combination ---

// A lane's channels of an output.
template <int kHeadDim>
struct Channels {
  static constexpr int kOwn = kHeadDim / 32;
  float values[kOwn];
  __device__ __forceinline__ static Channels load(const float* output, int lane) {
    Channels result;
    if constexpr (kOwn == 4) {
      const float4 data = reinterpret_cast<const float4*>(output)[lane];
      result.values[0] = data.x, result.values[1] = data.y, result.values[2] = data.z, result.values[3] = data.w;
    } else {
      const float2 data = reinterpret_cast<const float2*>(output)[lane];
      result.values[0] = data.x, result.values[1] = data.y;
    }
    return result;
  }
  __device__ __forceinline__ void store(float* output, int lane) const {
    if constexpr (kOwn == 4) {
      reinterpret_cast<float4*>(output)[lane] = make_float4(values[0], values[1], values[2], values[3]);
    } else {
      reinterpret_cast<float2*>(output)[lane] = make_float2(values[0], values[1]);
    }
  }
  __device__ __forceinline__ void store_bf16(__nv_bfloat16* output, int lane) const {
#pragma unroll
    for (int c = 0; c < kOwn; c += 2) {
      reinterpret_cast<__nv_bfloat162*>(output)[(lane * kOwn + c) / 2] = __floats2bfloat162_rn(values[c], values[c + 1]);
    }
  }
};

// Adds one more partial result to a chain; `output` and the returned statistics are those of both.
template <int kHeadDim>
__device__ __forceinline__ float2 add_to_chain(Channels<kHeadDim>& output, float2 statistics, const Channels<kHeadDim>& chain, float2 before) {
  const float maximum = fmaxf(before.x, statistics.x), reference = finite_reference(maximum);
  const float kept = expf(__fsub_rn(before.x, reference)), added = expf(__fsub_rn(statistics.x, reference));
#pragma unroll
  for (int c = 0; c < Channels<kHeadDim>::kOwn; ++c) output.values[c] = __fmaf_rn(added, output.values[c], __fmul_rn(kept, chain.values[c]));
  return make_float2(maximum, __fmaf_rn(added, statistics.y, __fmul_rn(kept, before.y)));
}

// Whether this CTA is the last of `ranks` to arrive, so that it sees what the warps of all of them stored before. Called by one warp, once by every CTA
// of the (row, head), one without work too; the counter is zero before and after. (The next kernel that counts there waits for the end of this one.)
__device__ __forceinline__ bool arrive_last(std::uint32_t* arrivals, int ranks, int lane) {
  __syncwarp();
  std::uint32_t before = 0;
  if (lane == 0) asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  if (__shfl_sync(~0u, before, 0) != static_cast<std::uint32_t>(ranks - 1)) return false;
  if (lane == 0) *arrivals = 0;
  __syncwarp();  // what lane 0 has acquired, all lanes see
  return true;
}

// The weighted combination, ascending in k, of those of kCount partial results that `present` names: lane k brings the statistics of the
// k-th, and output_of(k) is where it lies; the loads of kTogether are issued before the first is used. Returns (maximum, sum).
template <int kHeadDim, int kCount, int kTogether = std::min(kCount, 16), class OutputOf>
__device__ __forceinline__ float2 combine(float2 statistics, std::uint32_t present, OutputOf&& output_of, Channels<kHeadDim>& output, int lane) {
  Channels<kHeadDim> partial[kTogether];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if ((present >> (base + i)) & 1u) partial[i] = Channels<kHeadDim>::load(output_of(base + i), lane);
    }
  };
  load(0);
  const float maximum = warp_max(statistics.x);
  const float factor = expf(__fsub_rn(statistics.x, finite_reference(maximum)));
  float sum = 0.0f;
  for (float& value : output.values) value = 0.0f;
#pragma unroll 1
  for (int base = 0; base < kCount; base += kTogether) {
    if (base > 0) load(base);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float weight = __shfl_sync(~0u, factor, base + i), part = __shfl_sync(~0u, statistics.y, base + i);
      if ((present >> (base + i)) & 1u) {
        sum = __fmaf_rn(weight, part, sum);
#pragma unroll
        for (int c = 0; c < Channels<kHeadDim>::kOwn; ++c) output.values[c] = __fmaf_rn(weight, partial[i].values[c], output.values[c]);
      }
    }
  }
  return make_float2(maximum, sum);
}

// The same of few among many, one after the other.
template <int kHeadDim, class OutputOf>
__device__ __forceinline__ float2 combine_few(float2 statistics, std::uint32_t present, OutputOf&& output_of, Channels<kHeadDim>& output, int lane) {
  const float maximum = warp_max(statistics.x);
  const float factor = expf(__fsub_rn(statistics.x, finite_reference(maximum)));
  float sum = 0.0f;
  for (float& value : output.values) value = 0.0f;
#pragma unroll 1
  for (; present != 0; present &= present - 1) {
    const int k = __ffs(static_cast<int>(present)) - 1;
    const Channels<kHeadDim> partial = Channels<kHeadDim>::load(output_of(k), lane);
    const float weight = __shfl_sync(~0u, factor, k);
    sum = __fmaf_rn(weight, __shfl_sync(~0u, statistics.y, k), sum);
#pragma unroll
    for (int c = 0; c < Channels<kHeadDim>::kOwn; ++c) output.values[c] = __fmaf_rn(weight, partial.values[c], output.values[c]);
  }
  return make_float2(maximum, sum);
}

// The partial results of a split, ascending, into its chain. Waits with ready() until they are there and the CTA's split before is in its chain;
// calls read() when they may be overwritten.
template <class L, int kHeadDim, bool kPacked, class Ready, class Read>
__device__ __forceinline__ void add_split(const Query& query, Shared<kHeadDim, kPacked>& shared, int split, int buffer, Ready&& ready, Read&& read, int lane) {
  using Output = Channels<kHeadDim>;
  bool present = false;
  if (lane < L::kPartials) {
    if constexpr (kPacked) {
      const int page = lane / kPagePartials, kind = lane % kPagePartials;
      present = kind == 0 ? query.encoded_rows(split * kSplitPages + page) > 0 : !bf16_rows<true>(query, split, 2 * page + kind - 1).empty();
    } else {
      present = !bf16_rows<false>(query, split, lane).empty();
    }
  }
  const std::uint32_t all_present = __ballot_sync(~0u, present);
  ready();
  const float2 own = present ? shared.partial_statistics[buffer][lane] : make_float2(minus_infinity(), 0.0f);
  const auto output_of = [&](int k) { return shared.partial_output[buffer][k]; };
  Output output;
  float2 statistics;
  if constexpr (kPacked) {
    statistics = combine_few<kHeadDim>(own, all_present, output_of, output, lane);
  } else {
    statistics = combine<kHeadDim, L::kPartials>(own, all_present, output_of, output, lane);
  }
  read();
  const int chain = split % kChains;
  if (split >= kChains) {
    statistics = add_to_chain(output, statistics, Output::load(shared.chain_output[chain], lane), shared.chain_statistics[chain]);
    __syncwarp();
  }
  output.store(shared.chain_output[chain], lane);
  if (lane == 0) shared.chain_statistics[chain] = statistics;
  __syncwarp();
}

// One warp, when all splits of the CTA are in their chains: chains into the result.
template <int kHeadDim, bool kPacked, bool kStatistics>
__device__ __forceinline__ void finish(const Arguments& arguments, const Query& query, const QueryRow& row, Shared<kHeadDim, kPacked>& shared,
                                       std::size_t head_index, int lane) {
  using Output = Channels<kHeadDim>;
  const int rank = blockIdx.y, ranks = gridDim.y;
  const int chains = min(kChains, query.splits());
  const float* outputs = shared.chain_output[0];
  const float2* statistics = shared.chain_statistics;
  if (ranks > 1) {  // the CTA that arrives last has everything
    float* shared_outputs = arguments.chains + head_index * kChains * kHeadDim;
    float2* shared_statistics =
        reinterpret_cast<float2*>(arguments.chains + static_cast<std::size_t>(gridDim.z) * query.shape.heads * kChains * kHeadDim) +
        head_index * kChains;
    for (int chain = rank; chain < chains; chain += ranks) {
      Output::load(shared.chain_output[chain], lane).store(shared_outputs + chain * kHeadDim, lane);
      if (lane == 0) shared_statistics[chain] = shared.chain_statistics[chain];
    }
    if (!arrive_last(arguments.arrivals + head_index, ranks, lane)) return;
    outputs = shared_outputs;
    statistics = shared_statistics;
  }
  Output output;
  const float2 total = combine<kHeadDim, kChains>(lane < chains ? statistics[lane] : make_float2(minus_infinity(), 0.0f), (1u << chains) - 1,
                                                  [&](int k) { return outputs + k * kHeadDim; }, output, lane);
#pragma unroll
  for (int c = 0; c < Output::kOwn; ++c) output.values[c] = __fdiv_rn(output.values[c], total.y);
  output.store_bf16(arguments.output + head_index * kHeadDim, lane);
  if constexpr (kStatistics) {
    const std::size_t state = reference_index(query.shape, row.reference, arguments.layer, query.head);
    output.store(arguments.reference.o_ref + state * kHeadDim, lane);
    if (lane == 0) {
      arguments.reference.maximum[state] = total.x;
      arguments.reference.sum[state] = total.y;
    }
  }
}

// grid (heads, CTAs of one row and head, rows), Layout::kThreads threads, Shared as dynamic shared memory. What begins last has the fewest splits.
template <int kHeadDim, bool kPacked, bool kStatistics>
__global__ void __launch_bounds__(Layout<kHeadDim, kPacked>::kThreads, Layout<kHeadDim, kPacked>::kBlocksPerSm)
    dense_attention_kernel(const __grid_constant__ Arguments arguments) {
  using L = Layout<kHeadDim, kPacked>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kHeadDim, kPacked>*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x / 32)), lane = threadIdx.x % 32;
  if (warp == L::kThreads / 32 - 1) {
    if (lane < 2) {
      barrier_init(&shared.partials_full[lane], 32 * L::kConsumers / L::kGroups);
      barrier_init(&shared.partials_empty[lane], 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Of a row that the kernel in front writes, one a lane.
  const bool has_written = !kPacked && lane < arguments.written_count;
  const int written_request = has_written ? arguments.written_rows[lane].request : -1;
  const int written_position = has_written ? arguments.written_rows[lane].position : 0;
  const int head = blockIdx.x, row_index = blockIdx.z;
  const QueryRow row = uniform(arguments.rows[row_index]);  // rows, tables and maps are older than the kernel in front
  __syncthreads();
  if (row.request < 0) {
    wait_for_previous_kernel();
    return;
  }
  const RequestTable request = uniform(arguments.kv.requests[row.request]);
  const Query query{arguments.kv.shape, request.pages, request.maps,         arguments.layer, head,
                    row.position,       row.loop,      row.encoded_frontier, arguments.fault};
  const std::size_t head_index = static_cast<std::size_t>(row_index) * query.shape.heads + head;
  SplitCursor cursor(blockIdx.y, gridDim.y, query.splits());
  const __nv_bfloat16* row_q = arguments.q + row_index * arguments.q_row_stride + head * kHeadDim;
  float* row_logits = kStatistics ? arguments.logits + static_cast<std::int64_t>(head_index) * arguments.logit_stride : nullptr;
  const LogitSink<kStatistics> sink{query, row.request, row_logits, arguments.numeric_fault};
  if constexpr (!kPacked) {
    if (warp < L::kConsumers) {
      // The first position of the request that the kernel in front writes.
      const int own_written = arguments.written_count == 0 ? 0 : written_request == row.request ? written_position : 0x7FFFFFFF;
      const int first_written = __reduce_min_sync(~0u, own_written);
      GranuleRing<L, kHeadDim> ring{query, shared.slots[warp], warp, warp == 0, cursor};
      ring.locate(lane);
      if (cursor.split() * kSplitTokens + (warp + 1) * kGranuleRows > first_written) wait_for_previous_kernel();
      ring.fill(lane);
      wait_for_previous_kernel();
      float q[kHeadDim / 8];
      load_query<kHeadDim>(row_q, lane, q);
      for (int round = 0; cursor.valid(); cursor.next(), ++round) {
        const int split = cursor.split(), buffer = round & 1;
        barrier_wait(&shared.partials_empty[buffer], (round >> 1 & 1) ^ 1);
        const RowRange rows = bf16_rows<false>(query, split, warp);
        if (!rows.empty()) {
          consume_granule<kHeadDim>(ring, q, rows, split * kSplitTokens + warp * kGranuleRows, sink, [] {}, shared.partial_output[buffer][warp],
                                    &shared.partial_statistics[buffer][warp], lane);
        }
        __syncwarp();
        barrier_arrive(&shared.partials_full[buffer]);
      }
    } else {
      wait_for_previous_kernel();
      for (int round = 0; cursor.valid(); cursor.next(), ++round) {
        const int buffer = round & 1;
        const auto ready = [&] { barrier_wait(&shared.partials_full[buffer], round >> 1 & 1); };
        const auto read = [&] {
          __syncwarp();
          barrier_arrive(&shared.partials_empty[buffer]);
        };
        add_split<L, kHeadDim, false>(query, shared, cursor.split(), buffer, ready, read, lane);
      }
      finish<kHeadDim, kPacked, kStatistics>(arguments, query, row, shared, head_index, lane);
    }
  } else {
    static_assert(L::kGroups == 2);
    const int group = warp / kSplitPages, page_of_split = warp % kSplitPages;
    auto& scratch = shared.scratch[warp];
    SplitCursor before_first = cursor;
    before_first.chain += (group - L::kGroups) * cursor.ranks;
    PageRing<L, kHeadDim> ring{query, shared.slots[warp], scratch.headers, page_of_split, row_q, scratch.q, warp == 0, before_first};
    if (group == 1) cursor.next();
    // A warp in turn combines a split, in the middle of its next page: by then the others have left theirs.
    int before = -1;  // the group's split before
    bool last = warp == 0 && !cursor.valid();  // a CTA without a split arrives as well
    if (lane == 0) scratch.listed = 0;
#pragma unroll 1
    for (int round = 0;; ++round) {
      const std::uint32_t phase = round & 1;
      const auto claim = [&] { barrier_wait(&shared.partials_empty[group], phase ^ 1); };
      const auto between = [&] {
        if (before < 0 || (round - 1) % kSplitPages != page_of_split) return;
        const auto ready = [&] {
          barrier_wait(&shared.partials_full[group], phase ^ 1);
          // The split before is the other group's: of the same round, or of the one before. Neither group is ever two combinations ahead of the
          // other, so that a parity names one phase; and each combination has seen the one before, so that finish() sees all.
          if (group == 1) barrier_wait(&shared.partials_empty[0], phase ^ 1);
          if (group == 0 && round > 1) barrier_wait(&shared.partials_empty[1], phase);
        };
        add_split<L, kHeadDim, true>(query, shared, before, group, ready, [] {}, lane);
        barrier_arrive(&shared.partials_empty[group]);
      };
      const bool valid = cursor.valid();
      const int split = cursor.split(), page = split * kSplitPages + page_of_split, encoded = valid ? query.encoded_rows(page) : 0;
      auto& outputs = shared.partial_output[group];
      auto& statistics = shared.partial_statistics[group];
      if (encoded > 0) {
        const int partial = page_of_split * kPagePartials;
        consume_page<L, kHeadDim>(ring, query, scratch, encoded, page * kPageTokens, sink, claim, between, outputs[partial], &statistics[partial],
                                  lane);
      } else {
        between();
      }
      if (!valid) break;
      if (!query.all_encoded(split)) {
#pragma unroll 1
        for (int turn = 0; turn < kGranules / kSplitPages; ++turn) {
          const int granule = 2 * page_of_split + turn, partial = page_of_split * kPagePartials + 1 + turn;
          const RowRange rows = bf16_rows<true>(query, split, granule);
          if (rows.empty()) continue;
          consume_granule<kHeadDim>(ring, scratch.q, rows, split * kSplitTokens + granule * kGranuleRows, sink, claim, outputs[partial], &statistics[partial],
                                    lane);
        }
      }
      claim();  // also by a warp without a page: an arrival belongs to its own round
      __syncwarp();
      barrier_arrive(&shared.partials_full[group]);
      before = split;
      cursor.next();
      last = !cursor.valid() && round % kSplitPages == page_of_split;
#pragma unroll
      for (int i = 1; i < L::kGroups; ++i) cursor.next();
    }
    wait_for_previous_kernel();  // also a warp without a stage
    if (last) finish<kHeadDim, kPacked, kStatistics>(arguments, query, row, shared, head_index, lane);
  }
}

// CTAs of one (row, head), `most` or fewer: as many as are resident together, a power of two unless every one has a single split.
inline int cta_count(int pairs, int splits, int resident, int most) {
  const int limit = std::min({most, splits, std::max(1, resident / pairs)});
  if (limit == splits) return splits;
  int ctas = 1;
  while (2 * ctas <= limit) ctas *= 2;
  return ctas;
}

// One launch, capturable.
inline void launch_ctas(void (*kernel)(Arguments), int threads, int shared_bytes, int blocks_per_sm, int most, const Arguments& arguments,
                        int row_count, int max_length, cudaStream_t stream) {
  int device = 0, processors = 0;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  let_share_multiprocessors(kernel, shared_bytes);
  const int splits = (max_length + kSplitTokens - 1) / kSplitTokens, pairs = arguments.kv.shape.heads * row_count, resident = processors * blocks_per_sm;
  const int ctas = cta_count(pairs, splits, resident, most);
  const dim3 grid(static_cast<unsigned>(arguments.kv.shape.heads), static_cast<unsigned>(ctas), static_cast<unsigned>(row_count));
  launch_in_turn(arguments.written_rows != nullptr, kernel, grid, threads, shared_bytes, stream, arguments);
}

template <int kHeadDim, bool kPacked, bool kStatistics>
void launch(const Arguments& arguments, int row_count, int max_length, cudaStream_t stream) {
  using L = Layout<kHeadDim, kPacked>;
  constexpr int kBytes = sizeof(Shared<kHeadDim, kPacked>);
  static_assert((kBytes + 1024) * L::kBlocksPerSm <= 228 * 1024);
  launch_ctas(dense_attention_kernel<kHeadDim, kPacked, kStatistics>, L::kThreads, kBytes, L::kBlocksPerSm, kChains, arguments, row_count, max_length,
              stream);
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized::dense
