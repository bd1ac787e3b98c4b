// SPDX-License-Identifier: Apache-2.0
#include "harness/gate/baseline.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/compare/drift.hpp"
#include "harness/compare/error_stats.hpp"
#include "harness/compare/significant.hpp"
#include "harness/io/text_file.hpp"
#include "models/error.hpp"
#include "models/sha256.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::size_t kDigestDigits = 16;  // 64 bits: enough to see a change

constexpr std::array kMetrics{
    MetricInfo{"digest", MetricKind::digest, 1, "everything recorded"},
    MetricInfo{"digest.logits", MetricKind::digest, 1, "logits"},
    MetricInfo{"digest.decisions", MetricKind::digest, 2, "tokens, exits, selected tokens and keys"},
    MetricInfo{"error_over_bound", MetricKind::bound_ratio, 2, "largest error / bound of all judged operations and distances"},
    MetricInfo{"kl_mean", MetricKind::lower_better, 1, "KL against dense, continuation rows, nats"},
    MetricInfo{"first_token_kl", MetricKind::lower_better, 1, "KL against dense of the first generated token, nats"},
    MetricInfo{"same_top1", MetricKind::higher_better, 1, "share of rows with dense's greedy token"},
    MetricInfo{"bits_per_byte", MetricKind::lower_better, 1, "of the continuation"},
    MetricInfo{"task_accuracy", MetricKind::higher_better, 1, "share of right answers"},
    MetricInfo{"acceptance", MetricKind::higher_better, 2, "accepted / drafted tokens"},
    MetricInfo{"memory.steady", MetricKind::bytes, 1, "predicted physical bytes between two submissions"},
    MetricInfo{"memory.peak", MetricKind::bytes, 1, "predicted physical bytes at most"},
    MetricInfo{"memory.measured_steady", MetricKind::bytes, 2, "allocated bytes between two submissions"},
    MetricInfo{"memory.measured_peak", MetricKind::bytes, 2, "allocated bytes at most"},
    MetricInfo{"time", MetricKind::time, 2, "seconds of a run on a device, from three repetitions on"},
};

// Where a drift metric is found in a report.
struct DriftSource {
  std::string_view metric, summary_metric, scope;
};
constexpr std::array kDriftSources{
    DriftSource{"kl_mean", "kl_mean", "continuation"},     DriftSource{"first_token_kl", "kl_mean", "first_token"},
    DriftSource{"same_top1", "same_top1", "continuation"}, DriftSource{"bits_per_byte", "bits_per_byte", "all"},
    DriftSource{"task_accuracy", "task_accuracy", "all"},
};

