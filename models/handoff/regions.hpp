// SPDX-License-Identifier: Apache-2.0
// The regions of a handoff and where every byte of them lies (S-PD-2, S-PD-4). Neither executor stores K/V like this: the layout is the one
// that both can be compared in, byte by byte. With the sizes in bytes: models/handoff/README.md.
//
// Windows are the request's selection windows [iW, min((i+1)W, P)). Encoded are the blocks that tile [0, E), cut at window boundaries; not
// encoded are the positions [E, P), cut at window boundaries too ("tail" with quantization, "planes" without). Rows of loop r are those that
// executed loop r, compact, in position order; n is how many.
//     validity          per window          [ceil(N/64)] 64-bit words, bit i of word j: position begin + 64j + i is complete in every plane
//     activity          per window, loop    the same for "executed the loop", loops 2..4; absent positions inherit from the loop before
//     base_payload      per block           [layer][K, V][head][n][head_dim/2] bytes of loop 1: channel 2i in the low nibble, 2i+1 in the high one
//     residual_payload  per block, loop     the same of loops 2..4
//     parameters        per block, loop     K [layer][head][ceil(n/64)][head_dim], then V [layer][head][n][ceil(head_dim/64)]: pairs of FP16
//                                           (minimum, scale)
//     rows              per window, loop    [layer][K, V][head][n][head_dim] elements of positions that are not encoded; K after RoPE
//     final_hidden      once                [hidden] elements: H of the last loop at position P - 1
// Integers and floats are little-endian. There is no padding between or inside regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/handoff/descriptor.hpp"

namespace loopgauge::handoff {

enum class RegionKind : std::uint8_t {
  validity = 1,
  activity = 2,
  base_payload = 3,
  residual_payload = 4,
  parameters = 5,
  rows = 6,
  final_hidden = 7,
};
inline constexpr int kRegionKinds = 7;
std::string_view to_string(RegionKind kind);

struct Region {
  RegionKind kind = RegionKind::validity;
  PositionRange positions;     // window, block, or part of a window that is not encoded; of the final hidden row its position
  int loop = 0;                // 1..4; 0 for validity
  int most_rows = 0;           // rows that can execute the loop there
  bool rows_known = true;      // it is that many; otherwise the activity says how many (a selection window that E cuts in two)
  std::size_t capacity = 0;    // bytes for most_rows
};
// "residual_payload of loop 3, positions [256, 512)".
std::string describe(const Region& region);

inline constexpr std::size_t kMaximumRegions = std::size_t{1} << 20;
inline constexpr std::uint64_t kMaximumHandoffBytes = std::uint64_t{1} << 46;

// Every region of the handoff, in a fixed order: by window validity and activity, by block its payload and parameters, rows, final hidden. A
// region's index here is its number in messages and archives. Throws HandoffError for a descriptor of more regions or bytes than the limits.
std::vector<Region> regions_of(const Descriptor& descriptor);
// Bytes of a region with `rows` rows.
std::size_t region_bytes(const Descriptor& descriptor, const Region& region, int rows);
// Windows of the prompt are numbered from 0: the window that `position` lies in.
int window_of(const Descriptor& descriptor, int position);

// K of all loops and V of all loops in BF16 without inheritance or encoding, what a handoff of the dense baseline moves; without hidden.
std::uint64_t dense_bytes(const Descriptor& descriptor);
// Of the regions' bytes, those that depend on no loop after `loop`: what may leave when it has completed everywhere. `bytes` by region. With
// quantization encoded regions count where the encoder needs no more than that loop, whether or not the executor encodes so early.
std::uint64_t bytes_final_after(const Descriptor& descriptor, std::span<const Region> regions, std::span<const std::uint64_t> bytes, int loop);

// What an end keeps of a region beside its bytes.
struct RegionSummary {
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;  // region_checksum of them
  bool operator==(const RegionSummary&) const = default;
};

// Sum, modulo 2^64, of mix(word + (i + 1) * 0x9E3779B97F4A7C15) over the little-endian 64-bit words i, the last one filled up with zeros, and
// of mix(count of bytes); mix is the finalizer of SplitMix64, a bijection. So any change within one word is found with certainty, anything
// else but for one case in 2^64, and parts can be summed in any order by any number of threads, which SHA-256 does not allow.
std::uint64_t region_checksum(std::span<const std::byte> bytes);
constexpr std::uint64_t checksum_mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
// The summand of word `index`.
constexpr std::uint64_t checksum_term(std::uint64_t word, std::uint64_t index) { return checksum_mix(word + (index + 1) * 0x9E3779B97F4A7C15u); }

// Which positions executed which loop, from the validity and activity regions.
class ActivityMaps {
 public:
  explicit ActivityMaps(const Descriptor& descriptor);

  // Loop 1 is validity. `words` as in the region, which is the window's.
  void set_words(int loop, int window, std::span<const std::byte> words);
  void set_active(int loop, int position) { last_loops_.at(static_cast<std::size_t>(position)) |= static_cast<std::uint8_t>(1u << (loop - 1)); }
  std::vector<std::byte> words(int loop, int window) const;

  bool active(int loop, int position) const { return (last_loops_.at(static_cast<std::size_t>(position)) >> (loop - 1) & 1) != 0; }
  // The last loop that the position executed.
  int executed_loops(int position) const;
  // Ascending positions of the range that executed the loop.
  std::vector<std::int32_t> rows(int loop, PositionRange range) const;

  // Why these maps are of no complete prompt under this descriptor (a position that is not valid, a loop without the one before, more or
  // fewer rows in a window than its budget, a bit beyond the window); empty when they are.
  std::string fault() const;

 private:
  Descriptor descriptor_;
  std::vector<std::uint8_t> last_loops_;  // [prompt_length] bit loop - 1
  bool bits_beyond_ = false;              // a word has a bit past its window
};

// Why regions with these bytes cannot be activated: a size that the activity does not give, a checksum that does not fit, maps with a fault.
// `data` are the received bytes, all capacity of each; `summaries` is what the sender says of them. Empty when all is well.
std::string activation_fault(const Descriptor& descriptor, std::span<const Region> regions, std::span<const RegionSummary> summaries,
                             std::span<const std::span<const std::byte>> data);
// The same in two steps, for receivers whose memory the host cannot read. First: more regions or bytes than were reserved.
std::string size_fault(std::span<const Region> regions, std::span<const RegionSummary> summaries);
// Then, with checksums [region] that the receiver has formed of the bytes that arrived, and the bytes of validity and activity regions (of the
// others nothing is looked at). Sets `maps`, which must be of the descriptor and empty.
std::string arrival_fault(const Descriptor& descriptor, std::span<const Region> regions, std::span<const RegionSummary> summaries,
                          std::span<const std::uint64_t> checksums, std::span<const std::span<const std::byte>> bitmaps, ActivityMaps& maps);
inline bool is_bitmap(const Region& region) { return region.kind == RegionKind::validity || region.kind == RegionKind::activity; }

}  // namespace loopgauge::handoff
