// SPDX-License-Identifier: Apache-2.0
// From measurements (harness/compare) to the rows and headline numbers of a report. Pure functions.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "harness/compare/audit.hpp"
#include "harness/compare/drift.hpp"
#include "harness/compare/memory_model.hpp"
#include "harness/compare/record_compare.hpp"
#include "harness/report/report.hpp"
#include "models/run_record.hpp"

namespace loopgauge::harness {

using Digests = std::map<std::string, std::string>;  // harness/io/digest.hpp

inline constexpr std::string_view kAuditCheck = "audit";
inline constexpr std::string_view kEqualsSerialCheck = "equals_serial";
inline constexpr std::string_view kRepeatWithTapsCheck = "repeat_with_taps";
inline constexpr std::string_view kEqualsCleanCheck = "equals_clean";
inline constexpr std::string_view kQualityCheck = "quality";

CheckRow passed_check(std::string_view name, std::string detail);
CheckRow failed_check(std::string_view name, std::string detail);
CheckRow skipped_check(std::string_view name, std::string reason);
CheckRow not_run_check(std::string_view name, std::string reason);

// Fails with the first finding and the number of others; not_run when no rule applied to anything in the record.
CheckRow audit_check(const AuditResult& result);

// "first divergence: ..." of a comparison that is not identical.
std::string divergence_text(const RecordComparison& comparison);

// failed if any check failed, else not_run if any was not run or nothing passed, else passed; the reason joins the details of the checks
// that decided.
void decide(CaseResult& result);

inline constexpr std::string_view kRunPhase = "run";  // of TimingRow: the whole case
// Adds the phases "draft", "verify" and "accept" of a speculating run that measured them.
void add_speculation_times(std::vector<TimingRow>& timings, const RunRecord& record, std::int64_t repetition);
// Every counter of the run, the zeros included.
void set_counters(CaseResult& result, const RunCounters& counters);
void set_handoffs(CaseResult& result, std::span<const HandoffRecord> handoffs);

std::vector<DigestRow> digest_rows(const Digests& digests);
std::string digest_of(const CaseResult& result, std::string_view group);  // "" when absent

// Fills drift, drift_summary and the headline numbers that come from them.
void set_drift(CaseResult& result, const Drift& drift, const Trace& trace);

// Keeps what a quality report reads and nothing that follows from it: of prose the drift rows whose next token is scored, with KL and
// likelihoods as FP32, which is far below their own noise; of tasks the answers.
void keep_quality_rows(CaseResult& result);
// Passes when there is a scored token and every row of both runs could be compared: none left out, none with a NaN or an infinity.
CheckRow quality_check(const Drift& drift);

// What the accounting model needs to know of a finished run.
MemoryInput memory_input(const RunRecord& record);
// Fills memory and memory_ratio. Categories without bytes have no row.
void set_memory(CaseResult& result, const MemoryPrediction& prediction);

}  // namespace loopgauge::harness
