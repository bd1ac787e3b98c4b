// SPDX-License-Identifier: Apache-2.0
#include "harness/io/trace_file.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "harness/io/hdf5.hpp"
#include "harness/io/hdf5_probe.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

using Faults = std::vector<std::string>;

// A file states the lowest version that has everything it holds: 2 has temperature and draft_tokens.
constexpr std::int64_t kVersion = 2, kVersionWithoutSampling = 1;
constexpr std::array<std::pair<TraceEventKind, std::string_view>, 4> kEventKinds{{{TraceEventKind::cancel, "cancel"},
                                                                                  {TraceEventKind::preempt, "preempt"},
                                                                                  {TraceEventKind::resume, "resume"},
                                                                                  {TraceEventKind::reuse_id, "reuse_id"}}};

// Runs one piece of reading; its failure becomes a line and reading goes on, so that a user sees all faults of a file at once.
template <class Piece>
void collect(Faults& faults, Piece piece) {
  try {
    piece();
  } catch (const Error& error) {
    faults.emplace_back(error.what());
  }
}

int int32_attribute(const h5::Object& object, const std::string& name) {
  const std::int64_t value = object.int_attribute(name);
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    object.fail("attribute `" + name + "` = " + std::to_string(value) + " does not fit 32 bits");
  }
  return static_cast<int>(value);
}

template <class T>
std::vector<T> token_vector(const h5::Group& group, const std::string& name) {
  const h5::Dataset dataset = group.open_dataset(name);
  const std::vector<std::int64_t> shape = dataset.shape();
  if (shape.size() == 1 && shape[0] > kMaxTraceTokens) {
    dataset.fail("has " + std::to_string(shape[0]) + " entries, at most " + std::to_string(kMaxTraceTokens) + " are accepted");
  }
  dataset.allow_only_attributes({});
  return std::move(dataset.read<T>({-1}).data);
}

TraceRequest read_request(const h5::Group& group, std::int64_t version, Faults& faults) {
  static constexpr std::array<std::string_view, 5> kMembers{"prompt", "forced", "exit_depths", "answer_mask", "draft_tokens"};
  static constexpr std::array<std::string_view, 7> kAttributes{"id",   "arrival", "max_new_tokens", "eos_token_id",
                                                               "seed", "task",    "temperature"};
  const std::size_t later = version == kVersionWithoutSampling ? 1 : 0;  // names that the version does not have
  TraceRequest request;
  collect(faults, [&] {
    group.allow_only(std::span(kMembers).first(kMembers.size() - later), std::span(kAttributes).first(kAttributes.size() - later));
  });
  collect(faults, [&] { request.id = int32_attribute(group, "id"); });
  collect(faults, [&] { request.arrival = int32_attribute(group, "arrival"); });
  collect(faults, [&] { request.max_new_tokens = int32_attribute(group, "max_new_tokens"); });
  collect(faults, [&] { request.eos_token_id = int32_attribute(group, "eos_token_id"); });
  collect(faults, [&] { request.seed = group.uint_attribute("seed"); });
  collect(faults, [&] { request.task = group.string_attribute("task"); });
  collect(faults, [&] {
    if (group.has_attribute("temperature")) request.temperature = static_cast<float>(group.double_attribute("temperature"));
  });
  collect(faults, [&] { request.prompt = token_vector<std::int32_t>(group, "prompt"); });
  const auto optional = [&]<class T>(const char* name, std::vector<T>& into) {
    collect(faults, [&] {
      if (!group.has(name)) return;
      into = token_vector<T>(group, name);
      if (into.empty() && request.max_new_tokens > 0) group.fail("dataset `" + std::string(name) + "` is empty; leave it out instead");
    });
  };
  optional("forced", request.forced);
  optional("exit_depths", request.exit_depths);
  optional("answer_mask", request.answer_mask);
  optional("draft_tokens", request.draft_tokens);
  return request;
}

