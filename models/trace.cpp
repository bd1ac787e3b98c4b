// SPDX-License-Identifier: Apache-2.0
#include "models/trace.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>

#include "models/algorithm_config.hpp"

namespace loopgauge {
namespace {

constexpr std::array<std::string_view, 6> kTasks{"text", "needle", "kv", "copy", "sum", "other"};
constexpr std::size_t kFaultsPerArray = 4;  // of one array; the rest is counted, a million bad ids need no million sentences
constexpr std::int64_t kMaxNewTokens = std::int64_t{1} << 24;

using Faults = std::vector<std::string>;

std::string request_path(std::size_t index) { return "requests/" + std::to_string(index); }

// Appends "<path>[i] = v <rule>" for the values that `bad` picks.
template <class T, class Bad>
void check_values(Faults& faults, const std::string& path, const std::vector<T>& values, const std::string& rule, Bad bad) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!bad(values[i])) continue;
    if (++count > kFaultsPerArray) continue;
    faults.push_back(path + "[" + std::to_string(i) + "] = " + std::to_string(values[i]) + " " + rule);
  }
  if (count > kFaultsPerArray) {
    faults.push_back(path + ": " + std::to_string(count - kFaultsPerArray) + " more of its values are at fault in the same way");
  }
}

void check_tokens(Faults& faults, const std::string& path, const std::vector<std::int32_t>& tokens, int vocab_size,
                  const std::string& limit) {
  check_values(faults, path, tokens, "is negative", [](std::int32_t token) { return token < 0; });
  check_values(faults, path, tokens, "is not below " + limit + " " + std::to_string(vocab_size),
               [vocab_size](std::int32_t token) { return token >= vocab_size; });
}

void check_name(Faults& faults, const std::string& name) {
  const auto allowed = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
  };
  if (name.empty()) {
    faults.push_back("name is empty; case ids end with it");
  } else if (!std::all_of(name.begin(), name.end(), allowed) || name.front() == '.') {
    faults.push_back("name \"" + name + "\" is not usable in case ids: letters, digits, '.', '_' and '-', not beginning with '.'");
  }
}

void check_request(Faults& faults, const TraceRequest& request, const std::string& path, int vocab_size) {
  if (request.id < 0) faults.push_back(path + "/id = " + std::to_string(request.id) + " is negative");
  if (request.arrival < 0) faults.push_back(path + "/arrival = " + std::to_string(request.arrival) + " is negative");
  if (request.max_new_tokens < 0 || request.max_new_tokens > kMaxNewTokens) {
    faults.push_back(path + "/max_new_tokens = " + std::to_string(request.max_new_tokens) + " is outside 0.." +
                     std::to_string(kMaxNewTokens));
  }
  if (request.eos_token_id < -1 || (vocab_size > 0 && request.eos_token_id >= vocab_size)) {
    faults.push_back(path + "/eos_token_id = " + std::to_string(request.eos_token_id) +
                     " is neither -1 (none) nor an id below vocab_size " + std::to_string(vocab_size));
  }
  if (std::find(kTasks.begin(), kTasks.end(), request.task) == kTasks.end()) {
    faults.push_back(path + "/task = \"" + request.task + "\" is none of text, needle, kv, copy, sum, other");
  }
  if (request.prompt.empty()) faults.push_back(path + "/prompt is empty; a prompt has at least one token");
  if (vocab_size > 0) {
    check_tokens(faults, path + "/prompt", request.prompt, vocab_size, "vocab_size");
    check_tokens(faults, path + "/forced", request.forced, vocab_size, "vocab_size");
  }

  const auto check_length = [&](const char* name, std::size_t found) {
    if (found != 0 && found != static_cast<std::size_t>(std::max(0, request.max_new_tokens))) {
      faults.push_back(path + "/" + name + " has " + std::to_string(found) + " entries, max_new_tokens is " +
                       std::to_string(request.max_new_tokens));
    }
  };
  check_length("forced", request.forced.size());
  check_length("exit_depths", request.exit_depths.size());
  check_length("draft_tokens", request.draft_tokens.size());
  check_values(faults, path + "/draft_tokens", request.draft_tokens, "is neither -1 (the model's own draft) nor a token",
               [vocab_size](std::int32_t token) { return token < -1 || (vocab_size > 0 && token >= vocab_size); });
  if (request.temperature != 0.0f && !(request.temperature >= kLeastTemperature && request.temperature <= kMostTemperature)) {
    faults.push_back(path + "/temperature = " + std::to_string(request.temperature) + " is neither 0 (greedy) nor within 0.01..100");
  }
  check_values(faults, path + "/exit_depths", request.exit_depths, "is not a loop in 1.." + std::to_string(kLoops),
               [](std::uint8_t depth) { return depth < 1 || depth > kLoops; });
  if (!request.answer_mask.empty()) {
    if (request.forced.empty()) {
      faults.push_back(path + "/answer_mask is present without forced: it says which forced tokens are scored");
    } else if (request.answer_mask.size() != request.forced.size()) {
      faults.push_back(path + "/answer_mask has " + std::to_string(request.answer_mask.size()) + " entries, forced has " +
                       std::to_string(request.forced.size()));
    }
    check_values(faults, path + "/answer_mask", request.answer_mask, "is neither 0 nor 1", [](std::uint8_t flag) { return flag > 1; });
  }
}

