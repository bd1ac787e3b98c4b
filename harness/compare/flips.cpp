// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/flips.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <limits>
#include <optional>
#include <span>

#include "harness/compare/drift.hpp"

namespace loopgauge::harness {

namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

std::vector<std::int32_t> only_in(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::vector<std::int32_t> result;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
  return result;
}

// Fills margin, difference and largest_move of the flip in which `lost` made place for `come`. NaN values give NaN.
void compare_values(Flip& flip, double lost_expected, double lost_actual, double come_expected, double come_actual) {
  flip.margin = lost_expected - come_expected;
  const double lost = std::fabs(lost_actual - lost_expected), come = std::fabs(come_actual - come_expected);
  flip.difference = lost + come;
  flip.largest_move = std::max(lost, come);
}

void find_token_flips(int index, const RequestRecord& e, const RequestRecord& a, const EffectiveConfig& config, Decisions& decisions) {
  if (!config.selects_tokens()) return;
  for (int window = 0; window < window_count(e.prompt_length, config.window()); ++window) {
    const PositionRange range = window_range(window, e.prompt_length, config.window());
    for (int loop = 3; loop <= 4; ++loop) {
      const auto at = static_cast<std::size_t>(loop - 3);
      const auto in_window = [&](const std::vector<std::int32_t>& active) {
        const auto begin = std::lower_bound(active.begin(), active.end(), range.begin);
        return std::span<const std::int32_t>(begin, std::lower_bound(begin, active.end(), range.end));
      };
      const auto selected = in_window(e.active[at]), other = in_window(a.active[at]);
      decisions.decided[static_cast<int>(DecisionKind::token)] += std::ssize(selected);
      const std::vector<std::int32_t> lost = only_in(selected, other), come = only_in(other, selected);
      const auto score = [&](const RequestRecord& r, int position) {
        const auto& scores = r.scores[at];
        return static_cast<std::size_t>(position) < scores.size() ? double{scores[static_cast<std::size_t>(position)]} : kUnknown;
      };
      // The nearest newcomer that both runs scored.
      int nearest = -1;
      for (const std::int32_t position : come) {
        if (std::isnan(score(e, position)) || std::isnan(score(a, position))) continue;
        if (nearest < 0 || score(e, position) > score(e, nearest)) nearest = position;
      }
      for (const std::int32_t position : lost) {
        Flip flip{.kind = DecisionKind::token,
                  .request = index,
                  .position = position,
                  .loop = loop,
                  .window = window,
                  .margin = kUnknown,
                  .difference = kUnknown};
        flip.detail = "position " + std::to_string(position) + " is not selected";
        if (nearest >= 0) {
          compare_values(flip, score(e, position), score(a, position), score(e, nearest), score(a, nearest));
          flip.detail += ", position " + std::to_string(nearest) + " is";
        }
        decisions.flips.push_back(std::move(flip));
      }
    }
  }
}

const std::vector<Tensor<std::int32_t>>& selections(const RequestRecord& record, std::size_t step) {
  static const std::vector<Tensor<std::int32_t>> kNone;
  return step < record.keys.size() ? record.keys[step].layers : kNone;
}

// A step whose keys one run selects and the other does not, or not in every layer: one flip that only an earlier one can explain.
void find_missing_selections(int index, const RequestRecord& e, const RequestRecord& a, Decisions& decisions) {
  for (std::size_t step = 0; step < std::max(e.keys.size(), a.keys.size()); ++step) {
    const auto &x = selections(e, step), &y = selections(a, step);
    if (x.size() == y.size()) continue;
    Flip flip{.kind = DecisionKind::key,
              .request = index,
              .position = e.prompt_length + static_cast<int>(step),
              .loop = 2,
              .margin = kUnknown,
              .difference = kUnknown};
    flip.detail = "keys are selected in " + std::to_string(y.size()) + " layers instead of " + std::to_string(x.size());
    decisions.flips.push_back(std::move(flip));
    for (std::size_t layer = y.size(); layer < x.size(); ++layer)
      decisions.decided[static_cast<int>(DecisionKind::key)] += std::ssize(x[layer].data);
  }
}

// Calls visit(step, layer, head, expected keys, actual keys) for every selection that both runs made.
template <class Visit>
void for_each_key_selection(const RequestRecord& e, const RequestRecord& a, Visit&& visit) {
  for (std::size_t step = 0; step < std::min(e.keys.size(), a.keys.size()); ++step) {
    const auto &x = e.keys[step].layers, &y = a.keys[step].layers;
    for (std::size_t layer = 0; layer < std::min(x.size(), y.size()); ++layer) {
      for (std::int64_t head = 0; head < x[layer].extent(0); ++head) {
        visit(static_cast<int>(step), static_cast<int>(layer), static_cast<int>(head), x[layer].row(head), y[layer].row(head));
      }
    }
  }
}

void find_key_flips(int index, const RunRecord& expected, const RunRecord& actual, const ModelConfig& model, const KeyEvidence& evidence,
                    Decisions& decisions) {
  const auto at = static_cast<std::size_t>(index);
  find_missing_selections(index, expected.requests[at], actual.requests[at], decisions);
  for_each_key_selection(expected.requests[at], actual.requests[at],
                         [&](int step, int layer, int head, std::span<const std::int32_t> x, std::span<const std::int32_t> y) {
                           decisions.decided[static_cast<int>(DecisionKind::key)] += std::ssize(x);
                           const std::vector<std::int32_t> lost = only_in(x, y), come = only_in(y, x);
                           if (lost.empty()) return;
                           const int position = expected.requests[at].prompt_length + step;
                           KeyLogits e, a;
                           if (evidence.expected != nullptr && evidence.actual != nullptr) {
                             e = key_logits(*evidence.expected, expected, index, layer, head, position, model);
                             a = key_logits(*evidence.actual, actual, index, layer, head, position, model);
                           }
                           const bool known = !e.values.empty() && !a.values.empty() && !come.empty();
                           std::int32_t nearest = come.empty() ? -1 : come.front();
                           for (const std::int32_t key : come) {
                             if (known && e.values.at(static_cast<std::size_t>(key)) > e.values.at(static_cast<std::size_t>(nearest)))
                               nearest = key;
                           }
                           for (const std::int32_t key : lost) {
                             Flip flip{.kind = DecisionKind::key,
                                       .request = index,
                                       .position = position,
                                       .loop = 2,
                                       .layer = layer,
                                       .head = head,
                                       .margin = kUnknown,
                                       .difference = kUnknown};
                             flip.detail = "key " + std::to_string(key) + " is not selected";
                             if (nearest >= 0) flip.detail += ", key " + std::to_string(nearest) + " is";
                             if (known) {
                               const auto i = static_cast<std::size_t>(key), j = static_cast<std::size_t>(nearest);
                               compare_values(flip, e.values.at(i), a.values.at(i), e.values.at(j), a.values.at(j));
                               flip.slack = e.errors[i] + a.errors[i] + e.errors[j] + a.errors[j];
                             }
                             decisions.flips.push_back(std::move(flip));
                           }
                         });
}

void find_argmax_flips(int index, const RequestRecord& e, const RequestRecord& a, Decisions& decisions) {
  if (e.logits.empty() || a.logits.empty()) return;
  for (std::int64_t row = 0; row < e.logits.extent(0); ++row) {
    ++decisions.decided[static_cast<int>(DecisionKind::argmax)];
    const std::span<const float> x = e.logits.row(row), y = a.logits.row(row);
    const auto lost = static_cast<std::size_t>(argmax_lowest_id(x)), come = static_cast<std::size_t>(argmax_lowest_id(y));
    if (lost == come) continue;
    Flip flip{.kind = DecisionKind::argmax, .request = index, .position = e.prompt_length - 1 + static_cast<int>(row)};
    compare_values(flip, x[lost], y[lost], x[come], y[come]);
    flip.detail = "token " + std::to_string(come) + " instead of " + std::to_string(lost);
    decisions.flips.push_back(std::move(flip));
  }
}

// Exit probability 1 - s after each loop (S-EXIT-2), in double precision from recorded gates.
std::array<double, kLoops> exit_probabilities(std::span<const float> gates) {
  std::array<double, kLoops> result{};
  double survival = 1.0;
  for (std::size_t loop = 0; loop < kLoops; ++loop) {
    survival *= 1.0 - 1.0 / (1.0 + std::exp(-double{gates[loop]}));
    result[loop] = 1.0 - survival;
  }
  return result;
}

void find_exit_flips(int index, const RequestRecord& e, const RequestRecord& a, const EffectiveConfig& config, Decisions& decisions) {
  const ExitMode mode = config.exit().mode;
  if (mode != ExitMode::threshold && mode != ExitMode::delayed) return;
  for (int step = 0; step < e.fed; ++step) {
    const auto j = static_cast<std::size_t>(step);
    if (j >= e.exit_depths.size() || j >= a.exit_depths.size()) break;
    ++decisions.decided[static_cast<int>(DecisionKind::exit)];
    const int x = e.exit_depths[j], y = a.exit_depths[j];
    if (x == y) continue;
    const int position = e.prompt_length + step, earlier = std::min(x, y);
    Flip flip{
        .kind = DecisionKind::exit, .request = index, .position = position, .loop = earlier, .margin = kUnknown, .difference = kUnknown};
    flip.detail = "leaves after loop " + std::to_string(y) + " instead of " + std::to_string(x);
    // The loop whose exit probability decided: with `delayed` the row leaves one loop later.
    const int decided = std::max(1, mode == ExitMode::delayed ? earlier - 1 : earlier);
    if (!e.gate.empty() && !a.gate.empty()) {
      const auto at = static_cast<std::size_t>(decided - 1);
      const double p = exit_probabilities(e.gate.row(position))[at], q = exit_probabilities(a.gate.row(position))[at];
      flip.margin = std::fabs(p - double{config.exit().threshold});
      flip.difference = flip.largest_move = std::fabs(p - q);
      flip.slack = 0x1p-18;  // FP32 evaluation on both sides (models/spec/exit_step.hpp)
    }
    decisions.flips.push_back(std::move(flip));
  }
}

// When within a request: prompt by (window, loop), then decode rows; inside a row keys, exit, argmax. Only orders the list.
std::array<std::int64_t, 5> order_of(const Flip& flip) {
  if (flip.kind == DecisionKind::token) return {flip.request, -1, flip.window, flip.loop, flip.position};
  return {flip.request, flip.position, static_cast<int>(flip.kind) == static_cast<int>(DecisionKind::argmax) ? 9 : flip.loop, flip.layer,
          flip.head};
}

double limit_of(const Flip& flip, const FlipLimits& limits) {
  switch (flip.kind) {
    case DecisionKind::token:
      return limits.score[flip.loop - 3];
    case DecisionKind::key:
      return limits.key_logit;
    case DecisionKind::argmax:
      return limits.logit;
    case DecisionKind::exit:
      return limits.exit_probability;
  }
  return 0.0;
}

}  // namespace

