// SPDX-License-Identifier: Apache-2.0
// The exit-code contract through the real program: every kind of bad input gives its code and one sentence on standard error, nothing on
// standard output, and no partial file.
#include <future>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "optimized/cuda_executor.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::test {
namespace {

namespace fs = std::filesystem;

const fs::path kTraces = fs::path(LOOPGAUGE_SOURCE_DIR) / "data" / "traces";
const fs::path kModel = fs::path(LOOPGAUGE_SOURCE_DIR) / "models" / "ouro-tiny";

void expect_failure(const std::vector<std::string>& arguments, int exit_code, const std::string& message_part) {
  const ProcessResult result = run_program(arguments);
  std::string line = "loopgauge";
  for (const std::string& argument : arguments) line += " " + argument;
  EXPECT_EQ(result.exit_code, exit_code) << line << "\n" << result.err;
  EXPECT_NE(result.err.find(message_part), std::string::npos) << line << "\n" << result.err;
  EXPECT_EQ(result.out, "") << line;
  EXPECT_TRUE(result.err.starts_with("loopgauge: ")) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

void expect_usage(const std::vector<std::string>& arguments, const std::string& message_part) {
  expect_failure(arguments, 2, message_part);
}

// A folder with the shipped model, its safetensors changed by `edit`.
template <class Edit>
void copy_model(const fs::path& folder, Edit edit) {
  fs::create_directory(folder);
  write_file(folder / "config.json", read_file(kModel / "config.json"));
  std::string weights = read_file(kModel / "model.safetensors");
  edit(weights);
  write_file(folder / "model.safetensors", weights);
}

// Overwrites every BF16 element of one tensor.
void fill_tensor(std::string& safetensors, const std::string& name, std::uint16_t bits) {
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, safetensors.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(safetensors.substr(8, header_bytes));
  const auto offsets = header.at(name).at("data_offsets").get<std::vector<std::size_t>>();
  for (std::size_t i = offsets[0]; i < offsets[1]; i += sizeof bits)
    std::memcpy(safetensors.data() + 8 + header_bytes + i, &bits, sizeof bits);
}

TEST(ExitCode, UsageOfTheCommandLine) {
  expect_usage({}, "subcommand");
  expect_usage({"fly"}, "'fly' is not a subcommand or option (see loopgauge --help)");
  expect_usage({"trace", "fly"}, "'fly' is not a subcommand or option (see loopgauge trace --help)");
  expect_usage({"run", "--fly"}, "--fly");
  expect_usage({"run", "serial/t0s0q0/seven", "extra"}, "extra");
  expect_usage({"run", "serial/t0s0q0/seven", "--window"}, "--window");
  expect_usage({"run"}, "nothing to run");
  expect_usage({"run", "serial/t0s0q0/seven", "--output", "xml"}, "console, json");
}

TEST(ExitCode, UsageOfCases) {
  expect_usage({"run", "seven"}, "<mode>/<settings>/<trace>");
  expect_usage({"run", "serial/t0s0q0:w256/seven"}, "write 'serial/t0s0q0/seven'");
  expect_usage({"run", "serial/t0s0q0/seven", "--window", "64"}, "--window cannot be given with a case id");
  expect_usage({"run", "serial/t0s0q0/seven", "--mode", "split"}, "--mode cannot be given with a case id");
  expect_usage({"run", "block_spec.d1.k2/t0s0q0/seven", "--draft-length", "3"}, "--draft-length cannot be given with a case id");
  expect_usage({"run", "block_spec.d2.k2147483647/t0s0q0/seven"}, "at most 64 tokens a round (k64)");
  expect_usage({"run", "--trace", (kTraces / "seven.h5").string(), "--mode", "block_spec", "--draft-length", "2147483647"}, "at most 64 tokens");
  expect_usage({"explain", "serial/t0s0q0/seven", "--against-mode", "block_spec.d2.k2147483647"}, "at most 64 tokens a round (k64)");
  expect_usage({"pd", "export", "block_spec.d2.k65/t0s0q0/seven", "-o", "x.handoff"}, "at most 64 tokens a round (k64)");
  expect_usage({"sweep", "--mode", "block_spec.d2.k65", "--executor", "reference"}, "at most 64 tokens a round (k64)");
  expect_usage({"run", "serial/t0s0q0/seven", "--handoff-transport", "host"}, "--handoff-transport has no effect without pd in the mode, which is serial");
  expect_usage({"explain", "serial/t0s0q0/seven", "--minimize-seconds", "1"}, "--minimize-seconds requires --minimize");
  expect_usage({"run", "serial/t0s0q0/one", "--trace", (kTraces / "seven.h5").string()}, "trace 'one', but the file holds trace 'seven'");
  expect_usage({"run", "serial/t0s0q1:rolling:serial_aligned:flush=eager/seven"}, "is illegal");
  expect_usage({"run", "block_spec.d2.k4/t0s0q0:exit=trace/seven"}, "is illegal");
  expect_usage({"run", "serial/t0s0q0:exit=trace/seven"}, "exit_depths");
  expect_usage({"run", "serial/t0s0q0/seven", "--mutant", "gremlin"}, "gremlin");
  expect_usage({"run", "serial/t0s0q0/seven", "--mutant", "loop3_reference_at_loop4"}, "it needs s1");
  for (const char* flag : {"--prefill-tokens", "--prefill-requests", "--live", "--in-flight"})
    expect_usage({"bench", "e2e", "--load", "fit", flag, "2"}, flag + std::string(" has no effect on --load fit"));
}

TEST(ExitCode, UsageOfNumbers) {
  const std::string seed_range = "is not a whole number from 0 to 18446744073709551615";
  for (const std::string seed : {"-1", "1.5", "0x10", "010", "seven"})
    expect_usage({"sweep", "--seed=" + seed}, "--seed: '" + seed + "' " + seed_range);
  const std::string above = "18446744073709551616";
  expect_usage({"sweep", "--seed", above}, "--seed: '" + above + "' " + seed_range);
  expect_usage({"bench", "--seed", above}, seed_range);
  expect_usage({"bench", "e2e", "--seed", above}, seed_range);
  expect_usage({"model", "synth", "-o", "x", "--seed", above}, seed_range);
  expect_usage({"trace", "record", "--text-literal", "a", "-o", "x.h5", "--seed", above}, seed_range);
  for (const std::string text : {"-nan", "inf", "-1", "1e9", "soon"})
    expect_usage({"sweep", "--write-interval=" + text}, "--write-interval: '" + text + "' is not a number from 0 to 86400");
  const std::string not_a_number = "'nan' is not a number from ";
  expect_usage({"sweep", "--write-interval", "nan"}, not_a_number + "0 to 86400");
  expect_usage({"explain", "serial/t0s0q0/seven", "--minimize", "x.h5", "--minimize-seconds", "nan"}, not_a_number + "0 to 86400");
  expect_usage({"bench", "e2e", "--rate", "nan"}, not_a_number + "0 to 1e+06");
  for (const char* flag : {"--compile-seconds", "--tune-seconds", "--script-seconds"}) expect_usage({"bench", "peers", flag, "nan"}, not_a_number);
  expect_usage({"trace", "record", "--text-literal", "a", "-o", "x.h5", "--temperature", "nan"}, not_a_number + "0 to 100");
  expect_usage({"model", "synth", "-o", "x", "--rope-theta", "nan"}, not_a_number + "1.001 to 1e+12");
  expect_usage({"model", "synth", "-o", "x", "--shard-bytes", "18446744073709551616"}, "--shard-bytes");
  expect_usage({"bench", "e2e", "--reserve-bytes", "9223372036854775808"}, "--reserve-bytes");
  const std::vector<std::string> record{"trace", "record", "--text-literal", "abc", "-o", "x.h5", "--continuation", "3", "--forced"};
  for (const char* flag : {"--prompt-tokens", "--offset"}) {
    std::vector<std::string> arguments = record;
    arguments.insert(arguments.end(), {flag, "9223372036854775807"});
    expect_usage(arguments, std::string(flag) + ": '9223372036854775807' is not a whole number");
  }

  // From a configuration file as from the command line.
  const TemporaryFolder folder;
  write_file(folder / "sweep.toml", "seed = 18446744073709551616\n");
  expect_usage({"sweep", "--config", (folder / "sweep.toml").string()}, "sweep.toml:1: --seed: '18446744073709551616' " + seed_range);
}

// A variable that is empty by mistake is not an option that was left out.
TEST(ExitCode, EmptyValues) {
  const std::string in_case = "serial/t0s0q0/seven", empty = ": the value is empty";
  for (const char* flag : {"--checkpoint", "--dump", "--mutant", "--trace", "--config", "--decisions", "--handoff-transport", "--fail"})
    expect_usage({"run", in_case, flag, ""}, flag + empty);
  for (const char* flag : {"--report", "--set", "--mutant", "--filter", "--checkpoint"})
    expect_usage({"sweep", "--executor", "reference", flag, ""}, flag + empty);
  for (const char* flag : {"--html", "--junit"}) expect_usage({"report", "a.h5", flag, ""}, flag + empty);
  expect_usage({"report", ""}, "file" + empty);
  expect_usage({"gate", "a.h5", "--baseline", ""}, "--baseline" + empty);
  expect_usage({"gate", "a.h5", "--baseline", "b.txt", "--today", ""}, "--today" + empty);
  expect_usage({"explain", in_case, "--minimize", ""}, "--minimize" + empty);
  expect_usage({"bench", "e2e", "--executor", "reference", "--report", ""}, "--report" + empty);
  expect_usage({"trace", "record", "--text-literal", "", "-o", "x.h5"}, "--text-literal" + empty);
  expect_usage({"trace", "record", "--text-literal", "abc", "-o", ""}, "--output" + empty);
  expect_usage({"model", "synth", "-o", ""}, "--output" + empty);
  expect_usage({"model", "info", "--checkpoint", ""}, "--checkpoint" + empty);
  expect_usage({"pd", "info", ""}, "file" + empty);
  expect_usage({"doctor", "--checkpoint", ""}, "--checkpoint" + empty);

  const TemporaryFolder folder;
  write_file(folder / "sweep.toml", "report = \"\"\n");
  expect_usage({"sweep", "--config", (folder / "sweep.toml").string()}, "sweep.toml:1: --report" + empty);
  const std::vector<std::string> described{"trace", "record", "--text-literal", "abc", "--description", "", "-o", (folder / "x.h5").string()};
  EXPECT_EQ(run_program(described).exit_code, 0);
}

TEST(ExitCode, UsageOfTheConfiguration) {
  const std::string trace = (kTraces / "seven.h5").string();
  expect_usage({"run", "--trace", trace, "--window", "100"}, "window 100 is not a positive multiple of 64");
  expect_usage({"run", "--trace", trace, "--switches", "t1s0q0", "--retention", "10000,10000,1000,2500"}, "must not rise");
  expect_usage({"run", "--trace", trace, "--switches", "t1s0q0", "--retention", "9000,9000,1000,500"}, "loops 1 and 2");
  expect_usage({"run", "--trace", trace, "--switches", "t0s1q0", "--key-fraction", "0"}, "key fraction");
  expect_usage({"run", "--trace", trace, "--switches", "t0s0q1", "--tail", "-1"}, "tail");
  expect_usage({"run", "--trace", trace, "--policy", "rolling"}, "no effect without q1");
  expect_usage({"run", "--trace", trace, "--exit", "threshold:2"}, "threshold");
  expect_usage({"run", "--trace", trace, "--executor", "fast"}, "reference, optimized");
  const ProcessResult examined = run_program({"doctor", "--executor", "fast"});
  EXPECT_EQ(examined.exit_code, 2);
  EXPECT_NE(examined.out.find("fault: executor 'fast' is not one of: reference, optimized"), std::string::npos) << examined.out;
  expect_usage({"run", "--trace", trace, "--profile", "quick"}, "declared, reordered, double");
  expect_usage({"run", "--trace", trace, "--dump-only", "logits"}, "--dump-only has no effect without --dump");
  expect_usage({"run", "--trace", trace, "--dump", "x.h5", "--dump-only", "everything"}, "everything");

  const TemporaryFolder folder;
  write_file(folder / "a.toml", "widnow = 64\n");
  expect_usage({"run", "--trace", trace, "--config", (folder / "a.toml").string()}, "a.toml:1: unknown key 'widnow'");
}

// What an output is made of, and what is another kind of file, is not replaced by it.
TEST(ExitCode, NoInputAndNoOtherFileIsReplaced) {
  const TemporaryFolder folder;
  const std::string dump = (folder / "dump.h5").string(), text = (folder / "text").string(), trace = (folder / "seven.h5").string();
  const std::string archive = (folder / "prompts.handoff").string();
  ASSERT_EQ(run_program({"run", "serial/t1s0q0/seven", "--dump", dump}).exit_code, 0);
  fs::copy_file(kTraces / "seven.h5", trace);
  write_file(text, "It was a dark and stormy night.");
  ASSERT_EQ(run_program({"pd", "export", "serial/t0s0q0/seven", "-o", archive}).exit_code, 0);
  std::map<std::string, std::string> before;
  for (const std::string& path : {dump, text, trace, archive}) before[path] = read_file(path);

  expect_usage({"run", "serial/t1s0q0/seven", "--decisions", dump, "--dump", dump}, "is the file that --decisions names: it would be lost");
  expect_usage({"explain", "serial/t1s0q0/seven", "--mutant", "swapped_norms", "--trace", trace, "--minimize", trace}, "is the trace of the case: it would be lost");
  for (const std::string& other : {text, dump, archive})
    expect_failure({"trace", "record", "--text", text, "--force", "-o", other}, 3, "so it is not replaced");
  for (const std::string& other : {text, dump, trace})
    expect_failure({"pd", "export", "serial/t0s0q0/seven", "--force", "-o", other}, 3, "so it is not replaced");
  for (const auto& [path, bytes] : before) EXPECT_EQ(read_file(path), bytes) << path;

  EXPECT_EQ(run_program({"trace", "record", "--text", text, "--force", "-o", trace}).exit_code, 0);
  EXPECT_EQ(run_program({"pd", "export", "serial/t0s0q0/seven", "--force", "-o", archive}).exit_code, 0);
}

TEST(ExitCode, MissingAndInvalidFiles) {
  const TemporaryFolder folder;
  expect_failure({"run", "serial/t0s0q0/no-such-trace"}, 3, "no-such-trace");
  expect_failure({"run", "--trace", folder.path().string()}, 3, folder.path().string());
  expect_failure({"run", "--config", "no-such.toml", "--trace", (kTraces / "seven.h5").string()}, 3, "no-such.toml");
  expect_failure({"run", "serial/t0s0q0/seven", "--checkpoint", (folder / "none").string()}, 3, "none");
  expect_failure({"run", "serial/t0s0q0/seven", "--dump", (folder / "none" / "a.h5").string()}, 3, "none does not exist");

  const std::string bytes = read_file(kTraces / "seven.h5");
  write_file(folder / "truncated.h5", bytes.substr(0, bytes.size() / 2));
  expect_failure({"run", "--trace", (folder / "truncated.h5").string()}, 3, "truncated.h5");
  write_file(folder / "text.h5", "not HDF5 at all\n");
  expect_failure({"run", "--trace", (folder / "text.h5").string()}, 3, "text.h5");
  write_file(folder / "empty.h5", "");
  expect_failure({"run", "--trace", (folder / "empty.h5").string()}, 3, "empty.h5");
}

TEST(ExitCode, AFolderThatIsGone) {
  const fs::path before = fs::current_path();
  const TemporaryFolder folder;
  fs::create_directory(folder / "gone");
  fs::current_path(folder / "gone");
  fs::remove(folder / "gone");
  expect_failure({"run", "serial/t0s0q0/one", "--dump", "a.h5"}, 3, "a.h5: ");
  expect_failure({"pd", "serve", "serial/t0s0q0/one", "--socket", "a", "--lease", "0.2"}, 3, "--socket a: ");
  expect_failure({"sweep", "--executor", "reference", "--filter", "*/t0s0q0/seven", "--report", "a.h5"}, 3, "a.h5: ");
  fs::current_path(before);
}

TEST(ExitCode, AnAbsurdNumberOfThreads) {
  setenv("OMP_NUM_THREADS", "100000", 1);
  const ProcessResult result = run_program({"run", "serial/t0s0q0/one"});
  unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(ExitCode, DamagedCheckpoints) {
  const TemporaryFolder folder;
  const auto expect_refused = [&](const char* name, auto edit, const std::string& part) {
    copy_model(folder / name, edit);
    expect_failure({"run", "serial/t0s0q0/one", "--checkpoint", (folder / name).string()}, 3, part);
  };
  expect_refused(
      "truncated", [](std::string& weights) { weights.resize(weights.size() / 2); }, "model.safetensors");
  expect_refused(
      "longer", [](std::string& weights) { weights += '\0'; }, "model.safetensors");
  expect_refused(
      "nan", [](std::string& weights) { fill_tensor(weights, "model.norm.weight", 0x7fc0); }, "model.norm.weight");
}

TEST(ExitCode, ANumericErrorOfTheAlgorithmIsAMismatch) {
  // The largest finite weights overflow BF16, so the first quantity that must be finite is not.
  const TemporaryFolder folder;
  copy_model(folder / "huge", [](std::string& weights) { fill_tensor(weights, "model.norm.weight", 0x7f7f); });
  expect_failure({"run", "serial/t1s0q0/seven", "--checkpoint", (folder / "huge").string()}, 1, "finite");
}

TEST(ExitCode, WhatThisMachineCannotDo) {
  if (optimized::device_status().available) GTEST_SKIP() << "a CUDA device is present: " << optimized::device_status().description;
  expect_failure({"run", "serial/t0s0q0/seven", "--executor", "optimized"}, 4, optimized::device_status().description);
}

TEST(ExitCode, HandoffsBetweenProcesses) {
  const TemporaryFolder folder;
  const std::string socket = (folder / "socket").string(), in_case = "serial/t0s0q0/seven";
  expect_failure({"pd", "serve", in_case, "--socket", socket, "--lease", "0.2"}, 3, "no prefill side has come");
  expect_failure({"pd", "send", in_case, "--socket", socket, "--lease", "0.2"}, 3, "no decode side waits there");
  expect_failure({"pd", "send", in_case, "--socket", std::string(200, 'a')}, 3, "the path of a Unix socket");
  expect_failure({"pd", "send", in_case, "--socket", socket, "--memory", "disk"}, 2, "is not one of: host, device");
  expect_failure({"pd", "send", in_case, "--socket", socket, "--bytes-in-flight", "1KB"}, 2, "--bytes-in-flight");
  for (const char* side : {"serve", "send"}) expect_failure({"pd", side, in_case, "--socket", socket, "--lease", "nan"}, 2, "--lease");
  expect_failure({"pd", "send", in_case, "--socket", socket, "--bytes-in-flight", "64 parsecs"}, 2, "--bytes-in-flight");
  for (const char* side : {"serve", "send"})
    expect_failure({"pd", side, in_case, "--socket", socket, "--memory", "device"}, 2, "which the reference executor has none of");
  write_file(folder / "file", "text");
  // At once, not after the lease of a minute.
  expect_failure({"pd", "send", in_case, "--socket", (folder / "file").string()}, 3, "is no socket");
  for (const char* side : {"serve", "send"})
    expect_failure({"pd", side, in_case, "--socket", (folder / "none" / "socket").string()}, 3, "none does not exist");
  expect_failure({"pd", "serve", in_case, "--socket", (folder / "file").string()}, 3, "is there already and no socket");
  const std::string file = (folder / "file").string();
  expect_failure({"pd", "serve", in_case, "--socket", socket, "--lease", "0.2", "--dump", file}, 3, "so it is not replaced");
  expect_failure({"pd", "import", in_case, (folder / "none.handoff").string(), "--dump", file}, 3, "so it is not replaced");
  EXPECT_EQ(read_file(folder / "file"), "text");
  expect_failure({"run", "pd/t0s0q0/seven", "--handoff-transport", "pigeon"}, 2, "is not one of: host, device, peer");
  expect_failure({"run", "pd/t0s0q0/seven", "--handoff-transport", "device"}, 2, "which the reference executor has none of");
}

// The checkpoint's hash covers its weights; what else decides the arithmetic stands in config.json.
TEST(ExitCode, AHandoffToAModelOfAnotherConfigurationIsRefused) {
  const TemporaryFolder folder;
  const std::string in_case = "serial/t0s0q0/seven", archive = (folder / "prompts.handoff").string();
  ASSERT_EQ(run_program({"pd", "export", in_case, "-o", archive}).exit_code, 0);
  for (const auto& [key, value, sentence] : {std::tuple{"rope_theta", 20000.0, "rope_theta is 10000, here it is 20000"},
                                             std::tuple{"rms_norm_eps", 1e-5, "rms_norm_eps is 1e-06, here it is 1e-05"}}) {
    copy_model(folder / key, [](std::string&) {});
    nlohmann::json config = nlohmann::json::parse(read_file(folder / key / "config.json"));
    config[key] = value;
    write_file(folder / key / "config.json", config.dump());
    expect_failure({"pd", "import", in_case, archive, "--checkpoint", (folder / key).string()}, 3, sentence);
  }
}

TEST(ExitCode, BothSidesOfAHandoffSayWhatBecameOfIt) {
  const TemporaryFolder folder;
  const std::string socket = (folder / "socket").string();
  const auto both = [&](std::vector<std::string> serve, std::vector<std::string> send) {
    for (auto* side : {&serve, &send}) side->insert(side->end(), {"--socket", socket, "--lease", "20"});
    auto served = std::async(std::launch::async, [serve] { return run_program(serve); });
    const ProcessResult sent = run_program(send);
    return std::pair{served.get(), sent};
  };
  const auto [other, declared] = both({"pd", "serve", "serial/t0s0q0/seven", "--profile", "reordered"}, {"pd", "send", "serial/t0s0q0/seven"});
  EXPECT_EQ(other.exit_code, 3);
  EXPECT_EQ(declared.exit_code, 3);
  EXPECT_NE(declared.err.find("profile is 'reordered' there and 'declared' here"), std::string::npos) << declared.err;
  const auto bytes_in_flight = [&](const char* most) {
    const auto [decode, prefill] = both({"pd", "serve", "serial/t0s0q0/seven"}, {"pd", "send", "serial/t0s0q0/seven", "--bytes-in-flight", most, "--output", "json"});
    EXPECT_EQ(decode.exit_code, 0) << decode.err;
    EXPECT_EQ(prefill.exit_code, 0) << prefill.err;
    return nlohmann::json::parse(prefill.out).at("handoffs").at(0).at("most_bytes_in_flight").get<int>();
  };
  EXPECT_LE(bytes_in_flight("4KB"), 4096);
  EXPECT_GT(bytes_in_flight("4MB"), 4096);
  const std::string cancelled = "wcpb/t1s1q1:rolling:serial_aligned:w64/cancelled";
  const auto [decode, prefill] = both({"pd", "serve", cancelled}, {"pd", "send", cancelled});
  EXPECT_EQ(decode.exit_code, 0) << decode.err;
  EXPECT_EQ(prefill.exit_code, 0) << prefill.err;
  EXPECT_NE(prefill.out.find("request 0  cancelled"), std::string::npos) << prefill.out;
  EXPECT_NE(prefill.out.find("request 2  handed over"), std::string::npos) << prefill.out;
}

// Whatever asks the waiting side to end: its socket and its lock go with it.
TEST(ExitCode, ASignalTakesTheSocketAlong) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TemporaryFolder folder;
    const ProcessResult result = run_program({"pd", "serve", "serial/t0s0q0/seven", "--socket", (folder / "socket").string(), "--lease", "20"},
                                             {.interrupt_after_ms = 1500, .interrupt = signal});
    EXPECT_EQ(result.exit_code, 128 + signal) << result.out << result.err;
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << signal;
  }
  const TemporaryFolder folder;
  const ProcessResult result = run_program({"pd", "serve", "serial/t0s0q0/seven", "--socket", (folder / "socket").string(), "--lease", "2"},
                                           {.interrupt_after_ms = 1500, .interrupt = SIGHUP, .ignore_hangup = true});
  EXPECT_EQ(result.exit_code, 3) << result.out << result.err;
}

TEST(ExitCode, ModesAndPlannedFailures) {
  expect_failure({"run", "graph+async/t0s0q0/seven"}, 2, "write 'async+graph'");
  expect_failure({"run", "async/t0s0q0:exit=threshold0.9/seven"}, 2, "before the gate is read");
  expect_failure({"run", "prefix/t0s0q1:streaming:serial_aligned/seven"}, 2, "write prefix.encoded");
  expect_failure({"run", "serial/t0s0q0/seven", "--fail", "melt@3"}, 2, "'melt' is not one of: none, allocation, launch");
  expect_failure({"run", "serial/t0s0q0/seven", "--fail", "launch"}, 2, "not of the form launch@17");
  expect_failure({"run", "serial/t0s0q0/seven", "--fail", "launch@9"}, 2, "has 9 of them, counted from 0");
  expect_failure({"run", "serial/t0s0q0/seven", "--mutant", "resume_without_token"}, 2, "cannot act in serial/t0s0q0/seven: it needs preempt");
  for (const char* id : {"pd/t0s0q1:rolling:serial_aligned/seven", "block_spec.d2.k4/t0s0q1:rolling:serial_aligned/seven"}) {
    expect_failure({"run", id, "--mutant", "early_flush"}, 2, "it is not planted beside ");
    expect_failure({"explain", id, "--mutant", "early_flush"}, 2, "it is not planted beside ");
  }
}

TEST(ExitCode, UnwritableStandardOutput) {
  const std::vector<std::vector<std::string>> commands{
      {"list"}, {"--help"}, {"bench", "--switches", "t0s0q0", "--context", "8", "--new-tokens", "1", "--repeat", "1"},
      {"bench", "e2e", "--executor", "reference", "--load", "low", "--requests", "1", "--switches", "t0s0q0"}};
  for (const auto& command : commands) {
    const ProcessResult result = run_program(command, {.standard_output = "/dev/full"});
    EXPECT_EQ(result.exit_code, 3) << command[0] << " " << result.err;
    EXPECT_NE(result.err.find("standard output"), std::string::npos) << command[0] << " " << result.err;
  }
}

// A file that cannot be written to its end is a sentence that names it, and leaves the old one.
TEST(ExitCode, ADeviceThatIsFull) {
  const TemporaryFolder folder;
  const std::string in_case = "serial/t0s0q0/seven", text(200000, 'a');
  write_file(folder / "text", text);
  const std::vector<std::pair<std::string, std::vector<std::string>>> commands{
      {"dump.h5", {"run", in_case, "--dump"}},
      {"report.h5", {"sweep", "--executor", "reference", "--filter", "*/t0s0q0/seven", "--report"}},
      {"trace.h5", {"trace", "record", "--text", (folder / "text").string(), "--force", "-o"}},
      {"prompts.handoff", {"pd", "export", in_case, "--force", "-o"}},
      {"bench.h5", {"bench", "e2e", "--executor", "reference", "--load", "low", "--requests", "1", "--switches", "t0s0q0", "--report"}},
      {"baseline.txt", {"gate", (folder / "report.h5").string(), "--update", "--baseline"}},
      {"page.html", {"report", (folder / "report.h5").string(), "--html"}}};
  for (auto [name, command] : commands) {
    command.push_back((folder / name).string());
    const ProcessResult written = run_program(command);
    ASSERT_EQ(written.exit_code, 0) << name << ": " << written.err;
    const std::string old = read_file(folder / name);
    const ProcessResult full = run_program(command, {.file_kib = name == "baseline.txt" ? 1 : 4});
    EXPECT_EQ(full.exit_code, 3) << name << ": " << full.err;
    EXPECT_TRUE(full.err.starts_with("loopgauge: " + (folder / name).string() + ": ")) << full.err;
    EXPECT_EQ(std::count(full.err.begin(), full.err.end(), '\n'), 1) << full.err;
    EXPECT_EQ(read_file(folder / name), old) << name;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), std::ssize(commands) + 1);
}

