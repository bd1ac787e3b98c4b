// SPDX-License-Identifier: Apache-2.0
#include "harness/gate/baseline.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/compare/significant.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::string_view kMagic = "loopgauge-baseline";
constexpr std::size_t kDigestDigits = 16;  // 64 bits: enough to see a change

struct MetricInfo {
  std::string_view name;
  MetricKind kind;
};
constexpr std::array kMetrics{
    MetricInfo{"digest", MetricKind::digest},
    MetricInfo{"digest.logits", MetricKind::digest},
    MetricInfo{"kl_mean", MetricKind::lower_better},
    MetricInfo{"first_token_kl", MetricKind::lower_better},
    MetricInfo{"same_top1", MetricKind::higher_better},
    MetricInfo{"bits_per_byte", MetricKind::lower_better},
    MetricInfo{"task_accuracy", MetricKind::higher_better},
    MetricInfo{"memory.steady", MetricKind::bytes},
    MetricInfo{"memory.peak", MetricKind::bytes},
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
  switch (metric_kind(metric)) {
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
    case MetricKind::lower_better:
    case MetricKind::higher_better:
      parse_measured(value, where);
      return;
  }
}

std::string total_bytes(const CaseResult& row, std::string_view phase) {
  std::int64_t sum = 0;
  bool found = false;
  for (const MemoryRow& memory : row.memory) {
    if (memory.phase != phase || memory.source != "predicted") continue;
    sum += memory.physical_bytes;
    found = true;
  }
  return found ? std::to_string(sum) : std::string();
}

}  // namespace

MetricKind metric_kind(std::string_view metric) {
  for (const MetricInfo& info : kMetrics) {
    if (info.name == metric) return info.kind;
  }
  throw FileError("metric '" + std::string(metric) + "' is unknown to this version");
}

std::map<std::string, std::string> metrics_of(const CaseResult& row) {
  std::map<std::string, std::string> metrics;
  for (const DigestRow& digest : row.digests) {
    if (digest.group == "all") metrics["digest"] = digest.sha256.substr(0, kDigestDigits);
    if (digest.group == "logits") metrics["digest.logits"] = digest.sha256.substr(0, kDigestDigits);
  }
  for (const DriftSource& source : kDriftSources) {
    for (const DriftSummaryRow& summary : row.drift_summary) {
      if (summary.metric != source.summary_metric || summary.scope != source.scope || !std::isfinite(summary.value)) continue;
      std::string text = significant(summary.value, 6);
      if (std::isfinite(summary.low) && std::isfinite(summary.high))
        text += "[" + significant(summary.low, 6) + "," + significant(summary.high, 6) + "]";
      metrics[std::string(source.metric)] = text;
    }
  }
  for (const auto& [metric, phase] : {std::pair{"memory.steady", "steady"}, std::pair{"memory.peak", "peak"}}) {
    const std::string bytes = total_bytes(row, phase);
    if (!bytes.empty()) metrics[metric] = bytes;
  }
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
  Baseline baseline{report.meta.model_sha256, report.meta.set, {}};
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
  using CaseValues = std::map<std::pair<std::string, std::string>, std::map<std::string, std::string>>;
  const auto by_case = [](const Baseline& baseline) {
    CaseValues cases;
    for (const auto& [key, value] : baseline.values) cases[{key.id, key.executor}][key.metric] = value;
    return cases;
  };
  const CaseValues old_cases = by_case(before), new_cases = by_case(fresh);
  BaselineUpdate update{fresh};
  for (const auto& [name, values] : new_cases) {
    const auto old_case = old_cases.find(name);
    update.added += old_case == old_cases.end();
    update.updated += old_case != old_cases.end() && old_case->second != values;
  }
  for (const auto& [name, values] : old_cases) {
    if (new_cases.contains(name)) continue;
    ++update.kept;
    for (const auto& [metric, value] : values) update.baseline.values[{name.first, name.second, metric}] = value;
  }
  return update;
}

std::string baseline_text(const Baseline& baseline) {
  std::string text =
      std::string(kMagic) + " " + std::to_string(kBaselineVersion) + "\nmodel " + baseline.model_sha256 + "\nset " + baseline.set + "\n";
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
  int line_number = 0, content = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.empty() || line.front() == '#') continue;
    const std::vector<std::string_view> words = words_of(line);
    switch (content++) {
      case 0:
        if (words.size() != 2 || words[0] != kMagic)
          fail(name, line_number, "not a baseline: the first line must be '" + std::string(kMagic) + " 1'");
        if (words[1] != std::to_string(kBaselineVersion)) {
          fail(name, line_number, "baseline version " + std::string(words[1]) + "; this program reads version 1");
        }
        continue;
      case 1:
        if (words.size() != 2 || words[0] != "model" || !is_hex(words[1], 64)) fail(name, line_number, "expected 'model <sha256>'");
        baseline.model_sha256 = words[1];
        continue;
      case 2:
        if (words.size() != 2 || words[0] != "set" || words[1].empty()) fail(name, line_number, "expected 'set <name>'");
        baseline.set = words[1];
        continue;
      default:
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
  if (content < 3) fail(name, line_number, "the header is incomplete: version, model and set are needed");
  if (baseline.values.empty()) fail(name, line_number, "the baseline holds no case");
  return baseline;
}

Baseline read_baseline(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) throw FileError(path.string() + ": no such baseline; make one with --update");
  if (!std::filesystem::is_regular_file(path, error)) throw FileError(path.string() + ": is not a regular file; a baseline is a text file");
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  if (!stream) throw FileError(path.string() + ": cannot be read");
  return parse_baseline(text, path.string());
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
