// SPDX-License-Identifier: Apache-2.0
// Rows of a report as bytes and back, between processes of this program: the machine's own representation, not a file format.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "harness/report/schema.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

template <class T>
void put_bytes(std::string& out, const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    put_bytes(out, static_cast<std::uint64_t>(value.size()));
    out += value;
  } else {
    static_assert(std::is_trivially_copyable_v<T>);
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
}

// Takes the value from the front of `bytes`.
template <class T>
void take_bytes(std::string_view& bytes, T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    std::uint64_t size = 0;
    take_bytes(bytes, size);
    if (size > bytes.size()) throw InternalError("rows of a report end early");
    value = bytes.substr(0, size);
    bytes.remove_prefix(size);
  } else {
    if (sizeof value > bytes.size()) throw InternalError("rows of a report end early");
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes.remove_prefix(sizeof value);
  }
}

template <class Row>
void put_rows(std::string& out, const std::vector<Row>& rows) {
  put_bytes(out, static_cast<std::uint64_t>(rows.size()));
  for (const Row& row : rows) {
    for (const Column<Row>& column : columns<Row>()) std::visit([&](auto member) { put_bytes(out, row.*member); }, column.member);
  }
}

template <class Row>
void take_rows(std::string_view& bytes, std::vector<Row>& rows) {
  std::uint64_t count = 0;
  take_bytes(bytes, count);
  rows.clear();
  for (std::uint64_t i = 0; i < count; ++i) {
    rows.emplace_back();
    for (const Column<Row>& column : columns<Row>())
      std::visit([&](auto member) { take_bytes(bytes, rows.back().*member); }, column.member);
  }
}

}  // namespace loopgauge::harness
