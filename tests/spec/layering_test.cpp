// SPDX-License-Identifier: Apache-2.0
// Include directions, and what text may not contain.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>

#include "tests/spec/source_tree.hpp"

namespace loopgauge {
namespace {

struct Include {
  std::string target;
  bool quoted;
};

std::vector<Include> includes_of(const std::string& text) {
  const std::regex directive("(?:^|\n)[ \t]*#[ \t]*include[ \t]*([\"<])([^\">]+)[\">]");
  std::vector<Include> includes;
  for (std::sregex_iterator it(text.begin(), text.end(), directive), end; it != end; ++it) {
    includes.push_back({(*it)[2].str(), (*it)[1].str() == "\""});
  }
  return includes;
}

std::string first_folder(const std::string& path) { return path.substr(0, path.find('/')); }

TEST(Layering, IncludesFollowTheDependencyDirections) {
  const std::map<std::string, std::set<std::string>> allowed{{"models", {"models"}},
                                                             {"reference", {"models", "reference"}},
                                                             {"optimized", {"models", "optimized"}},
                                                             {"harness", {"models", "reference", "optimized", "harness"}}};
  int checked = 0;
  for (const auto& [folder, targets] : allowed) {
    for (const auto& file : test::source_files({folder}, {".hpp", ".cpp", ".cu", ".cuh"})) {
      for (const Include& include : includes_of(file.text)) {
        if (!include.quoted) continue;
        ++checked;
        EXPECT_TRUE(targets.contains(first_folder(include.target))) << file.path << " includes \"" << include.target << '"';
        EXPECT_TRUE(std::filesystem::is_regular_file(test::repository_root() / include.target))
            << file.path << " includes \"" << include.target << "\", which is not a path from the repository root";
      }
    }
  }
  EXPECT_GT(checked, 50);
}

TEST(Layering, LibrariesStayInTheirFolders) {
  const auto is_cuda = [](const std::string& header) {
    return header.starts_with("cuda") || header.starts_with("cub") || header.starts_with("mma");
  };
  for (const auto& file : test::source_files({"models", "reference", "optimized", "harness"}, {".hpp", ".cpp", ".cu", ".cuh"})) {
    const std::string folder = first_folder(file.path);
    for (const Include& include : includes_of(file.text)) {
      if (include.quoted) continue;
      if (include.target.starts_with("Eigen/")) {
        EXPECT_TRUE(folder == "reference" || folder == "harness") << file.path << " includes " << include.target;
      }
      if (include.target.starts_with("hdf5")) {
        EXPECT_EQ(folder, "harness") << file.path << " includes " << include.target;
      }
      if (is_cuda(include.target)) {
        EXPECT_TRUE(folder != "models" && folder != "reference") << file.path << " includes " << include.target;
      }
      if (include.target.starts_with("nlohmann/")) {
        EXPECT_TRUE(folder == "models" || folder == "harness") << file.path;
      }
    }
  }
}

// The reference reaches the C library's elementary functions in the RoPE table and the double profile only (S-ROPE-3, S-PROF-3).
TEST(Layering, TheReferenceUsesElementaryFunctionsOfTheCLibraryInTwoFilesOnly) {
  const std::regex call("std::(exp|exp2|expf|log|log2|pow|sin|cos|tanh|fma)\\(");
  std::set<std::string> users;
  for (const auto& file : test::source_files({"reference"}, {".hpp", ".cpp"})) {
    if (std::regex_search(file.text, call)) users.insert(file.path);
  }
  EXPECT_EQ(users, (std::set<std::string>{"reference/numeric/profile.hpp", "reference/ops/rope.cpp"}));
}

TEST(Layering, EverySourceFileStartsWithTheLicence) {
  for (const auto& file : test::source_files({"models", "reference", "optimized", "harness", "tests"}, {".hpp", ".cpp", ".cu", ".cuh"})) {
    EXPECT_TRUE(file.text.starts_with("// SPDX-License-Identifier: Apache-2.0\n")) << file.path;
  }
}

TEST(Layering, NoTextNamesAMachinePathOrLeavesWorkForLater) {
  // Written in two parts so that this file does not contain them.
  const std::vector<std::string> forbidden{
      "/wo"
      "rk/",
      "/ro"
      "ot/",
      "/ho"
      "me/",
      "/tm"
      "p/",
      "TO"
      "DO",
      "FIX"
      "ME"};
  for (const auto& file : test::source_files({"models", "reference", "optimized", "harness", "tests", "data", "reports", ".ci"},
                                             {".hpp", ".cpp", ".cu", ".cuh", ".md", ".txt", ".py", ".json", ".cmake", ""})) {
    if (file.path.ends_with(".txt") && !file.path.ends_with("CMakeLists.txt")) continue;  // corpora
    for (const std::string& word : forbidden) EXPECT_EQ(file.text.find(word), std::string::npos) << file.path << " contains " << word;
  }
}

}  // namespace
}  // namespace loopgauge
