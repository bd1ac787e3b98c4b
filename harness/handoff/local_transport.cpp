// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/local_transport.hpp"

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "models/error.hpp"
#include "optimized/device_copies.hpp"

namespace loopgauge::harness {
namespace {

using Bytes = std::vector<std::byte>;

// What the two ends, which may be in two threads, have in common.
struct Shared {
  std::mutex mutex;
  std::deque<Bytes> to_receiver, to_sender;
  std::map<std::uint64_t, handoff::Memory> exposed;  // by address
  std::uint64_t addresses = 1;
};

class QueueChannel final : public handoff::Channel {
 public:
  QueueChannel(std::mutex& mutex, std::deque<Bytes>& out, std::deque<Bytes>& in) : mutex_(mutex), out_(out), in_(in) {}
  void send(std::span<const std::byte> message) override {
    const std::lock_guard lock(mutex_);
    out_.emplace_back(message.begin(), message.end());
  }
  std::optional<Bytes> receive() override {
    const std::lock_guard lock(mutex_);
    if (in_.empty()) return std::nullopt;
    Bytes message = std::move(in_.front());
    in_.pop_front();
    return message;
  }
  bool peer_lost() const override { return false; }

 private:
  std::mutex& mutex_;
  std::deque<Bytes>& out_;
  std::deque<Bytes>& in_;
};

class LocalSender final : public handoff::SenderTransport {
 public:
  // `copies`: of device memory; null: the host copies.
  LocalSender(std::shared_ptr<Shared> shared, std::string_view name, std::unique_ptr<optimized::DeviceCopies> copies)
      : shared_(std::move(shared)), name_(name), channel_(shared_->mutex, shared_->to_receiver, shared_->to_sender), copies_(std::move(copies)) {}
  std::string_view name() const override { return name_; }
  handoff::Channel& channel() override { return channel_; }

  void write(std::uint64_t ticket, const handoff::Memory& source, const handoff::Destination& destination, std::uint64_t offset) override {
    const std::lock_guard lock(shared_->mutex);  // held while the host copies: what is exposed stays
    const auto found = shared_->exposed.find(destination.address);
    const bool on_host = copies_ == nullptr;
    const bool fits = found != shared_->exposed.end() && source.on_host() == on_host && found->second.on_host() == on_host &&
                      offset <= found->second.bytes && source.bytes <= found->second.bytes - offset;
    if (fits && !on_host) return copies_->begin(ticket, source, {found->second.data + offset, source.bytes, found->second.device});
    if (fits && source.bytes > 0) std::memcpy(found->second.data + offset, source.data, source.bytes);
    ended_.push_back({ticket, fits});
  }

  std::vector<handoff::WriteResult> ended() override {
    std::vector<handoff::WriteResult> results = std::exchange(ended_, {});
    if (copies_ != nullptr) {
      for (const handoff::WriteResult& result : copies_->ended()) results.push_back(result);
    }
    return results;
  }

 private:
  std::shared_ptr<Shared> shared_;
  const std::string_view name_;
  QueueChannel channel_;
  std::unique_ptr<optimized::DeviceCopies> copies_;
  std::vector<handoff::WriteResult> ended_;
};

class LocalReceiver final : public handoff::ReceiverTransport {
 public:
  explicit LocalReceiver(std::shared_ptr<Shared> shared) : shared_(std::move(shared)), channel_(shared_->mutex, shared_->to_sender, shared_->to_receiver) {}
  handoff::Channel& channel() override { return channel_; }
  handoff::Destination expose(const handoff::Memory& memory) override {
    const std::lock_guard lock(shared_->mutex);
    shared_->exposed[shared_->addresses] = memory;
    return {shared_->addresses++, memory.bytes};
  }
  void withdraw(const handoff::Destination& destination) override {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->exposed.erase(destination.address) == 0) throw InternalError("memory is withdrawn that was not exposed");
  }

 private:
  std::shared_ptr<Shared> shared_;
  QueueChannel channel_;
};

handoff::TransportEnds make_local_transport(std::string_view name, std::unique_ptr<optimized::DeviceCopies> copies) {
  const auto shared = std::make_shared<Shared>();
  const auto place = copies == nullptr ? handoff::MemoryPlace::host : handoff::MemoryPlace::device;
  return {std::make_unique<LocalSender>(shared, name, std::move(copies)), std::make_unique<LocalReceiver>(shared), place};
}

}  // namespace

handoff::TransportEnds make_host_transport() { return make_local_transport("host", nullptr); }
handoff::TransportEnds make_device_transport() { return make_local_transport("device", optimized::make_device_copies()); }
handoff::TransportEnds make_peer_transport() { return make_local_transport("peer", optimized::make_device_copies()); }

}  // namespace loopgauge::harness
