// SPDX-License-Identifier: Apache-2.0
#include "harness/io/atomic_output.hpp"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace fs = std::filesystem;
namespace {

constexpr int kMostLinks = 40;  // that lead from one to the next

std::string reason(int error) { return std::strerror(error); }

void flush_to_device(const fs::path& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC);
  if (descriptor < 0) throw FileError(path.string() + ": cannot be opened to flush it: " + reason(errno));
  const int status = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  // Some file systems cannot flush a folder (EINVAL); the rename is then as durable as they make it.
  if (status != 0 && error != EINVAL) throw FileError(path.string() + ": cannot be flushed to its device: " + reason(error));
}

FileError exists_error(const fs::path& destination) {
  return FileError(destination.string() + ": exists already; remove it, choose another name or pass --force to replace it");
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// Of the open file, for as long as it is open anywhere; the kernel gives up that of a process that ends. False where another one holds it, and where the file
// system has no locks.
bool lock(int descriptor) {
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return ::fcntl(descriptor, F_OFD_SETLK, &whole) == 0;
}

std::string partial_prefix(const fs::path& destination) { return "." + destination.filename().string() + ".partial-"; }

// Whether a name in its folder is that of a temporary file of `destination`: <prefix><process>-<number>.
bool is_partial(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return false;
  const std::string rest = name.substr(prefix.size());
  const std::size_t dash = rest.find('-');
  return dash > 0 && dash + 1 < rest.size() && rest.find_first_not_of("0123456789-") == std::string::npos && rest.find('-', dash + 1) == std::string::npos;
}

// Removes what killed processes left: temporary files whose lock nobody holds.
void remove_left_behind(const fs::path& destination) {
  for (const fs::path& partial : partial_paths(destination)) {
    const int descriptor = ::open(partial.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) continue;
    struct stat status {};
    if (::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && lock(descriptor)) ::unlink(partial.c_str());
    ::close(descriptor);
  }
}

void rename_without_replacing(const fs::path& from, const fs::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EEXIST) throw exists_error(to);
  if (errno != EINVAL && errno != ENOSYS) throw FileError(to.string() + ": cannot be created: " + reason(errno));
  // File systems without RENAME_NOREPLACE: a check and a rename, with the small gap that implies.
  if (fs::exists(to)) throw exists_error(to);
  if (::rename(from.c_str(), to.c_str()) != 0) throw FileError(to.string() + ": cannot be created: " + reason(errno));
}

}  // namespace

fs::path new_partial_path(const fs::path& destination) {
  static std::atomic<unsigned> counter{0};
  return folder_of(destination) / (partial_prefix(destination) + std::to_string(::getpid()) + "-" + std::to_string(counter++));
}

std::vector<fs::path> partial_paths(const fs::path& destination) {
  std::error_code ignored;
  std::vector<fs::path> paths;
  const std::string prefix = partial_prefix(destination);
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_of(destination), ignored)) {
    if (is_partial(entry.path().filename().string(), prefix)) paths.push_back(entry.path());
  }
  return paths;
}

AtomicOutput::AtomicOutput(fs::path destination, IfExists if_exists) : destination_(std::move(destination)), if_exists_(if_exists) {
  std::error_code ignored;
  // A symbolic link stays a link: its target is replaced, or made.
  for (int links = 0; links < kMostLinks && fs::is_symlink(destination_, ignored); ++links) {
    destination_ = folder_of(destination_) / fs::read_symlink(destination_, ignored);
  }
  if (fs::is_symlink(destination_, ignored)) throw FileError(destination_.string() + ": its symbolic links lead to no file");
  if (!destination_.has_filename()) throw FileError("\"" + destination_.string() + "\" is not a file name to write to");
  const fs::file_status status = fs::status(destination_, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw FileError(destination_.string() + ": is not a regular file, so it cannot be replaced as a whole; write to a file name");
  }
  if (fs::exists(status) && if_exists_ == IfExists::refuse) throw exists_error(destination_);

  const fs::path folder = folder_of(destination_);
  if (!fs::is_directory(folder, ignored))
    throw FileError(folder.string() + ": is not a folder; create it before writing " + destination_.string());
  remove_left_behind(destination_);
  for (;;) {
    temporary_ = new_partial_path(destination_);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno == EEXIST) continue;  // of another process with this number, on a file system without locks or of several hosts
    if (descriptor_ < 0) throw FileError(destination_.string() + ": its folder does not accept new files: " + reason(errno));
    // Between its creation and its lock another process may have taken it for one that was left behind.
    struct stat created {};
    lock(descriptor_);
    if (::fstat(descriptor_, &created) == 0 && created.st_nlink > 0) return;
    ::close(descriptor_);
  }
}

AtomicOutput::~AtomicOutput() {
  if (!committed_) ::unlink(temporary_.c_str());
  ::close(descriptor_);
}

void AtomicOutput::commit() {
  flush_to_device(temporary_, O_RDONLY);
  if (if_exists_ == IfExists::refuse) {
    rename_without_replacing(temporary_, destination_);
  } else if (::rename(temporary_.c_str(), destination_.c_str()) != 0) {
    throw FileError(destination_.string() + ": cannot be replaced: " + reason(errno));
  }
  committed_ = true;
  flush_to_device(destination_.has_parent_path() ? destination_.parent_path() : fs::path("."), O_RDONLY | O_DIRECTORY);
}

void write_text_file(const fs::path& destination, std::string_view text, IfExists if_exists) {
  AtomicOutput output(destination, if_exists);
  std::ofstream stream(output.temporary(), std::ios::binary);
  stream.write(text.data(), static_cast<std::streamsize>(text.size()));
  stream.close();
  if (!stream) throw FileError(destination.string() + ": writing failed, is the device full?");
  output.commit();
}

}  // namespace loopgauge::harness
