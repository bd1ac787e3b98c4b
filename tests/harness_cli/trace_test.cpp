// SPDX-License-Identifier: Apache-2.0
// `loopgauge trace` through the real program: record, info, validate, and their exit codes.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "harness/io/trace_file.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

using test::run_program;
using test::TemporaryFolder;
using test::write_file;
using Tokens = std::vector<std::int32_t>;

const std::filesystem::path kSource = LOOPGAUGE_SOURCE_DIR;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(TraceVerb, RecordsFromTextWithForcedContinuations) {
  const TemporaryFolder folder;
  write_file(folder / "book.txt", "abcdefghij");
  const std::string out = (folder / "book.h5").string();
  const auto result = run_program({"trace", "record", "--text", (folder / "book.txt").string(), "--bos", "--offset", "1", "--prompt-tokens",
                                   "2", "3", "--continuation", "2", "--forced", "--eos", "10", "--seed", "7", "-o", out});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.out, "book, 2 requests, 9 tokens"));
  const Trace trace = read_trace(out);
  EXPECT_EQ(trace.name, "book");
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].prompt, (Tokens{256, 'b'}));
  EXPECT_EQ(trace.requests[0].forced, (Tokens{'c', 'd'}));
  EXPECT_EQ(trace.requests[1].prompt, (Tokens{256, 'e', 'f'}));
  EXPECT_EQ(trace.requests[1].forced, (Tokens{'g', 'h'}));
  EXPECT_EQ(trace.requests[1].eos_token_id, 10);
  EXPECT_EQ(trace.requests[1].seed, 7u);
}

TEST(TraceVerb, RecordsLiteralsIdsAndDescriptions) {
  const TemporaryFolder folder;
  const std::string literal = (folder / "literal.h5").string(), ids = (folder / "ids.h5").string(), spec = (folder / "spec.h5").string();
  ASSERT_EQ(run_program({"trace", "record", "--text-literal", "hi", "--continuation", "5", "-o", literal}).exit_code, 0);
  EXPECT_EQ(read_trace(literal).requests[0].prompt, (Tokens{'h', 'i'}));
  EXPECT_EQ(read_trace(literal).requests[0].max_new_tokens, 5);
  write_file(folder / "ids.txt", "1 2 999");
  ASSERT_EQ(run_program({"trace", "record", "--ids", (folder / "ids.txt").string(), "--vocab-size", "1000", "-o", ids}).exit_code, 0);
  EXPECT_EQ(read_trace(ids).requests[0].prompt, (Tokens{1, 2, 999}));
  write_file(folder / "spec.json", R"({"name": "s", "requests": [{"ids_file": "ids.txt"}, {"text": "x"}], "vocab_size": 1000})");
  ASSERT_EQ(run_program({"trace", "record", "--spec", (folder / "spec.json").string(), "-o", spec}).exit_code, 0);
  EXPECT_EQ(read_trace(spec).requests.size(), 2u);
}

TEST(TraceVerb, BadRequestsHaveTheirExitCodesAndLeaveNothing) {
  const TemporaryFolder folder;
  const std::string out = (folder / "out.h5").string();
  write_file(folder / "ids.txt", "1 2 264");
  const std::string ids = (folder / "ids.txt").string();
  struct Case {
    std::vector<std::string> arguments;
    int exit_code;
    std::string sentence;
  };
  const std::vector<Case> cases{
      {{"-o", out}, 2, "required"},
      {{"--text-literal", "x"}, 2, "output"},
      {{"--text-literal", "x", "--ids", ids, "-o", out}, 2, "were given"},
      {{"--text-literal", "x", "--forced", "-o", out}, 2, "--forced needs --continuation"},
      {{"--text-literal", "x", "--vocab-size", "9", "-o", out}, 2, "--ids"},
      {{"--spec", "a.json", "--bos", "-o", out}, 2, "--spec"},
      {{"--text-literal", "x", "--prompt-tokens", "0", "-o", out}, 2, "--prompt-tokens"},
      {{"--text-literal", "x", "--seed", "-1", "-o", out}, 2, "--seed"},
      {{"--text", (folder / "missing").string(), "-o", out}, 3, "missing: no such text or description"},
      {{"--text-literal", "abc", "--prompt-tokens", "9", "-o", out}, 3, "the source holds 3 tokens"},
      {{"--text-literal", "x", "--offset", "1", "-o", out}, 3, "the prompt would be empty"},
      {{"--ids", ids, "-o", out}, 3, "requests/0/prompt[2] = 264 is not below vocab_size 264"},
      {{"--text-literal", "x", "--task", "poem", "-o", out}, 3, "task = \"poem\""},
      {{"--text-literal", "x", "-o", (folder / "no/out.h5").string()}, 3, "is not a folder"},
  };
  for (const Case& bad : cases) {
    std::vector<std::string> arguments{"trace", "record"};
    arguments.insert(arguments.end(), bad.arguments.begin(), bad.arguments.end());
    const auto result = run_program(arguments);
    EXPECT_EQ(result.exit_code, bad.exit_code) << bad.sentence << ": " << result.err;
    EXPECT_TRUE(contains(result.err, bad.sentence)) << result.err;
    EXPECT_FALSE(std::filesystem::exists(out)) << bad.sentence;
  }
}

