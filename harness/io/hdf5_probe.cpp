// SPDX-License-Identifier: Apache-2.0
#include "harness/io/hdf5_probe.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <string>
#include <system_error>

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

[[noreturn]] void run_child(const std::function<void()>& read, unsigned cpu_seconds) {
  // A crash here is a finding and not a fault of the program: default action, no core file, no report on the user's terminal.
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM, SIGXCPU}) ::signal(signal, SIG_DFL);
  const rlimit no_core{0, 0}, processor_time{cpu_seconds, cpu_seconds + 1};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::setrlimit(RLIMIT_CPU, &processor_time);
  ::alarm(10 * cpu_seconds);
  const int null = ::open("/dev/null", O_WRONLY);
  if (null >= 0) ::dup2(null, STDERR_FILENO);
  attempt(read);
  ::_exit(0);  // without the parent's exit handlers: they are the parent's to run
}

}  // namespace

void probe_in_child(const std::filesystem::path& path, const std::function<void()>& read, unsigned cpu_seconds) {
  const pid_t child = ::fork();
  if (child < 0) return;
  if (child == 0) run_child(read, cpu_seconds);
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
