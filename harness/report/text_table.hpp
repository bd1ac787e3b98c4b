// SPDX-License-Identifier: Apache-2.0
// Aligned columns of text.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace loopgauge::harness {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) { add(std::move(header)); }
  // Cells are one line each: line breaks and control characters in them are shown escaped.
  void add(std::vector<std::string> row);
  // First column left-aligned, the others right-aligned, two spaces apart, `indent` spaces before each line.
  void print(std::ostream& out, int indent = 2) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// `digits` significant digits without trailing zeros, "-" for NaN.
std::string short_number(double value, int digits = 3);
std::string percent(double fraction, int decimals = 1);  // "95.3 %", "-"
std::string byte_count(std::int64_t bytes);              // "713 B", "1.53 KiB", "12.1 MiB"

}  // namespace loopgauge::harness
