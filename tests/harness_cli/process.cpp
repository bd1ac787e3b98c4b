// SPDX-License-Identifier: Apache-2.0
#include "tests/harness_cli/process.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>

namespace loopgauge::test {
namespace {

void redirect(int descriptor, const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || dup2(file, descriptor) < 0) _exit(127);
  close(file);
}

}  // namespace

ProcessResult run_program(const std::vector<std::string>& arguments, const ProcessOptions& options) {
  const TemporaryFolder folder;
  const std::filesystem::path out = options.standard_output.empty() ? folder / "out" : options.standard_output;
  const std::filesystem::path err = folder / "err";

  std::vector<std::string> words{LOOPGAUGE_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string home = options.home.empty() ? std::string(LOOPGAUGE_SOURCE_DIR) : options.home.string();

  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    redirect(STDOUT_FILENO, out);
    redirect(STDERR_FILENO, err);
    setenv("LOOPGAUGE_HOME", home.c_str(), 1);
    if (options.ignore_hangup) signal(SIGHUP, SIG_IGN);
    if (options.address_space_mib > 0) {
      const rlim_t bytes = static_cast<rlim_t>(options.address_space_mib) << 20;
      const rlimit limit{bytes, bytes};
      setrlimit(RLIMIT_AS, &limit);
    }
    if (options.file_kib > 0) {
      const rlim_t bytes = static_cast<rlim_t>(options.file_kib) << 10;
      const rlimit limit{bytes, bytes};
      setrlimit(RLIMIT_FSIZE, &limit);
    }
    execv(argv[0], argv.data());
    _exit(127);
  }
  if (options.interrupt_after_ms > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.interrupt_after_ms));
    kill(child, options.interrupt);
  }
  if (options.kill_after_ms >= 0) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(options.kill_after_ms));
    kill(child, SIGKILL);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid failed");

  ProcessResult result;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  // A child that was killed at once has neither.
  if (options.standard_output.empty() && std::filesystem::exists(out)) result.out = read_file(out);
  if (std::filesystem::exists(err)) result.err = read_file(err);
  return result;
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "loopgauge-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace loopgauge::test
