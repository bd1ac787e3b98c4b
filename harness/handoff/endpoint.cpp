// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/endpoint.hpp"

#include <algorithm>

#include "models/error.hpp"
#include "models/handoff/bytes.hpp"

namespace loopgauge::harness {

using handoff::Message;
using handoff::MessageKind;
using handoff::ProtocolActions;

// -------------------------------------------------------------------------------------------------------------------------- sender

SenderEndpoint::SenderEndpoint(handoff::Source& source, handoff::SenderTransport& transport, std::uint64_t sender, HandoffLimits limits)
    : source_(source), transport_(transport), sender_(sender), limits_(limits) {}

void SenderEndpoint::offer(int request) {
  const auto [entry, is_new] = transfers_.try_emplace(request, limits_.bytes_in_flight);
  if (!is_new) throw InternalError("request " + std::to_string(request) + " is offered twice");
  Transfer& transfer = entry->second;
  transfer.number = numbers_++;
  transfer.descriptor = source_.describe(request);
  transfer.regions = handoff::regions_of(transfer.descriptor);
  transfer.summaries.resize(transfer.regions.size());
  perform(request, transfer, transfer.machine.start());
}

bool SenderEndpoint::step() {
  bool progress = false;
  while (const auto bytes = transport_.channel().receive()) progress |= receive(*bytes);
  for (const handoff::WriteResult& result : transport_.ended()) {
    const auto write = writes_.find(result.ticket);
    if (write == writes_.end()) throw InternalError("a transport reports a write that nobody began");
    const auto [request, sequence] = write->second;
    writes_.erase(write);
    Transfer& transfer = at(request);
    const std::uint32_t region = transfer.partitions.at(sequence).partition.region;
    // The source may be released by what follows: the region is given back before.
    if (--transfer.unsent.at(region) == 0) {
      transfer.unsent.erase(region);
      source_.sent(request, region);
    }
    perform(request, transfer, transfer.machine.written(sequence, result.success));
    progress = true;
  }
  for (auto& [request, transfer] : transfers_) progress |= export_more(request, transfer);
  if (!peer_lost_ && transport_.channel().peer_lost()) {
    peer_lost_ = progress = true;
    for (auto& [request, transfer] : transfers_) perform(request, transfer, transfer.machine.peer_lost());
  }
  return progress;
}

bool SenderEndpoint::receive(const std::vector<std::byte>& bytes) {
  const Message message = handoff::parse_message(bytes);
  const auto found = std::find_if(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
    return message.transfer == handoff::TransferId{sender_, entry.second.number};
  });
  if (found == transfers_.end()) {
    // Of a transfer that this side knows nothing of: nothing is being written for it.
    if (message.kind == MessageKind::reserved || message.kind == MessageKind::cancel) {
      Message answer;
      answer.kind = MessageKind::writes_ended;
      answer.transfer = message.transfer;
      send(answer);
    }
    return true;
  }
  Transfer& transfer = found->second;
  if (message.kind == MessageKind::reserved && transfer.destinations.empty()) {
    bool fits = message.destinations.size() == transfer.regions.size();
    for (std::size_t i = 0; fits && i < transfer.regions.size(); ++i)
      fits = message.destinations[i].capacity == transfer.regions[i].capacity;
    if (!fits) {
      transfer.reason = "the receiver reserved other regions than the descriptor has";
      perform(found->first, transfer, transfer.machine.cancel());
      return true;
    }
    transfer.destinations = message.destinations;
  }
  if (!message.reason.empty()) transfer.reason = handoff::printable(message.reason);
  perform(found->first, transfer, transfer.machine.receive(message.kind));
  return true;
}

bool SenderEndpoint::export_more(int request, Transfer& transfer) {
  if (transfer.machine.state() != handoff::Sender::State::sending || transfer.all_ready) return false;
  bool progress = false;
  for (const handoff::ExportedRegion& region : source_.export_ready(request, limits_.export_bytes)) {
    progress = true;
    if (region.memory.bytes > transfer.regions.at(region.region).capacity) throw InternalError("a region is larger than its capacity");
    transfer.summaries[region.region] = {region.memory.bytes, region.checksum};
    if (region.memory.bytes == 0) {
      source_.sent(request, region.region);
      continue;
    }
    const std::size_t first = transfer.partitions.size();
    for (std::size_t offset = 0; offset < region.memory.bytes; offset += limits_.partition_bytes) {
      const std::size_t count = std::min(limits_.partition_bytes, region.memory.bytes - offset);
      transfer.partitions.push_back({{static_cast<std::uint32_t>(transfer.partitions.size()), region.region, offset, count},
                                     {region.memory.data + offset, count, region.memory.device}});
    }
    transfer.unsent[region.region] = static_cast<std::uint32_t>(transfer.partitions.size() - first);
    for (std::size_t i = first; i < transfer.partitions.size(); ++i) {
      perform(request, transfer, transfer.machine.ready(transfer.partitions[i].partition.bytes));
    }
  }
  if (transfer.machine.state() == handoff::Sender::State::sending && source_.exported_all(request)) {
    transfer.all_ready = progress = true;
    perform(request, transfer, transfer.machine.all_ready());
  }
  return progress;
}

