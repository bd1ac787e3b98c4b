// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/serving.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "harness/handoff/pump.hpp"
#include "harness/handoff/side_runs.hpp"
#include "harness/interrupt.hpp"
#include "models/error.hpp"
#include "optimized/runtime/device_error.hpp"

namespace loopgauge::harness {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr double kPause = 50e-6;             // between two looks at a handoff that does not move
constexpr double kLongestSleep = 0.1;        // so that an interruption is noticed

RunOptions run_options(const ServingOptions& options) {
  RunOptions run;
  run.record = {.logits = false};
  run.submissions_in_flight = options.submissions_in_flight;
  run.graph_replay = options.graph_replay;
  return run;
}

// One executor at work on a load, in one thread.
class Server {
 public:
  Server(Executor& executor, const ServingLoad& load, const EffectiveConfig& config, const ServingOptions& options, Stage stage, ServingClock& clock)
      : executor_(executor), load_(load), options_(options), clock_(clock), scheduler_(load.trace, config, at_stage(options.scheduler, stage), options.bytes, options.budget) {
    result_.requests.resize(load.trace.requests.size());
    for (std::size_t i = 0; i < result_.requests.size(); ++i) {
      result_.requests[i].arrival_s = load.arrival_s[i];
      if (load.cancel_s[i] != kNever) cancels_.push_back(static_cast<int>(i));
    }
    std::stable_sort(cancels_.begin(), cancels_.end(), [&](int a, int b) { return cancel_of(a) < cancel_of(b); });
  }

  // What has come to pass by now. `may_begin` says whether a request may be queued; the first one that may not holds up those after it.
  template <class MayBegin>
  void take_in(MayBegin&& may_begin) {
    const double now = clock_.now();
    for (; arrived_ < load_.arrival_s.size() && load_.arrival_s[arrived_] <= now && may_begin(static_cast<int>(arrived_)); ++arrived_) {
      const int request = static_cast<int>(arrived_);
      if (std::string reason = scheduler_.arrive(request); !reason.empty()) end(request, ServedOutcome::refused, now, std::move(reason));
    }
    while (!cancels_.empty() && cancel_of(cancels_.front()) <= now && static_cast<std::size_t>(cancels_.front()) < arrived_) {
      const int request = cancels_.front();
      cancels_.pop_front();
      if (ended(request) || scheduler_.complete(request)) continue;
      scheduler_.cancel(request);
      end(request, ServedOutcome::cancelled, now);
    }
  }

  // Runs a round, or reads what is unread. False when there is nothing to do now.
  bool step() {
    const std::vector<Submission> round = scheduler_.next_round();
    for (const Submission& planned : round) {
      Submission submission = planned;
      if (!submission.items.empty() && next_failure_ < options_.failures.size() && options_.failures[next_failure_].submission <= submissions_)
        submission.failure = options_.failures[next_failure_++].kind;
      if (!run(submission)) break;
    }
    result_.most_live = std::max(result_.most_live, scheduler_.live());
    if (!round.empty()) {
      if (options_.after_round) options_.after_round(scheduler_);
      return true;
    }
    if (unread_.empty() && last_work_ <= read_through()) return false;
    submit({});
    return true;
  }

  // The request is there with its prompt complete, its first token under way: read with the submission before the next one.
  void activate(int request) {
    scheduler_.activate(request);
    result_.most_live = std::max(result_.most_live, scheduler_.live());
    unread_.push_back({submissions_ - 1, {request, 0}});
  }

  void end(int request, ServedOutcome outcome, double now, std::string reason = {}) {
    ServedRequest& r = result_.requests[static_cast<std::size_t>(request)];
    r.outcome = outcome;
    r.reason = std::move(reason);
    r.end_s = now;
    ++ended_;
    if (on_end) on_end(request);
  }
  bool ended(int request) const { return outcome(request) != ServedOutcome::waiting; }
  bool all_ended() const { return ended_ == static_cast<int>(result_.requests.size()); }

