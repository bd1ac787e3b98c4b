// SPDX-License-Identifier: Apache-2.0
#include "harness/io/dump_file.hpp"

#include <cstdio>
#include <functional>
#include <memory>

#include "harness/io/digest.hpp"
#include "harness/io/hdf5.hpp"
#include "tests/io/hand_made_record.hpp"
#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::bytes_of;
using test::contains;
using test::error_of;
using test::hand_made_record;
using test::write_bytes;

ModelConfig model() {
  ModelConfig config;
  config.layers = 2, config.loops = 4, config.hidden = 5, config.heads = 2, config.head_dim = 3, config.intermediate = 4, config.vocab = 7;
  config.max_positions = 64;
  return config;
}

EffectiveConfig all_on() {
  AlgorithmConfig config;
  apply_switches(config, "t1s1q1");
  return EffectiveConfig::resolve(config, model());
}

const DumpOptions kEverything{"serial/t1s1q1:rolling:serial_aligned/hand-made", {}, IfExists::replace};

// Writes a dump of the hand-made record, lets `spoil` change the file through a writable handle of the layer's own making, reads it.
std::string refusal_of(const RunRecord& record) {
  const test::Folder folder;
  write_dump(folder / "d.h5", record, all_on(), kEverything);
  DumpInfo info;
  return error_of([&] { read_dump(folder / "d.h5", info); });
}

TEST(DumpFile, RoundTripHasTheSameDigests) {
  const test::Folder folder;
  const RunRecord record = hand_made_record();
  write_dump(folder / "d.h5", record, all_on(), kEverything);
  DumpInfo info;
  const RunRecord read = read_dump(folder / "d.h5", info);
  EXPECT_EQ(digests(read), digests(record));
  ASSERT_EQ(read.requests.size(), 2u);
  EXPECT_EQ(read.requests[0].prompt_length, 4);
  EXPECT_EQ(read.requests[0].fed, 2);
  EXPECT_EQ(read.requests[1].prompt_length, 1);
  EXPECT_EQ(read.requests[1].fed, 0);
  EXPECT_EQ(read.requests[0].kv.size(), 8u);
  EXPECT_EQ(read.requests[0].kv[5].v.shape, (std::vector<std::int64_t>{2, 6, 3}));
  EXPECT_EQ(read.config_json, "{}");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"d.h5"});
}

TEST(DumpFile, OutcomesAndExecutionsComeBack) {
  const test::Folder folder;
  RunRecord record = hand_made_record();
  std::vector<std::uint8_t> executions(static_cast<std::size_t>(record.requests[0].prompt_length + record.requests[0].fed) * kLoops, 1);
  executions[5] = 0;
  executions[7] = 2;
  record.requests[0].executions = executions;
  record.requests[0].rounds = {{3, 2, 1, 2}, {5, 2, 2, 2}};
  // Cancelled in the prompt, and with one of two tokens forwarded.
  RequestRecord in_prompt;
  in_prompt.outcome = RequestOutcome::cancelled;
  in_prompt.prompt_length = 3;
  in_prompt.executions.assign(3 * kLoops, 1);
  RequestRecord in_decode;
  in_decode.outcome = RequestOutcome::cancelled;
  in_decode.prompt_length = 2;
  in_decode.fed = 1;
  in_decode.tokens = {5, 6};
  in_decode.exit_depths = {4, 0};
  in_decode.encoded_frontier = {0, 0};
  in_decode.logits = test::pattern({2, 7}, 1.0f);
  record.requests.push_back(in_prompt);
  record.requests.push_back(in_decode);
  write_dump(folder / "d.h5", record, all_on(), kEverything);
  DumpInfo info;
  const RunRecord read = read_dump(folder / "d.h5", info);
  EXPECT_EQ(digests(read), digests(record));
  ASSERT_EQ(read.requests.size(), 4u);
  EXPECT_EQ(read.requests[0].rounds, record.requests[0].rounds);
  EXPECT_EQ(read.requests[0].outcome, RequestOutcome::completed);
  EXPECT_EQ(read.requests[0].executions, executions);
  EXPECT_TRUE(read.requests[1].executions.empty());
  EXPECT_EQ(read.requests[2].outcome, RequestOutcome::cancelled);
  EXPECT_EQ(read.requests[2].fed, 0);
  EXPECT_TRUE(read.requests[2].encoded_frontier.empty());
  EXPECT_EQ(read.requests[2].executions, in_prompt.executions);
  EXPECT_EQ(read.requests[3].fed, 1);
  EXPECT_EQ(read.requests[3].tokens, in_decode.tokens);
  EXPECT_EQ(read.requests[3].logits.shape, in_decode.logits.shape);
}

