// SPDX-License-Identifier: Apache-2.0
// Preemption: everything that a request holds, as bytes that say what they are of (S-ACT-3, S-ACT-4).
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

inline constexpr std::uint32_t kSnapshotVersion = 2;

// What a snapshot must fit to be restored.
struct SnapshotIdentity {
  std::string model_sha256;
  std::string configuration;  // canonical JSON
  std::string profile;
  std::string request;  // index in the trace, id and generation
};

// Bytes: "LOOPSNAP", version (32 bits), the four texts of the identity and the payload, each after its length (64 bits), and the SHA-256 of
// all that (64 hexadecimal digits). Integers are little-endian.
std::vector<std::byte> seal_snapshot(const SnapshotIdentity& identity, std::span<const std::byte> payload);
// The payload. Throws FileError naming the first of magic, version, model, configuration, profile, request, length and checksum that does
// not fit.
std::span<const std::byte> open_snapshot(std::span<const std::byte> snapshot, const SnapshotIdentity& expected);

template <class P>
SnapshotIdentity snapshot_identity(const RunContext<P>& run, const RequestState<P>& s);

// Moves what a live request holds into its snapshot, and frees it.
template <class P>
void preempt(RunContext<P>& run, RequestState<P>& s);

// Restores a preempted request into new storage and a free slot. A snapshot that does not fit is refused before anything is allocated.
template <class P>
void restore(RunContext<P>& run, RequestState<P>& s);

}  // namespace loopgauge::reference
