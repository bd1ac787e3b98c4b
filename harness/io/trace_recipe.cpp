// SPDX-License-Identifier: Apache-2.0
#include "harness/io/trace_recipe.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "harness/io/text_file.hpp"
#include "harness/io/trace_file.hpp"
#include "models/error.hpp"
#include "models/strict_json.hpp"

namespace loopgauge::harness {
namespace {

using nlohmann::json;

std::string read_bytes(const std::filesystem::path& path) {
  return read_text_file(path, "text or description");
}

// One JSON object of the description, with the path that messages name.
class Node {
 public:
  Node(const json& value, std::string where, std::span<const std::string_view> keys) : value_(value), where_(std::move(where)) {
    if (!value_.is_object()) throw TraceError(where_ + " = " + shown(value_) + " is not an object");
    for (const auto& [key, ignored] : value_.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) throw TraceError(where_ + " has the unknown key \"" + key + "\"");
    }
  }

  bool has(const char* key) const { return value_.contains(key); }
  const json& at(const char* key) const {
    if (!has(key)) throw TraceError(where_ + " has no \"" + key + "\"");
    return value_.at(key);
  }
  std::string path(const char* key) const { return where_ + "." + key; }

  std::int64_t integer(const char* key, std::int64_t fallback, std::int64_t low, std::int64_t high) const {
    return has(key) ? integer_of(at(key), path(key), low, high) : fallback;
  }
  std::uint64_t unsigned_integer(const char* key, std::uint64_t fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_number_unsigned()) throw TraceError(path(key) + " = " + shown(at(key)) + " is not an integer from 0");
    return at(key).get<std::uint64_t>();
  }
  float real(const char* key, float fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_number()) throw TraceError(path(key) + " = " + shown(at(key)) + " is not a number");
    return at(key).get<float>();
  }
  bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_boolean()) throw TraceError(path(key) + " = " + shown(at(key)) + " is neither true nor false");
    return at(key).get<bool>();
  }
  std::string text(const char* key, const std::string& fallback) const { return has(key) ? text(key) : fallback; }
  std::string text(const char* key) const {
    if (!at(key).is_string()) throw TraceError(path(key) + " = " + shown(at(key)) + " is not a string");
    return at(key).get<std::string>();
  }
  template <class T>
  std::vector<T> integers(const char* key, std::int64_t low, std::int64_t high) const {
    const json& list = array(key);
    std::vector<T> values;
    for (std::size_t i = 0; i < list.size(); ++i) {
      values.push_back(static_cast<T>(integer_of(list[i], path(key) + "[" + std::to_string(i) + "]", low, high)));
    }
    return values;
  }
  const json& array(const char* key) const {
    if (!at(key).is_array()) throw TraceError(path(key) + " = " + shown(at(key)) + " is not a list");
    return at(key);
  }

 private:
  static std::int64_t integer_of(const json& value, const std::string& where, std::int64_t low, std::int64_t high) {
    const bool representable = value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX);
    if (!representable || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high) {
      throw TraceError(where + " = " + shown(value) + " is not an integer in " + std::to_string(low) + ".." + std::to_string(high));
    }
    return value.get<std::int64_t>();
  }

  const json& value_;
  std::string where_;
};

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kInt32Min = std::numeric_limits<std::int32_t>::min();

std::vector<std::int32_t> source_tokens(const Node& node, const std::filesystem::path& folder) {
  static constexpr std::array<const char*, 4> kSources{"text", "text_file", "ids", "ids_file"};
  const auto given = std::count_if(kSources.begin(), kSources.end(), [&](const char* key) { return node.has(key); });
  if (given != 1) {
    throw TraceError(node.path("tokens") + ": " + std::to_string(given) + " of text, text_file, ids, ids_file are given, expected one");
  }
  if (node.has("text")) return tokens_of_text(node.text("text"));
  if (node.has("text_file")) return read_text_tokens(folder / node.text("text_file"));
  if (node.has("ids")) return node.integers<std::int32_t>("ids", kInt32Min, kInt32Max);
  return read_id_tokens(folder / node.text("ids_file"));
}

TraceRequest request_from(const json& value, std::size_t index, const std::filesystem::path& folder) {
  static constexpr std::array<std::string_view, 18> kKeys{
      "text",   "text_file", "ids",     "ids_file",     "bos",  "offset", "prompt_tokens", "continuation",
      "forced", "id",        "arrival", "eos_token_id", "seed", "task",   "exit_depths",   "answer_mask",
      "temperature", "draft_tokens"};
  const Node node(value, "requests[" + std::to_string(index) + "]", kKeys);
  RequestRecipe recipe;
  recipe.tokens = source_tokens(node, folder);
  recipe.bos = node.boolean("bos", false);
  recipe.offset = node.integer("offset", 0, 0, kInt32Max);
  if (node.has("prompt_tokens")) recipe.prompt_tokens = node.integer("prompt_tokens", 0, 1, kMaxTraceTokens);
  recipe.continuation = node.integer("continuation", 0, 0, kMaxTraceTokens);
  recipe.forced = node.boolean("forced", false);
  TraceRequest request = cut_request(recipe);
  request.id = static_cast<int>(node.integer("id", static_cast<std::int64_t>(index), 0, kInt32Max));
  request.arrival = static_cast<int>(node.integer("arrival", 0, 0, kInt32Max));
  request.eos_token_id = static_cast<int>(node.integer("eos_token_id", -1, -1, kInt32Max));
  request.seed = node.unsigned_integer("seed", 0);
  request.temperature = node.real("temperature", 0.0f);
  request.task = node.text("task", "text");
  if (node.has("exit_depths")) request.exit_depths = node.integers<std::uint8_t>("exit_depths", 0, 255);
  if (node.has("draft_tokens")) request.draft_tokens = node.integers<std::int32_t>("draft_tokens", -1, kInt32Max);
  if (node.has("answer_mask")) request.answer_mask = node.integers<std::uint8_t>("answer_mask", 0, 255);
  return request;
}

