// SPDX-License-Identifier: Apache-2.0
#include "models/handoff/protocol.hpp"

#include <algorithm>

#include "models/error.hpp"

namespace loopgauge::handoff {
namespace {

ProtocolAction send(MessageKind message, std::uint32_t value = 0) { return {ActionKind::send, message, value}; }
ProtocolAction post(std::uint32_t sequence) { return {ActionKind::post, {}, sequence}; }
ProtocolAction perform(ActionKind kind) { return {kind, {}, 0}; }

void append(ProtocolActions& to, const ProtocolActions& more) { to.insert(to.end(), more.begin(), more.end()); }

}  // namespace

std::string_view to_string(MessageKind kind) {
  switch (kind) {
    case MessageKind::offer:
      return "offer";
    case MessageKind::arrived:
      return "arrived";
    case MessageKind::commit:
      return "commit";
    case MessageKind::writes_ended:
      return "writes_ended";
    case MessageKind::reserved:
      return "reserved";
    case MessageKind::refused:
      return "refused";
    case MessageKind::activated:
      return "activated";
    case MessageKind::failed:
      return "failed";
    case MessageKind::cancel:
      return "cancel";
    case MessageKind::released:
      return "released";
  }
  throw InternalError("unknown message");
}

std::string_view to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::open:
      return "open";
    case Outcome::handed_over:
      return "handed over";
    case Outcome::refused:
      return "refused";
    case Outcome::cancelled:
      return "cancelled";
    case Outcome::failed:
      return "failed";
    case Outcome::expired:
      return "expired";
    case Outcome::peer_lost:
      return "peer lost";
  }
  throw InternalError("unknown outcome");
}

// -------------------------------------------------------------------------------------------------------------------------- sender

ProtocolActions Sender::start() {
  if (state_ != State::idle) return {};
  state_ = State::offered;
  return {send(MessageKind::offer)};
}

ProtocolActions Sender::ready(std::uint64_t bytes) {
  if (all_ready_) throw InternalError("a partition becomes ready after the last one");
  if (sizes_.size() == kMaximumPartitions) throw InternalError("a transfer has too many partitions");
  sizes_.push_back(bytes);
  writes_.push_back(Write::waiting);
  return state_ == State::sending ? post_what_fits() : ProtocolActions{};
}

ProtocolActions Sender::all_ready() {
  all_ready_ = true;
  return state_ == State::sending ? post_what_fits() : ProtocolActions{};
}

ProtocolActions Sender::post_what_fits() {
  ProtocolActions actions;
  while (next_ < sizes_.size() && (bytes_in_flight_ == 0 || bytes_in_flight_ + sizes_[next_] <= most_bytes_in_flight_)) {
    bytes_in_flight_ += sizes_[next_];
    writes_[next_] = Write::posted;
    actions.push_back(post(next_++));
  }
  if (all_ready_ && next_ == sizes_.size()) {
    state_ = State::committed;
    actions.push_back(send(MessageKind::commit, next_));
  }
  return actions;
}

ProtocolActions Sender::written(std::uint32_t sequence, bool success) {
  if (sequence >= writes_.size() || writes_[sequence] != Write::posted) throw InternalError("a write ends that was not under way");
  writes_[sequence] = Write::ended;
  bytes_in_flight_ -= sizes_[sequence];
  if (state_ == State::cancelling) return settle();
  if (!success) return stop(Outcome::failed);
  ProtocolActions actions{send(MessageKind::arrived, sequence)};
  if (state_ == State::sending) append(actions, post_what_fits());
  return actions;
}

// Nothing more is posted; the source stays until the writes that are under way have ended.
ProtocolActions Sender::stop(Outcome outcome) {
  outcome_ = outcome;
  state_ = State::cancelling;
  for (std::uint32_t i = next_; i < writes_.size(); ++i) writes_[i] = Write::dropped;
  next_ = static_cast<std::uint32_t>(writes_.size());
  return settle();
}

bool Sender::writes_under_way() const { return std::find(writes_.begin(), writes_.end(), Write::posted) != writes_.end(); }

