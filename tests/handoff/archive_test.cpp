// SPDX-License-Identifier: Apache-2.0
// A handoff that went through a file is gone on from with the bits of a run without it; every other file is refused.
#include "harness/handoff/archive.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "harness/handoff/handoff_executor.hpp"
#include "harness/handoff/local_transport.hpp"
#include "harness/planner/planner.hpp"
#include "models/error.hpp"
#include "models/handoff/bytes.hpp"
#include "tests/handoff/handoff_fixture.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

using harness::HandoffArchive;

class Archive : public testing::Test {
 protected:
  RunRecord replay_pd(Executor& executor, const AlgorithmConfig& requested, RunOptions options = {}) const {
    const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
    const Plan plan = harness::make_plan(harness::parse_mode("wcpb+pd"), trace_, config);
    options.record = RecordGroups::all();
    return replay(executor, plan, trace_, config, options);
  }
  HandoffArchive archived(const AlgorithmConfig& requested, RunOptions options = {}) const {
    HandoffArchive archive;
    const auto executor =
        harness::make_handoff_executor([&] { return reference::make_reference_executor(checkpoint_); },
                                       [&] { return harness::make_archiving_executor(archive); }, harness::make_host_transport);
    replay_pd(*executor, requested, options);
    archive.producer = "test";
    archive.trace = trace_.name;
    return archive;
  }
  RunRecord decoded(const HandoffArchive& archive, const AlgorithmConfig& requested, RunOptions options = {}) const {
    const auto executor =
        harness::make_handoff_executor([&] { return harness::make_archived_executor(archive); },
                                       [&] { return reference::make_reference_executor(checkpoint_); }, harness::make_host_transport);
    return replay_pd(*executor, requested, options);
  }

  Checkpoint checkpoint_ = tiny_checkpoint();
  Trace trace_ = trace_of({request(0, 150, 3), free_request(1, 64, 5)});
};

TEST_F(Archive, DecodingFromAFileHasTheBitsOfARunWithoutIt) {
  for (const AlgorithmConfig& config : sixteen_settings()) {
    const HandoffArchive archive = harness::parse_archive(harness::serialize(archived(config)));
    ASSERT_EQ(archive.handoffs.size(), 2u);
    const RunRecord whole = run(checkpoint_, trace_, config), from_file = decoded(archive, config);
    for (std::size_t i = 0; i < 2; ++i) {
      for (const std::string& group : differing_groups(whole.requests[i], from_file.requests[i])) {
        const bool of_prompt = group.starts_with("hidden") || group == "gate" || group.starts_with("scores") || group.starts_with("active");
        EXPECT_TRUE(of_prompt) << setting_name(config) << ", request " << i << ": " << group;
      }
    }
    EXPECT_EQ(describe(from_file.held_at_drain), "");
  }
}

TEST_F(Archive, TheDoubleProfileTravelsUnrounded) {
  const RunOptions options = with_profile(Profile::double_precision);
  const AlgorithmConfig config = switches("t1s1q1");
  const RunRecord whole = run(checkpoint_, trace_, config, options), from_file = decoded(archived(config, options), config, options);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(whole.requests[i].logits.data, from_file.requests[i].logits.data);
  EXPECT_THROW(decoded(archived(config, options), config), FileError) << "the other end reads BF16";
}

