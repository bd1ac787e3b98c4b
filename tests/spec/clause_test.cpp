// SPDX-License-Identifier: Apache-2.0
// Clause ids: declared once, numbered without holes, and every citation leads somewhere.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>

#include "models/spec/op_list.hpp"
#include "tests/spec/source_tree.hpp"

namespace loopgauge {
namespace {

std::vector<std::string> declared_clauses() {
  const std::string text = test::read_text(test::repository_root() / "models/SPEC.md");
  const std::regex declaration("(?:^|\n)- \\*\\*(S-[A-Z]+-[0-9]+)\\*\\* ");
  std::vector<std::string> ids;
  for (std::sregex_iterator it(text.begin(), text.end(), declaration), end; it != end; ++it) ids.push_back((*it)[1]);
  return ids;
}

// "S-RMS-2" and, of "S-RMS-1..3", all three.
std::set<std::string> cited_clauses(const std::string& text) {
  const std::regex citation("(S-[A-Z]+-)([0-9]+)(?:\\.\\.([0-9]+))?");
  std::set<std::string> ids;
  for (std::sregex_iterator it(text.begin(), text.end(), citation), end; it != end; ++it) {
    const int first = std::stoi((*it)[2]), last = (*it)[3].matched ? std::stoi((*it)[3]) : first;
    for (int i = first; i <= last; ++i) ids.insert((*it)[1].str() + std::to_string(i));
  }
  return ids;
}

TEST(Clauses, AreDeclaredOnceAndNumberedWithoutHoles) {
  const auto ids = declared_clauses();
  ASSERT_GT(ids.size(), 100u);
  std::set<std::string> unique(ids.begin(), ids.end());
  EXPECT_EQ(unique.size(), ids.size());
  std::map<std::string, std::set<int>> families;
  for (const std::string& id : ids) families[id.substr(0, id.rfind('-'))].insert(std::stoi(id.substr(id.rfind('-') + 1)));
  for (const auto& [family, numbers] : families) {
    EXPECT_EQ(*numbers.rbegin() - *numbers.begin() + 1, static_cast<int>(numbers.size())) << family;
  }
}

TEST(Clauses, EveryCitationExists) {
  const auto ids = declared_clauses();
  const std::set<std::string> declared(ids.begin(), ids.end());
  int citations = 0;
  for (const auto& file : test::source_files({"models", "reference", "optimized", "harness", "tests", "data", "reports"},
                                             {".hpp", ".cpp", ".cu", ".cuh", ".md", ".py"})) {
    for (const std::string& id : cited_clauses(file.text)) {
      ++citations;
      EXPECT_TRUE(declared.contains(id)) << file.path << " cites " << id;
    }
  }
  EXPECT_GT(citations, 100);
}

TEST(Clauses, OfTheRegistryExist) {
  const auto ids = declared_clauses();
  const std::set<std::string> declared(ids.begin(), ids.end());
  for (const spec::OpSpec* op : spec::op_list()) {
    for (const std::string_view id : op->clauses) EXPECT_TRUE(declared.contains(std::string(id))) << op->name << ": " << id;
  }
}

// Every clause about values of an operation is the concern of at least one record.
TEST(Clauses, OfOperationsBelongToARecord) {
  std::set<std::string> owned;
  for (const spec::OpSpec* op : spec::op_list()) owned.insert(op->clauses.begin(), op->clauses.end());
  for (const std::string& id : declared_clauses()) {
    const std::string family = id.substr(2, id.rfind('-') - 2);
    for (const char* operation : {"SUM", "ELEM", "EMB", "RMS", "LIN", "ROPE", "KVA", "ATT", "RES", "MLP", "GATE", "HEAD", "KVQ", "POL"}) {
      if (family == operation) {
        EXPECT_TRUE(owned.contains(id)) << id;
      }
    }
  }
}

}  // namespace
}  // namespace loopgauge
