// SPDX-License-Identifier: Apache-2.0
// The reader of selected keys behind sparse_correction and reference_contribution.
//
// About one key in ten is selected: a page holds six selected keys of a head. Many warps work at once, each on the keys of some pages (a unit, see
// unit_pages), up to 16 in a pass, 32 where encoded V alone is read, and none waits for another. What a pass reads is requested before the first of it is
// used (but for parameters of groups behind those of the pages' first rows, when they are needed), and while it is on its way the warp finds the keys of its
// next unit and where their rows lie.
//
// Encoded rows are multiplied as integers, as in dense_attention.cuh: K against q * scale, V against weight * scale as fixed-point numbers, whose digits to
// base 256 are the columns of mma.sync. Sums of codes are exact, those of K over all streams at once.
//
// The order is fixed by absolute positions alone: the units of one residue modulo kSelectedChains, ascending, are the chain of one warp, which rescales
// what it has as softmax does; eight chains, ascending, are a group, and groups are combined ascending.
#pragma once

#include "optimized/ops/dense_attention.cuh"

namespace loopgauge::optimized::selected {

using namespace dense;

enum class Purpose {
  correction,    // softmax over the selected keys; O = (O_ref - C_ref) + m * L
  contribution,  // weights from the logits row and the reference maximum; m and C_ref
};

inline constexpr int kShortPositions = 4096;  // units of a correction whose row is at a lower position are single pages, so that more warps share it
// Pages of a unit. A pass of a contribution takes the encoded keys of more.
constexpr int most_unit_pages(Purpose purpose, bool packed) { return packed && purpose == Purpose::contribution ? 4 : 2; }
// `encoded`: the row reads encoded positions. By the row, not by the kernel: one that may read encoded rows gives a row without any the bits of the other.
LOOPGAUGE_HOST_DEVICE int unit_pages(Purpose purpose, bool encoded, int position) {
  return encoded && purpose == Purpose::correction && position < kShortPositions ? 1 : encoded && purpose == Purpose::contribution ? 4 : 2;
}
inline constexpr int kWarps = 8;    // chains of a group
inline constexpr int kGroups = 16;  // each of which falls to one CTA
inline constexpr int kSelectedChains = kWarps * kGroups;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kKeys = 16;          // whose rows a warp has copied at a time
inline constexpr int kPreparedUnits = 2;       // whose starts are found at once
inline constexpr int kStartPlaces = 3;         // of these and the unit at hand
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

template <bool kCorrection>
struct alignas(16) RowAddresses {
  std::uint64_t v, k;  // k: of zeros, when the key has no row in the stream, or one whose parameters come later (late_rows)
};
template <>
struct RowAddresses<false> {
  std::uint64_t v;
};

// Where the encoded rows of a unit lie.
template <Purpose kPurpose>
struct UnitStarts {
  static constexpr int kPages = most_unit_pages(kPurpose, true);
  StreamStart rows[kPages][kPurpose == Purpose::correction ? 2 : 1][kLoops];  // K, V; or V
  std::uint64_t active[kPages][kLoops];
  std::uint8_t places[kPages][kLoops];  // correction: of the pages' first rows in their groups of K parameters
};

// What a warp keeps of the keys that it works on.
template <int kHeadDim, Purpose kPurpose>
struct EncodedScratch {
  static constexpr bool kCorrection = kPurpose == Purpose::correction;
  static constexpr int kHalves = kHeadDim / kGroupSize;
  static constexpr int kGroupBytes = kHeadDim * 4;   // K parameters of one group
  static constexpr int kDigitBytes = kHeadDim + 16;  // of a column, 16 of which keep columns out of each other's banks
  // K parameters of two pages, then the digits of q * scale: [stream][page][digit][eight channels][even, odd][4].
  alignas(16) unsigned char folded[kCorrection ? kLoops : 1][kCorrection ? 8 : 1][kCorrection ? kDigitBytes : 16];
  alignas(16) unsigned char v_rows[kLoops][kKeys * kHeadDim / 2];
  union {  // in turn
    struct {
      alignas(16) std::uint32_t fixed[kHalves][kLoops * kKeys];          // weight * scale, keys permuted by value_place
      alignas(16) std::uint8_t centers[kKeys / 4][kLoops][kHalves][4];  // codes nearest to zero, likewise
    };
    RowAddresses<kCorrection> rows[kLoops][kKeys + 2];
  };
  std::uint16_t late_rows[kCorrection ? kLoops : 1][kKeys];  // 256 * page + row, where K parameters are those of the group behind that of the page's first row
};
template <int kHeadDim, Purpose kPurpose>
struct Bf16Scratch {
  alignas(16) unsigned char rows[kPurpose == Purpose::correction ? 2 : 1][kKeys * 2 * kHeadDim];  // V, K
  float weights[kKeys];
  alignas(16) float4 sums[32];  // where encoded rows came before: of each lane, between units, half of it; the rest is in the place of sums of encoded rows
};
template <int kHeadDim, bool kPacked, Purpose kPurpose>
struct KeyScratch {
  union {  // in turn
    std::conditional_t<kPacked, EncodedScratch<kHeadDim, kPurpose>, NoScratch> encoded;
    Bf16Scratch<kHeadDim, kPurpose> bf16;
  };
  std::conditional_t<kPacked, UnitStarts<kPurpose>, NoScratch> starts[kStartPlaces];  // of units in turn, found for two at once
  std::uint8_t keys[2][most_unit_pages(kPurpose, kPacked) * kPageTokens];                                // positions in the unit, of two in turn
  alignas(16) float4 sums[kPacked ? 32 : 1];                                     // weight * V of encoded rows: four channels a lane
  float2 offsets[kPacked ? 32 : 1];                                              // sums of weight * (minimum + center * scale) of the lane's rows, by half
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
// as their addresses allow, which come from shared memory.
__device__ __forceinline__ void load_words(std::uint64_t source, std::uint32_t (&words)[1]) { asm("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(source)); }
__device__ __forceinline__ void load_words(std::uint64_t source, std::uint32_t (&words)[2]) {
  asm("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(source));
}
__device__ __forceinline__ void load_words(std::uint64_t source, std::uint32_t (&words)[4]) {
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(source));
}
// The number of the thread in its warp, read anew: what depends on it is not kept in registers meanwhile.
__device__ __forceinline__ unsigned lane_id() {
  unsigned lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// Four matrices of 8 x 8 pairs of bytes, whose rows lie at the addresses of lanes 0..7, 8..15, ..; transposed: lane l has column l / 4 of rows 2 (l % 4) and
// 2 (l % 4) + 1 of each.
__device__ __forceinline__ void load_transposed(const void* row, std::uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}
// Of the whole warp, but for the last kPending groups that were committed.
template <int kPending>
__device__ __forceinline__ void wait_copies_of_warp() {
  wait_copies<kPending>();
  __syncwarp();
}

__device__ alignas(64) const uint4 zero_row[4] = {};  // K, and parameters of V, of keys without a row; aligned as rows are, see inside()

// One warp and its chain.
//
// Encoded rows: lane l finds the rows of keys l / 4 and l / 4 + 8 of the pass in stream l % 4, and has the weight of key `own` = l / 4 + 8 (l % 2). The 16
// keys are the rows of one tile of K, whose depth are the channels of all streams and whose eight columns are the digits of q * scale of two groups of
// parameters, one a page; of V all streams are the depth of one product, whose columns are the digits of weight * scale of both halves. A key without a
// row in a stream has zeros for K there, and weight zero for V. In a pass of 32 keys (is_wide) keys 16..31 are in the places of streams 3 and 4.
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
  using Starts = UnitStarts<kPurpose>;
  static constexpr int kUnitPages = most_unit_pages(kPurpose, kPacked), kTensors = kCorrection ? 2 : 1;
  static constexpr int kKWords = kHeadDim / 32;         // of a row, a lane
  static constexpr unsigned kFoldLanes = kHeadDim / 8;  // of a half warp, which folds the parameters of a page: eight channels each

  const Query& query;
  const std::uint64_t* selected;  // masks of the (slot, layer, head)
  const float* logits;            // contribution: of the (row, head)
  Scratch& scratch;
  unsigned lane;
  int pages;          // of a unit
  int units, stride;  // of the row; from a unit of the last chain of a group that the warp has to the first of the next
  const __nv_bfloat16* query_row = nullptr;
  float output[8] = {};                    // once there are BF16 rows: of all
  bool is_bf16 = false;                    // whether `output` holds sums of BF16 rows, and with them of all
  float maximum, sum = 0.0f;
  int buffer = 0;                                // of the unit at hand
  int unit_page = 0;                             // its first
  int prepared = 0, starts_place = 0;            // how many units were prepared; where the starts of the unit at hand are
  int prepared_total = 0, prepared_encoded = 0;  // keys of the unit in the other buffer
  float* chain_output = nullptr;
  std::uint64_t* target_empty = nullptr;
  std::uint32_t target_parity = 0;

  __device__ __forceinline__ unsigned part() const { return lane % kRowLanes; }
  __device__ __forceinline__ unsigned side() const { return lane / kRowLanes; }
  __device__ __forceinline__ unsigned row_of(unsigned first, unsigned u) const { return first + u * kStepRows + side(); }
  __device__ __forceinline__ unsigned own() const { return lane / 4 + 8 * (lane & 1); }
  __device__ __forceinline__ unsigned half() const { return lane / 2 % 2; }

  __device__ __forceinline__ void load_query(const __nv_bfloat16* row) { query_row = row; }

  // The next chain: its result goes to `target`, once phase `parity` of `empty`, if any, is over.
  __device__ __forceinline__ void start(float first_maximum, float* target, std::uint64_t* empty, std::uint32_t parity) {
    chain_output = target;
    target_empty = empty;
    target_parity = parity;
    if constexpr (!kPacked) {
      for (float& value : output) value = 0.0f;
    }
    if constexpr (kPacked) {
      if (has_sums()) own_sums() = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      scratch.offsets[lane] = make_float2(0.0f, 0.0f);
    }
    is_bf16 = !kPacked;
    maximum = first_maximum;
    sum = 0.0f;
  }
  __device__ __forceinline__ void claim_target() const {
    if (target_empty != nullptr) barrier_wait(target_empty, target_parity);
  }
  // Sums from now on are relative to `largest`: those that were are to be multiplied by what is returned.
  __device__ __forceinline__ float raise_maximum(float largest) {
    const float kept = expf(__fsub_rn(maximum, finite_reference(largest)));
    maximum = largest;
    sum = __fmul_rn(sum, kept);
    return kept;
  }
  // Of what the lane adds up, channels of half `half()`: see store_encoded.
  __device__ __forceinline__ bool has_sums() const { return kHalves == 2 || half() == 0; }
  __device__ __forceinline__ float4& own_sums() const { return scratch.sums[half() * 16 + lane / 4 * 2 + lane % 2]; }
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

  __device__ __forceinline__ int first_position(int unit) const { return unit * pages * kPageTokens; }
  // The warp's unit after this one, in its chain or the first of its next; -1: none.
  __device__ __forceinline__ int unit_after(int unit) const {
    if (unit + kSelectedChains < units) return unit + kSelectedChains;
    const int first = unit % kSelectedChains + stride;
    return first < min(units, kSelectedChains) ? first : -1;
  }

  // Where the encoded rows of the pages of this unit and the next begin, one page, tensor and stream a lane. A page that does not exist is as the one
  // before it.
  __device__ __forceinline__ void find_starts(int unit) const {
    static_assert(kPreparedUnits * kUnitPages * kTensors * kLoops == 32);
    const unsigned lane = lane_id();
    const unsigned in_unit = lane / (kTensors * kLoops) % kUnitPages, stream = lane % kLoops, later = lane / 16;
    const int next = unit_after(unit);
    const int page = min((later == 0 || next < 0 ? unit : next) * pages + static_cast<int>(in_unit), query.position / kPageTokens);
    const KvTensor tensor = kCorrection && lane / kLoops % 2 == 0 ? KvTensor::k : KvTensor::v;
    const ActivityMap& map = query.maps[page];
    const StreamTile tile = stream_tile(query.shape, query.pages[page], map, query.layer, static_cast<int>(stream) + 1, tensor, query.head);
    const std::uint32_t rank = map.rank[stream];
    const std::uint64_t parameters = reinterpret_cast<std::uint64_t>(tile.parameters) +
                                     (tensor == KvTensor::k ? rank / kGroupSize * Encoded::kGroupBytes : rank * (kHalves * 4u));
    Starts& starts = scratch.starts[(prepared + static_cast<int>(later)) % kStartPlaces];
    starts.rows[in_unit][kCorrection ? static_cast<int>(tensor) : 0][stream] = {reinterpret_cast<std::uint64_t>(tile.payload) + rank * kPayloadBytes,
                                                                                parameters};
    if (!kCorrection || tensor == KvTensor::k) {
      starts.active[in_unit][stream] = map.active[stream];
      if constexpr (kCorrection) starts.places[in_unit][stream] = static_cast<std::uint8_t>(rank % kGroupSize);
    }
  }

  // Of the lane's two rows, of keys lane / 4 and lane / 4 + 8 in stream lane % 4: whether they are among the values and among the dots, whether their key is
  // in the second page, and whether their K parameters are those of the group behind that of the page's first row.
  enum RowFlag { kValued, kCounted, kSecond, kLate };
  struct KeyRows {
    std::uint32_t flags = 0;
    std::uint32_t groups = 0;  // of the warp: bit stream + 4 * page + 8 * late: whether a key is counted with that group
    __device__ __forceinline__ void set(RowFlag flag, int i, bool value) { flags |= value ? 1u << (2 * flag + i) : 0u; }
    __device__ __forceinline__ bool is(RowFlag flag, int i) const { return (flags >> (2 * flag + i)) & 1u; }
    std::uint32_t v_parameters[2][kHalves];  // zeros without a row
  };
  static constexpr std::uint32_t kNoRow = 0xFFFF;
  using KWords = std::uint32_t[kLoops][2][kKWords];

  // Streams whose K rows are multiplied at once: with a planted fault of single dots, one.
  __device__ __forceinline__ bool one_by_one() const { return query.fault == Fault::half_precision_stream_dots; }
  // A pass has places for 16 keys in four streams: a contribution, which reads two, has 32 keys in them, the latter ones as streams 3 and 4.
  __device__ __forceinline__ static constexpr bool is_wide() { return !kCorrection; }
  __device__ __forceinline__ static constexpr unsigned pass_keys() { return is_wide() ? 2 * kKeys : kKeys; }
  // Whether a pass of so many keys may have rows in that stream, or in its place. Corrections are of loops 3 and 4.
  __device__ __forceinline__ bool reads(int stream, int count) const {
    return is_wide() ? stream < 2 || count > static_cast<int>(kKeys) : stream < 3 || stream < query.history_loop();
  }
  __device__ __forceinline__ bool reads(int stream) const { return reads(stream, 0); }

  // Requests what the pass reads: V rows to shared memory, everything else to registers. Without branches, so that what the streams wait for overlaps.
  __device__ __forceinline__ void request(int begin, int count, KeyRows& rows, KWords& k_words) const {
    const unsigned lane = lane_id();
    Encoded& encoded = scratch.encoded;
    const Starts& starts = scratch.starts[starts_place];
    const unsigned place = lane % 4, stream = is_wide() ? lane % 2 : place, first_key = is_wide() ? lane / 4 + lane / 2 % 2 * kKeys : lane / 4;
    const auto zeros = reinterpret_cast<std::uint64_t>(zero_row);
    std::uint32_t late_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool present = static_cast<int>(first_key) + 8 * i < count;
      const unsigned key = present ? scratch.keys[buffer][begin + static_cast<int>(first_key) + 8 * i] : 0;
      const unsigned page = key / kPageTokens, bit = key % 32;
      const bool upper = key % kPageTokens >= 32;
      const uint2 active = *reinterpret_cast<const uint2*>(&starts.active[page][stream]);
      const unsigned word = upper ? active.y : active.x;
      unsigned row = static_cast<unsigned>((upper ? __popc(active.x) : 0) + __popc(word & ((1u << bit) - 1)));
      const bool has_row = static_cast<int>(stream) < query.history_loop() && present && ((word >> bit) & 1u);
      bool counted = has_row;
      if (query.fault == Fault::wrong_compact_rank || query.fault == Fault::absent_residual_as_code_zero) {
        counted = plant(key, present, has_row, static_cast<int>(stream), row);
      }
      rows.set(kValued, i, has_row);
      const StreamStart v_start = starts.rows[page][kTensors - 1][stream];
      RowAddresses<kCorrection> addresses{v_start.payload + row * kPayloadBytes};
      load_words(has_row ? v_start.parameters + row * (kHalves * 4) : zeros, rows.v_parameters[i]);
      if constexpr (kCorrection) {
        const bool late = starts.places[page][stream] + row >= kGroupSize;
        const std::uint64_t address = has_row ? starts.rows[page][kK][stream].payload + row * kPayloadBytes : zeros;
        addresses.k = late ? zeros : address;
        late_rows[i] = late && has_row ? page * 256 + row : kNoRow;
        rows.set(kCounted, i, counted);
        rows.set(kSecond, i, page != 0);
        rows.set(kLate, i, late);
        rows.groups |= counted ? 1u << (stream + 4 * page + (late ? 8 : 0)) : 0;
      }
      encoded.rows[place][lane / 4 + 8 * i] = addresses;
    }
    if constexpr (kCorrection) {
      rows.groups = __reduce_or_sync(~0u, rows.groups);
      if ((rows.groups >> 8) != 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) encoded.late_rows[stream][lane / 4 + 8 * i] = static_cast<std::uint16_t>(late_rows[i]);
      }
      copy_groups(rows.groups & (one_by_one() ? 0x11u : 0xFFu), 0);
    }
    std::uint32_t v_rows[2];  // of the four lanes of a key, one bit each
#pragma unroll
    for (int i = 0; i < 2; ++i) v_rows[i] = __ballot_sync(~0u, rows.is(kValued, i)) >> (lane & 28);
    __syncwarp();
    const unsigned chunk = lane % 4 * (kPayloadBytes / 4);
    unsigned char* const target = encoded.v_rows[0] + lane / 4 * kPayloadBytes + (chunk ^ swizzle(lane / 4));
#pragma unroll
    for (int s = 0; s < kLoops; ++s) {
      if (!reads(s, count)) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowAddresses<kCorrection> addresses = encoded.rows[s][lane / 4 + 8 * i];
        if constexpr (kCorrection) load_words(inside(s == 0 || !one_by_one() ? addresses.k : zeros, chunk), k_words[s][i]);
        copy_async_if<kPayloadBytes / 4>((v_rows[i] & (1u << s)) != 0, target + (s * kKeys + 8 * i) * kPayloadBytes, inside(addresses.v, chunk));
      }
    }
    commit_copies();
  }
  // The address of a byte of a payload row: rows do not cross a multiple of 2^32.
  __device__ __forceinline__ static std::uint64_t inside(std::uint64_t row, unsigned byte) {
    return (row & 0xFFFFFFFF00000000u) | (static_cast<std::uint32_t>(row) + byte);
  }
  // Of the 16 bytes in a V row in shared memory, by key, so that eight rows lie in different banks.
  __device__ __forceinline__ static unsigned swizzle(unsigned key) { return kHalves == 2 ? (key / 2 % 4) * 16 : (key / 4 % 2) * 16; }
  // K parameters to where the digits of their products will be: 16 bytes and 16 others of the lane's page.
  __device__ __forceinline__ void copy_groups(std::uint32_t wanted, unsigned behind) const {
    const unsigned lane = lane_id(), page = lane / 16, part = lane % 16 * 16;
    const std::uint32_t of_page = wanted >> (4 * page);
#pragma unroll
    for (int s = 0; s < kLoops; ++s) {
      if (!reads(s)) break;
      const std::uint64_t source = scratch.starts[starts_place].rows[page][kK][s].parameters + behind + part;
      unsigned char* const target = scratch.encoded.folded[s][0] + page * Encoded::kGroupBytes + part;
#pragma unroll
      for (int i = 0; i < Encoded::kGroupBytes; i += 256) copy_async_if<16>((of_page & (1u << s)) != 0, target + i, source + i);
    }
    commit_copies();
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

  // bytes[i] holds byte i of every word.
  __device__ __forceinline__ static void transpose_bytes(const std::uint32_t (&words)[4], std::uint32_t (&bytes)[4]) {
    const std::uint32_t ab_low = __byte_perm(words[0], words[1], 0x5140), ab_high = __byte_perm(words[0], words[1], 0x7362);
    const std::uint32_t cd_low = __byte_perm(words[2], words[3], 0x5140), cd_high = __byte_perm(words[2], words[3], 0x7362);
    bytes[0] = __byte_perm(ab_low, cd_low, 0x5410);
    bytes[1] = __byte_perm(ab_low, cd_low, 0x7632);
    bytes[2] = __byte_perm(ab_high, cd_high, 0x5410);
    bytes[3] = __byte_perm(ab_high, cd_high, 0x7632);
  }
  // Signed digits to base 256 of fixed-point numbers.
  __device__ __forceinline__ static void digits_of(const int (&numbers)[4], std::uint32_t (&digits)[4]) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = static_cast<std::uint32_t>(numbers[i]) + 0x00808080u;
    transpose_bytes(words, digits);
#pragma unroll
    for (int i = 0; i < 3; ++i) digits[i] ^= 0x80808080u;
  }

