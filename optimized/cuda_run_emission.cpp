// SPDX-License-Identifier: Apache-2.0
#include "optimized/cuda_run.hpp"

#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/ops/head_argmax.cuh"

namespace loopgauge::optimized {
namespace {

void copy_on_device(void* target, const void* source, std::size_t bytes, cudaStream_t stream) {
  if (bytes != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

// Logits of the rows that were committed in this step and, in a free run, the tokens they choose.
void CudaRun::emit_pending() {
  if (pending_emissions_.empty()) return;
  const std::vector<Emission> emissions = std::exchange(pending_emissions_, {});
  const int rows = static_cast<int>(emissions.size());
  Bfloat16* states = emitted_states_.reserve<Bfloat16>(emissions.size() * static_cast<std::size_t>(model_.hidden));
  for (std::size_t i = 0; i < emissions.size(); ++i) {
    copy_on_device(states + i * static_cast<std::size_t>(model_.hidden), decode_state(*emissions[i].request),
                   static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16), stream_);
  }
  const float* logits = forward_.logits(states, rows);
  auto* choices = emitted_tokens_.reserve<HeadChoice>(emissions.size());
  head_argmax(logits, choices, rows, model_.vocab, stream_);
  const std::vector<HeadChoice> chosen = read(choices, emissions.size());
  check_numeric_fault();
  const auto vocab = static_cast<std::size_t>(model_.vocab);
  for (std::size_t i = 0; i < emissions.size(); ++i) {
    RequestState& s = *emissions[i].request;
    const int position = emissions[i].position;
    if (chosen[i].first_non_finite >= 0) {
      throw NumericError(s.name() + ", position " + std::to_string(position) + ": logit of token " + std::to_string(chosen[i].first_non_finite) +
                         " is not finite");
    }
    if (options_.record.logits || options_.tap != nullptr) {
      const std::vector<float> row = read(logits + i * vocab, vocab);
      tap_row("logits", s, position < s.prompt_length ? config_.loops() : s.row.last_loop, -1, position, row);
      if (options_.record.logits) s.record.logits.data.insert(s.record.logits.data.end(), row.begin(), row.end());
    }
    s.record.encoded_frontier.push_back(s.encoded);
    if (!s.request->teacher_forced() && static_cast<int>(s.record.tokens.size()) < s.request->max_new_tokens) {
      s.record.tokens.push_back(chosen[i].token);
      s.stopped = chosen[i].token == s.request->eos_token_id;
    }
    if (s.stopped || s.record.fed == s.fed_limit()) finish_request(s);
  }
}

}  // namespace loopgauge::optimized
