// SPDX-License-Identifier: Apache-2.0
#include "harness/io/text_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "models/error.hpp"

namespace loopgauge::harness {

std::string read_text_file(const std::filesystem::path& path, std::string_view what, std::uint64_t most_bytes) {
  const std::string name = path.string(), kind(what);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const auto fail = [&](const std::string& message) {
    if (descriptor >= 0) ::close(descriptor);
    throw FileError(name + ": " + message);
  };
  if (descriptor < 0) fail(errno == ENOENT ? "no such " + kind : "this " + kind + " cannot be read: " + std::strerror(errno));
  std::string text;
  std::array<char, 1 << 16> block;
  for (;;) {
    const ssize_t count = ::read(descriptor, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("this " + kind + " cannot be read: " + std::strerror(errno));
    if (count == 0) break;
    text.append(block.data(), static_cast<std::size_t>(count));
    if (text.size() > most_bytes) fail("has more than " + std::to_string(most_bytes) + " bytes, which no " + kind + " has; give the right file, or cut out the part that is needed");
  }
  ::close(descriptor);
  return text;
}

}  // namespace loopgauge::harness