TEST(DumpFile, OutcomesAndExecutionsDoNotChangeDigests) {
  RunRecord record = hand_made_record();
  const auto before = digests(record);
  record.requests[0].executions.assign(24, 3);
  record.requests[0].outcome = RequestOutcome::cancelled;
  EXPECT_EQ(digests(record), before);
}

// Dense models may have fewer loops; the deeper ones leave no tensors.
TEST(DumpFile, RoundTripOfAModelOfTwoLoops) {
  RunRecord record = hand_made_record();
  record.config_json = R"({"loops":2})";
  for (RequestRecord& request : record.requests) {
    request.hidden[2] = request.hidden[3] = {};
    for (std::size_t plane = 0; plane < request.kv.size(); ++plane) {
      if (plane % kLoops >= 2) request.kv[plane] = {};
    }
  }
  const test::Folder folder;
  write_dump(folder / "d.h5", record, all_on(), kEverything);
  DumpInfo info;
  EXPECT_EQ(digests(read_dump(folder / "d.h5", info)), digests(record));
  record.requests[0].kv[3] = record.requests[0].kv[1];
  EXPECT_TRUE(contains(refusal_of(record), "/requests/0/kv/layer0/loop4: holds values, the model has 2 loops"));
}

TEST(DumpFile, RootAttributesAreTheEffectiveConfiguration) {
  const test::Folder folder;
  write_dump(folder / "d.h5", hand_made_record(), all_on(), kEverything);
  DumpInfo info;
  read_dump(folder / "d.h5", info);
  EXPECT_EQ(info.case_id, kEverything.case_id);
  EXPECT_EQ(info.switches, "t1s1q1");
  EXPECT_EQ(info.mode, "serial");
  EXPECT_EQ(info.policy, "rolling");
  EXPECT_EQ(info.timing, "serial_aligned");
  EXPECT_EQ(info.flush, "committed");
  EXPECT_EQ(info.window, 256);
  EXPECT_EQ(info.tail, 64);
  EXPECT_EQ(info.retention_bp, (std::array<int, 4>{10000, 10000, 2500, 1000}));
  EXPECT_EQ(info.decode_key_bp, 1000);
  EXPECT_EQ(info.exit, "full");
  EXPECT_EQ(info.threshold, 1.0);
  EXPECT_EQ(info.min_loops, 1);
  EXPECT_EQ(info.profile, "declared");
  EXPECT_EQ(info.executor, "reference");
  EXPECT_EQ(info.model_sha256, "00ff");
  EXPECT_EQ(info.trace, "hand-made");
  EXPECT_FALSE(info.tool_version.empty());
}

TEST(DumpFile, OnlySomeGroups) {
  const test::Folder folder;
  DumpOptions options = kEverything;
  options.only = {"logits", "mass"};
  write_dump(folder / "d.h5", hand_made_record(), all_on(), options);
  const h5::File file = h5::File::open_readonly(folder / "d.h5");
  EXPECT_EQ(file.root().open_group("requests").open_group("0").members(),
            (std::vector<std::string>{"encoded_frontier", "exit_depths", "logits", "mass", "tokens"}));
  const RecordGroups groups = record_groups(options.only);
  EXPECT_TRUE(groups.logits && groups.keys);
  EXPECT_FALSE(groups.hidden || groups.gate || groups.kv || groups.codec);
  EXPECT_TRUE(contains(error_of([] { record_groups({"logit"}); }), "dump group \"logit\" is none of tokens, logits"));
}

TEST(DumpFile, NothingIsLeftWhenWritingFails) {
  const test::Folder folder;
  RunRecord record = hand_made_record();
  record.requests[0].logits.shape = {3, 8};  // does not match its elements
  EXPECT_THROW(write_dump(folder / "d.h5", record, all_on(), kEverything), InternalError);
  EXPECT_TRUE(folder.names().empty());
}

