// SPDX-License-Identifier: Apache-2.0
// Trace files (data/README.md describes every attribute and dataset).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "harness/io/atomic_output.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kTraceFormat = "loopgauge-trace";  // root attribute `format`

// The most requests, and the most tokens of one request's prompt or continuation, that a trace file may hold.
inline constexpr std::int64_t kMaxTraceRequests = 65536;
inline constexpr std::int64_t kMaxTraceTokens = std::int64_t{1} << 24;

// "cancel", "preempt", "resume", "reuse_id". The parser throws TraceError listing the words.
std::string_view to_string(TraceEventKind kind);
TraceEventKind parse_trace_event_kind(std::string_view text);

// Throws FileError for what is not a readable trace file (missing, not HDF5, format, version, types, extents, unknown members) and
// TraceError with the first fault of trace_faults() and their number for one whose content is inconsistent.
Trace read_trace(const std::filesystem::path& path);

// The same reading, but the content's faults are returned instead of thrown. FileError as above.
Trace read_trace(const std::filesystem::path& path, std::vector<std::string>& faults);

// Throws TraceError when the trace is not valid, FileError when the file cannot be written. Atomic.
void write_trace(const std::filesystem::path& path, const Trace& trace, IfExists if_exists = IfExists::replace);

}  // namespace loopgauge::harness
