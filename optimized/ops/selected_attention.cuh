// SPDX-License-Identifier: Apache-2.0
// The reader of selected keys behind sparse_correction and reference_contribution: as dense_attention.cuh, for the keys of a mask.
//
// About one key in ten of a split is selected, so the selected keys of a split are gathered side by side and read as a dense reader reads
// rows: 32 BF16 keys or 64 encoded ones at a time. Every consumer warp has a producer warp of its own, which lists the keys, finds the
// addresses of their rows, and copies these. A split belongs to one consumer, and a chain of splits (those of one residue modulo
// kSelectedChains, ascending) too: there is no barrier between the warps until the chains are combined, ascending.
#pragma once

#include "optimized/ops/dense_attention.cuh"

namespace loopgauge::optimized::selected {

using namespace dense;

enum class Purpose {
  correction,    // softmax over the selected keys; O = (O_ref - C_ref) + m * L
  contribution,  // weights from the logits row and the reference maximum; m and C_ref
};

inline constexpr int kClasses = 8;                   // of chains, each of which falls to one CTA
inline constexpr int kConsumers = 4;                 // warps, each with its producer
inline constexpr int kSelectedChains = kClasses * kConsumers;
inline constexpr int kGranuleKeys = kGranuleRows;    // BF16 keys of one partial result
inline constexpr int kEncodedKeys = kPageTokens;     // encoded keys of one partial result
inline constexpr int kSegments = 2 * kSplitPages;    // of K parameters in a stage, at most: a page touches two groups

inline std::size_t selected_chain_bytes(const KvShape& shape, int row_count) {
  return static_cast<std::size_t>(row_count) * shape.heads * kSelectedChains * (shape.head_dim + 2) * sizeof(float);
}

template <int kHeadDim, bool kPacked>
struct SelectedLayout {
  static constexpr int kThreads = 64 * kConsumers;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kSlots = kPacked ? 2 : 4;
  static constexpr int kReleaseArrivals = 32;  // lanes that give a stage away; its bytes are written by threads
  static constexpr int kHeaderBytes = sizeof(StageHeader);
  static constexpr int kPayloadBytes = kEncodedKeys * kHeadDim / 2;  // what lies behind them: parameters
  static constexpr int kBf16Bytes = kStageRows * kHeadDim * 2;
  static constexpr int kLogitsOffset = kHeaderBytes + kBf16Bytes;    // of a contribution's first stage, behind BF16 rows
  static constexpr int kEncodedLogitsOffset = kHeaderBytes + kPayloadBytes + kEncodedKeys * (kHeadDim / kGroupSize) * 4;
  static constexpr int kSlotBytes = kPacked ? kHeaderBytes + kPayloadBytes + kSegments * kHeadDim * 4 : kLogitsOffset + kGranuleKeys * 4;
  static_assert(kSlotBytes % 16 == 0 && kSlotBytes >= kLogitsOffset + kGranuleKeys * 4);
  static_assert(!kPacked || kSlotBytes >= kEncodedLogitsOffset + kEncodedKeys * 4);
};

enum StageKind : std::uint8_t { kMore, kBf16Keys, kEncodedRows, kEnd };

#ifdef __CUDACC__

// What a producer warp keeps of a split.
struct KeyLists {
  std::uint8_t keys[2][kSplitTokens];      // positions in the split: BF16, encoded
  std::uint64_t address[kPageTokens];      // by place: of a row
  std::uint64_t parameters[kPageTokens];   // by place: K of the group, V of the row
};

template <int kHeadDim, bool kPacked>
struct SelectedShared {
  using L = SelectedLayout<kHeadDim, kPacked>;
  alignas(128) unsigned char slots[kConsumers][L::kSlots][L::kSlotBytes];
  alignas(16) float partial_output[kConsumers][kHeadDim];
  alignas(16) float chain_output[kSelectedChains][kHeadDim];
  float2 chain_statistics[kSelectedChains];
  std::uint64_t full[kConsumers][L::kSlots], empty[kConsumers][L::kSlots];
  KeyLists lists[kConsumers];
  std::conditional_t<kPacked, PageScratch<kHeadDim>, NoScratch> scratch[kConsumers];
};

// The splits of one consumer, ascending in each of its chains.
struct ChainCursor {
  int warp, rank, ranks, splits;
  int base = 0, chain_class;
  __device__ __forceinline__ ChainCursor(int warp, int rank, int ranks, int splits)
      : warp(warp), rank(rank), ranks(ranks), splits(splits), chain_class(rank) {}
  // Consumers take turns over the classes, so that one CTA alone has work for all of them.
  __device__ __forceinline__ int chain() const { return ((warp - chain_class) & (kConsumers - 1)) * kClasses + chain_class; }
  __device__ __forceinline__ int split() const { return base + chain(); }
  __device__ __forceinline__ bool valid() const { return base < splits; }
  __device__ __forceinline__ void next() {
    do {
      chain_class += ranks;
      if (chain_class >= kClasses) {
        chain_class = rank;
        base += kSelectedChains;
      }
    } while (base < splits && split() >= splits);
  }
  __device__ __forceinline__ void begin() {
    if (valid() && split() >= splits) next();
  }
};

__device__ __forceinline__ void copy_async16(unsigned char* target, const unsigned char* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}
template <int kBytes>
__device__ __forceinline__ void copy_async_small(void* target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(target)), "l"(source), "n"(kBytes) : "memory");
}
// Every lane of a producer: the stage is full when the copies of all have arrived. Lane 0's own arrival releases what it wrote.
__device__ __forceinline__ void finish_stage(std::uint64_t* full, int lane) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(full)) : "memory");
  __syncwarp();
  if (lane == 0) barrier_arrive(full);
}
inline constexpr int kStageArrivals = 33;

