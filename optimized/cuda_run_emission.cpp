// SPDX-License-Identifier: Apache-2.0
// Logits, and the tokens that they choose.
#include <algorithm>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/ops/compact_rows.cuh"

namespace loopgauge::optimized {

// Logits of the rows that were completed in this step. In a free run the token stays on the device, where its successor row embeds it; the
// host reads it later.
void CudaRun::emit_pending() {
  if (pending_emissions_.empty()) return;
  const std::vector<Emission> emissions = std::exchange(pending_emissions_, {});
  const int rows = static_cast<int>(emissions.size());
  const auto hidden = static_cast<std::size_t>(model_.hidden), vocab = static_cast<std::size_t>(model_.vocab);
  Bfloat16* states = emitted_states_.reserve<Bfloat16>(emissions.size() * hidden);
  std::vector<std::int32_t> indices;  // of states, then of chosen tokens
  for (const Emission& emission : emissions) indices.push_back(emission.request->slot * live_rows());
  for (const Emission& emission : emissions) indices.push_back(emission.request->request->teacher_forced() ? -1 : emission.request->slot);
  const std::int32_t* const sources = emitted_indices_.upload<std::int32_t>(indices, ticket_->arena, stream_);
  gather_rows(decode_states_.as<Bfloat16>(), sources, states, rows, model_.hidden, stream_);
  const float* logits = forward_.logits(states, rows);
  auto* choices = emitted_choices_.reserve<HeadChoice>(emissions.size());
  head_argmax(logits, choices, rows, model_.vocab, stream_);
  if (std::any_of(emissions.begin(), emissions.end(), [](const Emission& emission) { return samples(*emission.request); })) {
    std::vector<TokenDraw> draws(emissions.size());
    for (std::size_t i = 0; i < emissions.size(); ++i) {
      const RequestState& s = *emissions[i].request;
      if (!samples(s)) continue;
      draws[i].temperature = s.request->temperature;
      draws[i].draw = uniform(s, emissions[i].position + 1, SamplingPurpose::target);
    }
    draw(logits, choices, nullptr, draws);
  }
  keep_tokens(choices, sources + rows, chosen_tokens_.as<std::int32_t>(), rows, stream_);
  if (runs_ahead()) start_speculating(emissions, choices);
  const HeadChoice* chosen = download(choices, emissions.size());
  for (std::size_t i = 0; i < emissions.size(); ++i) {
    const Emission& emission = emissions[i];
    const float* row = options_.record.logits || options_.tap != nullptr ? download(logits + i * vocab, vocab) : nullptr;
    const ExitState* exit = emission.depth == 0 ? download(exits_.as<ExitState>() + emission.request->slot, 1) : nullptr;
    on_delivery([this, emission, exit, choice = chosen + i, row] {
      deliver_emission(emission, exit == nullptr ? emission.depth : std::min(exit->last_loop, config_.loops()), *choice, row);
    });
  }
}

// Rows with a temperature draw their token, or judge their candidate. Distributions that nobody wants to keep share one workspace.
void CudaRun::draw(const float* logits, HeadChoice* choices, std::int32_t* confirmed, std::span<TokenDraw> draws) {
  const auto vocab = static_cast<std::size_t>(model_.vocab);
  float* distributions = distributions_.reserve<float>(draws.size() * vocab);
  for (std::size_t i = 0; i < draws.size(); ++i) {
    if (draws[i].distribution == nullptr) draws[i].distribution = distributions + i * vocab;
  }
  draw_tokens(logits, token_draws_.upload<TokenDraw>(draws, ticket_->arena, stream_), choices, confirmed, static_cast<int>(draws.size()), model_.vocab,
              stream_);
}

// The row is committed: the token that it was fed is known to be no later than the end of the sequence (S-ASYNC-2).
void CudaRun::deliver_emission(const Emission& emission, int depth, const HeadChoice& choice, const float* logits) {
  RequestState& s = *emission.request;
  if (s.finished) return;
  const int position = emission.position;
  if (choice.first_non_finite >= 0) {
    throw NumericError(s.name() + ", position " + std::to_string(position) + ": logit of token " + std::to_string(choice.first_non_finite) +
                       " is not finite");
  }
  if (position >= s.prompt_length) {
    s.record.exit_depths.push_back(static_cast<std::uint8_t>(depth));
    ++s.record.fed;
    counters_.unused_statistics_rows += config_.s().enabled && depth == 2;
    for (int loop = 3; emission.depth == 0 && loop <= depth && s.slot >= 0; ++loop) {
      kv_.note_active(s.slot, loop, std::span<const std::int32_t>(&position, 1));
    }
  }
  if (logits != nullptr) {
    const std::span<const float> row(logits, static_cast<std::size_t>(model_.vocab));
    tap_row("logits", s, depth, -1, position, row);
    if (options_.record.logits) s.record.logits.data.insert(s.record.logits.data.end(), row.begin(), row.end());
  }
  s.record.encoded_frontier.push_back(frontier_rule(s, position + 1));
  if (!s.request->teacher_forced() && static_cast<int>(s.record.tokens.size()) < s.request->max_new_tokens) {
    s.record.tokens.push_back(choice.token);
    s.stopped = choice.token == s.request->eos_token_id;
  }
  if (s.stopped || s.record.fed == s.fed_limit()) finish_request(s);
}

}  // namespace loopgauge::optimized
