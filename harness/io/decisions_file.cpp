// SPDX-License-Identifier: Apache-2.0
#include "harness/io/decisions_file.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/io/dump_file.hpp"
#include "harness/io/hdf5.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

bool has_exit_rule(const EffectiveConfig& config) {
  return config.exit().mode == ExitMode::threshold || config.exit().mode == ExitMode::delayed;
}

void require_ascending(const h5::Dataset& dataset, std::span<const std::int32_t> values, int end) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= end || (i > 0 && values[i] <= values[i - 1])) {
      dataset.fail("member " + std::to_string(i) + " of a set is " + std::to_string(values[i]) +
                   ", expected ascending positions within 0.." + std::to_string(end - 1));
    }
  }
}

class RequestReader {
 public:
  RequestReader(const h5::Group& group, const TraceRequest& request, const EffectiveConfig& config, const ModelConfig& model,
                FileDecisions& decisions)
      : group_(group), request_(request), config_(config), model_(model), decisions_(decisions) {}

  RequestRecord read() {
    record_.prompt_length = request_.prompt_length();
    if (config_.selects_tokens()) read_tokens();
    if (config_.s().enabled) read_keys();
    if (has_exit_rule(config_)) read_exit_depths();
    return std::move(record_);
  }

 private:
  void read_tokens() {
    const h5::Group active = group_.open_group("active");
    for (int loop = 3; loop <= kLoops; ++loop) {
      const h5::Dataset dataset = active.open_dataset("loop" + std::to_string(loop));
      std::vector<std::int32_t>& set = record_.active[static_cast<std::size_t>(loop - 3)];
      set = dataset.read<std::int32_t>({-1}).data;
      require_ascending(dataset, set, record_.prompt_length);
      for (int window = 0; window < window_count(record_.prompt_length, config_.window()); ++window) {
        const PositionRange range = window_range(window, record_.prompt_length, config_.window());
        const auto count = std::lower_bound(set.begin(), set.end(), range.end) - std::lower_bound(set.begin(), set.end(), range.begin);
        const int expected = budget(config_.t().retention_bp[static_cast<std::size_t>(loop - 1)], range.size());
        if (count != expected) {
          dataset.fail("selects " + std::to_string(count) + " tokens in window " + std::to_string(window) +
                       ", this configuration selects " + std::to_string(expected));
        }
      }
      if (loop == kLoops && !std::includes(record_.active[0].begin(), record_.active[0].end(), set.begin(), set.end())) {
        dataset.fail("selects a token that loop 3 does not");
      }
      ++decisions_.token_sets;
    }
  }

  // Steps that may be forwarded; a free run stops earlier at its end-of-sequence id.
  int steps() const { return fed_tokens(request_); }

  void read_keys() {
    record_.keys.resize(static_cast<std::size_t>(steps()));
    if (!group_.has("keys")) {
      decisions_.steps_without_keys += steps();
      return;
    }
    const h5::Group keys = group_.open_group("keys");
    for (int step = 0; step < steps(); ++step) {
      const std::string name = "step" + std::to_string(step);
      if (keys.has(name) && read_step(keys.open_group(name), step)) {
        ++decisions_.key_steps;
      } else {
        ++decisions_.steps_without_keys;
      }
    }
  }

  bool read_step(const h5::Group& group, int step) {
    for (int layer = 0; layer < model_.layers; ++layer) {
      if (!group.has("layer" + std::to_string(layer))) return false;
    }
    const int context = record_.prompt_length + step + 1;  // the query sees itself and everything before
    const int count = budget(config_.s().key_fraction_bp, context);
    for (int layer = 0; layer < model_.layers; ++layer) {
      const h5::Dataset dataset = group.open_dataset("layer" + std::to_string(layer));
      dataset.allow_only_attributes({});
      Tensor<std::int32_t> chosen = dataset.read<std::int32_t>({model_.heads, count});
      for (int head = 0; head < model_.heads; ++head) require_ascending(dataset, std::as_const(chosen).row(head), context);
      record_.keys[static_cast<std::size_t>(step)].layers.push_back(std::move(chosen));
    }
    return true;
  }

  void read_exit_depths() {
    const h5::Dataset dataset = group_.open_dataset("exit_depths");
    record_.exit_depths = dataset.read<std::uint8_t>({-1}).data;
    if (std::ssize(record_.exit_depths) > request_.max_new_tokens) {
      dataset.fail("has " + std::to_string(record_.exit_depths.size()) + " steps, the trace's request has " +
                   std::to_string(request_.max_new_tokens));
    }
    for (std::size_t step = 0; step < record_.exit_depths.size(); ++step) {
      const int depth = record_.exit_depths[step];
      if (depth != 0 && (depth < config_.exit().min_loops || depth > config_.loops())) {
        dataset.fail("exits after loop " + std::to_string(depth) + " at step " + std::to_string(step) +
                     ", this configuration exits after loops " + std::to_string(config_.exit().min_loops) + " to " +
                     std::to_string(config_.loops()));
      }
      if (depth != 0) ++decisions_.exit_steps;
    }
  }

  const h5::Group& group_;
  const TraceRequest& request_;
  const EffectiveConfig& config_;
  const ModelConfig& model_;
  FileDecisions& decisions_;
  RequestRecord record_;
};

}  // namespace

FileDecisions read_decisions(const std::filesystem::path& path, const Trace& trace, const EffectiveConfig& config,
                             const ModelConfig& model) {
  if (!config.selects_tokens() && !config.s().enabled && !has_exit_rule(config)) {
    throw ConfigError("nothing to force from " + path.string() + ": " + config.switches() +
                      " selects neither tokens nor keys, and no exit rule decides");
  }
  const h5::File file = h5::File::open_readonly(path);
  const h5::Group root = file.root();
  const std::string format = root.string_attribute("format");
  if (format != kDumpFormat && format != kExpectedFormat) {
    root.fail("format is \"" + format + "\", expected \"" + std::string(kDumpFormat) + "\" or \"" + std::string(kExpectedFormat) + "\"");
  }
  require_dump_version(root);
  if (root.has_attribute("trace") && root.string_attribute("trace") != trace.name) {
    root.fail("holds decisions for trace " + root.string_attribute("trace") + ", the run replays " + trace.name);
  }
  const h5::Group requests = root.open_group("requests");
  if (requests.members().size() != trace.requests.size()) {
    requests.fail("holds " + std::to_string(requests.members().size()) + " requests, the trace has " +
                  std::to_string(trace.requests.size()));
  }
  FileDecisions decisions;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const h5::Group group = requests.open_group(std::to_string(i));
    decisions.record.requests.push_back(RequestReader(group, trace.requests[i], config, model, decisions).read());
  }
  if (decisions.token_sets + decisions.key_steps + decisions.exit_steps == 0) root.fail("holds no decision that this configuration makes");
  return decisions;
}

}  // namespace loopgauge::harness
