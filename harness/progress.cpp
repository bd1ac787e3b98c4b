// SPDX-License-Identifier: Apache-2.0
#include "harness/progress.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "harness/report/terminal_text.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::chrono::milliseconds kRedrawInterval{100};

// A line longer than the terminal would wrap and could not be cleared.
std::size_t terminal_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - std::size_t{1} : 79;
}

}  // namespace

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(total), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::update(std::int64_t done, std::string_view now) {
  if (!terminal_) return;
  const auto time = std::chrono::steady_clock::now();
  if (drawn_ && time - last_draw_ < kRedrawInterval) return;
  last_draw_ = time;
  drawn_ = true;
  std::string line = label_ + "  " + std::to_string(done) + "/" + std::to_string(total_);
  if (!now.empty()) line += "  " + without_controls(now);
  line.resize(std::min(line.size(), terminal_columns()));
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace loopgauge::harness
