// SPDX-License-Identifier: Apache-2.0
// Two endpoints and two references with a transport between them that misbehaves: writes that are late or fail, bytes that change on their
// way, messages that are lost, a side that is gone. Whatever happens, nothing incomplete is activated and nothing is held afterwards.
#include "harness/handoff/endpoint.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <functional>

#include "models/error.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

using handoff::MessageKind;
using handoff::Outcome;
using Bytes = std::vector<std::byte>;

// What lies between the two sides, under the test's control.
class Wire {
 public:
  std::deque<Bytes> to_receiver, to_sender;
  std::map<std::uint64_t, handoff::Memory> exposed;
  std::function<bool(MessageKind)> loses = [](MessageKind) { return false; };
  std::function<void(std::uint64_t, Bytes&)> on_the_way = [](std::uint64_t, Bytes&) {};  // address, what is being written
  bool writes_end = true, writes_fail = false;
  std::size_t most_exposed = std::size_t(-1);
  bool sender_lost = false, receiver_lost = false;

  struct Write {
    std::uint64_t ticket, address, offset;
    handoff::Memory source;
  };
  std::deque<Write> writes;

  class End final : public handoff::Channel, public handoff::SenderTransport, public handoff::ReceiverTransport {
   public:
    End(Wire& wire, std::deque<Bytes>& out, std::deque<Bytes>& in, const bool& lost) : wire_(wire), out_(out), in_(in), lost_(lost) {}
    std::string_view name() const override { return "wire"; }
    handoff::Channel& channel() override { return *this; }
    void send(std::span<const std::byte> message) override {
      if (!wire_.loses(handoff::parse_message(message).kind)) out_.emplace_back(message.begin(), message.end());
    }
    std::optional<Bytes> receive() override {
      if (in_.empty()) return std::nullopt;
      Bytes message = std::move(in_.front());
      in_.pop_front();
      return message;
    }
    bool peer_lost() const override { return lost_; }
    void write(std::uint64_t ticket, const handoff::Memory& source, const handoff::Destination& destination,
               std::uint64_t offset) override {
      wire_.writes.push_back({ticket, destination.address, offset, source});
    }
    std::vector<handoff::WriteResult> ended() override {
      std::vector<handoff::WriteResult> results;
      while (wire_.writes_end && !wire_.writes.empty()) {
        const Write write = wire_.writes.front();
        wire_.writes.pop_front();
        // The sanitizers see a write to memory that was given back, or from it.
        Bytes bytes(write.source.data, write.source.data + write.source.bytes);
        wire_.on_the_way(write.address, bytes);
        const handoff::Memory& memory = wire_.exposed.at(write.address);
        EXPECT_LE(write.offset + bytes.size(), memory.bytes);
        if (!wire_.writes_fail) std::copy(bytes.begin(), bytes.end(), memory.data + write.offset);
        results.push_back({write.ticket, !wire_.writes_fail});
      }
      return results;
    }
    handoff::Destination expose(const handoff::Memory& memory) override {
      if (wire_.exposed.size() == wire_.most_exposed) throw UnsupportedError("no more can be shared");
      wire_.exposed[++wire_.addresses_] = memory;
      return {wire_.addresses_, memory.bytes};
    }
    void withdraw(const handoff::Destination& destination) override {
      for (const Write& write : wire_.writes) EXPECT_NE(write.address, destination.address) << "memory is withdrawn under a write";
      EXPECT_EQ(wire_.exposed.erase(destination.address), 1u);
    }

   private:
    Wire& wire_;
    std::deque<Bytes>& out_;
    std::deque<Bytes>& in_;
    const bool& lost_;
  };
  End sender_end{*this, to_receiver, to_sender, receiver_lost};
  End receiver_end{*this, to_sender, to_receiver, sender_lost};

 private:
  std::uint64_t addresses_ = 0;
};

class Endpoints : public testing::Test {
 protected:
  static constexpr int kPrompt = 150;
  static constexpr harness::HandoffLimits kLimits{.partition_bytes = 500, .bytes_in_flight = 1200, .export_bytes = 2000};

