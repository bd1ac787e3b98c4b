// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/bench_tables.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>
#include <tuple>

#include "harness/report/terminal_text.hpp"
#include "harness/report/text_table.hpp"
#include "models/algorithm_config.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::string_view kStep = "decode step";
constexpr std::string_view kPrompt = "prefill";

bool is_own(const BenchRow& row) { return row.engine == kOwnEngine; }
bool has_switch(const std::string& setting, std::string_view on) { return setting.find(on) != std::string::npos; }

// The last row of this program of that name; null: none.
const BenchRow* last(const BenchReport& report, std::string_view what, const std::string& setting, std::int64_t context, std::int64_t batch) {
  const BenchRow* found = nullptr;
  for (const BenchRow& row : report.rows) {
    if (is_own(row) && row.what == what && row.setting == setting && row.context == context && row.batch == batch) found = &row;
  }
  return found;
}

double median_of(const BenchRow* row) { return row == nullptr ? kNotMeasured : row->median_us; }

// Attention of all loops of one layer.
double attention_of_a_layer(const BenchReport& report, const std::string& setting, std::int64_t context, std::int64_t batch) {
  const auto time = [&](const char* what) { return median_of(last(report, what, setting, context, batch)); };
  if (has_switch(setting, "s1"))
    return time("attention_decode.loop1") + time("reference_statistics") + time("sparse_correction.loop3") + time("sparse_correction.loop4");
  return time("attention_decode.loop1") + time("attention_decode.loop2") + time("attention_decode.loop3") + time("attention_decode.loop4");
}

std::string with_switch_off(std::string setting, std::string_view on) {
  const std::size_t at = setting.find(on);
  if (at != std::string::npos) setting[at + 1] = '0';
  return setting;
}

// ---- text

std::string number(double value, int decimals) {
  if (std::isnan(value)) return "-";
  return formatted("%.*f", decimals, value);
}
std::string microseconds(double value) { return number(value, 1); }
std::string milliseconds(double us) { return number(us / 1e3, us < 100 ? 4 : us < 1e5 ? 3 : 1); }
std::string times(double ratio) { return std::isnan(ratio) ? "-" : number(ratio, 2) + "x"; }
std::string integer(std::int64_t value) { return std::to_string(value); }
std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }
std::string spread_text(const BenchRow* row) {
  if (row == nullptr || std::isnan(row->minimum_us)) return "-";
  return milliseconds(row->minimum_us) + " to " + milliseconds(row->maximum_us);
}
std::string with_share(double part_us, double whole_us) {
  return std::isnan(part_us) ? "-" : microseconds(part_us) + (std::isnan(whole_us) ? "" : " (" + number(100 * part_us / whole_us, 1) + " %)");
}

BenchTable runs_table(const BenchReport& report) {
  BenchTable table{"runs", "Runs", "Ceilings, where a run has measured them: a read of 4 GB and an 8192^3 product of random BF16 matrices.",
                   {"run", "command", "started", "state", "peer", "read GB/s", "BF16 TFLOP/s"}, {}, 5};
  for (std::size_t i = 0; i < report.runs.size(); ++i) {
    const BenchRun& run = report.runs[i];
    table.rows.push_back({std::to_string(i), run.command_line, run.started, run.complete ? "complete" : "broken off", or_dash(run.peer),
                          number(run.read_gb_per_s, 0), number(run.bf16_tflop_per_s, 0)});
  }
  return table;
}

