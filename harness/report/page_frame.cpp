// SPDX-License-Identifier: Apache-2.0
#include "harness/report/page_frame.hpp"

#include <ostream>

#include "harness/report/markup.hpp"
#include "models/error.hpp"
#include "models/sha256.hpp"

namespace loopgauge::harness {

std::string content_hash(std::string_view source) {
  Sha256 hash;
  hash.update(source.data(), source.size());
  const std::string hex = hash.hex_digest();
  std::string digest;
  for (std::size_t i = 0; i < hex.size(); i += 2) digest += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return "'sha256-" + base64(digest) + "'";
}

void write_page(std::string_view frame, const std::vector<std::pair<std::string_view, std::string>>& parts, std::ostream& out) {
  while (!frame.empty()) {
    const std::size_t open = frame.find("{{");
    out << frame.substr(0, open);
    if (open == std::string_view::npos) return;
    const std::size_t close = frame.find("}}", open);
    if (close == std::string_view::npos) throw InternalError("the page's frame has an open slot");
    const std::string_view name = frame.substr(open + 2, close - open - 2);
    bool found = false;
    for (const auto& [part, content] : parts) {
      if (part != name) continue;
      out << content;
      found = true;
    }
    if (!found) throw InternalError("the page's frame has the unknown slot " + std::string(name));
    frame.remove_prefix(close + 2);
  }
}

}  // namespace loopgauge::harness
