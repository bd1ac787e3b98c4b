// SPDX-License-Identifier: Apache-2.0
// The reader of selected keys behind sparse_correction and reference_contribution.
//
// About one key in ten is selected: a page holds six selected keys of a head. Many warps work at once, each on the keys of two pages (a unit), up to 16 in
// a pass, and none waits for another. What a pass reads is requested before the first of it is used (K rows of streams 3 and 4 when those of 1 and 2 have
// been, and parameters of groups behind those of the two pages when they are needed), and while it is on its way the warp finds the keys of its next unit
// and where their rows lie.
//
// Encoded rows are multiplied as integers, as in dense_attention.cuh: K against q * scale, V against weight * scale as fixed-point numbers, whose digits to
// base 256 are the columns of mma.sync. Sums of codes are exact.
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
enum Tensor : unsigned { kK, kV };  // as KvTensor

struct NoScratch {};

// Where the encoded rows of a unit lie.
struct UnitStarts {
  StreamStart rows[kUnitPages][2][kLoops];  // K, V
  std::uint64_t active[kUnitPages][kLoops];
  // Place of the page's first row in its group, how far that group is behind the first page's (2: elsewhere), how far the second page's is. Told apart by
  // address, which lies in one block or in two; at one distance the parameters are the same bytes, so no bit depends on where blocks lie.
  uchar4 groups[kUnitPages][kLoops];
};

// What a warp keeps of the keys that it works on.
template <int kHeadDim, Purpose kPurpose>
struct EncodedScratch {
  static constexpr bool kCorrection = kPurpose == Purpose::correction;
  static constexpr int kHalves = kHeadDim / kGroupSize;
  static constexpr int kGroupBytes = kHeadDim * 4;   // K parameters of one group
  static constexpr int kDigitBytes = kHeadDim + 16;  // of a column, 16 of which keep columns out of each other's banks
  alignas(16) unsigned char k_parameters[kCorrection ? kLoops : 1][2][kCorrection ? kGroupBytes : 16];  // of the groups of the two pages' first rows
  alignas(16) unsigned char v_rows[kLoops][kKeys * kHeadDim / 2];
  alignas(16) unsigned char folded[8][kCorrection ? kDigitBytes : 16];  // digits of q * scale: [group][digit][word of eight channels][even, odd][4]
  alignas(16) std::uint32_t fixed[kHalves][kLoops * kKeys];             // weight * scale, keys permuted by fixed_place
  alignas(16) std::uint8_t centers[kHalves][kLoops * kKeys];            // codes nearest to zero, likewise
  std::uint64_t rows[kCorrection ? 2 : 1][kLoops][kKeys];               // addresses of V and K rows; 0: the key has no row in the stream
};
template <int kHeadDim, Purpose kPurpose>
struct Bf16Scratch {
  alignas(16) unsigned char rows[kPurpose == Purpose::correction ? 2 : 1][kKeys * 2 * kHeadDim];  // V, K
  float weights[kKeys];
};
template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct KeyScratch {
  union {  // in turn
    std::conditional_t<kPacked, EncodedScratch<kHeadDim, kPurpose>, NoScratch> encoded;
    Bf16Scratch<kHeadDim, kPurpose> bf16;
  };
  std::conditional_t<kPacked, UnitStarts, NoScratch> starts[2];  // of two units in turn
  std::uint8_t keys[2][kUnitTokens];                             // positions in the unit, likewise
};

template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct SelectedShared {
  static constexpr int kBlocksPerSm = kPurpose == Purpose::correction ? 2 : 3;
  KeyScratch<kHeadDim, kPacked, kPurpose> scratch[kWarps];
  alignas(16) float chain_output[2][kWarps][kHeadDim];  // of two groups in turn
  alignas(16) float group_output[kGroups][kHeadDim];
  float2 chain_statistics[2][kWarps];                   // (maximum, sum)
  float2 group_statistics[kGroups];
  std::uint64_t full[2], empty[2];                      // of chain_output and chain_statistics
};

