// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/decode_projections.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "optimized/ops/elementary.cuh"
#include "optimized/ops/programmatic_launch.cuh"
#include "optimized/ops/row_norm.cuh"
#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kMostHeadDim = 128;
constexpr int kWarps = 8;             // shares of K, as in linear_split_k
constexpr int kThreads = kWarps * 32; // that multiply; one more warp fetches what other blocks have made
constexpr int kChunk = 32;            // K values of one rounded addition: two tensor-core steps
constexpr int kStageChunks = 4;       // chunks that a warp requests at a time, of the 16 weight rows of a tile
constexpr int kTileRows = 16;         // weight rows, that is outputs, of a tile: the extent of a tensor-core step
constexpr int kStageRowBytes = kStageChunks * kChunk * 2;
constexpr int kStageBytes = kTileRows * kStageRowBytes;
constexpr int kFewStages = 3;         // of a ring, where rows are few
constexpr int kLeastStages = 2;
constexpr int kMostStages = 4;
constexpr int kFewPieces = 2;         // of kMostPieces
constexpr int kHeldChunks = 2 * kStageChunks;  // of the rows' K values that a thread keeps in registers
constexpr int kRowPadding = 32;       // elements: neighbouring rows begin half of the banks apart
constexpr int kMostPieces = 8;        // 16-byte pieces of the rows that a thread norms

enum class Input { rows, normed, added_and_normed };
enum class Output { rows, activated, rotated_and_appended };

struct Phase {
  Input input;
  Output output;
  const Bfloat16* weight;               // [out, in]
  int in, out;
  int each, more;                       // activated: gates of a block, and how many blocks have one more
  const Bfloat16* x;                    // input rows: [rows, in]; added_and_normed: what is normed and added
  Bfloat16* y;
  Bfloat16* new_residual;               // added_and_normed
  int first_norm;                       // index of the norm weights among those in shared memory
};

struct Launch {
  Phase phases[4];
  int phase_count;
  const Bfloat16* norms[4];             // in the order of the phases that use them
  int norm_count;
  DecodeProjectionsArguments a;
};

__device__ __forceinline__ uint4 load_uncached(const Bfloat16* address) {  // written during this launch by another multiprocessor
  return __ldcg(reinterpret_cast<const uint4*>(address));
}

