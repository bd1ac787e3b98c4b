// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/child_lines.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "harness/interrupt.hpp"
#include "models/error.hpp"

extern char** environ;

namespace loopgauge::harness {

namespace {

class Pipe {
 public:
  Pipe() {
    if (pipe2(ends_, O_CLOEXEC) != 0) throw InternalError(std::string("a pipe cannot be made: ") + std::strerror(errno));
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  int read_end() const { return ends_[0]; }
  int write_end() const { return ends_[1]; }
  void close_end(int end) {
    if (ends_[end] >= 0) close(ends_[end]);
    ends_[end] = -1;
  }

 private:
  int ends_[2] = {-1, -1};
};

// Ends the process when it is still there, so that nothing outlives an error here. It leads a process group of its own, which goes with it.
class Child {
 public:
  explicit Child(pid_t process) : process_(process) {}
  ~Child() {
    if (process_ > 0) {
      kill(-process_, SIGKILL);
      wait();
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void end() const { kill(-process_, SIGKILL); }
  int wait() {
    int status = 0;
    while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {
    }
    process_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t process_;
};

// Cuts what was read into lines.
class Lines {
 public:
  template <class Take>
  void add(const char* bytes, std::size_t count, Take&& take) {
    rest_.append(bytes, count);
    for (std::size_t end; (end = rest_.find('\n')) != std::string::npos; rest_.erase(0, end + 1)) take(rest_.substr(0, end));
  }

 private:
  std::string rest_;
};

}  // namespace

ChildResult run_child(const std::vector<std::string>& arguments, double seconds, const std::function<void(const std::string&)>& line, ChildErrors errors) {
  Pipe out, err;
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.write_end(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.write_end(), STDERR_FILENO);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t process = 0;
  const int error = posix_spawnp(&process, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return {127, false, std::strerror(error)};
  Child child(process);
  out.close_end(1);
  err.close_end(1);

  ChildResult result;
  Lines lines, messages;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  pollfd sources[2] = {{out.read_end(), POLLIN, 0}, {err.read_end(), POLLIN, 0}};
  while (sources[0].fd >= 0 || sources[1].fd >= 0) {
    throw_if_interrupted();
    if (std::chrono::steady_clock::now() > deadline && !result.timed_out) {
      result.timed_out = true;
      child.end();
    }
    constexpr int kMilliseconds = 100;
    if (poll(sources, 2, kMilliseconds) <= 0) continue;
    for (pollfd& source : sources) {
      if (source.fd < 0 || source.revents == 0) continue;
      char bytes[4096];
      const ssize_t count = read(source.fd, bytes, sizeof bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        source.fd = -1;
        continue;
      }
      if (&source == &sources[0]) {
        lines.add(bytes, static_cast<std::size_t>(count), line);
      } else {
        if (errors == ChildErrors::shown) std::fwrite(bytes, 1, static_cast<std::size_t>(count), stderr);
        messages.add(bytes, static_cast<std::size_t>(count), [&](const std::string& text) {
          if (text.find_first_not_of(" \t\r") != std::string::npos) result.last_error = text;
        });
      }
    }
  }
  result.exit_code = child.wait();
  return result;
}

}  // namespace loopgauge::harness