  Endpoints() {
    config_ = std::make_unique<EffectiveConfig>(EffectiveConfig::resolve(requested(), checkpoint_.config));
    begin_prefill();
    begin_decode();
  }
  static AlgorithmConfig requested() {
    AlgorithmConfig config = switches("t1s1q1");
    config.kv_residual_quantization.policy = EncodingPolicy::streaming;
    return config;
  }
  void begin_prefill() { begin_prefill(checkpoint_); }
  void begin_prefill(const Checkpoint& checkpoint) {
    RunOptions options;
    options.stage = Stage::prefill;
    prefill_ = reference::make_reference_executor(checkpoint);
    prefill_->begin(trace_, *config_, options);
    sender_ = std::make_unique<harness::SenderEndpoint>(*prefill_->handoff_source(), wire_.sender_end, ++lives_, kLimits);
  }
  void begin_decode() {
    RunOptions options;
    options.stage = Stage::decode;
    options.record = RecordGroups::all();
    decode_ = reference::make_reference_executor(checkpoint_);
    decode_->begin(trace_, *config_, options);
    receiver_ = std::make_unique<harness::ReceiverEndpoint>(*decode_->handoff_target(), wire_.receiver_end);
  }
  void prefill(int request, int from = 0) {
    for (int begin = from; begin < kPrompt; begin += 64)
      prefill_->submit({{{request, RowKind::prefill, begin, std::min(begin + 64, kPrompt), 1, 4}}});
  }
  void pump() {
    while (static_cast<int>(sender_->step()) + static_cast<int>(receiver_->step()) > 0) {
    }
  }
  // The leases of both run out again and again until nothing changes any more.
  void expire(int request) {
    for (int i = 0; i < 4; ++i) {
      sender_->lease_expired(request);
      receiver_->lease_expired(request);
      pump();
    }
  }
  void expect_nothing_reserved() {
    EXPECT_EQ(receiver_->regions_held(), 0u);
    EXPECT_TRUE(wire_.exposed.empty());
    EXPECT_TRUE(wire_.writes.empty());
    EXPECT_EQ(decode_->handoff_target()->transfer_bytes(), 0u);
  }
  // The other request of the trace can be handed over and decoded as if nothing had happened.
  void expect_usable() {
    wire_.loses = [](MessageKind) { return false; };
    wire_.on_the_way = [](std::uint64_t, Bytes&) {};
    wire_.writes_end = true, wire_.writes_fail = false;
    sender_->offer(1);
    prefill(1);
    pump();
    ASSERT_EQ(sender_->outcome(1), Outcome::handed_over) << sender_->reason(1);
    for (int j = 0; j < 3; ++j) decode_->submit({{{1, RowKind::decode, kPrompt + j, kPrompt + j + 1, 1, 4}}});
    decode_->submit({{}, {{ActionKind::cancel, 0}}});
    const RunRecord handed = decode_->finish();
    EXPECT_EQ(describe(handed.held_at_drain), "");
    const RunRecord whole = run(checkpoint_, trace_, requested());
    EXPECT_EQ(handed.requests[1].logits.data, whole.requests[1].logits.data);
    EXPECT_EQ(handed.requests[1].tokens, whole.requests[1].tokens);
    EXPECT_EQ(describe(prefill_->finish().held_at_drain), "");
  }

  Checkpoint checkpoint_ = tiny_checkpoint();
  Trace trace_ = trace_of({request(0, kPrompt, 3), request(1, kPrompt, 3)});
  std::unique_ptr<EffectiveConfig> config_;
  Wire wire_;
  std::uint64_t lives_ = 0;
  std::unique_ptr<Executor> prefill_, decode_;
  std::unique_ptr<harness::SenderEndpoint> sender_;
  std::unique_ptr<harness::ReceiverEndpoint> receiver_;
};

TEST_F(Endpoints, HandOverARequest) {
  sender_->offer(0);
  prefill(0);
  pump();
  EXPECT_EQ(sender_->outcome(0), Outcome::handed_over);
  EXPECT_EQ(receiver_->state(0), handoff::Receiver::State::active);
  expect_nothing_reserved();
  expect_usable();
}