TEST(DumpFile, InconsistentContentIsRefusedByObject) {
  const auto spoiled = [](const std::function<void(RequestRecord&)>& spoil) {
    RunRecord record = hand_made_record();
    spoil(record.requests[0]);
    return refusal_of(record);
  };
  EXPECT_EQ(spoiled([](RequestRecord&) {}), "");
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.encoded_frontier.push_back(4), r.encoded_frontier.push_back(4); }),
                       "/requests/0: encoded_frontier has 5 entries, which fits neither"));
  EXPECT_TRUE(
      contains(spoiled([](RequestRecord& r) { r.exit_depths.push_back(4); }), "/requests/0/exit_depths: has extent [3], expected [2]"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.prompt_length = 0; }), "/requests/0: prompt length 0 is not possible"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.logits = test::pattern({2, 7}, 0);
                       }),
                       "/requests/0/logits: has extent [2, 7], expected [3, any]"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.hidden[2] = test::pattern({6, 4}, 0);
                       }),
                       "/requests/0/hidden/loop3: has extent [6, 4], expected [6, 5]"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.hidden[3] = {}; }), "/requests/0/hidden: has no member `loop4`"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.gate = test::pattern({5, 4}, 0);
                       }),
                       "/requests/0/gate: has extent [5, 4], expected [6, 4]"));
  EXPECT_TRUE(
      contains(spoiled([](RequestRecord& r) { r.scores[0].push_back(1); }), "/requests/0/scores/loop3: has extent [5], expected [4]"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.active[0] = {2, 2};
                       }),
                       "/requests/0/active: loop3[1] = 2 is not ascending within 0..3"));
  EXPECT_TRUE(
      contains(spoiled([](RequestRecord& r) { r.active[1] = {4}; }), "/requests/0/active: loop4[0] = 4 is not ascending within 0..3"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.keys[0].layers[1].data[3] = 5; }),
                       "/requests/0/keys/step0: layer1[1][1] = 5 is not ascending within 0..4"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.keys[0].layers[1] = Tensor<std::int32_t>({2, 1}, 0);
                       }),
                       "/requests/0/keys/step0/layer1: has extent [2, 1], expected [2, 2]"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.kv[7].v = test::pattern({2, 5, 3}, 0);
                       }),
                       "/requests/0/kv/layer1/loop4/v: has extent [2, 5, 3], expected [2, 6, 3]"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.kv.pop_back(); }), "/requests/0/kv/layer1: does not hold loop1 to loop4"));
  EXPECT_TRUE(
      contains(spoiled([](RequestRecord& r) { r.blocks[0].positions.end = 7; }), "/requests/0/codec/block0: covers positions 0 to 7"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.blocks[0].streams[1].layers[0].v_codes.data[4] = 16; }),
                       "/requests/0/codec/block0/stream2/layer0: holds code 16"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) {
                         r.blocks[0].streams[2].rows = {1, 4};
                       }),
                       "/requests/0/codec/block0/stream3: rows[1] = 4 is not ascending within 0..3"));
  EXPECT_TRUE(contains(spoiled([](RequestRecord& r) { r.blocks[0].streams[3].rows = {1}; }), "stream4: has 1 rows but 0 layers"));
}

TEST(DumpFile, ForeignFilesAreRefused) {
  const auto refusal = [](const std::function<void(const h5::Group&)>& fill) {
    const test::Folder folder;
    h5::File file = h5::File::create(folder / "d.h5");
    fill(file.root());
    file.close();
    DumpInfo info;
    return error_of([&] { read_dump(folder / "d.h5", info); });
  };
  EXPECT_TRUE(contains(refusal([](const h5::Group&) {}), "attribute `format` is missing"));
  EXPECT_TRUE(
      contains(refusal([](const h5::Group& root) { root.set_attribute("format", "loopgauge-trace"); }), "expected \"loopgauge-dump\""));
  EXPECT_TRUE(contains(refusal([](const h5::Group& root) {
                         root.set_attribute("format", "loopgauge-dump");
                         root.set_attribute("version", 3);
                       }),
                       "version is 3, this program reads versions 1 and 2"));
  DumpInfo info;
  EXPECT_TRUE(contains(
      error_of([&] { read_dump(std::string(LOOPGAUGE_SOURCE_DIR) + "/data/cases/expected/one/t1s1q1.rolling.w256.bf16.h5", info); }),
      "compare a dump with it by data/cases/compare.py"));
}

// A dump in which one dataset is rewritten with restriction attributes.
std::string read_restricted(const std::vector<std::int64_t>& positions, const std::vector<std::int64_t>& heads) {
  const test::Folder folder;
  h5::File file = h5::File::create(folder / "d.h5");
  {
    const h5::Group root = file.root();
    root.set_attribute("format", "loopgauge-dump");
    root.set_attribute("version", 1);
    for (const char* name : {"tool_version", "mode", "switches", "policy", "timing", "exit", "profile", "executor", "model_sha256"}) {
      root.set_attribute(name, "x");
    }
    for (const char* name : {"window", "tail", "decode_key_bp", "min_loops"}) root.set_attribute(name, 1);
    root.set_attribute("threshold", 1.0);
    root.set_attribute("retention_bp", std::span<const std::int64_t>(std::vector<std::int64_t>{10000, 10000, 1, 1}));
    const h5::Group request = root.require_group("requests/0");
    request.set_attribute("prompt_length", 3);
    request.write("tokens", std::vector<std::int32_t>{});
    request.write("exit_depths", std::vector<std::uint8_t>{});
    request.write("encoded_frontier", std::vector<std::int32_t>{0});
    for (int loop = 1; loop <= 4; ++loop) {
      for (const char* name : {"k", "v"}) {
        const h5::Dataset dataset =
            request.require_group("kv/layer0/loop" + std::to_string(loop))
                .write(name, test::pattern({static_cast<std::int64_t>(heads.size()), static_cast<std::int64_t>(positions.size()), 2}, 0));
        dataset.set_attribute("positions", std::span<const std::int64_t>(positions));
        dataset.set_attribute("heads", std::span<const std::int64_t>(heads));
      }
    }
  }
  file.close();
  DumpInfo info;
  return error_of([&] { read_dump(folder / "d.h5", info); });
}

