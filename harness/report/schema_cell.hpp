// SPDX-License-Identifier: Apache-2.0
// Template definition of cell_text. Included by report/schema.hpp.
#pragma once

#include <charconv>
#include <cmath>
#include <type_traits>

#include "harness/report/schema.hpp"

namespace loopgauge::harness {

inline std::string number_text(double value) {
  if (std::isnan(value)) return "";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
  return {buffer, end.ptr};
}

template <class Row>
std::string cell_text(const Row& row, const Column<Row>& column) {
  return std::visit(
      [&](auto member) -> std::string {
        using T = std::remove_cvref_t<decltype(row.*member)>;
        if constexpr (std::is_same_v<T, std::string>)
          return row.*member;
        else if constexpr (std::is_same_v<T, CaseStatus>)
          return std::string(to_string(row.*member));
        else if constexpr (std::is_same_v<T, bool>)
          return row.*member ? "true" : "false";
        else if constexpr (std::is_same_v<T, double>)
          return number_text(row.*member);
        else
          return std::to_string(row.*member);
      },
      column.member);
}

}  // namespace loopgauge::harness
