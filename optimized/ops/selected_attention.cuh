// SPDX-License-Identifier: Apache-2.0
// The reader of selected keys behind sparse_correction and reference_contribution.
//
// About one key in ten is selected, so what costs is the way to a row, not its bytes: a page holds six selected keys of a head. Many warps work at
// once, each on the keys of two pages at a time, and none waits for another. Lane by lane the places of the rows of up to 16 keys are found in all
// streams, and copies of all of them, K and V, are under way before the first is used. A row is read by 16 lanes, eight channels each (8 lanes where
// head_dim is 64). Encoded rows are X_hat's terms bit for bit (reconstruct.cuh), their products with q and with the weights FP32.
//
// The order is fixed by absolute positions alone: the units (128 positions) of one residue modulo kSelectedChains, ascending, are the chain of
// one warp, which rescales what it has as softmax does; eight chains, ascending, are a group, and groups are combined ascending.
#pragma once

#include "optimized/ops/dense_attention.cuh"

namespace loopgauge::optimized::selected {

using namespace dense;

enum class Purpose {
  correction,    // softmax over the selected keys; O = (O_ref - C_ref) + m * L
  contribution,  // weights from the logits row and the reference maximum; m and C_ref
};

inline constexpr int kUnitPages = 2;
inline constexpr int kUnitTokens = kUnitPages * kPageTokens;
inline constexpr int kWarps = 8;    // chains of a group
inline constexpr int kGroups = 16;  // each of which falls to one CTA
inline constexpr int kSelectedChains = kWarps * kGroups;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kKeys = 16;          // whose rows a warp has copied at a time
inline constexpr int kMostSharedPairs = 1024;  // launches of more (row, head) pairs give each of them one CTA, which needs no memory for groups

inline std::size_t selected_group_bytes(const KvShape& shape, int row_count) {
  const std::size_t pairs = static_cast<std::size_t>(row_count) * static_cast<std::size_t>(shape.heads);
  return pairs > kMostSharedPairs ? 0 : pairs * kGroups * static_cast<std::size_t>(shape.head_dim + 2) * sizeof(float);
}

#ifdef __CUDACC__

// Where the rows of a page begin in one stream, and their parameters; of K those of the first row's group.
struct alignas(16) StreamStart {
  std::uint64_t payload, parameters;
};

// What a warp keeps of the keys that it works on. Rows are listed, key by key, in each stream that has them.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct KeyScratch {
  static constexpr int kStreams = kPacked ? kLoops : 1;
  static constexpr int kTensors = kPurpose == Purpose::correction ? 2 : 1;  // V, K
  static constexpr int kGroupBytes = kHeadDim * 4;                          // K parameters of one group
  // Of a unit's two pages those of streams 1 and 2 are copied, of streams 3 and 4, where a group has rows of many pages, those of the first.
  static constexpr int kGroupCopies = kPacked && kPurpose == Purpose::correction ? 6 : 1;
  alignas(16) unsigned char rows[kTensors][kKeys * 2 * kHeadDim];  // [stream][place] encoded, or [place] BF16
  alignas(16) unsigned char k_parameters[kGroupCopies][kGroupBytes];
  alignas(16) std::uint32_t v_parameters[kStreams][kKeys][kHeadDim / kGroupSize];
  StreamStart starts[kUnitPages][2][kStreams];  // K, V
  std::uint32_t listed[2][kStreams];            // V, K: whose keys (lanes) have a row in the stream
  float weights[kKeys];                         // of the rows of one stream
  std::uint8_t groups[kStreams][kKeys];         // RowGroup of the K rows
  std::uint8_t keys[kUnitTokens];               // positions in the unit
};
enum RowGroup : unsigned { kFirstPageGroup, kFirstPageNextGroup, kSecondPageGroup, kSecondPageNextGroup };

template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct SelectedShared {
  static constexpr int kBlocksPerSm = kPurpose == Purpose::correction ? 2 : 3;
  KeyScratch<kHeadDim, kPacked, kPurpose> scratch[kWarps];
  alignas(16) float chain_output[2][kWarps][kHeadDim];  // of two groups in turn
  alignas(16) float group_output[kGroups][kHeadDim];
  float2 chain_statistics[2][kWarps];                   // (maximum, sum)
  float2 group_statistics[kGroups];
};