template <int kBytes>
__device__ __forceinline__ void copy_async_if(bool wanted, void* target, std::uint64_t source) {
  if constexpr (kBytes == 16) {
    asm volatile("{.reg .pred wanted; setp.ne.s32 wanted, %2, 0; @wanted cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(shared_address(target)), "l"(source),
                 "r"(static_cast<int>(wanted))
                 : "memory");
  } else {
    asm volatile("{.reg .pred wanted; setp.ne.s32 wanted, %2, 0; @wanted cp.async.ca.shared.global [%0], [%1], %3;}" ::"r"(shared_address(target)), "l"(source),
                 "r"(static_cast<int>(wanted)), "n"(kBytes)
                 : "memory");
  }
}
// Loads of K/V, which no kernel writes meanwhile (the next one in the stream waits for this one first): not volatile, the compiler may move them as far
// as their addresses allow, which come from shared memory. Otherwise one word stays as it is, more are anything.
__device__ __forceinline__ void load_if(bool wanted, std::uint64_t source, std::uint32_t& word) {
  asm("{.reg .pred wanted; setp.ne.s32 wanted, %2, 0; @wanted ld.global.u32 %0, [%1];}" : "+r"(word) : "l"(source), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void load_if(bool wanted, std::uint64_t source, std::uint32_t (&words)[2]) {
  asm("{.reg .pred wanted; setp.ne.s32 wanted, %3, 0; @wanted ld.global.v2.u32 {%0, %1}, [%2];}"
      : "=r"(words[0]), "=r"(words[1])
      : "l"(source), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void load_if(bool wanted, std::uint64_t source, std::uint32_t (&words)[4]) {
  asm("{.reg .pred wanted; setp.ne.s32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "l"(source), "r"(static_cast<int>(wanted)));
}
// Of the whole warp, but for the last kPending groups that were committed.
template <int kPending>
__device__ __forceinline__ void wait_copies_of_warp() {
  wait_copies<kPending>();
  __syncwarp();
}

__device__ const uint4 zero_row[4] = {};  // of K, for a planted fault

// One warp and its chain.
//
// Encoded rows: lane l serves key `own` = l / 4 + 8 (l % 2) of the pass and half l / 2 % 2, which is K or V, or one of the two groups of K parameters,
// or half of V's channels. Rows are multiplied as integers, as in dense_attention.cuh: the 16 keys are the rows of one tile of K for each stream, whose
// eight columns are the digits of q * scale of two groups; of V all streams are the depth of one product, whose columns are the digits of weight * scale
// of both halves. A key without a row in a stream has weight zero there.
//
// BF16 rows: kStepRows are read side by side, kRowLanes lanes each, of which lane part p has channels 8 p..8 p + 7, and kLaneRows one after the other by
// a lane. Places behind the last row read that row again, to no effect.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct ChainReader {
  using Scratch = KeyScratch<kHeadDim, kPacked, kPurpose>;
  using Encoded = EncodedScratch<kHeadDim, kPurpose>;
  static constexpr bool kCorrection = kPurpose == Purpose::correction;
  static constexpr unsigned kRowLanes = kHeadDim / 8;
  static constexpr unsigned kStepRows = 32 / kRowLanes;
  static constexpr unsigned kLaneRows = 4;
  static constexpr unsigned kBlockRows = kLaneRows * kStepRows;
  static constexpr unsigned kPayloadBytes = kHeadDim / 2, kBf16Bytes = kHeadDim * 2;
  static constexpr int kHalves = kHeadDim / kGroupSize;
  static constexpr int kKWords = kHeadDim / 32, kVWords = kHeadDim / 64;  // of a row, a lane
  static constexpr unsigned kFoldLanes = kHeadDim / 4;                    // four channels each

  const Query& query;
  const std::uint64_t* selected;  // masks of the (slot, layer, head)
  const float* logits;            // contribution: of the (row, head)
  Scratch& scratch;
  unsigned lane;
  const __nv_bfloat16* query_row = nullptr;
  float fold_q[4] = {};                    // q of the channels that the lane folds
  float output[8] = {};                    // once there are BF16 rows: of all
  float encoded_output[8 * kVWords] = {};  // of byte b of the lane's part of a row, channels 2 b and 2 b + 1: what the lane's two digits of the weights give
  float offset = 0.0f;                     // sum of weight * (minimum + center * scale) of the lane's key and half
  bool is_bf16 = false;                    // whether `output` holds the sums
  float maximum, sum = 0.0f;
  int buffer = 0;                                // of the unit at hand
  int unit_page = 0;                             // its first
  int prepared_total = 0, prepared_encoded = 0;  // keys of the unit in the other buffer
  float* chain_output = nullptr;
  std::uint64_t* target_empty = nullptr;
  std::uint32_t target_parity = 0;

  __device__ __forceinline__ unsigned part() const { return lane % kRowLanes; }
  __device__ __forceinline__ unsigned side() const { return lane / kRowLanes; }
  __device__ __forceinline__ unsigned row_of(unsigned first, unsigned u) const { return first + u * kStepRows + side(); }
  __device__ __forceinline__ unsigned own() const { return lane / 4 + 8 * (lane & 1); }
  __device__ __forceinline__ unsigned half() const { return lane / 2 % 2; }

  __device__ __forceinline__ void load_query(const __nv_bfloat16* row) {
    query_row = row;
    if constexpr (kPacked) {
      if (lane < kFoldLanes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) fold_q[i] = __bfloat162float(row[lane / 2 * 8 + 2 * i + lane % 2]);
      }
    }
  }

  // The next chain: its result goes to `target`, once phase `parity` of `empty`, if any, is over.
  __device__ __forceinline__ void start(float first_maximum, float* target, std::uint64_t* empty, std::uint32_t parity) {
    chain_output = target;
    target_empty = empty;
    target_parity = parity;
    for (float& value : output) value = 0.0f;
    for (float& value : encoded_output) value = 0.0f;
    offset = 0.0f;
    is_bf16 = !kPacked;
    maximum = first_maximum;
    sum = 0.0f;
  }
  __device__ __forceinline__ void claim_target() const {
    if (target_empty != nullptr) barrier_wait(target_empty, target_parity);
  }
  // Sums from now on are relative to `largest`.
  __device__ __forceinline__ void raise_maximum(float largest) {
    const float kept = expf(__fsub_rn(maximum, finite_reference(largest)));
    maximum = largest;
    sum = __fmul_rn(sum, kept);
    if (is_bf16) {
      for (float& value : output) value = __fmul_rn(value, kept);
    } else {
      for (float& value : encoded_output) value = __fmul_rn(value, kept);
      offset = __fmul_rn(offset, kept);
    }
  }
  // Of values that lanes l and l ^ 2 have in common.
  __device__ __forceinline__ static float key_max(float value) {
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      if (width != 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, width));
    }
    return value;
  }
  __device__ __forceinline__ static float key_sum(float value) {
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      if (width != 2) value = __fadd_rn(value, __shfl_xor_sync(~0u, value, width));
    }
    return value;
  }

  // --- encoded rows ---

  // Where the encoded rows of the unit's pages begin, one page, tensor and stream a lane. A page that does not exist is as the one before it.
  __device__ __forceinline__ void find_starts(int unit, UnitStarts& starts) const {
    const unsigned in_unit = lane / (2 * kLoops) % kUnitPages, stream = lane % kLoops;
    const int page = min(unit * kUnitPages + static_cast<int>(in_unit), query.position / kPageTokens);
    const KvTensor tensor = lane / kLoops % 2 == 0 ? KvTensor::k : KvTensor::v;
    const ActivityMap& map = query.maps[page];
    const StreamTile tile = stream_tile(query.shape, query.pages[page], map, query.layer, static_cast<int>(stream) + 1, tensor, query.head);
    const std::uint32_t rank = map.rank[stream];
    const std::uint64_t parameters = reinterpret_cast<std::uint64_t>(tile.parameters) +
                                     (tensor == KvTensor::k ? rank / kGroupSize * Encoded::kGroupBytes : rank * (kHalves * 4u));
    const std::uint64_t other = __shfl_xor_sync(~0u, parameters, 2 * kLoops), ahead = in_unit == 0 ? other - parameters : parameters - other;
    const std::uint32_t distance = ahead == 0 ? 0 : ahead == Encoded::kGroupBytes ? 1 : 2;
    if (lane >= kUnitPages * 2 * kLoops) return;
    starts.rows[in_unit][static_cast<int>(tensor)][stream] = {reinterpret_cast<std::uint64_t>(tile.payload) + rank * kPayloadBytes, parameters};
    if (tensor == KvTensor::k) {
      starts.active[in_unit][stream] = map.active[stream];
      starts.groups[in_unit][stream] = {static_cast<std::uint8_t>(rank % kGroupSize), static_cast<std::uint8_t>(in_unit == 0 ? 0 : distance),
                                         static_cast<std::uint8_t>(distance), 0};
    }
  }

  // Of the lane's key in each stream: whether its row is among the dots, and among the values, and its K parameters are those of the second group, or
  // of the group behind the first or the second.
  enum RowFlag { kCounted, kValued, kSecond, kLate };
  struct KeyRows {
    std::uint32_t flags = 0;
    std::uint32_t v_parameters[kLoops];
    __device__ __forceinline__ void set(RowFlag flag, int stream, bool value) { flags |= value ? 1u << (4 * stream + flag) : 0u; }
    __device__ __forceinline__ bool is(RowFlag flag, int stream) const { return (flags >> (4 * stream + flag)) & 1u; }
  };

  // Requests what the pass reads: K parameters and V rows to shared memory, K rows of the first two streams and V parameters to registers. Without branches,
  // so that what the streams wait for overlaps.
  __device__ __forceinline__ void request(unsigned key, bool present, KeyRows& rows, std::uint32_t (&k_words)[2][2][kKWords]) const {
    Encoded& encoded = scratch.encoded;
    const UnitStarts& starts = scratch.starts[buffer];
    const unsigned page = key / kPageTokens, bit = key % 32, below = (1u << bit) - 1;
    const bool upper = key % kPageTokens >= 32;
    unsigned row[kLoops];
    bool has_row[kLoops], counted[kLoops];
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
      const uint2 active = *reinterpret_cast<const uint2*>(&starts.active[page][stream]);
      const unsigned word = upper ? active.y : active.x;
      row[stream] = static_cast<unsigned>((upper ? __popc(active.x) : 0) + __popc(word & below));
      has_row[stream] = stream < query.history_loop() && present && ((word >> bit) & 1u);
      counted[stream] = has_row[stream];
    }
    if (query.fault == Fault::wrong_compact_rank || query.fault == Fault::absent_residual_as_code_zero) {
#pragma unroll
      for (int stream = 0; stream < kLoops; ++stream) counted[stream] = plant(key, present, has_row[stream], stream, row[stream]);
    }
    bool first[kLoops], second[kLoops];
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
      rows.set(kValued, stream, has_row[stream]);
      if (kCorrection || half() == kV) {
        const std::uint64_t address = starts.rows[page][half()][stream].payload + row[stream] * kPayloadBytes;
        const std::uint64_t planted = counted[stream] && half() == kK ? reinterpret_cast<std::uint64_t>(zero_row) : 0;
        encoded.rows[kV - half()][stream][own()] = has_row[stream] ? address : planted;
      }
      rows.v_parameters[stream] = 0;
      load_if(has_row[stream] && half() < kHalves, starts.rows[page][kV][stream].parameters + row[stream] * (kHalves * 4) + half() * 4,
              rows.v_parameters[stream]);
      if constexpr (kCorrection) {
        const uchar4 place = starts.groups[page][stream];
        const unsigned group = place.y + (place.x + row[stream]) / kGroupSize;
        const bool is_first = group == 0, is_second = !is_first && group == place.z, is_late = !is_first && !is_second;
        rows.set(kCounted, stream, counted[stream]);
        rows.set(kSecond, stream, is_second || (is_late && page != 0));
        rows.set(kLate, stream, is_late);
        first[stream] = __any_sync(~0u, counted[stream] && is_first);
        second[stream] = __any_sync(~0u, counted[stream] && is_second);
      }
    }
    if constexpr (kCorrection) {
#pragma unroll
      for (int stream = 0; stream < kLoops; ++stream) {
        copy_group(first[stream], encoded.k_parameters[stream][0], starts.rows[0][kK][stream].parameters);
        copy_group(second[stream], encoded.k_parameters[stream][1], starts.rows[1][kK][stream].parameters);
      }
    }
    commit_copies();
    __syncwarp();
    std::uint64_t addresses[kLoops][2];
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
#pragma unroll
      for (int i = 0; i < 2; ++i) addresses[stream][i] = encoded.rows[0][stream][lane / 4 + 8 * i];
    }
    if constexpr (kCorrection) {
      load_keys(0, k_words[0]);
      load_keys(1, k_words[1]);
    }
    const unsigned byte = lane % 4 * (kPayloadBytes / 4);
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_async_if<kPayloadBytes / 4>(addresses[stream][i] != 0, encoded.v_rows[stream] + (lane / 4 + 8 * i) * kPayloadBytes + byte,
                                         addresses[stream][i] + byte);
      }
    }
    commit_copies();
  }
  // The lane's words of two K rows of a stream; of a key without a row, anything.
  __device__ __forceinline__ void load_keys(int stream, std::uint32_t (&words)[2][kKWords]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint64_t address = scratch.encoded.rows[kV - kK][stream][lane / 4 + 8 * i];
      load_if(address != 0, address + lane % 4 * (kPayloadBytes / 4), words[i]);
    }
  }
  __device__ __forceinline__ void copy_group(bool wanted, unsigned char* target, std::uint64_t source) const {
    copy_async_if<16>(wanted && lane * 16 < Encoded::kGroupBytes, target + lane * 16, source + lane * 16);
  }
  // A planted fault moves the key's row, or counts keys without one. Returns whether the key is among the dots.
  __device__ __forceinline__ bool plant(unsigned key, bool present, bool has_row, int stream, unsigned& row) const {
    const ActivityMap& map = query.maps[query_page(key)];
    const int last = static_cast<int>(map.rows[stream]) - 1 - static_cast<int>(map.rank[stream]);
    const bool wrong = query.fault == Fault::wrong_compact_rank;
    row = static_cast<unsigned>(min(static_cast<int>(wrong ? key % kPageTokens : row), max(last, 0)));
    return has_row || (!wrong && present && map.rows[stream] > 0);
  }
  __device__ __forceinline__ int query_page(unsigned key) const { return unit_page + static_cast<int>(key / kPageTokens); }

  // q * scale of a group as fixed-point numbers, whose digits become columns 4 * group..4 * group + 3. Returns the lane's share of q·minimum; `down`
  // takes integer sums back.
  __device__ __forceinline__ float fold(int stream, int group, float& down) const {
    const unsigned slot = lane % kFoldLanes;
    const auto* parameters = reinterpret_cast<const uint4*>(scratch.encoded.k_parameters[stream][group]) + slot / 2 * 2;
    const uint4 low = parameters[0], high = parameters[1];
    const bool odd = lane & 1;
    const std::uint32_t words[4] = {odd ? low.y : low.x, odd ? low.w : low.z, odd ? high.y : high.x, odd ? high.w : high.z};
    float scaled[4], bias = 0.0f, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 minimum_scale = minimum_and_scale(words[i]);
      scaled[i] = __fmul_rn(fold_q[i], minimum_scale.y);  // exact: 8 + 11 bits
      bias = __fmaf_rn(fold_q[i], minimum_scale.x, bias);
      largest = fmaxf(largest, fabsf(scaled[i]));
    }
    const std::uint32_t largest_bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (largest_bits >= 0x7F800000u) bias = __int_as_float(0x7FFFFFFF);  // q * scale has no fixed-point form
    // Even channels as q * scale * 2^exponent, below 2^30; odd ones a sixteenth of that, because their codes are read times 16.
    const int exponent = min(max(29 - exponent_of(largest_bits), -100), 100);
    const float factor = power_of_two(odd ? exponent - 4 : exponent);
    down = power_of_two(-exponent);
    std::uint32_t digits[4];  // four signed bytes each
