// SPDX-License-Identifier: Apache-2.0
// Errors that cross a module boundary. Each message names the object, what was expected, what was found
// and, where it helps, what to do. The harness maps ErrorKind to the process exit code (README, "Exit codes").
#pragma once

#include <stdexcept>
#include <string>

namespace loopgauge {

enum class ErrorKind {
  usage,        // the request itself is wrong: configuration, flags, illegal combination (exit 2)
  input,        // a file is missing, corrupt, of an unknown version or inconsistent (exit 3)
  unsupported,  // cannot run here: no device, not compiled, shape outside the capabilities (exit 4)
  numeric,      // the algorithm met a value its specification declares an error (exit 1)
  internal,     // a broken invariant of this program (exit 6)
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

struct ConfigError : Error {
  explicit ConfigError(const std::string& message) : Error(ErrorKind::usage, message) {}
};
struct CheckpointError : Error {
  explicit CheckpointError(const std::string& message) : Error(ErrorKind::input, message) {}
};
struct TraceError : Error {
  explicit TraceError(const std::string& message) : Error(ErrorKind::input, message) {}
};
struct FileError : Error {
  explicit FileError(const std::string& message) : Error(ErrorKind::input, message) {}
};
struct UnsupportedError : Error {
  explicit UnsupportedError(const std::string& message) : Error(ErrorKind::unsupported, message) {}
};
struct NumericError : Error {
  explicit NumericError(const std::string& message) : Error(ErrorKind::numeric, message) {}
};
struct InternalError : Error {
  explicit InternalError(const std::string& message) : Error(ErrorKind::internal, message) {}
};

}  // namespace loopgauge