  // Nothing can be done before this time, if nobody else does something.
  double next_event() const {
    double next = kNever;
    if (arrived_ < load_.arrival_s.size()) next = load_.arrival_s[arrived_];
    if (!cancels_.empty()) next = std::min(next, cancel_of(cancels_.front()));
    return next;
  }

  ServedOutcome outcome(int request) const { return result_.requests[static_cast<std::size_t>(request)].outcome; }

  ServingScheduler& scheduler() { return scheduler_; }

  ServingResult finish() {
    RunRecord record = executor_.finish();
    for (std::size_t i = 0; i < result_.requests.size(); ++i) {
      ServedRequest& r = result_.requests[i];
      r.tokens = std::move(record.requests.at(i).tokens);
      r.tokens.resize(std::min(r.tokens.size(), r.token_s.size()));
    }
    result_.counters = record.counters;
    result_.held_at_drain = record.held_at_drain;
    return std::move(result_);
  }

  std::function<void(int request)> on_end;                       // may be empty
  std::function<void(const Submission& submission)> on_issued;   // of a submission that did not fail; may be empty

 private:
  struct Unread {
    int submission;
    EmittedToken token;
  };

  static SchedulerOptions at_stage(SchedulerOptions options, Stage stage) {
    options.stage = stage;
    return options;
  }
  double cancel_of(int request) const { return load_.cancel_s[static_cast<std::size_t>(request)]; }

  // Whether the round goes on.
  bool run(const Submission& submission) {
    const double begun = clock_.now();
    try {
      submit(submission);
    } catch (const optimized::DeviceMemoryError& error) {
      give_up_newest(submission, error.what());
      return false;
    }
    for (const WorkItem& item : submission.items) {
      double& first = result_.requests[static_cast<std::size_t>(item.request)].begun_s;
      if (std::isnan(first)) first = begun;
    }
    if (submission.failure != PlannedFailure::none) {
      ++result_.failed_submissions;
      scheduler_.failed(submission);
      return false;
    }
    return true;
  }

  void submit(const Submission& submission) {
    throw_if_interrupted();
    const int index = submissions_++;
    result_.submissions.push_back(submission);
    executor_.submit(submission);
    if (!submission.items.empty()) last_work_ = index;
    if (submission.failure == PlannedFailure::none) {
      for (const EmittedToken& token : scheduler_.issued(submission)) unread_.push_back({index, token});
      if (on_issued) on_issued(submission);
    }
    const double now = clock_.now();
    while (!unread_.empty() && unread_.front().submission <= read_through()) {
      const EmittedToken token = unread_.front().token;
      unread_.pop_front();
      if (ended(token.request)) continue;
      ServedRequest& r = result_.requests[static_cast<std::size_t>(token.request)];
      r.token_s.push_back(now);
      if (static_cast<int>(r.token_s.size()) < load_.trace.requests[static_cast<std::size_t>(token.request)].max_new_tokens) continue;
      scheduler_.release(token.request);
      end(token.request, ServedOutcome::finished, now);
    }
  }

  // Results of submissions up to this one have been read (S-ASYNC-1). One that memory was refused for has none and counts for nobody.
  int read_through() const { return submissions_ - 1 - (options_.submissions_in_flight == 1 ? 0 : options_.submissions_in_flight) - refused_; }

  // Memory that was counted on is not there: the request that began last ends, the others start over where they were.
  void give_up_newest(const Submission& submission, const std::string& reason) {
    ++result_.failed_submissions;
    refused_ += options_.submissions_in_flight > 1;
    result_.submissions.back().failure = PlannedFailure::allocation;
    scheduler_.failed(submission);
    int newest = submission.items.front().request;
    const auto begun = [&](int request) {
      const double at = result_.requests[static_cast<std::size_t>(request)].begun_s;
      return std::isnan(at) ? kNever : at;
    };
    for (const WorkItem& item : submission.items) {
      if (begun(item.request) >= begun(newest)) newest = item.request;
    }
    scheduler_.cancel(newest);
    end(newest, ServedOutcome::failed, clock_.now(), reason);
  }