#pragma unroll
    for (int i = 0; i < 4; ++i) digits[i] = (static_cast<std::uint32_t>(__float2int_rn(__fmul_rn(scaled[i], factor))) + 0x00808080u) ^ 0x00808080u;
    std::uint32_t bytes[4];
    transpose_bytes(digits, bytes);
    if (lane < kFoldLanes) {
#pragma unroll
      for (int digit = 0; digit < 4; ++digit) *reinterpret_cast<std::uint32_t*>(scratch.encoded.folded[4 * group + digit] + lane * 4) = bytes[digit];
    }
    return bias;
  }
  // bytes[i] holds byte i of every word.
  __device__ __forceinline__ static void transpose_bytes(const std::uint32_t (&words)[4], std::uint32_t (&bytes)[4]) {
    const std::uint32_t ab_low = __byte_perm(words[0], words[1], 0x5140), ab_high = __byte_perm(words[0], words[1], 0x7362);
    const std::uint32_t cd_low = __byte_perm(words[2], words[3], 0x5140), cd_high = __byte_perm(words[2], words[3], 0x7362);
    bytes[0] = __byte_perm(ab_low, cd_low, 0x5410);
    bytes[1] = __byte_perm(ab_low, cd_low, 0x7632);
    bytes[2] = __byte_perm(ab_high, cd_high, 0x5410);
    bytes[3] = __byte_perm(ab_high, cd_high, 0x7632);
  }

  // The logit of the lane's key, without the score scale.
  __device__ __forceinline__ float encoded_logit(const KeyRows& rows, std::uint32_t (&k_words)[2][2][kKWords]) const {
    Encoded& encoded = scratch.encoded;
    float logit = 0.0f;
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
      if (stream >= query.history_loop()) break;
      const bool any = __any_sync(~0u, rows.is(kCounted, stream)), any_late = __any_sync(~0u, rows.is(kCounted, stream) && rows.is(kLate, stream));
#pragma unroll 1
      for (int late = any ? 0 : 2; late <= (any_late ? 1 : 0); ++late) {  // groups of the pages' first rows, then the next ones
        const bool counted = rows.is(kCounted, stream) && rows.is(kLate, stream) == (late != 0);
        const bool both = __any_sync(~0u, counted && rows.is(kSecond, stream));  // or the first group alone
        if (late != 0) {
#pragma unroll 1
          for (int group = 0; group < 2; ++group) {
            copy_group(__any_sync(~0u, counted && rows.is(kSecond, stream) == (group != 0)), encoded.k_parameters[stream][group],
                       scratch.starts[buffer].rows[group][kK][stream].parameters + Encoded::kGroupBytes);
          }
          commit_copies();
          wait_copies_of_warp<0>();
        }
        float bias[2] = {}, down[2] = {};
        if (both) {
          bias[0] = fold(stream, 0, down[0]);
          bias[1] = fold(stream, 1, down[1]);
        } else {
          bias[0] = fold(stream, 0, down[0]);
        }
        __syncwarp();
        std::uint32_t columns[2 * kKWords];
#pragma unroll
        for (int i = 0; i < 2 * kKWords; i += 4) {
          const uint4 data = *reinterpret_cast<const uint4*>(encoded.folded[lane / 4] + lane % 4 * (kKWords * 8) + i * 4);
          columns[i] = data.x, columns[i + 1] = data.y, columns[i + 2] = data.z, columns[i + 3] = data.w;
        }
        int sums[4] = {};
#pragma unroll
        for (int w = 0; w < kKWords; ++w) {
          const std::uint32_t top = k_words[stream % 2][0][w], bottom = k_words[stream % 2][1][w];
          multiply_bytes_signed(sums, top & kLowNibbles, bottom & kLowNibbles, top & kHighNibbles, bottom & kHighNibbles, columns[2 * w],
                                columns[2 * w + 1]);
        }
        // An even lane has digits 0 and 1 of its group, the odd lane beside it digits 2 and 3: of key lane / 4, and of key lane / 4 + 8.
        const bool odd = lane & 1;
        const int upper = sums[0] + sums[1] * 256, lower = sums[2] + sums[3] * 256;
        const int kept = odd ? lower : upper, other = __shfl_xor_sync(~0u, odd ? upper : lower, 1);
        float dot = __fmaf_rn(static_cast<float>(odd ? kept : other), 65536.0f, static_cast<float>(odd ? other : kept));
        dot = __fmul_rn(dot, half() == 0 ? down[0] : down[1]);
        if (query.fault == Fault::half_precision_stream_dots) dot = __half2float(__float2half_rn(dot));
        const float given = half() == 0 ? bias[1] : bias[0];
        const float own_bias = key_sum(__fadd_rn(half() == 0 ? bias[0] : bias[1], __shfl_xor_sync(~0u, given, 2)));
        if (counted && rows.is(kSecond, stream) == (half() != 0)) logit = __fadd_rn(logit, __fadd_rn(dot, own_bias));
        __syncwarp();
      }
      if (stream + 2 < kLoops) load_keys(stream + 2, k_words[stream % 2]);
    }
    return __fadd_rn(logit, __shfl_xor_sync(~0u, logit, 2));
  }

  // Adds weight * V of the pass's keys; V rows have come.
  __device__ __forceinline__ void add_encoded_values(const KeyRows& rows, float weight) {
    Encoded& encoded = scratch.encoded;
    const int streams = query.history_loop();
    float products[kLoops];
    std::uint32_t largest = 0;
    const unsigned place = fixed_place(static_cast<int>(own()));
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
      products[stream] = 0.0f;
      if (stream >= streams) break;
      const float key_weight = rows.is(kValued, stream) ? weight : 0.0f;
      const float2 minimum_scale = minimum_and_scale(rows.v_parameters[stream]);  // zeros without a row: 0 / 0 is taken for 0
      const float center = fminf(fmaxf(rintf(__fdividef(-minimum_scale.x, minimum_scale.y)), 0.0f), 15.0f);
      offset = __fmaf_rn(key_weight, __fmaf_rn(center, minimum_scale.y, minimum_scale.x), offset);
      products[stream] = __fmul_rn(key_weight, minimum_scale.y);
      largest = max(largest, __float_as_uint(products[stream]));
      if (half() < kHalves) encoded.centers[half()][stream * kKeys + place] = static_cast<std::uint8_t>(__float2uint_rn(center));
    }
    // One exponent a half: largest * 2^exponent < 2^32.
    const std::uint32_t first_largest = __reduce_max_sync(~0u, half() == 0 ? largest : 0u), second_largest = __reduce_max_sync(~0u, half() == 0 ? 0u : largest);
    const int first_exponent = min(31 - exponent_of(first_largest), 120);
    const int second_exponent = kHalves == 2 ? min(31 - exponent_of(second_largest), 120) : first_exponent;
    const int exponent = half() == 0 ? first_exponent : second_exponent;
    const float factor = power_of_two(exponent);
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
      if (stream >= streams) break;
      if (half() < kHalves) encoded.fixed[half()][stream * kKeys + place] = __float2uint_rn(__fmul_rn(products[stream], factor));
    }
    __syncwarp();

    const unsigned row_lane = lane / 4, in_quad = lane % 4;
    const unsigned channel_half = kHalves == 2 ? row_lane / 4 : 0;
    std::uint32_t columns[kLoops], centers[kLoops];
