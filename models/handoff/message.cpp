// SPDX-License-Identifier: Apache-2.0
#include "models/handoff/message.hpp"

#include "models/handoff/bytes.hpp"

namespace loopgauge::handoff {
namespace {

constexpr std::string_view kMagic = "LGPDMESG";

std::uint32_t counted(ByteReader& in, std::size_t bytes_each, std::size_t most, const std::string& what) {
  const auto count = in.integer<std::uint32_t>();
  if (count > most) throw HandoffError("message: " + std::to_string(count) + " " + what + " are more than " + std::to_string(most));
  if (count > in.left() / bytes_each) throw HandoffError("message: length: " + std::to_string(count) + " " + what + " do not fit into it");
  return count;
}

}  // namespace

std::vector<std::byte> serialize(const Message& m) {
  ByteWriter out;
  out.text(kMagic);
  out.integer(kMessageVersion);
  out.integer(static_cast<std::uint32_t>(m.kind));
  out.integer(m.transfer.sender);
  out.integer(m.transfer.number);
  switch (m.kind) {
    case MessageKind::offer:
      out.integer(static_cast<std::uint32_t>(m.descriptor.size()));
      out.bytes(m.descriptor);
      break;
    case MessageKind::arrived:
      out.integer(m.partition.sequence);
      out.integer(m.partition.region);
      out.integer(m.partition.offset);
      out.integer(m.partition.bytes);
      break;
    case MessageKind::commit:
      out.integer(m.partitions);
      out.integer(static_cast<std::uint32_t>(m.summaries.size()));
      for (const RegionSummary& summary : m.summaries) {
        out.integer(summary.bytes);
        out.integer(summary.checksum);
      }
      break;
    case MessageKind::reserved:
      out.integer(static_cast<std::uint32_t>(m.destinations.size()));
      for (const Destination& destination : m.destinations) {
        out.integer(destination.address);
        out.integer(destination.capacity);
      }
      break;
    case MessageKind::refused:
    case MessageKind::failed: {
      const std::string reason = m.reason.substr(0, kMaximumReasonBytes);
      out.integer(static_cast<std::uint32_t>(reason.size()));
      out.text(reason);
      break;
    }
    case MessageKind::writes_ended:
    case MessageKind::activated:
    case MessageKind::cancel:
    case MessageKind::released:
      break;
  }
  return out.take();
}

Message parse_message(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "message");
  if (bytes.size() > kMaximumMessageBytes) throw HandoffError("message: length: " + std::to_string(bytes.size()) + " bytes are too many");
  if (in.text(kMagic.size()) != kMagic) throw HandoffError("message: magic is not " + std::string(kMagic));
  if (const auto version = in.integer<std::uint32_t>(); version != kMessageVersion) {
    throw HandoffError("message: version " + std::to_string(version) + " is not the version " + std::to_string(kMessageVersion) +
                       " that can be read");
  }
  Message m;
  const auto kind = in.integer<std::uint32_t>();
  m.kind = static_cast<MessageKind>(kind);
  m.transfer.sender = in.integer<std::uint64_t>();
  m.transfer.number = in.integer<std::uint64_t>();
  switch (kind) {
    case static_cast<std::uint32_t>(MessageKind::offer): {
      const auto count = counted(in, 1, kDescriptorFixedBytes + kMaximumConfigurationBytes + kChecksumBytes, "bytes of a descriptor");
      const auto from = in.take(count);
      m.descriptor.assign(from.begin(), from.end());
      break;
    }
    case static_cast<std::uint32_t>(MessageKind::arrived):
      m.partition.sequence = in.integer<std::uint32_t>();
      m.partition.region = in.integer<std::uint32_t>();
      m.partition.offset = in.integer<std::uint64_t>();
      m.partition.bytes = in.integer<std::uint64_t>();
      break;
    case static_cast<std::uint32_t>(MessageKind::commit): {
      m.partitions = in.integer<std::uint32_t>();
      m.summaries.resize(counted(in, 16, kMaximumRegions, "regions"));
      for (RegionSummary& summary : m.summaries) {
        summary.bytes = in.integer<std::uint64_t>();
        summary.checksum = in.integer<std::uint64_t>();
      }
      break;
    }
    case static_cast<std::uint32_t>(MessageKind::reserved):
      m.destinations.resize(counted(in, 16, kMaximumRegions, "regions"));
      for (Destination& destination : m.destinations) {
        destination.address = in.integer<std::uint64_t>();
        destination.capacity = in.integer<std::uint64_t>();
      }
      break;
    case static_cast<std::uint32_t>(MessageKind::refused):
    case static_cast<std::uint32_t>(MessageKind::failed):
      m.reason = in.text(counted(in, 1, kMaximumReasonBytes, "bytes of a reason"));
      break;
    case static_cast<std::uint32_t>(MessageKind::writes_ended):
    case static_cast<std::uint32_t>(MessageKind::activated):
    case static_cast<std::uint32_t>(MessageKind::cancel):
    case static_cast<std::uint32_t>(MessageKind::released):
      break;
    default:
      throw HandoffError("message: kind " + std::to_string(kind) + " is not known to version " + std::to_string(kMessageVersion));
  }
  if (in.left() != 0) throw HandoffError("message: length: " + std::to_string(in.left()) + " bytes follow its end");
  return m;
}

}  // namespace loopgauge::handoff