  // The logit of the lane's key, without the score scale.
  __device__ __forceinline__ float encoded_logit(const KeyRows& rows, KWords& k_words) const {
    Encoded& encoded = scratch.encoded;
    const unsigned lane = lane_id(), quarter = lane % 4;
    float logit = 0.0f;  // of key `own`
    const bool is_odd = lane & 1, is_upper = lane & 2;
    bool late = false;
    std::uint32_t streams = one_by_one() ? 1 : (1u << kLoops) - 1;
#pragma unroll 1
    while (true) {
      // Lanes 16 * page + i: channels 8 * i..8 * i + 7.
      float q[8], biases[kLoops], largest = 0.0f, scaled[kLoops][8];
      widen_eight(reinterpret_cast<const uint4*>(query_row)[lane % kFoldLanes], q);
      const std::uint32_t of_page = ((late ? rows.groups >> 8 : rows.groups) & (streams * 0x11u)) >> (lane / 16 * 4);
#pragma unroll
      for (int s = 0; s < kLoops; ++s) {
        biases[s] = 0.0f;
        if (!reads(s)) break;
        float of_stream = 0.0f, of_bytes[2];
        const auto* const parameters = reinterpret_cast<const uint4*>(encoded.folded[s][0] + lane / 16 * Encoded::kGroupBytes + lane % kFoldLanes * 32);
        const uint4 low = parameters[0], high = parameters[1];
        const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float2 minimum_scale = minimum_and_scale(words[c]);
          scaled[s][c] = __fmul_rn(q[c], minimum_scale.y);  // exact: 8 + 11 bits
          of_bytes[c % 2] = c < 2 ? __fmul_rn(q[c], minimum_scale.x) : __fmaf_rn(q[c], minimum_scale.x, of_bytes[c % 2]);
          of_stream = fmaxf(of_stream, fabsf(scaled[s][c]));
        }
        biases[s] = __fadd_rn(of_bytes[0], of_bytes[1]);
        const bool finite = of_stream < __int_as_float(0x7F800000);
        if (!finite) biases[s] = __int_as_float(0x7FFFFFFF);  // q * scale has no fixed-point form
        if (kFoldLanes < 16 && lane % 16 >= kFoldLanes) biases[s] = 0.0f;
        const bool wanted = (of_page & (1u << s)) != 0;  // otherwise parameters are anything
        largest = fmaxf(largest, finite && wanted ? of_stream : 0.0f);
      }
      // q * scale * 2^exponent, below 2^30. One exponent a page.
      const bool second = lane >= 16;
      const std::uint32_t largest_bits = __float_as_uint(largest);
      const int first_exponent = scale_exponent(__reduce_max_sync(~0u, second ? 0u : largest_bits));
      const int second_exponent = scale_exponent(__reduce_max_sync(~0u, second ? largest_bits : 0u));
      const float factor = power_of_two(second ? second_exponent : first_exponent);
      __syncwarp();  // digits come to where parameters were read
#pragma unroll
      for (int s = 0; s < kLoops; ++s) {
        if (!reads(s)) break;
        int even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          even[i] = __float2int_rn(__fmul_rn(scaled[s][2 * i], factor));
          odd[i] = __float2int_rn(__fmul_rn(scaled[s][2 * i + 1], factor));
        }
        std::uint32_t lower[4], upper[4];
        digits_of(even, lower);
        digits_of(odd, upper);
        if (kFoldLanes == 16 || lane % 16 < kFoldLanes) {
#pragma unroll
          for (int digit = 0; digit < 4; ++digit) {
            *reinterpret_cast<uint2*>(encoded.folded[s][lane / 16 * 4 + digit] + lane % 16 * 8) = make_uint2(lower[digit], upper[digit]);
          }
        }
      }
      __syncwarp();
      int sums[2][4] = {};
#pragma unroll
      for (int s = 0; s < kLoops; ++s) {
        if (!reads(s)) break;
        std::uint32_t columns[2 * kKWords];
#pragma unroll
        for (int i = 0; i < 2 * kKWords; i += 4) {
          const uint4 data = *reinterpret_cast<const uint4*>(encoded.folded[s][lane / 4] + quarter * (kKWords * 8) + i * 4);
          columns[i] = data.x, columns[i + 1] = data.y, columns[i + 2] = data.z, columns[i + 3] = data.w;
        }
#pragma unroll
        for (int w = 0; w < kKWords; ++w) {
          const std::uint32_t top = k_words[s][0][w], bottom = k_words[s][1][w];
          multiply_bytes_signed(sums[w % 2], top & kLowNibbles, bottom & kLowNibbles, top >> 4 & kLowNibbles, bottom >> 4 & kLowNibbles, columns[2 * w],
                                columns[2 * w + 1]);
        }
      }
      // Sums of q * minimum: lanes 16 * page + 4 * i + stream.
      const float of_first = __fadd_rn(is_odd ? biases[1] : biases[0], __shfl_xor_sync(~0u, is_odd ? biases[0] : biases[1], 1));
      const float of_second = __fadd_rn(is_odd ? biases[3] : biases[2], __shfl_xor_sync(~0u, is_odd ? biases[2] : biases[3], 1));
      float bias = __fadd_rn(is_upper ? of_second : of_first, __shfl_xor_sync(~0u, is_upper ? of_first : of_second, 2));
      bias = __fadd_rn(bias, __shfl_xor_sync(~0u, bias, 4));
      bias = __fadd_rn(bias, __shfl_xor_sync(~0u, bias, 8));
      // A lane has two of the four digits of page quarter / 2: of keys lane / 4 and lane / 4 + 8. 4 streams * 128 codes * 15 * 128 * 257 < 2^31.
      const float down = power_of_two((is_odd ? 16 : 0) - (is_upper ? second_exponent : first_exponent));
      float dots[2];
      std::uint32_t counted[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int two = sums[0][2 * i] + sums[1][2 * i] + (sums[0][2 * i + 1] + sums[1][2 * i + 1]) * 256;
        dots[i] = rows.is(kSecond, i) == is_upper ? __fmul_rn(static_cast<float>(two), down) : 0.0f;
        counted[i] = __ballot_sync(~0u, rows.is(kCounted, i) && rows.is(kLate, i) == late && (streams >> quarter & 1u) != 0);
      }
      float dot = __fadd_rn(is_odd ? dots[1] : dots[0], __shfl_xor_sync(~0u, is_odd ? dots[0] : dots[1], 1));
      dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, 2));
      if (one_by_one()) dot = __half2float(__float2half_rn(dot));
      // The first stream has most of both, which cancel where a key is small.
      const std::uint32_t of_key = (is_odd ? counted[1] : counted[0]) >> (lane & 28);
      const int bias_lane = rows.is(kSecond, is_odd ? 1 : 0) ? 16 : 0;
