// SPDX-License-Identifier: Apache-2.0
// Control messages of the handoff as bytes (models/handoff/README.md). Data never travels in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/handoff/protocol.hpp"
#include "models/handoff/regions.hpp"

namespace loopgauge::handoff {

inline constexpr std::uint32_t kMessageVersion = 1;
inline constexpr std::size_t kMaximumMessageBytes = std::size_t{1} << 26;
inline constexpr std::size_t kMaximumReasonBytes = 1024;

// Which transfer: `sender` tells lives of senders apart (a number drawn when one starts), `number` its transfers, counted up and never used again.
struct TransferId {
  std::uint64_t sender = 0;
  std::uint64_t number = 0;
  auto operator<=>(const TransferId&) const = default;
};

// Where the receiver wants a region: `address` means something to the transport alone.
struct Destination {
  std::uint64_t address = 0;
  std::uint64_t capacity = 0;
  bool operator==(const Destination&) const = default;
};

// Bytes of one region that are written at once.
struct Partition {
  std::uint32_t sequence = 0;
  std::uint32_t region = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Partition&) const = default;
};

struct Message {
  MessageKind kind = MessageKind::offer;
  TransferId transfer;
  std::vector<std::byte> descriptor;        // offer: serialize(Descriptor)
  Partition partition;                      // arrived
  std::uint32_t partitions = 0;             // commit
  std::vector<RegionSummary> summaries;     // commit: by region
  std::vector<Destination> destinations;    // reserved: by region
  std::string reason;                       // refused, failed
  bool operator==(const Message&) const = default;
};

std::vector<std::byte> serialize(const Message& message);
// Throws HandoffError naming what is not acceptable. Reads nothing outside `bytes` and allocates no more than a small multiple of them.
Message parse_message(std::span<const std::byte> bytes);

}  // namespace loopgauge::handoff
