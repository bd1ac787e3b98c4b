// SPDX-License-Identifier: Apache-2.0
// Every order of events of one handoff, walked state by state: messages that are late, overtaken, repeated or lost, writes that end in any
// order or fail, a cancel or the end of either side at every step, leases that expire too early. Never is anything activated that has not
// arrived, never can a write reach memory that was given back, nothing is held at the end, and from every state there is a way to the end.
#include "models/handoff/protocol.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "models/error.hpp"

namespace loopgauge::test {
namespace {

using handoff::ActionKind;
using handoff::MessageKind;
using handoff::Outcome;
using handoff::ProtocolAction;
using handoff::ProtocolActions;
using handoff::Receiver;
using handoff::Sender;

struct Flying {
  bool to_receiver = false;
  MessageKind kind = MessageKind::offer;
  std::uint32_t value = 0;
  auto operator<=>(const Flying&) const = default;
};

enum class Fault { repeat, lose, expire, fail_write, cancel_sender, cancel_receiver, end_sender, end_receiver, refuse, fail_activation };

// Both sides, everything between them, and what the faults have used up.
struct World {
  Sender sender{20};
  Receiver receiver;
  bool sender_lives = true, receiver_lives = true;
  bool sender_told = false, receiver_told = false;  // that the other is gone
  std::vector<Flying> messages;                     // ascending
  std::vector<std::uint32_t> writes;                // posted and not ended, ascending
  std::uint32_t landed = 0;                         // bit by partition
  std::uint32_t made_ready = 0;
  bool all_ready = false;
  bool source = true, memory = false;
  bool was_active = false;
  int faults = 0;
  auto operator<=>(const World&) const = default;
};

class Walk {
 public:
  Walk(std::uint32_t partitions, int most_faults) : partitions_(partitions), most_faults_(most_faults) {}

  void run() {
    World start;
    perform_sender(start, start.sender.start());
    add(start);
    for (std::size_t next = 0; next < order_.size() && problems_.empty(); ++next) {
      current_ = next;
      successors_.clear();
      expand(*order_[next]);
      if (successors_.empty()) judge_end(*order_[next], next);
      edges_.push_back(successors_);
    }
    if (problems_.empty()) every_state_reaches_an_end();
  }

  std::size_t states() const { return order_.size(); }
  std::size_t ends() const { return ends_.size(); }
  const std::set<std::string>& problems() const { return problems_; }
  const std::set<std::pair<Outcome, Receiver::State>>& outcomes() const { return outcomes_; }

 private:
  void problem(const std::string& text) { problems_.insert(text); }

  void add(World world) {
    std::sort(world.messages.begin(), world.messages.end());
    std::sort(world.writes.begin(), world.writes.end());
    check(world);
    const auto [entry, is_new] = seen_.try_emplace(std::move(world), static_cast<std::uint32_t>(order_.size()));
    if (is_new) order_.push_back(&entry->first);
    successors_.push_back(entry->second);
  }

  // What must hold in every state.
  void check(const World& w) {
    if (!w.writes.empty() && w.receiver_lives && !w.memory) problem("a write can reach memory that was given back");
    if (!w.writes.empty() && w.sender_lives && !w.source) problem("a write reads a source that was released");
    if (w.receiver_lives && w.memory != w.receiver.holds_memory()) problem("the receiver is wrong about its memory");
    if (w.receiver_lives && w.receiver.state() == Receiver::State::active && w.landed != all()) problem("an incomplete request is active");
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < w.writes.size(); ++i) bytes += 10;
    if (w.sender_lives && bytes != w.sender.bytes_in_flight()) problem("the sender is wrong about the bytes in flight");
    if (bytes > 20) problem("more bytes are in flight than allowed");
  }

  std::uint32_t all() const { return (1u << partitions_) - 1; }

  void perform_sender(World& w, const ProtocolActions& actions) {
    for (const ProtocolAction& action : actions) {
      switch (action.kind) {
        case ActionKind::send:
          w.messages.push_back({true, action.message, action.value});
          break;
        case ActionKind::post:
          w.writes.push_back(action.value);
          break;
        case ActionKind::release:
          if (!w.source) problem("the source is released twice");
          w.source = false;
          break;
        default:
          problem("a sender does what receivers do");
      }
    }
  }