// added_pair in one instruction: for no two BF16 values does rounding their sum to FP32 first change what it is rounded to.
__device__ __forceinline__ std::uint32_t added_words(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// 16 bytes in one store, where the compiler would make four.
__device__ __forceinline__ void store_shared(Bfloat16* to, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// Four matrices of eight rows of eight values, in shared memory, transposed. Thread t gives the address of row t % 8 of matrix t / 8 and gets, of every
// matrix, column t / 4 of rows t % 4 * 2 and the next.
__device__ __forceinline__ void load_transposed(std::uint32_t (&words)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Outputs that a block makes at a time. What is combined after the product (a gate and its up value, a channel and its rotation partner) stands in
// one tile: `rows` weight rows from `first` on, and as many `apart` behind them.
struct Tile {
  int first, apart, rows;
};

// The `index`-th tile of this block; false: it has no more. Gates and their up values are dealt out evenly: a block's last tile may have fewer.
__device__ __forceinline__ bool tile_of_block(const Phase& phase, const DecodeProjectionsArguments& a, int index, Tile& tile) {
  constexpr int kHalf = kTileRows / 2;
  if (phase.output == Output::activated) {
    const int block = static_cast<int>(blockIdx.x), left = phase.each + (block < phase.more ? 1 : 0) - index * kHalf;
    tile = {block * phase.each + min(block, phase.more) + index * kHalf, phase.out / 2, min(left, kHalf)};
    return left > 0;
  }
  const int place = blockIdx.x + index * gridDim.x;
  tile = {place * kTileRows, kHalf, kHalf};
  if (phase.output == Output::rotated_and_appended && tile.first < 2 * a.heads * a.head_dim) {
    const int channel = tile.first & (a.head_dim - 1);  // head_dim is a power of two
    tile.first += channel / 2 - channel;
    tile.apart = a.head_dim / 2;
  }
  return place < phase.out / kTileRows;
}

// A barrier of the warps that multiply.
__device__ __forceinline__ void meet_warps() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Weights on their way to the warp, in the order in which it uses them: tile after tile, product after product.
template <int kStages>
class WeightRing {
 public:
  __device__ WeightRing(const Launch& launch, std::uint32_t shared) : launch_(launch), shared_(shared), end_(shared + kStages * kStageBytes), to_(shared) {
    next_tile();
  }

  // Requests the next stage, if there is one, into the place that was used longest ago. One group of copies either way.
  __device__ __forceinline__ void request() {
    if (left_ > 0) {
      if (unit() < left_ * 4) {
        // A row of a stage is 256 bytes: 16 lanes. The pieces of odd rows are swapped by 64 bytes, so that the eight threads that read two rows
        // at once touch all banks.
        const std::uint32_t to = to_ + row() * kStageRowBytes + (unit() ^ row() * 4) * 16;
        const Bfloat16* low = from_;
        const Bfloat16* high = from_ + apart_;
#pragma unroll
        for (int i = 0; i < kTileRows / 4; ++i) {
          if (row() + i * 2 < rows_) {
            copy_async(to + i * 2 * kStageRowBytes, low);
            copy_async(to + (i * 2 + kTileRows / 2) * kStageRowBytes, high);
          }
          low += two_rows_;
          high += two_rows_;
        }
      }
      from_ += kStageChunks * kChunk;
      left_ -= kStageChunks;
      if (left_ <= 0) next_tile();
      to_ += kStageBytes;
      if (to_ == end_) to_ = shared_;
    }
    commit_copies();
  }

 private:
  __device__ __forceinline__ static int unit() { return threadIdx.x % 16; }
  __device__ __forceinline__ static int row() { return threadIdx.x / 16 % 2; }
  __device__ __forceinline__ void next_tile() {
    Tile tile;
    while (!tile_of_block(launch_.phases[phase_], launch_.a, tile_++, tile)) {
      if (++phase_ == launch_.phase_count) {
        left_ = 0;
        return;
      }
      tile_ = 0;
    }
    const Phase& phase = launch_.phases[phase_];
    const int warp = threadIdx.x / 32, chunks = phase.in / kChunk, begin = chunks * warp / kWarps;
    left_ = chunks * (warp + 1) / kWarps - begin;
    rows_ = tile.rows;
    from_ = phase.weight + static_cast<std::size_t>(tile.first + row()) * phase.in + begin * kChunk + unit() * 8;
    apart_ = tile.apart * phase.in;
    two_rows_ = 2 * phase.in;
  }

  const Launch& launch_;
  const std::uint32_t shared_, end_;
  std::uint32_t to_;
  int phase_ = 0, tile_ = 0;            // next
  int left_ = 0, rows_ = 0;             // chunks of this warp's share of the tile; rows of a half of it
  const Bfloat16* from_ = nullptr;
  int apart_ = 0;
  int two_rows_ = 0;
};

// Shared memory behind the ring.
struct RowMemory {
  Bfloat16* norms;                      // [2, hidden]: weights of the norms in front of a product
  Bfloat16* residual;                   // [rows, hidden + kRowPadding]
  Bfloat16* rows;                       // [rows, in + kRowPadding]: input rows of a product
  float* columns;                       // kFew: [rows, kLanes, hidden / kLanes + 4]: by lane of the sum of squares; behind [rows, hidden] of `rows`
  float* inverse;                       // [2, rows]
  std::uint32_t* counts;                // copy of DecodeProjectionsArguments::arrivals
  std::uint64_t* norms_arrived;         // barrier of the copies to `norms`
  std::uint64_t* residual_arrived;      // of those to `residual`
  std::uint64_t* arrived;               // of those to `rows`
  std::uint64_t* counted;               // of those to `counts`
  std::uint64_t* placed;                // `places` is complete
  std::uint64_t* done;                  // the threads that multiply have read `rows` and written their part of a product

  __device__ __forceinline__ Bfloat16* row(int index, int in) const { return rows + static_cast<std::size_t>(index) * (in + kRowPadding); }
};

// One thread: the weights of the norms in front of the next product that has some, if there is one.
__device__ __forceinline__ void fetch_norms(const Launch& launch, const RowMemory& memory, int& fetched) {
  const int count = min(launch.norm_count - fetched, launch.norm_count % 2 == 0 ? 2 : 1), bytes = launch.a.hidden * static_cast<int>(sizeof(Bfloat16));
  if (count <= 0) return;
  barrier_arrive_expecting(memory.norms_arrived, count * bytes);
  for (int i = 0; i < count; ++i) {
    bulk_copy(memory.norms + static_cast<std::size_t>(i) * launch.a.hidden, launch.norms[fetched + i], bytes, memory.norms_arrived);
  }
  fetched += count;
}

// One thread: `x` [rows, in].
__device__ __forceinline__ void fetch_rows(int rows, Bfloat16* to, const Bfloat16* x, int in, std::uint64_t* arrived) {
  const int bytes = in * static_cast<int>(sizeof(Bfloat16));
  barrier_arrive_expecting(arrived, rows * bytes);
  for (int row = 0; row < rows; ++row) {
    bulk_copy(to + static_cast<std::size_t>(row) * (in + kRowPadding), x + static_cast<std::size_t>(row) * in, bytes, arrived);
  }
}

// Of `rows` [rows, hidden + kRowPadding], by warps that have rows of two: the sum of squares of one lane of row 2 * warp + thread % 2.
// An ldmatrix gives a thread eight steps of its lane: the two matrix rows of a thread's pair are neighbouring steps of its half of a row, and the four pairs
// of a matrix are two halves of two rows, which touch all banks.
__device__ __forceinline__ float lane_sum_of_squares(const DecodeProjectionsArguments& a, const Bfloat16* rows) {
  constexpr int kSteps = 8, kAhead = 4;  // steps of a load, rows are whole ones of every lane; loads on their way
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32, pair = thread % 8 / 2;
  const Bfloat16* const first = rows + static_cast<std::size_t>(min(warp * 2 + pair % 2, a.rows - 1)) * (a.hidden + kRowPadding) +
                                (thread / 8 * 2 + thread % 2) * kLanes + pair / 2 * (kLanes / 2);
  const std::uint32_t address = shared_address(first);
  const int loads = a.hidden / (kLanes * kSteps);
  std::uint32_t words[kAhead][4];
  const auto load = [&](std::uint32_t(&to)[4], int index) {
    load_transposed(to, address + min(index, loads - 1) * (kSteps * kLanes * static_cast<int>(sizeof(Bfloat16))));
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(words[i], i);
  // A square is exact in FP32, so that one rounding is that of the addition. (Squares below FP32's range do not reach the sum with an epsilon of 2^-100
  // or more.)
  float sum = 0.0f;
#pragma unroll 1
  for (int index = 0; index < loads; index += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (index + i >= loads) break;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float low = low_value(words[i][k]), high = high_value(words[i][k]);
        sum = __fmaf_rn(low, low, sum);
        sum = __fmaf_rn(high, high, sum);
      }
      load(words[i], index + i + kAhead);
    }
  }
  return sum;
}

// What rows are divided by, from those sums: the halving tree 8, 4, 2, 1 over the lanes, where these threads have them.
__device__ __forceinline__ void inverses_of_sums(const DecodeProjectionsArguments& a, float sum, float* inverse) {
  const int row = threadIdx.x / 32 * 2 + threadIdx.x % 2;
#pragma unroll
  for (const int apart : {2, 16, 8, 4}) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, apart));
  if (threadIdx.x % 32 < 2 && row < a.rows) inverse[row] = inverse_root_mean_square(sum, a.hidden, a.epsilon);
}

