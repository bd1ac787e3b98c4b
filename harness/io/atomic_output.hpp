// SPDX-License-Identifier: Apache-2.0
// Files that appear whole or not at all: written under a temporary name in the destination's folder, renamed on commit.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace loopgauge::harness {

enum class IfExists { refuse, replace };

// Reserves a temporary file beside `destination`. Whoever writes it (h5::File::create, std::ofstream) uses temporary(), closes it, and
// calls commit(). Without commit() the destructor removes the temporary file and the destination is untouched. What a killed process leaves,
// `.<name>.partial-<process>-<number>`, is removed by the next that writes the same destination.
class AtomicOutput {
 public:
  // Throws FileError when the folder is missing or not writable, when the destination is not a regular file, and, with
  // IfExists::refuse, when it exists (the sentence says to pass --force).
  explicit AtomicOutput(std::filesystem::path destination, IfExists if_exists = IfExists::replace);
  ~AtomicOutput();
  AtomicOutput(const AtomicOutput&) = delete;
  AtomicOutput& operator=(const AtomicOutput&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  const std::filesystem::path& destination() const { return destination_; }

  // Flushes the temporary file to the device, renames it over the destination and flushes the folder entry. Throws FileError.
  void commit();

 private:
  std::filesystem::path destination_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;  // of the temporary file, locked
  IfExists if_exists_;
  bool committed_ = false;
};

// Names beside `destination` of what is not finished yet, `.<name>.partial-<process>-<number>`: another one with every call, and those that are there, of
// whatever process.
std::filesystem::path new_partial_path(const std::filesystem::path& destination);
std::vector<std::filesystem::path> partial_paths(const std::filesystem::path& destination);

// `text` as the whole content of `destination`, atomically.
void write_text_file(const std::filesystem::path& destination, std::string_view text, IfExists if_exists = IfExists::replace);

}  // namespace loopgauge::harness