void SenderEndpoint::cancel(int request) { perform(request, at(request), at(request).machine.cancel()); }
void SenderEndpoint::lease_expired(int request) { perform(request, at(request), at(request).machine.lease_expired()); }

void SenderEndpoint::perform(int request, Transfer& transfer, const ProtocolActions& actions) {
  for (const handoff::ProtocolAction& action : actions) {
    switch (action.kind) {
      case handoff::ActionKind::send: {
        Message message;
        message.kind = action.message;
        message.transfer = {sender_, transfer.number};
        if (action.message == MessageKind::offer) message.descriptor = handoff::serialize(transfer.descriptor);
        if (action.message == MessageKind::arrived) message.partition = transfer.partitions.at(action.value).partition;
        if (action.message == MessageKind::commit) {
          message.partitions = action.value;
          message.summaries = transfer.summaries;
        }
        send(message);
        break;
      }
      case handoff::ActionKind::post: {
        const SentPartition& sent = transfer.partitions.at(action.value);
        writes_[tickets_] = {request, action.value};
        transport_.write(tickets_++, sent.memory, transfer.destinations.at(sent.partition.region), sent.partition.offset);
        if (transfer.before_prompt_end) transfer.early_bytes += sent.partition.bytes;
        transfer.most_in_flight = std::max(transfer.most_in_flight, transfer.machine.bytes_in_flight());
        break;
      }
      case handoff::ActionKind::release:
        source_.release(request);
        break;
      default:
        throw InternalError("a sender is told to do what receivers do");
    }
  }
}

void SenderEndpoint::send(const Message& message) { transport_.channel().send(handoff::serialize(message)); }

HandoffRecord SenderEndpoint::record(int request) const {
  const Transfer& transfer = transfers_.at(request);
  HandoffRecord record;
  record.request = request;
  record.outcome = std::string(handoff::to_string(transfer.machine.outcome()));
  record.partitions = transfer.machine.partitions();
  record.dense_bytes = static_cast<std::int64_t>(handoff::dense_bytes(transfer.descriptor));
  record.bytes_before_prompt_end = static_cast<std::int64_t>(transfer.early_bytes);
  record.seconds = transfer.seconds;
  record.most_bytes_in_flight = static_cast<std::int64_t>(transfer.most_in_flight);
  std::vector<std::uint64_t> bytes;
  for (std::size_t i = 0; i < transfer.regions.size(); ++i) {
    const handoff::Region& region = transfer.regions[i];
    bytes.push_back(transfer.summaries[i].bytes);
    record.bytes += static_cast<std::int64_t>(bytes.back());
    record.regions.push_back({std::string(handoff::to_string(region.kind)), region.positions, region.loop,
                              static_cast<std::int64_t>(bytes.back()), transfer.summaries[i].checksum});
  }
  record.bytes_final_before_last_loop =
      static_cast<std::int64_t>(handoff::bytes_final_after(transfer.descriptor, transfer.regions, bytes, transfer.descriptor.loops - 1));
  return record;
}

// ------------------------------------------------------------------------------------------------------------------------ receiver

ReceiverEndpoint::ReceiverEndpoint(handoff::Target& target, handoff::ReceiverTransport& transport)
    : target_(target), transport_(transport) {}

bool ReceiverEndpoint::step() {
  bool progress = false;
  while (const auto bytes = transport_.channel().receive()) progress |= receive(*bytes);
  if (!peer_lost_ && transport_.channel().peer_lost()) {
    peer_lost_ = progress = true;
    for (auto& [id, transfer] : transfers_) perform(id, transfer, transfer.machine.peer_lost());
  }
  return progress;
}