std::string_view to_string(DecisionKind kind) {
  switch (kind) {
    case DecisionKind::token:
      return "token";
    case DecisionKind::key:
      return "key";
    case DecisionKind::argmax:
      return "argmax";
    case DecisionKind::exit:
      return "exit";
  }
  return "";
}

std::int64_t Decisions::flipped(DecisionKind kind) const {
  return std::count_if(flips.begin(), flips.end(), [&](const Flip& flip) { return flip.kind == kind; });
}

bool acts_on(const Flip& cause, const Flip& effect) {
  if (cause.request != effect.request) return false;
  switch (cause.kind) {
    case DecisionKind::token:
      switch (effect.kind) {
        case DecisionKind::token:
          return effect.window >= cause.window && effect.loop > cause.loop;
        case DecisionKind::key:
          return false;
        case DecisionKind::argmax:
          return true;
        case DecisionKind::exit:
          return effect.loop >= cause.loop;
      }
      return false;
    case DecisionKind::key:
      if (effect.kind == DecisionKind::argmax) return effect.position >= cause.position;
      return effect.kind == DecisionKind::exit && effect.loop >= 3 && effect.position >= cause.position;
    case DecisionKind::exit:
      if (effect.kind == DecisionKind::argmax) return effect.position >= cause.position;
      // A row that leaves before loop 2 selects no keys.
      if (effect.kind == DecisionKind::key) return cause.loop < 2 && effect.position >= cause.position;
      return effect.kind == DecisionKind::exit && effect.position > cause.position && effect.loop > cause.loop;
    case DecisionKind::argmax:
      return false;
  }
  return false;
}