void check_ids(Faults& faults, const Trace& trace) {
  std::set<int> reusing;  // requests that a reuse_id event names: they may take the id of an earlier one
  for (const TraceEvent& event : trace.events) {
    if (event.kind == TraceEventKind::reuse_id) reusing.insert(event.request);
  }
  std::map<int, std::size_t> first_use;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const auto [earlier, inserted] = first_use.emplace(trace.requests[i].id, i);
    if (!inserted && !reusing.contains(static_cast<int>(i))) {
      faults.push_back(request_path(i) + "/id = " + std::to_string(trace.requests[i].id) + " is also the id of " +
                       request_path(earlier->second) + " and no reuse_id event names this request");
    }
  }
}

void check_events(Faults& faults, const Trace& trace) {
  enum class State { running, preempted, cancelled };
  std::map<int, State> states;
  int previous = 0;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const TraceEvent& event = trace.events[i];
    const std::string path = "events[" + std::to_string(i) + "]";
    if (event.submission < 0) faults.push_back(path + "/submission = " + std::to_string(event.submission) + " is negative");
    if (event.submission >= 0 && event.submission < previous) {
      faults.push_back(path + "/submission = " + std::to_string(event.submission) + " comes after " + std::to_string(previous) +
                       "; events are listed in submission order");
    }
    previous = std::max(previous, event.submission);
    if (event.request < 0 || static_cast<std::size_t>(event.request) >= trace.requests.size()) {
      faults.push_back(path + "/request = " + std::to_string(event.request) + " names none of the " +
                       std::to_string(trace.requests.size()) + " requests");
      continue;
    }
    const std::string target = request_path(static_cast<std::size_t>(event.request));
    if (event.kind == TraceEventKind::reuse_id) {
      const auto begin = trace.requests.begin();
      const bool taken = std::any_of(begin, begin + event.request, [&](const TraceRequest& request) {
        return request.id == trace.requests[static_cast<std::size_t>(event.request)].id;
      });
      if (!taken) faults.push_back(path + ": reuse_id of " + target + ", whose id no earlier request has");
      continue;
    }
    State& state = states[event.request];
    if (state == State::cancelled) {
      faults.push_back(path + ": " + target + " was cancelled by an earlier event");
    } else if (event.kind == TraceEventKind::cancel) {
      state = State::cancelled;
    } else if (event.kind == TraceEventKind::preempt) {
      if (state == State::preempted) faults.push_back(path + ": preempt of " + target + ", which is already preempted");
      state = State::preempted;
    } else {
      if (state != State::preempted) faults.push_back(path + ": resume of " + target + ", which is not preempted");
      state = State::running;
    }
  }
}

}  // namespace

int fed_tokens(const TraceRequest& request) {
  return request.teacher_forced() ? static_cast<int>(request.forced.size()) : std::max(0, request.max_new_tokens - 1);
}

int longest_sequence(const Trace& trace) {
  int longest = 0;
  for (const TraceRequest& request : trace.requests) longest = std::max(longest, request.prompt_length() + fed_tokens(request));
  return longest;
}

std::vector<std::string> trace_faults(const Trace& trace) {
  Faults faults;
  check_name(faults, trace.name);
  if (trace.vocab_size < 1) faults.push_back("vocab_size = " + std::to_string(trace.vocab_size) + " is not positive");
  if (trace.requests.empty()) faults.push_back("requests is empty; a trace has at least one request");
  for (std::size_t i = 0; i < trace.requests.size(); ++i) check_request(faults, trace.requests[i], request_path(i), trace.vocab_size);
  check_ids(faults, trace);
  check_events(faults, trace);
  return faults;
}

std::vector<std::string> trace_faults(const Trace& trace, const ModelConfig& model) {
  Faults faults = trace_faults(trace);
  if (!faults.empty()) return faults;
  if (trace.vocab_size > model.vocab) {
    faults.push_back("vocab_size = " + std::to_string(trace.vocab_size) + " is above the model's vocabulary of " +
                     std::to_string(model.vocab));
  }
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    const std::string path = request_path(i);
    check_tokens(faults, path + "/prompt", request.prompt, model.vocab, "the model's vocabulary");
    check_tokens(faults, path + "/forced", request.forced, model.vocab, "the model's vocabulary");
    check_values(faults, path + "/draft_tokens", request.draft_tokens, "is not below the model's vocabulary " + std::to_string(model.vocab),
                 [&model](std::int32_t token) { return token >= model.vocab; });
    if (request.eos_token_id >= model.vocab) {
      faults.push_back(path + "/eos_token_id = " + std::to_string(request.eos_token_id) + " is not below the model's vocabulary " +
                       std::to_string(model.vocab));
    }
    check_values(faults, path + "/exit_depths", request.exit_depths, "is above the model's " + std::to_string(model.loops) + " loops",
                 [&model](std::uint8_t depth) { return depth > model.loops; });
    const int fed = fed_tokens(request);
    const std::int64_t positions = static_cast<std::int64_t>(request.prompt.size()) + fed;
    if (positions > model.max_positions) {
      faults.push_back(path + " needs " + std::to_string(positions) + " positions (prompt " + std::to_string(request.prompt.size()) +
                       ", fed " + std::to_string(fed) + "), the model has " + std::to_string(model.max_positions));
    }
  }
  return faults;
}

}  // namespace loopgauge
