// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/memory_model.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::int64_t kBfloat16Bytes = 2;
constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kGroupParameterBytes = 4;  // FP16 minimum, FP16 scale

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr std::array kKvCategories{MemoryCategory::base_payload,        MemoryCategory::residual_payload, MemoryCategory::parameters,
                                   MemoryCategory::activity_maps,       MemoryCategory::bf16_tail,        MemoryCategory::bf16_planes,
                                   MemoryCategory::inherited_references};

std::int64_t kv_sum(const std::array<std::int64_t, kMemoryCategories>& bytes) {
  std::int64_t sum = 0;
  for (const MemoryCategory category : kKvCategories) sum += bytes[static_cast<std::size_t>(category)];
  return sum;
}

class Account {
 public:
  void add(MemoryCategory category, std::int64_t logical, std::int64_t physical) {
    const auto at = static_cast<std::size_t>(category);
    bytes_.logical[at] += logical;
    bytes_.physical[at] += logical;
    bytes_.physical[static_cast<std::size_t>(MemoryCategory::padding)] += physical - logical;
    if (std::find(kKvCategories.begin(), kKvCategories.end(), category) != kKvCategories.end()) bytes_.kv_padding += physical - logical;
  }
  void add(MemoryCategory category, std::int64_t bytes) { add(category, bytes, bytes); }
  const MemoryBytes& bytes() const { return bytes_; }

 private:
  MemoryBytes bytes_;
};

// Which rows of a request executed which loop, recorded or by budget.
class Rows {
 public:
  Rows(const EffectiveConfig& config, const RequestMemory& request) {
    for (int loop = 1; loop <= kLoops; ++loop) {
      auto& ran = prefix_[static_cast<std::size_t>(loop - 1)];
      std::vector<std::uint8_t> mark(static_cast<std::size_t>(request.committed), 1);
      if (loop >= 3 && config.selects_tokens()) {
        std::fill(mark.begin(), mark.begin() + request.prompt_length, std::uint8_t{0});
        for (const int p : active(config, request, loop)) mark.at(static_cast<std::size_t>(p)) = 1;
      }
      for (int j = 0; j < request.committed - request.prompt_length && !request.exit_depths.empty(); ++j) {
        if (j < static_cast<int>(request.exit_depths.size()) && request.exit_depths[static_cast<std::size_t>(j)] < loop) {
          mark[static_cast<std::size_t>(request.prompt_length + j)] = 0;
        }
      }
      ran.assign(mark.size() + 1, 0);
      for (std::size_t p = 0; p < mark.size(); ++p) ran[p + 1] = ran[p] + mark[p];
    }
  }

  std::int64_t count(int loop, int begin, int end) const {
    const auto& ran = prefix_[static_cast<std::size_t>(loop - 1)];
    return ran[static_cast<std::size_t>(end)] - ran[static_cast<std::size_t>(begin)];
  }

 private:
  static std::vector<std::int32_t> active(const EffectiveConfig& config, const RequestMemory& request, int loop) {
    const auto& recorded = request.active[static_cast<std::size_t>(loop - 3)];
    if (!recorded.empty()) return recorded;
    std::vector<std::int32_t> spread;
    const auto& retention = config.t().retention_bp;
    for (int w = 0; w < window_count(request.prompt_length, config.window()); ++w) {
      const PositionRange range = window_range(w, request.prompt_length, config.window());
      int chosen = budget(retention[2], range.size());
      if (loop == 4) chosen = std::min(chosen, budget(retention[3], range.size()));
      for (std::int64_t i = 0; i < chosen; ++i) spread.push_back(range.begin + static_cast<std::int32_t>(i * range.size() / chosen));
    }
    return spread;
  }

  std::array<std::vector<std::int64_t>, kLoops> prefix_;
};

class RequestModel {
 public:
  RequestModel(const ModelConfig& model, const EffectiveConfig& config, const MemoryInput& input, const RequestMemory& request)
      : model_(model), config_(config), input_(input), request_(request), rows_(config, request) {}

