// SPDX-License-Identifier: Apache-2.0
// Little-endian integers in byte strings, written and read one by one: how every format of the handoff is spelled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "models/handoff/descriptor.hpp"

namespace loopgauge::handoff {

class ByteWriter {
 public:
  template <class T>
  void integer(T value) {
    auto rest = static_cast<std::make_unsigned_t<T>>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<std::byte>(rest & 0xFF));
      if constexpr (sizeof(T) > 1) rest = static_cast<std::make_unsigned_t<T>>(rest >> 8);
    }
  }
  void bytes(std::span<const std::byte> data) { out_.insert(out_.end(), data.begin(), data.end()); }
  void text(std::string_view data) { bytes(std::as_bytes(std::span(data))); }
  std::size_t size() const { return out_.size(); }
  const std::vector<std::byte>& written() const { return out_; }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

class ByteReader {
 public:
  // `what` begins an error message: "descriptor", "message", "archive".
  ByteReader(std::span<const std::byte> bytes, std::string_view what) : rest_(bytes), what_(what) {}

  template <class T>
  T integer() {
    const auto from = take(sizeof(T));
    std::make_unsigned_t<T> value = 0;
    for (std::size_t i = sizeof(T); i-- > 0;) {
      if constexpr (sizeof(T) > 1) value = static_cast<std::make_unsigned_t<T>>(value << 8);
      value = static_cast<std::make_unsigned_t<T>>(value | std::to_integer<std::uint8_t>(from[i]));
    }
    return static_cast<T>(value);
  }
  std::span<const std::byte> take(std::uint64_t count) {
    if (count > rest_.size()) {
      throw HandoffError(std::string(what_) + ": length: it ends " + std::to_string(count - rest_.size()) + " bytes before the end of a field");
    }
    const auto taken = rest_.first(static_cast<std::size_t>(count));
    rest_ = rest_.subspan(static_cast<std::size_t>(count));
    return taken;
  }
  std::string text(std::uint64_t count) {
    const auto from = take(count);
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  std::size_t left() const { return rest_.size(); }
  std::string_view what() const { return what_; }

 private:
  std::span<const std::byte> rest_;
  std::string_view what_;
};

// What another process or a file says, in a message: bytes that are no printable ASCII as question marks.
std::string printable(std::string text);

// SHA-256 as 32 bytes, and as 64 hexadecimal digits.
std::vector<std::byte> sha256_bytes(std::span<const std::byte> data);
std::vector<std::byte> from_hexadecimal(const std::string& digits);
std::string to_hexadecimal(std::span<const std::byte> bytes);

}  // namespace loopgauge::handoff
