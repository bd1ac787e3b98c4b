# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT, the C++ source that holds the page's sources as texts. Variables: PAGE, BENCH_PAGE, STYLE, SCRIPTS (a list of files), OUTPUT.
# Texts are cut into literals below the length that every compiler has to accept.
function(literal text result)
  set(out "")
  string(LENGTH "${text}" length)
  set(begin 0)
  while(begin LESS length)
    string(SUBSTRING "${text}" ${begin} 8000 part)
    string(APPEND out "\n    R\"asset(${part})asset\"")
    math(EXPR begin "${begin} + 8000")
  endwhile()
  set(${result} "${out}" PARENT_SCOPE)
endfunction()

# Everything is read as a single string: a list separator or bracket in a source must not be taken for one of CMake's.
function(read_text file result)
  file(READ "${file}" text)
  string(REGEX REPLACE "[^\n]*SPDX-License-Identifier[^\n]*\n" "" text "${text}")
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

read_text("${PAGE}" page)
read_text("${BENCH_PAGE}" bench_page)
read_text("${STYLE}" style)
set(script "(() => {\n\"use strict\";\n")
foreach(file IN LISTS SCRIPTS)
  read_text("${file}" part)
  string(APPEND script "${part}\n")
endforeach()
string(APPEND script "})();\n")

literal("${page}" page_literal)
literal("${bench_page}" bench_page_literal)
literal("${style}" style_literal)
literal("${script}" script_literal)
file(WRITE "${OUTPUT}.new" "// Written by harness/report/embed_assets.cmake from harness/report/html.
#include \"harness/report/html_assets.hpp\"

namespace loopgauge::harness::html_assets {

std::string_view page() {
  static constexpr std::string_view text =${page_literal};
  return text;
}

std::string_view bench_page() {
  static constexpr std::string_view text =${bench_page_literal};
  return text;
}

std::string_view style() {
  static constexpr std::string_view text =${style_literal};
  return text;
}

std::string_view script() {
  static constexpr std::string_view text =${script_literal};
  return text;
}

}  // namespace loopgauge::harness::html_assets
")
file(COPY_FILE "${OUTPUT}.new" "${OUTPUT}" ONLY_IF_DIFFERENT)
file(REMOVE "${OUTPUT}.new")
