// SPDX-License-Identifier: Apache-2.0
// SHA-256 digests of a run's results: equal digests mean equal bits (NaN payloads aside), whatever produced them.
//
// Serialization "digest-v1", in this order, all integers little endian:
//   text      the bytes "digest-v1\n", the group's name, "\n"
//   int32     number of requests; then per request the group's tensors in the order below
//   tensor    one byte element type ('i' int32, 'b' uint8, 'f' float32), int32 rank, int64 extents, then the elements row-major
//   float32   IEEE bits; every NaN becomes 0x7fc00000; -0 stays -0
//   list      int32 length before the items
// Groups, per request:
//   tokens            tokens [n]
//   logits            logits
//   hidden            loops 1..4
//   gate              gate
//   exits             exit_depths [n]
//   scores            loops 3, 4
//   active            loops 3, 4
//   keys              list of the steps that have keys: int32 step, list of layers
//   mass              list of the steps that have mass: int32 step, mass
//   kv                list of planes (layer * 4 + loop - 1): k, v
//   encoded_frontier  encoded_frontier [1 + fed]
//   codec             list of blocks: int32 begin, end; streams 1..4: rows, list of layers: k_codes, k_min, k_scale, v_codes, v_min,
//   v_scale
// A tensor without elements is written with rank 0: whether it was not recorded or is empty makes no difference.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "models/run_record.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kDigestVersion = "digest-v1";

// Every group above by name, and "all": the digest of the lines "<group> <digest>\n" in byte order of the names.
// Lower-case hex. Metadata of the record (executor, profile, mode, model) is not covered: identity of results is the point.
std::map<std::string, std::string> digests(const RunRecord& record);

}  // namespace loopgauge::harness
