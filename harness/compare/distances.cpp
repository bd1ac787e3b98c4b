// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/distances.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "harness/compare/drift.hpp"

namespace loopgauge::harness {

namespace {

std::string extents_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

// Collects one metric.
class Pool {
 public:
  Pool(std::string_view metric, int loop) {
    result_.metric = metric;
    result_.loop = loop;
  }

  void add(double value, const DistancePlace& place) {
    if (!std::isfinite(value)) {
      if (result_.non_finite++ == 0) result_.largest = place;
      return;
    }
    if (result_.non_finite == 0 && (result_.ascending.empty() || value > largest_)) {
      largest_ = value;
      result_.largest = place;
    }
    if (place.request != last_request_) ++result_.requests;
    last_request_ = place.request;
    result_.ascending.push_back(value);
  }

  void finish_into(std::vector<PooledDistance>& all) {
    if (result_.ascending.empty() && result_.non_finite == 0) return;
    std::sort(result_.ascending.begin(), result_.ascending.end());
    all.push_back(std::move(result_));
  }

 private:
  PooledDistance result_;
  double largest_ = 0.0;
  int last_request_ = -1;  // requests come one after the other
};

// Sums of one row, possibly in several pieces.
struct RowNorms {
  double error = 0.0, norm = 0.0;
  void add(std::span<const float> expected, std::span<const float> actual) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double difference = double{actual[i]} - double{expected[i]};
      error += difference * difference;
      norm += double{expected[i]} * double{expected[i]};
    }
  }
  // 0 / 0 is no distance; anything over a zero row is infinite.
  double relative() const { return error == 0.0 ? 0.0 : std::sqrt(error / norm); }
};

// Calls visit(request index, expected, actual).
template <class Visit>
void for_each_request(const RunRecord& expected, const RunRecord& actual, Visit&& visit) {
  for (std::size_t i = 0; i < expected.requests.size(); ++i) visit(static_cast<int>(i), expected.requests[i], actual.requests[i]);
}

using Executed = std::array<std::vector<std::uint8_t>, kLoops>;

// Positions that executed the loop in both runs, or in neither, ascending.
std::vector<int> common_rows(const RequestRecord& expected, const RequestRecord& actual, int loop, bool executed = true) {
  const auto at = static_cast<std::size_t>(loop - 1);
  const Executed e = executed_loops(expected), a = executed_loops(actual);
  std::vector<int> rows;
  for (std::size_t p = 0; p < e[at].size(); ++p) {
    if ((e[at][p] != 0) == executed && (a[at][p] != 0) == executed) rows.push_back(static_cast<int>(p));
  }
  return rows;
}

void add_hidden(const RunRecord& expected, const RunRecord& actual, bool executed, std::vector<PooledDistance>& all) {
  for (int loop = executed ? 1 : 2; loop <= kLoops; ++loop) {
    Pool pool(executed ? "hidden" : "inherited", loop);
    for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
      const auto &x = e.hidden[static_cast<std::size_t>(loop - 1)], &y = a.hidden[static_cast<std::size_t>(loop - 1)];
      if (x.empty() || y.empty()) return;
      for (const int position : common_rows(e, a, loop, executed)) {
        RowNorms norms;
        norms.add(x.row(position), y.row(position));
        pool.add(norms.relative(), {i, position});
      }
    });
    pool.finish_into(all);
  }
}

void add_kv(const RunRecord& expected, const RunRecord& actual, bool key, std::vector<PooledDistance>& all) {
  for (int loop = 1; loop <= kLoops; ++loop) {
    Pool pool(key ? "k" : "v", loop);
    for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
      if (e.kv.empty() || a.kv.empty()) return;
      const std::vector<int> rows = common_rows(e, a, loop);
      for (std::size_t plane = static_cast<std::size_t>(loop - 1); plane < e.kv.size(); plane += kLoops) {
        const Tensor<float>& x = key ? e.kv[plane].k : e.kv[plane].v;
        const Tensor<float>& y = key ? a.kv[plane].k : a.kv[plane].v;
        const auto width = static_cast<std::size_t>(x.extent(2));
        for (const int position : rows) {
          RowNorms norms;
          for (std::int64_t head = 0; head < x.extent(0); ++head) {
            const std::size_t at = static_cast<std::size_t>(position) * width;
            norms.add(x.row(head).subspan(at, width), y.row(head).subspan(at, width));
          }
          pool.add(norms.relative(), {i, position, static_cast<int>(plane) / kLoops});
        }
      }
    });
    pool.finish_into(all);
  }
}

void add_gate(const RunRecord& expected, const RunRecord& actual, std::vector<PooledDistance>& all) {
  for (int loop = 1; loop <= kLoops; ++loop) {
    Pool pool("gate", loop);
    for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
      if (e.gate.empty() || a.gate.empty()) return;
      const auto at = static_cast<std::size_t>(loop - 1);
      for (const int position : common_rows(e, a, loop)) {
        pool.add(std::fabs(double{a.gate.row(position)[at]} - double{e.gate.row(position)[at]}), {i, position});
      }
    });
    pool.finish_into(all);
  }
}

