// SPDX-License-Identifier: Apache-2.0
// Text files that people write, read whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace loopgauge::harness {

// Far above every list, baseline and description, and little enough to read a device or a wrong file without harm.
inline constexpr std::uint64_t kMostTextBytes = std::uint64_t{64} << 20;

// The whole content; pipes are read to their end. `what` names the kind for messages ("baseline"). Throws FileError naming the path where there is no such
// file, where it is a directory, has more than `most_bytes` or cannot be read.
std::string read_text_file(const std::filesystem::path& path, std::string_view what, std::uint64_t most_bytes = kMostTextBytes);

}  // namespace loopgauge::harness
