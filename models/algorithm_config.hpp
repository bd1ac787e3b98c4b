// SPDX-License-Identifier: Apache-2.0
// The three independent FlashLoop switches and everything that goes with them, as requested (AlgorithmConfig) and as resolved
// against a model (EffectiveConfig). The effective configuration is immutable and travels into dumps, reports, snapshots,
// identities and handoffs, so that two results are comparable exactly when their effective configurations are equal.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "models/model_config.hpp"

namespace loopgauge {

inline constexpr int kLoops = 4;            // FlashLoop is defined for exactly four loops
inline constexpr int kBasisPoints = 10000;  // fractions are integers in basis points
inline constexpr int kGroupSize = 64;       // values of one quantization group; also the page and flush size in tokens

enum class EncodingPolicy { fixed_prompt, rolling, streaming };
enum class EncodingTiming { serial_aligned, execution_dependent };
enum class FlushRule { committed, eager };
enum class ExitMode { full, threshold, delayed, trace };
// Ablation (S-TSEL-10): whether the prompt's last position has a slot of its window's budgets, whatever its score. The method has none.
enum class SlotReservation { none, final_prompt_token };

std::string_view to_string(EncodingPolicy policy);
std::string_view to_string(EncodingTiming timing);
std::string_view to_string(FlushRule flush);
std::string_view to_string(ExitMode mode);
std::string_view to_string(SlotReservation reservation);
// Each parser throws ConfigError listing the accepted words.
EncodingPolicy parse_encoding_policy(std::string_view text);
EncodingTiming parse_encoding_timing(std::string_view text);
FlushRule parse_flush_rule(std::string_view text);
SlotReservation parse_slot_reservation(std::string_view text);

struct TokenSparsePrefill {  // switch T
  bool enabled = false;
  std::array<int, kLoops> retention_bp{10000, 10000, 2500, 1000};
  SlotReservation reserve = SlotReservation::none;
};

struct SparseDecodeAttention {  // switch S
  bool enabled = false;
  int key_fraction_bp = 1000;
};

struct KvResidualQuantization {  // switch Q
  bool enabled = false;
  EncodingPolicy policy = EncodingPolicy::rolling;
  EncodingTiming timing = EncodingTiming::serial_aligned;
  FlushRule flush = FlushRule::committed;
  int tail = 64;  // tokens; >= 0
};

struct ExitRule {
  ExitMode mode = ExitMode::full;
  float threshold = 1.0f;  // on the cumulative exit probability; < 1 for an exit to be possible
  int min_loops = 1;
};

struct AlgorithmConfig {
  TokenSparsePrefill token_sparse_prefill;
  SparseDecodeAttention sparse_decode_attention;
  KvResidualQuantization kv_residual_quantization;
  int window = 256;  // selection and block window in tokens, a positive multiple of 64
  ExitRule exit;
};

// "t1s0q1" <-> the three `enabled` flags. Throws ConfigError for another form.
std::string switches_text(const AlgorithmConfig& config);
void apply_switches(AlgorithmConfig& config, std::string_view text);
// "full", "trace", "threshold:0.9", "delayed:0.9". Throws ConfigError for another form; the threshold's range is checked by resolve().
ExitRule parse_exit_rule(std::string_view text);

class EffectiveConfig {
 public:
  // Validates `requested` with `model` and resolves it once. Throws ConfigError naming the field, the value and the accepted range.
  static EffectiveConfig resolve(const AlgorithmConfig& requested, const ModelConfig& model);

  const AlgorithmConfig& values() const { return values_; }
  const TokenSparsePrefill& t() const { return values_.token_sparse_prefill; }
  const SparseDecodeAttention& s() const { return values_.sparse_decode_attention; }
  const KvResidualQuantization& q() const { return values_.kv_residual_quantization; }
  const ExitRule& exit() const { return values_.exit; }
  int window() const { return values_.window; }
  int loops() const { return loops_; }

  // T does selection work: enabled and loop 3 or loop 4 below 10000 (SPEC.md, token-sparse prefill).
  bool selects_tokens() const { return selects_tokens_; }
  // The position of a prompt that is selected whatever its score, in the window that holds it; -1: there is none (S-TSEL-10).
  int reserved_position(int prompt_length) const { return t().reserve == SlotReservation::final_prompt_token ? prompt_length - 1 : -1; }
  std::string switches() const { return switches_text(values_); }
  // One line of sorted JSON: the identity of the configuration.
  std::string canonical_json() const;

  bool operator==(const EffectiveConfig& other) const { return canonical_json() == other.canonical_json(); }

 private:
  EffectiveConfig() = default;
  AlgorithmConfig values_;
  int loops_ = 0;
  bool selects_tokens_ = false;
};

// Integer budgets and frontiers of SPEC.md. They are part of the specification's discrete rules, not of either executor's arithmetic.

// max(1, ceil(bp * count / 10000)) in 64-bit integers.
int budget(int basis_points, int count);

// Half-open ranges of selection windows: window index i covers [i*window, min((i+1)*window, prompt_length)).
struct PositionRange {
  int begin = 0;
  int end = 0;
  int size() const { return end - begin; }
  bool operator==(const PositionRange&) const = default;
};
int window_count(int prompt_length, int window);
PositionRange window_range(int index, int prompt_length, int window);

// Encoded frontier E once `committed` positions are committed, for a prompt of `prompt_length` (committed >= prompt_length: 0 with Q off).
int encoded_frontier(const EffectiveConfig& config, int prompt_length, int committed);
// Block cuts of positions [0, frontier) in position order, for that prompt length (SPEC.md, "Policies").
// `previous_frontier` is the frontier already cut; the result covers [previous_frontier, frontier). A jump over several 64-token
// flushes gives several blocks.
std::vector<PositionRange> block_cuts(const EffectiveConfig& config, int prompt_length, int previous_frontier, int frontier);

}  // namespace loopgauge