// Rows of kRowBytes at address[place] + offset, places 0..count - 1, side by side.
template <int kRowBytes>
__device__ __forceinline__ void gather_rows(unsigned char* target, const std::uint64_t* address, std::size_t offset, int count, int lane) {
  constexpr int kChunks = kRowBytes / 16, kRows = 32 / kChunks;
  for (int place = lane / kChunks; place < count; place += kRows) {
    copy_async16(target + place * kRowBytes + lane % kChunks * 16,
                 reinterpret_cast<const unsigned char*>(address[place] + offset) + lane % kChunks * 16);
  }
}

// A producer warp: the selected keys of its consumer's splits, a stage at a time.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct Producer {
  using L = SelectedLayout<kHeadDim, kPacked>;
  static constexpr int kHalves = kHeadDim / kGroupSize;
  const Query& query;
  const std::uint64_t* selected;  // masks of the (slot, layer, head)
  const float* logits;            // contribution: of the (row, head)
  KeyLists& lists;
  Ring<L> ring;
  int lane;

  __device__ __forceinline__ unsigned char* claim(StageKind kind, int count, int chain, std::uint64_t rows) {
    unsigned char* slot = ring.claim();
    if (lane == 0) {
      auto* header = reinterpret_cast<StageHeader*>(slot);
      header->rows = rows;
      header->kind = kind;
      header->count = static_cast<std::uint8_t>(count);
      header->chain = static_cast<std::uint16_t>(chain);
    }
    return slot;
  }
  __device__ __forceinline__ void finish() {
    finish_stage(&ring.full[ring.slot], lane);
    ring.advance();
  }

  // 32 BF16 keys or fewer, one a lane: K in one or two stages, then V.
  __device__ __forceinline__ void produce_bf16(int split, int chain, const std::uint8_t* keys, int count) {
    __syncwarp();
    const int position = split * kSplitTokens + (lane < count ? keys[lane] : 0);
    if (lane < count) {
      const int page = position / kPageTokens, row = position % kPageTokens;
      const int plane = resident_loop(query.maps[page], row, position == query.position ? query.loop : query.history_loop());
      lists.address[lane] = query.pages[page].bf16[plane - 1] + page_row_offset(query.shape, query.layer, KvTensor::k, query.head, row) * 2;
    }
    __syncwarp();
    const std::size_t value_offset = page_tile_offset(query.shape, 0, KvTensor::v, 0) * 2;
    constexpr int kFirst = kPurpose == Purpose::correction ? 0 : 2;
#pragma unroll 1
    for (int pass = kFirst; pass < 4; ++pass) {  // K, K, V, V
      const int begin = pass % 2 * kStageRows, rows = min(count - begin, kStageRows);
      if (rows <= 0) continue;
      unsigned char* slot = claim(pass == kFirst ? kBf16Keys : kMore, count, chain, 0);
      gather_rows<kHeadDim * 2>(slot + L::kHeaderBytes, lists.address + begin, pass < 2 ? 0 : value_offset, rows, lane);
      if (kPurpose == Purpose::contribution && pass == kFirst && lane < count) {
        copy_async_small<4>(slot + L::kLogitsOffset + lane * 4, logits + position);
      }
      finish();
    }
  }

  // 64 encoded keys or fewer: K of every stream, then V.
  __device__ __forceinline__ void produce_encoded(int split, int chain, const std::uint8_t* keys, int count) {
    const int own_page = split * kSplitPages + min(lane, kSplitPages - 1);
    const bool has_page = query.encoded_rows(own_page) > 0;
    const int streams = query.history_loop();
    constexpr int kFirst = kPurpose == Purpose::correction ? 0 : 1;
#pragma unroll 1
    for (int i = kFirst * streams; i < 2 * streams; ++i) {
      const bool k = i < streams;
      const int stream = k ? i + 1 : i - streams + 1;
      std::uint64_t payload = 0, parameters = 0;  // of the lane's page
      if (has_page) {
        const StreamTile tile =
            stream_tile(query.shape, query.pages[own_page], query.maps[own_page], query.layer, stream, k ? KvTensor::k : KvTensor::v, query.head);
        payload = reinterpret_cast<std::uint64_t>(tile.payload);
        parameters = reinterpret_cast<std::uint64_t>(tile.parameters);
      }
      __syncwarp();
      std::uint64_t rows = 0;
      std::uint64_t address[2], parameter[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = lane + 32 * half;
        const int key = index < count ? keys[index] : 0, page = key / kPageTokens, bit = key % kPageTokens;
        const ActivityMap& map = query.maps[split * kSplitPages + page];
        const std::uint64_t active = index < count ? map.active[stream - 1] : 0;
        const bool present = (active >> bit) & 1u;
        int place = bits_below(active, bit);
        const int rank = static_cast<int>(map.rank[stream - 1]);
        if (query.fault == Fault::wrong_compact_rank) place = min(bit, max(static_cast<int>(map.rows[stream - 1]) - 1 - rank, 0));
        const std::uint64_t row = static_cast<std::uint64_t>(rank + place);
        address[half] = __shfl_sync(~0u, payload, page) + row * (kHeadDim / 2);
        parameter[half] = __shfl_sync(~0u, parameters, page) + (k ? row / kGroupSize * (kHeadDim * 4) : row * (kHalves * 4));
        rows |= static_cast<std::uint64_t>(__ballot_sync(~0u, present)) << (32 * half);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int index = lane + 32 * half;
        if ((rows >> index) & 1u) {
          const int place = bits_below(rows, index);
          lists.address[place] = address[half];
          lists.parameters[place] = parameter[half];
        }
      }
      __syncwarp();
      const int listed = __popcll(rows);
      unsigned char* slot = claim(i == kFirst * streams ? kEncodedRows : kMore, count, chain, rows);
      gather_rows<kHeadDim / 2>(slot + L::kHeaderBytes, lists.address, 0, listed, lane);
      unsigned char* target = slot + L::kHeaderBytes + L::kPayloadBytes;
      if (k) {
        std::uint64_t starts = 0;  // places at which a segment begins
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int place = lane + 32 * half;
          const bool start = place < listed && (place == 0 || lists.parameters[place] != lists.parameters[place - 1]);
          starts |= static_cast<std::uint64_t>(__ballot_sync(~0u, start)) << (32 * half);
        }
        auto* header = reinterpret_cast<StageHeader*>(slot);
        int segment = 0;
        for (std::uint64_t rest = starts; rest != 0; rest &= rest - 1, ++segment) {
          const int place = __ffsll(static_cast<long long>(rest)) - 1;
          if (lane == 0 && segment > 0) header->ends[segment - 1] = static_cast<std::uint8_t>(place);
          if (lane < kHeadDim / 4) {
            copy_async16(target + (segment * kHeadDim + lane * 4) * 4, reinterpret_cast<const unsigned char*>(lists.parameters[place]) + lane * 16);
          }
        }
        if (lane == 0) {
          header->segments = segment;
          if (segment > 0) header->ends[segment - 1] = static_cast<std::uint8_t>(listed);
        }
      } else {
        for (int place = lane; place < listed; place += 32) {
          copy_async_small<kHalves * 4>(target + place * kHalves * 4, reinterpret_cast<const void*>(lists.parameters[place]));
        }
        if (kPurpose == Purpose::contribution && stream == 1) {
          for (int index = lane; index < count; index += 32) {
            copy_async_small<4>(slot + L::kEncodedLogitsOffset + index * 4, logits + split * kSplitTokens + keys[index]);
          }
        }
      }
      finish();
    }
  }

  __device__ __forceinline__ void run(ChainCursor cursor) {
    for (cursor.begin(); cursor.valid(); cursor.next()) {
      const int split = cursor.split();
      std::uint64_t masks[2] = {};  // of page `lane` of the split: BF16, encoded
      if (const int page = split * kSplitPages + lane; lane < kSplitPages && page * kPageTokens <= query.position) {
        const std::uint64_t keys = selected[page] & page_mask(page, 0, query.position + 1);
        const int encoded = kPacked ? query.encoded_rows(page) : 0;
        masks[1] = keys & page_mask(page, 0, page * kPageTokens + encoded);
        masks[0] = keys & ~masks[1];
      }
      __syncwarp();
      int count[2] = {};
#pragma unroll
      for (int list = kPacked ? 1 : 0; list >= 0; --list) {
#pragma unroll 1
        for (int page = 0; page < kSplitPages; ++page) {
          const std::uint64_t mask = __shfl_sync(~0u, masks[list], page);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int bit = lane + 32 * half;
            if ((mask >> bit) & 1u) lists.keys[list][count[list] + bits_below(mask, bit)] = static_cast<std::uint8_t>(page * kPageTokens + bit);
          }
          count[list] += __popcll(mask);
        }
      }
      __syncwarp();
      if constexpr (kPacked) {
#pragma unroll 1
        for (int begin = 0; begin < count[1]; begin += kEncodedKeys) {
          produce_encoded(split, cursor.chain(), lists.keys[1] + begin, min(count[1] - begin, kEncodedKeys));
        }
      }
#pragma unroll 1
      for (int begin = 0; begin < count[0]; begin += kGranuleKeys) {
        produce_bf16(split, cursor.chain(), lists.keys[0] + begin, min(count[0] - begin, kGranuleKeys));
      }
    }
    claim(kEnd, 0, 0, 0);
    finish();
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
};