Decisions find_flips(const RunRecord& expected, const RunRecord& actual, const EffectiveConfig& config, const ModelConfig& model,
                     const KeyEvidence& evidence) {
  Decisions decisions;
  for (std::size_t i = 0; i < expected.requests.size(); ++i) {
    const RequestRecord &e = expected.requests[i], &a = actual.requests[i];
    const int index = static_cast<int>(i);
    find_token_flips(index, e, a, config, decisions);
    find_key_flips(index, expected, actual, model, evidence, decisions);
    find_argmax_flips(index, e, a, decisions);
    find_exit_flips(index, e, a, config, decisions);
  }
  std::stable_sort(decisions.flips.begin(), decisions.flips.end(), [](const Flip& x, const Flip& y) { return order_of(x) < order_of(y); });
  return decisions;
}

void explain_flips(Decisions& decisions, const FlipLimits& limits) {
  // In causal order: causes are explained before what they act on. Key and argmax flips are many and act on no flip of their own kind, so
  // the first explained one of a request stands for all later ones.
  std::vector<const Flip*> causes;
  for (Flip& flip : decisions.flips) {
    const bool unknown = std::isnan(flip.margin) || std::isnan(flip.difference);  // a value exists in one run only
    // Equal values that nobody moved rank by position (S-TSEL-4, S-SDA-7): no noise and no earlier flip reverses that.
    const bool tied = flip.margin == 0.0 && flip.difference + flip.slack == 0.0;
    const bool ranked = unknown || (flip.margin <= flip.difference + flip.slack && !tied);
    flip.root = true;
    flip.explained = !unknown && ranked && flip.largest_move <= limit_of(flip, limits);
    for (const Flip* cause : causes) {
      if (!acts_on(*cause, flip)) continue;
      flip.root = false;
      flip.explained = flip.explained || (ranked && cause->explained);
      if (flip.explained) break;
    }
    if (flip.kind == DecisionKind::argmax) continue;
    if (flip.kind == DecisionKind::key) {
      // Every later flip that a key flip acts on is acted on by the first of its request too.
      const bool known = std::any_of(causes.begin(), causes.end(), [&](const Flip* cause) {
        return cause->kind == DecisionKind::key && cause->request == flip.request && (cause->explained || !flip.explained);
      });
      if (known) continue;
    }
    causes.push_back(&flip);
  }
}

