// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/conformance.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "harness/compare/drift.hpp"
#include "harness/compare/significant.hpp"
#include "models/spec/end_to_end.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::array<std::string_view, kPercentiles.size()> kPercentileNames{"median", "90th percentile", "99th percentile",
                                                                             "99.9th percentile", "maximum"};

const PooledDistance* find(const std::vector<PooledDistance>& all, const PooledDistance& like) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const PooledDistance& d) { return d.metric == like.metric && d.loop == like.loop; });
  return found == all.end() ? nullptr : &*found;
}

double ratio_of(double value, double limit) {
  if (value <= 0.0) return 0.0;
  return limit > 0.0 ? value / limit : std::numeric_limits<double>::infinity();
}

void judge_rate(DistanceVerdict& verdict, const PooledDistance& candidate, const PooledDistance* reordered, const PooledDistance* exact) {
  const auto values = static_cast<double>(candidate.ascending.size());
  const auto count = [](const PooledDistance* d) { return d == nullptr ? 0.0 : d->mean() * static_cast<double>(d->ascending.size()); };
  verdict.worst = kPercentiles.size() - 1;
  verdict.candidate[verdict.worst] = candidate.mean();
  verdict.reordered[verdict.worst] = reordered == nullptr ? 0.0 : reordered->mean();
  verdict.exact[verdict.worst] = exact == nullptr ? 0.0 : exact->mean();
  verdict.limit[verdict.worst] = values == 0.0 ? 0.0 : spec::flip_count_limit(count(reordered), count(exact)) / values;
}

void judge_percentiles(DistanceVerdict& verdict, const PooledDistance& candidate, const PooledDistance* reordered,
                       const PooledDistance* exact) {
  const auto values = static_cast<double>(candidate.ascending.size());
  const bool quadratic = candidate.metric == "kl";
  const bool scattered = quadratic || candidate.metric == "gate";
  for (std::size_t i = 0; i < kPercentiles.size() && !candidate.ascending.empty(); ++i) {
    const double q = kPercentiles[i];
    const auto at = [&](const PooledDistance* d) { return d == nullptr || d->ascending.empty() ? 0.0 : d->percentile(q); };
    verdict.candidate[i] = candidate.percentile(q);
    verdict.reordered[i] = at(reordered);
    verdict.exact[i] = at(exact);
    verdict.limit[i] = spec::is_judged(values, q, scattered)
                           ? spec::distance_limit(scattered ? candidate.requests : values, q, verdict.reordered[i], verdict.exact[i], quadratic)
                           : std::numeric_limits<double>::infinity();
  }
}

// `same_rows`: the candidate took the reordered run's decisions, so each of its metrics has as many values.
DistanceVerdict judge(const PooledDistance& candidate, const Yardstick& yardstick, bool same_rows) {
  const PooledDistance *reordered = find(yardstick.reordered, candidate), *exact = find(yardstick.exact, candidate);
  DistanceVerdict verdict;
  verdict.metric = candidate.metric;
  verdict.loop = candidate.loop;
  verdict.rate = candidate.is_rate();
  verdict.values = std::ssize(candidate.ascending);
  verdict.expected_values = reordered == nullptr ? 0 : std::ssize(reordered->ascending) + reordered->non_finite;
  verdict.non_finite = candidate.non_finite;
  verdict.mean = candidate.mean();
  verdict.largest = candidate.largest;
  if (verdict.rate) {
    judge_rate(verdict, candidate, reordered, exact);
  } else {
    judge_percentiles(verdict, candidate, reordered, exact);
  }
  for (std::size_t i = 0; i < kPercentiles.size(); ++i) {
    const double ratio = ratio_of(verdict.candidate[i], verdict.limit[i]);
    if (ratio > verdict.worst_ratio) {
      verdict.worst_ratio = ratio;
      verdict.worst = i;
    }
  }
  const std::int64_t recorded = verdict.values + verdict.non_finite;
  verdict.incomplete = same_rows ? recorded < verdict.expected_values : recorded == 0;
  if (verdict.non_finite > 0 || verdict.incomplete) verdict.worst_ratio = std::numeric_limits<double>::infinity();
  const auto is_finite = [](double limit) { return std::isfinite(limit); };
  verdict.judged = verdict.worst_ratio > 1.0 || std::any_of(verdict.limit.begin(), verdict.limit.end(), is_finite);
  verdict.passed = verdict.worst_ratio <= 1.0;
  return verdict;
}

