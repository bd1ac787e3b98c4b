// SPDX-License-Identifier: Apache-2.0
// Making traces from text or token ids (`trace record`): by hand for one source, or from a JSON description of several requests.
//
// The JSON description:
//   {"name": "mixed-2", "description": "...", "source": "...", "vocab_size": 264,
//    "requests": [{<tokens>, <cut>, "id": 0, "arrival": 0, "eos_token_id": -1, "seed": 0, "task": "text",
//                  "exit_depths": [4, 1, ...], "answer_mask": [0, 1, ...]}],
//    "events": [{"submission": 3, "kind": "cancel", "request": 0}]}
// <tokens> is one of "text": "literal", "text_file": "path" (UTF-8 bytes are the tokens), "ids": [1, 2], "ids_file": "path"; paths are
// relative to the description. <cut> is "bos", "offset", "prompt_tokens", "continuation", "forced", as in RequestRecipe. Only "name",
// "requests" and the tokens are required; an unknown key is refused.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/byte_text.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

inline constexpr int kByteBos = 256;  // of the byte-level vocabulary (harness/byte_text.hpp)

struct RequestRecipe {
  std::vector<std::int32_t> tokens;           // what prompt and forced continuation are cut from
  bool bos = false;                           // put BOS before the prompt; it counts as one of its tokens
  std::int64_t offset = 0;                    // tokens to leave out at the beginning
  std::optional<std::int64_t> prompt_tokens;  // length of the prompt; absent: everything but a forced continuation
  std::int64_t continuation = 0;              // new tokens
  bool forced = false;                        // the continuation is the tokens that follow; otherwise it runs freely
};

// Prompt, forced and max_new_tokens cut as described. Throws TraceError naming what the tokens are too short for.
// `used`, if given, receives the number of source tokens consumed from the beginning, offset included.
TraceRequest cut_request(const RequestRecipe& recipe, std::int64_t* used = nullptr);

std::vector<std::int32_t> tokens_of_text(std::string_view bytes);
// The file's bytes as tokens. Throws FileError.
std::vector<std::int32_t> read_text_tokens(const std::filesystem::path& path);
// Decimal ids separated by white space or commas. Throws FileError naming the line of the first that is not an id.
std::vector<std::int32_t> read_id_tokens(const std::filesystem::path& path);

// The trace of a JSON description. Throws an input error naming the key; the trace's own validity is the writer's to check.
Trace trace_from_recipe(const std::filesystem::path& path);

}  // namespace loopgauge::harness