BenchTable peer_table(const BenchReport& report) {
  BenchTable table{"peers",
                   "Against the peer in the same run",
                   "Medians in milliseconds with least and most, on one GPU in one run. Of the peer's implementations the fastest; gain: its time over the "
                   "own. Sparse: loops 3 and 4 on the keys that torch.topk finds.",
                   {"what", "setting", "peer's implementation", "context", "batch", "own ms", "least to most", "peer dense ms", "least to most", "gain",
                    "peer sparse ms", "gain"},
                   {},
                   3};
  for (const PeerComparison& pair : compare_with_peer(report)) {
    if (pair.dense == nullptr && pair.sparse == nullptr) continue;
    const double own = pair.own->median_us;
    table.rows.push_back({pair.own->what, or_dash(pair.own->setting), pair.dense == nullptr ? "-" : pair.dense->implementation, integer(pair.own->context),
                          integer(pair.own->batch), milliseconds(own), spread_text(pair.own), milliseconds(median_of(pair.dense)), spread_text(pair.dense),
                          times(median_of(pair.dense) / own), milliseconds(median_of(pair.sparse)), times(median_of(pair.sparse) / own)});
  }
  return table;
}

BenchTable features_table(const BenchReport& report) {
  BenchTable table{"features",
                   "What each feature is worth",
                   "Median of dense in milliseconds; the others as gain over dense of the same run (above 1 is faster): T token-sparse prefill, S sparse "
                   "decode attention, Q packed K/V; alone, then one more each. T changes a decode step through the history that it leaves.",
                   {"what", "context", "batch", "dense ms", "T", "S", "Q", "T+S", "T+S+Q"},
                   {},
                   1};
  for (const FeatureGains& f : feature_gains(report)) {
    std::vector<std::string> row{f.what, integer(f.context), integer(f.batch), milliseconds(f.dense_us)};
    for (const double us : {f.t_us, f.s_us, f.q_us, f.ts_us, f.all_us}) row.push_back(times(f.dense_us / us));
    table.rows.push_back(std::move(row));
  }
  return table;
}

BenchTable attribution_table(const BenchReport& report) {
  BenchTable table{
      "attribution",
      "Where a decode step goes",
      "Microseconds, and share of the captured step. Projections, head, attention and selection are timed alone and add up with the remainder to the step; "
      "a negative remainder is what overlaps in the step. Dequantisation is part of attention: packed readers less the BF16 readers of the same setting "
      "with q0. Not in the step: what launching it kernel by kernel adds, and packing, a step's share of encoding a group of positions.",
      {"setting", "context", "batch", "step", "projections", "head", "attention", "selection", "remainder", "dequantisation", "launches", "packing"},
      {},
      1};
  for (const StepAttribution& a : attribute_steps(report)) {
    if (std::isnan(a.projections_us) && std::isnan(a.attention_us)) continue;  // a step alone says nothing here
    table.part_names = {"projections", "head", "attention", "selection", "remainder"};
    std::vector<double>& shares = table.part_shares.emplace_back();
    for (const double part : {a.projections_us, a.head_us, a.attention_us, a.selection_us, a.remainder_us}) shares.push_back(part / a.step_us);
    std::vector<std::string> row{a.setting, integer(a.context), integer(a.batch), microseconds(a.step_us)};
    for (const double part : {a.projections_us, a.head_us, a.attention_us, a.selection_us, a.remainder_us, a.dequantisation_us, a.launches_us, a.packing_us})
      row.push_back(with_share(part, a.step_us));
    table.rows.push_back(std::move(row));
  }
  return table;
}

BenchTable prompts_table(const BenchReport& report) {
  BenchTable table{"prompts",
                   "Where a prompt goes",
                   "Milliseconds, and share of the prompt; attention and products are timed alone in the same batches, and so is encoding at the prompt's end (Q).",
                   {"setting", "prompt", "rows", "prompt ms", "attention", "products", "encoding", "remainder"},
                   {},
                   1};
  for (const PrefillAttribution& a : attribute_prompts(report)) {
    const auto part = [&](double us) { return std::isnan(us) ? "-" : milliseconds(us) + " (" + number(100 * us / a.prompt_us, 1) + " %)"; };
    table.rows.push_back({a.setting, integer(a.context), integer(a.batch), milliseconds(a.prompt_us), part(a.attention_us), part(a.products_us),
                          part(a.encoding_us), part(a.remainder_us)});
  }
  return table;
}

