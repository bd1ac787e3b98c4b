// SPDX-License-Identifier: Apache-2.0
#include "models/handoff/regions.hpp"

#include <algorithm>
#include <cstring>

#include "models/error.hpp"

namespace loopgauge::handoff {
namespace {

std::size_t word_bytes(int positions) { return static_cast<std::size_t>((positions + 63) / 64) * 8; }

int groups(int count) { return (count + kGroupSize - 1) / kGroupSize; }

// Rows of one loop's K and V, or of their codes, over all layers and heads.
std::uint64_t tensor_rows(const Descriptor& d) {
  return std::uint64_t{2} * static_cast<std::uint64_t>(d.layers) * static_cast<std::uint64_t>(d.heads);
}

// Rows of a window that execute the loop (S-TSEL-4).
int window_rows(const Descriptor& d, int window_size, int loop) {
  int rows = window_size;
  for (int r = 3; r <= loop; ++r) rows = std::min(rows, budget(d.retention_bp[static_cast<std::size_t>(r - 1)], window_size));
  return rows;
}

class RegionList {
 public:
  explicit RegionList(const Descriptor& descriptor) : d_(descriptor) {}

  std::vector<Region> build() {
    for (int begin = 0; begin < d_.prompt_length;) {
      const PositionRange window = cut(begin, d_.prompt_length);
      add(RegionKind::validity, window, 0);
      for (int loop = 2; loop <= d_.loops; ++loop) add(RegionKind::activity, window, loop);
      begin = window.end;
    }
    for (int begin = 0; begin < d_.encoded_frontier;) {
      const PositionRange block = cut(begin, d_.encoded_frontier);
      add(RegionKind::base_payload, block, 1);
      for (int loop = 2; loop <= d_.loops; ++loop) add(RegionKind::residual_payload, block, loop);
      for (int loop = 1; loop <= d_.loops; ++loop) add(RegionKind::parameters, block, loop);
      begin = block.end;
    }
    for (int begin = d_.encoded_frontier; begin < d_.prompt_length;) {
      const PositionRange part = cut(begin, d_.prompt_length);
      for (int loop = 1; loop <= d_.loops; ++loop) add(RegionKind::rows, part, loop);
      begin = part.end;
    }
    add(RegionKind::final_hidden, {d_.prompt_length - 1, d_.prompt_length}, d_.loops);
    return std::move(regions_);
  }

 private:
  // [begin, end of its window), at most to `limit`.
  PositionRange cut(int begin, int limit) const {
    const std::int64_t window_end = (std::int64_t{begin} / d_.window + 1) * d_.window;
    return {begin, static_cast<int>(std::min<std::int64_t>(window_end, limit))};
  }

  void add(RegionKind kind, PositionRange positions, int loop) {
    if (regions_.size() == kMaximumRegions) {
      throw HandoffError("descriptor: prompt of " + std::to_string(d_.prompt_length) + " positions in windows of " +
                         std::to_string(d_.window) + " has more than " + std::to_string(kMaximumRegions) + " regions");
    }
    Region region{kind, positions, loop, positions.size(), true, 0};
    if (loop >= 3 && kind != RegionKind::final_hidden) {
      const PositionRange window = cut(positions.begin / d_.window * d_.window, d_.prompt_length);
      const int rows = window_rows(d_, window.size(), loop);
      region.most_rows = std::min(rows, positions.size());
      region.rows_known = rows == window.size() || positions == window;
    }
    region.capacity = region_bytes(d_, region, region.most_rows);
    total_ += region.capacity;
    if (total_ > kMaximumHandoffBytes)
      throw HandoffError("descriptor: the regions have more than " + std::to_string(kMaximumHandoffBytes) + " bytes");
    regions_.push_back(region);
  }

