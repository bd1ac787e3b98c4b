// SPDX-License-Identifier: Apache-2.0
#include "reference/run/delivery.hpp"

#include <algorithm>

#include "models/error.hpp"
#include "reference/run/encoding.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/request_life.hpp"
#include "reference/run/snapshot.hpp"
#include "reference/run/speculation.hpp"

namespace loopgauge::reference {
namespace {

// The last result was read. Rows that ran past the end are discarded; the record is complete; nothing is held any more.
template <class P>
void end_request(RunContext<P>& run, RequestState<P>& s) {
  if (s.phase == RequestState<P>::Phase::preempted) restore(run, s);
  commit_known_rows(run, s);
  RequestStorage<P>& h = *s.held;
  const int length = s.prompt_length + s.record.fed;
  if (h.committed != length) throw InternalError(name(s) + ": results of a row were read before it was committed");
  const auto past_the_end = s.record.executions.begin() + static_cast<std::ptrdiff_t>(length) * kLoops;
  for (auto count = past_the_end; count != s.record.executions.end(); ++count) {
    run.counters.discarded_rows += *count;
    *count = 0;
  }
  drop_blocks_beyond(s, frontier_rule(run, s, length));
  s.late_error.clear();
  s.phase = RequestState<P>::Phase::ended;
  close_record(run, s);
  release(run, s);
}

}  // namespace

template <class P>
void deliver(RunContext<P>& run, RequestState<P>& s, RowResult<typename P::Real> result) {
  if (s.over() || s.generation != result.generation) return;
  const TraceRequest& request = *s.request;
  RequestRecord& record = s.record;
  record.logits.data.insert(record.logits.data.end(), result.logits.begin(), result.logits.end());
  record.encoded_frontier.push_back(frontier_rule(run, s, result.position + 1));
  if (result.position >= s.prompt_length) {
    ++record.fed;
    record.exit_depths.push_back(static_cast<std::uint8_t>(result.depth));
    record.keys.push_back(std::move(result.keys));
  }
  if (result.round) record.rounds.push_back(*result.round);
  bool sequence_ends = record.fed == fed_tokens(request);
  if (!request.teacher_forced() && static_cast<int>(record.tokens.size()) < request.max_new_tokens) {
    record.tokens.push_back(result.token);
    sequence_ends |= result.token == request.eos_token_id;
  }
  if (sequence_ends) {
    end_request(run, s);
    return;
  }
  if (!s.late_error.empty() && token_is_known(s, s.late_error_step)) throw NumericError(s.late_error);
  commit_known_rows(run, s);
}

template <class P>
void release(RunContext<P>& run, RequestState<P>& s) {
  if (s.held != nullptr) {
    retire_reference(run, s);
    give_up_rows(run, s);
  }
  s.held.reset();
  s.snapshot.clear();
}

#define LOOPGAUGE_INSTANTIATE(P)                                                  \
  template void deliver<P>(RunContext<P>&, RequestState<P>&, RowResult<P::Real>); \
  template void release<P>(RunContext<P>&, RequestState<P>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