#pragma unroll
      for (int s = 0; s < kLoops; ++s) {
        if (!reads(s)) break;
        const float of_stream = __shfl_sync(~0u, bias, bias_lane + s);
        if ((of_key & (1u << s)) != 0) dot = __fadd_rn(dot, of_stream);
      }
      logit = __fadd_rn(logit, dot);
      // The next streams, if they come one by one; then groups behind those of the pages' first rows.
      if (one_by_one() && streams != 1u << (kLoops - 1)) {
        streams <<= 1;
      } else {
        if (late || (rows.groups >> 8) == 0) break;
        late = true;
        streams = one_by_one() ? 1 : (1u << kLoops) - 1;
      }
      __syncwarp();
      copy_groups((late ? rows.groups >> 8 : rows.groups) & (streams * 0x11u), late ? Encoded::kGroupBytes : 0);
#pragma unroll
      for (int s = 0; s < kLoops; ++s) {
        if (!reads(s)) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned key = lane / 4 + 8 * i;
          std::uint64_t address = encoded.rows[s][key].k;
          if (late) {
            const std::uint32_t row = encoded.late_rows[s][key];
            address = row == kNoRow ? reinterpret_cast<std::uint64_t>(zero_row)
                                    : scratch.starts[starts_place].rows[row / 256][kK][s].payload + row % 256 * kPayloadBytes;
          }
          load_words(inside((streams >> s & 1u) != 0 ? address : reinterpret_cast<std::uint64_t>(zero_row), quarter * (kPayloadBytes / 4)), k_words[s][i]);
        }
      }
      wait_copies_of_warp<0>();
    }
    return logit;
  }
  __device__ __forceinline__ static int scale_exponent(std::uint32_t largest_bits) { return min(max(29 - exponent_of(largest_bits), -100), 100); }

  // Where keys 0..7 lie among 16 weights and centers, so that what load_transposed gives meets them; key + 8 two places later.
  __device__ __forceinline__ static unsigned value_place(unsigned key) { return key / 2 * 4 + key % 2; }

  // Adds weight * V of the pass's keys to `kept` times the sums; V rows have come.
  __device__ __forceinline__ void add_encoded_values(const KeyRows& rows, int count, float weight, float kept) {
    const unsigned lane = lane_id();
    Encoded& encoded = scratch.encoded;
    const bool is_odd = lane & 1;
    const float other = __shfl_xor_sync(~0u, weight, 1);
    const unsigned stream = lane % 4, place = value_place(lane / 4);
    float products[2][kHalves];
    std::uint32_t largest[kHalves] = {};
    float2& kept_offsets = scratch.offsets[lane];
    float offsets[2] = {kept_offsets.x, kept_offsets.y};
    if constexpr (kCorrection) {
      for (float& value : offsets) value = __fmul_rn(value, kept);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float key_weight = !rows.is(kValued, i) ? 0.0f : is_odd == (i != 0) ? weight : other;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float2 minimum_scale = minimum_and_scale(rows.v_parameters[i][h]);  // zeros without a row: 0 / 0 is taken for 0
        // Its last bits are the code, rounded as rintf rounds.
        const float shifted = __fadd_rn(fminf(fmaxf(__fdividef(-minimum_scale.x, minimum_scale.y), 0.0f), 15.0f), kWhole);
        const float center = __fsub_rn(shifted, kWhole);
        offsets[h] = __fmaf_rn(key_weight, __fmaf_rn(center, minimum_scale.y, minimum_scale.x), offsets[h]);
        products[i][h] = __fmul_rn(key_weight, minimum_scale.y);
        largest[h] = max(largest[h], __float_as_uint(products[i][h]));
        encoded.centers[place / 4][stream][h][place % 4 + 2 * i] = static_cast<std::uint8_t>(__float_as_uint(shifted));
      }
    }
    kept_offsets = make_float2(offsets[0], offsets[1]);
    int exponents[kHalves];  // largest * 2^exponent < 2^32
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      exponents[h] = min(31 - exponent_of(__reduce_max_sync(~0u, largest[h])), 120);
      const float factor = power_of_two(exponents[h]);
