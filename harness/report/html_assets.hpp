// SPDX-License-Identifier: Apache-2.0
// The page's own sources, harness/report/html/, as texts in the program (embed_assets.cmake).
#pragma once

#include <string_view>

namespace loopgauge::harness::html_assets {

std::string_view page();    // page.html: the frame, with a slot {{name}} for each part
std::string_view bench_page();  // bench_page.html: the same for bench reports
std::string_view style();   // style.css
std::string_view script();  // all scripts, one after the other, inside one function

}  // namespace loopgauge::harness::html_assets