#pragma unroll
    for (int stream = 0; stream < kLoops; ++stream) {
      columns[stream] = centers[stream] = 0;
      if (stream >= streams) continue;
      const uint4 fixed = *reinterpret_cast<const uint4*>(&encoded.fixed[channel_half][stream * kKeys + 4 * in_quad]);
      const std::uint32_t selector = row_lane % 4 * 0x11u + 0x40u;
      columns[stream] = __byte_perm(__byte_perm(fixed.x, fixed.y, selector), __byte_perm(fixed.z, fixed.w, selector), 0x5410);
      centers[stream] = *reinterpret_cast<const std::uint32_t*>(&encoded.centers[channel_half][stream * kKeys + 4 * in_quad]);
    }
    int center_sums[4] = {};
    multiply_bytes(center_sums, centers[0], 0u, centers[1], 0u, columns[0], columns[1]);
    if (streams > 2) multiply_bytes(center_sums, centers[2], 0u, centers[3], 0u, columns[2], columns[3]);
    // A lane has two of the four digits of its column's half: their part of the sum is added here, the other lane's in store_encoded.
    const int column_exponent = kHalves == 2 && in_quad >= 2 ? second_exponent : first_exponent;
    const float even = power_of_two(in_quad % 2 == 0 ? -column_exponent : 16 - column_exponent), odd = __fmul_rn(even, 0.0625f);