// `inverse` of columns, four values a load; the sixteen lanes of a row's sum of squares are sixteen neighbouring threads.
__device__ __forceinline__ void inverses_of_columns(const DecodeProjectionsArguments& a, const float* columns, float* inverse) {
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if ((row & ~1) >= a.rows) return;     // warp by warp
  const int steps = a.hidden / kLanes;  // a multiple of eight
  const auto* const values = reinterpret_cast<const float4*>(columns + static_cast<std::size_t>(min(row, a.rows - 1) * kLanes + lane) * (steps + 4));
  float sum = 0.0f;
  const auto add = [&](float4 four) {
    sum = __fmaf_rn(four.x, four.x, sum);
    sum = __fmaf_rn(four.y, four.y, sum);
    sum = __fmaf_rn(four.z, four.z, sum);
    sum = __fmaf_rn(four.w, four.w, sum);
  };
  float4 first = values[0], second = values[1];
#pragma unroll 4
  for (int i = 0; i < steps / 4; i += 2) {
    const int next = i + 2 < steps / 4 ? i + 2 : 0;
    const float4 third = values[next], fourth = values[next + 1];
    add(first);
    add(second);
    first = third;
    second = fourth;
  }
  sum = reduce_lanes(sum, ~0u);
  if (lane == 0 && row < a.rows) inverse[row] = inverse_root_mean_square(sum, a.hidden, a.epsilon);
}

// The rows that a product reads, normed; before that, where `x` is there, residual + norm(x). kPieces pieces a thread, one or two. `parity` of the copies of x.
template <int kPieces>
__device__ __forceinline__ void norm_few_rows(const Launch& launch, const Phase& phase, const RowMemory& memory, std::uint32_t parity) {
  const DecodeProjectionsArguments& a = launch.a;
  const int row_pieces = a.hidden / 8;
  union Piece {
    uint4 vector;
    std::uint32_t pairs[4];
  };
  const int first_row = threadIdx.x / row_pieces, first_column = threadIdx.x % row_pieces;
  const int step_row = kThreads / row_pieces, step_column = kThreads % row_pieces;
  const auto each_piece = [&](auto&& work) {
    int row = first_row, column = first_column;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (row < a.rows) work(i, row, column * 8);
      row += step_row;
      column += step_column;
      if (column >= row_pieces) {
        column -= row_pieces;
        ++row;
      }
    }
  };
  const auto in_rows = [&](int row, int column) { return reinterpret_cast<uint4*>(memory.row(row, a.hidden) + column); };
  const auto in_residual = [&](int row, int column) {
    return reinterpret_cast<uint4*>(memory.residual + static_cast<std::size_t>(row) * (a.hidden + kRowPadding) + column);
  };

  const auto to_columns = [&](int row, int column, const Piece& piece) {
    const int stride = a.hidden / kLanes + 4;
    float* const to = memory.columns + static_cast<std::size_t>(row * kLanes + column % kLanes) * stride + column / kLanes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[2 * k * stride] = low_value(piece.pairs[k]);
      to[(2 * k + 1) * stride] = high_value(piece.pairs[k]);
    }
  };

  Piece kept[kPieces];
  const Bfloat16* norm = memory.norms;
  barrier_wait(memory.norms_arrived, phase.first_norm / 2);
  barrier_wait(memory.residual_arrived, 0);
  if (phase.input == Input::added_and_normed) {
    barrier_wait(memory.arrived, parity);
    each_piece([&](int, int row, int column) {
      Piece value;
      value.vector = *in_rows(row, column);
      to_columns(row, column, value);
    });
    meet_warps();
    inverses_of_columns(a, memory.columns, memory.inverse);
    meet_warps();
    each_piece([&](int i, int row, int column) {
      const float inverse = memory.inverse[row];
      Piece weight, value;
      weight.vector = *reinterpret_cast<const uint4*>(norm + column);
      value.vector = *in_rows(row, column);
      kept[i].vector = *in_residual(row, column);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        kept[i].pairs[k] = added_pair(kept[i].pairs[k], normalized_pair(value.pairs[k], inverse, weight.pairs[k]));
      }
      *in_residual(row, column) = kept[i].vector;
      to_columns(row, column, kept[i]);
      if (blockIdx.x == gridDim.x - 1) *reinterpret_cast<uint4*>(phase.new_residual + static_cast<std::size_t>(row) * a.hidden + column) = kept[i].vector;
    });
    norm += a.hidden;
    meet_warps();
  } else {
    each_piece([&](int, int row, int column) {
      Piece value;
      value.vector = *in_residual(row, column);
      to_columns(row, column, value);
    });
    meet_warps();
  }
  inverses_of_columns(a, memory.columns, memory.inverse + kMostProjectionRows);
  meet_warps();
  each_piece([&](int, int row, int column) {
    const float inverse = memory.inverse[kMostProjectionRows + row];
    Piece weight, result;
    weight.vector = *reinterpret_cast<const uint4*>(norm + column);
    result.vector = *in_residual(row, column);
#pragma unroll
    for (int k = 0; k < 4; ++k) result.pairs[k] = normalized_pair(result.pairs[k], inverse, weight.pairs[k]);
    *in_rows(row, column) = result.vector;
  });
  meet_warps();
}