// The weighted values of one stage kind, as a partial result in `partial`. Returns (maximum, sum).
template <class L, int kHeadDim, Purpose kPurpose>
__device__ __forceinline__ float2 consume_bf16_keys(Ring<L>& ring, const __nv_bfloat16* row_q, int count, float reference_maximum, float* partial,
                                                    int lane) {
  const RowRange rows{0, count};
  const bool present[1] = {granule_row(lane) < count};
  float weights[1];
  float maximum = reference_maximum;
  if constexpr (kPurpose == Purpose::correction) {
    float q[kHeadDim / 8];
    load_query<kHeadDim>(row_q, lane, q);
    const float logits[1] = {granule_logit<L, kHeadDim>(ring, q, rows, lane)};
    maximum = warp_weights(logits, present, weights);
  } else {
    const auto* logits = reinterpret_cast<const float*>(ring.acquire() + L::kLogitsOffset);
    weights[0] = present[0] ? expf(__fsub_rn(logits[granule_row(lane)], finite_reference(maximum))) : 0.0f;
  }
  const float sum = warp_sum(weights[0]);
  granule_values<L, kHeadDim>(ring, weights[0], rows, partial, lane);
  return make_float2(maximum, sum);
}

template <class L, int kHeadDim, Purpose kPurpose>
__device__ __forceinline__ float2 consume_encoded_keys(Ring<L>& ring, const Query& query, const float (&q)[kHeadDim / 32],
                                                       PageScratch<kHeadDim>& scratch, int count, float reference_maximum, float* partial, int lane) {
  const std::uint64_t keys = count == kPageTokens ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  const bool present[2] = {lane < count, lane + 32 < count};
  const Fault fault = query.fault == Fault::wrong_compact_rank ? Fault::none : query.fault;  // the producer has it
  float weights[2];
  float maximum = reference_maximum;
  if constexpr (kPurpose == Purpose::correction) {
    scratch.weights[lane] = 0.0f;
    scratch.weights[lane + 32] = 0.0f;
    __syncwarp();
#pragma unroll 1
    for (int stream = 1; stream <= query.history_loop(); ++stream) {
      const unsigned char* stage = ring.acquire();
      const std::uint64_t rows = reinterpret_cast<const StageHeader*>(stage)->rows;
      if (rows != 0) {
        list_rows(rows, scratch.rows, lane);
        dot_stage<L, kHeadDim>(stage, q, scratch, __popcll(rows), stream == 1 ? 0 : keys & ~rows, fault, lane);
      }
      ring.release(lane);
    }
    const float logits[2] = {__fmul_rn(scratch.weights[lane], score_scale<kHeadDim>()),
                             __fmul_rn(scratch.weights[lane + 32], score_scale<kHeadDim>())};
    maximum = warp_weights(logits, present, weights);
  } else {
    const auto* logits = reinterpret_cast<const float*>(ring.acquire() + L::kEncodedLogitsOffset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[half] = present[half] ? expf(__fsub_rn(logits[lane + 32 * half], finite_reference(maximum))) : 0.0f;
    }
  }
  __syncwarp();
  scratch.weights[lane] = weights[0];
  scratch.weights[lane + 32] = weights[1];
  float sum = __fadd_rn(weights[0], weights[1]);
  __syncwarp();
  float output[kHeadDim / 16] = {};
  float offsets[kHeadDim / kGroupSize] = {};
#pragma unroll 1
  for (int stream = 1; stream <= query.history_loop(); ++stream) {
    const unsigned char* stage = ring.acquire();
    const std::uint64_t rows = reinterpret_cast<const StageHeader*>(stage)->rows;
    if (rows != 0) {
      list_rows(rows, scratch.rows, lane);
      const auto* parameters = reinterpret_cast<const std::uint32_t*>(stage + L::kHeaderBytes + L::kPayloadBytes);
      add_stage<L, kHeadDim>(stage, parameters, scratch, __popcll(rows), Fault::none, output, offsets, lane);
    }
    ring.release(lane);
  }
  store_values<kHeadDim>(output, offsets, sum, partial, lane);
  return make_float2(maximum, sum);
}