#pragma unroll
    for (int w = 0; w < kVWords; ++w) {
      int sums[4][4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        sums[b][0] = -center_sums[0], sums[b][1] = -center_sums[1];
        sums[b][2] = -center_sums[0] * 16, sums[b][3] = -center_sums[1] * 16;
      }
#pragma unroll
      for (int pair = 0; pair < kLoops; pair += 2) {
        if (pair >= streams) break;
        std::uint32_t bytes[2][4] = {};  // byte b of four rows: channels 2 b and 2 b + 1 of the word
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (pair + i >= streams) break;
          std::uint32_t words[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            words[k] = *reinterpret_cast<const std::uint32_t*>(encoded.v_rows[pair + i] + (4 * k + in_quad) * kPayloadBytes + (row_lane * kVWords + w) * 4);
          }
          transpose_bytes(words, bytes[i]);
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          multiply_bytes(sums[b], bytes[0][b] & kLowNibbles, bytes[0][b] & kHighNibbles, bytes[1][b] & kLowNibbles, bytes[1][b] & kHighNibbles,
                         columns[pair], columns[pair + 1]);
        }
      }
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float* const target = encoded_output + 2 * (4 * w + b);
        target[0] = __fmaf_rn(static_cast<float>(sums[b][0] + sums[b][1] * 256), even, target[0]);
        target[1] = __fmaf_rn(static_cast<float>(sums[b][2] + sums[b][3] * 256), odd, target[1]);
      }
    }
  }

  __device__ __forceinline__ void store_encoded(float* target) const {
    const unsigned row_lane = lane / 4, in_quad = lane % 4;
    const float half_offset = key_sum(offset);
    const bool odd = lane & 1;
#pragma unroll
    for (int j = 0; j < 4 * kVWords; ++j) {
      const float kept = odd ? encoded_output[2 * j + 1] : encoded_output[2 * j], given = odd ? encoded_output[2 * j] : encoded_output[2 * j + 1];
      const float value = __fadd_rn(__fadd_rn(kept, __shfl_xor_sync(~0u, given, 1)), half_offset);
      if (in_quad / 2 == (kHalves == 2 ? row_lane / 4 : 0)) target[row_lane * (8 * kVWords) + 2 * j + odd] = value;
    }
  }

  // Adds the keys of a pass, which were requested.
  __device__ __forceinline__ void add_encoded_keys(int unit, unsigned key, bool present, const KeyRows& rows, std::uint32_t (&k_words)[2][2][kKWords]) {
    float weight = 0.0f;
    if constexpr (kCorrection) {
      wait_copies_of_warp<1>();
      const float logit = __fmul_rn(encoded_logit(rows, k_words), score_scale<kHeadDim>());
      raise_maximum(fmaxf(maximum, key_max(present ? logit : minus_infinity())));
      if (present) weight = expf(__fsub_rn(logit, finite_reference(maximum)));
    } else {
      if (present) weight = expf(__fsub_rn(logits[unit * kUnitTokens + static_cast<int>(key)], finite_reference(maximum)));
    }
    sum = __fadd_rn(sum, key_sum(weight));
    wait_copies_of_warp<0>();
    add_encoded_values(rows, weight);
    __syncwarp();  // the next copies come to the same places
  }

  // --- BF16 rows ---

  // Copies the rows of the keys, one a lane, `count` in all: K, then V.
  __device__ __forceinline__ void copy_bf16(int unit, unsigned key, unsigned count) const {
    std::uint64_t own = 0;
    if (lane < count) {
      const int page = unit * kUnitPages + static_cast<int>(key / kPageTokens), bit = static_cast<int>(key % kPageTokens);
      const int loop = page * kPageTokens + bit == query.position ? query.loop : query.history_loop();
      const int plane = resident_loop(query.maps[page], bit, loop);
      own = query.pages[page].bf16[plane - 1] + page_row_offset(query.shape, query.layer, KvTensor::k, query.head, bit) * 2;
    }
    constexpr unsigned kChunks = kBf16Bytes / 16, kRows = 32 / kChunks;
#pragma unroll
    for (unsigned tensor = kCorrection ? kK : kV; tensor <= kV; ++tensor) {
#pragma unroll 1
      for (unsigned first = 0; first < count; first += kRows) {
        const unsigned place = first + lane / kChunks;
        const std::uint64_t row = __shfl_sync(~0u, own, static_cast<int>(place % 32)) + (tensor == kV ? tensor_distance(query.shape) : 0);
        if (place < count) {
          copy_async<16>(shared_address(scratch.bf16.rows[kV - tensor] + place * kBf16Bytes + lane % kChunks * 16),
                         reinterpret_cast<const void*>(row + lane % kChunks * 16));
        }
      }
      commit_copies();
    }
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

  __device__ __forceinline__ void read_bf16(unsigned tensor, unsigned row, float (&values)[8]) const {
    const uint4 data = *reinterpret_cast<const uint4*>(scratch.bf16.rows[kV - tensor] + row * kBf16Bytes + part() * 16);
    widen_eight(data, values);
  }

  __device__ __forceinline__ float bf16_logit(unsigned count) const {
    float q[8];
    widen_eight(reinterpret_cast<const uint4*>(query_row)[part()], q);
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

  __device__ __forceinline__ void add_bf16_values(unsigned count, float weight) {
    __syncwarp();
    if (lane < kKeys) scratch.bf16.weights[lane] = weight;
    __syncwarp();
#pragma unroll 1
    for (unsigned first = 0; first < count; first += kBlockRows) {
#pragma unroll
      for (unsigned u = 0; u < kLaneRows; ++u) {
        float values[8];
        read_bf16(kV, min(row_of(first, u), count - 1), values);
        const bool present = row_of(first, u) < count;  // a value that is not finite must not meet a weight of zero that no key has
        const float p = present ? scratch.bf16.weights[row_of(first, u)] : 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) output[c] = __fmaf_rn(p, present ? values[c] : 0.0f, output[c]);
      }
    }
  }

  __device__ __forceinline__ void add_bf16_keys(int unit, unsigned begin, unsigned count) {
    const bool present = lane < count;
    const unsigned key = present ? scratch.keys[buffer][begin + lane] : 0;
    copy_bf16(unit, key, count);
    float weight = 0.0f;
    if constexpr (kCorrection) {
      wait_copies_of_warp<1>();
      const float logit = __fmul_rn(bf16_logit(count), score_scale<kHeadDim>());
      raise_maximum(fmaxf(maximum, warp_max(present ? logit : minus_infinity())));
      if (present) weight = expf(__fsub_rn(logit, finite_reference(maximum)));
    } else {
      if (present) weight = expf(__fsub_rn(logits[unit * kUnitTokens + static_cast<int>(key)], finite_reference(maximum)));
    }
    sum = __fadd_rn(sum, warp_sum(weight));
    wait_copies_of_warp<0>();
    add_bf16_values(count, weight);
    __syncwarp();  // the next copies come to the same places
  }

  // Lists the keys of a unit and finds their pages' rows, in the other buffer.
  __device__ __forceinline__ void prepare(int unit) {
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
    prepared_total = uniform(total);
    if constexpr (kPacked) {  // pages ascend, so these are the first keys
      unsigned encoded = total;
      if (query.frontier < (unit + 1) * kUnitTokens) {
        encoded = 0;
#pragma unroll
        for (int i = 0; i < kUnitPages; ++i) {
          encoded += static_cast<unsigned>(__popcll(masks[i] & page_mask(0, 0, query.encoded_rows(first_page + i))));
        }
      }
      prepared_encoded = uniform(encoded);
      if (prepared_encoded > 0) find_starts(unit, scratch.starts[buffer ^ 1]);
    }
    unsigned before = 0;
#pragma unroll
    for (int i = 0; i < 2 * kUnitPages; ++i) {
      const auto word = static_cast<std::uint32_t>(i % 2 == 0 ? masks[i / 2] : masks[i / 2] >> 32);
      if ((word >> lane) & 1u) scratch.keys[buffer ^ 1][before + __popc(word & ((1u << lane) - 1))] = static_cast<std::uint8_t>(32 * i + lane);
      before += static_cast<unsigned>(__popc(word));
    }
    __syncwarp();
  }

  // Adds the unit that was prepared, and prepares unit `next`, if any (not negative), while the first rows are on their way.
  __device__ __forceinline__ void add_unit(int unit, int next) {
    buffer ^= 1;
    unit_page = unit * kUnitPages;
    const int total = prepared_total, encoded_total = kPacked ? prepared_encoded : 0;
    bool is_prepared = next < 0;
#pragma unroll 1
    for (int begin = 0;; begin += kKeys) {
      const bool more = begin < encoded_total;
      bool present = false;
      unsigned key = 0;
      KeyRows rows;
      std::uint32_t k_words[2][2][kKWords];  // of streams that alternate
      if constexpr (kPacked) {
        if (more) {
          present = static_cast<int>(own()) < encoded_total - begin;
          key = present ? scratch.keys[buffer][begin + own()] : 0;
          request(key, present, rows, k_words);
        }
      }
      if (!is_prepared) {
        prepare(next);
        is_prepared = true;
      }
      if (!more) break;
      if constexpr (kPacked) add_encoded_keys(unit, key, present, rows, k_words);
    }
    if (encoded_total == total) return;
    if constexpr (kPacked) {
      if (!is_bf16) {  // and no encoded rows follow
        claim_target();
        store_encoded(chain_output);
        __syncwarp();
        if (side() == 0) {
#pragma unroll
          for (int c = 0; c < 8; ++c) output[c] = chain_output[8 * part() + c];
        }
        is_bf16 = true;
      }
    }
#pragma unroll 1
    for (int begin = encoded_total; begin < total; begin += kKeys) add_bf16_keys(unit, begin, min(total - begin, static_cast<int>(kKeys)));
  }

  __device__ __forceinline__ void store(float2* chain_statistics) {
    claim_target();
    if (lane == 0) *chain_statistics = make_float2(maximum, sum);
    if constexpr (kPacked) {
      if (!is_bf16) {
        store_encoded(chain_output);
        return;
      }
    }
    // What the lanes of a row hold of the same channels is one sum.
#pragma unroll
    for (int width = 16; width >= static_cast<int>(kRowLanes); width /= 2) {
#pragma unroll
      for (float& value : output) value = __fadd_rn(value, __shfl_xor_sync(~0u, value, width));
    }
    if (lane < kRowLanes) {
      reinterpret_cast<float4*>(chain_output)[2 * lane] = make_float4(output[0], output[1], output[2], output[3]);
      reinterpret_cast<float4*>(chain_output)[2 * lane + 1] = make_float4(output[4], output[5], output[6], output[7]);
    }
  }
};