TEST_F(Endpoints, AWriteThatFailsEndsTheTransfer) {
  sender_->offer(0);
  prefill(0);
  wire_.writes_fail = true;
  pump();
  EXPECT_EQ(sender_->outcome(0), Outcome::failed);
  expect_nothing_reserved();
  expect_usable();
}

TEST_F(Endpoints, MemoryThatCannotBeSharedIsRefusedAndGivenBack) {
  const std::size_t regions = handoff::regions_of(prefill_->handoff_source()->describe(0)).size();
  for (const std::size_t most : {std::size_t{0}, std::size_t{1}, regions - 1}) {
    begin_prefill();
    begin_decode();
    wire_.most_exposed = most;
    sender_->offer(0);
    prefill(0);
    pump();
    EXPECT_EQ(sender_->outcome(0), Outcome::refused);
    EXPECT_EQ(sender_->reason(0), "no more can be shared");
    expect_nothing_reserved();
    wire_.most_exposed = std::size_t(-1);
    expect_usable();
  }
}

TEST_F(Endpoints, ABitThatChangesOnItsWayIsFoundInWhateverRegion) {
  const std::size_t regions = handoff::regions_of(prefill_->handoff_source()->describe(0)).size();
  for (std::uint64_t damaged = 1; damaged <= regions; ++damaged) {
    begin_prefill();
    begin_decode();
    const std::uint64_t first = damaged == 1 ? 0 : (damaged - 1) * regions;  // addresses of this transfer begin after those of the others
    wire_.on_the_way = [&](std::uint64_t address, Bytes& bytes) {
      if (address == first + damaged) bytes[bytes.size() / 2] ^= std::byte{1};
    };
    sender_->offer(0);
    prefill(0);
    pump();
    EXPECT_EQ(sender_->outcome(0), Outcome::failed) << damaged;
    EXPECT_NE(sender_->reason(0).find("the checksum does not fit"), std::string::npos) << sender_->reason(0);
    expect_nothing_reserved();
  }
  expect_usable();
}

TEST_F(Endpoints, ALostMessageOfEitherSideEndsWithALease) {
  for (const MessageKind lost :
       {MessageKind::offer, MessageKind::reserved, MessageKind::arrived, MessageKind::commit, MessageKind::activated}) {
    begin_prefill();
    begin_decode();
    bool done = false;
    wire_.loses = [&](MessageKind kind) { return kind == lost && !std::exchange(done, true); };
    sender_->offer(0);
    prefill(0);
    pump();
    EXPECT_FALSE(sender_->closed(0)) << to_string(lost);
    expire(0);
    EXPECT_TRUE(sender_->closed(0)) << to_string(lost);
    EXPECT_EQ(sender_->outcome(0), lost == MessageKind::activated ? Outcome::handed_over : Outcome::expired) << to_string(lost);
    expect_nothing_reserved();
  }
  expect_usable();
}

TEST_F(Endpoints, MemoryIsNotGivenBackUnderAWrite) {
  sender_->offer(0);
  prefill(0);
  wire_.writes_end = false;
  pump();
  EXPECT_FALSE(wire_.writes.empty());
  receiver_->cancel(0);
  pump();
  EXPECT_GT(receiver_->regions_held(), 0u) << "writes are under way";
  prefill_->submit({{}, {{ActionKind::cancel, 0}}});  // what is being read stays, whatever becomes of the request
  wire_.writes_end = true;
  pump();
  EXPECT_EQ(sender_->outcome(0), Outcome::cancelled);
  expect_nothing_reserved();
  expect_usable();
}

