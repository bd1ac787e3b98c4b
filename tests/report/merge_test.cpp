// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "harness/report/report_file.hpp"
#include "harness/report/report_merge.hpp"
#include "models/error.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

NamedReport shard_of_sample(const std::string& shard, std::vector<std::int64_t> ordinals) {
  Report report = sample_report();
  report.meta.shard = shard;
  std::erase_if(report.cases,
                [&](const CaseResult& row) { return std::find(ordinals.begin(), ordinals.end(), row.ordinal) == ordinals.end(); });
  return {"shard-" + shard.substr(0, 1) + ".h5", report};
}

std::string refusal(const std::vector<NamedReport>& parts) {
  try {
    merge_reports(parts);
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "merged";
  return "";
}

TEST(Merge, RestoresTheOrderOfTheRequest) {
  const Report merged = merge_reports({shard_of_sample("2/2", {1}), shard_of_sample("1/2", {0})});
  const Report whole = sample_report();
  ASSERT_EQ(merged.cases.size(), whole.cases.size());
  for (std::size_t n = 0; n < whole.cases.size(); ++n) {
    EXPECT_EQ(merged.cases[n].id, whole.cases[n].id);
    EXPECT_EQ(merged.cases[n].executor, whole.cases[n].executor);
  }
  EXPECT_EQ(merged.meta.shard, "");
  EXPECT_TRUE(is_complete(merged));
}

TEST(Merge, PartOfTheShardsSaysWhichItHoldsAndMergesOn) {
  const Report some = merge_reports({shard_of_sample("3/3", {}), shard_of_sample("1/3", {0})});
  EXPECT_EQ(some.meta.shard, "1/3,3/3");
  const Report all = merge_reports({{"some.h5", some}, shard_of_sample("2/3", {1})});
  EXPECT_EQ(all.meta.shard, "");
  EXPECT_EQ(all.cases.size(), 4u);
}

TEST(Merge, RefusesRowsOutsideTheRequest) {
  for (const std::int64_t ordinal : {std::int64_t{-1}, std::int64_t{2}}) {
    NamedReport bad = shard_of_sample("2/2", {1});
    bad.report.cases.front().ordinal = ordinal;
    EXPECT_THROW(merge_reports({shard_of_sample("1/2", {0}), bad}), FileError) << ordinal;
  }
}

TEST(Merge, ManyShardsInAnyOrderOneOfThemEmpty) {
  const Report merged =
      merge_reports({shard_of_sample("4/4", {}), shard_of_sample("2/4", {1}), shard_of_sample("3/4", {}), shard_of_sample("1/4", {0})});
  EXPECT_EQ(merged.meta.shard, "");
  EXPECT_TRUE(is_complete(merged));
  EXPECT_EQ(merged.cases.front().ordinal, 0);
}

TEST(Merge, AllShardsWithACaseMissingAreNotComplete) {
  const Report merged = merge_reports({shard_of_sample("1/2", {0}), shard_of_sample("2/2", {})});
  EXPECT_EQ(merged.meta.shard, "");
  EXPECT_FALSE(is_complete(merged));
  EXPECT_EQ(verdict(merged), CaseStatus::not_run);
}

TEST(Merge, RefusesOverlap) {
  EXPECT_NE(refusal({shard_of_sample("1/2", {0}), shard_of_sample("1/2", {1})}).find("overlap: shard 1/2"), std::string::npos);
  EXPECT_NE(refusal({shard_of_sample("1/2", {0, 1}), shard_of_sample("2/2", {1})}).find("overlap: serial/t1s0q0/trace-1"),
            std::string::npos);
  EXPECT_NE(refusal({shard_of_sample("1/2", {0}), shard_of_sample("2/3", {1})}).find("shards"), std::string::npos);
}

TEST(Merge, RefusesShardsThatCannotBe) {
  for (const char* shard : {"0/2", "3/2", "1/0", "1", "/2", "1/", "1/2/3", "-1/2", "1/99999999999", "99999999999/2", "1/2,"}) {
    EXPECT_THROW(merge_reports({shard_of_sample(shard, {0}), shard_of_sample("2/2", {1})}), FileError) << shard;
  }
}

TEST(Merge, RefusesWholeReportsAndSingles) {
  EXPECT_NE(refusal({{"a.h5", sample_report()}, shard_of_sample("1/2", {0})}).find("a.h5 holds the whole request"), std::string::npos);
  EXPECT_NE(refusal({shard_of_sample("1/2", {0})}).find("at least two"), std::string::npos);
}

TEST(Merge, RefusesAnotherOriginAndNamesIt) {
  const std::vector<std::pair<std::string, std::function<void(ReportMeta&)>>> changes{
      {"model_sha256", [](ReportMeta& meta) { meta.model_sha256 = "other"; }},
      {"source_revision", [](ReportMeta& meta) { meta.source_revision = "other"; }},
      {"set_sha256", [](ReportMeta& meta) { meta.set_sha256 = "other"; }},
      {"seed", [](ReportMeta& meta) { meta.seed = "8"; }},
      {"mutant", [](ReportMeta& meta) { meta.mutant = "early_flush"; }},
      {"device", [](ReportMeta& meta) { meta.device = "some device"; }},
      {"configuration", [](ReportMeta& meta) { meta.configuration = "{\"a\":1}"; }},
  };
  for (const auto& [field, change] : changes) {
    NamedReport other = shard_of_sample("2/2", {1});
    change(other.report.meta);
    const std::string message = refusal({shard_of_sample("1/2", {0}), other});
    EXPECT_NE(message.find(field + " is "), std::string::npos) << message;
    EXPECT_NE(message.find("shard-2.h5"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace loopgauge::harness