  // Reservation and activation can fail: each gives worlds of its own.
  void perform_receiver(World w, const ProtocolActions& actions, std::size_t from, const std::function<void(World)>& done) {
    for (std::size_t i = from; i < actions.size(); ++i) {
      const ProtocolAction& action = actions[i];
      switch (action.kind) {
        case ActionKind::send:
          w.messages.push_back({false, action.message, action.value});
          break;
        case ActionKind::free:
          if (!w.memory) problem("memory is given back twice");
          w.memory = false;
          break;
        case ActionKind::reserve:
          if (w.memory) problem("memory is reserved twice");
          if (w.faults < most_faults_) {
            World refused = w;
            ++refused.faults;
            const ProtocolActions more = refused.receiver.reservation(false);
            perform_receiver(refused, more, 0, done);
          }
          w.memory = true;
          {
            const ProtocolActions more = w.receiver.reservation(true);
            perform_receiver(w, more, 0, done);
          }
          return;  // it is the last action
        case ActionKind::activate:
          if (w.landed != all() || w.made_ready != partitions_) problem("something is activated that has not arrived");
          if (w.faults < most_faults_) {
            World failed = w;
            ++failed.faults;
            const ProtocolActions more = failed.receiver.activation(false);
            perform_receiver(failed, more, 0, done);
          }
          w.was_active = true;
          {
            const ProtocolActions more = w.receiver.activation(true);
            perform_receiver(w, more, 0, done);
          }
          return;
        default:
          problem("a receiver does what senders do");
      }
    }
    done(std::move(w));
  }

  template <class Event>
  void sender_event(World w, Event event) {
    perform_sender(w, event(w.sender));
    add(std::move(w));
  }
  template <class Event>
  void receiver_event(World w, Event event) {
    const ProtocolActions actions = event(w.receiver);
    perform_receiver(std::move(w), actions, 0, [this](World after) { add(std::move(after)); });
  }

  void deliver(World w, const Flying& message) {
    if (message.to_receiver) {
      if (!w.receiver_lives) return add(std::move(w));
      receiver_event(std::move(w), [&](Receiver& r) { return r.receive(message.kind, message.value); });
    } else {
      if (!w.sender_lives) return add(std::move(w));
      sender_event(std::move(w), [&](Sender& s) { return s.receive(message.kind); });
    }
  }

  void expand(const World& w) {
    bool something_moves = false;
    // Partitions become final while the rest is computed.
    if (w.sender_lives && !w.sender.closed() && w.source && !w.all_ready && w.sender.state() != Sender::State::cancelling) {
      something_moves = true;
      World next = w;
      if (w.made_ready < partitions_) {
        ++next.made_ready;
        sender_event(next, [](Sender& s) { return s.ready(10); });
      } else {
        next.all_ready = true;
        sender_event(next, [](Sender& s) { return s.all_ready(); });
      }
    }
    for (std::size_t i = 0; i < w.messages.size(); ++i) {
      if (i > 0 && w.messages[i] == w.messages[i - 1]) continue;
      something_moves = true;
      World rest = w;
      rest.messages.erase(rest.messages.begin() + static_cast<std::ptrdiff_t>(i));
      deliver(rest, w.messages[i]);
      if (w.faults < most_faults_) {
        World again = w;
        ++again.faults;
        deliver(again, w.messages[i]);
        ++rest.faults;
        add(rest);
      }
    }
    for (std::size_t i = 0; i < w.writes.size(); ++i) {
      something_moves = true;
      const std::uint32_t sequence = w.writes[i];
      World next = w;
      next.writes.erase(next.writes.begin() + static_cast<std::ptrdiff_t>(i));
      if (!w.sender_lives || !w.receiver_lives) {  // it ends somehow, and nobody counts on it
        if (w.sender_lives) {
          sender_event(next, [&](Sender& s) { return s.written(sequence, false); });
        } else {
          add(next);
        }
        continue;
      }
      World failed = next;
      next.landed |= 1u << sequence;
      sender_event(next, [&](Sender& s) { return s.written(sequence, true); });
      if (w.faults < most_faults_) {
        ++failed.faults;
        sender_event(failed, [&](Sender& s) { return s.written(sequence, false); });
      }
    }
    // A side learns of the other's end when no write can land any more.
    if (w.writes.empty() && !w.sender_lives && w.receiver_lives && !w.receiver_told) {
      something_moves = true;
      World next = w;
      next.receiver_told = true;
      receiver_event(next, [](Receiver& r) { return r.peer_lost(); });
    }
    if (!w.receiver_lives && w.sender_lives && !w.sender_told) {
      something_moves = true;
      World next = w;
      next.sender_told = true;
      sender_event(next, [](Sender& s) { return s.peer_lost(); });
    }
    if (w.faults < most_faults_) {
      World next = w;
      ++next.faults;
      if (w.sender_lives) {
        sender_event(next, [](Sender& s) { return s.cancel(); });
        World ended = next;
        ended.sender_lives = ended.source = false;
        if (w.receiver_lives) add(ended);
      }
      if (w.receiver_lives) {
        receiver_event(next, [](Receiver& r) { return r.cancel(); });
        World ended = next;
        ended.receiver_lives = ended.memory = false;
        if (w.sender_lives) add(ended);
      }
    }
    // A lease expires when nothing moves any more, or too early, which counts as a fault.
    const bool early = something_moves;
    if (!early || w.faults < most_faults_) {
      World next = w;
      next.faults += early ? 1 : 0;
      const bool sender_waits = w.sender_lives && !w.sender.closed();
      const bool receiver_waits =
          w.receiver_lives && (w.receiver.state() == Receiver::State::receiving || w.receiver.state() == Receiver::State::cancelling);
      if (sender_waits) sender_event(next, [](Sender& s) { return s.lease_expired(); });
      if (receiver_waits) receiver_event(next, [](Receiver& r) { return r.lease_expired(); });
    }
  }