PooledDistance key_logit_distance(const RunRecord& expected, const RunRecord& actual, const ModelConfig& model,
                                  const KeyEvidence& evidence) {
  PooledDistance result;
  result.metric = "key_logits";
  result.loop = 2;
  std::vector<DistancePlace> places;
  for (std::size_t i = 0; i < expected.requests.size(); ++i) {
    for_each_key_selection(expected.requests[i], actual.requests[i],
                           [&](int step, int layer, int head, std::span<const std::int32_t>, std::span<const std::int32_t>) {
                             places.push_back({static_cast<int>(i), expected.requests[i].prompt_length + step, layer, head});
                           });
  }
  std::vector<double> differences(places.size(), 0.0);
  std::exception_ptr failure;
#pragma omp parallel for schedule(static)
  for (std::size_t at = 0; at < places.size(); ++at) {
    try {
      const DistancePlace& p = places[at];
      const KeyLogits e = key_logits(*evidence.expected, expected, p.request, p.layer, p.head, p.position, model);
      const KeyLogits a = key_logits(*evidence.actual, actual, p.request, p.layer, p.head, p.position, model);
      for (std::size_t j = 0; j < std::min(e.values.size(), a.values.size()); ++j) {
        const double d = std::fabs(a.values[j] - e.values[j]);
        if (!(d <= differences[at])) differences[at] = d;  // NaN stays
      }
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  double largest = -1.0;
  for (std::size_t at = 0; at < places.size(); ++at) {
    if (!std::isfinite(differences[at])) {
      if (result.non_finite++ == 0) result.largest = places[at];
      continue;
    }
    if (result.non_finite == 0 && differences[at] > largest) {
      largest = differences[at];
      result.largest = places[at];
    }
    result.ascending.push_back(differences[at]);
  }
  std::sort(result.ascending.begin(), result.ascending.end());
  return result;
}

}  // namespace loopgauge::harness
