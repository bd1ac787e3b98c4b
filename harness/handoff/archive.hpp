// SPDX-License-Identifier: Apache-2.0
// Handoffs in a file: what a prefill side would have sent, to be looked at or to be gone on from later. Byte layout: models/handoff/README.md.
// On the way there and back they pass through the same protocol and checks as any other transfer: the file is a receiver that never decodes,
// or a sender that never computes.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/executor.hpp"
#include "models/handoff/regions.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kArchiveMagic = "LGPDFILE";  // the first bytes of a file
inline constexpr std::uint32_t kArchiveVersion = 1;

struct ArchivedHandoff {
  handoff::Descriptor descriptor;
  std::vector<handoff::RegionSummary> summaries;   // by region of the descriptor
  std::vector<std::vector<std::byte>> data;        // likewise, exactly the bytes
};

struct HandoffArchive {
  std::string producer;   // who computed it, as people read it: executor, profile, version
  std::string trace;      // its name
  std::vector<ArchivedHandoff> handoffs;   // by request, ascending
};

std::vector<std::byte> serialize(const HandoffArchive& archive);
// Throws HandoffError naming the first of magic, version, length, checksum, descriptor and region that is not acceptable, whatever the bytes
// are; nothing outside them is read. What it returns could be activated.
HandoffArchive parse_archive(std::span<const std::byte> bytes);

// Throws FileError for a file that cannot be read, HandoffError for one that is none of ours; both name the file.
HandoffArchive read_archive(const std::filesystem::path& path);

// The two ends as executors, for make_handoff_executor(). The receiving one keeps what arrives in `archive` and decodes nothing:
// its record is that of a run in which every request was cancelled. The sending one has what `archive` holds
// and computes nothing: of the prompts its record says nothing. The archives must outlive the executors.
std::unique_ptr<Executor> make_archiving_executor(HandoffArchive& archive);
std::unique_ptr<Executor> make_archived_executor(const HandoffArchive& archive);

}  // namespace loopgauge::harness
