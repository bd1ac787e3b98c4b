// SPDX-License-Identifier: Apache-2.0
// A preempted request in host memory (S-ACT-3, S-ACT-4): one block of bytes that is checked as a whole before anything is allocated for it.
//
// Little-endian:
//     0  8   "LGSNAPSH"
//     8  4   version, 1
//    12  4   zero
//    16  8   bytes of the description
//    24  8   bytes of the payload
//    32  64  SHA-256 in hexadecimal digits, of bytes 0..31 and of everything from 96 on
//    96  ..  description: owner and state, in the order of the members below; a list or text is preceded by its 64-bit length
//    ..  ..  payload: device ranges one after the other, in the order of the request (see device_ranges in cuda_run_actions)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "models/error.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/reference_store.hpp"

namespace loopgauge::optimized {

// The snapshot is not what this run can restore. The message names the field that differs, and both values.
struct SnapshotError : Error {
  explicit SnapshotError(const std::string& message) : Error(ErrorKind::input, message) {}
};

// Whose state it is. A snapshot is restored only where all of it agrees.
struct SnapshotOwner {
  std::string model_sha256;
  std::string configuration;              // EffectiveConfig::canonical_json()
  std::array<std::int32_t, 4> extents{};  // layers, heads, head_dim, hidden
  std::int32_t prompt_length = 0;
  std::int32_t capacity = 0;  // positions
  std::string tokens_sha256;  // of what the request reads: prompt and forced tokens
  std::string request;        // which of the trace's, and which generation of it
  bool operator==(const SnapshotOwner&) const = default;
};

inline constexpr std::int32_t kNoPosition = std::numeric_limits<std::int32_t>::max();

// A prompt window between two loops. Its hidden rows, scores and active positions are payload.
struct WindowSnapshot {
  std::int32_t window = 0;
  std::array<std::int32_t, 2> scored{};  // rows scored for loops 3 and 4
  bool operator==(const WindowSnapshot&) const = default;
};

// Everything of a request but its bytes on the device.
struct RequestSnapshot {
  std::int32_t complete_windows = 0, committed = 0, encoded = 0;
  std::int32_t encoded_ahead = 0;           // blocks from `encoded` to here exist beside their BF16 rows
  std::int32_t unreadable = kNoPosition;    // of these, positions from here on are read as BF16
  std::uint64_t incarnations = 0;  // tokens that have begun
  KvLayout kv;
  std::vector<WindowSnapshot> windows;
  // The decode row on its way, or the last one that finished. Its token, hidden row and exit state are payload.
  std::int32_t row_position = -1;
  std::int32_t row_completed = 0;  // loops
  std::int32_t row_last_loop = kLoops;
  bool row_depth_given = false, row_committed = false;
  ReferenceStore::Key row_key;
  bool has_reference = false;  // the row's attention reference, payload as well
  ReferenceStore::State reference_state = ReferenceStore::State::empty;
};

// Room for the payload, which the caller fills (payload_of) before it seals the snapshot.
std::vector<std::byte> begin_snapshot(const SnapshotOwner& owner, const RequestSnapshot& state, std::size_t payload_bytes);
std::span<std::byte> payload_of(std::vector<std::byte>& snapshot);
void seal_snapshot(std::vector<std::byte>& snapshot);

struct OpenedSnapshot {
  RequestSnapshot state;
  std::span<const std::byte> payload;  // in the snapshot's memory
};
// Throws SnapshotError when length, magic, version, checksum or any field of the owner differ.
OpenedSnapshot open_snapshot(std::span<const std::byte> snapshot, const SnapshotOwner& owner);

}  // namespace loopgauge::optimized