TraceEvent event_from(const json& value, std::size_t index) {
  static constexpr std::array<std::string_view, 3> kKeys{"submission", "kind", "request"};
  const Node node(value, "events[" + std::to_string(index) + "]", kKeys);
  TraceEvent event;
  event.submission = static_cast<int>(node.integer("submission", 0, 0, kInt32Max));
  event.request = static_cast<int>(node.integer("request", 0, 0, kInt32Max));
  event.kind = parse_trace_event_kind(node.text("kind"));
  return event;
}

}  // namespace

TraceRequest cut_request(const RequestRecipe& recipe, std::int64_t* used) {
  const auto available = static_cast<std::int64_t>(recipe.tokens.size()) - recipe.offset;
  const std::int64_t bos = recipe.bos ? 1 : 0;
  const std::int64_t forced = recipe.forced ? recipe.continuation : 0;
  if (recipe.forced && recipe.continuation == 0) throw TraceError("a forced continuation of no tokens: say how many with continuation");
  const std::int64_t from_source = recipe.prompt_tokens ? *recipe.prompt_tokens - bos : std::max<std::int64_t>(0, available - forced);
  if (from_source + bos < 1)
    throw TraceError("the prompt would be empty: the source holds " + std::to_string(std::max<std::int64_t>(0, available)) +
                     " tokens from offset " + std::to_string(recipe.offset));
  if (from_source + forced > available) {
    throw TraceError("the source holds " + std::to_string(std::max<std::int64_t>(0, available)) + " tokens from offset " +
                     std::to_string(recipe.offset) + ", but a prompt of " + std::to_string(from_source + bos) +
                     (recipe.bos ? " tokens with BOS" : " tokens") + " and " + std::to_string(forced) + " forced tokens need " +
                     std::to_string(from_source + forced));
  }
  TraceRequest request;
  if (recipe.bos) request.prompt.push_back(kByteBos);
  const auto begin = recipe.tokens.begin() + recipe.offset;
  request.prompt.insert(request.prompt.end(), begin, begin + from_source);
  request.forced.assign(begin + from_source, begin + from_source + forced);
  request.max_new_tokens = static_cast<int>(recipe.continuation);
  if (used != nullptr) *used = recipe.offset + from_source + forced;
  return request;
}

std::vector<std::int32_t> tokens_of_text(std::string_view bytes) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(bytes.size());
  for (const char byte : bytes) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

std::vector<std::int32_t> read_text_tokens(const std::filesystem::path& path) { return tokens_of_text(read_bytes(path)); }

std::vector<std::int32_t> read_id_tokens(const std::filesystem::path& path) {
  const std::string bytes = read_bytes(path);
  std::vector<std::int32_t> tokens;
  int line = 1;
  const char* const end = bytes.data() + bytes.size();
  for (const char* at = bytes.data(); at != end;) {
    if (*at == '\n') ++line;
    if (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n' || *at == ',') {
      ++at;
      continue;
    }
    const char* const stop = std::find_if(at, end, [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == ','; });
    std::int32_t id = 0;
    const auto [last, error] = std::from_chars(at, stop, id);
    if (error != std::errc{} || last != stop) {
      throw FileError(path.string() + ":" + std::to_string(line) + ": \"" + std::string(at, std::min<std::ptrdiff_t>(stop - at, 40)) +
                      "\" is not a token id");
    }
    tokens.push_back(id);
    at = stop;
  }
  return tokens;
}

Trace trace_from_recipe(const std::filesystem::path& path) {
  static constexpr std::array<std::string_view, 6> kKeys{"name", "description", "source", "vocab_size", "requests", "events"};
  const json document = read_json_object(path, kMostTextBytes);
  try {
    const Node node(document, "the description", kKeys);
    Trace trace;
    trace.name = node.text("name");
    trace.description = node.text("description", "");
    trace.source = node.text("source", "trace record --spec " + path.filename().string());
    trace.vocab_size = static_cast<int>(node.integer("vocab_size", kByteVocabulary, 1, kInt32Max));
    const json& requests = node.array("requests");
    for (std::size_t i = 0; i < requests.size(); ++i) {
      try {
        trace.requests.push_back(request_from(requests[i], i, path.parent_path()));
      } catch (const TraceError& error) {
        const std::string place = "requests[" + std::to_string(i) + "]";
        throw TraceError(std::string_view(error.what()).starts_with(place) ? error.what() : place + ": " + error.what());
      }
    }
    if (node.has("events")) {
      const json& events = node.array("events");
      for (std::size_t i = 0; i < events.size(); ++i) trace.events.push_back(event_from(events[i], i));
    }
    return trace;
  } catch (const TraceError& error) {
    throw TraceError(path.string() + ": " + error.what());
  }
}

}  // namespace loopgauge::harness