  const Descriptor& d_;
  std::vector<Region> regions_;
  std::uint64_t total_ = 0;
};

}  // namespace

std::string_view to_string(RegionKind kind) {
  switch (kind) {
    case RegionKind::validity:
      return "validity";
    case RegionKind::activity:
      return "activity";
    case RegionKind::base_payload:
      return "base_payload";
    case RegionKind::residual_payload:
      return "residual_payload";
    case RegionKind::parameters:
      return "parameters";
    case RegionKind::rows:
      return "rows";
    case RegionKind::final_hidden:
      return "final_hidden";
  }
  throw InternalError("unknown kind of region");
}

std::string describe(const Region& region) {
  std::string text(to_string(region.kind));
  if (region.loop != 0) text += " of loop " + std::to_string(region.loop);
  return text + ", positions [" + std::to_string(region.positions.begin) + ", " + std::to_string(region.positions.end) + ")";
}

std::vector<Region> regions_of(const Descriptor& descriptor) { return RegionList(descriptor).build(); }

// Extents are bounded by the descriptor's ranges (2^10 layers, heads and channels, 2^24 rows), so that products of one region stay below
// 2^58.
std::size_t region_bytes(const Descriptor& d, const Region& region, int rows) {
  const std::uint64_t n = static_cast<std::uint64_t>(rows), width = static_cast<std::uint64_t>(d.head_dim);
  switch (region.kind) {
    case RegionKind::validity:
    case RegionKind::activity:
      return word_bytes(region.positions.size());
    case RegionKind::base_payload:
    case RegionKind::residual_payload:
      return tensor_rows(d) * n * (width / 2);
    case RegionKind::parameters: {
      const std::uint64_t k = static_cast<std::uint64_t>(groups(rows)) * width, v = n * static_cast<std::uint64_t>(groups(d.head_dim));
      return tensor_rows(d) / 2 * (k + v) * 4;
    }
    case RegionKind::rows:
      return tensor_rows(d) * n * width * element_bytes(d.element);
    case RegionKind::final_hidden:
      return static_cast<std::size_t>(d.hidden) * element_bytes(d.element);
  }
  throw InternalError("unknown kind of region");
}

int window_of(const Descriptor& descriptor, int position) { return position / descriptor.window; }

std::uint64_t dense_bytes(const Descriptor& d) {
  return tensor_rows(d) * static_cast<std::uint64_t>(d.loops) * static_cast<std::uint64_t>(d.prompt_length) *
         static_cast<std::uint64_t>(d.head_dim) * 2;
}

std::uint64_t bytes_final_after(const Descriptor& descriptor, std::span<const Region> regions, std::span<const std::uint64_t> bytes,
                                int loop) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    // A window counts as valid with its last loop.
    const int needs = region.kind == RegionKind::validity ? descriptor.loops : region.loop;
    if (needs <= loop) sum += bytes[i];
  }
  return sum;
}

std::uint64_t region_checksum(std::span<const std::byte> bytes) {
  std::uint64_t sum = checksum_mix(bytes.size());
  const auto word = [&](std::size_t begin, std::size_t count) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < count; ++i) value |= std::to_integer<std::uint64_t>(bytes[begin + i]) << (8 * i);
    return value;
  };
  const std::size_t whole = bytes.size() / 8;
  for (std::size_t i = 0; i < whole; ++i) sum += checksum_term(word(8 * i, 8), i);
  if (const std::size_t rest = bytes.size() % 8; rest != 0) sum += checksum_term(word(8 * whole, rest), whole);
  return sum;
}

ActivityMaps::ActivityMaps(const Descriptor& descriptor)
    : descriptor_(descriptor), last_loops_(static_cast<std::size_t>(descriptor.prompt_length), 0) {}

void ActivityMaps::set_words(int loop, int window, std::span<const std::byte> words) {
  const PositionRange range = window_range(window, descriptor_.prompt_length, descriptor_.window);
  if (words.size() != word_bytes(range.size())) {
    throw HandoffError("activity of window " + std::to_string(window) + " has " + std::to_string(words.size()) + " bytes, not " +
                       std::to_string(word_bytes(range.size())));
  }
  for (std::size_t i = 0; i < words.size() * 8; ++i) {
    const bool bit = (std::to_integer<unsigned>(words[i / 8]) >> (i % 8) & 1) != 0;
    if (i >= static_cast<std::size_t>(range.size())) {
      bits_beyond_ |= bit;
      continue;
    }
    std::uint8_t& loops = last_loops_[static_cast<std::size_t>(range.begin) + i];
    const auto mask = static_cast<std::uint8_t>(1u << (loop - 1));
    loops = static_cast<std::uint8_t>(bit ? loops | mask : loops & ~mask);
  }
}

std::vector<std::byte> ActivityMaps::words(int loop, int window) const {
  const PositionRange range = window_range(window, descriptor_.prompt_length, descriptor_.window);
  std::vector<std::byte> words(word_bytes(range.size()), std::byte{0});
  for (int i = 0; i < range.size(); ++i) {
    if (active(loop, range.begin + i)) words[static_cast<std::size_t>(i / 8)] |= static_cast<std::byte>(1u << (i % 8));
  }
  return words;
}

