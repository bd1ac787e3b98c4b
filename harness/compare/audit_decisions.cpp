// SPDX-License-Identifier: Apache-2.0
// The discrete rules of the specification, from the record's own integers.
#include <algorithm>
#include <cmath>
#include <string>

#include "harness/compare/audit_context.hpp"
#include "harness/compare/bounded.hpp"
#include "models/sampling.hpp"

namespace loopgauge::harness {
namespace {

// S-CFG-2, written out once more: ceil(bp * count / 10000), at least 1.
std::int64_t required_budget(std::int64_t basis_points, std::int64_t count) {
  const std::int64_t product = basis_points * count;
  return std::max<std::int64_t>(1, product / 10000 + (product % 10000 != 0));
}

// S-POL-1: encoded positions once `committed` positions are committed.
int required_frontier(const EffectiveConfig& config, int prompt, int committed) {
  const auto& q = config.q();
  if (!q.enabled) return 0;
  const int flushed = 64 * (std::max(0, committed - q.tail) / 64);
  const int whole_windows = config.window() * (prompt / config.window());
  switch (q.policy) {
    case EncodingPolicy::fixed_prompt:
      return prompt;
    case EncodingPolicy::rolling:
      return flushed;
    case EncodingPolicy::streaming:
      return committed > prompt ? std::max(whole_windows, flushed) : whole_windows;
  }
  return 0;
}

// S-POL-1, "blocks": ends of the blocks that tile [0, frontier).
std::vector<int> required_block_ends(const EffectiveConfig& config, int prompt, int frontier) {
  const int at_prompt = std::min(frontier, required_frontier(config, prompt, prompt));
  std::vector<int> ends;
  for (int end = config.window(); end < at_prompt; end += config.window()) ends.push_back(end);
  if (at_prompt > 0) ends.push_back(at_prompt);
  for (int end = at_prompt + 64; end <= frontier; end += 64) ends.push_back(end);
  return ends;
}

template <class T>
std::int32_t lowest_argmax(std::span<const T> values) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < values.size(); ++i) {
    if (values[i] > values[best]) best = i;
  }
  return static_cast<std::int32_t>(best);
}

// Token j lies where its number falls, in FP64; in a speculating run it may instead be a candidate or have replaced one, which is another draw.
void sampled_token(const AuditContext& c, std::size_t j) {
  constexpr double kRounding = 1e-5;  // of FP32 sums over a vocabulary
  const auto logits = c.record.logits.row(static_cast<std::int64_t>(j));
  const double most = *std::max_element(logits.begin(), logits.end());
  const auto weight = [&](std::size_t v) { return std::exp((logits[v] - most) / static_cast<double>(c.request.temperature)); };
  double total = 0, below = 0;
  const auto token = static_cast<std::size_t>(c.record.tokens[j]);
  for (std::size_t v = 0; v < logits.size(); ++v) {
    if (v < token) below += weight(v);
    total += weight(v);
  }
  const int position = c.prompt() + static_cast<int>(j);
  const double low = below / total, high = (below + weight(token)) / total;
  const double u = uniform_draw(c.request.seed, c.request.id, position, SamplingPurpose::target);
  const bool drawn = u > low - kRounding && u < high + kRounding;
  const bool possible = !c.record.rounds.empty() && high > low;
  c.log.require(drawn || possible, Rule::sampled_token, c.place(0, -1, position), u, low, kRounding, "start of the emitted token's interval");
}

void tokens(const AuditContext& c) {
  const RequestRecord& record = c.record;
  if (c.request.teacher_forced()) {
    for (std::size_t j = 0; j < record.tokens.size(); ++j) {
      c.log.require(record.tokens[j] == c.request.forced[j], Rule::forced_tokens, c.place(0, -1, c.prompt() + static_cast<int>(j)),
                    c.request.forced[j], record.tokens[j], 0, "token");
    }
    return;
  }
  if (!record.logits.empty() && c.request.temperature != 0.0f) {
    for (std::size_t j = 0; j < record.tokens.size(); ++j) sampled_token(c, j);
  } else if (!record.logits.empty()) {
    for (std::size_t j = 0; j < record.tokens.size(); ++j) {
      const std::int32_t best = lowest_argmax(record.logits.row(static_cast<std::int64_t>(j)));
      c.log.require(record.tokens[j] == best, Rule::greedy_token, c.place(0, -1, c.prompt() + static_cast<int>(j)), best, record.tokens[j],
                    0, "emitted token");
    }
  }
  const int eos = c.request.eos_token_id;
  for (std::size_t j = 0; j + 1 < record.tokens.size(); ++j) {
    c.log.require(eos < 0 || record.tokens[j] != eos, Rule::run_end, c.place(0, -1, c.prompt() + static_cast<int>(j)), -1, eos, 0,
                  "token before the last");
  }
  const auto emitted = static_cast<int>(record.tokens.size());
  const bool ended = emitted == c.request.max_new_tokens || (emitted > 0 && eos >= 0 && record.tokens.back() == eos);
  c.log.require(ended || c.has_events, Rule::run_end, c.place(), c.request.max_new_tokens, emitted, 0,
                "number of tokens of a run that did not end with end-of-sequence");
}

