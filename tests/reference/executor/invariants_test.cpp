// SPDX-License-Identifier: Apache-2.0
// What must not change a result: plans, company, observers, threads, repetition (S-INV-1..4, S-PLAN-10, S-PROF-1..3).
#include <gtest/gtest.h>
#include <omp.h>

#include "models/error.hpp"
#include "tests/reference/executor/tiny_model.hpp"

namespace loopgauge::test {
namespace {

std::vector<AlgorithmConfig> eight_settings() {
  std::vector<AlgorithmConfig> settings;
  for (const char* text : {"t0s0q0", "t1s0q0", "t0s1q0", "t0s0q1", "t1s1q0", "t1s0q1", "t0s1q1", "t1s1q1"})
    settings.push_back(switches(text));
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::streaming}) {
    AlgorithmConfig config = switches("t1s1q1");
    config.kv_residual_quantization.policy = policy;
    settings.push_back(config);
  }
  return settings;
}

std::string name(const AlgorithmConfig& config) {
  return switches_text(config) + " " + std::string(to_string(config.kv_residual_quantization.policy));
}

// (window, loop) anti-diagonals of every request side by side, then decode rows of all requests loop by loop.
Plan wavefront_plan(const Trace& trace, const EffectiveConfig& config) {
  Plan plan{"wavefront", {}};
  const int requests = static_cast<int>(trace.requests.size());
  int diagonals = 0;
  for (const auto& r : trace.requests)
    diagonals = std::max(diagonals, window_count(r.prompt_length(), config.window()) + config.loops() - 1);
  for (int diagonal = 0; diagonal < diagonals; ++diagonal) {
    Submission s;
    for (int i = 0; i < requests; ++i) {
      const TraceRequest& r = trace.requests[static_cast<std::size_t>(i)];
      for (int w = 0; w < window_count(r.prompt_length(), config.window()); ++w) {
        const int loop = diagonal - w + 1;
        const PositionRange range = window_range(w, r.prompt_length(), config.window());
        if (loop >= 1 && loop <= config.loops()) s.items.push_back({i, RowKind::prefill, range.begin, range.end, loop, loop});
      }
    }
    if (!s.items.empty()) plan.submissions.push_back(s);
  }
  int steps = 0;
  for (const auto& r : trace.requests) steps = std::max(steps, forwarded(r));
  for (int j = 0; j < steps; ++j) {
    for (int loop = 1; loop <= config.loops(); ++loop) {
      Submission s;
      for (int i = 0; i < requests; ++i) {
        const TraceRequest& r = trace.requests[static_cast<std::size_t>(i)];
        if (j < forwarded(r)) s.items.push_back({i, RowKind::decode, r.prompt_length() + j, r.prompt_length() + j + 1, loop, loop});
      }
      plan.submissions.push_back(s);
    }
  }
  return plan;
}

// Every (window, loop) in pieces of 23 positions; one request decodes while the next is in its prompt.
Plan pieces_plan(const Trace& trace, const EffectiveConfig& config) {
  Plan plan{"pieces", {}};
  std::vector<Submission> pending;  // decode rows of the previous request
  for (int i = 0; i < static_cast<int>(trace.requests.size()); ++i) {
    const TraceRequest& r = trace.requests[static_cast<std::size_t>(i)];
    std::size_t next = 0;
    for (int w = 0; w < window_count(r.prompt_length(), config.window()); ++w) {
      const PositionRange range = window_range(w, r.prompt_length(), config.window());
      for (int loop = 1; loop <= config.loops(); ++loop) {
        for (int begin = range.begin; begin < range.end; begin += 23) {
          Submission s;
          if (next < pending.size()) s = pending[next++];
          s.items.push_back({i, RowKind::prefill, begin, std::min(begin + 23, range.end), loop, loop});
          plan.submissions.push_back(s);
        }
      }
    }
    for (; next < pending.size(); ++next) plan.submissions.push_back(pending[next]);
    pending.clear();
    for (int j = 0; j < forwarded(r); ++j) {
      for (int loop = 1; loop <= config.loops(); ++loop)
        pending.push_back({{{i, RowKind::decode, r.prompt_length() + j, r.prompt_length() + j + 1, loop, loop}}});
    }
  }
  plan.submissions.insert(plan.submissions.end(), pending.begin(), pending.end());
  return plan;
}