BenchTable end_to_end_table(const BenchReport& report) {
  BenchTable table{
      "end-to-end",
      "Requests from arrival to last token",
      "TTFT: arrival to first token; TPOT: a token after the first; gap: between two tokens of a request; percentiles (nearest rank, p90 from "
      "10 values on, p99 from 100) over finished requests in milliseconds. Failed requests count in no percentile. Transfer: share of the duration in which handoffs were under way.",
      {"setting", "mode",    "load", "cards",       "done", "failed", "TTFT p50", "p90",     "p99",      "TPOT p50", "p90",
       "p99",     "gap p50", "p99",  "latency p50", "p90",  "p99",    "tokens/s", "transfer", "peak"},
      {},
      3};
  for (const EndToEndRow& r : report.end_to_end) {
    std::string failed = integer(r.failed);
    if (r.cancelled > 0) failed += ", of these " + integer(r.cancelled) + " given up";
    if (r.refused > 0) failed += ", of these " + integer(r.refused) + " without room";
    std::vector<std::string> row{r.setting, or_dash(r.mode), r.load, integer(r.device_count), integer(r.finished), failed};
    for (const double ms : {r.ttft_ms_p50, r.ttft_ms_p90, r.ttft_ms_p99, r.tpot_ms_p50, r.tpot_ms_p90, r.tpot_ms_p99, r.token_gap_ms_p50, r.token_gap_ms_p99,
                            r.latency_ms_p50, r.latency_ms_p90, r.latency_ms_p99})
      row.push_back(number(ms, 1));
    row.push_back(number(r.output_tokens_per_s, 1));
    row.push_back(percent(r.transfer_share));
    row.push_back(r.peak_bytes > 0 ? byte_count(r.peak_bytes) : "-");
    table.rows.push_back(std::move(row));
  }
  return table;
}

BenchTable fit_table(const BenchReport& report) {
  BenchTable table{"fit",
                   "How many requests fit",
                   "Requests that held memory at once, and how many the memory model predicts; tokens per second while all of them decoded; K/V of a "
                   "prompt, tables included, against four BF16 planes.",
                   {"setting", "load", "prompt", "at once", "predicted", "tokens/s of all", "K/V of a prompt", "BF16 / this"},
                   {},
                   2};
  for (const EndToEndRow& r : report.end_to_end) {
    if (r.predicted_live == 0 && r.kv_bytes_of_a_prompt == 0) continue;
    table.rows.push_back(
        {r.setting, r.load, r.prompt_tokens > 0 ? integer(r.prompt_tokens) : "-", integer(r.most_live), r.predicted_live > 0 ? integer(r.predicted_live) : "-",
         number(r.tokens_per_s_of_all, 1), r.kv_bytes_of_a_prompt > 0 ? byte_count(r.kv_bytes_of_a_prompt) : "-",
         r.kv_bytes_of_a_prompt > 0 ? number(static_cast<double>(r.bf16_bytes_of_a_prompt) / static_cast<double>(r.kv_bytes_of_a_prompt), 2) : "-"});
  }
  return table;
}

BenchTable request_notes_table(const BenchReport& report) {
  BenchTable table{"request-notes", "Notes to these requests", "", {"setting", "load", "note"}, {}, 3};
  for (const EndToEndRow& r : report.end_to_end) {
    if (!r.note.empty()) table.rows.push_back({r.setting, r.load, r.note});
  }
  return table;
}

BenchTable rows_table(const BenchReport& report) {
  BenchTable table{
      "rows",
      "Every row",
      "Microseconds between device events. Spread: most less least, over the median. Share of floor: what the counted bytes or arithmetic need at the "
      "ceilings of the run, over the median; 100 % cannot be beaten.",
      {"what", "setting", "implementation", "run", "context", "batch", "median", "least", "most", "spread", "GB/s", "TFLOP/s", "floor", "share of floor"},
      {},
      3};
  for (const BenchRow& r : report.rows) {
    table.rows.push_back({is_own(r) ? r.what : r.engine + ": " + r.what, or_dash(r.setting), or_dash(r.implementation), integer(r.run), integer(r.context),
                          integer(r.batch), microseconds(r.median_us), microseconds(r.minimum_us), microseconds(r.maximum_us),
                          percent((r.maximum_us - r.minimum_us) / r.median_us), r.bytes > 0 ? number(r.bytes / r.median_us / 1e3, 0) : "-",
                          r.flops > 0 ? number(r.flops / r.median_us / 1e6, 1) : "-", microseconds(r.floor_us), percent(1 / r.ratio_to_floor)});
  }
  return table;
}