#pragma unroll
      for (int i = 0; i < 2; ++i) encoded.fixed[h][stream * kKeys + place + 2 * i] = __float2uint_rn(__fmul_rn(products[i][h], factor));
    }
    __syncwarp();

    // Lane 4 * n + k has digit n % 4 of the weights of half n / 4, of places 4 * k..4 * k + 3.
    const unsigned row_lane = lane / 4, in_quad = lane % 4;
    const unsigned channel_half = kHalves == 2 ? row_lane / 4 : 0, selector = row_lane % 4 * 0x11u + 0x40u;
    std::uint32_t columns[kLoops], centers[kLoops][kHalves];
#pragma unroll
    for (int s = 0; s < kLoops; ++s) {
      columns[s] = 0;
      for (int h = 0; h < kHalves; ++h) centers[s][h] = *reinterpret_cast<const std::uint32_t*>(encoded.centers[in_quad][s][h]);
      if (!reads(s, count)) continue;
      const uint4 fixed = *reinterpret_cast<const uint4*>(&encoded.fixed[channel_half][s * kKeys + 4 * in_quad]);
      columns[s] = __byte_perm(__byte_perm(fixed.x, fixed.y, selector), __byte_perm(fixed.z, fixed.w, selector), 0x5410);
    }
    // Rows 0..7 of a product of centers are those of the first half, the others those of the second.
    int center_sums[4] = {};