// Code j of a word, exact: its bits become those of a float beside a power of two that is subtracted again.
template <int kCode>
__device__ __forceinline__ float code_of(std::uint32_t word, std::uint32_t shifted) {
  constexpr int kPlace = kCode < 5 ? 4 * kCode : 4 * (kCode - 3);  // shifted is word >> 12
  constexpr std::uint32_t kPower = static_cast<std::uint32_t>(127 + 23 - kPlace) << 23;
  return __fsub_rn(__uint_as_float(((kCode < 5 ? word : shifted) & (0xFu << kPlace)) | kPower), static_cast<float>(1u << (23 - kPlace)));
}
__device__ __forceinline__ void codes_of(std::uint32_t word, float (&codes)[8]) {
  const std::uint32_t shifted = word >> 12;
  codes[0] = code_of<0>(word, shifted), codes[1] = code_of<1>(word, shifted), codes[2] = code_of<2>(word, shifted), codes[3] = code_of<3>(word, shifted);
  codes[4] = code_of<4>(word, shifted), codes[5] = code_of<5>(word, shifted), codes[6] = code_of<6>(word, shifted), codes[7] = code_of<7>(word, shifted);
}
__device__ __forceinline__ void widen_row(uint4 data, float (&values)[8]) {
  const std::uint32_t pairs[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = bf16_low(pairs[i]);
    values[2 * i + 1] = bf16_high(pairs[i]);
  }
}
template <int kBytes>
__device__ __forceinline__ void copy_async(void* target, std::uint64_t source) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(target)), "l"(source), "n"(kBytes) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Of the warp, but for the last kPending groups that were committed.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