// grid (CTAs of one row and head, heads, rows), SelectedLayout::kThreads threads, SelectedShared as dynamic shared memory.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
__global__ void __launch_bounds__(SelectedLayout<kHeadDim, kPacked>::kThreads, SelectedLayout<kHeadDim, kPacked>::kBlocksPerSm)
    selected_attention_kernel(const __grid_constant__ Arguments arguments) {
  using L = SelectedLayout<kHeadDim, kPacked>;
  using Output = Channels<kHeadDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectedShared<kHeadDim, kPacked>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kConsumers) {
    for (int i = lane; i < kConsumers * L::kSlots; i += 32) {
      barrier_init(&shared.full[0][0] + i, kStageArrivals);
      barrier_init(&shared.empty[0][0] + i, L::kReleaseArrivals);
    }
  }
  const int head = blockIdx.y, row_index = blockIdx.z;
  const QueryRow row = arguments.rows[row_index];
  __syncthreads();
  if (row.request < 0) return;
  const RequestTable request = arguments.kv.requests[row.request];
  const Query query{arguments.kv.shape, request.pages, request.maps,         arguments.layer, head,
                    row.position,       row.loop,      row.encoded_frontier, arguments.fault};
  const std::size_t head_index = static_cast<std::size_t>(row_index) * query.shape.heads + head;
  const std::size_t state = reference_index(query.shape, row.reference, arguments.layer, head);
  const int rank = blockIdx.x, ranks = gridDim.x, splits = query.splits();
  const int consumer = warp % kConsumers;
  const ChainCursor cursor(consumer, rank, ranks, splits);
  const Ring<L> ring_of_warp{shared.slots[consumer], shared.full[consumer], shared.empty[consumer]};
  if (warp >= kConsumers) {
    const float* logits =
        kPurpose == Purpose::contribution ? arguments.logits + static_cast<std::int64_t>(head_index) * arguments.logit_stride : nullptr;
    Producer<kHeadDim, kPacked, kPurpose> producer{query, arguments.reference.selected + state * arguments.reference.mask_pages, logits,
                                                   shared.lists[consumer], ring_of_warp, lane};
    producer.run(cursor);
    return;
  }

  Ring<L> ring = ring_of_warp;
  const auto own_chain = [&](int chain_class) { return ((warp - chain_class) & (kConsumers - 1)) * kClasses + chain_class; };
  for (int chain_class = rank; chain_class < kClasses; chain_class += ranks) {
    Output{}.store(shared.chain_output[own_chain(chain_class)], lane);
    if (lane == 0) shared.chain_statistics[own_chain(chain_class)] = make_float2(minus_infinity(), 0.0f);
  }
  const __nv_bfloat16* row_q = kPurpose == Purpose::correction ? arguments.q + row_index * arguments.q_row_stride + head * kHeadDim : nullptr;
  const float reference_maximum = kPurpose == Purpose::contribution ? arguments.reference.maximum[state] : 0.0f;
  float fold_q[kHeadDim / 32] = {};
  if constexpr (kPacked && kPurpose == Purpose::correction) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) fold_q[i] = __bfloat162float(row_q[lane * (kHeadDim / 32) + i]);
  }
  float* partial = shared.partial_output[warp];
  while (true) {
    const StageHeader& header = *reinterpret_cast<const StageHeader*>(ring.acquire());
    const int kind = header.kind, count = header.count, chain = header.chain;
    if (kind == kEnd) break;
    float2 statistics;
    if (!kPacked || kind == kBf16Keys) {
      statistics = consume_bf16_keys<L, kHeadDim, kPurpose>(ring, row_q, count, reference_maximum, partial, lane);
    } else {
      if constexpr (kPacked) {
        statistics = consume_encoded_keys<L, kHeadDim, kPurpose>(ring, query, fold_q, shared.scratch[warp], count, reference_maximum, partial, lane);
      }
    }
    __syncwarp();
    Output output = Output::load(partial, lane);
    statistics = add_to_chain(output, statistics, Output::load(shared.chain_output[chain], lane), shared.chain_statistics[chain]);
    __syncwarp();
    output.store(shared.chain_output[chain], lane);
    if (lane == 0) shared.chain_statistics[chain] = statistics;
    __syncwarp();
  }

  const int chains = min(kSelectedChains, splits);
  const float* outputs = shared.chain_output[0];
  const float2* statistics = shared.chain_statistics;
  float* all_outputs = arguments.chains + head_index * kSelectedChains * kHeadDim;
  float2* all_statistics =
      reinterpret_cast<float2*>(arguments.chains + static_cast<std::size_t>(gridDim.z) * query.shape.heads * kSelectedChains * kHeadDim) +
      head_index * kSelectedChains;
  if (ranks > 1) {
    for (int chain_class = rank; chain_class < kClasses; chain_class += ranks) {
      const int chain = own_chain(chain_class);
      if (chain >= chains) continue;
      Output::load(shared.chain_output[chain], lane).store(all_outputs + chain * kHeadDim, lane);
      if (lane == 0) all_statistics[chain] = shared.chain_statistics[chain];
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kConsumers) : "memory");
  if (warp != 0) return;
  if (ranks > 1) {
    if (!arrive_last(arguments.arrivals + head_index, ranks, lane)) return;
    outputs = all_outputs;
    statistics = all_statistics;
  }
  Output output;
  const float2 total = combine<kHeadDim, kSelectedChains>(lane < chains ? statistics[lane] : make_float2(minus_infinity(), 0.0f),
                                                          chains == 32 ? ~0u : (1u << chains) - 1,
                                                          [&](int k) { return outputs + k * kHeadDim; }, output, lane);
  if constexpr (kPurpose == Purpose::correction) {
    const Output o_ref = Output::load(arguments.reference.o_ref + state * kHeadDim, lane);
    const Output c_ref = Output::load(arguments.reference.c_ref + state * kHeadDim, lane);
    const float mass = arguments.reference.mass[state];
#pragma unroll
    for (int c = 0; c < Output::kOwn; ++c) {
      const float unselected = __fsub_rn(o_ref.values[c], c_ref.values[c]);
      output.values[c] = __fadd_rn(unselected, __fmul_rn(mass, __fdiv_rn(output.values[c], total.y)));
    }
    output.store_bf16(arguments.output + head_index * kHeadDim, lane);
  } else {
    const float sum = arguments.reference.sum[state];
#pragma unroll
    for (int c = 0; c < Output::kOwn; ++c) output.values[c] = __fdiv_rn(output.values[c], sum);
    output.store(arguments.reference.c_ref + state * kHeadDim, lane);
    if (lane == 0) arguments.reference.mass[state] = __fdiv_rn(total.y, sum);
  }
}

template <int kHeadDim, bool kPacked, Purpose kPurpose>
void launch(const Arguments& arguments, int row_count, int max_length, cudaStream_t stream) {
  using L = SelectedLayout<kHeadDim, kPacked>;
  constexpr int kBytes = sizeof(SelectedShared<kHeadDim, kPacked>);
  static_assert((kBytes + 1024) * L::kBlocksPerSm <= 228 * 1024);
  launch_ctas(selected_attention_kernel<kHeadDim, kPacked, kPurpose>, L::kThreads, kBytes, L::kBlocksPerSm, kClasses, arguments, row_count,
              max_length, stream);
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized::selected