std::vector<TraceRequest> read_requests(const h5::Group& root, std::int64_t version, Faults& faults) {
  std::vector<TraceRequest> requests;
  collect(faults, [&] {
    const h5::Group group = root.open_group("requests");
    collect(faults, [&] { group.allow_only_attributes({}); });
    const std::vector<std::string> members = group.members();
    if (static_cast<std::int64_t>(members.size()) > kMaxTraceRequests) {
      group.fail("has " + std::to_string(members.size()) + " members, at most " + std::to_string(kMaxTraceRequests) +
                 " requests are accepted");
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (members[i] != std::to_string(i)) {
        group.fail("has member `" + members[i] + "` where request `" + std::to_string(i) +
                   "` is due: requests are numbered from 0 without gaps");
      }
      collect(faults, [&] { requests.push_back(read_request(group.open_group(members[i]), version, faults)); });
    }
  });
  return requests;
}

std::vector<TraceEvent> read_events(const h5::Group& root, Faults& faults) {
  static constexpr std::array<std::string_view, 3> kMembers{"submission", "kind", "request"};
  std::vector<TraceEvent> events;
  collect(faults, [&] {
    if (!root.has("events")) return;
    const h5::Group group = root.open_group("events");
    group.allow_only(kMembers, {});
    const std::vector<std::int32_t> submissions = token_vector<std::int32_t>(group, "submission");
    const auto count = static_cast<std::int64_t>(submissions.size());
    const std::vector<std::string> kinds = group.open_dataset("kind").read<std::string>({count}).data;
    const std::vector<std::int32_t> requests = group.open_dataset("request").read<std::int32_t>({count}).data;
    for (std::size_t i = 0; i < submissions.size(); ++i) {
      TraceEvent event{submissions[i], TraceEventKind::cancel, requests[i]};
      collect(faults, [&] {
        try {
          event.kind = parse_trace_event_kind(kinds[i]);
        } catch (const TraceError& error) {
          group.fail("kind[" + std::to_string(i) + "] = " + error.what());
        }
      });
      events.push_back(event);
    }
  });
  return events;
}

void write_requests(const h5::Group& root, const Trace& trace) {
  const h5::Group group = root.create_group("requests");
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    const h5::Group out = group.create_group(std::to_string(i));
    out.set_attribute("id", request.id);
    out.set_attribute("arrival", request.arrival);
    out.set_attribute("max_new_tokens", request.max_new_tokens);
    out.set_attribute("eos_token_id", request.eos_token_id);
    out.set_attribute("seed", request.seed);
    out.set_attribute("task", request.task);
    if (request.temperature != 0.0f) out.set_attribute("temperature", static_cast<double>(request.temperature));
    out.write("prompt", request.prompt);
    if (!request.forced.empty()) out.write("forced", request.forced);
    if (!request.exit_depths.empty()) out.write("exit_depths", request.exit_depths);
    if (!request.answer_mask.empty()) out.write("answer_mask", request.answer_mask);
    if (!request.draft_tokens.empty()) out.write("draft_tokens", request.draft_tokens);
  }
}

void write_events(const h5::Group& root, const Trace& trace) {
  if (trace.events.empty()) return;
  std::vector<std::int32_t> submissions, requests;
  std::vector<std::string> kinds;
  for (const TraceEvent& event : trace.events) {
    submissions.push_back(event.submission);
    requests.push_back(event.request);
    kinds.emplace_back(to_string(event.kind));
  }
  const h5::Group group = root.create_group("events");
  group.write("submission", submissions);
  group.write("kind", kinds);
  group.write("request", requests);
}

[[noreturn]] void throw_faults(const std::string& subject, const Faults& faults) {
  std::string sentence = faults.front().starts_with(subject) ? faults.front() : subject + ": " + faults.front();
  if (faults.size() > 1) sentence += " (and " + std::to_string(faults.size() - 1) + " more faults; `trace validate` lists them)";
  throw TraceError(sentence);
}

}  // namespace