void add_scores(const RunRecord& expected, const RunRecord& actual, std::vector<PooledDistance>& all) {
  for (int loop = 3; loop <= 4; ++loop) {
    Pool pool("score", loop);
    for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
      const auto &x = e.scores[static_cast<std::size_t>(loop - 3)], &y = a.scores[static_cast<std::size_t>(loop - 3)];
      for (std::size_t p = 0; p < std::min(x.size(), y.size()); ++p) {
        if (!std::isnan(x[p]) && !std::isnan(y[p])) pool.add(std::fabs(double{y[p]} - double{x[p]}), {i, static_cast<int>(p)});
      }
    });
    pool.finish_into(all);
  }
}

void add_mass(const RunRecord& expected, const RunRecord& actual, std::vector<PooledDistance>& all) {
  Pool pool("mass", 2);
  for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
    for (std::size_t step = 0; step < std::min(e.keys.size(), a.keys.size()); ++step) {
      const Tensor<float>&x = e.keys[step].mass, &y = a.keys[step].mass;
      if (x.empty() || y.empty()) continue;
      for (std::int64_t layer = 0; layer < x.extent(0); ++layer) {
        for (std::size_t head = 0; head < x.row(layer).size(); ++head) {
          pool.add(std::fabs(double{y.row(layer)[head]} - double{x.row(layer)[head]}),
                   {i, e.prompt_length + static_cast<int>(step), static_cast<int>(layer), static_cast<int>(head)});
        }
      }
    }
  });
  pool.finish_into(all);
}

void add_codes(const RunRecord& expected, const RunRecord& actual, std::vector<PooledDistance>& all) {
  const auto share = [](const Tensor<std::uint8_t>& x, const Tensor<std::uint8_t>& y) {
    std::int64_t different = 0;
    for (std::size_t i = 0; i < x.data.size(); ++i) different += x.data[i] != y.data[i];
    return static_cast<double>(different) / static_cast<double>(x.data.size());
  };
  for (int loop = 1; loop <= kLoops; ++loop) {
    Pool pool("codes", loop);
    for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
      for (std::size_t block = 0; block < std::min(e.blocks.size(), a.blocks.size()); ++block) {
        const CodecStream& x = e.blocks[block].streams[static_cast<std::size_t>(loop - 1)];
        const CodecStream& y = a.blocks[block].streams[static_cast<std::size_t>(loop - 1)];
        if (x.rows != y.rows) continue;  // other selections: other groups
        for (std::size_t layer = 0; layer < std::min(x.layers.size(), y.layers.size()); ++layer) {
          const DistancePlace place{i, e.blocks[block].positions.begin, static_cast<int>(layer)};
          pool.add(share(x.layers[layer].k_codes, y.layers[layer].k_codes), place);
          pool.add(share(x.layers[layer].v_codes, y.layers[layer].v_codes), place);
        }
      }
    });
    pool.finish_into(all);
  }
}

void add_logits(const RunRecord& expected, const RunRecord& actual, std::vector<PooledDistance>& all) {
  Pool largest("logits", -1), kl("kl", -1), top1("top1", -1);
  for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
    if (e.logits.empty() || a.logits.empty()) return;
    for (std::int64_t row = 0; row < e.logits.extent(0); ++row) {
      // Logits of other loops are another decision, not a distance.
      const auto step = static_cast<std::size_t>(row) - 1;
      if (row > 0 && step < e.exit_depths.size() && step < a.exit_depths.size() && e.exit_depths[step] != a.exit_depths[step]) continue;
      const std::span<const float> x = e.logits.row(row), y = a.logits.row(row);
      const DistancePlace place{i, e.prompt_length - 1 + static_cast<int>(row)};
      double difference = 0.0;
      for (std::size_t v = 0; v < x.size(); ++v) {
        const double d = std::fabs(double{y[v]} - double{x[v]});
        if (!(d <= difference)) difference = d;  // NaN stays
      }
      largest.add(difference, place);
      kl.add(std::isfinite(difference) ? kl_divergence(x, y) : difference, place);
      top1.add(argmax_lowest_id(x) == argmax_lowest_id(y) ? 0.0 : 1.0, place);
    }
  });
  largest.finish_into(all);
  kl.finish_into(all);
  top1.finish_into(all);
}

}  // namespace

std::string DistancePlace::text() const {
  std::string text;
  const auto add = [&](const char* name, int value) {
    if (value >= 0) text += std::string(text.empty() ? "" : " ") + name + " " + std::to_string(value);
  };
  add("request", request);
  add("position", position);
  add("layer", layer);
  add("head", head);
  return text;
}

double PooledDistance::mean() const {
  return ascending.empty() ? 0.0 : std::accumulate(ascending.begin(), ascending.end(), 0.0) / static_cast<double>(ascending.size());
}