BenchTable memory_table(const BenchReport& report) {
  BenchTable table{
      "memory",
      "Device memory",
      "Bytes of the allocator: in use after the row, and the most of every category since its setting was set up; the categories beside it, the largest first.",
      {"what", "setting", "most, by category", "context", "batch", "in use", "most"},
      {},
      3};
  struct Sum {
    std::int64_t steady = 0, peak = 0;
    std::vector<std::pair<std::int64_t, std::string>> categories;
  };
  std::map<std::int64_t, Sum> sums;  // by row
  for (const BenchMemory& part : report.memory) {
    Sum& sum = sums[part.row];
    if (part.phase == "steady") {
      sum.steady += part.bytes;
    } else {
      sum.peak += part.bytes;
      sum.categories.emplace_back(part.bytes, part.category);
    }
  }
  for (auto& [index, sum] : sums) {
    const BenchRow& row = report.rows[static_cast<std::size_t>(index)];
    std::sort(sum.categories.rbegin(), sum.categories.rend());
    std::string categories;
    for (const auto& [bytes, category] : sum.categories) categories += (categories.empty() ? "" : ", ") + category + " " + byte_count(bytes);
    table.rows.push_back({is_own(row) ? row.what : row.engine + ": " + row.what, or_dash(row.setting), or_dash(categories), integer(row.context),
                          integer(row.batch), sum.steady > 0 ? byte_count(sum.steady) : "-", sum.peak > 0 ? byte_count(sum.peak) : "-"});
  }
  return table;
}

BenchTable left_out_table(const BenchReport& report) {
  BenchTable table{"left-out", "Not measured", "", {"what", "reason"}, {}, 2};
  for (const LeftOut& entry : report.left_out) table.rows.push_back({entry.what, entry.reason});
  return table;
}

}  // namespace

std::vector<PeerComparison> compare_with_peer(const BenchReport& report) {
  const auto fastest = [&](const BenchRow& own, std::string_view setting) {
    const BenchRow* best = nullptr;
    for (const BenchRow& row : report.rows) {
      // The rows of a prompt's batches are an affair of this program.
      const bool same = row.run == own.run && row.what == own.what && row.context == own.context && (row.batch == own.batch || own.what.starts_with(kPrompt));
      if (!is_own(row) && same && row.setting == setting && (best == nullptr || row.median_us < best->median_us)) best = &row;
    }
    return best;
  };
  std::vector<PeerComparison> pairs;
  for (const BenchRow& own : report.rows) {
    if (!is_own(own)) continue;
    const PeerComparison pair{&own, fastest(own, "dense"), fastest(own, "sparse")};
    if (pair.dense != nullptr || pair.sparse != nullptr) pairs.push_back(pair);
  }
  return pairs;
}