  Executor& executor_;
  const ServingLoad& load_;
  const ServingOptions& options_;
  ServingClock& clock_;
  ServingScheduler scheduler_;
  ServingResult result_;
  std::deque<int> cancels_;                  // by time
  std::deque<Unread> unread_;
  std::size_t arrived_ = 0, next_failure_ = 0;
  int submissions_ = 0, last_work_ = -1, refused_ = 0, ended_ = 0;
};

void add(const RunCounters& counters, RunCounters& sum) {
  const std::int64_t most = std::max(counters.most_in_flight, sum.most_in_flight);
  for (const RunCounterField& field : run_counter_fields()) sum.*field.member += counters.*field.member;
  sum.most_in_flight = most;
}

// Runs both, the second in a thread of its own, and throws what the first of them to fail has thrown. `stop` is set when one has failed.
template <class First, class Second>
void run_both(std::atomic<bool>& stop, First first, Second second) {
  std::exception_ptr failures[2];
  std::atomic<int> first_to_fail{-1};
  const auto guarded = [&](auto& work, int side) {
    try {
      work();
    } catch (...) {
      failures[side] = std::current_exception();
      int none = -1;
      first_to_fail.compare_exchange_strong(none, side);
      stop = true;
    }
  };
  std::thread other([&] { guarded(second, 1); });
  guarded(first, 0);
  other.join();
  if (first_to_fail >= 0) std::rethrow_exception(failures[first_to_fail]);
}

struct OtherSideFailed {};

void throw_if(const std::atomic<bool>& stop) {
  if (stop) throw OtherSideFailed{};
}

ServingResult serve_until(Executor& executor, const ServingLoad& load, const EffectiveConfig& config, const ServingOptions& options, ServingClock& clock,
                          const std::atomic<bool>& stop) {
  executor.begin(load.trace, config, run_options(options));
  Server server(executor, load, config, options, Stage::whole, clock);
  while (true) {
    throw_if(stop);
    throw_if_interrupted();
    server.take_in([](int) { return true; });
    if (server.step()) continue;
    if (server.all_ended()) return server.finish();
    clock.sleep_until(std::min(server.next_event(), clock.now() + kLongestSleep));
  }
}

// From the end of a prompt to the acknowledgement, in seconds of the clock, whatever several handoffs have in common counted once.
class TransferTime {
 public:
  void begin(int request, double now) {
    if (open_.empty()) since_ = now;
    open_.insert(request);
  }
  void end(int request, double now) {
    if (open_.erase(request) > 0 && open_.empty()) total_ += now - since_;
  }
  double total() const { return total_; }

 private:
  std::set<int> open_;
  double since_ = 0, total_ = 0;
};

// What the two threads of a server with handoffs tell each other beside the protocol.
struct BothSides {
  std::atomic<bool> stop{false};
  std::atomic<std::int64_t> decode_bytes{0};     // held at the decode side, or about to be
  std::atomic<int> not_handed_over{0};
};

// Most that a request holds at the decode side: as handed over, twice while it arrives. One that is alone may try with less.
std::int64_t decode_side_bytes(const ServingOptions& options, int request) {
  return std::min(2 * options.bytes.at(static_cast<std::size_t>(request)).afterwards, options.budget);
}

class PrefillSide {
 public:
  PrefillSide(Executor& executor, handoff::SenderTransport& transport, const HandoffLimits& limits, const ServingLoad& load, const EffectiveConfig& config,
              const ServingOptions& options, ServingClock& clock, BothSides& both)
      : source_(source_of(executor)), sender_(source_, transport, 1, limits), load_(load), config_(config), options_(options), clock_(clock), both_(both),
        server_(executor, load, config, options, Stage::prefill, clock), lease_s_(Seconds(limits.lease).count()) {
    server_.on_issued = [this](const Submission& submission) { note(submission); };
    server_.on_end = [this](int request) {
      if (server_.outcome(request) == ServedOutcome::finished) return;
      if (sender_.knows(request)) sender_.cancel(request);
      both_.decode_bytes -= decode_side_bytes(options_, request);
      ++both_.not_handed_over;
    };
  }