  // Sealed blocks of positions [0, frontier).
  void blocks(Account& account, int frontier) const {
    if (frontier == 0) return;
    const std::int64_t tiles = std::int64_t{model_.layers} * model_.heads;
    const std::int64_t parts = ceil_div(model_.head_dim, kGroupSize);
    for (const PositionRange& block : block_cuts(config_, request_.prompt_length, 0, frontier)) {
      for (int loop = 1; loop <= kLoops; ++loop) {
        const std::int64_t n = rows_.count(loop, block.begin, block.end);
        account.add(loop == 1 ? MemoryCategory::base_payload : MemoryCategory::residual_payload,
                    tiles * n * 2 * ceil_div(model_.head_dim, 2));
        account.add(MemoryCategory::parameters, tiles * kGroupParameterBytes * (ceil_div(n, kGroupSize) * model_.head_dim + n * parts));
      }
    }
  }

  // BF16 rows of positions [begin, end) in the planes of all loops (four, or fewer with all switches off).
  void planes(Account& account, int begin, int end) const {
    if (begin >= end) return;
    const std::int64_t row = std::int64_t{model_.layers} * model_.projection_width() * 2 * kBfloat16Bytes;
    std::int64_t executed = 0, pages = 0;
    for (int loop = 1; loop <= config_.loops(); ++loop) {
      executed += rows_.count(loop, begin, end);
      // A plane has the pages in which a row executed its loop; a page that the frontier cuts stays whole.
      for (int page = begin / kPageTokens; page < ceil_div(end, kPageTokens); ++page) {
        pages += rows_.count(loop, page * kPageTokens, std::min((page + 1) * kPageTokens, end)) > 0;
      }
    }
    account.add(config_.q().enabled ? MemoryCategory::bf16_tail : MemoryCategory::bf16_planes, executed * row, pages * kPageTokens * row);
  }

  void tables(Account& account) const {
    const std::int64_t pages = ceil_div(request_.committed, kPageTokens);
    const std::int64_t capacity = ceil_div(std::max(request_.capacity, request_.committed), kPageTokens);
    const bool exits = config_.exit().mode != ExitMode::full;
    const int streams = exits ? 3 : config_.selects_tokens() ? 2 : 0;
    account.add(MemoryCategory::activity_maps, pages * streams * (8 + 4), capacity * kActivityMapEntryBytes);
    account.add(MemoryCategory::inherited_references, pages * kPageTableEntryBytes, capacity * kPageTableEntryBytes);
  }

  void reference_state(Account& account) const {
    if (!config_.s().enabled) return;
    const std::int64_t states = std::int64_t{input_.live_tokens} * model_.layers * model_.heads;
    const std::int64_t vectors = 2 * model_.head_dim * kFloatBytes;  // O_ref, C_ref
    const std::int64_t positions = std::max(request_.capacity, request_.committed);
    account.add(MemoryCategory::attention_reference_state, states * (8 * ceil_div(request_.committed, kPageTokens) + kFloatBytes + vectors),
                states * (8 * ceil_div(positions, kPageTokens) + 3 * kFloatBytes + vectors));
  }

  void hidden_rows(Account& account, std::int64_t rows) const {
    account.add(MemoryCategory::hidden_rows, rows * model_.hidden * kBfloat16Bytes);
  }

  void steady(Account& account) const {
    const int frontier = encoded_frontier(config_, request_.prompt_length, request_.committed);
    blocks(account, frontier);
    planes(account, frontier, request_.committed);
    tables(account);
    reference_state(account);
    hidden_rows(account, input_.live_tokens);
  }

  // The last prompt positions have executed loop 4 and their blocks are written, but no BF16 row has been given back: the whole prompt
  // where prefill reads BF16, otherwise the windows in flight and the part of the prompt that no full window covers.
  void end_of_prefill(Account& account) const {
    const int prompt = request_.prompt_length;
    const int frontier = encoded_frontier(config_, prompt, prompt);
    int kept = 0;
    if (config_.q().enabled && config_.q().policy == EncodingPolicy::streaming) {
      kept = std::max(0, frontier - input_.windows_in_flight * config_.window());
    }
    blocks(account, frontier);
    planes(account, kept, prompt);
    tables(account);
    reference_state(account);
    const std::int64_t window_rows = std::min(prompt, input_.windows_in_flight * config_.window());
    hidden_rows(account, window_rows * (config_.selects_tokens() ? 2 : 1));
  }

 private:
  const ModelConfig& model_;
  const EffectiveConfig& config_;
  const MemoryInput& input_;
  const RequestMemory& request_;
  Rows rows_;
};

