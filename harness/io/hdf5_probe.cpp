// SPDX-License-Identifier: Apache-2.0
#include "harness/io/hdf5_probe.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "harness/io/hdf5.hpp"
#include "models/error.hpp"

namespace loopgauge::harness::h5 {
namespace {

constexpr int kMaxDepth = 16;  // a hard link may lead back to a group above
constexpr int kMaxObjects = 1 << 20;
constexpr unsigned kBaseSeconds = 5;  // of processor time, then one more for each 4 MiB of the file
constexpr std::uintmax_t kBytesPerSecond = std::uintmax_t{4} << 20;

// A refusal in good order is not what the probe looks for.
template <class Read>
void attempt(Read read) {
  try {
    read();
  } catch (const std::exception&) {
  }
}

void read_attributes(const Object& object) {
  attempt([&] {
    for (const std::string& name : object.attribute_names()) {
      attempt([&] { object.string_attribute(name); });
      attempt([&] { object.string_array_attribute(name); });
      attempt([&] { object.int_attribute(name); });
      attempt([&] { object.int_array_attribute(name); });
      attempt([&] { object.double_attribute(name); });
      attempt([&] { object.double_array_attribute(name); });
    }
  });
}

void read_dataset(const Dataset& dataset) {
  read_attributes(dataset);
  attempt([&] {
    switch (dataset.type()) {
      case ElementType::int32:
        dataset.read<std::int32_t>();
        break;
      case ElementType::int64:
        dataset.read<std::int64_t>();
        break;
      case ElementType::uint8:
        dataset.read<std::uint8_t>();
        break;
      case ElementType::float32:
        dataset.read<float>();
        break;
      case ElementType::float64:
        dataset.read<double>();
        break;
      case ElementType::string:
        dataset.read<std::string>();
        break;
      case ElementType::other:
        break;
    }
  });
}

void read_group(const Group& group, int depth, int& objects) {
  read_attributes(group);
  attempt([&] {
    for (const std::string& name : group.members()) {
      if (++objects > kMaxObjects || depth == kMaxDepth) return;
      attempt([&] {
        if (group.has_group(name)) {
          read_group(group.open_group(name), depth + 1, objects);
        } else if (group.has_dataset(name)) {
          read_dataset(group.open_dataset(name));
        }
      });
    }
  });
}

// What a child does before it reads.
void prepare_child(unsigned cpu_seconds) {
  // A crash here is a finding and not a fault of the program: default action, no core file, no report on the user's terminal.
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM, SIGXCPU}) ::signal(signal, SIG_DFL);
  const rlimit no_core{0, 0}, processor_time{cpu_seconds, cpu_seconds + 1};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::setrlimit(RLIMIT_CPU, &processor_time);
  ::alarm(10 * cpu_seconds);
  const int null = ::open("/dev/null", O_WRONLY);
  if (null >= 0) ::dup2(null, STDERR_FILENO);
}

// Waits for the child; throws what its end says about the file.
void expect_good_end(pid_t child, const std::filesystem::path& path, unsigned cpu_seconds) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return;  // somebody else reaped it; nothing is known
  }
  const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (signal == SIGALRM || signal == SIGXCPU || signal == SIGKILL) {
    throw FileError(path.string() + ": reading it comes to no end (stopped after " + std::to_string(cpu_seconds) +
                    " s of processor time): the HDF5 file is corrupt");
  }
  if (signal != 0 || WEXITSTATUS(status) != 0) {
    throw FileError(path.string() + ": the HDF5 library crashes on it" + (signal != 0 ? " (signal " + std::to_string(signal) + ")" : "") +
                    ": the file is corrupt");
  }
}

void write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the parent is gone
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

// First byte of what a child sends.
constexpr char kResult = 'r', kRefusal = 'e';

struct Child {
  pid_t process = -1;
  int descriptor = -1;
  std::string received = {};
};

// Forks a child that sends what `read` returns, or the sentence of what it throws.
Child start_child(const std::filesystem::path& path, const std::function<std::string()>& read, unsigned cpu_seconds,
                  const std::vector<Child>& others) {
  int ends[2];
  if (::pipe(ends) != 0) return {};
  const pid_t process = ::fork();
  if (process == 0) {
    ::close(ends[0]);
    for (const Child& other : others) ::close(other.descriptor);
    prepare_child(cpu_seconds);
    std::string answer;
    try {
      answer = kResult + read();
    } catch (const Error& error) {
      answer = kRefusal + std::string(error.what());
    } catch (const std::exception& error) {
      answer = kRefusal + path.string() + ": " + error.what();
    }
    write_all(ends[1], answer);
    ::_exit(0);  // without the parent's exit handlers: they are the parent's to run
  }
  ::close(ends[1]);
  if (process < 0) {
    ::close(ends[0]);
    return {};
  }
  return {process, ends[0]};
}

// Takes what the children send as it comes, until each has closed its end.
void receive(std::vector<Child>& children) {
  std::vector<pollfd> open;
  for (const Child& child : children) open.push_back({child.descriptor, POLLIN, 0});
  std::size_t left = open.size();
  std::vector<char> buffer(std::size_t{1} << 16);
  while (left > 0) {
    if (::poll(open.data(), open.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw InternalError("poll: " + std::system_category().message(errno));
    }
    for (std::size_t i = 0; i < open.size(); ++i) {
      if (open[i].revents == 0) continue;
      const ssize_t got = ::read(open[i].fd, buffer.data(), buffer.size());
      if (got < 0 && errno == EINTR) continue;
      if (got > 0) {
        children[i].received.append(buffer.data(), static_cast<std::size_t>(got));
        continue;
      }
      open[i].fd = -1;  // poll leaves it out
      --left;
    }
  }
}

}  // namespace

void probe_in_child(const std::filesystem::path& path, const std::function<void()>& read, unsigned cpu_seconds) {
  const pid_t child = ::fork();
  if (child < 0) return;
  if (child == 0) {
    prepare_child(cpu_seconds);
    attempt(read);
    ::_exit(0);
  }
  expect_good_end(child, path, cpu_seconds);
}

std::vector<std::string> read_in_children(const std::filesystem::path& path, const std::vector<std::function<std::string()>>& reads,
                                          unsigned cpu_seconds) {
  std::vector<Child> children;
  for (const auto& read : reads) {
    children.push_back(start_child(path, read, cpu_seconds, children));
    if (children.back().process < 0) break;
  }
  const std::size_t started = children.size() - (children.back().process < 0);
  children.resize(started);
  receive(children);
  std::vector<std::string> results;
  std::exception_ptr finding;
  for (Child& child : children) {
    ::close(child.descriptor);
    try {
      expect_good_end(child.process, path, cpu_seconds);
      if (child.received.empty()) throw FileError(path.string() + ": reading it ended without a result");
      if (child.received[0] == kRefusal) throw FileError(child.received.substr(1));
    } catch (const FileError&) {
      if (!finding) finding = std::current_exception();  // all children are waited for before it is thrown
      continue;
    }
    child.received.erase(0, 1);
    results.push_back(std::move(child.received));
  }
  if (finding) std::rethrow_exception(finding);
  for (std::size_t i = started; i < reads.size(); ++i) results.push_back(reads[i]());
  return results;
}

void probe_in_child(const std::filesystem::path& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  const auto seconds = static_cast<unsigned>(kBaseSeconds + (error ? 0 : size / kBytesPerSecond));
  const auto read_all = [&path] {
    int objects = 0;
    read_group(File::open_readonly(path, Trust::probed).root(), 0, objects);
  };
  probe_in_child(path, read_all, seconds);
}

}  // namespace loopgauge::harness::h5
