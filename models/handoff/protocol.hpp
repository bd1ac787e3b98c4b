// SPDX-License-Identifier: Apache-2.0
// The handoff of one request as two state machines (S-PD-1, S-PD-5..8): what an event makes a side do, and nothing else. They do no I/O and
// hold no bytes, so a test can walk every order of events.
//
//     sender      idle -> offered -> sending -> committed -> closed
//                          any of them -> cancelling (writes under way) -> closing (the receiver's answer) -> closed
//     receiver    idle -> reserving -> receiving -> activating -> active -> closed
//                                      receiving -> cancelling (the sender's writes) -> closed
//
//     sender              receiver
//     offer         ->                    the descriptor
//                         reserve         all regions or nothing
//                   <-    reserved        where the regions are to be written; or: refused, with the reason
//     write               (data)          partitions, in any order, at most so many bytes at once
//     arrived(s)    ->                    after write s has ended: its bytes are visible to the receiver
//     commit(n)     ->                    n partitions were posted, their sequence numbers are 0..n-1; sizes and checksums of the regions
//                         activate        when 0..n-1 have arrived
//                   <-    activated       or: failed, with the reason; the receiver holds nothing then
//     release
//
//     cancel: sender:    posts nothing more, waits for its writes, releases the source, then  writes_ended ->  until it is answered
//             receiver:  cancel ->, waits for writes_ended, frees, answers  released
//             A receiver that is active answers writes_ended with activated: the request is there, the cancel came too late.
//
// Messages may be lost, repeated, late and out of order, and the other side may be gone. What a lost message leaves undone is ended by a
// lease: lease_expired() is an event like the others. A transport reports peer_lost() when the other side is gone AND none of its writes can
// land any more.
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>
#include <vector>

namespace loopgauge::handoff {

enum class MessageKind : std::uint8_t {
  // from the sender
  offer = 1,
  arrived = 2,
  commit = 3,
  writes_ended = 4,
  // from the receiver
  reserved = 16,
  refused = 17,
  activated = 18,
  failed = 19,
  cancel = 20,
  released = 21,
};
std::string_view to_string(MessageKind kind);

// How a transfer ended, as this side knows it.
enum class Outcome : std::uint8_t {
  open,         // not yet
  handed_over,  // the receiver has the request
  refused,      // the receiver reserved nothing
  cancelled,    // by this side or, told by a message, by the other
  failed,       // activation failed, a write failed, or the protocol was violated
  expired,      // a lease
  peer_lost,
};
std::string_view to_string(Outcome outcome);

// What the owner of a machine is to do, in order.
enum class ActionKind : std::uint8_t {
  send,      // `message`, with `value`: the sequence number of arrived, the count of commit
  post,      // sender: start writing partition `value`
  release,   // sender: the source is not needed any more; no write reads it
  reserve,   // receiver: take memory for every region or for none, then reservation()
  activate,  // receiver: check and import what has arrived, then activation()
  free,      // receiver: give back what was reserved; no write can reach it any more
};

struct ProtocolAction {
  ActionKind kind = ActionKind::send;
  MessageKind message = MessageKind::offer;
  std::uint32_t value = 0;
  bool operator==(const ProtocolAction&) const = default;
};
using ProtocolActions = std::vector<ProtocolAction>;

class Sender {
 public:
  enum class State : std::uint8_t { idle, offered, sending, committed, cancelling, closing, closed };

  // At most `most_bytes_in_flight` are being written at once, but one partition always may.
  explicit Sender(std::uint64_t most_bytes_in_flight) : most_bytes_in_flight_(most_bytes_in_flight) {}

  ProtocolActions start();
  // Partition of `bytes` whose source is final: its sequence number is the count of those before.
  ProtocolActions ready(std::uint64_t bytes);
  // No more partitions come.
  ProtocolActions all_ready();
  // A posted write has ended; without success its bytes may be there in part.
  ProtocolActions written(std::uint32_t sequence, bool success);
  ProtocolActions receive(MessageKind message);
  ProtocolActions cancel();
  ProtocolActions lease_expired();
  ProtocolActions peer_lost();

  State state() const { return state_; }
  Outcome outcome() const { return outcome_; }
  bool closed() const { return state_ == State::closed; }
  std::uint64_t bytes_in_flight() const { return bytes_in_flight_; }
  std::uint32_t partitions() const { return static_cast<std::uint32_t>(sizes_.size()); }
  auto operator<=>(const Sender&) const = default;  // every state can be told apart, and ordered

 private:
  enum class Write : std::uint8_t { waiting, posted, ended, dropped };
  bool writes_under_way() const;
  ProtocolActions post_what_fits();
  ProtocolActions stop(Outcome outcome);
  ProtocolActions settle();
  ProtocolActions close(Outcome outcome);

  std::uint64_t most_bytes_in_flight_;
  State state_ = State::idle;
  Outcome outcome_ = Outcome::open;
  bool all_ready_ = false;
  bool holds_source_ = true;
  bool peer_gone_ = false;
  std::uint64_t bytes_in_flight_ = 0;
  std::uint32_t next_ = 0;              // to post
  std::vector<std::uint64_t> sizes_;    // by sequence number
  std::vector<Write> writes_;
};

class Receiver {
 public:
  enum class State : std::uint8_t { idle, reserving, receiving, activating, active, cancelling, closed };

  // `value`: the sequence number of arrived, the count of commit.
  ProtocolActions receive(MessageKind message, std::uint32_t value = 0);
  ProtocolActions reservation(bool success);
  ProtocolActions activation(bool success);
  // Also of an active request: its storage is to be freed then.
  ProtocolActions cancel();
  ProtocolActions lease_expired();
  ProtocolActions peer_lost();

  State state() const { return state_; }
  Outcome outcome() const { return outcome_; }
  bool closed() const { return state_ == State::closed; }
  // Whether memory is reserved that writes may reach or a request uses.
  bool holds_memory() const {
    return state_ == State::receiving || state_ == State::activating || state_ == State::active || state_ == State::cancelling;
  }
  std::uint32_t arrived() const { return arrived_count_; }
  auto operator<=>(const Receiver&) const = default;

 private:
  ProtocolActions on_offer();
  ProtocolActions on_writes_ended();
  ProtocolActions activate_if_complete();
  ProtocolActions stop(Outcome outcome);
  ProtocolActions end(Outcome outcome, bool answer);

  State state_ = State::idle;
  Outcome outcome_ = Outcome::open;
  bool cancel_requested_ = false;       // while something that cannot be broken off was under way
  bool committed_ = false;
  std::uint32_t count_ = 0;
  std::uint32_t arrived_count_ = 0;
  std::vector<bool> arrived_;           // by sequence number
};

// Sequence numbers at and above this are refused.
inline constexpr std::uint32_t kMaximumPartitions = 1u << 24;

}  // namespace loopgauge::handoff
