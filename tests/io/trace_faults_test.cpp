// SPDX-License-Identifier: Apache-2.0
// Every rule of trace_faults(): the valid trace has none, and breaking one rule gives exactly the sentence for it.
#include <gtest/gtest.h>

#include <functional>

#include "models/trace.hpp"

namespace loopgauge {
namespace {

Trace valid_trace() {
  Trace trace;
  trace.name = "valid-1.0_a";
  trace.vocab_size = 264;
  TraceRequest forced;
  forced.id = 0;
  forced.max_new_tokens = 3;
  forced.prompt = {256, 1, 2};
  forced.forced = {3, 4, 5};
  forced.exit_depths = {1, 2, 4};
  forced.answer_mask = {0, 1, 1};
  TraceRequest free;
  free.id = 7;
  free.arrival = 2;
  free.max_new_tokens = 0;
  free.eos_token_id = 10;
  free.task = "other";
  free.prompt = {0};
  TraceRequest reused = free;
  trace.requests = {forced, free, reused};
  trace.events = {
      {1, TraceEventKind::preempt, 0}, {2, TraceEventKind::resume, 0}, {2, TraceEventKind::cancel, 1}, {5, TraceEventKind::reuse_id, 2}};
  return trace;
}

ModelConfig model() {
  ModelConfig config;
  config.loops = 4;
  config.vocab = 264;
  config.max_positions = 6;
  return config;
}

struct Case {
  const char* name;
  std::function<void(Trace&)> spoil;
  std::string sentence;
};

TEST(TraceFaults, NoneInAValidTrace) {
  EXPECT_EQ(trace_faults(valid_trace()), std::vector<std::string>{});
  EXPECT_EQ(trace_faults(valid_trace(), model()), std::vector<std::string>{});
}

TEST(TraceFaults, OneSentenceForEachBrokenRule) {
  const std::vector<Case> cases{
      {"empty name", [](Trace& t) { t.name = ""; }, "name is empty"},
      {"name with slash", [](Trace& t) { t.name = "a/b"; }, "name \"a/b\" is not usable"},
      {"hidden name", [](Trace& t) { t.name = "..a"; }, "name \"..a\" is not usable"},
      {"vocabulary", [](Trace& t) { t.vocab_size = 0; }, "vocab_size = 0 is not positive"},
      {"negative id", [](Trace& t) { t.requests[0].id = -1; }, "requests/0/id = -1 is negative"},
      {"duplicate id", [](Trace& t) { t.requests[1].id = 0, t.requests[2].id = 0; }, "requests/1/id = 0 is also the id of requests/0"},
      {"arrival", [](Trace& t) { t.requests[1].arrival = -2; }, "requests/1/arrival = -2 is negative"},
      {"new tokens", [](Trace& t) { t.requests[1].max_new_tokens = -1; }, "requests/1/max_new_tokens = -1 is outside 0..16777216"},
      {"eos", [](Trace& t) { t.requests[1].eos_token_id = 264; }, "requests/1/eos_token_id = 264 is neither -1"},
      {"eos below", [](Trace& t) { t.requests[1].eos_token_id = -2; }, "requests/1/eos_token_id = -2 is neither -1"},
      {"task", [](Trace& t) { t.requests[0].task = "poem"; }, "requests/0/task = \"poem\" is none of"},
      {"no prompt", [](Trace& t) { t.requests[1].prompt = {}; }, "requests/1/prompt is empty"},
      {"prompt token", [](Trace& t) { t.requests[0].prompt[2] = 264; }, "requests/0/prompt[2] = 264 is not below vocab_size 264"},
      {"negative token", [](Trace& t) { t.requests[0].prompt[1] = -5; }, "requests/0/prompt[1] = -5 is negative"},
      {"forced token", [](Trace& t) { t.requests[0].forced[0] = 300; }, "requests/0/forced[0] = 300 is not below vocab_size 264"},
      {"forced length", [](Trace& t) { t.requests[0].forced.pop_back(), t.requests[0].answer_mask.pop_back(); },
       "requests/0/forced has 2 entries, max_new_tokens is 3"},
      {"exit length", [](Trace& t) { t.requests[0].exit_depths.push_back(1); },
       "requests/0/exit_depths has 4 entries, max_new_tokens is 3"},
      {"exit zero", [](Trace& t) { t.requests[0].exit_depths[1] = 0; }, "requests/0/exit_depths[1] = 0 is not a loop in 1..4"},
      {"exit five", [](Trace& t) { t.requests[0].exit_depths[2] = 5; }, "requests/0/exit_depths[2] = 5 is not a loop in 1..4"},
      {"mask alone", [](Trace& t) { t.requests[0].forced.clear(); }, "requests/0/answer_mask is present without forced"},
      {"mask length", [](Trace& t) { t.requests[0].answer_mask.pop_back(); }, "requests/0/answer_mask has 2 entries, forced has 3"},
      {"mask value", [](Trace& t) { t.requests[0].answer_mask[0] = 2; }, "requests/0/answer_mask[0] = 2 is neither 0 nor 1"},
      {"event submission", [](Trace& t) { t.events[0].submission = -1; }, "events[0]/submission = -1 is negative"},
      {"event order", [](Trace& t) { t.events[3].submission = 0; }, "events[3]/submission = 0 comes after 2"},
      {"event request", [](Trace& t) { t.events[2].request = 3; }, "events[2]/request = 3 names none of the 3 requests"},
      {"resume first", [](Trace& t) { t.events.erase(t.events.begin()); }, "events[0]: resume of requests/0, which is not preempted"},
      {"preempt twice", [](Trace& t) { t.events[1].kind = TraceEventKind::preempt; },
       "events[1]: preempt of requests/0, which is already preempted"},
      {"after cancel", [](Trace& t) { t.events[0].kind = TraceEventKind::cancel; },
       "events[1]: requests/0 was cancelled by an earlier event"},
      {"reuse of nothing", [](Trace& t) { t.requests[2].id = 8; }, "events[3]: reuse_id of requests/2, whose id no earlier request has"},
      {"reuse missing", [](Trace& t) { t.events.pop_back(); }, "requests/2/id = 7 is also the id of requests/1 and no reuse_id event"},
  };
  for (const Case& broken : cases) {
    Trace trace = valid_trace();
    broken.spoil(trace);
    const std::vector<std::string> faults = trace_faults(trace);
    ASSERT_EQ(faults.size(), 1u) << broken.name << (faults.empty() ? "" : ": " + faults[1 % faults.size()]);
    EXPECT_TRUE(faults[0].starts_with(broken.sentence)) << broken.name << ": " << faults[0];
  }
}

TEST(TraceFaults, AllFaultsAreListedAndManyOfOneArrayAreCounted) {
  Trace trace = valid_trace();
  trace.requests[0].prompt.assign(100, 999);
  trace.requests[1].arrival = -1;
  const std::vector<std::string> faults = trace_faults(trace);
  ASSERT_EQ(faults.size(), 6u);
  EXPECT_EQ(faults[3], "requests/0/prompt[3] = 999 is not below vocab_size 264");
  EXPECT_EQ(faults[4], "requests/0/prompt: 96 more of its values are at fault in the same way");
  EXPECT_EQ(faults[5], "requests/1/arrival = -1 is negative");
}

TEST(TraceFaults, NoRequests) {
  Trace trace;
  trace.name = "empty";
  trace.vocab_size = 1;
  ASSERT_EQ(trace_faults(trace).size(), 1u);
  EXPECT_TRUE(trace_faults(trace)[0].starts_with("requests is empty"));
}

TEST(TraceFaults, ForAModel) {
  const auto only = [](const ModelConfig& config, const Trace& trace) {
    const std::vector<std::string> faults = trace_faults(trace, config);
    return faults.size() == 1 ? faults[0] : "not exactly one fault";
  };
  ModelConfig config = model();
  config.max_positions = 5;
  EXPECT_EQ(only(config, valid_trace()), "requests/0 needs 6 positions (prompt 3, fed 3), the model has 5");
  config = model();
  config.loops = 3;
  EXPECT_EQ(only(config, valid_trace()), "requests/0/exit_depths[2] = 4 is above the model's 3 loops");
  config = model();
  config.vocab = 300;
  EXPECT_EQ(trace_faults(valid_trace(), config), std::vector<std::string>{});
  config.vocab = 260;
  EXPECT_EQ(only(config, valid_trace()), "vocab_size = 264 is above the model's vocabulary of 260");
}

TEST(TraceFaults, TheLastEmittedTokenNeedsNoPosition) {
  Trace trace = valid_trace();
  trace.requests.resize(1);
  trace.events.clear();
  trace.requests[0].forced.clear();
  trace.requests[0].answer_mask.clear();
  ModelConfig config = model();
  config.max_positions = 5;
  EXPECT_EQ(trace_faults(trace, config), std::vector<std::string>{});
  config.max_positions = 4;
  EXPECT_EQ(trace_faults(trace, config).size(), 1u);
}

}  // namespace
}  // namespace loopgauge
