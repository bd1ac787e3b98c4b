// SPDX-License-Identifier: Apache-2.0
#include "harness/io/path_lock.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>

#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::contains;
using test::error_of;

TEST(PathLock, KeepsTheSecondOutAndNamesTheFirst) {
  const test::Folder folder;
  std::optional<PathLock> first(std::in_place, folder / "a", "process 1", "a", "busy");
  EXPECT_EQ(error_of([&] { PathLock second(folder / "a", "process 2", "a", "busy"); }), "a: busy (process 1)");
  PathLock beside(folder / "b", "process 2", "b", "busy");
  first.reset();
  const PathLock third(folder / "a", "process 3", "a", "busy");
  EXPECT_EQ(error_of([&] { PathLock fourth(folder / "a", "process 4", "a", "busy"); }), "a: busy (process 3)");
}

TEST(PathLock, LeavesNothing) {
  const test::Folder folder;
  { const PathLock lock(folder / "a", "process 1", "a", "busy"); }
  EXPECT_TRUE(folder.names().empty());
}

TEST(PathLock, IsTakenOverFromAProcessThatWasKilled) {
  const test::Folder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const PathLock lock(folder / "a", "a process with a long name", "a", "busy");
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a.lock"});
  {
    const PathLock lock(folder / "a", "process 1", "a", "busy");
    EXPECT_EQ(error_of([&] { PathLock second(folder / "a", "process 2", "a", "busy"); }), "a: busy (process 1)");
  }
  EXPECT_TRUE(folder.names().empty());
}

TEST(PathLock, LeavesAFileOfSomebodyElse) {
  const test::Folder folder;
  std::ofstream(folder / "a.lock") << "a diary";
  EXPECT_TRUE(contains(error_of([&] { PathLock lock(folder / "a", "process 1", "a", "busy"); }), "a.lock is there already and not a lock"));
  std::filesystem::create_directory(folder / "b.lock");
  EXPECT_TRUE(contains(error_of([&] { PathLock lock(folder / "b", "process 1", "b", "busy"); }), "b.lock"));
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a.lock", "b.lock"}));
}

}  // namespace
}  // namespace loopgauge::harness