// The same of more rows, or of those for which there are no columns. A thread has pieces of one place in kPieces rows, and of further places where rows are
// wider than its threads. All of a place are requested before the first is used, those of the first before the sums of squares are known, and what was added
// stays in registers until it is normed.
template <int kPieces>
__device__ __forceinline__ void norm_many_rows(const Launch& launch, const Phase& phase, const RowMemory& memory, std::uint32_t parity) {
  const DecodeProjectionsArguments& a = launch.a;
  const int row_pieces = a.hidden / 8, step_row = max(kThreads / row_pieces, 1), stride = a.hidden + kRowPadding, step = step_row * stride;
  const int first = threadIdx.x % row_pieces * 8;  // column
  int first_row = threadIdx.x / row_pieces;
  if (first_row >= step_row) first_row = a.rows;  // none
  const bool sums = threadIdx.x / 32 * 2 < a.rows;
  union Piece {
    uint4 vector;
    std::uint32_t pairs[4];
  };
  float weights[8] = {};  // those of a piece, for all rows
  const auto normalized = [&](std::uint32_t pair, float inverse, int k) {  // normalized_pair, by widened weights
    const std::uint32_t scaled = pack_bf16(__fmul_rn(low_value(pair), inverse), __fmul_rn(high_value(pair), inverse));
    return pack_bf16(__fmul_rn(weights[2 * k], low_value(scaled)), __fmul_rn(weights[2 * k + 1], high_value(scaled)));
  };
  const auto load = [&](Piece(&pieces)[kPieces], const Bfloat16* from, int column) {
    from += min(first_row, a.rows - 1) * stride + column;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {  // rows that are not there: the last one again, which is not used
      pieces[i].vector = *reinterpret_cast<const uint4*>(from);
      if (first_row + (i + 1) * step_row < a.rows) from += step;
    }
  };

  Piece kept[kPieces];
  const Bfloat16* norm = memory.norms;
  barrier_wait(memory.norms_arrived, phase.first_norm / 2);
  barrier_wait(memory.residual_arrived, 0);
  float sum = 0.0f;
  if (phase.input == Input::added_and_normed) {
    barrier_wait(memory.arrived, parity);
    if (sums) sum = lane_sum_of_squares(a, memory.rows);
    Piece values[kPieces];
    load(values, memory.rows, first);
    load(kept, memory.residual, first);
    if (sums) inverses_of_sums(a, sum, memory.inverse);
    meet_warps();
#pragma unroll 1
    for (int column = first;;) {
      widen_eight(*reinterpret_cast<const uint4*>(norm + column), weights);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int row = first_row + i * step_row;
        if (row >= a.rows) break;
        const float inverse = memory.inverse[row];
#pragma unroll
        for (int k = 0; k < 4; ++k) kept[i].pairs[k] = added_words(kept[i].pairs[k], normalized(values[i].pairs[k], inverse, k));
        store_shared(memory.residual + row * stride + column, kept[i].pairs);
        if (blockIdx.x == gridDim.x - 1) __stwb(reinterpret_cast<uint4*>(phase.new_residual + row * a.hidden + column), kept[i].vector);
      }
      column += kThreads * 8;
      if (column >= a.hidden) break;
      load(values, memory.rows, column);
      load(kept, memory.residual, column);
    }
    norm += a.hidden;
    meet_warps();
    if (sums) sum = lane_sum_of_squares(a, memory.residual);
  } else {
    if (sums) sum = lane_sum_of_squares(a, memory.residual);
    load(kept, memory.residual, first);
  }
  if (sums) inverses_of_sums(a, sum, memory.inverse + kMostProjectionRows);
  meet_warps();
#pragma unroll 1
  for (int column = first; column < a.hidden; column += kThreads * 8) {
    if (row_pieces > kThreads) load(kept, memory.residual, column);
    widen_eight(*reinterpret_cast<const uint4*>(norm + column), weights);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = first_row + i * step_row;
      if (row >= a.rows) break;
      const float inverse = memory.inverse[kMostProjectionRows + row];
      std::uint32_t result[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) result[k] = normalized(kept[i].pairs[k], inverse, k);
      store_shared(memory.rows + row * stride + column, result);
    }
  }
  meet_warps();
}

using Shares = float[kWarps][kMostProjectionRows][kTileRows + 1];

__device__ __forceinline__ float sum_of_shares(const Shares& shares, int row, int output) {
  float sum = shares[0][row][output];
#pragma unroll
  for (int share = 1; share < kWarps; ++share) sum = __fadd_rn(sum, shares[share][row][output]);
  return sum;
}

// Where k and v of the rows belong, their positions and what these rotate by.
struct Places {
  Bfloat16* key_pages[kMostProjectionRows];  // where the row's key of head 0 belongs; null: nowhere
  std::int32_t positions[kMostProjectionRows];
  alignas(16) Bfloat16 cosine[kMostProjectionRows][kMostHeadDim / 2], sine[kMostProjectionRows][kMostHeadDim / 2];
};

