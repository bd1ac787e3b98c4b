// SPDX-License-Identifier: Apache-2.0
// The repository's own text, for tests that check it.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace loopgauge::test {

inline std::filesystem::path repository_root() { return LOOPGAUGE_SOURCE_DIR; }

inline std::string read_text(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

struct SourceFile {
  std::string path;  // from the repository root, with '/'
  std::string text;
};

// Files below `folders` whose extension is listed ("" for none), sorted by path.
inline std::vector<SourceFile> source_files(std::initializer_list<std::string_view> folders,
                                            std::initializer_list<std::string_view> extensions) {
  std::vector<SourceFile> files;
  for (const std::string_view folder : folders) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(repository_root() / folder)) {
      const std::string extension = entry.path().extension().string();
      if (!entry.is_regular_file() || std::find(extensions.begin(), extensions.end(), extension) == extensions.end()) continue;
      files.push_back({std::filesystem::relative(entry.path(), repository_root()).generic_string(), read_text(entry.path())});
    }
  }
  std::sort(files.begin(), files.end(), [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
  return files;
}

}  // namespace loopgauge::test
