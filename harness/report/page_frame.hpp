// SPDX-License-Identifier: Apache-2.0
// What pages have in common: a frame with slots, and the hashes by which a page's content security policy names its own style and scripts.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace loopgauge::harness {

// 'sha256-...' of a style or script, as a source of a content security policy.
std::string content_hash(std::string_view source);

// Writes the frame with every {{name}} replaced by the part of that name. Parts are not looked into: text of a report may hold braces.
void write_page(std::string_view frame, const std::vector<std::pair<std::string_view, std::string>>& parts, std::ostream& out);

}  // namespace loopgauge::harness