// What becomes of a tile's sums. `thread` of 128.
__device__ __forceinline__ void finish_tile(const Launch& launch, const Phase& phase, const Tile& tile, const Shares& shares, int thread,
                                            const Places& places) {
  Bfloat16* const* const key_pages = places.key_pages;
  const DecodeProjectionsArguments& a = launch.a;
  const int first = tile.first, apart = tile.apart;
  if (phase.output == Output::rows || (phase.output == Output::rotated_and_appended && apart == kTileRows / 2)) {
    const int row = thread / kTileRows, output = thread % kTileRows;
    if (row >= a.rows) return;
    const Bfloat16 value = to_bfloat16(sum_of_shares(shares, row, output));
    if (phase.output == Output::rows) {
      phase.y[static_cast<std::size_t>(row) * phase.out + first + output] = value;
    } else if (key_pages[row] != nullptr) {
      const int place = first + output - a.heads * a.head_dim, channel = place & (a.head_dim - 1);
      key_pages[row][static_cast<std::size_t>(place - channel) * kPageTokens + channel] = value;
    }
    return;
  }
  const int row = thread / (kTileRows / 2), output = thread % (kTileRows / 2);
  if (row >= a.rows || output >= tile.rows) return;
  const Bfloat16 low = to_bfloat16(sum_of_shares(shares, row, output));
  const Bfloat16 high = to_bfloat16(sum_of_shares(shares, row, output + kTileRows / 2));
  if (phase.output == Output::activated) {
    const Bfloat16 activated = to_bfloat16(silu_binary32(to_float(low)));
    phase.y[static_cast<std::size_t>(row) * (phase.out / 2) + first + output] = to_bfloat16(__fmul_rn(to_float(activated), to_float(high)));
    return;
  }
  const int channel = (first & (a.head_dim - 1)) + output, start_of_head = first & ~(a.head_dim - 1);
  const float c = to_float(places.cosine[row][channel]), s = to_float(places.sine[row][channel]), x = to_float(low), y = to_float(high);
  const Bfloat16 rotated_low = to_bfloat16(__fadd_rn(to_float(to_bfloat16(__fmul_rn(x, c))), to_float(to_bfloat16(__fmul_rn(-y, s)))));
  const Bfloat16 rotated_high = to_bfloat16(__fadd_rn(to_float(to_bfloat16(__fmul_rn(y, c))), to_float(to_bfloat16(__fmul_rn(x, s)))));
  if (start_of_head < a.heads * a.head_dim) {
    Bfloat16* const q = phase.y + static_cast<std::size_t>(row) * phase.out + start_of_head + channel;
    q[0] = rotated_low;
    q[apart] = rotated_high;
  } else if (key_pages[row] != nullptr) {
    Bfloat16* const key = key_pages[row] + static_cast<std::size_t>(start_of_head - a.heads * a.head_dim) * kPageTokens + channel;
    key[0] = rotated_low;
    key[apart] = rotated_high;
  }
}

// Finds the place of the row `lane`. Each load needs the one before, and loads wait behind the weights that are on their way: one step a product, so
// that nobody waits for them.
class PlaceSearch {
 public:
  __device__ bool done() const { return step_ == 4; }
  __device__ __forceinline__ void step(const DecodeProjectionsArguments& a, Places& places) {
    const int step = step_++;
    if (lane_ >= a.rows) return;
    switch (step) {
      case 0:
        row_ = a.query_rows[lane_];
        position_ = a.positions[lane_];
        break;
      case 1:
        if (row_.request >= 0) pages_ = a.kv.requests[row_.request].pages;
        break;
      case 2:
        if (row_.request >= 0) page_ = pages_[row_.position / kPageTokens].bf16[row_.loop - 1];
        break;
      case 3:
        places.positions[lane_] = position_;
        places.key_pages[lane_] =
            row_.request < 0 ? nullptr
                             : reinterpret_cast<Bfloat16*>(page_) + page_row_offset(a.kv.shape, a.next_layer, KvTensor::k, 0, row_.position % kPageTokens);
        break;
    }
  }

 private:
  const int lane_ = threadIdx.x % 32;
  int step_ = 0;
  QueryRow row_{};
  std::int32_t position_ = 0;
  const PageTableEntry* pages_ = nullptr;
  std::uint64_t page_ = 0;
};

// Whether the input rows of a product fit RowMemory::rows; otherwise every thread loads its own.
template <bool kFew>
__device__ __forceinline__ bool reads_shared_rows(const Phase& phase, const DecodeProjectionsArguments& a) {
  return kFew || phase.in <= max(a.hidden, a.heads * a.head_dim);
}