Plan whole_prompt_plan(const Trace& trace, const EffectiveConfig& config) {
  Plan plan{"whole prompt", {}};
  for (int i = 0; i < static_cast<int>(trace.requests.size()); ++i) {
    const TraceRequest& r = trace.requests[static_cast<std::size_t>(i)];
    plan.submissions.push_back({{{i, RowKind::prefill, 0, r.prompt_length(), 1, config.loops()}}});
    for (int j = 0; j < forwarded(r); ++j)
      plan.submissions.push_back({{{i, RowKind::decode, r.prompt_length() + j, r.prompt_length() + j + 1, 1, config.loops()}}});
  }
  return plan;
}

class Invariants : public testing::Test {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
  const Trace trace_ = trace_of({request(0, 130, 70), request(1, 64, 66), request(2, 1, 3)});
};

TEST_F(Invariants, EveryLegalPlanGivesTheSameBits) {
  for (const AlgorithmConfig& requested : eight_settings()) {
    SCOPED_TRACE(name(requested));
    const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
    const RunRecord serial = run(checkpoint_, trace_, requested);
    for (const Plan& plan : {wavefront_plan(trace_, config), pieces_plan(trace_, config), whole_prompt_plan(trace_, config)}) {
      const RunRecord other = run(checkpoint_, trace_, requested, {}, &plan);
      for (std::size_t i = 0; i < 3; ++i)
        EXPECT_EQ(differing_groups(serial.requests[i], other.requests[i]), kNone) << plan.mode << ", request " << i;
    }
  }
}

TEST_F(Invariants, ARequestDoesNotDependOnItsCompanyOrOrder) {
  for (const AlgorithmConfig& requested : {switches("t1s1q1"), switches("t0s0q0")}) {
    const RunRecord together = run(checkpoint_, trace_, requested);
    const RunRecord reversed = run(checkpoint_, trace_of({trace_.requests[2], trace_.requests[1], trace_.requests[0]}), requested);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(differing_groups(together.requests[i], run(checkpoint_, trace_of({trace_.requests[i]}), requested).requests[0]), kNone)
          << i;
      EXPECT_EQ(differing_groups(together.requests[i], reversed.requests[2 - i]), kNone) << i;
    }
  }
}

TEST_F(Invariants, ObservingChangesNothing) {
  const Trace one = trace_of({trace_.requests[0]});
  Recorder taps;
  const RunRecord plain = run(checkpoint_, one, switches("t1s1q1")), observed = run(checkpoint_, one, switches("t1s1q1"), with_tap(taps));
  EXPECT_EQ(differing_groups(plain.requests[0], observed.requests[0]), kNone);
  EXPECT_GT(taps.rows().size(), 1000u);
}

TEST_F(Invariants, RepeatedRunsOfOneExecutorAgree) {
  const EffectiveConfig config = EffectiveConfig::resolve(switches("t1s1q1"), checkpoint_.config);
  const Plan plan = serial_plan(trace_, config);
  const auto executor = reference::make_reference_executor(checkpoint_);
  RunOptions options;
  options.record = RecordGroups::all();
  const RunRecord first = replay(*executor, plan, trace_, config, options), second = replay(*executor, plan, trace_, config, options);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(differing_groups(first.requests[i], second.requests[i]), kNone) << i;
}