void add_shared(Account& account, const ModelConfig& model, const RuntimeReservation& runtime) {
  account.add(MemoryCategory::weights, weight_bytes(model));
  account.add(MemoryCategory::graphs, runtime.graphs);
  account.add(MemoryCategory::workspace, runtime.workspace);
  account.add(MemoryCategory::conversion_scratch, runtime.conversion_scratch);
  account.add(MemoryCategory::transfer_buffers, runtime.transfer_buffers);
}

// All requests steady but `prefilling`, which is at the end of its prefill; -1: none.
MemoryBytes account_for(const ModelConfig& model, const EffectiveConfig& config, const MemoryInput& input, int prefilling) {
  Account account;
  add_shared(account, model, input.runtime);
  for (std::size_t i = 0; i < input.requests.size(); ++i) {
    const RequestModel request(model, config, input, input.requests[i]);
    if (static_cast<int>(i) == prefilling) {
      request.end_of_prefill(account);
    } else {
      request.steady(account);
    }
  }
  return account.bytes();
}

}  // namespace

std::int64_t MemoryBytes::logical_total() const { return std::accumulate(logical.begin(), logical.end(), std::int64_t{0}); }
std::int64_t MemoryBytes::physical_total() const { return std::accumulate(physical.begin(), physical.end(), std::int64_t{0}); }
std::int64_t MemoryBytes::logical_kv() const { return kv_sum(logical); }
std::int64_t MemoryBytes::physical_kv() const { return kv_sum(physical) + kv_padding; }

double MemoryPrediction::kv_ratio_logical() const {
  return static_cast<double>(dense.logical_kv()) / static_cast<double>(steady.logical_kv());
}
double MemoryPrediction::kv_ratio_physical() const {
  return static_cast<double>(dense.physical_kv()) / static_cast<double>(steady.physical_kv());
}
double MemoryPrediction::payload_ratio() const {
  const std::int64_t payload = steady.logical_of(MemoryCategory::base_payload) + steady.logical_of(MemoryCategory::residual_payload);
  if (payload == 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(encoded_as_bf16) / static_cast<double>(payload);
}

std::int64_t weight_bytes(const ModelConfig& model) {
  const std::int64_t width = model.hidden;
  const std::int64_t attention = 4 * width * model.projection_width();
  const std::int64_t mlp = 3 * width * model.intermediate;
  const std::int64_t parameters = 2 * std::int64_t{model.vocab} * width + std::int64_t{model.layers} * (attention + mlp + 4 * width) +
                                  width + width + 1;  // final norm, exit gate and its bias
  const std::int64_t rope_table = std::int64_t{model.max_positions} * model.head_dim;
  return (parameters + rope_table) * kBfloat16Bytes;
}

MemoryPrediction predict_memory(const ModelConfig& model, const EffectiveConfig& config, const MemoryInput& input) {
  MemoryPrediction prediction;
  int longest = -1;
  for (std::size_t i = 0; i < input.requests.size(); ++i) {
    const RequestMemory& request = input.requests[i];
    if (request.prompt_length < 1 || request.committed < request.prompt_length) {
      throw InternalError("memory of request " + std::to_string(i) + ": prompt of " + std::to_string(request.prompt_length) +
                          " tokens, committed length " + std::to_string(request.committed));
    }
    if (longest < 0 || request.prompt_length > input.requests[static_cast<std::size_t>(longest)].prompt_length)
      longest = static_cast<int>(i);
    const std::int64_t row = std::int64_t{model.layers} * model.projection_width() * 2 * kBfloat16Bytes;
    prediction.encoded_as_bf16 += encoded_frontier(config, request.prompt_length, request.committed) * row * kLoops;
  }
  prediction.steady = account_for(model, config, input, -1);
  prediction.peak = account_for(model, config, input, longest);
  if (prediction.peak.physical_total() < prediction.steady.physical_total()) prediction.peak = prediction.steady;

  AlgorithmConfig off;
  off.window = config.window();
  MemoryInput dense_input = input;
  for (RequestMemory& request : dense_input.requests) {
    request.active = {};
    request.exit_depths.clear();
  }
  prediction.dense = account_for(model, EffectiveConfig::resolve(off, model), dense_input, -1);
  return prediction;
}

}  // namespace loopgauge::harness