ProtocolActions Sender::settle() {
  if (writes_under_way()) return {};
  if (peer_gone_) return close(outcome_);
  state_ = State::closing;
  ProtocolActions actions;
  if (holds_source_) actions.push_back(perform(ActionKind::release));
  holds_source_ = false;
  actions.push_back(send(MessageKind::writes_ended));
  return actions;
}

ProtocolActions Sender::close(Outcome outcome) {
  outcome_ = outcome;
  state_ = State::closed;
  const bool held = holds_source_;
  holds_source_ = false;
  return held ? ProtocolActions{perform(ActionKind::release)} : ProtocolActions{};
}

ProtocolActions Sender::receive(MessageKind message) {
  const bool stopped = state_ == State::cancelling || state_ == State::closing;
  switch (message) {
    case MessageKind::reserved:
      if (state_ == State::offered) {
        state_ = State::sending;
        return post_what_fits();
      }
      // An offer that was late was reserved for after the receiver had been told to forget it.
      if (state_ == State::closing || (state_ == State::closed && outcome_ != Outcome::handed_over))
        return {send(MessageKind::writes_ended)};
      return {};
    case MessageKind::refused:
      if (state_ == State::offered) return close(Outcome::refused);
      return state_ == State::closing ? close(outcome_) : ProtocolActions{};
    case MessageKind::activated:
    case MessageKind::failed:
      // Every partition has arrived then. A receiver that says so earlier is wrong, and the source stays until the writes have ended.
      if (writes_under_way()) return stopped ? ProtocolActions{} : stop(Outcome::failed);
      if (state_ == State::committed || stopped) {
        return close(message == MessageKind::activated ? Outcome::handed_over : stopped ? outcome_ : Outcome::failed);
      }
      return {};
    case MessageKind::cancel:
      if (state_ == State::offered || state_ == State::sending || state_ == State::committed) return stop(Outcome::cancelled);
      return state_ == State::closing || state_ == State::closed ? ProtocolActions{send(MessageKind::writes_ended)} : ProtocolActions{};
    case MessageKind::released:
      if (state_ == State::closing) return close(outcome_);
      // The receiver knows nothing of the transfer any more.
      if (state_ == State::offered || state_ == State::sending || state_ == State::committed) return stop(Outcome::cancelled);
      return {};
    default:
      return {};  // a message of senders
  }
}

ProtocolActions Sender::cancel() {
  if (state_ == State::idle) return close(Outcome::cancelled);
  if (state_ == State::offered || state_ == State::sending || state_ == State::committed) return stop(Outcome::cancelled);
  return {};
}

ProtocolActions Sender::lease_expired() {
  if (state_ == State::offered || state_ == State::sending || state_ == State::committed) return stop(Outcome::expired);
  return state_ == State::closing ? ProtocolActions{send(MessageKind::writes_ended)} : ProtocolActions{};
}

ProtocolActions Sender::peer_lost() {
  peer_gone_ = true;
  if (state_ == State::closed) return {};
  if (state_ == State::cancelling) return settle();
  if (state_ == State::closing) return close(outcome_);
  return stop(Outcome::peer_lost);
}

// ------------------------------------------------------------------------------------------------------------------------ receiver

ProtocolActions Receiver::receive(MessageKind message, std::uint32_t value) {
  switch (message) {
    case MessageKind::offer:
      return on_offer();
    case MessageKind::arrived:
      if (state_ != State::receiving) return {};
      if (value >= kMaximumPartitions || (committed_ && value >= count_)) return stop(Outcome::failed);
      if (value >= arrived_.size()) arrived_.resize(value + 1, false);
      if (arrived_[value]) return {};
      arrived_[value] = true;
      ++arrived_count_;
      return activate_if_complete();
    case MessageKind::commit:
      if (state_ != State::receiving) return {};
      if (value > kMaximumPartitions || value < arrived_.size() || (committed_ && value != count_)) return stop(Outcome::failed);
      committed_ = true;
      count_ = value;
      return activate_if_complete();
    case MessageKind::writes_ended:
      return on_writes_ended();
    default:
      return {};  // a message of receivers
  }
}

