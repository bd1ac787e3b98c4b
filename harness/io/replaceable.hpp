// SPDX-License-Identifier: Apache-2.0
// What kind a file is, and whether it may be replaced by a new one of its own kind.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace loopgauge::harness {

// The root attribute `format` of an HDF5 file, which says what the file holds; empty where it has none. Throws FileError where `path` is no such file.
std::string format_of_file(const std::filesystem::path& path);

// A command that replaces its output replaces nothing but an earlier output: throws FileError where `path` is a file that is neither empty
// nor an HDF5 file whose root attribute `format` is `format` ("loopgauge-report"), and where it could not be written. To be called before the work. `flag`:
// for the message.
void require_replaceable(const std::filesystem::path& path, std::string_view format, std::string_view flag);

// An input is not replaced by the output made of it: throws ConfigError where both paths lead to one file. `what`: the input, for the message ("the report
// itself"). Empty paths are none.
void require_other_file(const std::filesystem::path& output, const std::filesystem::path& input, std::string_view what);

// The same for text: throws where `path` is a file that is neither empty nor begins with `start`. An empty path is no output.
void require_replaceable_text(const std::filesystem::path& path, std::string_view start, std::string_view flag);

}  // namespace loopgauge::harness