// grid (CTAs of one row and head, heads, rows), kThreads threads, SelectedShared as dynamic shared memory.
template <int kHeadDim, bool kPacked, Purpose kPurpose>
__global__ void __launch_bounds__(kThreads, SelectedShared<kHeadDim, kPacked, kPurpose>::kBlocksPerSm)
    selected_attention_kernel(const __grid_constant__ Arguments arguments) {
  using Output = Channels<kHeadDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectedShared<kHeadDim, kPacked, kPurpose>*>(memory);
  const int warp = uniform(static_cast<int>(threadIdx.x / 32)), lane = threadIdx.x % 32;
  if (threadIdx.x < 2) {
    barrier_init(&shared.full[threadIdx.x], kThreads);
    barrier_init(&shared.empty[threadIdx.x], 32);
  }
  __syncthreads();
  const int head = blockIdx.y;
  int row_index = blockIdx.z, layer = arguments.layer;
  if constexpr (kPurpose == Purpose::contribution) {
    layer += row_index / arguments.rows_of_layer;
    row_index %= arguments.rows_of_layer;
  }
  QueryRow row = arguments.rows[row_index];
  row.request = uniform(row.request);
  row.position = uniform(row.position);
  row.loop = uniform(row.loop);
  row.encoded_frontier = uniform(row.encoded_frontier);
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
    reader.load_query(arguments.q + row_index * arguments.q_row_stride + head * kHeadDim);
  }

  const int rank = blockIdx.x, ranks = gridDim.x;
  const int units = query.position / kUnitTokens + 1, groups = min(kGroups, (units + kWarps - 1) / kWarps);
  float* all_outputs = arguments.chains + head_index * kGroups * kHeadDim;
  float2* all_statistics =
      reinterpret_cast<float2*>(arguments.chains + static_cast<std::size_t>(gridDim.z) * query.shape.heads * kGroups * kHeadDim) + head_index * kGroups;
  // Into where the group of a round lies. That of the round before is combined by one warp when it is through with the next: none waits for the slowest.
  const auto combine_group = [&](int round) {
    const int buffer = round & 1, group = rank + round * ranks, chains = min(kWarps, units - group * kWarps);
    barrier_wait(&shared.full[buffer], round >> 1 & 1);
    Output output;
    const float2 statistics =
        combine<kHeadDim, kWarps, 4>(lane < chains ? shared.chain_statistics[buffer][lane] : make_float2(minus_infinity(), 0.0f), (1u << chains) - 1,
                                  [&](int k) { return shared.chain_output[buffer][k]; }, output, lane);
    output.store(ranks > 1 ? all_outputs + group * kHeadDim : shared.group_output[group], lane);
    if (lane == 0) (ranks > 1 ? all_statistics : shared.group_statistics)[group] = statistics;
    __syncwarp();
    barrier_arrive(&shared.empty[buffer]);
  };
  int round = 0;
  if (rank * kWarps + warp < units) reader.prepare(rank * kWarps + warp);
  for (int group = rank; group < groups; group += ranks, ++round) {
    const int buffer = round & 1, following = group + ranks < groups ? (group + ranks) * kWarps + warp : units;
    reader.start(first_maximum, shared.chain_output[buffer][warp], round < 2 ? nullptr : &shared.empty[buffer], (round >> 1 & 1) ^ 1);
    for (int unit = group * kWarps + warp; unit < units; unit += kSelectedChains) {
      const int next = unit + kSelectedChains < units ? unit + kSelectedChains : following;
      reader.add_unit(unit, next < units ? next : -1);
    }
    reader.store(&shared.chain_statistics[buffer][warp]);
    __syncwarp();
    barrier_arrive(&shared.full[buffer]);
    if (round > 0 && warp == (round - 1) % kWarps) combine_group(round - 1);
  }
  if (round > 0 && warp == (round - 1) % kWarps) combine_group(round - 1);
  let_next_kernel_begin();
  __syncthreads();
  if (warp != 0) return;
  // On their way while this CTA arrives.
  Output o_ref, c_ref;
  float divisor = 0.0f, mass = 0.0f;
  if constexpr (kPurpose == Purpose::correction) {
    o_ref = Output::load(arguments.reference.o_ref + state * kHeadDim, lane);
    c_ref = Output::load(arguments.reference.c_ref + state * kHeadDim, lane);
    mass = arguments.reference.mass[state];
  } else {
    divisor = arguments.reference.sum[state];
  }
  if (ranks > 1 && !arrive_last(arguments.arrivals + head_index, ranks, lane)) return;
  const float* outputs = ranks > 1 ? all_outputs : shared.group_output[0];
  const float2* statistics = ranks > 1 ? all_statistics : shared.group_statistics;
  Output output;
  const float2 total = combine<kHeadDim, kGroups, kGroups>(lane < groups ? statistics[lane] : make_float2(minus_infinity(), 0.0f), (1u << groups) - 1,
                                                  [&](int k) { return outputs + k * kHeadDim; }, output, lane);
  if constexpr (kPurpose == Purpose::correction) {
#pragma unroll
    for (int c = 0; c < Output::kOwn; ++c) {
      const float unselected = __fsub_rn(o_ref.values[c], c_ref.values[c]);
      output.values[c] = __fadd_rn(unselected, __fmul_rn(mass, __fdiv_rn(output.values[c], total.y)));
    }
    output.store_bf16(arguments.output + (static_cast<std::size_t>(row_index) * query.shape.heads + head) * kHeadDim, lane);
  } else {
#pragma unroll
    for (int c = 0; c < Output::kOwn; ++c) output.values[c] = __fdiv_rn(output.values[c], divisor);
    output.store(arguments.reference.c_ref + state * kHeadDim, lane);
    if (lane == 0) arguments.reference.mass[state] = __fdiv_rn(total.y, divisor);
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
  let_share_multiprocessors(kernel, kBytes);
  const int heads = arguments.kv.shape.heads, units = (max_length + kUnitTokens - 1) / kUnitTokens;
  const int ctas = selected_cta_count(heads * row_count, std::min(kGroups, (units + kWarps - 1) / kWarps), processors * Shared::kBlocksPerSm);
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(heads), static_cast<unsigned>(row_count));
  launch_in_turn(arguments.written_rows != nullptr, kernel, grid, kThreads, kBytes, stream, arguments);
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized::selected
