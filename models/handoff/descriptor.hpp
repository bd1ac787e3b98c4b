// SPDX-License-Identifier: Apache-2.0
// What the bytes of a handoff are of (S-PD-2). Both ends compute the list of regions from it (models/handoff/regions.hpp), and a receiver
// takes nothing whose descriptor differs from its own in any field. Byte layout: models/handoff/README.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/error.hpp"
#include "models/model_config.hpp"
#include "models/profile.hpp"
#include "models/trace.hpp"

namespace loopgauge::handoff {

inline constexpr std::uint32_t kDescriptorVersion = 3;
inline constexpr std::size_t kDescriptorFixedBytes = 172;         // before the configuration's text
inline constexpr std::size_t kMaximumConfigurationBytes = 4096;
inline constexpr std::size_t kChecksumBytes = 32;                 // SHA-256, not in hexadecimal digits

// A descriptor, message or archive is not what this end can take. The sentence names the field, what was found and what is accepted.
struct HandoffError : Error {
  explicit HandoffError(const std::string& message) : Error(ErrorKind::input, message) {}
};

// Of K/V rows that are not encoded and of hidden rows. float64 is that of the profile `double`.
enum class ElementType : std::uint8_t { bfloat16 = 1, float64 = 2 };
std::size_t element_bytes(ElementType type);
std::string_view to_string(ElementType type);

// How a row that did not execute a loop is told from one that did.
enum class DepthRepresentation : std::uint8_t {
  compact_rows = 1,  // a loop's region holds the rows that executed it, in position order; an activity bitmap names them; others inherit
};

// Along what a quantization group runs.
enum class GroupAxis : std::uint8_t { rows = 1, channels = 2 };

struct Descriptor {
  std::string model_sha256;                    // 64 hexadecimal digits
  std::string prompt_sha256;                   // of the prompt's token ids as little-endian 32-bit words
  float rms_norm_eps = 0.0f;                   // of config.json: the checkpoint's hash does not cover it
  double rope_theta = 0.0;                     // likewise
  std::int32_t layers = 0, loops = 0, heads = 0, head_dim = 0, hidden = 0, vocab = 0;
  std::int32_t prompt_length = 0;              // positions that are handed over
  std::int32_t encoded_frontier = 0;           // E at that committed length; 0 without quantization
  std::int32_t window = 0;
  std::int32_t tail = 0;
  std::array<std::int32_t, kLoops> retention_bp{kBasisPoints, kBasisPoints, kBasisPoints, kBasisPoints};  // all 10000 where nothing is selected
  ElementType element = ElementType::bfloat16;
  Profile profile = Profile::declared;         // bits of one profile that are gone on with by another are those of neither
  bool quantized = false;
  std::uint8_t code_bits = 4;
  DepthRepresentation depth = DepthRepresentation::compact_rows;
  GroupAxis k_group_axis = GroupAxis::rows, v_group_axis = GroupAxis::channels;
  std::uint16_t k_group_size = kGroupSize, v_group_size = kGroupSize;
  EncodingPolicy policy = EncodingPolicy::rolling;
  EncodingTiming timing = EncodingTiming::serial_aligned;
  FlushRule flush = FlushRule::committed;
  std::int32_t request = 0;                    // index in the trace that both ends run
  std::string configuration;                   // EffectiveConfig::canonical_json()
  bool operator==(const Descriptor&) const = default;
};

Descriptor make_descriptor(const ModelConfig& model, const std::string& model_sha256, const EffectiveConfig& config, int request_index,
                           const TraceRequest& request, Profile profile);

std::vector<std::byte> serialize(const Descriptor& descriptor);
// Throws HandoffError naming the first of magic, version, length, checksum and fields that is not acceptable, the configuration among them: canonical
// JSON that says what the fields say. Reads nothing outside `bytes`.
Descriptor parse_descriptor(std::span<const std::byte> bytes);

// "window is 128, here it is 256": the first field in which a descriptor differs from what this end expects; empty when none does. A
// difference of configurations names the setting.
std::string first_difference(const Descriptor& found, const Descriptor& expected);

}  // namespace loopgauge::handoff