std::vector<FeatureGains> feature_gains(const BenchReport& report) {
  std::vector<FeatureGains> gains;
  std::vector<int> settings;  // of each
  for (const BenchRow& row : report.rows) {
    if (!is_own(row) || (row.what != kStep && row.what != kPrompt)) continue;
    auto at = std::find_if(gains.begin(), gains.end(),
                           [&](const FeatureGains& g) { return g.what == row.what && g.run == row.run && g.context == row.context && g.batch == row.batch; });
    if (at == gains.end()) {
      gains.push_back({row.what, row.run, row.context, row.batch});
      settings.push_back(0);
      at = gains.end() - 1;
    }
    static constexpr std::array<std::pair<std::string_view, double FeatureGains::*>, 6> kSettings{{{"t0s0q0", &FeatureGains::dense_us},
                                                                                                   {"t1s0q0", &FeatureGains::t_us},
                                                                                                   {"t0s1q0", &FeatureGains::s_us},
                                                                                                   {"t0s0q1", &FeatureGains::q_us},
                                                                                                   {"t1s1q0", &FeatureGains::ts_us},
                                                                                                   {"t1s1q1", &FeatureGains::all_us}}};
    for (const auto& [setting, member] : kSettings) {
      if (row.setting != setting) continue;
      (*at).*member = row.median_us;
      ++settings[static_cast<std::size_t>(at - gains.begin())];
    }
  }
  std::vector<FeatureGains> several;
  for (std::size_t i = 0; i < gains.size(); ++i) {
    if (settings[i] > 1) several.push_back(gains[i]);
  }
  return several;
}

std::vector<StepAttribution> attribute_steps(const BenchReport& report) {
  std::vector<StepAttribution> parts;
  const auto layers = static_cast<double>(report.meta.layers);
  for (const BenchRow& step : report.rows) {
    if (!is_own(step) || step.what != kStep || &step != last(report, kStep, step.setting, step.context, step.batch)) continue;
    const bool sparse = has_switch(step.setting, "s1"), packed = has_switch(step.setting, "q1");
    StepAttribution a{step.setting, step.context, step.batch, step.median_us};
    a.head_us = median_of(last(report, "head", "", 0, step.batch));
    a.projections_us = median_of(last(report, "decode step without attention", "", 0, step.batch)) - a.head_us;
    a.attention_us = layers * attention_of_a_layer(report, step.setting, step.context, step.batch);
    a.selection_us = !sparse ? 0
                             : layers * (median_of(last(report, "select_keys", step.setting, step.context, step.batch)) +
                                         median_of(last(report, "reference_contribution", step.setting, step.context, step.batch)));
    a.remainder_us = a.step_us - a.projections_us - a.head_us - a.attention_us - a.selection_us;
    a.dequantisation_us = !packed ? 0 : a.attention_us - layers * attention_of_a_layer(report, with_switch_off(step.setting, "q1"), step.context, step.batch);
    a.launches_us = median_of(last(report, "decode step, launched", step.setting, step.context, step.batch)) - a.step_us;
    a.packing_us = !packed ? 0 : median_of(last(report, "encode", "t0s0q1", kGroupSize, step.batch)) / kGroupSize;
    parts.push_back(a);
  }
  return parts;
}

std::vector<PrefillAttribution> attribute_prompts(const BenchReport& report) {
  std::vector<PrefillAttribution> parts;
  for (const BenchRow& row : report.rows) {
    if (!is_own(row) || row.what != kPrompt) continue;
    PrefillAttribution a{row.setting, row.run, row.context, row.batch, row.median_us};
    for (const BenchRow& part : report.rows) {
      if (!is_own(part) || part.run != row.run || part.setting != row.setting || part.context != row.context || part.batch != row.batch) continue;
      if (part.what == "prefill.attention") a.attention_us = part.median_us;
      if (part.what == "prefill.products") a.products_us = part.median_us;
      if (part.what == "prefill.encode") a.encoding_us = part.median_us;
    }
    a.remainder_us = a.prompt_us - a.attention_us - a.products_us - (std::isnan(a.encoding_us) ? 0 : a.encoding_us);
    parts.push_back(a);
  }
  return parts;
}

std::vector<BenchTable> bench_tables(const BenchReport& report) {
  std::vector<BenchTable> tables;
  for (const auto& make : {runs_table, peer_table, features_table, attribution_table, prompts_table, end_to_end_table, request_notes_table, fit_table,
                           rows_table, memory_table, left_out_table}) {
    BenchTable table = make(report);
    if (!table.rows.empty()) tables.push_back(std::move(table));
  }
  return tables;
}

}  // namespace loopgauge::harness
