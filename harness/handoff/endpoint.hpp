// SPDX-License-Identifier: Apache-2.0
// The two sides of handoffs at work: messages in and out, writes, and what the state machines (models/handoff/protocol.hpp) ask of an
// executor. One endpoint serves all transfers of its side; nothing here waits for the other side or reads a clock. Activating waits for the work of
// the executor, exporting where the source says so (handoff::Source::export_ready).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "models/handoff/transfer.hpp"
#include "models/run_record.hpp"

namespace loopgauge::harness {

struct HandoffLimits {
  std::size_t partition_bytes = std::size_t{256} << 10;   // of one partition at most
  std::size_t bytes_in_flight = std::size_t{1} << 20;     // being written at once; one partition always may
  std::size_t export_bytes = std::size_t{4} << 20;        // that the source holds of its own, exported and not sent
  std::chrono::milliseconds lease{60000};                 // without progress the other side is given up; kept by whoever runs the endpoints
};

class SenderEndpoint {
 public:
  // `sender` tells this life of the side from others. All must outlive the endpoint.
  SenderEndpoint(handoff::Source& source, handoff::SenderTransport& transport, std::uint64_t sender, HandoffLimits limits = {});

  // Begins the transfer of a request: what it has computed leaves from then on, as it becomes final.
  void offer(int request);
  // Does what can be done now. False when there was nothing.
  bool step();
  void cancel(int request);
  void lease_expired(int request);
  // The prompt is complete: what is posted from now on has not left before its end.
  void prompt_complete(int request) { at(request).before_prompt_end = false; }

  // What the handoff took from the end of the prompt to its acknowledgement; for the record.
  void set_seconds(int request, double seconds) { at(request).seconds = seconds; }

  bool knows(int request) const { return transfers_.contains(request); }
  bool closed(int request) const { return transfers_.at(request).machine.closed(); }
  handoff::Sender::State state(int request) const { return transfers_.at(request).machine.state(); }
  handoff::Outcome outcome(int request) const { return transfers_.at(request).machine.outcome(); }
  const std::string& reason(int request) const { return transfers_.at(request).reason; }
  HandoffRecord record(int request) const;

 private:
  struct SentPartition {
    handoff::Partition partition;
    handoff::Memory memory;
  };
  struct Transfer {
    explicit Transfer(std::uint64_t bytes_in_flight) : machine(bytes_in_flight) {}
    handoff::Sender machine;
    std::uint64_t number = 0;
    handoff::Descriptor descriptor;
    std::vector<handoff::Region> regions;
    std::vector<handoff::RegionSummary> summaries;
    std::vector<handoff::Destination> destinations;
    std::vector<SentPartition> partitions;             // by sequence number
    std::map<std::uint32_t, std::uint32_t> unsent;     // region -> partitions whose write has not ended
    bool all_ready = false;
    bool before_prompt_end = true;
    std::uint64_t early_bytes = 0, most_in_flight = 0;
    double seconds = 0;
    std::string reason;
  };
  Transfer& at(int request) { return transfers_.at(request); }
  bool receive(const std::vector<std::byte>& bytes);
  bool export_more(int request, Transfer& transfer);
  void perform(int request, Transfer& transfer, const handoff::ProtocolActions& actions);
  void send(const handoff::Message& message);

  handoff::Source& source_;
  handoff::SenderTransport& transport_;
  const std::uint64_t sender_;
  const HandoffLimits limits_;
  std::uint64_t numbers_ = 0;
  std::map<int, Transfer> transfers_;                                          // by request
  std::map<std::uint64_t, std::pair<int, std::uint32_t>> writes_;              // ticket -> request, sequence number
  std::uint64_t tickets_ = 0;
  bool peer_lost_ = false;
};

class ReceiverEndpoint {
 public:
  ReceiverEndpoint(handoff::Target& target, handoff::ReceiverTransport& transport);

  bool step();
  // The transfer of the request, if one is known, ends; an active request's storage is the executor's to free.
  void cancel(int request);
  void lease_expired(int request);

  bool knows(int request) const { return by_request_.contains(request); }
  bool closed(int request) const { return transfers_.at(by_request_.at(request)).machine.closed(); }
  handoff::Receiver::State state(int request) const { return transfers_.at(by_request_.at(request)).machine.state(); }
  handoff::Outcome outcome(int request) const { return transfers_.at(by_request_.at(request)).machine.outcome(); }
  const std::string& reason(int request) const { return transfers_.at(by_request_.at(request)).reason; }
  // Reserved and not yet activated or freed.
  std::size_t regions_held() const;

 private:
  struct Transfer {
    handoff::Receiver machine;
    int request = -1;   // reserved
    int asked = -1;     // named by an offer that was refused
    std::vector<std::byte> offer;
    std::vector<handoff::Destination> destinations;
    std::vector<handoff::RegionSummary> summaries;
    std::string reason;
  };
  bool receive(const std::vector<std::byte>& bytes);
  handoff::ProtocolActions reserve(Transfer& transfer);
  handoff::ProtocolActions activate(Transfer& transfer);
  void withdraw(Transfer& transfer);
  void perform(const handoff::TransferId& id, Transfer& transfer, handoff::ProtocolActions actions);

  handoff::Target& target_;
  handoff::ReceiverTransport& transport_;
  std::map<handoff::TransferId, Transfer> transfers_;
  std::map<int, handoff::TransferId> by_request_;   // the latest transfer of a request, a refused one where there is no other
  bool peer_lost_ = false;
};

}  // namespace loopgauge::harness
