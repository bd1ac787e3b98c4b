// SPDX-License-Identifier: Apache-2.0
// `loopgauge sweep` as a process, on the small random model and the small traces as files.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "harness/io/checkpoint_writer.hpp"
#include "harness/io/trace_file.hpp"
#include "tests/harness_cli/process.hpp"
#include "tests/report/sweep_fixture.hpp"

namespace loopgauge::harness {

// The small model and traces as files, and the program with them.
class SweepCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    const Checkpoint checkpoint = test::tiny_checkpoint();
    write_checkpoint(folder_ / "model", checkpoint.config, values_of(checkpoint), {});
    for (const Trace& trace : small_traces()) write_trace(folder_ / (trace.name + ".h5"), trace);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::vector<std::string> arguments(std::vector<std::string> more, const std::string& report = "report.h5") const {
    std::vector<std::string> all{"sweep",      "--checkpoint", path("model"),     "--report",
                                 path(report), "--traces",     path("single.h5"), path("several.h5")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  test::ProcessResult sweep(std::vector<std::string> more, const std::string& report = "report.h5") const {
    return test::run_program(arguments(std::move(more), report));
  }

  test::TemporaryFolder folder_;
};

}  // namespace loopgauge::harness