TEST_F(Endpoints, CancelAtEveryStepOfEitherSide) {
  for (const bool by_sender : {true, false}) {
    for (int step = 0; step < 12; ++step) {
      begin_prefill();
      begin_decode();
      sender_->offer(0);
      prefill(0);
      for (int i = 0; i < step; ++i) static_cast<void>(i % 2 == 0 ? receiver_->step() : sender_->step());
      if (by_sender) sender_->cancel(0);
      if (!by_sender) receiver_->cancel(0);
      pump();
      const std::string what = (by_sender ? "sender, step " : "receiver, step ") + std::to_string(step);
      if (!by_sender && !receiver_->knows(0)) continue;  // nothing had come yet
      EXPECT_TRUE(sender_->closed(0)) << what;
      if (sender_->outcome(0) != Outcome::handed_over) expect_nothing_reserved();
    }
  }
}

TEST_F(Endpoints, ASideThatIsGoneLeavesTheOtherWithNothing) {
  const auto begin_again_and_run = [&](int steps) {
    begin_prefill();
    begin_decode();
    wire_.sender_lost = wire_.receiver_lost = false;
    wire_.to_receiver.clear(), wire_.to_sender.clear();
    sender_->offer(0);
    prefill(0);
    for (int i = 0; i < steps; ++i) static_cast<void>(i % 2 == 0 ? receiver_->step() : sender_->step());
  };
  for (int step = 1; step < 12; ++step) {
    begin_again_and_run(step);
    wire_.writes.clear();  // of a sender that is gone
    wire_.sender_lost = true;
    while (receiver_->step()) {
    }
    expect_nothing_reserved();
  }
  for (int step = 1; step < 12; ++step) {
    begin_again_and_run(step);
    wire_.receiver_lost = true, wire_.writes_fail = true;
    while (sender_->step()) {
    }
    EXPECT_TRUE(sender_->closed(0)) << step;
    EXPECT_EQ(prefill_->finish().held_at_drain.requests, 0) << step;
    wire_.exposed.clear(), wire_.writes_fail = false;
  }
}

TEST_F(Endpoints, ARequestThatIsHereAlreadyOrOfAnotherModelIsRefused) {
  sender_->offer(0);
  prefill(0);
  pump();
  begin_prefill();
  sender_->offer(0);
  pump();
  EXPECT_EQ(sender_->outcome(0), Outcome::refused);
  EXPECT_NE(sender_->reason(0).find("request 0 is here already"), std::string::npos);
  Checkpoint other = checkpoint_;
  other.sha256 = std::string(64, '8');
  begin_prefill(other);
  sender_->offer(1);
  pump();
  EXPECT_EQ(sender_->outcome(1), Outcome::refused);
  EXPECT_NE(sender_->reason(1).find("model fingerprint is " + std::string(64, '8') + ", here it is " + std::string(64, '7')),
            std::string::npos)
      << sender_->reason(1);
  // Whoever waits for the request there learns it too, and of the one that is here nothing changes.
  EXPECT_EQ(receiver_->outcome(1), Outcome::refused);
  EXPECT_EQ(receiver_->reason(1), sender_->reason(1));
  EXPECT_EQ(receiver_->state(0), handoff::Receiver::State::active);
}

TEST_F(Endpoints, WhatWasExportedDoesNotChangeWithTheRequest) {
  sender_->offer(0);
  prefill_->submit({{{0, RowKind::prefill, 0, 64, 1, 3}}});
  handoff::Source& source = *prefill_->handoff_source();
  const auto exported = source.export_ready(0, std::size_t{1} << 30);
  ASSERT_FALSE(exported.empty());
  std::vector<Bytes> before;
  for (const auto& region : exported) before.emplace_back(region.memory.data, region.memory.data + region.memory.bytes);
  prefill_->submit({{}, {{ActionKind::rewind, 0}}});
  prefill(0);
  EXPECT_FALSE(source.exported_all(0));
  prefill_->submit({{}, {{ActionKind::cancel, 0}}});
  for (std::size_t i = 0; i < exported.size(); ++i) {
    EXPECT_TRUE(std::equal(before[i].begin(), before[i].end(), exported[i].memory.data)) << i;
    EXPECT_EQ(handoff::region_checksum(before[i]), exported[i].checksum);
  }
  EXPECT_GT(prefill_->finish().held_at_drain.transfers, 0);
}

}  // namespace
}  // namespace loopgauge::test
