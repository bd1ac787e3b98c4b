// SPDX-License-Identifier: Apache-2.0
#include "tests/report/large_report.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {

namespace {

// Uniform in [0, 1) and log-normal, from the bits of the generator alone: the same report with every standard library.
class Draw {
 public:
  explicit Draw(unsigned seed) : generator_(seed) {}
  double uniform() { return static_cast<double>(generator_()) * 0x1p-32; }
  double normal() {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  double log_normal(double median, double sigma) { return median * std::exp(sigma * normal()); }
  int below(int bound) { return static_cast<int>(uniform() * bound); }

 private:
  std::mt19937 generator_;
};

struct Setting {
  std::string switches, policy, timing;
  double kl;  // median of a row
  std::string text() const { return policy.empty() ? switches : switches + ":" + policy + ":" + timing; }
};

std::vector<Setting> settings() {
  std::vector<Setting> list;
  for (const char* switches : {"t0s0q0", "t1s0q0", "t0s1q0", "t1s1q0", "t0s0q1", "t1s0q1", "t0s1q1", "t1s1q1"}) {
    const std::string text(switches);
    const double kl = (text[1] == '1' ? 6e-3 : 0.0) + (text[3] == '1' ? 7e-4 : 0.0) + (text[5] == '1' ? 3e-4 : 0.0);
    if (text[5] == '0') {
      list.push_back({text, "", "", kl});
      continue;
    }
    for (const char* policy : {"fixed_prompt", "rolling", "streaming"}) {
      for (const char* timing : {"serial_aligned", "execution_dependent"}) list.push_back({text, policy, timing, kl});
    }
  }
  return list;
}

void add_drift(CaseResult& row, const Setting& setting, int rows, Draw& draw) {
  double sum = 0.0, most = 0.0;
  int same = 0;
  const int prompt = 64 << draw.below(5);
  for (int r = 0; r < rows; ++r) {
    DriftRow entry;
    entry.row = r;
    entry.position = prompt - 1 + r;
    const double scale = setting.switches[1] == '1' ? 1.0 + 20.0 * std::exp(-r / 4.0) : 1.0;
    entry.kl = setting.kl == 0.0 ? 0.0 : draw.log_normal(setting.kl * scale, 1.1);
    entry.same_top1 = draw.uniform() > 4.0 * std::sqrt(entry.kl) * 0.1;
    entry.top1_probability_change = -0.3 * std::sqrt(entry.kl);
    if (r == 0) {
      row.first_token_kl = entry.kl;
    } else {
      sum += entry.kl;
      most = std::max(most, entry.kl);
      same += entry.same_top1;
    }
    row.drift.push_back(entry);
  }
  const double n = rows - 1;
  row.kl_mean = sum / n;
  row.kl_max = most;
  row.same_top1 = same / n;
  row.bits_per_byte = 1.93 + row.kl_mean;
  if (draw.below(3) == 0) row.task_accuracy = draw.below(9) / 8.0;
  for (const char* metric : {"kl_mean", "kl_p50", "kl_p90", "kl_p99", "kl_p999"})
    row.drift_summary.push_back({metric, "continuation", row.kl_mean, 0.8 * row.kl_mean, 1.3 * row.kl_mean, rows - 1, "bootstrap"});
  row.drift_summary.push_back({"kl_max", "continuation", most, kNotApplicable, kNotApplicable, rows - 1, "none"});
  row.drift_summary.push_back(
      {"same_top1", "continuation", row.same_top1, row.same_top1 - 0.02, std::min(1.0, row.same_top1 + 0.01), rows - 1, "wilson"});
  row.drift_summary.push_back(
      {"bits_per_byte", "all", row.bits_per_byte, row.bits_per_byte - 0.1, row.bits_per_byte + 0.1, rows, "bootstrap"});
  if (!std::isnan(row.task_accuracy)) row.drift_summary.push_back({"task_accuracy", "all", row.task_accuracy, 0.2, 0.95, 8, "wilson"});
}

void add_memory(CaseResult& row, const Setting& setting, std::int64_t tokens, const std::string& source) {
  const bool sparse = setting.switches[1] == '1', quantized = setting.switches[5] == '1', keys = setting.switches[3] == '1';
  const double streams = sparse ? 2.35 : 4.0;
  const auto add = [&](const char* category, double bytes) {
    const auto logical = static_cast<std::int64_t>(bytes);
    for (const char* phase : {"steady", "peak"}) {
      const bool peak = phase[0] == 'p';
      const auto grown = static_cast<std::int64_t>(static_cast<double>(logical) * (peak ? 1.15 : 1.0));
      row.memory.push_back({category, phase, source, grown, (grown + 4095) / 4096 * 4096});
    }
  };
  const double plane = 4096.0 * static_cast<double>(tokens);
  if (quantized) {
    add("base payload", plane / 4);
    add("residual payload", plane / 4 * (streams - 1));
    add("parameters", plane / 32 * streams);
    add("activity maps", static_cast<double>(tokens) * 2);
    add("BF16 tail", 4096.0 * 96 * 4);
  } else {
    add("BF16 planes", 4 * plane);
  }
  add("padding", plane / 50);
  add("inherited references", static_cast<double>(tokens) / 8);
  if (keys) add("attention reference state", 180000.0);
  add("hidden rows", 40000.0);
  add("weights", 14.6e6);
  row.memory_ratio = quantized ? 4.0 / (streams / 4 + streams / 32) : 1.0;
}

void add_conformance(CaseResult& row, double factor, Draw& draw) {
  for (const char* operation : {"rms_norm.norm", "rope.q", "qkv_projection", "scores", "softmax", "attention_output", "swiglu",
                                "down_projection", "gate", "logits"}) {
    for (int loop = 1; loop <= 4; ++loop) {
      ToleranceRow entry;
      entry.operation = operation;
      entry.loop = loop;
      entry.elements = 20000;
      entry.error_over_bound = std::min(0.98, draw.log_normal(0.22, 0.4));
      entry.max_ulp = std::round(4 * entry.error_over_bound);
      entry.max_absolute = 0.0078125 * entry.max_ulp;
      entry.rms = 1e-3;
      entry.p50 = entry.p90 = 0.0;
      entry.p99 = entry.p999 = 1.0;
      entry.limit = 4.0;
      entry.max_index = "layer 2 row " + std::to_string(draw.below(300)) + " element " + std::to_string(draw.below(256));
      entry.verdict = "passed";
      entry.level = "operation";
      entry.source = "candidate";
      row.tolerance.push_back(entry);
    }
  }
  for (const char* level : {"decision_forced", "teacher_forced"}) {
    for (const char* metric : {"hidden", "k", "v", "gate", "logits", "kl"}) {
      const std::string name(metric);
      const bool of_loop = name != "logits" && name != "kl";
      if (std::string(level) == "teacher_forced" && of_loop) continue;
      for (int loop = of_loop ? 1 : 4; loop <= 4; ++loop) {
        const double noise = (name == "kl" ? 4e-4 : 2e-3) * draw.log_normal(1.0, 0.3);
        ToleranceRow entry;
        entry.operation = metric;
        entry.loop = of_loop ? loop : -1;
        entry.elements = 400;
        entry.level = level;
        const double value = noise * draw.log_normal(0.95, 0.1) * factor;
        entry.p50 = 0.2 * value;
        entry.p90 = 0.5 * value;
        entry.p99 = value;
        entry.p999 = 1.6 * value;
        entry.max_absolute = 2.5 * value;
        entry.rms = 0.3 * value;
        entry.limit = 1.5 * noise;
        entry.error_over_bound = entry.p99 / entry.limit;
        entry.verdict = entry.error_over_bound <= 1.0 ? "passed" : "failed";
        entry.source = "candidate";
        entry.max_index = "request 0 position " + std::to_string(draw.below(500)) + " layer 3";
        row.tolerance.push_back(entry);
        for (const char* source : {"reordered", "double"}) {
          ToleranceRow floor = entry;
          const double size = (source[0] == 'd' ? 0.7 : 1.0) * noise;
          floor.source = source;
          floor.verdict = "yardstick";
          floor.p99 = size;
          floor.max_absolute = 2.5 * size;
          floor.limit = floor.error_over_bound = kNotApplicable;
          floor.max_index = "";
          row.tolerance.push_back(floor);
        }
      }
    }
  }
}

}  // namespace

Report large_report(const LargeReport& options) {
  Draw draw(options.seed);
  Report report = sample_report();
  report.cases.clear();
  ReportMeta& meta = report.meta;
  meta.title = "sweep of set made-up, " + std::to_string(options.cases) + " cases";
  meta.device = options.optimized ? "NVIDIA H200, driver 580.159.04, CUDA 13.0" : "no CUDA device";
  meta.device_available = options.optimized;
  meta.case_count = options.cases;
  meta.set = "made-up";
  meta.command_line = "loopgauge sweep --set made-up --seed " + std::to_string(options.seed) + " --report report.h5";

  const std::vector<Setting> all = settings();
  const std::array<std::string, 10> modes{"serial", "split", "split.p23",        "mixed",  "wcpb",
                                          "async",  "graph", "block_spec.d2.k4", "prefix", "preempt"};
  const std::array<std::string, 8> trace_kinds{"text", "needle", "kv", "copy", "sum", "mixed", "boundary", "four"};
  for (int ordinal = 0; ordinal < options.cases; ++ordinal) {
    const Setting& setting = all[static_cast<std::size_t>(ordinal) % all.size()];
    const std::string& mode = modes[static_cast<std::size_t>(ordinal) / all.size() % modes.size()];
    const std::size_t trace = static_cast<std::size_t>(ordinal) / (all.size() * modes.size());
    CaseResult base = sample_row(ordinal, "reference", CaseStatus::passed);
    base.mode = mode;
    base.switches = setting.switches;
    base.policy = setting.policy;
    base.timing = setting.timing;
    base.trace = trace_kinds[trace % trace_kinds.size()] + "-" + std::to_string(128 << trace / trace_kinds.size() % 5);
    base.id = mode + "/" + setting.text() + "/" + base.trace;
    base.configuration =
        R"({"decode_key_bp":1000,"retention_bp":[10000,10000,2500,1000],"switches":")" + setting.switches + R"(","window":256})";
    base.seconds = draw.log_normal(0.6, 0.5);
    base.timings = {{"run", 0, base.seconds}};
    base.checks = {{"audit", "passed", "5120 checks of 41 rules"}, {"repeat_with_taps", "skipped", "not asked for: --repeat"}};
    if (mode != "serial") base.checks.push_back({"equals_serial", "passed", "18 groups"});
    base.digests = {{"all", std::string(64, static_cast<char>('a' + ordinal % 6))}};
    const int rows = mode == "serial" ? options.drift_rows : std::min(options.drift_rows, 16);
    add_drift(base, setting, rows, draw);
    add_memory(base, setting, 128 << trace / trace_kinds.size() % 5, "predicted");
    if (options.speculation && mode.starts_with("block_spec")) {
      for (int j = 0; j < 4; ++j) base.acceptance.push_back({j, 100 - 12 * j, 88 - 16 * j, 12 + 5 * j, 0});
    }
    if (!options.all_passed && ordinal % 997 == 41) {
      base.status = CaseStatus::failed;
      base.reason = "equals_serial: hidden/loop3 differs first at request 0 position 129 layer 2 element 17: 0.0078125 instead of 0.015625";
      base.checks.back() = {"equals_serial", "failed", base.reason};
    }
    report.cases.push_back(base);

    CaseResult other = base;
    other.executor = "optimized";
    other.profile = "";
    other.status = CaseStatus::passed;
    other.reason = "";
    if (!options.optimized) {
      other = sample_row(ordinal, "optimized", CaseStatus::not_run, meta.device);
      other.mode = base.mode;
      other.switches = base.switches;
      other.trace = base.trace;
      other.id = base.id;
      report.cases.push_back(other);
      continue;
    }
    if (!options.all_passed && ordinal % 83 == 7) {
      CaseResult skipped = sample_row(ordinal, "optimized", CaseStatus::skipped, "head_dim 24 has no kernel");
      skipped.mode = base.mode;
      skipped.switches = base.switches;
      skipped.trace = base.trace;
      skipped.id = base.id;
      report.cases.push_back(skipped);
      continue;
    }
    other.seconds = base.seconds / 12.0;
    other.timings.clear();
    for (int repetition = 0; repetition < 3; ++repetition)
      other.timings.push_back({"run", repetition, other.seconds * (1.0 + 0.02 * repetition), other.seconds * 0.6});
    add_memory(other, setting, 128 << trace / trace_kinds.size() % 5, "measured");
    const bool fails = !options.all_passed && ordinal % 751 == 13;
    add_conformance(other, fails ? 2.6 : 1.0, draw);
    if (setting.switches[1] == '1' || setting.switches[3] == '1') {
      const char* kind = setting.switches[1] == '1' ? "token_selection" : "key_selection";
      for (int flip = draw.below(6); flip > 0; --flip) {
        const double difference = draw.log_normal(2e-3, 0.6);
        other.decisions.push_back({kind, 0, draw.below(400), 3, setting.switches[1] == '1' ? -1 : draw.below(4),
                                   setting.switches[1] == '1' ? -1 : draw.below(8), difference * draw.uniform(), difference, true,
                                   draw.below(4) != 0, "17 instead of 18"});
      }
    }
    double worst = 0.0;
    for (const ToleranceRow& entry : other.tolerance) {
      if (entry.verdict != "yardstick") worst = std::max(worst, entry.error_over_bound);
    }
    if (worst > 1.0) {
      other.status = CaseStatus::failed;
      other.reason = "teacher_forced: 2 of 2 distances exceed their limit, farthest: kl p99 0.00104 against 0.0006";
      other.checks.push_back({"teacher_forced", "failed", other.reason});
      other.decisions.push_back({"argmax", 0, 211, 4, -1, -1, 0.31, 0.04, false, true, "token 101 instead of 97"});
    } else {
      other.checks.push_back({"teacher_forced", "passed", "2 distances, nearest to its limit: kl"});
    }
    if (!options.all_passed && ordinal == 500) {
      other.status = CaseStatus::error;
      other.reason = "CUDA error 700 (an illegal memory access was encountered) in decode step 17";
    }
    report.cases.push_back(other);
  }
  return report;
}

Report hostile_report() {
  Report report = sample_report();
  const std::string attack =
      "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> <!-- ]]> &amp; {{script}} {{title}} "
      "'\" `code` ``` | pipe \\| **bold** @somebody #1 https://example.invalid/x \x1b[31mred \x01\x7f\xff\xfe\xc3( \xe2\x80\xae gnirts "
      "\xef\xbf\xbf end";
  report.meta.title = attack;
  report.meta.command_line = "loopgauge sweep " + attack + "\nsecond line";
  report.meta.device = attack;
  report.meta.mutant = attack;
  report.meta.seed = "7\n\r\t" + attack;
  for (CaseResult& row : report.cases) {
    row.reason = attack;
    row.trace = attack;
    row.mode = attack;
    row.id = "serial/" + attack + "/" + attack;
    row.configuration = "{" + attack;
    for (CheckRow& check : row.checks) check.name = check.detail = attack;
    for (ToleranceRow& entry : row.tolerance) entry.operation = entry.max_index = entry.level = attack;
    for (DecisionRow& flip : row.decisions) flip.kind = flip.detail = attack;
    for (MemoryRow& entry : row.memory) entry.category = attack;
    for (DriftSummaryRow& entry : row.drift_summary) entry.metric = attack;
  }
  return report;
}

}  // namespace loopgauge::harness