[[noreturn]] void fail(std::string_view name, int line, const std::string& what) {
  throw FileError(std::string(name) + ":" + std::to_string(line) + ": " + what);
}

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin <= line.size();) {
    const std::size_t end = std::min(line.find(' ', begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::optional<double> parse_double(std::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

bool is_hex(std::string_view text, std::size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void check_value(const std::string& metric, std::string_view value, std::string_view where) {
  switch (metric_info(metric).kind) {
    case MetricKind::digest:
      if (!is_hex(value, kDigestDigits)) {
        throw FileError(std::string(where) + ": '" + std::string(value) + "' is not the beginning of a SHA-256, 16 lower-case hex digits");
      }
      return;
    case MetricKind::bytes:
      if (value.empty() || value.size() > 18 || value.find_first_not_of("0123456789") != std::string_view::npos) {
        throw FileError(std::string(where) + ": '" + std::string(value) + "' is not a number of bytes");
      }
      return;
    case MetricKind::bound_ratio:
    case MetricKind::lower_better:
    case MetricKind::higher_better:
    case MetricKind::time:
      parse_measured(value, where);
      return;
  }
}

std::string measured_text(double value, double low, double high) {
  std::string text = significant(value, 6);
  if (std::isfinite(low) && std::isfinite(high)) text += "[" + significant(low, 6) + "," + significant(high, 6) + "]";
  return text;
}

std::string total_bytes(const CaseResult& row, std::string_view phase, std::string_view source) {
  std::int64_t sum = 0;
  bool found = false;
  for (const MemoryRow& memory : row.memory) {
    if (memory.phase != phase || memory.source != source) continue;
    sum += memory.physical_bytes;
    found = true;
  }
  return found ? std::to_string(sum) : std::string();
}

// Of the discrete decisions alone.
std::string decisions_digest(const CaseResult& row) {
  Sha256 hash;
  bool found = false;
  for (const std::string_view group : {"active", "exits", "keys", "tokens"}) {
    for (const DigestRow& digest : row.digests) {
      if (digest.group != group) continue;
      const std::string line = digest.group + " " + digest.sha256 + "\n";
      hash.update(line.data(), line.size());
      found = true;
    }
  }
  return found ? hash.hex_digest().substr(0, kDigestDigits) : std::string();
}

std::string worst_bound_ratio(const CaseResult& row) {
  double worst = -1.0;
  for (const ToleranceRow& entry : row.tolerance) {
    if (entry.source == "candidate" && entry.verdict == "passed") worst = std::fmax(worst, entry.error_over_bound);
  }
  return worst < 0.0 ? std::string() : significant(worst, 6);
}

std::string acceptance_text(const CaseResult& row) {
  std::int64_t drafted = 0, accepted = 0;
  for (const AcceptanceRow& entry : row.acceptance) {
    drafted += entry.drafted;
    accepted += entry.accepted;
  }
  if (drafted == 0) return {};
  const Estimate rate = wilson_interval(accepted, drafted);
  return measured_text(rate.value, rate.low, rate.high);
}

// Median, least and largest of the repetitions on a device. Times of the reference are times of whatever else the processor does.
std::string time_text(const CaseResult& row) {
  constexpr std::size_t kLeastRepetitions = 3;
  std::vector<double> seconds;
  for (const TimingRow& entry : row.timings) {
    if (entry.phase == "run" && std::isfinite(entry.seconds)) seconds.push_back(entry.seconds);
  }
  if (row.executor != "optimized" || seconds.size() < kLeastRepetitions) return {};
  std::sort(seconds.begin(), seconds.end());
  return measured_text(median_of_sorted(seconds), seconds.front(), seconds.back());
}

}  // namespace

const MetricInfo& metric_info(std::string_view metric) {
  for (const MetricInfo& info : kMetrics) {
    if (info.name == metric) return info;
  }
  throw FileError("metric '" + std::string(metric) + "' is unknown to this version");
}

std::map<std::string, std::string> metrics_of(const CaseResult& row) {
  std::map<std::string, std::string> metrics;
  const auto add = [&](const char* metric, std::string text) {
    if (!text.empty()) metrics[metric] = std::move(text);
  };
  for (const DigestRow& digest : row.digests) {
    if (digest.group == "all") add("digest", digest.sha256.substr(0, kDigestDigits));
    if (digest.group == "logits") add("digest.logits", digest.sha256.substr(0, kDigestDigits));
  }
  add("digest.decisions", decisions_digest(row));
  add("error_over_bound", worst_bound_ratio(row));
  for (const DriftSource& source : kDriftSources) {
    for (const DriftSummaryRow& summary : row.drift_summary) {
      if (summary.metric != source.summary_metric || summary.scope != source.scope || !std::isfinite(summary.value)) continue;
      metrics[std::string(source.metric)] = measured_text(summary.value, summary.low, summary.high);
    }
  }
  add("acceptance", acceptance_text(row));
  add("memory.steady", total_bytes(row, "steady", "predicted"));
  add("memory.peak", total_bytes(row, "peak", "predicted"));
  add("memory.measured_steady", total_bytes(row, "steady", "measured"));
  add("memory.measured_peak", total_bytes(row, "peak", "measured"));
  add("time", time_text(row));
  return metrics;
}

Baseline baseline_of(const Report& report) {
  if (!report.meta.mutant.empty()) {
    throw ConfigError("the report is of a sweep with the planted fault " + report.meta.mutant +
                      ", which is never a result: no baseline is made of it");
  }
  if (!report.meta.shard.empty()) {
    throw ConfigError("the report holds shards " + report.meta.shard +
                      " only; merge all of them (loopgauge report merge) before updating a baseline");
  }
  if (report.meta.model_config.empty()) throw ConfigError("the report does not say the configuration of its model (model_config): sweep again");
  Baseline baseline;
  baseline.model_sha256 = report.meta.model_sha256;
  baseline.model_config = report.meta.model_config;
  baseline.set = report.meta.set;
  if (report.meta.device_available) baseline.device = report.meta.device;
  for (const CaseResult& row : report.cases) {
    if (row.status == CaseStatus::failed || row.status == CaseStatus::error) {
      throw ConfigError("case " + row.id + " (" + row.executor + ") did not pass: " + row.reason +
                        "; a baseline is made of passing sweeps only");
    }
    const bool without_device = row.executor == "optimized" && !report.meta.device_available;
    if (row.status == CaseStatus::not_run && !without_device) {
      throw ConfigError("case " + row.id + " (" + row.executor + ") was not run: " + row.reason +
                        "; finish the sweep (--resume) before updating a baseline");
    }
    if (row.status != CaseStatus::passed) continue;
    for (const auto& [metric, value] : metrics_of(row)) baseline.values[{row.id, row.executor, metric}] = value;
  }
  if (baseline.values.empty()) throw ConfigError("the report holds no case that passed: there is nothing to make a baseline of");
  return baseline;
}

BaselineUpdate update_baseline(const Baseline& before, const Baseline& fresh) {
  for (const auto& [what, old_value, new_value] :
       {std::tuple{"model", &before.model_sha256, &fresh.model_sha256}, std::tuple{"set", &before.set, &fresh.set}}) {
    if (*old_value == *new_value) continue;
    throw ConfigError("the baseline is of " + std::string(what) + " '" + *old_value + "', the report of '" + *new_value +
                      "': their cases cannot stand in one baseline (--prune replaces all of it)");
  }
  if (const std::string difference = model_config_difference(before.model_config, fresh.model_config); before.version >= 3 && !difference.empty()) {
    throw ConfigError("other configurations of the model: " + difference + "; their cases cannot stand in one baseline (--prune replaces all of it)");
  }
  using CaseValues = std::map<std::pair<std::string, std::string>, std::map<std::string, std::string>>;
  const auto by_case = [](const Baseline& baseline) {
    CaseValues cases;
    for (const auto& [key, value] : baseline.values) cases[{key.id, key.executor}][key.metric] = value;
    return cases;
  };
  const CaseValues old_cases = by_case(before), new_cases = by_case(fresh);
  BaselineUpdate update{fresh};
  update.baseline.remarks = before.remarks;
  // Values of the optimized column that stay are of the device that they were measured on.
  if (fresh.device == "none") update.baseline.device = before.device;
  const bool other_device = before.device != "none" && fresh.device != "none" && before.device != fresh.device;
  // Before version 3 only equal bits say so.
  bool same_configuration = before.version >= 3;
  for (const auto& [name, values] : new_cases) {
    const auto old_case = old_cases.find(name);
    if (old_case != old_cases.end() && name.second == "reference" && values.contains("digest") && old_case->second.contains("digest"))
      same_configuration = same_configuration || values.at("digest") == old_case->second.at("digest");
    update.added += old_case == old_cases.end();
    update.updated += old_case != old_cases.end() && old_case->second != values;
  }
  for (const auto& [name, values] : old_cases) {
    if (new_cases.contains(name)) continue;
    if (other_device && name.second == "optimized") {
      throw ConfigError("the baseline holds case " + name.first + " of device '" + before.device + "', which the report of device '" +
                        fresh.device + "' lacks: one baseline has one device (--prune drops what the report lacks)");
    }
    ++update.kept;
    if (!same_configuration) {
      throw ConfigError("the baseline is of version " + std::to_string(before.version) + ", which does not record the model's configuration, and no digest shows that case " +
                        name.first + " (" + name.second + "), which the report lacks, is of the report's: sweep it too (--prune drops what the report lacks)");
    }
    for (const auto& [metric, value] : values) update.baseline.values[{name.first, name.second, metric}] = value;
  }
  return update;
}

std::string baseline_text(const Baseline& baseline) {
  std::string text;
  for (const std::string& remark : baseline.remarks) text += remark + "\n";
  text += std::string(kBaselineMagic) + " " + std::to_string(kBaselineVersion) + "\nmodel " + baseline.model_sha256 + "\nconfig " + baseline.model_config +
                     "\nset " + baseline.set + "\ndevice " + baseline.device + "\n";
  // Sorted as lines, which is not the order of the keys: '/' and ' ' compare by their bytes.
  std::vector<std::string> lines;
  for (const auto& [key, value] : baseline.values) lines.push_back(key.id + " " + key.executor + " " + key.metric + " " + value);
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

Baseline parse_baseline(std::string_view text, std::string_view name) {
  Baseline baseline;
  std::string previous;
  int line_number = 0;
  enum class Header { version, model, config, set, device, cases };  // the line that is expected
  Header expected = Header::version;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (!line.empty() && line.front() == '#') baseline.remarks.emplace_back(line);
    if (line.empty() || line.front() == '#') continue;
    if (line.back() == '\r') fail(name, line_number, "the line ends in CR LF; a baseline has LF alone, as git keeps it without autocrlf");
    const std::vector<std::string_view> words = words_of(line);
    const auto rest = [&] { return line.substr(words[0].size() + 1); };
    switch (expected) {
      case Header::version: {
        if (words.size() != 2 || words[0] != kBaselineMagic)
          fail(name, line_number, "not a baseline: the first line must be '" + std::string(kBaselineMagic) + " " + std::to_string(kBaselineVersion) + "'");
        const auto version = words[1].size() == 1 ? words[1][0] - '0' : 0;
        if (version < 1 || version > kBaselineVersion) {
          fail(name, line_number, "baseline version " + std::string(words[1]) + "; this program reads versions 1 to " + std::to_string(kBaselineVersion));
        }
        baseline.version = version;
        expected = Header::model;
        continue;
      }
      case Header::model:
        if (words.size() != 2 || words[0] != "model" || !is_hex(words[1], 64)) fail(name, line_number, "expected 'model <sha256>'");
        baseline.model_sha256 = words[1];
        expected = baseline.version < 3 ? Header::set : Header::config;
        continue;
      case Header::config:
        if (words.size() < 2 || words[0] != "config" || !nlohmann::json::parse(rest(), nullptr, false).is_object())
          fail(name, line_number, "expected 'config <model_config of the report, one line of JSON>'");
        baseline.model_config = rest();
        expected = Header::set;
        continue;
      case Header::set:
        if (words.size() != 2 || words[0] != "set" || words[1].empty()) fail(name, line_number, "expected 'set <name>'");
        baseline.set = words[1];
        expected = baseline.version < 2 ? Header::cases : Header::device;
        continue;
      case Header::device:
        if (words.size() < 2 || words[0] != "device" || words[1].empty()) fail(name, line_number, "expected 'device <name>' or 'device none'");
        baseline.device = rest();
        expected = Header::cases;
        continue;
      case Header::cases:
        break;
    }
    if (words.size() != 4 || std::any_of(words.begin(), words.end(), [](std::string_view w) { return w.empty(); })) {
      fail(name, line_number, "expected '<case id> <executor> <metric> <value>' with single spaces");
    }
    if (!previous.empty() && !(previous < line)) fail(name, line_number, "lines must be sorted and distinct");
    previous = line;
    const BaselineKey key{std::string(words[0]), std::string(words[1]), std::string(words[2])};
    const std::string where = std::string(name) + ":" + std::to_string(line_number);
    try {
      check_value(key.metric, words[3], where);
    } catch (const FileError& error) {
      const std::string what = error.what();
      throw FileError(what.starts_with(where) ? what : where + ": " + what);
    }
    if (!baseline.values.emplace(key, words[3]).second) fail(name, line_number, "this case, executor and metric were given before");
  }
  if (expected != Header::cases) fail(name, line_number, "the header is incomplete: version, model, config, set and device are needed");
  if (baseline.values.empty()) fail(name, line_number, "the baseline holds no case");
  return baseline;
}

std::string model_config_difference(std::string_view baseline, std::string_view report) {
  if (baseline == report) return {};
  const nlohmann::json a = nlohmann::json::parse(baseline, nullptr, false), b = nlohmann::json::parse(report, nullptr, false);
  if (!a.is_object() || !b.is_object()) return "it is '" + std::string(baseline) + "' in the baseline and '" + std::string(report) + "' in the report";
  const auto shown = [](const nlohmann::json& object, const std::string& key) { return object.contains(key) ? object.at(key).dump() : "absent"; };
  std::set<std::string> keys;
  for (const nlohmann::json* object : {&a, &b}) {
    for (const auto& [key, unused] : object->items()) keys.insert(key);
  }
  std::string difference;
  for (const std::string& key : keys) {
    if (shown(a, key) == shown(b, key)) continue;
    difference += (difference.empty() ? "" : ", ") + key + " is " + shown(a, key) + " in the baseline and " + shown(b, key) + " in the report";
  }
  return difference.empty() ? "model_config is spelled in another way" : difference;
}

bool is_baseline(std::string_view text) {
  while (text.starts_with('#') || text.starts_with('\n')) text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  return text.starts_with(std::string(kBaselineMagic) + " ");
}

Baseline read_baseline(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) throw FileError(path.string() + ": no such baseline; make one with --update");
  if (!std::filesystem::is_regular_file(path, error)) throw FileError(path.string() + ": is not a regular file; a baseline is a text file");
  return parse_baseline(read_text_file(path, "baseline"), path.string());
}

MeasuredValue parse_measured(std::string_view text, std::string_view where) {
  const auto bad = [&]() -> FileError {
    return FileError(std::string(where) + ": '" + std::string(text) + "' is not a number such as 0.25 or 0.25[0.2,0.3]");
  };
  const std::size_t bracket = text.find('[');
  const auto value = parse_double(text.substr(0, bracket));
  if (!value) throw bad();
  MeasuredValue measured{*value, *value, *value};
  if (bracket == std::string_view::npos) return measured;
  const std::size_t comma = text.find(',', bracket);
  if (comma == std::string_view::npos || text.back() != ']') throw bad();
  const auto low = parse_double(text.substr(bracket + 1, comma - bracket - 1));
  const auto high = parse_double(text.substr(comma + 1, text.size() - comma - 2));
  if (!low || !high || *low > *high) throw bad();
  measured.low = *low;
  measured.high = *high;
  return measured;
}

}  // namespace loopgauge::harness
