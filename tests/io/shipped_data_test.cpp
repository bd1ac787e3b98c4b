// SPDX-License-Identifier: Apache-2.0
// The published traces and sets: valid, complete, and what data/README.md says of them.
#include <algorithm>
#include <numeric>
#include <set>

#include "harness/io/set_file.hpp"
#include "harness/io/trace_file.hpp"
#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

const std::filesystem::path kData = std::filesystem::path(LOOPGAUGE_SOURCE_DIR) / "data";

Trace shipped(const std::string& name) { return read_trace(kData / "traces" / (name + ".h5")); }

std::int64_t tokens_of(const Trace& trace) {
  return std::accumulate(trace.requests.begin(), trace.requests.end(), std::int64_t{0}, [](std::int64_t sum, const TraceRequest& request) {
    return sum + request.prompt_length() + request.max_new_tokens;
  });
}

std::vector<int> prompt_lengths(const Trace& trace) {
  std::vector<int> lengths;
  for (const TraceRequest& request : trace.requests) lengths.push_back(request.prompt_length());
  return lengths;
}

TEST(ShippedData, EveryTraceIsValidForTheShippedModelAndNamedAsItsFile) {
  ModelConfig model;
  model.loops = 4, model.vocab = 264, model.max_positions = 2048;
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kData / "traces")) {
    const Trace trace = read_trace(entry.path());
    EXPECT_EQ(trace.name + ".h5", entry.path().filename()) << entry.path();
    EXPECT_EQ(trace_faults(trace, model), std::vector<std::string>{}) << entry.path();
    EXPECT_FALSE(trace.description.empty() || trace.source.empty()) << entry.path();
    ++count;
  }
  EXPECT_EQ(count, 50);
}

TEST(ShippedData, SetsNameExistingTracesAndTogetherAll) {
  std::set<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(kData / "traces")) all.insert(entry.path().stem());
  std::set<std::string> named;
  for (const std::string set : {"smoke", "ci", "full", "modes", "speculation", "speculation-long", "quality", "pd", "pd-ci"}) {
    for (const SetTrace& trace : read_set(kData / "sets" / (set + ".txt")).traces) {
      EXPECT_TRUE(all.contains(trace.name)) << set << ": " << trace.name;
      if (set != "smoke" && set != "ci" && set != "pd-ci") named.insert(trace.name);
    }
  }
  EXPECT_EQ(named, all);
}

TEST(ShippedData, TheCiSetStaysSmall) {
  const auto total = [](const std::string& set) {
    std::int64_t tokens = 0;
    for (const SetTrace& trace : read_set(kData / "sets" / (set + ".txt")).traces) tokens += tokens_of(shipped(trace.name));
    return tokens;
  };
  EXPECT_LE(total("smoke"), 300);
  EXPECT_LE(total("ci"), 5000);
}

TEST(ShippedData, BoundaryLengths) {
  EXPECT_EQ(prompt_lengths(shipped("boundary-short")), (std::vector<int>{1, 7, 63, 64, 65}));
  EXPECT_EQ(prompt_lengths(shipped("boundary-long")), (std::vector<int>{127, 128, 129, 191, 192}));
}

TEST(ShippedData, ContinuationsReachThreeFlushes) {
  const TraceRequest request = shipped("flush-3").requests[0];
  int flushes = 0;
  const auto frontier = [](int committed) { return 64 * (std::max(0, committed - 64) / 64); };
  for (int fed = 1; fed <= request.max_new_tokens; ++fed) {
    flushes += frontier(request.prompt_length() + fed) > frontier(request.prompt_length() + fed - 1) ? 1 : 0;
  }
  EXPECT_EQ(flushes, 3);
}

TEST(ShippedData, EveryExitDepthIsFlushedIntoABlock) {
  const TraceRequest request = shipped("exit-depths").requests[0];
  ASSERT_GE(request.prompt_length() + request.max_new_tokens, 192);  // tail 64: positions 64..127 are sealed at 192
  std::set<int> depths;
  for (int position = 64; position < 128; ++position)
    depths.insert(request.exit_depths[static_cast<std::size_t>(position - request.prompt_length())]);
  EXPECT_EQ(depths, (std::set<int>{1, 2, 3, 4}));
}

TEST(ShippedData, TasksScoreTheirAnswers) {
  for (const auto& [name, answers] :
       {std::pair{"needle-1k", 3}, std::pair{"needle-2k", 4}, std::pair{"kv-700", 10}, std::pair{"copy", 1}, std::pair{"sum", 6}}) {
    const std::vector<std::uint8_t> mask = shipped(name).requests[0].answer_mask;
    int runs = 0;
    for (std::size_t i = 0; i < mask.size(); ++i) runs += mask[i] == 1 && (i == 0 || mask[i - 1] == 0) ? 1 : 0;
    EXPECT_EQ(runs, answers) << name;
  }
}

// The copy's answer is found in its prompt, and the sums are right: the generators ask what they say they ask.
TEST(ShippedData, AnswersFollowFromThePrompts) {
  const TraceRequest copy = shipped("copy").requests[0];
  const auto answer_end = copy.forced.end() - 2;
  EXPECT_NE(std::search(copy.prompt.begin(), copy.prompt.end(), copy.forced.begin(), answer_end), copy.prompt.end());

  const TraceRequest sums = shipped("sum").requests[0];
  int sum = 0, checked = 0;
  for (std::size_t i = 0; i < sums.forced.size(); ++i) {
    const int c = sums.forced[i];
    if (sums.answer_mask[i] == 0 && c >= '0' && c <= '9') sum += c - '0';
    if (sums.answer_mask[i] == 1 && sums.answer_mask[i - 1] == 0) {
      EXPECT_EQ((c - '0') * 10 + (sums.forced[i + 1] - '0'), sum);
      ++checked;
    }
    if (c == ';') sum = 0;
  }
  EXPECT_EQ(checked, 6);
}

}  // namespace
}  // namespace loopgauge::harness