std::vector<DistanceVerdict> judge_all(const std::vector<PooledDistance>& candidate, const Yardstick& yardstick, bool same_rows) {
  std::vector<DistanceVerdict> verdicts;
  for (const PooledDistance& distance : candidate) verdicts.push_back(judge(distance, yardstick, same_rows));
  for (const PooledDistance& expected : yardstick.reordered) {
    if (find(candidate, expected) != nullptr) continue;
    PooledDistance absent;
    absent.metric = expected.metric;
    absent.loop = expected.loop;
    verdicts.push_back(judge(absent, yardstick, same_rows));
  }
  return verdicts;
}

bool flips_argmax(const Decisions& decisions, std::size_t request) {
  return std::any_of(decisions.flips.begin(), decisions.flips.end(),
                     [&](const Flip& flip) { return flip.kind == DecisionKind::argmax && flip.request == static_cast<int>(request); });
}

std::string request_text(std::size_t i) { return "request " + std::to_string(i); }

}  // namespace

std::string DistanceVerdict::text() const {
  std::string text(metric);
  if (loop >= 0) text += " loop " + std::to_string(loop);
  text += ": ";
  if (incomplete) {
    const std::int64_t missing = expected_values - values - non_finite;
    return text + std::to_string(missing) + " of " + std::to_string(expected_values) + " values are missing";
  }
  if (non_finite > 0) return text + std::to_string(non_finite) + " values are not finite, the first at " + largest.text();
  text += (rate ? "share " : std::string(kPercentileNames[worst]) + " ") + significant(candidate[worst], 4) + " of " +
          std::to_string(values) + " values, limit " + significant(limit[worst], 4) + " (reordered " + significant(reordered[worst], 4) +
          ", double " + significant(exact[worst], 4) + ")";
  if (!rate) text += ", largest at " + largest.text();
  return text;
}

std::vector<DistanceVerdict> judge_distances(const std::vector<PooledDistance>& candidate, const Yardstick& yardstick) {
  return judge_all(candidate, yardstick, true);
}

std::vector<DistanceVerdict> judge_teacher_forced_distances(const std::vector<PooledDistance>& candidate, const Yardstick& yardstick) {
  std::vector<DistanceVerdict> verdicts = judge_all(candidate, yardstick, false);
  for (DistanceVerdict& verdict : verdicts) {
    const bool of_logits = verdict.metric == "logits" || verdict.metric == "kl" || verdict.metric == "top1";
    const bool enough = verdict.incomplete || verdict.values >= spec::kMinimumRows;
    verdict.judged = verdict.judged && (verdict.non_finite > 0 || (of_logits && enough));
    if (!verdict.judged) verdict.passed = true;
  }
  return verdicts;
}

FlipLimits flip_limits(const Yardstick& decision_forced) {
  FlipLimits limits;
  double gate = 0.0;
  // The limits follow from the yardstick alone: judging the reordered run by itself gives them.
  for (const DistanceVerdict& verdict : judge_distances(decision_forced.reordered, decision_forced)) {
    const double largest = spec::flip_move_limit(verdict.reordered.back(), verdict.exact.back());
    if (verdict.metric == "score") limits.score[verdict.loop - 3] = largest;
    if (verdict.metric == "logits") limits.logit = largest;
    if (verdict.metric == "gate") gate = std::fmax(gate, largest);
    if (verdict.metric == "key_logits") limits.key_logit = largest;
  }
  // Slope of the sigmoid at most 1/4, up to four gates (models/spec/exit_step.hpp).
  limits.exit_probability = 0.25 * kLoops * gate;
  return limits;
}