// The warp that multiplies nothing: it meets the other blocks and fetches rows, by bulk copies, since what ordinary loads bring comes back behind the
// weights that are on their way.
template <bool kFew>
__device__ __forceinline__ void fetch(const Launch& launch, const RowMemory& memory, Places& places) {
  const DecodeProjectionsArguments& a = launch.a;
  const int lane = threadIdx.x % 32;
  int norms_fetched = 0;
  if (lane == 0) fetch_norms(launch, memory, norms_fetched);
  wait_for_previous_kernel();
  if (lane == 0) {
    asm volatile("fence.proxy.async;" ::: "memory");
    fetch_rows(a.rows, memory.residual, a.residual, a.hidden, memory.residual_arrived);
  }
  PlaceSearch search;
  std::uint32_t parity = 0;
  for (int index = 0; index < launch.phase_count; ++index) {
    const Phase& phase = launch.phases[index];
    if (index > 0) {
      barrier_wait(memory.done, (index - 1) & 1);
      if (lane == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.arrivals + index) : "memory");
        // The counts as the second-level cache has them, where what was released before them is. No acquire: what follows reads there too (bulk copies,
        // load_uncached), never what a first-level cache may still hold from before.
        do {
          barrier_arrive_expecting(memory.counted, kProjectionArrivals * sizeof(std::uint32_t));
          bulk_copy(memory.counts, a.arrivals, kProjectionArrivals * sizeof(std::uint32_t), memory.counted);
          barrier_wait(memory.counted, parity);
          parity ^= 1;
        } while (*reinterpret_cast<volatile std::uint32_t*>(memory.counts + index) < gridDim.x);
        asm volatile("fence.proxy.async;" ::: "memory");
      }
    }
    if (lane == 0) {
      if (index > 0 && phase.input == Input::rows) fetch_norms(launch, memory, norms_fetched);  // those before have been used
      if (phase.input != Input::normed && reads_shared_rows<kFew>(phase, a)) fetch_rows(a.rows, memory.rows, phase.x, phase.in, memory.arrived);
      else barrier_arrive(memory.arrived);
    }
    __syncwarp();
    if (a.qkv_weight != nullptr) {
      do search.step(a, places);
      while (index + 1 == launch.phase_count && !search.done());  // the last product needs them
      if (index + 1 == launch.phase_count) {
        if (lane < a.rows) {
          const int half = a.head_dim / 2, bytes = half * static_cast<int>(sizeof(Bfloat16));
          const std::size_t angle = static_cast<std::size_t>(places.positions[lane]) * half;
          barrier_arrive_expecting(memory.placed, 2 * bytes);
          bulk_copy(places.cosine[lane], a.cosine + angle, bytes, memory.placed);
          bulk_copy(places.sine[lane], a.sine + angle, bytes, memory.placed);
        } else {
          barrier_arrive(memory.placed);
        }
      }
    }
  }
}