std::string_view to_string(TraceEventKind kind) {
  for (const auto& [known, word] : kEventKinds) {
    if (known == kind) return word;
  }
  throw InternalError("trace event kind " + std::to_string(static_cast<int>(kind)) + " has no word");
}

TraceEventKind parse_trace_event_kind(std::string_view text) {
  for (const auto& [kind, word] : kEventKinds) {
    if (word == text) return kind;
  }
  throw TraceError("\"" + std::string(text) + "\" is none of cancel, preempt, resume, reuse_id");
}

namespace {

constexpr unsigned kReadSeconds = 10;  // of processor time, for a child that reads a trace

Trace read_probed(const std::filesystem::path& path, Faults& faults) {
  static constexpr std::array<std::string_view, 2> kMembers{"requests", "events"};
  static constexpr std::array<std::string_view, 6> kAttributes{"format", "version", "name", "description", "source", "vocab_size"};
  const h5::File file = h5::File::open_readonly(path, h5::Trust::probed);
  const h5::Group root = file.root();
  const std::string format = root.string_attribute("format");
  if (format != kTraceFormat) root.fail("format is \"" + format + "\", expected \"" + std::string(kTraceFormat) + "\"");
  const std::int64_t version = root.int_attribute("version");
  if (version < kVersionWithoutSampling || version > kVersion) {
    root.fail("version is " + std::to_string(version) + ", this program reads versions 1 and " + std::to_string(kVersion));
  }

  Trace trace;
  const std::size_t before = faults.size();
  collect(faults, [&] { root.allow_only(kMembers, kAttributes); });
  collect(faults, [&] { trace.name = root.string_attribute("name"); });
  collect(faults, [&] { trace.description = root.string_attribute("description"); });
  collect(faults, [&] { trace.source = root.string_attribute("source"); });
  collect(faults, [&] { trace.vocab_size = int32_attribute(root, "vocab_size"); });
  trace.requests = read_requests(root, version, faults);
  trace.events = read_events(root, faults);
  // What could not be read would only be reported a second time, as missing.
  if (faults.size() == before) {
    for (const std::string& fault : trace_faults(trace)) faults.push_back(path.string() + ": " + fault);
  }
  return trace;
}

}  // namespace

// Whether the HDF5 library survives a corrupt file depends on what is read in which order, so the child reads exactly what is read here.
Trace read_trace(const std::filesystem::path& path, std::vector<std::string>& faults) {
  const auto read = [&path] {
    Faults ignored;
    static_cast<void>(read_probed(path, ignored));
  };
  h5::probe_in_child(path, read, kReadSeconds);
  return read_probed(path, faults);
}

Trace read_trace(const std::filesystem::path& path) {
  Faults faults;
  Trace trace = read_trace(path, faults);
  if (!faults.empty()) throw_faults(path.string(), faults);
  return trace;
}

void write_trace(const std::filesystem::path& path, const Trace& trace, IfExists if_exists) {
  const Faults faults = trace_faults(trace);
  if (!faults.empty()) throw_faults("trace " + trace.name, faults);
  AtomicOutput output(path, if_exists);
  h5::File file = h5::File::create(output);
  {
    const h5::Group root = file.root();
    root.set_attribute("format", kTraceFormat);
    const bool samples = std::any_of(trace.requests.begin(), trace.requests.end(), [](const TraceRequest& request) {
      return request.temperature != 0.0f || !request.draft_tokens.empty();
    });
    root.set_attribute("version", samples ? kVersion : kVersionWithoutSampling);
    root.set_attribute("name", trace.name);
    root.set_attribute("description", trace.description);
    root.set_attribute("source", trace.source);
    root.set_attribute("vocab_size", trace.vocab_size);
    write_requests(root, trace);
    write_events(root, trace);
  }
  file.close();
  output.commit();
}

}  // namespace loopgauge::harness
