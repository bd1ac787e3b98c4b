// SPDX-License-Identifier: Apache-2.0
// Submissions in flight: what they take along, and the reading of their results.
#include <algorithm>
#include <utility>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/kv/numeric_fault.hpp"

namespace loopgauge::optimized {

void CudaRun::open_ticket() {
  if (spare_tickets_.empty()) {
    spare_tickets_.push_back(std::make_unique<Ticket>());
    if (!arenas_.empty()) {
      spare_tickets_.back()->arena = std::move(arenas_.back());
      arenas_.pop_back();
    }
  }
  ticket_ = std::move(spare_tickets_.back());
  spare_tickets_.pop_back();
  ticket_->owners.assign(kMaxRequests, -1);
  note_owners();
}

// At the end of the run, when nothing is in flight any more.
void CudaRun::give_arenas_back() {
  const auto give_back = [&](Ticket& ticket) {
    ticket.arena.reset();
    arenas_.push_back(std::move(ticket.arena));
  };
  if (ticket_) give_back(*ticket_);
  for (const auto& ticket : in_flight_) give_back(*ticket);
  for (const auto& ticket : spare_tickets_) give_back(*ticket);
}

// A slot belongs in this submission to whoever had it last.
void CudaRun::note_owners() {
  for (const RequestState& s : requests_) {
    if (s.slot >= 0) ticket_->owners[static_cast<std::size_t>(s.slot)] = s.index;
  }
}

void CudaRun::close_ticket(bool joined) {
  ticket_->submission = submission_;
  ticket_->joined = joined;
  ticket_->numeric_fault = download(numeric_fault_.as<std::uint64_t>(), 1);
  LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(numeric_fault_.data(), 0xFF, sizeof(std::uint64_t), stream_));
  note_owners();
  ticket_->done.record(stream_);
  in_flight_.push_back(std::move(ticket_));
  open_ticket();
}

void CudaRun::deliver(Ticket& ticket) {
  const int issued = std::exchange(submission_, ticket.submission);
  for (const auto& delivery : std::exchange(ticket.deliveries, {})) delivery();
  submission_ = issued;
}

int CudaRun::submissions_in_flight() const {
  return static_cast<int>(std::count_if(in_flight_.begin(), in_flight_.end(), [](const auto& ticket) { return !ticket->joined; }));
}

void CudaRun::take_in_activations() {
  if (std::exchange(activated_, false)) close_ticket(!in_flight_.empty());
}

void CudaRun::deliver_oldest() {
  do {
    std::unique_ptr<Ticket> ticket = std::move(in_flight_.front());
    in_flight_.pop_front();
    ticket->done.synchronize();
    check_numeric_fault(*ticket);
    deliver(*ticket);
    add_times(*ticket);
    ticket->arena.reset();
    spare_tickets_.push_back(std::move(ticket));
  } while (!in_flight_.empty() && in_flight_.front()->joined);
}

void CudaRun::deliver_early() {
  if (asynchronous()) throw InternalError("a result is read before its time");
  stream_.synchronize();
  ++counters_.host_reads;
  ticket_->submission = submission_;
  deliver(*ticket_);
}

void CudaRun::settle() {
  stream_.synchronize();
  kv_.upload(ticket_->arena);
  for (const RequestState& s : requests_) {
    if (s.slot >= 0) kv_.read_maps(s.slot);
  }
  if (runs_ahead()) read_speculation();
}

// Throws for a value that the specification declares an error, naming where it was met.
void CudaRun::check_numeric_fault(const Ticket& ticket) const {
  if (*ticket.numeric_fault == kNoNumericFault) return;
  const NumericFault fault = unpack_numeric_fault(*ticket.numeric_fault);
  const int owner = ticket.owners.at(static_cast<std::size_t>(fault.request));
  if (owner >= 0) {
    // Rows past the end of a request that has ended meanwhile, and all of a cancelled one, are part of no result. The word keeps one fault of a
    // submission; what such a row may hide is a logit that makes its own row's result not finite, which the emission reports.
    const RequestState& s = requests_[static_cast<std::size_t>(owner)];
    if (s.finished && (s.cancelled || fault.position >= s.prompt_length + s.record.fed)) return;
  }
  throw NumericError(describe(fault, owner));
}

}  // namespace loopgauge::optimized