  ServingResult run() {
    while (!server_.all_ended()) {
      throw_if(both_.stop);
      throw_if_interrupted();
      server_.take_in([this](int request) { return take_room(request); });
      const bool worked = server_.step();
      const bool moved = move_on();
      if (!worked && !moved) clock_.sleep_until(std::min(server_.next_event(), clock_.now() + kPause));
    }
    while (server_.step()) {
    }
    ServingResult result = server_.finish();
    result.transfer_s = transfers_.total();
    for (std::size_t i = 0; i < load_.trace.requests.size(); ++i) {
      if (sender_.knows(static_cast<int>(i))) result.transfer_bytes += sender_.record(static_cast<int>(i)).bytes;
    }
    return result;
  }

 private:
  static handoff::Source& source_of(Executor& executor) {
    handoff::Source* source = executor.handoff_source();
    if (source == nullptr) throw UnsupportedError("the " + executor.name() + " executor takes no part in handoffs");
    return *source;
  }

  bool take_room(int request) {
    const std::int64_t bytes = decode_side_bytes(options_, request);
    if (both_.decode_bytes + bytes > options_.budget) return false;
    both_.decode_bytes += bytes;
    return true;
  }

  void note(const Submission& submission) {
    for (const WorkItem& item : submission.items) {
      if (!sender_.knows(item.request)) sender_.offer(item.request);
      if (!completes_prompt(item, load_.trace, config_.loops())) continue;
      sender_.prompt_complete(item.request);
      transfers_.begin(item.request, clock_.now());
      open_.insert(item.request);
    }
    move_on();
  }

  bool move_on() {
    const bool moved = pump(sender_);
    if (moved) moved_ = clock_.now();
    for (auto next = open_.begin(); next != open_.end();) {
      const int request = *next;
      if (!sender_.closed(request)) {
        ++next;
        continue;
      }
      next = open_.erase(next);
      const double now = clock_.now();
      transfers_.end(request, now);
      const bool there = sender_.outcome(request) == handoff::Outcome::handed_over;
      if (there) {
        server_.scheduler().release(request);
        server_.end(request, ServedOutcome::finished, now);
        continue;
      }
      server_.scheduler().cancel(request);
      server_.end(request, ServedOutcome::failed, now,
                  "not handed over (" + std::string(handoff::to_string(sender_.outcome(request))) + ") " + sender_.reason(request));
    }
    return keep_lease() || moved;
  }

  // A handoff that has not moved for a lease is given up. True when there was one.
  bool keep_lease() {
    const double now = clock_.now();
    if (open_.empty()) moved_ = now;
    if (now - moved_ <= lease_s_) return false;
    moved_ = now;
    for (const int request : open_) sender_.lease_expired(request);
    return true;
  }

  handoff::Source& source_;
  SenderEndpoint sender_;
  const ServingLoad& load_;
  const EffectiveConfig& config_;
  const ServingOptions& options_;
  ServingClock& clock_;
  BothSides& both_;
  Server server_;
  TransferTime transfers_;
  const double lease_s_;
  double moved_ = 0;                         // when a handoff did last, or there was none
  std::set<int> open_;                       // complete prompts whose handoff has not ended
};

ServingResult run_decode_thread(Executor& executor, handoff::ReceiverTransport& transport, const ServingLoad& load, const EffectiveConfig& config,
                                const ServingOptions& options, ServingClock& clock, BothSides& both) {
  handoff::Target* target = executor.handoff_target();
  if (target == nullptr) throw UnsupportedError("the " + executor.name() + " executor takes no part in handoffs");
  ReceiverEndpoint receiver(*target, transport);
  Server server(executor, load, config, options, Stage::decode, clock);
  const int total = static_cast<int>(load.trace.requests.size());
  int finished = 0;
  server.on_end = [&](int request) {
    ++finished;
    both.decode_bytes -= decode_side_bytes(options, request);
  };
  std::set<int> active;
  while (finished + both.not_handed_over < total) {
    throw_if(both.stop);
    throw_if_interrupted();
    const bool moved = pump(receiver);
    for (int request = 0; moved && request < total; ++request) {
      if (!receiver.knows(request) || receiver.state(request) != handoff::Receiver::State::active || !active.insert(request).second) continue;
      server.activate(request);
    }
    if (!server.step() && !moved) clock.sleep_until(clock.now() + kPause);
  }
  // What the other side still waits for, and what is still unread.
  while (pump(receiver) || server.step()) {
  }
  return server.finish();
}

}  // namespace