// One warp and its chain. Of the rows of a list, kStepRows are read side by side, kRowLanes lanes each, of which lane part p has channels
// 8 p..8 p + 7, and kLaneRows one after the other by a lane. Places behind the last row of a list read that row again, to no effect.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct ChainReader {
  using Scratch = KeyScratch<kHeadDim, kPacked, kPurpose>;
  static constexpr bool kCorrection = kPurpose == Purpose::correction;
  static constexpr unsigned kRowLanes = kHeadDim / 8;
  static constexpr unsigned kStepRows = 32 / kRowLanes;
  static constexpr unsigned kLaneRows = 4;
  static constexpr unsigned kBlockRows = kLaneRows * kStepRows;
  static constexpr int kStreams = Scratch::kStreams;
  static constexpr unsigned kPayloadBytes = kHeadDim / 2, kBf16Bytes = kHeadDim * 2;
  static constexpr int kV = 0, kK = 1;

  const Query& query;
  const std::uint64_t* selected;  // masks of the (slot, layer, head)
  const float* logits;            // contribution: of the (row, head)
  Scratch& scratch;
  unsigned lane;
  float q[8] = {};
  float output[8] = {};
  float maximum, sum = 0.0f;

  __device__ __forceinline__ unsigned part() const { return lane % kRowLanes; }
  __device__ __forceinline__ unsigned side() const { return lane / kRowLanes; }
  __device__ __forceinline__ unsigned row_of(unsigned first, unsigned u) const { return first + u * kStepRows + side(); }
  __device__ __forceinline__ bool listed(std::uint32_t list) const { return (list >> lane) & 1u; }
  __device__ __forceinline__ unsigned place_in(std::uint32_t list) const { return static_cast<unsigned>(__popc(list & ((1u << lane) - 1))); }
  __device__ __forceinline__ unsigned char* encoded_row(int tensor, int stream, unsigned place) const {
    return scratch.rows[tensor] + (static_cast<unsigned>(stream) * kKeys + place) * kPayloadBytes;
  }

  __device__ __forceinline__ void start(float first_maximum) {
    for (float& value : output) value = 0.0f;
    maximum = first_maximum;
    sum = 0.0f;
  }

  // Where the encoded rows of the unit's pages begin, one page, tensor and stream a lane.
  __device__ __forceinline__ void find_starts(int unit) const {
    const int page = unit * kUnitPages + static_cast<int>(lane / (2 * kLoops)), stream = static_cast<int>(lane % kLoops) + 1;
    if (lane >= kUnitPages * 2 * kLoops || page * kPageTokens > query.position) return;
    const KvTensor tensor = lane / kLoops % 2 == 0 ? KvTensor::k : KvTensor::v;
    const ActivityMap& map = query.maps[page];
    const StreamTile tile = stream_tile(query.shape, query.pages[page], map, query.layer, stream, tensor, query.head);
    const std::size_t rank = map.rank[stream - 1];
    const auto parameters = reinterpret_cast<std::uint64_t>(tile.parameters);
    scratch.starts[lane / (2 * kLoops)][static_cast<int>(tensor)][stream - 1] = {
        reinterpret_cast<std::uint64_t>(tile.payload) + rank * kPayloadBytes,
        tensor == KvTensor::k ? parameters + rank / kGroupSize * Scratch::kGroupBytes : parameters + rank * (kHeadDim / kGroupSize * 4)};
  }

  // Lists the encoded rows of the keys, one a lane, and copies them: K with its parameters first, then V.
  __device__ __forceinline__ void copy_encoded(int unit, unsigned key, bool present) const {
    const unsigned page = key / kPageTokens, bit = key % 32, below = (1u << bit) - 1;
    const bool upper = key % kPageTokens >= 32;
    const ActivityMap& map = query.maps[unit * kUnitPages + static_cast<int>(page)];
    unsigned rows[kStreams];
    std::uint32_t lists[kStreams];
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      if (stream >= query.history_loop()) break;
      const std::uint64_t active = map.active[stream];
      const auto low = static_cast<std::uint32_t>(active), high = static_cast<std::uint32_t>(active >> 32), word = upper ? high : low;
      rows[stream] = static_cast<unsigned>((upper ? __popc(low) : 0) + __popc(word & below));
      const bool has_row = present && ((word >> bit) & 1u);
      lists[stream] = __ballot_sync(~0u, has_row);
      std::uint32_t keys = lists[stream];
      bool filled = false;
      if (query.fault == Fault::wrong_compact_rank || query.fault == Fault::absent_residual_as_code_zero) {
        const int last = static_cast<int>(map.rows[stream]) - 1 - static_cast<int>(map.rank[stream]);
        const bool wrong = query.fault == Fault::wrong_compact_rank;
        rows[stream] = static_cast<unsigned>(min(static_cast<int>(wrong ? key % kPageTokens : rows[stream]), max(last, 0)));
        filled = !wrong && present && !has_row && map.rows[stream] > 0;
        keys = __ballot_sync(~0u, has_row || filled);
      }
      if (lane < 2) scratch.listed[lane][stream] = lane == kV ? lists[stream] : keys;
      if constexpr (kCorrection) {
        const bool any_row = has_row || filled;
        unsigned group = 0;
        if (any_row) {
          const StreamStart start = scratch.starts[page][0][stream];
          const unsigned place = place_in(keys), next = (map.rank[stream] % kGroupSize + rows[stream]) / kGroupSize;
          group = 2 * page + next;
          if (page > 0) {  // the second page may go on in the first one's groups
            const std::uint64_t first = scratch.starts[0][0][stream].parameters, own = start.parameters + next * Scratch::kGroupBytes;
            group = own == first ? kFirstPageGroup : own == first + Scratch::kGroupBytes ? kFirstPageNextGroup : group;
          }
          scratch.groups[stream][place] = static_cast<std::uint8_t>(group);
#pragma unroll
          for (unsigned byte = 0; byte < kPayloadBytes; byte += 16) {
            unsigned char* target = encoded_row(kK, stream, place) + byte;
            if (filled) {
              *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
            } else {
              copy_async<16>(target, start.payload + rows[stream] * kPayloadBytes + byte);
            }
          }
        }
#pragma unroll
        for (unsigned first = kFirstPageGroup; first <= kSecondPageGroup; first += 2) {
          if (!is_copied(stream, first) || !__any_sync(~0u, any_row && group == first) || lane * 16 >= Scratch::kGroupBytes) continue;
          copy_async<16>(scratch.k_parameters[group_copy(stream, first)] + lane * 16, scratch.starts[first / 2][0][stream].parameters + lane * 16);
        }
      }
    }
    commit_copies();
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      if (stream >= query.history_loop()) break;
      if (!listed(lists[stream])) continue;
      const StreamStart start = scratch.starts[page][1][stream];
      const unsigned place = place_in(lists[stream]);
