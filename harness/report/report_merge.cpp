// SPDX-License-Identifier: Apache-2.0
#include "harness/report/report_merge.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "harness/report/schema.hpp"
#include "harness/shard.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::array<std::string_view, 13> kRequestFields{"tool_version", "source_revision", "compiler",  "model_sha256", "model_config",
                                                          "set",          "set_sha256",      "executors", "mutant",       "configuration",
                                                          "seed",         "device",          "case_count"};

// "1/4,3/4" -> the shards, and how many there are.
struct ShardList {
  std::vector<int> indices;
  int count = 0;
};

ShardList parse_shards(const std::string& text, const std::string& file) {
  ShardList list;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    Shard shard;
    try {
      shard = parse_shard(item);
    } catch (const ConfigError&) {
      throw FileError(file + ": attribute shard '" + text + "' is not a list of shards i/n");
    }
    list.indices.push_back(shard.index);
    if (list.count != 0 && list.count != shard.count) throw FileError(file + ": attribute shard '" + text + "' mixes partitions");
    list.count = shard.count;
    begin = end + 1;
  }
  return list;
}

// Distinct lines of both, in order.
std::string join_distinct(const std::string& a, const std::string& b) {
  std::string joined = a;
  std::size_t begin = 0;
  while (begin <= b.size()) {
    const std::size_t end = std::min(b.find('\n', begin), b.size());
    const std::string line = b.substr(begin, end - begin);
    if (("\n" + joined + "\n").find("\n" + line + "\n") == std::string::npos) joined += "\n" + line;
    begin = end + 1;
  }
  return joined;
}

}  // namespace

std::vector<std::string> request_differences(const ReportMeta& a, const ReportMeta& b, const std::string& name_a,
                                             const std::string& name_b) {
  std::vector<std::string> differences;
  const auto quoted = [](const std::string& text) { return text.empty() ? std::string("empty") : "'" + text + "'"; };
  for (const Column<ReportMeta>& column : columns<ReportMeta>()) {
    if (std::find(kRequestFields.begin(), kRequestFields.end(), column.name) == kRequestFields.end()) continue;
    const std::string text_a = cell_text(a, column), text_b = cell_text(b, column);
    if (text_a == text_b) continue;
    differences.push_back(std::string(column.name) + " is " + quoted(text_a) + " in " + name_a + " and " + quoted(text_b) + " in " +
                          name_b + (column.name == "set_sha256" ? ": other cases, settings, executors or traces" : ""));
  }
  return differences;
}

Report merge_reports(const std::vector<NamedReport>& reports) {
  if (reports.size() < 2) throw ConfigError("merging needs at least two reports");
  const NamedReport& first = reports.front();
  Report merged;
  merged.meta = first.report.meta;

  std::map<std::pair<std::int64_t, std::string>, const std::string*> owner;
  std::vector<int> shards;
  int shard_count = 0;
  for (const NamedReport& part : reports) {
    const ReportMeta& meta = part.report.meta;
    const std::vector<std::string> differences = request_differences(first.report.meta, meta, first.name, part.name);
    if (!differences.empty()) throw ConfigError("the reports cannot be merged: " + differences.front());
    if (meta.shard.empty()) throw ConfigError(part.name + " holds the whole request: there is nothing to merge it with");
    const ShardList list = parse_shards(meta.shard, part.name);
    if (shard_count != 0 && list.count != shard_count) {
      throw ConfigError("the reports cannot be merged: " + part.name + " is of " + std::to_string(list.count) + " shards, " + first.name +
                        " of " + std::to_string(shard_count));
    }
    shard_count = list.count;
    for (const int index : list.indices) {
      if (std::find(shards.begin(), shards.end(), index) != shards.end()) {
        throw ConfigError("the reports overlap: shard " + std::to_string(index) + "/" + std::to_string(shard_count) + " of " + part.name +
                          " is already there");
      }
      shards.push_back(index);
    }
    for (const CaseResult& row : part.report.cases) {
      if (row.ordinal < 0 || row.ordinal >= meta.case_count) {
        throw FileError(part.name + ": " + row.id + " has the number " + std::to_string(row.ordinal) + ", the request has " +
                        std::to_string(meta.case_count) + " cases");
      }
      const auto [place, added] = owner.try_emplace({row.ordinal, row.executor}, &part.name);
      if (!added)
        throw ConfigError("the reports overlap: " + row.id + " (" + row.executor + ") is in " + *place->second + " and in " + part.name);
      merged.cases.push_back(row);
    }
    merged.meta.command_line = join_distinct(merged.meta.command_line, meta.command_line);
    merged.meta.cpu = join_distinct(merged.meta.cpu, meta.cpu);
    merged.meta.started = std::min(merged.meta.started, meta.started);
    merged.meta.finished = std::max(merged.meta.finished, meta.finished);
  }

  // The optimized column and a mutant follow the reference.
  const auto column_order = [](const CaseResult& row) { return row.executor == "reference" ? 0 : 1; };
  std::stable_sort(merged.cases.begin(), merged.cases.end(), [&](const CaseResult& a, const CaseResult& b) {
    return std::pair(a.ordinal, column_order(a)) < std::pair(b.ordinal, column_order(b));
  });

  std::sort(shards.begin(), shards.end());
  merged.meta.shard.clear();
  if (std::ssize(shards) < shard_count) {
    for (const int index : shards) {
      merged.meta.shard += (merged.meta.shard.empty() ? "" : ",") + std::to_string(index) + "/" + std::to_string(shard_count);
    }
  }
  return merged;
}

}  // namespace loopgauge::harness