TEST(ExitCode, AnInterruptLeavesNoPartialFile) {
  const TemporaryFolder folder;
  const ProcessResult result =
      run_program({"run", "serial/t0s0q0/needle-2k", "--dump", (folder / "a.h5").string()}, {.interrupt_after_ms = 700});
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_EQ(result.err, "loopgauge: interrupted\n");
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(ExitCode, AFailedRunLeavesTheOldDump) {
  const TemporaryFolder folder;
  ASSERT_EQ(run_program({"run", "serial/t0s0q0/seven", "--dump", (folder / "a.h5").string(), "--dump-only", "logits"}).exit_code, 0);
  const std::string old = read_file(folder / "a.h5");
  copy_model(folder / "huge", [](std::string& weights) { fill_tensor(weights, "model.norm.weight", 0x7f7f); });
  EXPECT_EQ(run_program({"run", "serial/t1s0q0/seven", "--checkpoint", (folder / "huge").string(), "--dump", (folder / "a.h5").string()})
                .exit_code,
            1);
  EXPECT_EQ(read_file(folder / "a.h5"), old);
}

TEST(ExitCode, OutOfMemoryIsASentence) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer reserves more address space than this limit leaves";
#endif
  const ProcessResult result = run_program({"bench", "--switches", "t0s0q0", "--context", "2000"}, {.address_space_mib = 150});
  if (result.exit_code == 127) GTEST_SKIP() << "the limit does not even hold the libraries (cuBLAS maps half a gigabyte): " << result.err;
  EXPECT_EQ(result.exit_code, 6) << result.err;
  EXPECT_NE(result.err.find("out of memory"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace loopgauge::test