#pragma unroll
    for (int pair = 0; pair < kLoops; pair += 2) {
      if (!reads(pair, count)) break;
      multiply_bytes(center_sums, centers[pair][0], centers[pair][kHalves - 1], centers[pair + 1][0], centers[pair + 1][kHalves - 1], columns[pair],
                     columns[pair + 1]);
    }
    // Rows 0..7 of the other products are bytes, even channel + 16 * odd channel, rows 8..15 their upper nibbles, 16 * odd channel. Of chunks of 16 bytes j and
    // j + 2, of the two halves, what the columns of a half give is added.
    constexpr int kChunks = kPayloadBytes / 16, kSums = 4;
    int sums[kSums][4] = {};
    // Rows of the matrices: of keys 0..7 and 8..15 of a chunk, then of the next.
    const unsigned key = lane % 16;
    const unsigned char* const row = encoded.v_rows[0] + key * kPayloadBytes;
    const unsigned place_in_row = (lane / 16 * 16) ^ swizzle(key);
#pragma unroll
    for (int pair = 0; pair < kLoops; pair += 2) {
      if (!reads(pair, count)) break;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        std::uint32_t bytes[2][2][2] = {};  // of four keys: bytes 2 n and 2 n + 1 of two chunks
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!reads(pair + i, count)) break;
          std::uint32_t words[4];
          load_transposed(row + (pair + i) * kKeys * kPayloadBytes + (place_in_row ^ (chunk * 16)), words);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            bytes[i][c][0] = __byte_perm(words[2 * c], words[2 * c + 1], 0x6420);
            bytes[i][c][1] = __byte_perm(words[2 * c], words[2 * c + 1], 0x7531);
          }
        }
        const bool of_half = kHalves == 1 || channel_half == static_cast<unsigned>(chunk / 2);
        const std::uint32_t first = of_half ? columns[pair] : 0, second = of_half ? columns[pair + 1] : 0;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            multiply_bytes(sums[c * 2 + b], bytes[0][c][b], bytes[0][c][b] & kHighNibbles, bytes[1][c][b], bytes[1][c][b] & kHighNibbles, first, second);
          }
        }
      }
    }
    // A lane has two of the four digits of its half, the lane beside it the others. 4 streams * 16 keys * 255 * 255 * 257 < 2^31.
    const bool second_half = kHalves == 2 && in_quad >= 2;
    const int exponent = second_half ? exponents[kHalves - 1] : exponents[0];
    const float even = power_of_two(in_quad % 2 == 0 ? -exponent : 16 - exponent), odd = __fmul_rn(even, 0.0625f);
    const int center = second_half ? center_sums[2] + center_sums[3] * 256 : center_sums[0] + center_sums[1] * 256;
    float added[kSums];
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int both = sums[j][0] + sums[j][1] * 256, upper = sums[j][2] + sums[j][3] * 256;
      const float low = __fmul_rn(static_cast<float>(both - upper - center), even);
      const float high = __fmul_rn(static_cast<float>(upper - center * 16), odd);
      added[j] = __fadd_rn(is_odd ? high : low, __shfl_xor_sync(~0u, is_odd ? low : high, 1));
    }
    if (has_sums()) {
      float4& target = own_sums();
      const float4 before = target;
      target = kCorrection ? make_float4(__fmaf_rn(before.x, kept, added[0]), __fmaf_rn(before.y, kept, added[1]), __fmaf_rn(before.z, kept, added[2]),
                                         __fmaf_rn(before.w, kept, added[3]))
                           : make_float4(__fadd_rn(before.x, added[0]), __fadd_rn(before.y, added[1]), __fadd_rn(before.z, added[2]),
                                         __fadd_rn(before.w, added[3]));
    }
  }
  static constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number

  // Sum j of a lane is that of byte 2 * (lane / 4) + j % 2 of chunk j / 2 of the half.
  __device__ __forceinline__ void store_encoded(float* target) const {
    const float2 kept_offsets = scratch.offsets[lane];
    const float offsets[2] = {kept_offsets.x, kept_offsets.y};
    float half_offset = offsets[0];
    if constexpr (kHalves == 2) {
      const float kept = half() == 0 ? offsets[0] : offsets[1], given = half() == 0 ? offsets[1] : offsets[0];
      half_offset = key_sum(__fadd_rn(kept, __shfl_xor_sync(~0u, given, 2)));
    } else {
      half_offset = warp_sum(half_offset);
    }
    if (!has_sums()) return;
    const float4 own = own_sums();
    float* const first = target + half() * kGroupSize + lane / 4 * 4 + lane % 2;
    first[0] = __fadd_rn(own.x, half_offset), first[2] = __fadd_rn(own.y, half_offset);
    first[32] = __fadd_rn(own.z, half_offset), first[34] = __fadd_rn(own.w, half_offset);
  }

  // Adds the keys of a pass, which were requested.
  __device__ __forceinline__ void add_encoded_keys(int unit, int begin, int count, const KeyRows& rows, KWords& k_words) {
    float weight = 0.0f, kept = 1.0f;
    const unsigned own_key = is_wide() ? own() + half() * kKeys : own();
    const bool present = static_cast<int>(own_key) < count;
    if constexpr (kCorrection) {
      wait_copies_of_warp<1>();
      const float logit = __fmul_rn(encoded_logit(rows, k_words), score_scale<kHeadDim>());
      kept = raise_maximum(fmaxf(maximum, key_max(present ? logit : minus_infinity())));
      if (present) weight = expf(__fsub_rn(logit, finite_reference(maximum)));
    } else {
      if (present) {
        const int position = first_position(unit) + scratch.keys[buffer][begin + static_cast<int>(own_key)];
        weight = expf(__fsub_rn(logits[position], finite_reference(maximum)));
      }
    }
    sum = __fadd_rn(sum, is_wide() ? warp_sum(weight) : key_sum(weight));
    wait_copies_of_warp<0>();
    add_encoded_values(rows, count, weight, kept);
    __syncwarp();  // the next copies come to the same places
  }

  // --- BF16 rows ---

  // Copies the rows of the keys, one a lane, `count` in all: K, then V.
  __device__ __forceinline__ void copy_bf16(int unit, unsigned key, unsigned count) const {
    std::uint64_t own = 0;
    if (lane < count) {
      const int page = unit * pages + static_cast<int>(key / kPageTokens), bit = static_cast<int>(key % kPageTokens);
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
      const float kept = raise_maximum(fmaxf(maximum, warp_max(present ? logit : minus_infinity())));
      for (float& value : output) value = __fmul_rn(value, kept);
      if (present) weight = expf(__fsub_rn(logit, finite_reference(maximum)));
    } else {
      if (present) weight = expf(__fsub_rn(logits[first_position(unit) + static_cast<int>(key)], finite_reference(maximum)));
    }
    sum = __fadd_rn(sum, warp_sum(weight));
    wait_copies_of_warp<0>();
    add_bf16_values(count, weight);
    __syncwarp();  // the next copies come to the same places
  }

  // The first `count` bits of a word.
  __device__ __forceinline__ static std::uint32_t low_bits(int count) { return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1; }
  // Words of the masks of a unit, one a lane; a page that does not exist has none.
  __device__ __forceinline__ std::uint32_t load_masks(int unit) const {
    const unsigned lane = lane_id();
    const int page = unit * pages + static_cast<int>(lane / 2);
    return static_cast<int>(lane) < 2 * pages && page * kPageTokens <= query.position ? reinterpret_cast<const std::uint32_t*>(selected + page)[lane % 2] : 0;
  }

  // Lists the keys of a unit and finds their pages' rows, in the other buffer. `word`: of load_masks.
  __device__ __forceinline__ void prepare(int unit, std::uint32_t word) {
    const unsigned lane = lane_id();
    const std::uint32_t keys = word & low_bits(query.position + 1 - first_position(unit) - 32 * static_cast<int>(lane));
    prepared_total = uniform(static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(__popc(keys)))));
    if constexpr (kPacked) {  // pages ascend, so these are the first keys
      prepared_encoded = prepared_total;
      if (query.frontier < first_position(unit + 1)) {
        const int page = unit * pages + static_cast<int>(lane / 2 % kUnitPages);
        const std::uint32_t encoded = keys & low_bits(query.encoded_rows(page) - 32 * static_cast<int>(lane % 2));
        prepared_encoded = uniform(static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(__popc(encoded)))));
      }
      if (prepared % kPreparedUnits == 0) find_starts(unit);
      ++prepared;
    }
    unsigned before = 0;