  void judge_end(const World& w, std::size_t index) {
    ends_.push_back(index);
    const Receiver::State state = w.receiver.state();
    if (w.sender_lives && !w.sender.closed()) problem("the sender is not done");
    if (w.sender_lives && w.source) problem("the source is held for ever");
    if (w.receiver_lives && w.memory && state != Receiver::State::active) problem("memory is held for ever");
    if (w.receiver_lives && state != Receiver::State::active && !w.receiver.closed()) problem("the receiver is not done");
    if (w.sender_lives && w.receiver_lives) {
      const bool handed = w.sender.outcome() == Outcome::handed_over;
      if (handed && !w.was_active) problem("a request is lost: each side believes that the other has it");
      if (!handed && state == Receiver::State::active) problem("a request runs twice: the sender believes that it was not handed over");
      outcomes_.insert({w.sender.outcome(), state});
    }
  }

  void every_state_reaches_an_end() {
    std::vector<std::vector<std::uint32_t>> before(order_.size());
    for (std::uint32_t from = 0; from < edges_.size(); ++from) {
      for (const std::uint32_t to : edges_[from]) before[to].push_back(from);
    }
    std::vector<bool> reaches(order_.size(), false);
    std::vector<std::uint32_t> open;
    for (const std::size_t end : ends_) reaches[end] = true, open.push_back(static_cast<std::uint32_t>(end));
    while (!open.empty()) {
      const std::uint32_t at = open.back();
      open.pop_back();
      for (const std::uint32_t from : before[at]) {
        if (reaches[from]) continue;
        reaches[from] = true;
        open.push_back(from);
      }
    }
    if (std::find(reaches.begin(), reaches.end(), false) != reaches.end()) problem("a state has no way to an end");
  }

