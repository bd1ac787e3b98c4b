// SPDX-License-Identifier: Apache-2.0
#include "harness/io/atomic_output.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::bytes_of;
using test::contains;
using test::error_of;

std::string text_of(const std::filesystem::path& path) {
  const std::vector<char> bytes = bytes_of(path);
  return {bytes.begin(), bytes.end()};
}

TEST(AtomicOutput, AppearsWithCommitOnly) {
  const test::Folder folder;
  AtomicOutput output(folder / "a.txt");
  std::ofstream(output.temporary()) << "whole";
  EXPECT_FALSE(std::filesystem::exists(folder / "a.txt"));
  output.commit();
  EXPECT_EQ(text_of(folder / "a.txt"), "whole");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a.txt"});
}

TEST(AtomicOutput, LeavesNothingWithoutCommit) {
  const test::Folder folder;
  write_text_file(folder / "a.txt", "old");
  {
    AtomicOutput output(folder / "a.txt");
    std::ofstream(output.temporary()) << "half";
  }
  EXPECT_EQ(text_of(folder / "a.txt"), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a.txt"});
}

TEST(AtomicOutput, WhatAKilledProcessLeftGoesWithTheNextWriting) {
  const test::Folder folder;
  write_text_file(folder / "a.txt", "old");
  std::ofstream(folder / ".a.txt.partial-notes") << "of somebody else";
  AtomicOutput running(folder / "a.txt");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const AtomicOutput output(folder / "a.txt");
    std::ofstream(output.temporary()) << "half";
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(text_of(folder / "a.txt"), "old");
  ASSERT_EQ(folder.names().size(), 4u);
  write_text_file(folder / "b.txt", "another");
  EXPECT_EQ(folder.names().size(), 5u);
  write_text_file(folder / "a.txt", "new");
  EXPECT_EQ(folder.names(), (std::vector<std::string>{running.temporary().filename(), ".a.txt.partial-notes", "a.txt", "b.txt"}));
  std::ofstream(running.temporary()) << "newer";
  running.commit();
  EXPECT_EQ(text_of(folder / "a.txt"), "newer");
}

TEST(AtomicOutput, RefusesToReplaceWhenAsked) {
  const test::Folder folder;
  write_text_file(folder / "a.txt", "old");
  EXPECT_TRUE(contains(error_of([&] { write_text_file(folder / "a.txt", "new", IfExists::refuse); }), "--force"));
  EXPECT_EQ(text_of(folder / "a.txt"), "old");
  write_text_file(folder / "a.txt", "new", IfExists::replace);
  EXPECT_EQ(text_of(folder / "a.txt"), "new");
}

TEST(AtomicOutput, RefusesAFileThatAppearedMeanwhile) {
  const test::Folder folder;
  AtomicOutput output(folder / "a.txt", IfExists::refuse);
  std::ofstream(output.temporary()) << "mine";
  std::ofstream(folder / "a.txt") << "theirs";
  EXPECT_TRUE(contains(error_of([&] { output.commit(); }), "exists already"));
  EXPECT_EQ(text_of(folder / "a.txt"), "theirs");
}

TEST(AtomicOutput, RefusesFoldersAndMissingFolders) {
  const test::Folder folder;
  EXPECT_TRUE(contains(error_of([&] { AtomicOutput output(folder / "missing/a.txt"); }), "is not a folder"));
  std::filesystem::create_directory(folder / "sub");
  EXPECT_TRUE(contains(error_of([&] { AtomicOutput output(folder / "sub"); }), "not a regular file"));
  EXPECT_TRUE(contains(error_of([&] { AtomicOutput output("/dev/null"); }), "not a regular file"));
}

TEST(AtomicOutput, KeepsASymbolicLinkALink) {
  const test::Folder folder;
  write_text_file(folder / "target.txt", "old");
  std::filesystem::create_symlink("target.txt", folder / "link.txt");
  write_text_file(folder / "link.txt", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link.txt"));
  EXPECT_EQ(text_of(folder / "target.txt"), "new");
  std::filesystem::create_directory(folder / "sub");
  std::filesystem::create_symlink("sub/none.txt", folder / "dangling.txt");
  write_text_file(folder / "dangling.txt", "first");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "dangling.txt"));
  EXPECT_EQ(text_of(folder / "sub/none.txt"), "first");
  std::filesystem::create_symlink("loop.txt", folder / "loop.txt");
  EXPECT_TRUE(contains(error_of([&] { write_text_file(folder / "loop.txt", "never"); }), "loop.txt"));
}

TEST(AtomicOutput, RespectsTheUmask) {
  const test::Folder folder;
  const mode_t before = ::umask(027);
  write_text_file(folder / "a.txt", "x");
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(folder / "a.txt").permissions(), static_cast<std::filesystem::perms>(0640));
}

}  // namespace
}  // namespace loopgauge::harness
