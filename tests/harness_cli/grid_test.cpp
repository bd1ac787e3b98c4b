// SPDX-License-Identifier: Apache-2.0
#include "harness/grid.hpp"

#include <gtest/gtest.h>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::vector<std::string> texts(const std::vector<std::string>& grids) {
  std::vector<std::string> result;
  for (const AlgorithmConfig& config : grid_settings(grids)) result.push_back(settings_text(config));
  return result;
}

std::string error_of(const std::string& grid) {
  try {
    grid_settings(std::vector<std::string>{grid});
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Grid, IsACrossProductWithDenseFirst) {
  EXPECT_EQ(texts({"window=64,256 switches=t1s0q0 retention=10000-10000-5000-2500,10000-10000-2500-1000"}),
            (std::vector<std::string>{"t0s0q0", "t1s0q0:w64:retention10000-10000-5000-2500", "t1s0q0:w64",
                                      "t1s0q0:retention10000-10000-5000-2500", "t1s0q0"}));
}

TEST(Grid, AKnobVariesOnlyWhatItActsOn) {
  EXPECT_EQ(texts({"switches=t0s0q0,t1s0q0,t0s1q0,t0s0q1 window=64,128 keys=500,1000 policy=rolling,streaming"}),
            (std::vector<std::string>{"t0s0q0", "t1s0q0:w64", "t1s0q0:w128", "t0s1q0:keys500", "t0s1q0",
                                      "t0s0q1:rolling:serial_aligned:w64", "t0s0q1:rolling:serial_aligned:w128",
                                      "t0s0q1:streaming:serial_aligned:w64", "t0s0q1:streaming:serial_aligned:w128"}));
}

TEST(Grid, FlushVariesWhereTheTimingLetsItAct) {
  EXPECT_EQ(texts({"switches=t0s1q1 tail=5 timing=serial_aligned,execution_dependent flush=committed,eager"}),
            (std::vector<std::string>{"t0s0q0", "t0s1q1:rolling:serial_aligned:tail5", "t0s1q1:rolling:execution_dependent:tail5",
                                      "t0s1q1:rolling:execution_dependent:tail5:flush=eager"}));
}

TEST(Grid, SeveralGridsAreJoinedWithoutRepetitions) {
  EXPECT_EQ(texts({"switches=t1s0q0 reserve=none,final_prompt_token", "switches=t1s0q0,t0s0q0"}),
            (std::vector<std::string>{"t0s0q0", "t1s0q0", "t1s0q0:reserve=final_prompt_token"}));
  EXPECT_EQ(texts({"tail=0,64 timing=execution_dependent"}),
            (std::vector<std::string>{"t0s0q0", "t1s1q1:rolling:execution_dependent:tail0", "t1s1q1:rolling:execution_dependent"}))
      << "all switches are on where the grid does not say";
}

TEST(Grid, FaultsNameGridAxisAndValue) {
  EXPECT_NE(error_of("wndow=64").find("grid 'wndow=64': 'wndow=64' is not <key>=<value>"), std::string::npos);
  EXPECT_NE(error_of("window").find("a key of: switches, policy"), std::string::npos);
  EXPECT_NE(error_of("switches=t0s1q0 window=64").find("window has no effect without t1 or q1"), std::string::npos);
  EXPECT_NE(error_of("flush=eager").find("flush has no effect without q1 and timing=execution_dependent"), std::string::npos);
  EXPECT_NE(error_of("timing=execution_dependent flush=late").find("'late' is not one of: committed, eager"), std::string::npos);
  EXPECT_NE(error_of("keys=5,5").find("names '5' twice"), std::string::npos);
  EXPECT_NE(error_of("keys=5 keys=6").find("'keys' is given twice"), std::string::npos);
  EXPECT_NE(error_of("keys=").find("empty value"), std::string::npos);
  EXPECT_NE(error_of("window=x").find("'x' is not a whole number"), std::string::npos);
  EXPECT_NE(error_of("retention=1-2").find("four basis points"), std::string::npos);
  EXPECT_NE(error_of("policy=roll").find("'roll' is not one of: fixed_prompt"), std::string::npos);
  EXPECT_NE(error_of("reserve=last").find("'last' is not one of: none, final_prompt_token"), std::string::npos);
  EXPECT_NE(error_of(" ").find("names no axis"), std::string::npos);
}

TEST(Grid, CasesTakeTheModesOfTheTraceUnlessOthersAreChosen) {
  const std::vector<CaseTrace> traces{{.name = "a"}, {.name = "b", .modes = {parse_mode("mixed.b2048")}}};
  const std::vector<AlgorithmConfig> settings = grid_settings(std::vector<std::string>{"switches=t0s1q0"});
  const auto ids = [&](const std::vector<ModeSpec>& modes) {
    std::vector<std::string> result;
    for (const Case& value : grid_cases(traces, settings, modes)) result.push_back(case_id(value));
    return result;
  };
  EXPECT_EQ(ids({}), (std::vector<std::string>{"serial/t0s0q0/a", "serial/t0s1q0/a", "mixed.b2048/t0s0q0/b", "mixed.b2048/t0s1q0/b"}));
  EXPECT_EQ(ids({parse_mode("graph")}), (std::vector<std::string>{"graph/t0s0q0/a", "graph/t0s1q0/a", "graph/t0s0q0/b", "graph/t0s1q0/b"}));
  EXPECT_THROW(ids({parse_mode("prefix.encoded")}), ConfigError);
}

}  // namespace
}  // namespace loopgauge::harness