// 1 - sigmoid and the comparison take at most six FP32 operations a loop, each within one unit of a number below 2, and sigmoid is within
// 2 ulp: 4 loops * 8 units bounds the distance between the executor's hazard and the double-precision one.
constexpr double kHazardError = 32 * kFloatUnit;

void exits(const AuditContext& c) {
  const RequestRecord& record = c.record;
  const ExitRule& rule = c.config.exit();
  const int loops = c.config.loops();  // four, or fewer with all switches off
  for (int j = 0; j < static_cast<int>(record.exit_depths.size()); ++j) {
    const int depth = record.exit_depths[static_cast<std::size_t>(j)];
    const int position = c.prompt() + j;
    const auto require = [&](bool holds, double expected, std::string_view what) {
      c.log.require(holds, Rule::exit_depth, c.place(0, -1, position), expected, depth, 0, what);
    };
    if (j >= record.fed) {
      require(depth == 0, 0, "exit depth of a token that is not forwarded");
      continue;
    }
    if (rule.mode == ExitMode::full) {
      require(depth == loops, loops, "exit depth");
    } else if (rule.mode == ExitMode::trace) {
      if (j < static_cast<int>(c.request.exit_depths.size())) {
        const int forced = c.request.exit_depths[static_cast<std::size_t>(j)];
        require(depth == forced, forced, "exit depth");
      }
    } else if (!record.gate.empty()) {
      const auto gates = record.gate.row(position);
      const int delay = rule.mode == ExitMode::delayed ? 1 : 0;
      double survival = 1.0;
      int earliest = 0, latest = loops;  // legal depths: the decision may fall either way within the error
      for (int loop = 1; loop <= loops; ++loop) {
        survival *= 1.0 - 1.0 / (1.0 + std::exp(-static_cast<double>(gates[static_cast<std::size_t>(loop - 1)])));
        if (loop < rule.min_loops || !(rule.threshold < 1.0f)) continue;
        const double margin = 1.0 - survival - static_cast<double>(rule.threshold);
        const int end = std::min(loops, loop + delay);
        if (earliest == 0 && margin >= -kHazardError) earliest = end;
        if (margin >= kHazardError) {
          latest = end;
          break;
        }
      }
      if (earliest == 0) earliest = loops;
      require(depth >= earliest && depth <= latest, depth < earliest ? earliest : latest, "exit depth");
    } else {
      require(depth >= rule.min_loops && depth <= loops, rule.min_loops, "exit depth");
    }
  }
}

