// SPDX-License-Identifier: Apache-2.0
#include "harness/report/text_table.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ostream>

#include "harness/report/terminal_text.hpp"

namespace loopgauge::harness {

void TextTable::add(std::vector<std::string> row) {
  for (std::string& cell : row) cell = without_controls(cell);
  rows_.push_back(std::move(row));
}

void TextTable::print(std::ostream& out, int indent) const {
  std::vector<std::size_t> widths;
  for (const auto& row : rows_) {
    if (widths.size() < row.size()) widths.resize(row.size(), 0);
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows_) {
    std::string line(static_cast<std::size_t>(indent), ' ');
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      if (i > 0) line += "  ";
      line += i == 0 ? row[i] + padding : padding + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  }
}

std::string short_number(double value, int digits) {
  if (std::isnan(value)) return "-";
  return formatted("%.*g", digits, value);
}

std::string percent(double fraction, int decimals) {
  if (std::isnan(fraction)) return "-";
  return formatted("%.*f %%", decimals, 100.0 * fraction);
}

std::string byte_count(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? formatted("%.0f %s", value, kUnits[unit]) : formatted("%.4g %s", value, kUnits[unit]);
}

}  // namespace loopgauge::harness