TEST(DumpFile, RestrictedDatasetsAreRefusedUnlessTheyAreWhole) {
  EXPECT_EQ(read_restricted({0, 1, 2}, {0, 1}), "");
  EXPECT_TRUE(contains(read_restricted({1, 2}, {0, 1}), "/requests/0/kv/layer0/loop1/k: is restricted to 2 positions of 3"));
  EXPECT_TRUE(contains(read_restricted({0, 1, 2}, {1}), "/requests/0/kv/layer0/loop1/k: is restricted to 1 heads of"));
}

TEST(DumpFile, EveryTruncationIsRefused) {
  const test::Folder folder;
  write_dump(folder / "d.h5", hand_made_record(), all_on(), kEverything);
  const std::vector<char> whole = bytes_of(folder / "d.h5");
  for (std::size_t length = 0; length < whole.size(); length += 1999) {
    write_bytes(folder / "cut.h5", {whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)});
    DumpInfo info;
    EXPECT_NE(error_of([&] { read_dump(folder / "cut.h5", info); }), "") << length << " bytes of " << whole.size();
  }
}

// Output of a command, with its standard error.
std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen((command + " 2>&1").c_str(), "r"), ::pclose);
  std::string text;
  for (int c = std::fgetc(pipe.get()); c != EOF; c = std::fgetc(pipe.get())) text += static_cast<char>(c);
  return text;
}

TEST(DumpFile, TheIndependentComparatorReadsIt) {
  const std::string python = LOOPGAUGE_PYTHON;
  if (python.empty()) GTEST_SKIP() << "configuration found no Python 3 interpreter with h5py and numpy";
  // A record built from an expected file must compare as equal to that file, group by group.
  const std::string expected = std::string(LOOPGAUGE_SOURCE_DIR) + "/data/cases/expected/one/t1s1q1.rolling.w256.bf16.h5";
  const h5::File file = h5::File::open_readonly(expected);
  const h5::Group in = file.root().open_group("requests").open_group("0");
  RunRecord record;
  record.requests.resize(1);
  RequestRecord& out = record.requests[0];
  out.prompt_length = 1;
  out.fed = 8;
  out.tokens = in.read_vector<std::int32_t>("tokens");
  out.exit_depths = in.read_vector<std::uint8_t>("exit_depths");
  out.encoded_frontier = in.read_vector<std::int32_t>("encoded_frontier");
  out.logits = in.open_dataset("logits").read<float>();
  for (std::size_t i = 0; i < 2; ++i) {
    out.scores[i] = in.open_group("scores").read_vector<float>("loop" + std::to_string(i + 3));
    out.active[i] = in.open_group("active").read_vector<std::int32_t>("loop" + std::to_string(i + 3));
  }
  for (std::size_t loop = 0; loop < kLoops; ++loop)
    out.hidden[loop] = in.open_group("hidden").open_dataset("loop" + std::to_string(loop + 1)).read<float>();
  out.keys.resize(8);
  for (const std::size_t step : {0u, 4u, 7u}) {
    const h5::Group keys = in.open_group("keys").open_group("step" + std::to_string(step));
    const Tensor<std::int32_t> first = keys.open_dataset("layer0").read<std::int32_t>(),
                               last = keys.open_dataset("layer3").read<std::int32_t>();
    out.keys[step].layers = {first, first, last, last};
    out.keys[step].mass = in.open_group("mass").open_dataset("step" + std::to_string(step)).read<float>();
  }
  const test::Folder folder;
  write_dump(folder / "d.h5", record, all_on(), kEverything);
  const std::string compare = python + " " + LOOPGAUGE_SOURCE_DIR "/data/cases/compare.py " + expected + " " + (folder / "d.h5").string();
  const std::string text = output_of(compare);
  EXPECT_TRUE(contains(text, "verdict: PASS (17 groups compared)")) << text;

  out.logits.data[0] += 50.0f;
  write_dump(folder / "d.h5", record, all_on(), kEverything);
  EXPECT_TRUE(contains(output_of(compare), "verdict: MISMATCH"));
}

}  // namespace
}  // namespace loopgauge::harness
