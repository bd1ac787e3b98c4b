// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill.cuh"

#include <algorithm>
#include <string>

#include "models/error.hpp"
#include "optimized/ops/attention_prefill_encoded.cuh"
#include "optimized/ops/attention_prefill_wgmma.cuh"

namespace loopgauge::optimized {

std::vector<PrefillTile> make_prefill_tiles(std::span<const PrefillSegment> segments, int heads) {
  // Half a tile takes 0.7 of the time of a whole one, alone on a multiprocessor as both are.
  constexpr int kMultiprocessors = 132;
  const auto tiles_of = [&](int tile_rows) {
    int count = 0;
    for (const PrefillSegment& segment : segments) count += (segment.row_count + tile_rows - 1) / tile_rows;
    return count;
  };
  const int tile_rows = tiles_of(kPrefillTileRows / 2) * heads <= kMultiprocessors ? kPrefillTileRows / 2 : kPrefillTileRows;
  std::vector<PrefillTile> tiles;
  tiles.reserve(static_cast<std::size_t>(tiles_of(tile_rows)));
  for (const PrefillSegment& segment : segments) {
    for (int row = 0; row < segment.row_count; row += tile_rows) {
      PrefillTile tile = segment;
      tile.row_begin = segment.row_begin + row;
      tile.row_count = std::min(tile_rows, segment.row_count - row);
      tiles.push_back(tile);
    }
  }
  return tiles;
}

std::size_t attention_prefill_workspace_bytes(const KvShape& shape, int row_count, int max_length) {
  const int splits = prefill_splits(max_length);
  if (splits == 1) return 0;
  return static_cast<std::size_t>(row_count) * shape.heads * splits * static_cast<std::size_t>(shape.head_dim + 2) * sizeof(float);
}

void attention_prefill(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  const KvShape& shape = arguments.kv.shape;
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    throw UnsupportedError("attention_prefill: head_dim " + std::to_string(shape.head_dim) + " is not 64 or 128");
  }
  if (arguments.tile_count < 0 || arguments.tile_count > 65535) {
    throw InternalError("attention_prefill: " + std::to_string(arguments.tile_count) + " tiles in one launch, at most 65535");
  }
  if (arguments.tile_count == 0) return;
  if (arguments.encoded_history && (arguments.max_length < 1 || arguments.row_count < 1)) {
    throw InternalError("attention_prefill: encoded history without the number of rows and the largest length");
  }
  // A tile's kernel follows from its own frontier, so that its bits do not depend on what else is in the launch.
  attention_prefill_wgmma(arguments, stream);
  if (arguments.encoded_history) attention_prefill_encoded(arguments, stream);
}

}  // namespace loopgauge::optimized
