// SPDX-License-Identifier: Apache-2.0
// The reference's ends of a handoff (S-PD-1..8): regions are copies, taken when they become final, so nothing that happens to the request
// afterwards reaches them; what arrives is unpacked into storage of its own when all of it is there.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "models/handoff/transfer.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

template <class P>
class HandoffSource final : public handoff::Source {
 public:
  HandoffSource(RunContext<P>& run, std::vector<RequestState<P>>& requests) : run_(run), requests_(requests) {}

  handoff::Descriptor describe(int request) const override;
  std::vector<handoff::ExportedRegion> export_ready(int request, std::size_t most_bytes) override;
  bool exported_all(int request) const override;
  void sent(int request, std::uint32_t region) override;
  void release(int request) override;
  std::int64_t regions_held() const;

 private:
  struct Exports {
    handoff::Descriptor descriptor;
    std::vector<handoff::Region> regions;
    std::set<std::uint32_t> waiting;                          // not exported yet
    std::map<std::uint32_t, std::vector<std::byte>> copies;   // exported and not sent
    std::size_t bytes = 0;                                    // of the copies
  };
  Exports& exports(int request);
  bool is_final(const RequestState<P>& s, const handoff::Region& region) const;
  std::vector<std::byte> bytes_of(RequestState<P>& s, const handoff::Region& region) const;

  RunContext<P>& run_;
  std::vector<RequestState<P>>& requests_;
  std::map<int, Exports> exports_;
};

template <class P>
class HandoffTarget final : public handoff::Target {
 public:
  HandoffTarget(RunContext<P>& run, std::vector<RequestState<P>>& requests) : run_(run), requests_(requests) {}

  handoff::Descriptor expected(int request) const override;
  std::vector<handoff::Memory> reserve(int request, const handoff::Descriptor& descriptor) override;
  void activate(int request, std::span<const handoff::RegionSummary> summaries) override;
  void abort(int request) override;
  std::size_t transfer_bytes() const override { return bytes_; }
  std::size_t most_transfer_bytes() const override { return most_bytes_; }
  std::int64_t regions_held() const;

 private:
  struct Reservation {
    handoff::Descriptor descriptor;
    std::vector<handoff::Region> regions;
    std::vector<std::vector<std::byte>> memory;
    std::unique_ptr<RequestStorage<P>> storage;
  };
  void plant_fault(Reservation& reservation, std::span<const handoff::RegionSummary> summaries) const;
  void unpack(RequestState<P>& s, const Reservation& reservation, std::span<const handoff::RegionSummary> summaries) const;

  RunContext<P>& run_;
  std::vector<RequestState<P>>& requests_;
  std::map<int, Reservation> reservations_;
  std::size_t bytes_ = 0, most_bytes_ = 0;
};

}  // namespace loopgauge::reference