// kFew: of rows that norm_few_rows takes as kFewPieces and whose inputs of every product fit shared memory. With so many registers, and where the rows are
// one or two of a large model, a block of attention fits the multiprocessor beside one of these.
template <int kStages, bool kFew>
__global__ void __maxnreg__(kFew ? 104 : 168) decode_projections_kernel(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Shares shares[2];          // of a tile while that of the next is made
  __shared__ float inverse[2 * kMostProjectionRows];
  __shared__ std::uint64_t barriers[6];
  __shared__ alignas(16) std::uint32_t counts[kProjectionArrivals];
  __shared__ Places places;
  const DecodeProjectionsArguments& a = launch.a;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;

  RowMemory memory;
  memory.norms = reinterpret_cast<Bfloat16*>(shared + kWarps * kStages * kStageBytes);
  memory.residual = memory.norms + 2 * static_cast<std::size_t>(a.hidden);
  memory.rows = memory.residual + static_cast<std::size_t>(a.rows) * (a.hidden + kRowPadding);
  memory.columns = reinterpret_cast<float*>(memory.rows + static_cast<std::size_t>(a.rows) * (a.hidden + kRowPadding));
  memory.inverse = inverse;
  memory.counts = counts;
  memory.norms_arrived = &barriers[0];
  memory.residual_arrived = &barriers[1];
  memory.arrived = &barriers[2];
  memory.counted = &barriers[3];
  memory.placed = &barriers[4];
  memory.done = &barriers[5];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) barrier_init(&barriers[i], 1);
    barrier_init(memory.placed, 32);
    barrier_init(memory.done, kThreads);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == kWarps) {
    fetch<kFew>(launch, memory, places);
    return;
  }

  // Weights depend on no kernel in front.
  char* const ring_memory = shared + warp * kStages * kStageBytes;
  WeightRing<kStages> ring(launch, static_cast<std::uint32_t>(__cvta_generic_to_shared(ring_memory)));
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) ring.request();
  wait_for_previous_kernel();

  // The pieces of a stage that this thread reads: of weight rows `group` and `group` + 8, 16 bytes of every chunk.
  const char* const read_base = ring_memory + group * kStageRowBytes;
  const int swap = group % 2 * 4;
  int slot = 0, buffer = 0;
  for (int index = 0; index < launch.phase_count; ++index) {
    const Phase& phase = launch.phases[index];
    const std::uint32_t parity = index & 1;
    if (phase.input == Input::rows) {
      barrier_wait(memory.arrived, parity);
    } else {
      if constexpr (kFew) {
        if (a.rows * a.hidden / 8 <= kThreads) norm_few_rows<1>(launch, phase, memory, parity);
        else norm_few_rows<kFewPieces>(launch, phase, memory, parity);
      } else {
        const int step_row = max(kThreads / (a.hidden / 8), 1);  // rows that the threads norm at once
        if (a.rows <= kMostPieces / 2 * step_row) norm_many_rows<kMostPieces / 2>(launch, phase, memory, parity);
        else norm_many_rows<kMostPieces>(launch, phase, memory, parity);
      }
    }
    if (phase.output == Output::rotated_and_appended) barrier_wait(memory.placed, 0);
    // What the next kernel asks for at once would come before weights; behind those of the last product there is nothing.
    if (index + 1 == launch.phase_count) let_next_kernel_begin();
    const int chunks = phase.in / kChunk, begin = chunks * warp / kWarps, count = chunks * (warp + 1) / kWarps - begin;
    const bool in_memory = !reads_shared_rows<kFew>(phase, a);
    const Bfloat16* const x = (in_memory ? phase.x + static_cast<std::size_t>(group) * phase.in : memory.row(group, phase.in)) + begin * kChunk + quarter * 8;
    const auto load_rows = [&](uint4(&values)[kStageChunks], int chunk) {
#pragma unroll
      for (int c = 0; c < kStageChunks; ++c) {
        values[c] = make_uint4(0, 0, 0, 0);
        if (chunk + c >= count || group >= a.rows) continue;
        if (in_memory) values[c] = load_uncached(x + (chunk + c) * kChunk);
        else values[c] = *reinterpret_cast<const uint4*>(x + (chunk + c) * kChunk);
      }
    };
    uint4 even[kStageChunks], odd[kStageChunks];  // unless kFew
    if (!kFew) {
      load_rows(even, 0);
      load_rows(odd, kStageChunks);
    }
    const bool held = count <= kHeldChunks;

    Tile tile;
    for (int index_of_tile = 0; tile_of_block(phase, a, index_of_tile, tile); ++index_of_tile) {
      float sums[4] = {};
      const auto stage = [&](const uint4(&rows)[kStageChunks], int left) {
        wait_copies<kStages - 1>();
        __syncwarp();
        uint4 low[kStageChunks], high[kStageChunks];
        const char* const from = read_base + slot * kStageBytes;
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) {
          const int piece = ((c * 4 + quarter) ^ swap) * 16;
          low[c] = *reinterpret_cast<const uint4*>(from + piece);
          high[c] = *reinterpret_cast<const uint4*>(from + kTileRows / 2 * kStageRowBytes + piece);
        }
        slot = slot + 1 == kStages ? 0 : slot + 1;
        __syncwarp();  // everybody has read the stage that is now filled anew
        ring.request();
        float parts[kStageChunks][4] = {};
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) multiply_add(parts[c], low[c].x, high[c].x, low[c].y, high[c].y, rows[c].x, rows[c].y);
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) multiply_add(parts[c], low[c].z, high[c].z, low[c].w, high[c].w, rows[c].z, rows[c].w);
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) {
          if (c >= left) break;  // the rest of the stage holds old weights
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[e] = __fadd_rn(sums[e], parts[c][e]);
        }
      };
      if (kFew) {
#pragma unroll 1
        for (int chunk = 0; chunk < count; chunk += kStageChunks) {
          wait_copies<kStages - 1>();
          __syncwarp();
          uint4 low[kStageChunks], high[kStageChunks];
          const char* const from = read_base + slot * kStageBytes;
#pragma unroll
          for (int c = 0; c < kStageChunks; ++c) {
            const int piece = ((c * 4 + quarter) ^ swap) * 16;
            low[c] = *reinterpret_cast<const uint4*>(from + piece);
            high[c] = *reinterpret_cast<const uint4*>(from + kTileRows / 2 * kStageRowBytes + piece);
          }
          slot = slot + 1 == kStages ? 0 : slot + 1;
          __syncwarp();  // everybody has read the stage that is now filled anew
          ring.request();
#pragma unroll
          for (int c = 0; c < kStageChunks; ++c) {
            if (chunk + c >= count) break;  // the rest of the stage holds old weights
            uint4 row = make_uint4(0, 0, 0, 0);
            if (group < a.rows) row = *reinterpret_cast<const uint4*>(x + (chunk + c) * kChunk);
            float part[4] = {};
            multiply_add(part, low[c].x, high[c].x, low[c].y, high[c].y, row.x, row.y);
            multiply_add(part, low[c].z, high[c].z, low[c].w, high[c].w, row.z, row.w);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[e] = __fadd_rn(sums[e], part[e]);
          }
        }
      } else {
        for (int chunk = 0; chunk < count; chunk += kHeldChunks) {
          stage(even, count - chunk);
          if (!held) load_rows(even, chunk + kHeldChunks < count ? chunk + kHeldChunks : 0);
          if (chunk + kStageChunks >= count) break;
          stage(odd, count - chunk - kStageChunks);
          if (!held) load_rows(odd, chunk + kHeldChunks + kStageChunks < count ? chunk + kHeldChunks + kStageChunks : kStageChunks);
        }
      }

      Shares& mine = shares[buffer];
#pragma unroll
      for (int e = 0; e < 4; ++e) mine[warp][quarter * 2 + e % 2][e / 2 * 8 + group] = sums[e];
      meet_warps();
      // Half of the warps finish this tile, the other half the next: the ends of tiles, SwiGLU's above all, run beside products.
      if (warp / 4 == buffer) finish_tile(launch, phase, tile, mine, threadIdx.x % 128, places);
      buffer ^= 1;
    }
    barrier_arrive(memory.done);
  }
  wait_copies<0>();
}

// How a launch is cut. No bit depends on it.
struct Cut {
  bool few;
  int stages;
  int dynamic_bytes;
};
constexpr int kStaticSharedBytes = 2 * sizeof(Shares) + sizeof(Places) + 1024;  // and a little more

struct DeviceLimits {
  int multiprocessors = 0, shared_bytes = 0;
};

DeviceLimits device_limits() {
  int device = 0;
  DeviceLimits limits;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  limits.shared_bytes -= kStaticSharedBytes;
  return limits;
}

bool extents_are_whole(int rows, int hidden, int heads, int head_dim, int intermediate) {
  const int width = heads * head_dim;
  if (rows < 1 || rows > kMostProjectionRows) return false;
  // A warp has a share of every product; tiles are whole; rows are whole 16-byte pieces of every lane.
  if (hidden % 128 != 0 || width % kChunk != 0 || intermediate % kChunk != 0 || head_dim % kTileRows != 0 || (head_dim & (head_dim - 1)) != 0) return false;
  if (head_dim > kMostHeadDim || hidden < kWarps * kChunk || width < kWarps * kChunk || intermediate < kWarps * kChunk) return false;
  if (head_dim == kTileRows) return false;  // its rotation partners stand apart as the halves of a tile of v, which finish_tile does not rotate
  if (rows * (hidden / 8) > kMostPieces * kThreads) return false;
  return static_cast<std::int64_t>(intermediate) * hidden <= std::numeric_limits<int>::max();  // from a gate's weights to those of its up value
}