std::vector<FlipVerdict> judge_flips(const Decisions& candidate, const Decisions& reordered, const Decisions& exact) {
  std::vector<FlipVerdict> verdicts;
  for (int i = 0; i < kDecisionKinds; ++i) {
    FlipVerdict verdict;
    verdict.kind = static_cast<DecisionKind>(i);
    verdict.decided = candidate.decided[i];
    if (verdict.decided == 0) continue;
    for (const Flip& flip : candidate.flips) {
      if (flip.kind != verdict.kind) continue;
      ++verdict.flipped;
      verdict.roots += flip.root;
      verdict.unexplained += !flip.explained;
      if (flip.root && flip.explained) verdict.largest_margin = std::fmax(verdict.largest_margin, flip.margin);
    }
    verdict.reordered = reordered.flipped(verdict.kind);
    verdict.exact = exact.flipped(verdict.kind);
    verdict.limit = spec::flip_count_limit(static_cast<double>(verdict.reordered), static_cast<double>(verdict.exact));
    verdict.passed = verdict.unexplained == 0 && static_cast<double>(verdict.flipped) <= verdict.limit;
    verdicts.push_back(verdict);
  }
  return verdicts;
}

std::string forced_decision_difference(const RunRecord& expected, const RunRecord& actual) {
  for (std::size_t i = 0; i < expected.requests.size(); ++i) {
    const RequestRecord &e = expected.requests[i], &a = actual.requests[i];
    const auto fed = static_cast<std::size_t>(e.fed);
    const auto same_start = [&](const auto& x, const auto& y) {
      return x.size() >= fed && y.size() >= fed && std::equal(x.begin(), x.begin() + e.fed, y.begin());
    };
    if (!same_start(e.tokens, a.tokens)) return request_text(i) + ": tokens are not the forced ones";
    if (!same_start(e.exit_depths, a.exit_depths)) return request_text(i) + ": exits are not the forced ones";
    for (std::size_t loop = 3; loop <= 4; ++loop) {
      if (e.active[loop - 3] != a.active[loop - 3])
        return request_text(i) + ", loop " + std::to_string(loop) + ": the active set is not the forced one";
    }
    if (e.encoded_frontier != a.encoded_frontier) return request_text(i) + ": encoded frontiers differ";
    for (std::size_t step = 0; step < std::max(e.keys.size(), a.keys.size()); ++step) {
      const std::string what = request_text(i) + ", step " + std::to_string(step);
      if (step >= e.keys.size() || step >= a.keys.size() || e.keys[step].layers.size() != a.keys[step].layers.size())
        return what + ": one run selects keys, the other does not";
      for (std::size_t layer = 0; layer < e.keys[step].layers.size(); ++layer) {
        if (e.keys[step].layers[layer].data != a.keys[step].layers[layer].data)
          return what + ", layer " + std::to_string(layer) + ": the keys are not the forced ones";
      }
    }
    if (e.blocks.size() != a.blocks.size())
      return request_text(i) + ": " + std::to_string(a.blocks.size()) + " sealed blocks, expected " + std::to_string(e.blocks.size());
    for (std::size_t block = 0; block < e.blocks.size(); ++block) {
      const std::string what = request_text(i) + ", block " + std::to_string(block);
      if (e.blocks[block].positions != a.blocks[block].positions) return what + ": covers other positions";
      for (std::size_t stream = 0; stream < kLoops; ++stream) {
        if (e.blocks[block].streams[stream].rows != a.blocks[block].streams[stream].rows)
          return what + ": stream " + std::to_string(stream + 1) + " holds other rows";
      }
    }
  }
  return {};
}

bool all_forced(const Trace& trace) {
  return std::all_of(trace.requests.begin(), trace.requests.end(), [](const TraceRequest& request) { return request.teacher_forced(); });
}

