// SPDX-License-Identifier: Apache-2.0
#include "harness/io/replaceable.hpp"

#include <fstream>
#include <string>
#include <system_error>

#include "harness/io/atomic_output.hpp"
#include "harness/io/hdf5.hpp"
#include "harness/io/hdf5_probe.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

std::string format_of_file(const std::filesystem::path& path) {
  constexpr unsigned kSeconds = 5;  // of processor time
  return h5::read_in_children(path, {[&path] {
                                const h5::Group root = h5::File::open_readonly(path, h5::Trust::probed).root();
                                return root.has_attribute("format") ? root.string_attribute("format") : std::string();
                              }},
                              kSeconds)
      .front();
}

void require_replaceable(const std::filesystem::path& path, std::string_view format, std::string_view flag) {
  { const AtomicOutput writable(path); }
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0 || error) return;
  std::string found;
  try {
    found = format_of_file(path);
  } catch (const FileError&) {
    // Nothing of ours, whatever it is.
  }
  if (found == format) return;
  throw FileError(path.string() + ": exists and is no " + std::string(format) + (found.empty() ? "" : " but a " + found) +
                  ", so it is not replaced; choose another " + std::string(flag) + " or remove it");
}

void require_other_file(const std::filesystem::path& output, const std::filesystem::path& input, std::string_view what) {
  std::error_code unknown;  // what does not exist is no other file
  if (!output.empty() && !input.empty() && std::filesystem::equivalent(output, input, unknown))
    throw ConfigError(output.string() + " is " + std::string(what) + ": it would be lost; write to another file");
}

void require_replaceable_text(const std::filesystem::path& path, std::string_view start, std::string_view flag) {
  std::error_code error;
  if (path.empty() || !std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0 || error) return;
  std::string begin(start.size(), '\0');
  std::ifstream(path, std::ios::binary).read(begin.data(), static_cast<std::streamsize>(begin.size()));
  if (begin == start) return;
  throw FileError(path.string() + ": exists and is no earlier output of " + std::string(flag) + ", so it is not replaced; choose another " +
                  std::string(flag) + " or remove it");
}

}  // namespace loopgauge::harness
