// SPDX-License-Identifier: Apache-2.0
// The operation registry is complete and says nothing that the tree contradicts.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "models/spec/end_to_end.hpp"
#include "models/spec/op_list.hpp"
#include "tests/spec/source_tree.hpp"

namespace loopgauge::spec {
namespace {

bool file_exists(std::string_view path) { return std::filesystem::is_regular_file(test::repository_root() / path); }

std::vector<std::string> letters_of(std::string_view shape) {
  std::vector<std::string> letters;
  std::istringstream in{std::string(shape)};
  for (std::string letter; std::getline(in, letter, ',');) {
    letter.erase(std::remove(letter.begin(), letter.end(), ' '), letter.end());
    letters.push_back(letter);
  }
  return letters;
}

TEST(Registry, EveryRecordStatesEverything) {
  for (const OpSpec* op : op_list()) {
    SCOPED_TRACE(op->name);
    for (const std::string_view field :
         {op->name, op->equation, op->accumulator, op->reduction_order, op->special_values, op->ties, op->reference_source}) {
      EXPECT_FALSE(field.empty());
    }
    EXPECT_FALSE(op->clauses.empty());
    EXPECT_FALSE(op->axes.empty());
    EXPECT_FALSE(op->inputs.empty());
    EXPECT_FALSE(op->outputs.empty());
    if (op->accumulator == "fp32") {
      EXPECT_FALSE(op->rounding_points.empty());
    }
    EXPECT_EQ(find_op(op->name), op) << "the name is used twice";
  }
  EXPECT_EQ(find_op("no such operation"), nullptr);
}

TEST(Registry, EveryOutputHasAToleranceWithNumbersDomainAndDerivation) {
  std::vector<std::pair<std::string, Tolerance>> tolerances{{"end to end", kEndToEndDistance}};
  for (const OpSpec* op : op_list()) {
    for (const OutputSpec& output : op->outputs) {
      tolerances.emplace_back(std::string(op->name) + "." + std::string(output.name), output.tolerance);
      if (output.relaxed.kind == ToleranceKind::bit_exact) continue;
      EXPECT_EQ(output.tolerance.kind, ToleranceKind::bit_exact) << op->name << ": a relaxed limit belongs to an exact promise";
      tolerances.emplace_back(std::string(op->name) + "." + std::string(output.name) + ", relaxed", output.relaxed);
    }
  }
  for (const auto& [name, tolerance] : tolerances) {
    SCOPED_TRACE(name);
    EXPECT_GE(tolerance.justification.size(), 6u);
    EXPECT_FALSE(tolerance.domain.empty());
    EXPECT_GT(tolerance.differing_share, 0.0);
    EXPECT_LE(tolerance.differing_share, 1.0);
    const bool proportional = tolerance.lane_sums > 0 || tolerance.running_sums > 0 || tolerance.relative > 0;
    switch (tolerance.kind) {
      case ToleranceKind::bit_exact:
        EXPECT_FALSE(proportional || tolerance.ulps > 0);
        break;
      case ToleranceKind::ulp:
        EXPECT_TRUE(tolerance.ulps > 0 && !proportional);
        break;
      case ToleranceKind::norm_bound:
        EXPECT_TRUE(proportional && tolerance.input_gain == 0);
        EXPECT_FALSE(tolerance.magnitude.empty());
        break;
      case ToleranceKind::inherited:
        EXPECT_TRUE(proportional && tolerance.input_gain > 0);
        EXPECT_NE(tolerance.magnitude.find("input_error"), std::string_view::npos);
        break;
      case ToleranceKind::decision_margin:
        EXPECT_GE(tolerance.margin_factor, 1.0);
        break;
      case ToleranceKind::statistical:
        EXPECT_GT(tolerance.ratio, 1.0);
        break;
    }
  }
}

TEST(Registry, DecisionsNameTheValueTheyCompare) {
  std::map<std::string, ToleranceKind> kinds;
  for (const OpSpec* op : op_list()) {
    for (const OutputSpec& output : op->outputs) kinds[std::string(op->name) + "." + std::string(output.name)] = output.tolerance.kind;
  }
  for (const OpSpec* op : op_list()) {
    for (const OutputSpec& output : op->outputs) {
      if (output.tolerance.kind != ToleranceKind::decision_margin) continue;
      const auto compared = kinds.find(std::string(output.tolerance.compared_value));
      ASSERT_NE(compared, kinds.end()) << op->name << ": " << output.tolerance.compared_value;
      EXPECT_NE(compared->second, ToleranceKind::decision_margin) << compared->first;
    }
  }
}

TEST(Registry, EveryNamedFileExistsOrTheGapHasAReason) {
  for (const OpSpec* op : op_list()) {
    SCOPED_TRACE(op->name);
    EXPECT_TRUE(file_exists(op->reference_source)) << op->reference_source;
    for (const std::string_view file : op->optimized_sources) EXPECT_TRUE(file_exists(file)) << file;
    for (const std::string_view file : op->equivalence_tests) EXPECT_TRUE(file_exists(file)) << file;
    const bool complete = !op->optimized_sources.empty() && !op->equivalence_tests.empty();
    EXPECT_NE(complete, !op->gap.empty()) << "a record has files on both sides, or a reason why not, never both";
  }
}

TEST(Registry, EveryKernelAndReferenceOperationIsRegistered) {
  std::set<std::string> named;
  for (const OpSpec* op : op_list()) {
    named.insert(std::string(op->reference_source));
    for (const std::string_view file : op->optimized_sources) named.insert(std::string(file));
  }
  for (const auto& file : test::source_files({"optimized/ops"}, {".cu"})) EXPECT_TRUE(named.contains(file.path)) << file.path;
  for (const auto& file : test::source_files({"reference/ops"}, {".cpp"})) EXPECT_TRUE(named.contains(file.path)) << file.path;
}

TEST(Registry, EveryRecordFileIsInTheList) {
  const std::string list = test::read_text(test::repository_root() / "models/spec/op_list.cpp");
  for (const auto& file : test::source_files({"models/spec"}, {".hpp"})) {
    if (file.text.find("inline constexpr OpSpec ") == std::string::npos) continue;
    EXPECT_NE(list.find("#include \"" + file.path + "\""), std::string::npos) << file.path;
  }
}

TEST(Registry, RecordFilesThatCodeCitesExist) {
  const std::regex citation("models/spec/[a-z0-9_]+\\.hpp");
  for (const auto& file : test::source_files({"models", "reference", "optimized", "harness", "tests"}, {".hpp", ".cpp", ".cu", ".cuh"})) {
    for (std::sregex_iterator it(file.text.begin(), file.text.end(), citation), end; it != end; ++it) {
      EXPECT_TRUE(file_exists(it->str())) << file.path << " cites " << it->str();
    }
  }
}

TEST(Registry, AxesAreDeclaredUsedAndInTheTerminology) {
  const std::string terminology = test::read_text(test::repository_root() / "models/TERMINOLOGY.md");
  const std::size_t section = terminology.find("## Axis letters");
  ASSERT_NE(section, std::string::npos);
  const std::string table = terminology.substr(section);
  for (const OpSpec* op : op_list()) {
    SCOPED_TRACE(op->name);
    std::set<std::string> declared(op->axes.begin(), op->axes.end()), used;
    for (const InputSpec& input : op->inputs) {
      for (const std::string& letter : letters_of(input.shape)) used.insert(letter);
    }
    for (const OutputSpec& output : op->outputs) {
      for (const std::string& letter : letters_of(output.shape)) used.insert(letter);
    }
    for (const std::string& letter : used) EXPECT_TRUE(declared.contains(letter)) << letter << " is used and not declared";
    for (const std::string& letter : declared) EXPECT_NE(table.find("| `" + letter + "` |"), std::string::npos) << letter;
  }
}

TEST(Registry, TapNamesAreTheAgreedOnes) {
  const std::set<std::string> agreed{"embedding",
                                     "rms_norm.input_layernorm",
                                     "linear.q_proj",
                                     "linear.k_proj",
                                     "linear.v_proj",
                                     "rope.q",
                                     "rope.k",
                                     "attention.output",
                                     "linear.o_proj",
                                     "rms_norm.input_layernorm_2",
                                     "residual_add.attention",
                                     "rms_norm.post_attention_layernorm",
                                     "linear.gate_proj",
                                     "linear.up_proj",
                                     "swiglu",
                                     "linear.down_proj",
                                     "rms_norm.post_attention_layernorm_2",
                                     "residual_add.mlp",
                                     "rms_norm.norm",
                                     "exit_gate",
                                     "logits",
                                     "update_score",
                                     "sparse_decode.mass",
                                     "sparse_decode.c_ref",
                                     "sparse_decode.keys"};
  std::multiset<std::string> registered;
  for (const OpSpec* op : op_list()) {
    for (const OutputSpec& output : op->outputs) registered.insert(output.taps.begin(), output.taps.end());
  }
  for (const std::string& name : agreed) EXPECT_EQ(registered.count(name), name == "attention.output" ? 2u : 1u) << name;
  for (const std::string& name : registered) EXPECT_TRUE(agreed.contains(name)) << name;
  ASSERT_EQ(find_tap("rope.k").size(), 1u);
  EXPECT_EQ(find_tap("rope.k")[0].op->name, "rope");
  EXPECT_EQ(find_tap("attention.output").size(), 2u);
  EXPECT_TRUE(find_tap("no such tap").empty());
}

// Names that reference or optimized code records must be registered, or no tolerance would judge them.
TEST(Registry, TapNamesInTheExecutorsAreRegistered) {
  const std::regex tap("\"((?:rms_norm|linear|rope|attention|residual_add|sparse_decode)\\.[a-z0-9_]+)\"");
  for (const auto& file : test::source_files({"reference", "optimized"}, {".hpp", ".cpp", ".cu", ".cuh"})) {
    if (file.path.starts_with("optimized/bench/")) continue;  // names of timed stages, not of taps
    for (std::sregex_iterator it(file.text.begin(), file.text.end(), tap), end; it != end; ++it) {
      EXPECT_FALSE(find_tap((*it)[1].str()).empty()) << file.path << ": " << (*it)[1];
    }
  }
}

}  // namespace
}  // namespace loopgauge::spec