bool ReceiverEndpoint::receive(const std::vector<std::byte>& bytes) {
  const Message message = handoff::parse_message(bytes);
  Transfer& transfer = transfers_[message.transfer];
  std::uint32_t value = 0;
  switch (message.kind) {
    case MessageKind::offer:
      if (transfer.offer.empty()) transfer.offer = message.descriptor;
      break;
    case MessageKind::arrived: {
      const handoff::Partition& partition = message.partition;
      const bool inside = partition.region < transfer.destinations.size() &&
                          partition.offset <= transfer.destinations[partition.region].capacity &&
                          partition.bytes <= transfer.destinations[partition.region].capacity - partition.offset;
      // A partition outside the regions counts like one that cannot be.
      value = inside ? partition.sequence : handoff::kMaximumPartitions;
      break;
    }
    case MessageKind::commit:
      value = message.partitions;
      if (transfer.summaries.empty()) transfer.summaries = message.summaries;
      break;
    default:
      break;
  }
  perform(message.transfer, transfer, transfer.machine.receive(message.kind, value));
  return true;
}

ProtocolActions ReceiverEndpoint::reserve(Transfer& transfer) {
  int reserved = -1;
  try {
    const handoff::Descriptor descriptor = handoff::parse_descriptor(transfer.offer);
    transfer.asked = descriptor.request;
    const std::vector<handoff::Memory> memory = target_.reserve(descriptor.request, descriptor);
    reserved = descriptor.request;
    for (const handoff::Memory& region : memory) transfer.destinations.push_back(transport_.expose(region));
    transfer.request = reserved;
    return transfer.machine.reservation(true);
  } catch (const InternalError&) {
    throw;
  } catch (const Error& error) {
    // The sender has not been told of any address.
    withdraw(transfer);
    if (reserved >= 0) target_.abort(reserved);
    transfer.reason = error.what();
    return transfer.machine.reservation(false);
  }
}

ProtocolActions ReceiverEndpoint::activate(Transfer& transfer) {
  try {
    target_.activate(transfer.request, transfer.summaries);
    withdraw(transfer);
    return transfer.machine.activation(true);
  } catch (const handoff::HandoffError& error) {
    transfer.reason = error.what();
    return transfer.machine.activation(false);
  }
}

void ReceiverEndpoint::withdraw(Transfer& transfer) {
  for (const handoff::Destination& destination : transfer.destinations) transport_.withdraw(destination);
  transfer.destinations.clear();
}

void ReceiverEndpoint::cancel(int request) {
  const auto found = by_request_.find(request);
  if (found == by_request_.end()) return;
  Transfer& transfer = transfers_.at(found->second);
  perform(found->second, transfer, transfer.machine.cancel());
}

void ReceiverEndpoint::lease_expired(int request) {
  const auto found = by_request_.find(request);
  if (found == by_request_.end()) return;
  Transfer& transfer = transfers_.at(found->second);
  perform(found->second, transfer, transfer.machine.lease_expired());
}

std::size_t ReceiverEndpoint::regions_held() const {
  std::size_t count = 0;
  for (const auto& [_, transfer] : transfers_) count += transfer.destinations.size();
  return count;
}

void ReceiverEndpoint::perform(const handoff::TransferId& id, Transfer& transfer, ProtocolActions actions) {
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const handoff::ProtocolAction action = actions[i];
    switch (action.kind) {
      case handoff::ActionKind::send: {
        Message message;
        message.kind = action.message;
        message.transfer = id;
        if (action.message == MessageKind::reserved) message.destinations = transfer.destinations;
        if (action.message == MessageKind::refused || action.message == MessageKind::failed) message.reason = transfer.reason;
        transport_.channel().send(handoff::serialize(message));
        break;
      }
      case handoff::ActionKind::reserve:
      case handoff::ActionKind::activate: {
        const ProtocolActions more = action.kind == handoff::ActionKind::reserve ? reserve(transfer) : activate(transfer);
        if (transfer.request >= 0) by_request_[transfer.request] = id;
        else if (transfer.asked >= 0) by_request_.try_emplace(transfer.asked, id);  // so that whoever waits for it learns why
        actions.insert(actions.end(), more.begin(), more.end());
        break;
      }
      case handoff::ActionKind::free:
        if (transfer.destinations.empty()) break;  // the request is active: its storage is the executor's
        withdraw(transfer);
        target_.abort(transfer.request);
        break;
      default:
        throw InternalError("a receiver is told to do what senders do");
    }
  }
}

}  // namespace loopgauge::harness
