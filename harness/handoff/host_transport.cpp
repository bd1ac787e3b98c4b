// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/host_transport.hpp"

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

using Bytes = std::vector<std::byte>;

// What the two ends have in common.
struct Shared {
  std::deque<Bytes> to_receiver, to_sender;
  std::map<std::uint64_t, handoff::Memory> exposed;  // by address
  std::uint64_t addresses = 1;
};

class QueueChannel final : public handoff::Channel {
 public:
  QueueChannel(std::deque<Bytes>& out, std::deque<Bytes>& in) : out_(out), in_(in) {}
  void send(std::span<const std::byte> message) override { out_.emplace_back(message.begin(), message.end()); }
  std::optional<Bytes> receive() override {
    if (in_.empty()) return std::nullopt;
    Bytes message = std::move(in_.front());
    in_.pop_front();
    return message;
  }
  bool peer_lost() const override { return false; }

 private:
  std::deque<Bytes>& out_;
  std::deque<Bytes>& in_;
};

class HostSender final : public handoff::SenderTransport {
 public:
  explicit HostSender(std::shared_ptr<Shared> shared) : shared_(std::move(shared)), channel_(shared_->to_receiver, shared_->to_sender) {}
  std::string_view name() const override { return "host"; }
  handoff::Channel& channel() override { return channel_; }

  void write(std::uint64_t ticket, const handoff::Memory& source, const handoff::Destination& destination, std::uint64_t offset) override {
    const auto found = shared_->exposed.find(destination.address);
    const bool fits = found != shared_->exposed.end() && source.on_host() && found->second.on_host() && offset <= found->second.bytes &&
                      source.bytes <= found->second.bytes - offset;
    if (fits && source.bytes > 0) std::memcpy(found->second.data + offset, source.data, source.bytes);
    ended_.push_back({ticket, fits});
  }

  std::vector<handoff::WriteResult> ended() override { return std::exchange(ended_, {}); }

 private:
  std::shared_ptr<Shared> shared_;
  QueueChannel channel_;
  std::vector<handoff::WriteResult> ended_;
};

class HostReceiver final : public handoff::ReceiverTransport {
 public:
  explicit HostReceiver(std::shared_ptr<Shared> shared) : shared_(std::move(shared)), channel_(shared_->to_sender, shared_->to_receiver) {}
  handoff::Channel& channel() override { return channel_; }
  handoff::Destination expose(const handoff::Memory& memory) override {
    shared_->exposed[shared_->addresses] = memory;
    return {shared_->addresses++, memory.bytes};
  }
  void withdraw(const handoff::Destination& destination) override {
    if (shared_->exposed.erase(destination.address) == 0) throw InternalError("memory is withdrawn that was not exposed");
  }

 private:
  std::shared_ptr<Shared> shared_;
  QueueChannel channel_;
};

}  // namespace

handoff::TransportEnds make_host_transport() {
  const auto shared = std::make_shared<Shared>();
  return {std::make_unique<HostSender>(shared), std::make_unique<HostReceiver>(shared)};
}

}  // namespace loopgauge::harness