TEST(TraceVerb, ReplacesOnlyWithForce) {
  const TemporaryFolder folder;
  const std::string out = (folder / "out.h5").string();
  ASSERT_EQ(run_program({"trace", "record", "--text-literal", "one", "-o", out}).exit_code, 0);
  const auto refused = run_program({"trace", "record", "--text-literal", "two", "-o", out});
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_TRUE(contains(refused.err, "--force")) << refused.err;
  EXPECT_EQ(read_trace(out).requests[0].prompt, (Tokens{'o', 'n', 'e'}));
  ASSERT_EQ(run_program({"trace", "record", "--text-literal", "two", "-o", out, "--force"}).exit_code, 0);
  EXPECT_EQ(read_trace(out).requests[0].prompt, (Tokens{'t', 'w', 'o'}));
}

TEST(TraceVerb, InfoSaysWhatATraceHolds) {
  const std::string needle = (kSource / "data/traces/needle-1k.h5").string();
  const auto json = run_program({"trace", "info", needle, "--output", "json"});
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const nlohmann::json document = nlohmann::json::parse(json.out);
  EXPECT_EQ(document.at("tokens"), 1003);
  EXPECT_EQ(document.at("requests").at(0).at("answers"), 3);
  EXPECT_EQ(document.at("requests").at(0).at("forced"), true);
  const auto console = run_program({"trace", "info", needle});
  EXPECT_EQ(console.exit_code, 0);
  EXPECT_TRUE(contains(console.out, "er expla\\n")) << console.out;
  EXPECT_EQ(run_program({"trace", "info", needle, "--output", "xml"}).exit_code, 2);
}

TEST(TraceVerb, ValidateListsEveryFaultOfEveryFile) {
  const TemporaryFolder folder;
  const std::string good = (kSource / "data/traces/one.h5").string(), wide = (folder / "wide.h5").string();
  EXPECT_EQ(run_program({"trace", "validate", good, "--checkpoint", (kSource / "models/ouro-tiny").string()}).exit_code, 0);
  write_file(folder / "ids.txt", "999");
  ASSERT_EQ(run_program({"trace", "record", "--ids", (folder / "ids.txt").string(), "--vocab-size", "1000", "-o", wide}).exit_code, 0);
  write_file(folder / "text.h5", "not HDF5");
  const auto result = run_program({"trace", "validate", (folder / "text.h5").string(), good, wide, (folder / "missing.h5").string(),
                                   "--checkpoint", (kSource / "models/ouro-tiny").string()});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(contains(result.out, "text.h5: is not an HDF5 file")) << result.out;
  EXPECT_TRUE(contains(result.out, "one.h5: valid, 1 request, 9 tokens")) << result.out;
  EXPECT_TRUE(contains(result.out, "wide.h5: vocab_size = 1000 is above the model's vocabulary")) << result.out;
  EXPECT_TRUE(contains(result.out, "wide.h5: requests/0/prompt[0] = 999")) << result.out;
  EXPECT_TRUE(contains(result.out, "missing.h5: no such file")) << result.out;
}

}  // namespace
}  // namespace loopgauge::harness
