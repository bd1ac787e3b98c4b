// SPDX-License-Identifier: Apache-2.0
// Dump files: one run's record in HDF5 (data/README.md, "Dump file").
#pragma once

#include <array>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "harness/io/atomic_output.hpp"
#include "models/algorithm_config.hpp"
#include "models/run_record.hpp"

namespace loopgauge::harness {

namespace h5 {
class Group;
}

inline constexpr std::string_view kDumpFormat = "loopgauge-dump";          // root attribute `format`
inline constexpr std::string_view kExpectedFormat = "loopgauge-expected";  // of the handed cases, which hold some rows of a dump

// Root attributes of a dump, of the same names (`case_id` is `case`).
struct DumpInfo {
  std::string tool_version;
  std::string case_id;
  std::string mode;
  std::string switches;  // "t1s0q1"
  std::string policy;
  std::string timing;
  std::string flush;
  int window = 0;
  int tail = 0;
  std::array<int, kLoops> retention_bp{};  // loops 1..4
  int decode_key_bp = 0;
  std::string exit;  // "full", "threshold", "delayed", "trace"
  double threshold = 1.0;
  int min_loops = 1;
  std::string profile;
  std::string executor;
  std::string model_sha256;
  std::string trace;
};

struct DumpOptions {
  std::string case_id;
  // Groups to write, of dump_group_names(); empty: everything recorded. tokens, exit_depths and encoded_frontier are always written.
  std::vector<std::string> only;
  IfExists if_exists = IfExists::replace;
};

// Refuses before a run what could not be written after it, and a file that is no dump (`--dump`): throws FileError. An empty path is none.
void require_dump_replaceable(const std::filesystem::path& dump_file);
// tokens, logits, hidden, gate, exit_depths, scores, active, keys, mass, kv, encoded_frontier, codec.
const std::vector<std::string>& dump_group_names();
// What a run must record for these groups (`--dump-only`); empty: all. Throws ConfigError naming the unknown group.
RecordGroups record_groups(const std::vector<std::string>& only);

// Atomic. A tensor that was not recorded has no dataset.
void write_dump(const std::filesystem::path& path, const RunRecord& record, const EffectiveConfig& config, const DumpOptions& options);

// Throws FileError naming the versions that can be read when the dump, or the expected file in its layout, is of another one.
void require_dump_version(const h5::Group& root);

// Reads a whole dump back. Throws FileError naming the object when the file is not a dump of a known version, when extents disagree,
// or when a dataset is restricted to some positions or heads (attributes `positions`, `heads`): a record has no place for holes.
RunRecord read_dump(const std::filesystem::path& path, DumpInfo& info);

}  // namespace loopgauge::harness