void selection(const AuditContext& c) {
  const RequestRecord& record = c.record;
  if (!c.config.selects_tokens()) {
    for (std::size_t i = 0; i < 2; ++i) {
      c.log.require(record.active[i].empty() && record.scores[i].empty(), Rule::active_budget, c.place(static_cast<int>(i) + 3), 0,
                    static_cast<double>(record.active[i].size() + record.scores[i].size()), 0,
                    "entries recorded although nothing is selected");
    }
    return;
  }
  const int window = c.config.window();
  for (int loop = 3; loop <= kLoops; ++loop) {
    const auto& active = record.active[static_cast<std::size_t>(loop - 3)];
    const auto& scores = record.scores[static_cast<std::size_t>(loop - 3)];
    for (std::size_t i = 0; i < active.size(); ++i) {
      const bool in_range = active[i] >= 0 && active[i] < c.prompt();
      const bool ascending = i == 0 || active[i] > active[i - 1];
      c.log.require(in_range && ascending, Rule::active_order, c.place(loop, -1, active[i]), i == 0 ? 0 : active[i - 1] + 1, active[i], 0,
                    "active position");
    }
    for (int begin = 0; begin < c.prompt(); begin += window) {
      const int end = std::min(begin + window, c.prompt());
      std::vector<int> eligible, chosen;
      for (int p = begin; p < end; ++p) {
        if (c.ran(loop - 1, p)) eligible.push_back(p);
        if (c.ran(loop, p)) chosen.push_back(p);
        c.log.require(!c.ran(loop, p) || c.ran(loop - 1, p), Rule::active_nested, c.place(loop, -1, p), 0, 1, 0,
                      "activity of a row that was inactive before");
      }
      const auto retention = c.config.t().retention_bp[static_cast<std::size_t>(loop - 1)];
      const auto wanted = std::min<std::int64_t>(required_budget(retention, end - begin), static_cast<std::int64_t>(eligible.size()));
      c.log.require(static_cast<std::int64_t>(chosen.size()) == wanted, Rule::active_budget, c.place(loop, -1, begin),
                    static_cast<double>(wanted), static_cast<double>(chosen.size()), 0,
                    "number of active rows of the window at this position");
      if (scores.empty()) continue;
      const auto score = [&](int p) { return scores[static_cast<std::size_t>(p)]; };
      bool comparable = true;
      for (int p = begin; p < end; ++p) {
        const bool is_eligible = c.ran(loop - 1, p);
        const bool fits = is_eligible ? std::isfinite(score(p)) && score(p) >= 0.0f : std::isnan(score(p));
        c.log.require(fits, Rule::score_eligible, c.place(loop, -1, p), is_eligible ? 0.0 : std::nan(""), score(p), 0,
                      is_eligible ? "score of an eligible row" : "score of a row that is not eligible");
        comparable = comparable && (!is_eligible || std::isfinite(score(p)));
      }
      if (!comparable) continue;
      const int reserved = c.config.reserved_position(c.prompt());
      std::stable_sort(eligible.begin(), eligible.end(), [&](int a, int b) {  // stable: ascending position
        if (a == reserved || b == reserved) return a == reserved && b != reserved;
        return score(a) > score(b);
      });
      const auto take = std::min(eligible.size(), chosen.size());  // a wrong number is active_budget's finding
      std::vector<int> best(eligible.begin(), eligible.begin() + static_cast<std::ptrdiff_t>(take));
      std::sort(best.begin(), best.end());
      std::vector<int> lost;
      std::set_difference(best.begin(), best.end(), chosen.begin(), chosen.end(), std::back_inserter(lost));
      c.log.checked(Rule::active_top, static_cast<std::int64_t>(chosen.size()));
      if (lost.empty()) continue;
      std::vector<int> won;
      std::set_difference(chosen.begin(), chosen.end(), best.begin(), best.end(), std::back_inserter(won));
      c.log.violation(Rule::active_top, c.place(loop, -1, lost.front()), score(lost.front()), won.empty() ? 0.0 : score(won.front()), 0,
                      "score of the row selected instead of this position" +
                          (won.empty() ? std::string() : " (position " + std::to_string(won.front()) + ")"));
    }
  }
}

