// SPDX-License-Identifier: Apache-2.0
#include "harness/identity_hash.hpp"

#include <bit>

namespace loopgauge::harness {

void IdentityHash::text(std::string_view value) {
  number(static_cast<std::int64_t>(value.size()));
  hash_.update(value.data(), value.size());
}

void IdentityHash::number(std::int64_t value) {
  unsigned char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(value) >> (8 * i));
  hash_.update(bytes, sizeof bytes);
}

void IdentityHash::trace(const Trace& trace) {
  text(trace.name);
  number(trace.vocab_size);
  number(static_cast<std::int64_t>(trace.requests.size()));
  for (const TraceRequest& request : trace.requests) {
    number(request.id);
    number(request.arrival);
    number(request.max_new_tokens);
    number(request.eos_token_id);
    number(static_cast<std::int64_t>(request.seed));
    text(request.task);
    list(request.prompt);
    list(request.forced);
    list(request.exit_depths);
    list(request.answer_mask);
    number(std::bit_cast<std::int32_t>(request.temperature));
    list(request.draft_tokens);
  }
  number(static_cast<std::int64_t>(trace.events.size()));
  for (const TraceEvent& event : trace.events) {
    number(event.submission);
    number(static_cast<int>(event.kind));
    number(event.request);
  }
}

std::string trace_sha256(const Trace& trace) {
  IdentityHash hash;
  hash.trace(trace);
  return hash.hex();
}

}  // namespace loopgauge::harness
