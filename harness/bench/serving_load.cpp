// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/serving_load.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

// The standard library's distributions differ from one implementation to another; its engines do not.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t count) { return engine_() % count; }
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  // Seconds in whole microseconds, so that no library's logarithm shows in a schedule.
  double gap(double rate) { return std::round(-std::log1p(-unit()) / rate * 1e6) * 1e-6; }

 private:
  std::mt19937_64 engine_;
};

void require(bool holds, const std::string& message) {
  if (!holds) throw ConfigError(message);
}

}  // namespace

ServingLoad make_load(const LoadOptions& options, int vocab_size) {
  const std::string load = "load " + options.name + ": ";
  require(options.requests >= 1, load + std::to_string(options.requests) + " requests are none, at least one");
  require(options.requests_per_s >= 0 && std::isfinite(options.requests_per_s), load + "requests per second must be 0 (all at once) or more");
  require(options.new_tokens >= 1, load + std::to_string(options.new_tokens) + " new tokens are none, at least one");
  require(!options.prompt_tokens.empty() && *std::min_element(options.prompt_tokens.begin(), options.prompt_tokens.end()) >= 1,
          load + "a prompt has at least one token");
  require(options.cancelled >= 0 && options.cancelled <= options.requests, load + "requests that are given up must be some of all requests");
  require(options.oversized >= 0 && (options.oversized == 0 || options.oversized_tokens >= 1), load + "an oversized prompt has at least one token");

  Random random(options.seed);
  ServingLoad result;
  result.name = options.name;
  result.oversized.resize(static_cast<std::size_t>(options.requests + options.oversized));
  result.trace.name = "load-" + options.name;
  result.trace.source = "loopgauge bench e2e, seed " + std::to_string(options.seed);
  result.trace.vocab_size = vocab_size;
  const int count = options.requests + options.oversized;
  std::vector<int> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  // Of the shuffled requests the first are oversized, and the next are given up.
  std::vector<bool>& oversized = result.oversized;
  std::vector<bool> cancelled(order.size());
  for (int i = 0; i < options.oversized + options.cancelled; ++i)
    (i < options.oversized ? oversized : cancelled)[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = true;

  double time = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && options.requests_per_s > 0) time += random.gap(options.requests_per_s);
    TraceRequest request;
    request.id = static_cast<int>(i);
    request.max_new_tokens = options.new_tokens;
    request.seed = options.seed;
    const int drawn = options.prompt_tokens[random.below(options.prompt_tokens.size())];
    const int length = oversized[i] ? options.oversized_tokens : drawn;
    for (int p = 0; p < length; ++p) request.prompt.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(vocab_size))));
    result.trace.requests.push_back(std::move(request));
    result.arrival_s.push_back(time);
    const double patience = random.unit() * options.patience_s;
    result.cancel_s.push_back(cancelled[i] ? time + patience : kNever);
  }
  return result;
}

ServingLoad half_of(const ServingLoad& load, int part) {
  ServingLoad half;
  half.name = load.name;
  half.trace = load.trace;
  half.trace.requests.clear();
  for (std::size_t i = static_cast<std::size_t>(part); i < load.trace.requests.size(); i += 2) {
    half.trace.requests.push_back(load.trace.requests[i]);
    half.arrival_s.push_back(load.arrival_s[i]);
    half.cancel_s.push_back(load.cancel_s[i]);
    half.oversized.push_back(load.oversized[i]);
  }
  return half;
}

}  // namespace loopgauge::harness