#pragma unroll
      for (unsigned byte = 0; byte < kPayloadBytes; byte += 16) {
        copy_async<16>(encoded_row(kV, stream, place) + byte, start.payload + rows[stream] * kPayloadBytes + byte);
      }
      copy_async<kHeadDim / kGroupSize * 4>(scratch.v_parameters[stream][place], start.parameters + rows[stream] * (kHeadDim / kGroupSize * 4));
    }
    commit_copies();
  }
  // Whether a group's parameters are copied, and where to.
  __device__ __forceinline__ static bool is_copied(int stream, unsigned group) { return group == kFirstPageGroup || (group == kSecondPageGroup && stream < 2); }
  __device__ __forceinline__ static int group_copy(int stream, unsigned group) { return stream < 2 ? 2 * stream + static_cast<int>(group / 2) : stream + 2; }

  // Copies the BF16 rows of the keys, one a lane, `count` in all: K, then V.
  __device__ __forceinline__ void copy_bf16(int unit, unsigned key, unsigned count) const {
    std::uint64_t own = 0;
    if (lane < count) {
      const int page = unit * kUnitPages + static_cast<int>(key / kPageTokens), bit = static_cast<int>(key % kPageTokens);
      const int loop = page * kPageTokens + bit == query.position ? query.loop : query.history_loop();
      const int plane = resident_loop(query.maps[page], bit, loop);
      own = query.pages[page].bf16[plane - 1] + page_row_offset(query.shape, query.layer, KvTensor::k, query.head, bit) * 2;
    }
    const std::size_t value_offset = page_tile_offset(query.shape, 0, KvTensor::v, 0) * 2;
    constexpr unsigned kChunks = kBf16Bytes / 16, kRows = 32 / kChunks;
#pragma unroll
    for (int tensor = kCorrection ? kK : kV; tensor >= kV; --tensor) {
#pragma unroll 1
      for (unsigned first = 0; first < count; first += kRows) {
        const unsigned place = first + lane / kChunks;
        const std::uint64_t row = __shfl_sync(~0u, own, static_cast<int>(place % 32)) + (tensor == kV ? value_offset : 0);
        if (place < count) copy_async<16>(scratch.rows[tensor] + place * kBf16Bytes + lane % kChunks * 16, row + lane % kChunks * 16);
      }
      commit_copies();
    }
    if constexpr (!kCorrection) commit_copies();
  }

  // The dots of a block's rows, `dots` the lane's share of each; that of row `row` of the block is returned.
  __device__ __forceinline__ float reduce(float (&dots)[kLaneRows], unsigned row) const {
    halve(dots, part() & (kRowLanes / 2), kRowLanes / 2);
    float two[2] = {dots[0], dots[1]};
    halve(two, part() & (kRowLanes / 4), kRowLanes / 4);
    float dot = two[0];
#pragma unroll
    for (int width = kRowLanes / 8; width > 0; width /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, width));
    return __shfl_sync(~0u, dot, static_cast<int>(row % kStepRows * kRowLanes + row / kStepRows * (kRowLanes / 4)));
  }

  __device__ __forceinline__ void read_bf16(int tensor, unsigned row, float (&values)[8]) const {
    const uint4 data = *reinterpret_cast<const uint4*>(scratch.rows[tensor] + row * kBf16Bytes + part() * 16);
    widen_row(data, values);
  }

  __device__ __forceinline__ float bf16_logit(unsigned count) const {
    float logit = 0.0f;
#pragma unroll 1
    for (unsigned first = 0; first < count; first += kBlockRows) {
      float dots[kLaneRows] = {};
#pragma unroll
      for (unsigned u = 0; u < kLaneRows; ++u) {
        float values[8];
        read_bf16(kK, min(row_of(first, u), count - 1), values);
#pragma unroll
        for (int c = 0; c < 8; ++c) dots[u] = __fmaf_rn(q[c], values[c], dots[u]);
      }
      const float dot = reduce(dots, lane - first);
      if (lane - first < kBlockRows) logit = dot;
    }
    return logit;
  }

  // The lane's share of the dots of a block of encoded rows. Products of codes and scales are exact, 4 + 11 bits: one rounding, as of a
  // multiplication and an addition.
  __device__ __forceinline__ void block_dots(const std::uint32_t (&codes)[kLaneRows], const float (&scale)[8], const float (&minimum)[8], unsigned count,
                                             float (&dots)[kLaneRows]) const {
#pragma unroll
    for (unsigned half = 0; half < kLaneRows; half += 2) {
      if (half * kStepRows >= count) break;  // the same in the whole warp
#pragma unroll
      for (unsigned u = half; u < half + 2; ++u) {
        float values[8];
        codes_of(codes[u], values);
#pragma unroll
        for (int c = 0; c < 8; ++c) dots[u] = __fmaf_rn(q[c], __fmaf_rn(values[c], scale[c], minimum[c]), dots[u]);
      }
    }
  }
  // The planted fault: q·code·scale of a row goes through FP16. Returns what `reduce` would.
  __device__ __forceinline__ float half_precision_dot(const std::uint32_t (&codes)[kLaneRows], const float (&scale)[8], const float (&minimum)[8],
                                                      unsigned row) const {
    float scaled[kLaneRows] = {}, offsets[kLaneRows] = {};
#pragma unroll
    for (unsigned u = 0; u < kLaneRows; ++u) {
      float values[8];
      codes_of(codes[u], values);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        scaled[u] = __fmaf_rn(q[c], __fmul_rn(values[c], scale[c]), scaled[u]);
        offsets[u] = __fmaf_rn(q[c], minimum[c], offsets[u]);
      }
    }
    const float dot = reduce(scaled, row);
    return __fadd_rn(__half2float(__float2half_rn(dot)), reduce(offsets, row));
  }

  __device__ __forceinline__ float encoded_logit() const {
    float logit = 0.0f;
#pragma unroll 1
    for (int stream = 0; stream < query.history_loop(); ++stream) {
      const std::uint32_t list = scratch.listed[kK][stream];
      const unsigned count = static_cast<unsigned>(__popc(list)), place = place_in(list);
      const unsigned own_group = listed(list) ? scratch.groups[stream][place] : ~0u;
#pragma unroll 1
      for (unsigned begin = 0, end = 0; begin < count; begin = end) {  // rows of one group, so of the same parameters
        const unsigned group = scratch.groups[stream][begin];
        end = begin + static_cast<unsigned>(__popc(__ballot_sync(~0u, own_group == group)));
        const unsigned char* parameters = is_copied(stream, group) ? scratch.k_parameters[group_copy(stream, group)]
                                                                   : reinterpret_cast<const unsigned char*>(scratch.starts[group / 2][0][stream].parameters +
                                                                                                            group % 2 * Scratch::kGroupBytes);
        const uint4 low = reinterpret_cast<const uint4*>(parameters)[2 * part()], high = reinterpret_cast<const uint4*>(parameters)[2 * part() + 1];
        const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float scale[8], minimum[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float2 minimum_scale = parameter(words[c]);
          minimum[c] = minimum_scale.x;
          scale[c] = minimum_scale.y;
        }
#pragma unroll 1
        for (unsigned first = begin; first < end; first += kBlockRows) {
          std::uint32_t codes[kLaneRows];
#pragma unroll
          for (unsigned u = 0; u < kLaneRows; ++u) {
            codes[u] = reinterpret_cast<const std::uint32_t*>(encoded_row(kK, stream, min(row_of(first, u), end - 1)))[part()];
          }
          float dot;
          if (query.fault != Fault::half_precision_stream_dots) {
            float dots[kLaneRows] = {};
            block_dots(codes, scale, minimum, end - first, dots);
            dot = reduce(dots, place - first);
          } else {
            dot = half_precision_dot(codes, scale, minimum, place - first);
          }
          if (own_group == group && place - first < kBlockRows) logit = __fadd_rn(logit, dot);
        }
      }
    }
    return logit;
  }

  // The weights of the keys of `list`, by place.
  __device__ __forceinline__ void list_weights(std::uint32_t list, float weight) const {
    __syncwarp();
    if (listed(list)) scratch.weights[place_in(list)] = weight;
    __syncwarp();
  }
  __device__ __forceinline__ float weight_of(unsigned row, unsigned count) const { return row < count ? scratch.weights[row] : 0.0f; }

  __device__ __forceinline__ void add_bf16_values(unsigned count, float weight) {
    list_weights((1u << count) - 1, weight);
#pragma unroll 1
    for (unsigned first = 0; first < count; first += kBlockRows) {
#pragma unroll
      for (unsigned u = 0; u < kLaneRows; ++u) {
        float values[8];
        read_bf16(kV, min(row_of(first, u), count - 1), values);
        const float p = weight_of(row_of(first, u), count);
#pragma unroll
        for (int c = 0; c < 8; ++c) output[c] = __fmaf_rn(p, values[c], output[c]);
      }
    }
  }

  __device__ __forceinline__ void add_encoded_values(float weight) {
#pragma unroll 1
    for (int stream = 0; stream < query.history_loop(); ++stream) {
      const std::uint32_t list = scratch.listed[kV][stream];
      const unsigned count = static_cast<unsigned>(__popc(list));
      list_weights(list, weight);
#pragma unroll 1
      for (unsigned first = 0; first < count; first += kBlockRows) {
#pragma unroll
        for (unsigned half = 0; half < kLaneRows; half += 2) {
          if (first + half * kStepRows >= count) break;  // the same in the whole warp
#pragma unroll
          for (unsigned u = half; u < half + 2; ++u) {
            const unsigned row = min(row_of(first, u), count - 1);
            const float p = weight_of(row_of(first, u), count);
            const float2 minimum_scale = parameter(scratch.v_parameters[stream][row][part() * 8 / kGroupSize]);
            float values[8];
            codes_of(reinterpret_cast<const std::uint32_t*>(encoded_row(kV, stream, row))[part()], values);
#pragma unroll
            for (int c = 0; c < 8; ++c) output[c] = __fmaf_rn(p, __fmaf_rn(values[c], minimum_scale.y, minimum_scale.x), output[c]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_unit(int unit) {
    const int first_page = unit * kUnitPages, length = query.position + 1 - unit * kUnitTokens;
    std::uint64_t masks[kUnitPages];
#pragma unroll
    for (int i = 0; i < kUnitPages; ++i) masks[i] = i * kPageTokens < length ? selected[first_page + i] : 0;
    if (length < kUnitTokens) {
#pragma unroll
      for (int i = 0; i < kUnitPages; ++i) masks[i] &= page_mask(i, 0, length);
    }
    unsigned total = 0;
#pragma unroll
    for (int i = 0; i < kUnitPages; ++i) total += static_cast<unsigned>(__popcll(masks[i]));
    if (total == 0) return;
    unsigned encoded_total = 0;  // pages ascend, so these are the first keys
    if constexpr (kPacked) {
      encoded_total = total;
      if (query.frontier < (unit + 1) * kUnitTokens) {
        encoded_total = 0;
#pragma unroll
        for (int i = 0; i < kUnitPages; ++i) {
          encoded_total += static_cast<unsigned>(__popcll(masks[i] & page_mask(0, 0, query.encoded_rows(first_page + i))));
        }
      }
    }
    __syncwarp();
    if (kPacked && encoded_total > 0) find_starts(unit);
    unsigned before = 0;
#pragma unroll
    for (int i = 0; i < 2 * kUnitPages; ++i) {
      const auto word = static_cast<std::uint32_t>(i % 2 == 0 ? masks[i / 2] : masks[i / 2] >> 32);
      if (listed(word)) scratch.keys[before + place_in(word)] = static_cast<std::uint8_t>(32 * i + lane);
      before += static_cast<unsigned>(__popc(word));
    }
    __syncwarp();
    unsigned begin = 0;
    if constexpr (kPacked) {
#pragma unroll 1
      for (; begin < encoded_total; begin += kKeys) add_keys<true>(unit, begin, min(encoded_total - begin, kKeys));
      begin = encoded_total;
    }
#pragma unroll 1
    for (; begin < total; begin += kKeys) add_keys<false>(unit, begin, min(total - begin, kKeys));
  }

  template <bool kEncoded>
  __device__ __forceinline__ void add_keys(int unit, unsigned begin, unsigned count) {
    const bool present = lane < count;
    const unsigned key = present ? scratch.keys[begin + lane] : 0;
    if constexpr (kEncoded) {
      copy_encoded(unit, key, present);
    } else {
      copy_bf16(unit, key, count);
    }
    float weight = 0.0f;
    if constexpr (kCorrection) {
      wait_copies<1>();
      float logit;
      if constexpr (kEncoded) {
        logit = encoded_logit();
      } else {
        logit = bf16_logit(count);
      }
      logit = __fmul_rn(logit, score_scale<kHeadDim>());
      const float largest = fmaxf(maximum, warp_max(present ? logit : minus_infinity())), reference = finite_reference(largest);
      const float kept = expf(__fsub_rn(maximum, reference));
      maximum = largest;
      sum = __fmul_rn(sum, kept);
      for (float& value : output) value = __fmul_rn(value, kept);
      if (present) weight = expf(__fsub_rn(logit, reference));
    } else {
      if (present) weight = expf(__fsub_rn(logits[unit * kUnitTokens + static_cast<int>(key)], finite_reference(maximum)));
    }
    sum = __fadd_rn(sum, warp_sum(weight));
    wait_copies<0>();
    if constexpr (kEncoded) {
      add_encoded_values(weight);
    } else {
      add_bf16_values(count, weight);
    }
    __syncwarp();  // the next copies come to the same places
  }

  // What the lanes of a row hold of the same channels is one sum.
  __device__ __forceinline__ void store(float* chain_output, float2* chain_statistics) {
#pragma unroll
    for (int width = 16; width >= static_cast<int>(kRowLanes); width /= 2) {
#pragma unroll
      for (float& value : output) value = __fadd_rn(value, __shfl_xor_sync(~0u, value, width));
    }
    if (lane < kRowLanes) {
      reinterpret_cast<float4*>(chain_output)[2 * lane] = make_float4(output[0], output[1], output[2], output[3]);
      reinterpret_cast<float4*>(chain_output)[2 * lane + 1] = make_float4(output[4], output[5], output[6], output[7]);
    }
    if (lane == 0) *chain_statistics = make_float2(maximum, sum);
  }
};

// grid (CTAs of one row and head, heads, rows), kThreads threads, SelectedShared as dynamic shared memory.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
__global__ void __launch_bounds__(kThreads, SelectedShared<kHeadDim, kPacked, kPurpose>::kBlocksPerSm)
    selected_attention_kernel(const __grid_constant__ Arguments arguments) {
  using Output = Channels<kHeadDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectedShared<kHeadDim, kPacked, kPurpose>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y;
  int row_index = blockIdx.z, layer = arguments.layer;
  if constexpr (kPurpose == Purpose::contribution) {
    layer += row_index / arguments.rows_of_layer;
    row_index %= arguments.rows_of_layer;
  }
  const QueryRow row = arguments.rows[row_index];
  if (row.request < 0) {
    wait_for_previous_kernel();
    return;
  }
  const RequestTable request = arguments.kv.requests[row.request];  // rows and tables are older than the kernel in front
  const Query query{arguments.kv.shape, request.pages, request.maps,         layer,          head,
                    row.position,       row.loop,      row.encoded_frontier, arguments.fault};
  const std::size_t head_index = static_cast<std::size_t>(blockIdx.z) * query.shape.heads + head;
  const std::size_t state = reference_index(query.shape, row.reference, layer, head);
  ChainReader<kHeadDim, kPacked, kPurpose> reader{query,
                                                  arguments.reference.selected + state * arguments.reference.mask_pages,
                                                  arguments.logits + static_cast<std::int64_t>(head_index) * arguments.logit_stride,
                                                  shared.scratch[warp],
                                                  static_cast<unsigned>(lane)};
  wait_for_previous_kernel();
  float first_maximum = minus_infinity();
  if constexpr (kPurpose == Purpose::contribution) first_maximum = arguments.reference.maximum[state];
  if constexpr (kPurpose == Purpose::correction) {
    const uint4 data = reinterpret_cast<const uint4*>(arguments.q + row_index * arguments.q_row_stride + head * kHeadDim)[reader.part()];
    widen_row(data, reader.q);
  }

  const int rank = blockIdx.x, ranks = gridDim.x;
  const int units = query.position / kUnitTokens + 1, groups = min(kGroups, (units + kWarps - 1) / kWarps);
  float* all_outputs = arguments.chains + head_index * kGroups * kHeadDim;
  float2* all_statistics =
      reinterpret_cast<float2*>(arguments.chains + static_cast<std::size_t>(gridDim.z) * query.shape.heads * kGroups * kHeadDim) + head_index * kGroups;
  for (int group = rank, round = 0; group < groups; group += ranks, ++round) {
    const int buffer = round & 1, first = group * kWarps;
    reader.start(first_maximum);
    for (int unit = first + warp; unit < units; unit += kSelectedChains) reader.add_unit(unit);
    reader.store(shared.chain_output[buffer][warp], &shared.chain_statistics[buffer][warp]);
    __syncthreads();
    if (warp != round % kWarps) continue;  // the next group is under way meanwhile
    const int chains = min(kWarps, units - first);
    Output output;
    const float2 statistics =
        combine<kHeadDim, kWarps, 4>(lane < chains ? shared.chain_statistics[buffer][lane] : make_float2(minus_infinity(), 0.0f), (1u << chains) - 1,
                                  [&](int k) { return shared.chain_output[buffer][k]; }, output, lane);
    output.store(ranks > 1 ? all_outputs + group * kHeadDim : shared.group_output[group], lane);
    if (lane == 0) (ranks > 1 ? all_statistics : shared.group_statistics)[group] = statistics;
  }
  let_next_kernel_begin();
  __syncthreads();
  if (warp != 0) return;
  if (ranks > 1 && !arrive_last(arguments.arrivals + head_index, ranks, lane)) return;
  const float* outputs = ranks > 1 ? all_outputs : shared.group_output[0];
  const float2* statistics = ranks > 1 ? all_statistics : shared.group_statistics;
  Output output;
  const float2 total = combine<kHeadDim, kGroups, 8>(lane < groups ? statistics[lane] : make_float2(minus_infinity(), 0.0f), (1u << groups) - 1,
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
    output.store_bf16(arguments.output + (static_cast<std::size_t>(row_index) * query.shape.heads + head) * kHeadDim, lane);
  } else {
    const float sum = arguments.reference.sum[state];
#pragma unroll
    for (int c = 0; c < Output::kOwn; ++c) output.values[c] = __fdiv_rn(output.values[c], sum);
    output.store(arguments.reference.c_ref + state * kHeadDim, lane);
    if (lane == 0) arguments.reference.mass[state] = __fdiv_rn(total.y, sum);
  }
}

// CTAs of one (row, head): the time of a CTA is that of its groups and of half a one for its start, and CTAs run `resident` at once.
inline int selected_cta_count(int pairs, int groups, int resident) {
  if (pairs > kMostSharedPairs) return 1;
  int best = 1;
  const auto cost = [&](int ctas) { return (pairs * ctas + resident - 1) / resident * (2 * ((groups + ctas - 1) / ctas) + 1); };
  for (int ctas = 2; ctas <= groups; ++ctas) {
    if (cost(ctas) < cost(best)) best = ctas;
  }
  return best;
}

template <int kHeadDim, bool kPacked, Purpose kPurpose>
void launch(const Arguments& arguments, int row_count, int max_length, cudaStream_t stream) {
  using Shared = SelectedShared<kHeadDim, kPacked, kPurpose>;
  constexpr int kBytes = sizeof(Shared);
  static_assert((kBytes + 1024) * Shared::kBlocksPerSm <= 228 * 1024);
  const auto kernel = selected_attention_kernel<kHeadDim, kPacked, kPurpose>;
  int device = 0, processors = 0;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));  // as decode_projections
  const int heads = arguments.kv.shape.heads, units = (max_length + kUnitTokens - 1) / kUnitTokens;
  const int ctas = selected_cta_count(heads * row_count, std::min(kGroups, (units + kWarps - 1) / kWarps), processors * Shared::kBlocksPerSm);
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(heads), static_cast<unsigned>(row_count));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = arguments.written_rows != nullptr ? 1 : 0;
  LOOPGAUGE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments));
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized::selected