int ActivityMaps::executed_loops(int position) const {
  int loops = 0;
  while (loops < descriptor_.loops && active(loops + 1, position)) ++loops;
  return loops;
}

std::vector<std::int32_t> ActivityMaps::rows(int loop, PositionRange range) const {
  std::vector<std::int32_t> positions;
  for (int position = range.begin; position < range.end; ++position) {
    if (active(loop, position)) positions.push_back(position);
  }
  return positions;
}

std::string ActivityMaps::fault() const {
  if (bits_beyond_) return "an activity bitmap has a bit beyond its window";
  for (int position = 0; position < descriptor_.prompt_length; ++position) {
    const std::string where = "position " + std::to_string(position);
    if (!active(1, position)) return where + " is not valid";
    for (int loop = 2; loop <= descriptor_.loops; ++loop) {
      if (active(loop, position) && !active(loop - 1, position)) {
        return where + " executed loop " + std::to_string(loop) + " without loop " + std::to_string(loop - 1);
      }
    }
  }
  const int windows = window_count(descriptor_.prompt_length, descriptor_.window);
  for (int window = 0; window < windows; ++window) {
    const PositionRange range = window_range(window, descriptor_.prompt_length, descriptor_.window);
    for (int loop = 2; loop <= descriptor_.loops; ++loop) {
      const int expected = window_rows(descriptor_, range.size(), loop), found = static_cast<int>(rows(loop, range).size());
      if (found != expected) {
        return "window " + std::to_string(window) + ", loop " + std::to_string(loop) + " has " + std::to_string(found) +
               " active rows, its budget is " + std::to_string(expected);
      }
    }
  }
  return {};
}

std::string size_fault(std::span<const Region> regions, std::span<const RegionSummary> summaries) {
  if (summaries.size() != regions.size()) {
    return std::to_string(summaries.size()) + " regions are committed, the descriptor has " + std::to_string(regions.size());
  }
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (summaries[i].bytes > regions[i].capacity) {
      return describe(regions[i]) + ": " + std::to_string(summaries[i].bytes) + " bytes are more than the reserved " +
             std::to_string(regions[i].capacity);
    }
    if (is_bitmap(regions[i]) && summaries[i].bytes != regions[i].capacity)
      return describe(regions[i]) + ": " + std::to_string(summaries[i].bytes) + " bytes of a bitmap";
  }
  return {};
}

std::string arrival_fault(const Descriptor& descriptor, std::span<const Region> regions, std::span<const RegionSummary> summaries,
                          std::span<const std::uint64_t> checksums, std::span<const std::span<const std::byte>> bitmaps, ActivityMaps& maps) {
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (checksums[i] != summaries[i].checksum) return describe(regions[i]) + ": the checksum does not fit the bytes that arrived";
    if (is_bitmap(regions[i])) maps.set_words(std::max(1, regions[i].loop), window_of(descriptor, regions[i].positions.begin), bitmaps[i]);
  }
  if (std::string fault = maps.fault(); !fault.empty()) return fault;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const int loop = std::max(1, regions[i].loop);
    const int rows = regions[i].kind == RegionKind::final_hidden ? 1 : static_cast<int>(maps.rows(loop, regions[i].positions).size());
    const std::size_t expected = region_bytes(descriptor, regions[i], rows);
    if (summaries[i].bytes != expected) {
      return describe(regions[i]) + ": " + std::to_string(summaries[i].bytes) + " bytes, its " + std::to_string(rows) + " rows need " +
             std::to_string(expected);
    }
  }
  return {};
}

std::string activation_fault(const Descriptor& descriptor, std::span<const Region> regions, std::span<const RegionSummary> summaries,
                             std::span<const std::span<const std::byte>> data) {
  if (std::string fault = size_fault(regions, summaries); !fault.empty()) return fault;
  if (data.size() != regions.size()) {
    return std::to_string(data.size()) + " regions have arrived, the descriptor has " + std::to_string(regions.size());
  }
  std::vector<std::span<const std::byte>> arrived;
  std::vector<std::uint64_t> checksums;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const auto bytes = static_cast<std::size_t>(summaries[i].bytes);
    if (bytes > data[i].size()) return describe(regions[i]) + ": " + std::to_string(data[i].size()) + " of " + std::to_string(bytes) + " bytes have arrived";
    checksums.push_back(region_checksum(arrived.emplace_back(data[i].first(bytes))));
  }
  ActivityMaps maps(descriptor);
  return arrival_fault(descriptor, regions, summaries, checksums, arrived, maps);
}

}  // namespace loopgauge::handoff
