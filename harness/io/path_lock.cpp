// SPDX-License-Identifier: Apache-2.0
#include "harness/io/path_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::string_view kStart = "locked by ";
constexpr std::size_t kMostBytes = 1024;

std::string content_of(int descriptor) {
  char bytes[kMostBytes];
  const ssize_t count = ::pread(descriptor, bytes, sizeof bytes, 0);
  return {bytes, count > 0 ? static_cast<std::size_t>(count) : 0};
}

// What follows kStart in the first line.
std::string holder_in(const std::string& content) {
  return content.starts_with(kStart) ? content.substr(kStart.size(), content.find('\n') - kStart.size()) : "";
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

}  // namespace

PathLock::PathLock(const std::filesystem::path& path, std::string_view holder, std::string_view subject, std::string_view busy)
    : file_(path.string() + ".lock") {
  const auto fail = [&](const std::string& what) {
    if (descriptor_ >= 0) ::close(descriptor_);
    throw FileError(std::string(subject) + ": " + what);
  };
  for (;;) {
    descriptor_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    struct stat locked{}, there{};
    if (descriptor_ < 0 || ::fstat(descriptor_, &locked) != 0) fail(file_.string() + ": " + std::strerror(errno));
    // Nobody's file is removed that only has this name.
    const std::string content = content_of(descriptor_);
    if (!S_ISREG(locked.st_mode) || (!content.empty() && !content.starts_with(kStart))) fail(file_.string() + " is there already and not a lock; remove it");
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
      const std::string other = holder_in(content);
      if (errno == EWOULDBLOCK) fail(std::string(busy) + (other.empty() ? "" : " (" + other + ")"));
      if (errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK) fail(file_.string() + ": " + std::strerror(errno));
    }
    // Who held it may have removed it in between; then it keeps nobody out.
    if (::lstat(file_.c_str(), &there) == 0 && same_file(locked, there)) break;
    ::close(descriptor_);
  }
  const std::string line = (std::string(kStart) + std::string(holder)).substr(0, kMostBytes - 1) + "\n";
  if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, line.data(), line.size(), 0) != static_cast<ssize_t>(line.size())) {
    const int error = errno;
    ::unlink(file_.c_str());
    fail(file_.string() + ": " + std::strerror(error));
  }
}

PathLock::~PathLock() {
  ::unlink(file_.c_str());  // still locked
  ::close(descriptor_);
}

}  // namespace loopgauge::harness