Trace forced_trace(const Trace& trace, const RunRecord& reference) {
  Trace forced = trace;
  for (std::size_t i = 0; i < forced.requests.size(); ++i) {
    TraceRequest& request = forced.requests[i];
    if (request.teacher_forced()) continue;
    const RequestRecord& record = reference.requests.at(i);
    request.forced.assign(record.tokens.begin(), record.tokens.begin() + record.fed);
    request.max_new_tokens = record.fed;
    request.eos_token_id = -1;
    request.exit_depths.resize(std::min(request.exit_depths.size(), request.forced.size()));
  }
  return forced;
}

FreeRunVerdict judge_free_run(const Trace& trace, const RunRecord& expected, const RunRecord& actual, double limit,
                              const Decisions& candidate, const Decisions& reordered, const Decisions& exact) {
  FreeRunVerdict verdict;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    if (trace.requests[i].teacher_forced()) continue;
    ++verdict.requests;
    verdict.reordered += flips_argmax(reordered, i);
    verdict.exact += flips_argmax(exact, i);
    const RequestRecord &e = expected.requests.at(i), &a = actual.requests.at(i);
    const auto [x, y] = std::mismatch(e.tokens.begin(), e.tokens.end(), a.tokens.begin(), a.tokens.end());
    const auto row = x - e.tokens.begin();
    verdict.tokens += row;
    if (x == e.tokens.end() && y == a.tokens.end()) continue;
    ++verdict.diverged;
    std::string text = request_text(i) + " leaves the reference at token " + std::to_string(row);
    bool explained = false;
    if (x != e.tokens.end() && y != a.tokens.end() && row < (e.logits.empty() ? 0 : e.logits.extent(0)) &&
        row < (a.logits.empty() ? 0 : a.logits.extent(0))) {
      const auto p = e.logits.row(row), q = a.logits.row(row);
      const auto lost = static_cast<std::size_t>(*x), come = static_cast<std::size_t>(*y);
      const double margin = double{p[lost]} - double{p[come]};
      const double of_lost = std::fabs(double{q[lost]} - double{p[lost]}), of_come = std::fabs(double{q[come]} - double{p[come]});
      const Flip divergence{
          .kind = DecisionKind::argmax, .request = static_cast<int>(i), .position = e.prompt_length - 1 + static_cast<int>(row)};
      const bool flips = std::any_of(candidate.flips.begin(), candidate.flips.end(),
                                     [&](const Flip& flip) { return flip.explained && acts_on(flip, divergence); });
      if (trace.requests[i].temperature != 0.0f) {
        double moved = 0;  // a draw depends on every logit of its row, and in a speculating run on the draft's, which no record holds
        for (std::size_t v = 0; v < p.size(); ++v) moved = std::fmax(moved, std::fabs(double{q[v]} - double{p[v]}));
        explained = moved <= limit || flips;
        text += " (" + std::to_string(come) + " drawn instead of " + std::to_string(lost) + "): a logit of the row moved by " + significant(moved, 4) +
                ", noise up to " + significant(limit, 4) + (flips ? ", and other decisions flipped before" : "");
        verdict.unexplained += !explained;
        if (verdict.text.empty() || (!explained && verdict.unexplained == 1)) verdict.text = text;
        continue;
      }
      explained = margin <= of_lost + of_come && (std::fmax(of_lost, of_come) <= limit || flips);
      text += " (" + std::to_string(come) + " instead of " + std::to_string(lost) + "): margin " + significant(margin, 4) +
              ", the two logits moved by " + significant(of_lost + of_come, 4) + ", noise up to " + significant(limit, 4) +
              (flips ? ", and other decisions flipped before" : "");
    } else {
      text += ": one run ends there";
    }
    verdict.unexplained += !explained;
    if (verdict.text.empty() || (!explained && verdict.unexplained == 1)) verdict.text = text;
  }
  verdict.limit = spec::flip_count_limit(static_cast<double>(verdict.reordered), static_cast<double>(verdict.exact));
  return verdict;
}

}  // namespace loopgauge::harness