#pragma unroll
    for (int i = 0; i < 2 * kUnitPages; ++i) {
      const std::uint32_t of_word = __shfl_sync(~0u, keys, i);
      if ((of_word >> lane) & 1u) scratch.keys[buffer ^ 1][before + __popc(of_word & ((1u << lane) - 1))] = static_cast<std::uint8_t>(32 * i + lane);
      before += static_cast<unsigned>(__popc(of_word));
    }
    __syncwarp();
  }

  // Adds the unit that was prepared, and prepares the next one, if any, while the first rows are on their way.
  __device__ __forceinline__ void add_unit(int unit) {
    const int next = unit_after(unit);
    buffer ^= 1;
    starts_place = (prepared - 1) % kStartPlaces;
    unit_page = unit * pages;
    const int total = prepared_total, encoded_total = kPacked ? prepared_encoded : 0;
    bool is_prepared = next < 0;
    const std::uint32_t next_masks = is_prepared ? 0 : load_masks(next);
#pragma unroll 1
    for (int begin = 0;; begin += static_cast<int>(pass_keys())) {
      const bool more = begin < encoded_total;
      KeyRows rows;
      std::uint32_t k_words[kLoops][2][kKWords];
      if constexpr (kPacked) {
        if (more) request(begin, encoded_total - begin, rows, k_words);
      }
      if (!is_prepared) {
        prepare(next, next_masks);
        is_prepared = true;
      }
      if (!more) break;
      if constexpr (kPacked) add_encoded_keys(unit, begin, encoded_total - begin, rows, k_words);
    }
    if (encoded_total == total) return;
    if constexpr (kPacked) {
      if (!is_bf16) {  // and no encoded rows follow
        claim_target();
        store_encoded(chain_output);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < 8; ++c) output[c] = side() == 0 ? chain_output[8 * part() + c] : 0.0f;
        is_bf16 = true;
      } else {
        keep_output(false);
      }
    }