ProtocolActions Receiver::on_offer() {
  switch (state_) {
    case State::idle:
      state_ = State::reserving;
      return {perform(ActionKind::reserve)};
    case State::receiving:
      return {send(MessageKind::reserved)};
    case State::active:
      return {send(MessageKind::activated)};
    case State::closed:
      if (outcome_ == Outcome::refused) return {send(MessageKind::refused)};
      return {send(outcome_ == Outcome::failed ? MessageKind::failed : MessageKind::released)};
    default:
      return {};
  }
}

ProtocolActions Receiver::reservation(bool success) {
  if (state_ != State::reserving) throw InternalError("a reservation that nobody asked for");
  if (!success) {
    state_ = State::closed;
    outcome_ = Outcome::refused;
    return {send(MessageKind::refused)};
  }
  state_ = State::receiving;
  ProtocolActions actions{send(MessageKind::reserved)};
  if (cancel_requested_) append(actions, stop(Outcome::cancelled));
  return actions;
}

ProtocolActions Receiver::activate_if_complete() {
  if (!committed_ || arrived_count_ != count_) return {};
  state_ = State::activating;
  return {perform(ActionKind::activate)};
}

// Every write that the sender posted has ended: 0..count-1 have arrived.
ProtocolActions Receiver::activation(bool success) {
  if (state_ != State::activating) throw InternalError("an activation that nobody asked for");
  if (!success) {
    state_ = State::closed;
    outcome_ = Outcome::failed;
    return {perform(ActionKind::free), send(MessageKind::failed)};
  }
  if (cancel_requested_) return end(Outcome::cancelled, true);
  state_ = State::active;
  outcome_ = Outcome::handed_over;
  return {send(MessageKind::activated)};
}

ProtocolActions Receiver::on_writes_ended() {
  switch (state_) {
    case State::idle:
      // The offer is late or lost: when it comes it is of no use any more.
      state_ = State::closed;
      outcome_ = Outcome::cancelled;
      return {send(MessageKind::released)};
    case State::receiving:
      return end(Outcome::cancelled, true);
    case State::cancelling:
      return end(outcome_, true);
    case State::active:
      return {send(MessageKind::activated)};
    case State::closed:
      return {send(outcome_ == Outcome::failed ? MessageKind::failed : MessageKind::released)};
    default:
      return {};  // the answer follows when the reservation or activation has ended
  }
}

// The sender may be writing: it says when it is not.
ProtocolActions Receiver::stop(Outcome outcome) {
  outcome_ = outcome;
  state_ = State::cancelling;
  return {send(MessageKind::cancel)};
}

ProtocolActions Receiver::end(Outcome outcome, bool answer) {
  state_ = State::closed;
  outcome_ = outcome;
  ProtocolActions actions{perform(ActionKind::free)};
  if (answer) actions.push_back(send(MessageKind::released));
  return actions;
}

ProtocolActions Receiver::cancel() {
  switch (state_) {
    case State::idle:
      state_ = State::closed;
      outcome_ = Outcome::cancelled;
      return {};
    case State::reserving:
    case State::activating:
      cancel_requested_ = true;
      return {};
    case State::receiving:
      return stop(Outcome::cancelled);
    case State::active:
      return end(Outcome::cancelled, false);
    default:
      return {};
  }
}

ProtocolActions Receiver::lease_expired() {
  if (state_ == State::receiving) return stop(Outcome::expired);
  return state_ == State::cancelling ? ProtocolActions{send(MessageKind::cancel)} : ProtocolActions{};
}

ProtocolActions Receiver::peer_lost() {
  if (state_ == State::idle) {
    state_ = State::closed;
    outcome_ = Outcome::peer_lost;
  }
  if (state_ == State::receiving) return end(Outcome::peer_lost, false);
  return state_ == State::cancelling ? end(outcome_, false) : ProtocolActions{};
}

}  // namespace loopgauge::handoff