double WallClock::now() { return Seconds(std::chrono::steady_clock::now() - begin_).count(); }

void WallClock::sleep_until(double seconds) {
  std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(Seconds(seconds)));
}

std::string_view to_string(ServedOutcome outcome) {
  switch (outcome) {
    case ServedOutcome::waiting: return "waiting";
    case ServedOutcome::finished: return "finished";
    case ServedOutcome::cancelled: return "cancelled";
    case ServedOutcome::refused: return "refused";
    case ServedOutcome::failed: return "failed";
  }
  return "unknown";
}

ServingResult serve(Executor& executor, const ServingLoad& load, const EffectiveConfig& config, const ServingOptions& options, ServingClock& clock) {
  const std::atomic<bool> stop{false};
  return serve_until(executor, load, config, options, clock, stop);
}

ServingResult serve_halves(Executor& first, Executor& second, const ServingLoad& load, const EffectiveConfig& config, const ServingOptions& options,
                           ServingClock& clock) {
  const ServingLoad loads[2] = {half_of(load, 0), half_of(load, 1)};
  ServingOptions parts[2] = {options, options};
  ServingResult results[2];
  for (std::size_t part = 0; part < 2; ++part) {
    parts[part].bytes.clear();
    for (std::size_t i = part; i < options.bytes.size(); i += 2) parts[part].bytes.push_back(options.bytes[i]);
  }
  std::atomic<bool> stop{false};
  run_both(
      stop, [&] { results[0] = serve_until(first, loads[0], config, parts[0], clock, stop); },
      [&] { results[1] = serve_until(second, loads[1], config, parts[1], clock, stop); });
  ServingResult result;
  for (std::size_t i = 0; i < load.trace.requests.size(); ++i) result.requests.push_back(std::move(results[i % 2].requests[i / 2]));
  for (const ServingResult& half : results) {
    result.most_live += half.most_live;
    result.failed_submissions += half.failed_submissions;
    add(half.counters, result.counters);
  }
  return result;
}

ServingResult serve_handed_over(Executor& prefill, Executor& decode, handoff::TransportEnds transport, const HandoffLimits& limits, const ServingLoad& load,
                                const EffectiveConfig& config, const ServingOptions& options, ServingClock& clock) {
  if (!options.failures.empty() || std::any_of(load.cancel_s.begin(), load.cancel_s.end(), [](double at) { return at != kNever; }))
    throw InternalError("a load with cancels or planned failures is not served with handoffs");
  BothSides both;
  ServingResult prompts, result;
  run_both(
      both.stop,
      [&] {
        prefill.begin(load.trace, config, prefill_options(run_options(options), transport.place));
        prompts = PrefillSide(prefill, *transport.sender, limits, load, config, options, clock, both).run();
      },
      [&] {
        decode.begin(load.trace, config, decode_options(run_options(options), transport.place));
        result = run_decode_thread(decode, *transport.receiver, load, config, options, clock, both);
      });
  for (std::size_t i = 0; i < result.requests.size(); ++i) {
    ServedRequest& r = result.requests[i];
    r.begun_s = prompts.requests[i].begun_s;
    if (r.outcome != ServedOutcome::waiting) continue;
    // What has no token here did not finish, wherever it got.
    const bool lost = prompts.requests[i].outcome == ServedOutcome::finished;
    r.outcome = lost ? ServedOutcome::failed : prompts.requests[i].outcome;
    r.reason = lost ? "handed over, and not decoded" : prompts.requests[i].reason;
    r.end_s = prompts.requests[i].end_s;
  }
  result.most_live += prompts.most_live;
  result.failed_submissions += prompts.failed_submissions;
  result.transfer_s = prompts.transfer_s;
  result.transfer_bytes = prompts.transfer_bytes;
  add(prompts.counters, result.counters);
  return result;
}

}  // namespace loopgauge::harness