// The widest that fits `limit` bytes of shared memory; 0 stages: none does.
Cut cut_of(int rows, int hidden, int width, int intermediate, int limit) {
  const auto bytes = [&](int stages, int in) {
    return kWarps * stages * kStageBytes + (2 * hidden + rows * (hidden + kRowPadding) + rows * (in + kRowPadding)) * static_cast<int>(sizeof(Bfloat16));
  };
  const int widest = std::max({hidden, width, intermediate});
  Cut cut{rows * (hidden / 8) <= kFewPieces * kThreads, kFewStages, 0};
  // A block that has no more than a stage of a product at a time gains nothing by asking for more.
  if (widest <= kWarps * kStageChunks * kChunk) cut.stages = kLeastStages;
  const int column_bytes = rows * (hidden + 4 * kLanes) * static_cast<int>(sizeof(float));
  cut.dynamic_bytes = std::max(bytes(cut.stages, widest), bytes(cut.stages, hidden) + column_bytes);
  if (cut.few && cut.dynamic_bytes <= limit) return cut;
  for (const int stages : {kMostStages, kLeastStages}) {
    cut = {false, stages, bytes(stages, std::max(hidden, width))};
    if (cut.dynamic_bytes <= limit) return cut;
  }
  return {};
}

template <int kStages, bool kFew>
void launch_blocks(const Launch& launch, const Cut& cut, const DeviceLimits& limits, int blocks, cudaStream_t stream) {
  const auto kernel = decode_projections_kernel<kStages, kFew>;
  let_share_multiprocessors(kernel, limits.shared_bytes);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;  // all blocks are there at once, whatever else runs on the device: they wait for each other
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = kThreads + 32;
  config.dynamicSmemBytes = static_cast<std::size_t>(cut.dynamic_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  LOOPGAUGE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, launch));
}

}  // namespace

bool decode_projections_cover(int rows, int hidden, int heads, int head_dim, int intermediate) {
  return extents_are_whole(rows, hidden, heads, head_dim, intermediate) &&
         cut_of(rows, hidden, heads * head_dim, intermediate, device_limits().shared_bytes).stages > 0;
}

void decode_projections(const DecodeProjectionsArguments& a, cudaStream_t stream) {
  Launch launch{};
  launch.a = a;
  const int width = a.heads * a.head_dim;
  const auto add = [&](const Phase& phase) { launch.phases[launch.phase_count++] = phase; };
  const auto norm = [&](const Bfloat16* weight) {
    launch.norms[launch.norm_count] = weight;
    return launch.norm_count++;
  };
  if (a.attended != nullptr) {
    add({Input::rows, Output::rows, a.o_proj, width, a.hidden, 0, 0, a.attended, a.projected, nullptr, 0});
    const int first = norm(a.norm_after_attention);
    norm(a.norm_before_mlp);
    add({Input::added_and_normed, Output::activated, a.gate_up, a.hidden, 2 * a.intermediate, 0, 0, a.projected, a.activated,
         a.residual_after_attention, first});
    add({Input::rows, Output::rows, a.down_proj, a.intermediate, a.hidden, 0, 0, a.activated, a.projected, nullptr, 0});
  }
  if (a.qkv_weight != nullptr) {
    const bool behind = a.attended != nullptr;
    const int first = behind ? norm(a.norm_after_mlp) : 0;
    norm(a.input_norm);
    add({behind ? Input::added_and_normed : Input::normed, Output::rotated_and_appended, a.qkv_weight, a.hidden, 3 * width, 0, 0,
         a.projected, a.qkv, a.residual, first});
  }
  const DeviceLimits limits = device_limits();
  const Cut cut = extents_are_whole(a.rows, a.hidden, a.heads, a.head_dim, a.intermediate) ? cut_of(a.rows, a.hidden, width, a.intermediate, limits.shared_bytes) : Cut{};
  if (cut.stages == 0) {
    throw UnsupportedError("decode_projections: " + std::to_string(a.rows) + " rows of hidden " + std::to_string(a.hidden) + ", " + std::to_string(a.heads) + " heads of " +
                           std::to_string(a.head_dim) + ", intermediate " + std::to_string(a.intermediate) + " are not covered");
  }
  int blocks = 0;  // no more than a product has tiles
  for (int i = 0; i < launch.phase_count; ++i) blocks = std::max(blocks, launch.phases[i].out / kTileRows);
  blocks = std::min(blocks, limits.multiprocessors);
  for (int i = 0; i < launch.phase_count; ++i) {
    launch.phases[i].each = launch.phases[i].out / 2 / blocks;
    launch.phases[i].more = launch.phases[i].out / 2 % blocks;
  }
  if (cut.few && cut.stages == kFewStages) launch_blocks<kFewStages, true>(launch, cut, limits, blocks, stream);
  else if (cut.few) launch_blocks<kLeastStages, true>(launch, cut, limits, blocks, stream);
  else if (cut.stages == kMostStages) launch_blocks<kMostStages, false>(launch, cut, limits, blocks, stream);
  else launch_blocks<kLeastStages, false>(launch, cut, limits, blocks, stream);
}

}  // namespace loopgauge::optimized
