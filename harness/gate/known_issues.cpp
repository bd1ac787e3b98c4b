// SPDX-License-Identifier: Apache-2.0
#include "harness/gate/known_issues.hpp"

#include <algorithm>
#include <chrono>

#include "harness/case.hpp"
#include "harness/io/text_file.hpp"
#include "harness/provenance.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::string_view kMagic = "loopgauge-known-issues";

bool is_date(std::string_view text) {
  if (text.size() != 10 || text[4] != '-' || text[7] != '-') return false;
  int fields[3] = {0, 0, 0};
  constexpr int kBegin[3] = {0, 5, 8}, kEnd[3] = {4, 7, 10};
  for (int field = 0; field < 3; ++field) {
    for (int i = kBegin[field]; i < kEnd[field]; ++i) {
      const char c = text[static_cast<std::size_t>(i)];
      if (c < '0' || c > '9') return false;
      fields[field] = 10 * fields[field] + (c - '0');
    }
  }
  const std::chrono::year_month_day day{std::chrono::year(fields[0]), std::chrono::month(static_cast<unsigned>(fields[1])),
                                        std::chrono::day(static_cast<unsigned>(fields[2]))};
  return day.ok();
}

// The next word of `line`, which loses it.
std::string_view take_word(std::string_view& line) {
  constexpr std::string_view kBlank = " \t\r";
  const std::size_t begin = std::min(line.find_first_not_of(kBlank), line.size());
  const std::size_t end = std::min(line.find_first_of(kBlank, begin), line.size());
  const std::string_view word = line.substr(begin, end - begin);
  line.remove_prefix(end);
  const std::size_t rest = line.find_first_not_of(kBlank);
  line.remove_prefix(std::min(rest, line.size()));
  return word;
}

}  // namespace

bool KnownIssue::matches(std::string_view case_id, std::string_view case_executor, std::string_view case_metric) const {
  return glob_match(id, case_id) && glob_match(executor, case_executor) && glob_match(metric, case_metric);
}

std::vector<KnownIssue> parse_known_issues(std::string_view text, std::string_view name) {
  std::vector<KnownIssue> issues;
  bool header = false;
  int number = 0;
  const auto fail = [&](const std::string& what) { throw FileError(std::string(name) + ":" + std::to_string(number) + ": " + what); };
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == '\t')) line.remove_suffix(1);
    if (line.empty() || line.front() == '#') continue;
    if (!header) {
      if (line != std::string(kMagic) + " " + std::to_string(kKnownIssuesVersion)) {
        fail("not a list of known issues: the first line must be '" + std::string(kMagic) + " " + std::to_string(kKnownIssuesVersion) +
             "'");
      }
      header = true;
      continue;
    }
    KnownIssue issue;
    issue.line = number;
    issue.until = take_word(line);
    issue.id = take_word(line);
    issue.executor = take_word(line);
    issue.metric = take_word(line);
    issue.why = line;
    if (!is_date(issue.until)) fail("'" + issue.until + "' is not a date such as 2027-01-31");
    if (issue.why.empty()) fail("expected '<until> <case glob> <executor glob> <metric glob> <why>'");
    issues.push_back(std::move(issue));
  }
  if (!header) fail("the first line must be '" + std::string(kMagic) + " " + std::to_string(kKnownIssuesVersion) + "'");
  return issues;
}

std::vector<KnownIssue> read_known_issues(const std::filesystem::path& path) {
  return parse_known_issues(read_text_file(path, "list of known issues"), path.string());
}

void require_date(std::string_view text) {
  if (!is_date(text)) throw ConfigError("'" + std::string(text) + "' is not a date such as 2027-01-31");
}

std::string today() { return utc_timestamp().substr(0, 10); }

}  // namespace loopgauge::harness