TEST_F(Invariants, ThreadCountDoesNotMatter) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const RunRecord one = run(checkpoint_, trace_, switches("t1s1q1"));
  omp_set_num_threads(4);
  const RunRecord four = run(checkpoint_, trace_, switches("t1s1q1"));
  omp_set_num_threads(before);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(differing_groups(one.requests[i], four.requests[i]), kNone) << i;
}

TEST_F(Invariants, SettingsOfASwitchThatIsOffHaveNoEffect) {
  AlgorithmConfig changed = switches("t0s0q0");
  changed.token_sparse_prefill.retention_bp = {10000, 10000, 100, 50};
  changed.sparse_decode_attention.key_fraction_bp = 5;
  changed.kv_residual_quantization.policy = EncodingPolicy::streaming;
  changed.kv_residual_quantization.tail = 0;
  const RunRecord plain = run(checkpoint_, trace_, switches("t0s0q0")), other = run(checkpoint_, trace_, changed);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(differing_groups(plain.requests[i], other.requests[i]), kNone) << i;
}

TEST_F(Invariants, EverySettingDoesSomething) {
  const Trace one = trace_of({trace_.requests[0]});
  std::map<std::string, std::string> seen;
  for (const AlgorithmConfig& requested : eight_settings()) {
    const RequestRecord r = run(checkpoint_, one, requested).requests[0];
    const std::string digest = fingerprint(r)["logits"];
    EXPECT_FALSE(seen.contains(digest)) << name(requested) << " equals " << seen[digest];
    seen[digest] = name(requested);
  }
}

TEST_F(Invariants, ProfilesAreCloseAndDifferent) {
  const Trace one = trace_of({trace_.requests[0]});
  const auto logits = [&](Profile profile) {
    return run(checkpoint_, one, switches("t0s0q0"), with_profile(profile)).requests[0].logits.data;
  };
  const auto declared = logits(Profile::declared), reordered = logits(Profile::reordered), exact = logits(Profile::double_precision);
  const auto distance = [](const std::vector<float>& a, const std::vector<float>& b) {
    double worst = 0, scale = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      worst = std::max<double>(worst, std::fabs(a[i] - b[i])), scale = std::max<double>(scale, std::fabs(b[i]));
    return worst / scale;
  };
  EXPECT_GT(distance(declared, exact), 0.0);
  EXPECT_LT(distance(declared, exact), 0.2);
  EXPECT_GT(distance(declared, reordered), 0.0);
  EXPECT_LT(distance(declared, reordered), 0.2);
}

// Each planted fault changes something that an honest run does not, in the group where it acts. Those that need a mode are in modes_test.
TEST_F(Invariants, EveryPlantedFaultActs) {
  const Trace one = trace_of({trace_.requests[0]});
  for (const FaultInfo& info : planted_faults()) {
    if (!info.in_reference || !info.mode.empty()) continue;
    const RequestRecord honest = run(checkpoint_, one, switches("t1s1q1")).requests[0];
    const RequestRecord faulty = run(checkpoint_, one, switches("t1s1q1"), with_fault(info.fault)).requests[0];
    EXPECT_NE(differing_groups(honest, faulty), kNone) << info.name;
  }
}

// Row order of a mixed submission: worked example S-EX-0. Items are given decode first; the executor keeps each row's own results.
TEST_F(Invariants, MixedSubmissionsKeepEveryRowsResult) {
  const AlgorithmConfig requested = switches("t1s1q1");
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
  const Plan plan = pieces_plan(trace_, config);
  bool mixed = false;
  for (const Submission& s : plan.submissions) {
    mixed |= s.items.size() == 2 && s.items[0].kind == RowKind::decode && s.items[1].kind == RowKind::prefill;
  }
  EXPECT_TRUE(mixed) << "the plan holds submissions with decode rows and prefill rows";
  const RunRecord serial = run(checkpoint_, trace_, requested), other = run(checkpoint_, trace_, requested, {}, &plan);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(differing_groups(serial.requests[i], other.requests[i]), kNone) << i;
}

}  // namespace
}  // namespace loopgauge::test
