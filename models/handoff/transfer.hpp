// SPDX-License-Identifier: Apache-2.0
// What an executor exposes for a handoff, and what carries one: the interfaces between which harness/handoff runs the protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/handoff/descriptor.hpp"
#include "models/handoff/message.hpp"
#include "models/handoff/regions.hpp"

namespace loopgauge::handoff {

// Where the regions that a transport moves lie.
enum class MemoryPlace : std::uint8_t { host, device };

// Memory of a region. `device` is the CUDA ordinal of this process, -1 for memory that the host reads and writes.
struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  int device = -1;
  bool on_host() const { return device < 0; }
};

// A region whose bytes are final.
struct ExportedRegion {
  std::uint32_t region = 0;  // its number in regions_of(descriptor)
  Memory memory;             // exactly its bytes; unchanged and alive until sent() or release()
  std::uint64_t checksum = 0;
};

// The side that has computed a prompt: an executor that runs with Stage::prefill. `request` is an index into Trace::requests.
class Source {
 public:
  virtual ~Source() = default;
  virtual Descriptor describe(int request) const = 0;
  // False for a request that this side will never have all of, as of one cancelled before its prompt was complete: it need not be offered.
  virtual bool holds(int) const { return true; }
  // Regions that have become final since the last call, in any order, each once in the life of the request: rows and activity as (window, loop)
  // completes, encoded streams as they are encoded, the final hidden row with the prompt. They hold about as much memory of their own as
  // `most_bytes` says, one region always may: the others follow when sent() has made room. What is exported is a copy or is held against
  // flushes, rewinds, evictions and cancellation (S-PD-3): nothing the request does changes it. What is still being copied comes with a later call;
  // a source that executes asynchronously waits for nothing before the prompt is complete.
  virtual std::vector<ExportedRegion> export_ready(int request, std::size_t most_bytes) = 0;
  // Every region has been exported.
  virtual bool exported_all(int request) const = 0;
  // No write reads the region any more.
  virtual void sent(int request, std::uint32_t region) = 0;
  // The request is elsewhere or nowhere: everything that it holds here is free. Idempotent; also for a request that never began.
  virtual void release(int request) = 0;
};

// The side that goes on: an executor that runs with Stage::decode.
class Target {
 public:
  virtual ~Target() = default;
  // What this end would send itself for the request: every field of an offer must agree with it.
  virtual Descriptor expected(int request) const = 0;
  // Memory for every region, `capacity` bytes each, and whatever activation needs: all or nothing. Throws HandoffError naming the differing
  // field, or an Error that says what there is no room for; nothing is held then.
  virtual std::vector<Memory> reserve(int request, const Descriptor& descriptor) = 0;
  // Checks sizes, checksums and activity, then the request exists with committed length P as if it had run here, and its first logits are
  // formed; visible to whatever is submitted next. Throws HandoffError when the bytes are not what they should be: then nothing was imported and
  // the reservation still stands.
  virtual void activate(int request, std::span<const RegionSummary> summaries) = 0;
  // Gives back a reservation that was not activated. No write can reach it any more.
  virtual void abort(int request) = 0;
  // Bytes that reservations hold beside the requests' own storage, now and at most.
  virtual std::size_t transfer_bytes() const = 0;
  virtual std::size_t most_transfer_bytes() const = 0;
};

// Control messages, one direction each way. They may be lost, repeated or overtaken by others only where a transport says so.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual void send(std::span<const std::byte> message) = 0;
  // The next message, if there is one; never waits.
  virtual std::optional<std::vector<std::byte>> receive() = 0;
  // The other side is gone and none of its writes can land any more.
  virtual bool peer_lost() const = 0;
};

struct WriteResult {
  std::uint64_t ticket = 0;
  bool success = false;
  bool operator==(const WriteResult&) const = default;
};

// The sender's end of a transport.
class SenderTransport {
 public:
  virtual ~SenderTransport() = default;
  virtual std::string_view name() const = 0;   // "host", "device", "peer", "socket", "ipc"
  virtual Channel& channel() = 0;
  // Begins to copy `source` to `offset` of the destination; may have ended on return, is reported by ended() in any case. The source stays
  // until then. A destination that cannot be reached is a write that fails.
  virtual void write(std::uint64_t ticket, const Memory& source, const Destination& destination, std::uint64_t offset) = 0;
  // Writes that have ended since the last call: their bytes are visible to the receiver.
  virtual std::vector<WriteResult> ended() = 0;
};

// The receiver's end.
class ReceiverTransport {
 public:
  virtual ~ReceiverTransport() = default;
  virtual Channel& channel() = 0;
  // The address under which the sender writes to `memory`, until withdraw(). Throws an Error where it cannot be shared; nothing is exposed then.
  virtual Destination expose(const Memory& memory) = 0;
  virtual void withdraw(const Destination& destination) = 0;
};

struct TransportEnds {
  std::unique_ptr<SenderTransport> sender;
  std::unique_ptr<ReceiverTransport> receiver;
  MemoryPlace place = MemoryPlace::host;   // of the memory that it moves, at both ends
};

}  // namespace loopgauge::handoff
