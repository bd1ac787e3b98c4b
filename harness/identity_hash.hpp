// SPDX-License-Identifier: Apache-2.0
// SHA-256 over everything that decides a request or a run, so that two of them can be told apart by one word.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "models/sha256.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

// Text and numbers of a hash input are length-prefixed, so that two different inputs never give the same bytes.
class IdentityHash {
 public:
  void text(std::string_view value);
  void number(std::int64_t value);
  template <class T>
  void list(const std::vector<T>& values) {
    number(static_cast<std::int64_t>(values.size()));
    for (const T value : values) number(value);
  }
  // Name, requests and events.
  void trace(const Trace& trace);
  // Finishes and returns 64 lower-case hex digits. The object must not be used afterwards.
  std::string hex() { return hash_.hex_digest(); }

 private:
  Sha256 hash_;
};

// Of the trace alone.
std::string trace_sha256(const Trace& trace);

}  // namespace loopgauge::harness
