// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/acceptance.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

namespace loopgauge::harness {
namespace {

AcceptanceRow& row_at(std::vector<AcceptanceRow>& rows, int index) {
  while (std::ssize(rows) <= index) rows.push_back({.draft_position = std::ssize(rows)});
  return rows[static_cast<std::size_t>(index)];
}

std::string round_fault(const SpeculationRound& round, const Speculation& speculation, int position, bool last, bool free_run) {
  const int most = speculation.kind == SpeculationKind::block ? speculation.draft_length : 1;
  if (round.position != position) return "begins at position " + std::to_string(round.position) + ", expected " + std::to_string(position);
  if (round.proposed < 0 || round.proposed > most)
    return "proposed " + std::to_string(round.proposed) + " candidates of at most " + std::to_string(most);
  if (round.accepted < 0 || round.accepted > round.proposed) {
    return "accepted " + std::to_string(round.accepted) + " of " + std::to_string(round.proposed) + " candidates";
  }
  // A commit of a pipeline is of one token, whatever its child.
  const int emitted = speculation.kind == SpeculationKind::block ? round.accepted + 1 : 1;
  const bool cut = speculation.kind == SpeculationKind::block && last && free_run && round.accepted > 0 && round.emitted == round.accepted;
  if (round.emitted != emitted && !cut) {
    return "emitted " + std::to_string(round.emitted) + " tokens with " + std::to_string(round.accepted) + " candidates accepted";
  }
  return {};
}

}  // namespace

std::vector<AcceptanceRow> acceptance_rows(const RunRecord& record, const RunRecord* serial) {
  std::vector<AcceptanceRow> rows;
  for (std::size_t i = 0; i < record.requests.size(); ++i) {
    const RequestRecord& request = record.requests[i];
    bool same_text = serial != nullptr && i < serial->requests.size();
    for (const SpeculationRound& round : request.rounds) {
      for (int index = 0; index < round.proposed; ++index) {
        AcceptanceRow& row = row_at(rows, index);
        ++row.drafted;
        row.accepted += index < round.accepted ? 1 : 0;
      }
      if (round.emitted > 0) ++row_at(rows, round.emitted - 1).rounds_emitting_this_many;
      for (int index = 0; index < round.emitted && same_text; ++index) {
        const auto token = static_cast<std::size_t>(round.position - request.prompt_length + index + 1);
        const auto& expected = serial->requests[i].tokens;
        if (token >= request.tokens.size() || (token < expected.size() && request.tokens[token] == expected[token])) continue;
        ++row_at(rows, index).verifier_serial_divergences;
        same_text = false;
      }
    }
  }
  return rows;
}

std::string rounds_fault(const Plan& plan, const Trace& trace, const RunRecord& record) {
  std::int64_t rounds = 0, committed = 0;
  bool all_completed = true;
  for (std::size_t i = 0; i < record.requests.size(); ++i) {
    const RequestRecord& request = record.requests[i];
    int position = request.prompt_length;
    for (std::size_t r = 0; r < request.rounds.size(); ++r) {
      const bool last = r + 1 == request.rounds.size();
      const std::string fault = round_fault(request.rounds[r], plan.speculation, position, last, !trace.requests[i].teacher_forced());
      if (!fault.empty()) return "request " + std::to_string(i) + " round " + std::to_string(r) + ": " + fault;
      position += request.rounds[r].emitted;
    }
    if (position != request.prompt_length + request.fed) {
      return "request " + std::to_string(i) + ": its rounds emitted " + std::to_string(position - request.prompt_length) +
             " tokens and it fed " + std::to_string(request.fed);
    }
    rounds += std::ssize(request.rounds);
    committed += request.fed;
    all_completed &= request.outcome == RequestOutcome::completed;
  }
  const RunCounters& c = record.counters;
  const std::int64_t kept = c.draft_rows + c.verify_rows - c.rejected_rows;
  if (all_completed ? c.speculation_rounds != rounds : c.speculation_rounds < rounds) {
    return std::to_string(c.speculation_rounds) + " rounds counted, " + std::to_string(rounds) + " recorded";
  }
  if (all_completed ? kept != committed * kLoops : kept < committed * kLoops) {
    return "drafts and verification executed " + std::to_string(c.draft_rows) + " + " + std::to_string(c.verify_rows) + " rows, of which " +
           std::to_string(c.rejected_rows) + " were not committed: not 4 loops of " + std::to_string(committed) + " committed rows";
  }
  return {};
}

std::string rounds_text(const RunRecord& record) {
  std::int64_t rounds = 0, emitted = 0, proposed = 0, accepted = 0;
  for (const RequestRecord& request : record.requests) {
    for (const SpeculationRound& round : request.rounds) {
      ++rounds;
      emitted += round.emitted;
      proposed += round.proposed;
      accepted += round.accepted;
    }
  }
  std::array<char, 32> mean{};
  std::snprintf(mean.data(), mean.size(), "%.2f", rounds == 0 ? 0.0 : static_cast<double>(emitted) / static_cast<double>(rounds));
  return std::to_string(rounds) + (rounds == 1 ? " round, " : " rounds, ") + mean.data() + " tokens a round, " + std::to_string(accepted) +
         " of " + std::to_string(proposed) + " candidates accepted";
}

}  // namespace loopgauge::harness