TEST_F(Archive, AnotherProfileIsRefusedByName) {
  const AlgorithmConfig config = switches("t1s1q1");
  const RunOptions reordered = with_profile(Profile::reordered);
  for (const bool there : {false, true}) {
    try {
      if (there) decoded(archived(config), config, reordered);
      else decoded(archived(config, reordered), config);
      FAIL() << "bits of one profile were gone on with by another";
    } catch (const FileError& error) {
      const std::string expected = there ? "profile is declared, here it is reordered" : "profile is reordered, here it is declared";
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

TEST_F(Archive, AnotherModelConfigurationPromptOrRequestIsRefusedByName) {
  const HandoffArchive archive = archived(switches("t1s1q1"));
  const auto refusal = [&](const AlgorithmConfig& config) -> std::string {
    try {
      decoded(archive, config);
      return "accepted";
    } catch (const FileError& error) {
      return error.what();
    } catch (const handoff::HandoffError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(refusal(switches("t1s1q1")), "accepted");
  EXPECT_NE(refusal(switches("t1s0q1")).find("configuration.sparse_decode_attention.enabled is true, here it is false"), std::string::npos);
  AlgorithmConfig other = switches("t1s1q1");
  other.kv_residual_quantization.tail = 32;
  EXPECT_NE(refusal(other).find("tail is 64, here it is 32"), std::string::npos);
  const int kept = trace_.requests[1].prompt[3];
  trace_.requests[1].prompt[3] = (kept + 1) % 37;
  EXPECT_NE(refusal(switches("t1s1q1")).find("prompt fingerprint"), std::string::npos);
  trace_.requests[1].prompt[3] = kept;
  trace_.requests.push_back(request(2, 70, 1));
  EXPECT_EQ(refusal(switches("t1s1q1")), "the archive holds no handoff of request 2 (it holds those of 0, 1): export the case again");
  trace_.requests.pop_back();
  checkpoint_.sha256 = std::string(64, '8');
  EXPECT_NE(refusal(switches("t1s1q1")).find("model fingerprint is 7777"), std::string::npos);
}

TEST_F(Archive, HasTheseBytesAroundItsRegions) {
  const HandoffArchive archive = archived(switches("t0s0q0"));
  const auto bytes = harness::serialize(archive);
  EXPECT_EQ(handoff::to_hexadecimal(std::span(bytes).first(16)),
            "4c47504446494c45"
            "01000000"
            "02000000");  // LGPDFILE, version, handoffs
  EXPECT_EQ(handoff::to_hexadecimal(std::span(bytes).subspan(24, 8)),
            "04000000"
            "74657374");  // "test"
  std::size_t size = 24 + 4 + 4 + 4 + archive.trace.size() + 32;
  for (const auto& handoff : archive.handoffs) {
    size += 4 + handoff::serialize(handoff.descriptor).size() + 4 + handoff.summaries.size() * 16;
    for (const auto& region : handoff.data) size += region.size();
  }
  EXPECT_EQ(bytes.size(), size);
}

TEST_F(Archive, TextThatIsNotPrintableAndACountThatIsWrongAreRefusedByName) {
  HandoffArchive archive = archived(switches("t0s0q0"));
  archive.producer = "a\x1b[31m";
  const auto refusal = [](std::vector<std::byte> bytes) -> std::string {
    try {
      harness::parse_archive(bytes);
      return "accepted";
    } catch (const handoff::HandoffError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(refusal(harness::serialize(archive)), "archive: producer 'a?[31m' is no printable ASCII text");
  archive.producer = "test";
  auto bytes = harness::serialize(archive);
  bytes[12] = std::byte{3};
  bytes.resize(bytes.size() - handoff::kChecksumBytes);
  const auto sum = handoff::sha256_bytes(bytes);
  bytes.insert(bytes.end(), sum.begin(), sum.end());
  EXPECT_EQ(refusal(bytes), "archive: length: it ends 4 bytes before the end of a field");
}

// Cut off anywhere, damaged anywhere, sealed again or not: refused, and nothing outside is read (the sanitizers watch).
TEST_F(Archive, ArbitraryBytesAreRefusedCleanly) {
  const auto good = harness::serialize(archived(switches("t1s1q1")));
  EXPECT_NO_THROW(harness::parse_archive(good));
  for (std::size_t count = 0; count < good.size(); count += 1 + count / 16)
    EXPECT_THROW(harness::parse_archive(std::span(good).first(count)), handoff::HandoffError);
  std::mt19937 generator(17);
  int accepted = 0, behind_the_seal = 0;
  for (int i = 0; i < 3000; ++i) {
    auto bytes = good;
    for (unsigned changes = 1 + generator() % 2; changes > 0; --changes) {
      // Half of the changes meet the head: descriptors and tables are small beside the regions.
      std::vector<std::byte> head(bytes.begin(), bytes.begin() + std::min<std::ptrdiff_t>(2500, std::ssize(bytes)));
      if (generator() % 2 == 0) {
        mutate(bytes, generator);
      } else {
        const auto tail = std::vector<std::byte>(bytes.begin() + std::ssize(head), bytes.end());
        mutate(head, generator);
        bytes = head;
        bytes.insert(bytes.end(), tail.begin(), tail.end());
      }
    }
    if (i % 4 != 0 && bytes.size() > 56) {
      bytes.resize(bytes.size() - handoff::kChecksumBytes);
      for (std::size_t at = 0; at < 8; ++at) bytes[16 + at] = static_cast<std::byte>((bytes.size() + 32) >> (8 * at));
      const auto sum = handoff::sha256_bytes(bytes);
      bytes.insert(bytes.end(), sum.begin(), sum.end());
    }
    try {
      harness::parse_archive(bytes);
      ++accepted;
    } catch (const handoff::HandoffError& error) {
      const std::string text = error.what();
      behind_the_seal += text.find("archive: checksum") == std::string::npos && text.find("archive: length says") == std::string::npos;
    }
  }
  EXPECT_GT(behind_the_seal, 1000) << "the changes never get past the seal";
  EXPECT_LT(accepted, 100) << "only texts may change unnoticed: producer and trace";
}

TEST_F(Archive, AFileThatIsNotThereSaysSo) {
  EXPECT_THROW(harness::read_archive("no-such-file.handoff"), FileError);
  EXPECT_THROW(harness::read_archive(std::filesystem::temp_directory_path()), FileError);
  EXPECT_THROW(harness::read_archive("/dev/zero"), FileError);
}

TEST_F(Archive, AFileWhoseHeaderDoesNotFitIsRefusedBeforeItIsRead) {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / ("archive_" + std::to_string(getpid()) + ".handoff");
  const std::vector<std::byte> bytes = harness::serialize(archived(switches("t0s0q0")));
  const auto refusal = [&](std::size_t written, std::uintmax_t size) -> std::string {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(written));
    std::filesystem::resize_file(path, size);
    try {
      return std::to_string(harness::read_archive(path).handoffs.size());
    } catch (const handoff::HandoffError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(refusal(bytes.size(), bytes.size()), "2");
  // With a hole of 2^40 bytes, which no machine here could hold.
  const std::uintmax_t huge = std::uintmax_t{1} << 40;
  EXPECT_NE(refusal(bytes.size(), huge).find("length says " + std::to_string(bytes.size()) + " bytes, there are 1099511627776"), std::string::npos);
  EXPECT_NE(refusal(0, huge).find("magic is not LGPDFILE"), std::string::npos);
  EXPECT_NE(refusal(0, 0).find("0 bytes hold no handoffs"), std::string::npos);
  for (const std::size_t cut : {std::size_t{0}, std::size_t{7}, std::size_t{23}, std::size_t{24}, bytes.size() - 1})
    EXPECT_NE(refusal(bytes.size(), cut).find(path.string() + ": "), std::string::npos) << cut;
  std::filesystem::remove(path);
}

TEST_F(Archive, ARequestThatIsCancelledBeforeItsHandoffNeedNotBeInTheFile) {
  trace_.events.push_back({1, TraceEventKind::cancel, 1});
  const HandoffArchive archive = archived(switches("t1s1q1"));
  ASSERT_EQ(archive.handoffs.size(), 1u);
  const RunRecord record = decoded(archive, switches("t1s1q1"));
  EXPECT_EQ(record.requests[0].tokens, run(checkpoint_, trace_, switches("t1s1q1")).requests[0].tokens);
  EXPECT_EQ(record.requests[1].outcome, RequestOutcome::cancelled);
  EXPECT_EQ(describe(record.held_at_drain), "");
}

}  // namespace
}  // namespace loopgauge::test