Executed executed_loops(const RequestRecord& record, bool selects_tokens) {
  Executed executed;
  const auto prompt = static_cast<std::size_t>(record.prompt_length), fed = static_cast<std::size_t>(record.fed);
  for (std::size_t depth = 0; depth < kLoops; ++depth) {
    auto& flags = executed[depth];
    flags.assign(prompt + fed, 1);
    if (depth >= 2 && selects_tokens) {
      std::fill_n(flags.begin(), prompt, std::uint8_t{0});
      for (const std::int32_t position : record.active[depth - 2]) {
        if (position >= 0 && position < record.prompt_length) flags[static_cast<std::size_t>(position)] = 1;
      }
    }
    for (std::size_t j = 0; j < std::min(fed, record.exit_depths.size()); ++j) flags[prompt + j] = record.exit_depths[j] > depth;
  }
  return executed;
}

Executed executed_loops(const RequestRecord& record) {
  return executed_loops(record, !record.active[0].empty() || !record.active[1].empty());
}

std::string shape_difference(const RunRecord& expected, const RunRecord& actual) {
  if (expected.requests.size() != actual.requests.size()) {
    return std::to_string(actual.requests.size()) + " requests, expected " + std::to_string(expected.requests.size());
  }
  std::string fault;
  for_each_request(expected, actual, [&](int i, const RequestRecord& e, const RequestRecord& a) {
    const auto number = [&](const char* what, std::int64_t x, std::int64_t y) {
      if (fault.empty() && x != y)
        fault = "request " + std::to_string(i) + ": " + what + " is " + std::to_string(y) + ", expected " + std::to_string(x);
    };
    const auto extents = [&](const std::string& what, const std::vector<std::int64_t>& x, const std::vector<std::int64_t>& y,
                             bool optional) {
      if (!fault.empty() || x == y || (optional && (x.empty() || y.empty()))) return;
      fault = "request " + std::to_string(i) + ": " + what + " has extents " + extents_text(y) + ", expected " + extents_text(x);
    };
    number("prompt length", e.prompt_length, a.prompt_length);
    number("number of forwarded tokens", e.fed, a.fed);
    extents("logits", e.logits.shape, a.logits.shape, true);
    extents("gate", e.gate.shape, a.gate.shape, true);
    for (std::size_t loop = 0; loop < kLoops; ++loop)
      extents("hidden of loop " + std::to_string(loop + 1), e.hidden[loop].shape, a.hidden[loop].shape, true);
    if (!e.kv.empty() && !a.kv.empty()) {
      number("number of K/V planes", std::ssize(e.kv), std::ssize(a.kv));
      for (std::size_t plane = 0; fault.empty() && plane < e.kv.size(); ++plane) {
        extents("K of plane " + std::to_string(plane), e.kv[plane].k.shape, a.kv[plane].k.shape, false);
        extents("V of plane " + std::to_string(plane), e.kv[plane].v.shape, a.kv[plane].v.shape, false);
      }
    }
    for (std::size_t step = 0; step < std::min(e.keys.size(), a.keys.size()); ++step) {
      const StepKeys &x = e.keys[step], &y = a.keys[step];
      const std::string what = "of step " + std::to_string(step);
      extents("mass " + what, x.mass.shape, y.mass.shape, true);
      for (std::size_t layer = 0; layer < std::min(x.layers.size(), y.layers.size()); ++layer) {
        extents("keys " + what + ", layer " + std::to_string(layer), x.layers[layer].shape, y.layers[layer].shape, false);
      }
    }
    for (std::size_t block = 0; block < std::min(e.blocks.size(), a.blocks.size()); ++block) {
      for (std::size_t stream = 0; stream < kLoops; ++stream) {
        const CodecStream &x = e.blocks[block].streams[stream], &y = a.blocks[block].streams[stream];
        if (x.rows != y.rows) continue;
        const std::string what = " codes of block " + std::to_string(block) + ", stream " + std::to_string(stream + 1);
        for (std::size_t layer = 0; layer < std::min(x.layers.size(), y.layers.size()); ++layer) {
          extents("K" + what, x.layers[layer].k_codes.shape, y.layers[layer].k_codes.shape, false);
          extents("V" + what, x.layers[layer].v_codes.shape, y.layers[layer].v_codes.shape, false);
        }
      }
    }
  });
  return fault;
}

std::vector<PooledDistance> pooled_distances(const RunRecord& expected, const RunRecord& actual) {
  std::vector<PooledDistance> all;
  add_hidden(expected, actual, true, all);
  add_hidden(expected, actual, false, all);
  add_kv(expected, actual, true, all);
  add_kv(expected, actual, false, all);
  add_gate(expected, actual, all);
  add_scores(expected, actual, all);
  add_mass(expected, actual, all);
  add_codes(expected, actual, all);
  add_logits(expected, actual, all);
  return all;
}

}  // namespace loopgauge::harness