#pragma unroll 1
    for (int begin = encoded_total; begin < total; begin += kKeys) add_bf16_keys(unit, begin, min(total - begin, static_cast<int>(kKeys)));
    if constexpr (kPacked) keep_output(true);
  }

  // Between units of BF16 rows the sums are in shared memory where rows may be encoded, for which there would be fewer registers.
  __device__ __forceinline__ void keep_output(bool stored) {
    const unsigned lane = lane_id();
    if (stored) {
      scratch.sums[lane] = make_float4(output[0], output[1], output[2], output[3]);
      scratch.bf16.sums[lane] = make_float4(output[4], output[5], output[6], output[7]);
    } else {
      const float4 first = scratch.sums[lane], second = scratch.bf16.sums[lane];
      output[0] = first.x, output[1] = first.y, output[2] = first.z, output[3] = first.w;
      output[4] = second.x, output[5] = second.y, output[6] = second.z, output[7] = second.w;
    }
  }

  __device__ __forceinline__ void store(float2* chain_statistics) {
    claim_target();
    if (lane == 0) *chain_statistics = make_float2(maximum, sum);
    if constexpr (kPacked) {
      if (!is_bf16) {
        store_encoded(chain_output);
        return;
      }
      keep_output(false);
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
                                                  static_cast<unsigned>(lane),
                                                  unit_pages(kPurpose, kPacked && query.frontier > 0, query.position),
                                                  query.position / (unit_pages(kPurpose, kPacked && query.frontier > 0, query.position) * kPageTokens) + 1,
                                                  static_cast<int>(gridDim.x) * kWarps};
  wait_for_previous_kernel();
  float first_maximum = minus_infinity();
  if constexpr (kPurpose == Purpose::contribution) first_maximum = arguments.reference.maximum[state];
  if constexpr (kPurpose == Purpose::correction) {
    reader.load_query(arguments.q + row_index * arguments.q_row_stride + head * kHeadDim);
  }

  const int rank = blockIdx.x, ranks = gridDim.x;
  const int units = reader.units, groups = min(kGroups, (units + kWarps - 1) / kWarps);
  float* all_outputs = arguments.chains + head_index * kGroups * kHeadDim;
  float2* all_statistics =
      reinterpret_cast<float2*>(arguments.chains + static_cast<std::size_t>(gridDim.z) * query.shape.heads * kGroups * kHeadDim) + head_index * kGroups;
  // Into where the group of a round lies. That of the round before is combined by one warp when it is through with the next: none waits for the slowest.
  const auto combine_group = [&](int round) {
    const int buffer = round & 1, group = rank + round * ranks, chains = min(kWarps, units - group * kWarps);
    barrier_wait(&shared.full[buffer], round >> 1 & 1);
    Output output;
    const float2 statistics =
        combine<kHeadDim, kWarps, 2>(lane < chains ? shared.chain_statistics[buffer][lane] : make_float2(minus_infinity(), 0.0f), (1u << chains) - 1,
                                  [&](int k) { return shared.chain_output[buffer][k]; }, output, lane);
    output.store(ranks > 1 ? all_outputs + group * kHeadDim : shared.group_output[group], lane);
    if (lane == 0) (ranks > 1 ? all_statistics : shared.group_statistics)[group] = statistics;
    __syncwarp();
    barrier_arrive(&shared.empty[buffer]);
  };
  int round = 0;
  if (const int unit = rank * kWarps + warp; unit < units) reader.prepare(unit, reader.load_masks(unit));
  for (int group = rank; group < groups; group += ranks, ++round) {
    const int buffer = round & 1;
    reader.start(first_maximum, shared.chain_output[buffer][warp], round < 2 ? nullptr : &shared.empty[buffer], (round >> 1 & 1) ^ 1);
    for (int unit = group * kWarps + warp; unit < units; unit += kSelectedChains) reader.add_unit(unit);
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
  const int heads = arguments.kv.shape.heads, last = max_length - 1;
  // Of the longest row, or of the longest with units of one page.
  const int units = std::max(last / (unit_pages(kPurpose, kPacked, last) * kPageTokens),
                             std::min(last, kShortPositions - 1) / (unit_pages(kPurpose, kPacked, 0) * kPageTokens)) + 1;
  const int ctas = selected_cta_count(heads * row_count, std::min(kGroups, (units + kWarps - 1) / kWarps), processors * Shared::kBlocksPerSm);
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(heads), static_cast<unsigned>(row_count));
  launch_in_turn(arguments.written_rows != nullptr, kernel, grid, kThreads, kBytes, stream, arguments);
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized::selected
