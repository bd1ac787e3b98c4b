// SPDX-License-Identifier: Apache-2.0
#include "harness/io/text_file.hpp"

#include <sys/stat.h>

#include <fstream>
#include <thread>

#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::contains;
using test::error_of;

TEST(TextFile, IsReadWholeFromFilesAndPipes) {
  const test::Folder folder;
  const std::string text = std::string(200000, 'x') + std::string("\n\0y", 3);
  std::ofstream(folder / "a", std::ios::binary) << text;
  EXPECT_EQ(read_text_file(folder / "a", "list"), text);
  EXPECT_EQ(read_text_file(folder / "a", "list", text.size()), text);
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(folder / "pipe", std::ios::binary) << text; });
  EXPECT_EQ(read_text_file(folder / "pipe", "list"), text);
  writer.join();
}

TEST(TextFile, WhatIsNoneIsNamedAndReadInBoundedMemory) {
  const test::Folder folder;
  EXPECT_TRUE(contains(error_of([&] { read_text_file(folder / "none", "list"); }), "none: no such list"));
  EXPECT_TRUE(contains(error_of([&] { read_text_file(folder / ".", "list"); }), "this list cannot be read: Is a directory"));
  EXPECT_TRUE(contains(error_of([&] { read_text_file("/proc/self/mem", "list"); }), "/proc/self/mem: this list cannot be read: Input/output error"));
  EXPECT_TRUE(contains(error_of([&] { read_text_file("/dev/zero", "list"); }), "/dev/zero: has more than 67108864 bytes, which no list has"));
}

}  // namespace
}  // namespace loopgauge::harness