  const std::uint32_t partitions_;
  const int most_faults_;
  std::map<World, std::uint32_t> seen_;
  std::vector<const World*> order_;
  std::vector<std::vector<std::uint32_t>> edges_;
  std::vector<std::uint32_t> successors_;
  std::vector<std::size_t> ends_;
  std::size_t current_ = 0;
  std::set<std::string> problems_;
  std::set<std::pair<Outcome, Receiver::State>> outcomes_;
};

class EveryOrder : public testing::TestWithParam<std::pair<int, int>> {};

TEST_P(EveryOrder, ActivatesOnlyWhatArrivedFreesEverythingAndEnds) {
  const auto [partitions, faults] = GetParam();
  Walk walk(static_cast<std::uint32_t>(partitions), faults);
  walk.run();
  EXPECT_EQ(walk.problems(), std::set<std::string>{});
  RecordProperty("states", static_cast<int>(walk.states()));
  std::printf("%d partitions, %d faults: %zu states, %zu ends\n", partitions, faults, walk.states(), walk.ends());
  if (faults == 0) {
    const std::set<std::pair<Outcome, Receiver::State>> only{{Outcome::handed_over, Receiver::State::active}};
    EXPECT_EQ(walk.outcomes(), only);
  } else {
    EXPECT_TRUE(walk.outcomes().contains({Outcome::handed_over, Receiver::State::active}));
    EXPECT_TRUE(walk.outcomes().contains({Outcome::refused, Receiver::State::closed}));
    EXPECT_TRUE(walk.outcomes().contains({Outcome::failed, Receiver::State::closed}));
    EXPECT_TRUE(walk.outcomes().contains({Outcome::cancelled, Receiver::State::closed}));
  }
}

INSTANTIATE_TEST_SUITE_P(Partitions, EveryOrder,
                         testing::Values(std::pair{0, 0}, std::pair{4, 0}, std::pair{0, 2}, std::pair{1, 3}, std::pair{2, 3},
                                         std::pair{3, 2}, std::pair{4, 2}),
                         [](const auto& instance) {
                           return std::to_string(instance.param.first) + "_faults_" + std::to_string(instance.param.second);
                         });

// ------------------------------------------------------------------------------------------------------------- one side at a time

Receiver receiving() {
  Receiver receiver;
  EXPECT_EQ(receiver.receive(MessageKind::offer).at(0).kind, ActionKind::reserve);
  EXPECT_EQ(receiver.reservation(true).at(0).message, MessageKind::reserved);
  return receiver;
}

TEST(ReceiverOfHandoffs, RefusesSequenceNumbersThatCannotBe) {
  Receiver receiver = receiving();
  EXPECT_TRUE(receiver.receive(MessageKind::commit, 2).empty());
  EXPECT_EQ(receiver.receive(MessageKind::arrived, 2).at(0).message, MessageKind::cancel) << "beyond the committed count";
  EXPECT_EQ(receiver.outcome(), Outcome::failed);
  receiver = receiving();
  receiver.receive(MessageKind::arrived, 3);
  EXPECT_EQ(receiver.receive(MessageKind::commit, 3).at(0).message, MessageKind::cancel) << "fewer than have arrived";
  receiver = receiving();
  receiver.receive(MessageKind::commit, 3);
  EXPECT_EQ(receiver.receive(MessageKind::commit, 4).at(0).message, MessageKind::cancel) << "another count";
  receiver = receiving();
  EXPECT_EQ(receiver.receive(MessageKind::arrived, handoff::kMaximumPartitions).at(0).message, MessageKind::cancel);
}

TEST(ReceiverOfHandoffs, HoldsItsMemoryUntilTheSenderWritesNoMore) {
  Receiver receiver = receiving();
  receiver.receive(MessageKind::arrived, 0);
  EXPECT_EQ(receiver.cancel().at(0).message, MessageKind::cancel);
  EXPECT_TRUE(receiver.holds_memory());
  EXPECT_TRUE(receiver.receive(MessageKind::arrived, 1).empty());
  EXPECT_EQ(receiver.lease_expired().at(0).message, MessageKind::cancel) << "asked again";
  EXPECT_TRUE(receiver.holds_memory());
  EXPECT_EQ(receiver.receive(MessageKind::writes_ended).at(0).kind, ActionKind::free);
  EXPECT_FALSE(receiver.holds_memory());
}

TEST(SenderOfHandoffs, KeepsItsSourceWhileAReceiverSaysTooEarlyThatItIsDone) {
  for (const MessageKind early : {MessageKind::activated, MessageKind::failed}) {
    Sender sender(100);
    sender.start();
    sender.ready(10);
    sender.all_ready();
    sender.receive(MessageKind::reserved);
    ASSERT_EQ(sender.state(), Sender::State::committed);
    EXPECT_TRUE(sender.receive(early).empty()) << "its write is under way";
    const ProtocolActions actions = sender.written(0, true);
    ASSERT_FALSE(actions.empty());
    EXPECT_EQ(actions.at(0).kind, ActionKind::release);
  }
}

TEST(SenderOfHandoffs, PostsWithinItsLimitButAlwaysSomething) {
  Sender sender(15);
  sender.start();
  for (const std::uint64_t bytes : {10, 10, 100, 5}) sender.ready(bytes);
  EXPECT_EQ(sender.receive(MessageKind::reserved).size(), 1u);
  EXPECT_EQ(sender.bytes_in_flight(), 10u);
  sender.written(0, true);
  EXPECT_EQ(sender.bytes_in_flight(), 10u);
  sender.written(1, true);
  EXPECT_EQ(sender.bytes_in_flight(), 100u) << "a partition that is larger than the limit goes alone";
  sender.written(2, true);
  EXPECT_EQ(sender.bytes_in_flight(), 5u);
}

}  // namespace
}  // namespace loopgauge::test