void keys(const AuditContext& c) {
  const RequestRecord& record = c.record;
  const bool recorded = std::any_of(record.keys.begin(), record.keys.end(), [](const StepKeys& step) { return !step.layers.empty(); });
  const int layers = c.checkpoint.config.layers;
  const int heads = c.checkpoint.config.heads;
  for (int j = 0; j < static_cast<int>(record.keys.size()) && j < record.fed; ++j) {
    const StepKeys& step = record.keys[static_cast<std::size_t>(j)];
    const int position = c.prompt() + j;
    const std::int64_t n = position + 1;
    const int depth = record.exit_depths[static_cast<std::size_t>(j)];
    const auto here = static_cast<int>(step.layers.size());
    if (!c.config.s().enabled || depth < 2) {
      c.log.require(here == 0, Rule::keys_present, c.place(2, -1, position), 0, here, 0, "layers with selected keys");
      continue;
    }
    if (!recorded) continue;
    // A row that exits at loop 2 may or may not have selected: nothing reads the selection.
    c.log.require(here == layers || (depth == 2 && here == 0), Rule::keys_present, c.place(2, -1, position), layers, here, 0,
                  "layers with selected keys");
    if (here != layers) continue;
    const std::int64_t k = required_budget(c.config.s().key_fraction_bp, n);
    bool sized = true;
    for (int layer = 0; layer < layers; ++layer) {
      const auto& selected = step.layers[static_cast<std::size_t>(layer)];
      const bool right = selected.shape == std::vector<std::int64_t>{heads, k};
      c.log.require(right, Rule::keys_budget, c.place(2, layer, position), static_cast<double>(k),
                    selected.shape.size() == 2 ? static_cast<double>(selected.extent(1)) : 0.0, 0, "number of selected keys");
      sized = sized && right;
      if (!right) continue;
      for (int head = 0; head < heads; ++head) {
        const auto row = selected.row(head);
        for (std::size_t i = 0; i < row.size(); ++i) {
          const int least = i == 0 ? 0 : row[i - 1] + 1;
          c.log.require(row[i] >= least && row[i] < n, Rule::keys_order, c.place(2, layer, position, head, static_cast<std::int64_t>(i)),
                        least, row[i], 0, "selected key");
        }
      }
    }
    if (step.mass.empty() || !sized) continue;
    // m is a sum of k rounded quotients of exponentials by a sum of n of them. Relative error: n additions of the sum, k of m, the
    // quotient and two exponentials of at most 2 ulp. Selection by logit is selection by probability, and the k largest of n numbers
    // have at least k/n of their sum.
    const double relative = sum_bound(static_cast<double>(n + k + 12));
    const double least = static_cast<double>(k) / static_cast<double>(n);
    for (int layer = 0; layer < layers; ++layer) {
      for (int head = 0; head < heads; ++head) {
        const double mass = step.mass.row(layer)[static_cast<std::size_t>(head)];
        const bool holds = mass > 0.0 && mass <= 1.0 + relative && mass >= least * (1.0 - relative);
        c.log.require(holds, Rule::mass_range, c.place(2, layer, position, head), mass < least ? least : 1.0, mass, relative, "mass");
      }
    }
  }
}

void frontier(const AuditContext& c) {
  const RequestRecord& record = c.record;
  const auto& q = c.config.q();
  const bool moves_late = q.enabled && q.timing == EncodingTiming::execution_dependent;
  const int at_end = required_frontier(c.config, c.prompt(), c.positions());
  for (int j = 0; j < static_cast<int>(record.encoded_frontier.size()); ++j) {
    const int found = record.encoded_frontier[static_cast<std::size_t>(j)];
    const int exact = required_frontier(c.config, c.prompt(), c.prompt() + j);
    bool holds = found == exact;
    if (moves_late) {
      // A submission may commit several tokens: E after it is the policy's E of a committed length at least this one. Eager flushing
      // also encodes rows that are not committed yet.
      const int most = q.flush == FlushRule::eager ? std::max(at_end, 64 * (c.positions() / 64)) : at_end;
      const int before = j == 0 ? 0 : record.encoded_frontier[static_cast<std::size_t>(j - 1)];
      holds = found >= exact && found <= most && found >= before;
    }
    c.log.require(holds, Rule::frontier, c.place(0, -1, c.prompt() + j), exact, found, 0, "encoded frontier at this committed length");
  }
  if (record.blocks.empty()) return;
  const int reached = record.encoded_frontier.empty() ? at_end : record.encoded_frontier.back();
  const std::vector<int> ends = required_block_ends(c.config, c.prompt(), reached);
  c.log.require(record.blocks.size() == ends.size(), Rule::block_cuts, c.place(), static_cast<double>(ends.size()),
                static_cast<double>(record.blocks.size()), 0, "number of blocks");
  for (std::size_t b = 0; b < std::min(ends.size(), record.blocks.size()); ++b) {
    const PositionRange& range = record.blocks[b].positions;
    const int begin = b == 0 ? 0 : ends[b - 1];
    c.log.require(range.begin == begin, Rule::block_cuts, c.place(0, -1, begin), begin, range.begin, 0,
                  "begin of block " + std::to_string(b));
    c.log.require(range.end == ends[b], Rule::block_cuts, c.place(0, -1, begin), ends[b], range.end, 0,
                  "end of block " + std::to_string(b));
  }
}

}  // namespace

void audit_decisions(const AuditContext& context) {
  tokens(context);
  exits(context);
  selection(context);
  keys(context);
  frontier(context);
}

}  // namespace loopgauge::harness
