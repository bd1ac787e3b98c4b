// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/serving_scheduler.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "models/error.hpp"

namespace loopgauge::harness {

ServingScheduler::ServingScheduler(const Trace& trace, const EffectiveConfig& config, SchedulerOptions options, std::vector<RequestBytes> bytes,
                                   std::int64_t budget)
    : trace_(trace), config_(config), options_(options), bytes_(std::move(bytes)), budget_(budget) {
  const auto require = [](int value, const char* what) {
    if (value < 1) throw ConfigError(std::string(what) + " must be at least 1, not " + std::to_string(value));
  };
  require(options.most_live, "requests that are served at once");
  require(options.most_decode_rows, "decode rows of a round");
  require(options.prefill_tokens, "prompt tokens of a round");
  require(options.prefill_requests, "prompts that share a round");
  if (bytes_.size() != trace.requests.size()) throw InternalError("not one count of bytes per request");
  for (std::size_t i = 0; i < trace.requests.size(); ++i) requests_.emplace_back(RequestProgress(static_cast<int>(i), trace.requests[i], config));
}

std::string ServingScheduler::arrive(int request) {
  const RequestBytes& bytes = bytes_.at(static_cast<std::size_t>(request));
  const std::int64_t needed = std::max(bytes.until_prompt_complete, bytes.afterwards);
  if (needed > budget_) {
    at(request).state = State::ended;
    actions_.push_back({ActionKind::cancel, request});  // its record ends before it began
    return "it needs " + std::to_string(needed) + " bytes of device memory where " + std::to_string(budget_) + " are for requests";
  }
  at(request).state = State::queued;
  queue_.push_back(request);
  return {};
}

void ServingScheduler::begin(int request, std::int64_t bytes) {
  Request& r = at(request);
  r.state = State::live;
  r.held = bytes;
  held_ += bytes;
  ++live_;
  order_.push_back(request);
}

void ServingScheduler::activate(int request) {
  begin(request, bytes_.at(static_cast<std::size_t>(request)).afterwards);
  const int length = trace_.requests.at(static_cast<std::size_t>(request)).prompt_length();
  at(request).progress.advance({request, RowKind::prefill, 0, length, 1, config_.loops()});
}

void ServingScheduler::cancel(int request) {
  Request& r = at(request);
  if (r.state == State::ended) return;
  actions_.push_back({ActionKind::cancel, request});
  if (r.state == State::live) return release(request);
  std::erase(queue_, request);
  r.state = State::ended;
}

void ServingScheduler::release(int request) {
  Request& r = at(request);
  if (r.state != State::live) return;
  r.state = State::ended;
  held_ -= r.held;
  --live_;
  std::erase(order_, request);
}

// A prompt begins when it can run now and when what it will ever hold is there: nobody is ever preempted for want of memory.
void ServingScheduler::admit() {
  while (!queue_.empty() && live_ < options_.most_live && static_cast<int>(prefilling().size()) < options_.prefill_requests) {
    const int request = queue_.front();
    const RequestBytes& bytes = bytes_[static_cast<std::size_t>(request)];
    const std::int64_t needed = std::max(bytes.until_prompt_complete, bytes.afterwards);
    if (held_ + needed > budget_) return;
    queue_.pop_front();
    begin(request, needed);
  }
}

std::vector<int> ServingScheduler::prefilling() const {
  std::vector<int> prompts;
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(prompts), [&](int request) { return !prompt_complete(request); });
  return prompts;
}

// Rows of the next token, in turn where there are more than a round takes.
std::vector<WorkItem> ServingScheduler::decode_items() {
  std::vector<int> ready;
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(ready),
               [&](int request) { return prompt_complete(request) && !at(request).progress.complete(); });
  if (options_.stage == Stage::prefill) ready.clear();
  const auto count = std::min(ready.size(), static_cast<std::size_t>(options_.most_decode_rows));
  const auto last = std::find(ready.begin(), ready.end(), last_decoded_);
  const std::size_t first = count == ready.size() || last == ready.end() ? 0 : static_cast<std::size_t>(last - ready.begin()) + 1;
  std::vector<WorkItem> items;
  for (std::size_t i = 0; i < count; ++i) items.push_back(at(ready[(first + i) % ready.size()]).progress.next_item(1, 1));
  return items;
}

// The next windows of every prompt, in equal shares.
std::vector<WorkItem> ServingScheduler::prefill_items() const {
  const std::vector<int> prompts = prefilling();
  std::vector<WorkItem> items;
  if (prompts.empty()) return items;
  const int windows = std::max(1, options_.prefill_tokens / static_cast<int>(prompts.size()) / config_.window());
  for (const int request : prompts) {
    const int length = trace_.requests[static_cast<std::size_t>(request)].prompt_length();
    const int begin = at(request).progress.completed_windows() * config_.window();
    items.push_back({request, RowKind::prefill, begin, std::min(length, begin + windows * config_.window()), 1, 1});
  }
  return items;
}

std::vector<Submission> ServingScheduler::next_round() {
  admit();
  std::vector<WorkItem> prompts = prefill_items();
  std::vector<WorkItem> rows;
  if (!options_.hold_decode || prompts.empty()) rows = decode_items();
  if (!options_.mixed && !prompts.empty() && !rows.empty()) (prompts_next_ ? rows : prompts).clear();
  prompts_next_ = prompts.empty();
  if (!rows.empty()) last_decoded_ = rows.back().request;

  std::vector<WorkItem> items = std::move(rows);
  items.insert(items.end(), prompts.begin(), prompts.end());
  std::vector<Submission> round;
  if (items.empty() && actions_.empty()) return round;
  // One decode row goes through all loops at once; rows beside each other advance by one.
  const bool whole = items.size() == 1 && items.front().kind == RowKind::decode;
  for (int loop = 1; loop <= (items.empty() || whole ? 1 : config_.loops()); ++loop) {
    for (WorkItem& item : items) {
      item.loop_first = loop;
      item.loop_last = whole ? config_.loops() : loop;
    }
    round.push_back({items});
  }
  for (const WorkItem& item : items) {
    if (std::exchange(at(item.request).rewinds, false)) actions_.push_back({ActionKind::rewind, item.request});
  }
  round.front().actions = std::exchange(actions_, {});
  return round;
}

std::vector<EmittedToken> ServingScheduler::issued(const Submission& submission) {
  std::vector<EmittedToken> tokens;
  for (const WorkItem& item : submission.items) {
    Request& r = at(item.request);
    r.progress.advance(item);
    const int length = trace_.requests[static_cast<std::size_t>(item.request)].prompt_length();
    if (item.loop_last != config_.loops()) continue;
    if (item.kind == RowKind::decode) tokens.push_back({item.request, item.begin - length + 1});
    if (item.kind != RowKind::prefill || item.end != length) continue;
    if (options_.stage == Stage::whole) tokens.push_back({item.request, 0});
    const std::int64_t afterwards = bytes_[static_cast<std::size_t>(item.request)].afterwards;
    held_ += afterwards - std::exchange(r.held, afterwards);
  }
  return tokens;
}

void ServingScheduler::failed(const Submission& submission) {
  // Actions come before what failed: they have happened.
  for (const WorkItem& item : submission.items) {
    Request& r = at(item.request);
    if (r.state != State::live) continue;
    r.progress.rewind();
    r.rewinds = true;
  }
}

}  // namespace loopgauge::harness
