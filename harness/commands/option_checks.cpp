// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/option_checks.hpp"

#include <charconv>
#include <sstream>
#include <string>
#include <string_view>

namespace loopgauge::harness {
namespace {

template <class Number>
std::string text_of(Number value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

// Accepts what `accepted` does of a number that reads to its last character.
template <class Number, class Accepted>
CLI::Validator number_within(Number least, Number most, std::string_view type, std::string_view noun, Accepted accepted) {
  const auto check = [=, noun = std::string(noun)](const std::string& text) -> std::string {
    Number value{};
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc{} && stop == end && value >= least && value <= most && accepted(text)) return {};  // NaN is within nothing
    return "'" + text + "' is not a " + noun + " from " + text_of(least) + " to " + text_of(most);
  };
  return CLI::Validator(check, std::string(type) + " in [" + text_of(least) + " - " + text_of(most) + "]");
}

}  // namespace

// What converts the text later takes a leading zero for octal.
CLI::Validator whole_number(std::uint64_t least, std::uint64_t most) {
  return number_within(least, most, "INT", "whole number", [](const std::string& text) { return text.size() == 1 || text[0] != '0'; });
}

CLI::Validator real_number(double least, double most) {
  return number_within(least, most, "FLOAT", "number", [](const std::string&) { return true; });
}

}  // namespace loopgauge::harness
