// SPDX-License-Identifier: Apache-2.0
// Scripts rely on these flags: every one is in the help text of its verb, and every verb gives examples.
#include <gtest/gtest.h>

#include <map>

#include "tests/harness_cli/process.hpp"

namespace loopgauge::test {
namespace {

const std::map<std::string, std::vector<std::string>> kFlags{
    {"sweep", {"--set", "--traces", "--filter", "--executor", "--report", "--resume", "--shard", "--seed", "--mutant", "--list-mutants"}},
    {"run",
     {"CASE",        "--trace",  "--mode",   "--switches",    "--window",       "--retention", "--key-fraction", "--policy",     "--timing",
      "--flush",     "--tail",   "--exit",   "--draft-depth", "--draft-length", "--executor",  "--profile",      "--checkpoint", "--dump",
      "--dump-only", "--config", "--digest", "--mutant",      "--output",       "--min-loops", "--piece-tokens"}},
    {"list", {"--set", "--traces", "--filter", "--shard", "--mode", "--illegal", "--output"}},
    {"bench", {"--executor", "--switches", "--context", "--repeat", "--seed", "--profile", "--checkpoint", "--output", "ops", "step", "prefill", "peers", "e2e"}},
    {"explain", {"CASE"}},
    {"report", {"--json", "--csv", "--markdown", "--html", "--junit", "--json-schema", "merge"}},
    {"gate", {"--baseline"}},
    {"trace", {"record", "info", "validate"}},
    {"model", {"info", "synth"}},
    {"doctor", {"--checkpoint"}},
};

TEST(Help, EveryVerbMentionsItsFlagsAndGivesExamples) {
  for (const auto& [verb, flags] : kFlags) {
    const auto result = run_program({verb, "--help"});
    EXPECT_EQ(result.exit_code, 0) << verb << ": " << result.err;
    for (const std::string& flag : flags)
      EXPECT_NE(result.out.find(flag), std::string::npos) << "loopgauge " << verb << " --help lacks " << flag;
    EXPECT_NE(result.out.find("Example"), std::string::npos) << "loopgauge " << verb << " --help has no examples";
  }
}

// What has no examples of its own shows those of the program, which are about something else.
TEST(Help, SubcommandsOfVerbsHaveTheirOwnExamples) {
  const std::vector<std::vector<std::string>> commands{
      {"report", "merge"}, {"trace", "record"}, {"trace", "info"}, {"trace", "validate"}, {"model"},          {"model", "info"},
      {"model", "synth"},  {"pd", "serve"},     {"pd", "send"},    {"pd", "export"},      {"pd", "import"},   {"pd", "info"},
      {"pd", "compare"},   {"bench", "ops"},    {"bench", "step"}, {"bench", "prefill"},  {"bench", "peers"}, {"bench", "e2e"}};
  for (std::vector<std::string> command : commands) {
    std::string line = "loopgauge";
    for (const std::string& word : command) line += " " + word;
    command.emplace_back("--help");
    const std::string help = run_program(command).out;
    EXPECT_EQ(help.find("loopgauge list"), std::string::npos) << line;
    const std::size_t example = help.find("  loopgauge ");
    if (example != std::string::npos) {
      EXPECT_EQ(help.substr(example + 2, line.size()), line);
    }
  }
}

TEST(Help, TheProgramListsItsVerbsAndExitCodes) {
  const auto result = run_program({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  for (const auto& [verb, flags] : kFlags) EXPECT_NE(result.out.find("  " + verb), std::string::npos) << verb;
  EXPECT_NE(result.out.find("Exit codes"), std::string::npos);
}

TEST(Help, VersionNamesRevisionCompilerAndRuntime) {
  const auto result = run_program({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* word : {"loopgauge ", "revision ", "compiler ", "runtime "}) EXPECT_NE(result.out.find(word), std::string::npos) << word;
}

}  // namespace
}  // namespace loopgauge::test
