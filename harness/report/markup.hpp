// SPDX-License-Identifier: Apache-2.0
// Text of a report on its way into HTML, XML and Markdown. Names and reasons come from files that anybody may have written: nothing of
// them may become markup, a link or a mention, and what is not valid text is replaced instead of ending the rendering.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace loopgauge::harness {

// Length of the well-formed UTF-8 sequence at the start of `text` (Unicode 15, table 3-7), 0 where there is none.
std::size_t sequence_length(std::string_view text);

// Of one such sequence: a control character (C0 but tab and line feed, DEL, C1), which a terminal obeys.
bool is_control(std::string_view sequence);
// U+202A to U+202E and U+2066 to U+2069: embeddings, overrides and isolates of writing direction, which show text in another order.
bool is_reordering(std::string_view sequence);

// Well-formed UTF-8: each byte that is not part of a well-formed sequence becomes U+FFFD.
std::string valid_utf8(std::string_view text);

// For showing: valid UTF-8 of at most `bytes` bytes, cut between characters, what was cut replaced by an ellipsis. Control characters but
// tab and line feed, and characters that reorder the text after them, become U+FFFD.
std::string clipped(std::string_view text, std::size_t bytes);

// For element content and quoted attributes of HTML. Control characters but tab and line feed become U+FFFD.
std::string html_text(std::string_view text);

// The same for XML 1.0, line breaks and tabs as character references, which attributes keep. Characters that XML forbids become U+FFFD.
std::string xml_text(std::string_view text);

// JSON text for a <script> element: no '<', so neither "</script" nor "<!--" can occur.
std::string json_for_script(std::string json);

// `text` on one line as code, in which GitHub interprets nothing (markup, mentions, references), in paragraphs and in tables. Blank text
// gives "".
std::string markdown_code(std::string_view text);

std::string base64(std::string_view bytes);

}  // namespace loopgauge::harness
