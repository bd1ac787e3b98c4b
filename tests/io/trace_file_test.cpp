// SPDX-License-Identifier: Apache-2.0
#include "harness/io/trace_file.hpp"

#include <functional>

#include "harness/io/hdf5.hpp"
#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::bytes_of;
using test::contains;
using test::error_of;
using test::write_bytes;

Trace sample() {
  Trace trace;
  trace.name = "sample";
  trace.description = "two requests";
  trace.source = "a test";
  trace.vocab_size = 264;
  TraceRequest forced;
  forced.id = 3;
  forced.max_new_tokens = 2;
  forced.seed = 0xffffffffffffffffu;
  forced.task = "needle";
  forced.prompt = {256, 7, 0};
  forced.forced = {65, 66};
  forced.exit_depths = {1, 4};
  forced.answer_mask = {0, 1};
  TraceRequest free;
  free.id = 4;
  free.arrival = 5;
  free.max_new_tokens = 9;
  free.eos_token_id = 10;
  free.prompt = {1};
  trace.requests = {forced, free};
  trace.events = {{1, TraceEventKind::preempt, 1}, {3, TraceEventKind::resume, 1}, {4, TraceEventKind::cancel, 0}};
  return trace;
}

void expect_equal(const Trace& a, const Trace& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.description, b.description);
  EXPECT_EQ(a.source, b.source);
  EXPECT_EQ(a.vocab_size, b.vocab_size);
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (std::size_t i = 0; i < a.requests.size(); ++i) {
    const TraceRequest &x = a.requests[i], &y = b.requests[i];
    EXPECT_EQ(std::tie(x.id, x.arrival, x.max_new_tokens, x.eos_token_id, x.seed, x.task, x.prompt, x.forced, x.exit_depths, x.answer_mask,
                       x.temperature, x.draft_tokens),
              std::tie(y.id, y.arrival, y.max_new_tokens, y.eos_token_id, y.seed, y.task, y.prompt, y.forced, y.exit_depths, y.answer_mask,
                       y.temperature, y.draft_tokens))
        << "request " << i;
  }
  ASSERT_EQ(a.events.size(), b.events.size());
  for (std::size_t i = 0; i < a.events.size(); ++i) {
    EXPECT_EQ(std::tie(a.events[i].submission, a.events[i].kind, a.events[i].request),
              std::tie(b.events[i].submission, b.events[i].kind, b.events[i].request));
  }
}

// Writes a trace file by hand: `spoil` receives the root of a file that is valid but for what it changes or adds.
struct Parts {
  bool requests = true, prompt = true, forced = true, vocab_size = true, task = true;
};
std::string refusal(const Parts& parts, const std::function<void(const h5::Group& root, const h5::Group& request)>& spoil) {
  const test::Folder folder;
  h5::File file = h5::File::create(folder / "t.h5");
  {
    const h5::Group root = file.root();
    root.set_attribute("format", "loopgauge-trace");
    root.set_attribute("version", 1);
    root.set_attribute("name", "t");
    root.set_attribute("description", "");
    root.set_attribute("source", "");
    if (parts.vocab_size) root.set_attribute("vocab_size", 264);
    const h5::Group request = root.require_group(parts.requests ? "requests/0" : "detached");
    for (const char* name : {"id", "arrival", "seed"}) request.set_attribute(name, 0);
    request.set_attribute("max_new_tokens", 2);
    request.set_attribute("eos_token_id", -1);
    if (parts.task) request.set_attribute("task", "text");
    if (parts.prompt) request.write("prompt", std::vector<std::int32_t>{1, 2});
    if (parts.forced) request.write("forced", std::vector<std::int32_t>{3, 4});
    spoil(root, request);
  }
  file.close();
  return error_of([&] { read_trace(folder / "t.h5"); });
}

TEST(TraceFile, RoundTrip) {
  const test::Folder folder;
  write_trace(folder / "t.h5", sample());
  expect_equal(read_trace(folder / "t.h5"), sample());
  EXPECT_EQ(folder.names(), std::vector<std::string>{"t.h5"});
}

TEST(TraceFile, SamplingAndDraftsMakeVersionTwo) {
  const test::Folder folder;
  const auto version = [&](const Trace& trace) {
    write_trace(folder / "t.h5", trace, IfExists::replace);
    expect_equal(read_trace(folder / "t.h5"), trace);
    return h5::File::open_readonly(folder / "t.h5", h5::Trust::probed).root().int_attribute("version");
  };
  Trace trace = sample();
  EXPECT_EQ(version(trace), 1);
  trace.requests[1].temperature = 0.7f;
  EXPECT_EQ(version(trace), 2);
  trace.requests[1].temperature = 0;
  trace.requests[0].draft_tokens = {-1, 66};
  EXPECT_EQ(version(trace), 2);
}

TEST(TraceFile, EqualTracesAreEqualBytes) {
  const test::Folder folder;
  write_trace(folder / "a.h5", sample());
  write_trace(folder / "b.h5", sample());
  EXPECT_EQ(bytes_of(folder / "a.h5"), bytes_of(folder / "b.h5"));
}

TEST(TraceFile, TheHandWrittenFileIsAccepted) {
  EXPECT_EQ(refusal({}, [](const h5::Group&, const h5::Group&) {}), "");
}

TEST(TraceFile, InvalidTracesAreNotWritten) {
  const test::Folder folder;
  Trace trace = sample();
  trace.requests[0].prompt[1] = 264;
  trace.requests[1].arrival = -1;
  const std::string sentence = error_of([&] { write_trace(folder / "t.h5", trace); });
  EXPECT_TRUE(contains(sentence, "requests/0/prompt[1] = 264 is not below vocab_size 264"));
  EXPECT_TRUE(contains(sentence, "and 1 more fault"));
  EXPECT_TRUE(folder.names().empty());
}

TEST(TraceFile, DoesNotReplaceWhenAskedNotTo) {
  const test::Folder folder;
  write_trace(folder / "t.h5", sample(), IfExists::refuse);
  const std::vector<char> before = bytes_of(folder / "t.h5");
  Trace other = sample();
  other.name = "other";
  EXPECT_TRUE(contains(error_of([&] { write_trace(folder / "t.h5", other, IfExists::refuse); }), "exists already"));
  EXPECT_EQ(bytes_of(folder / "t.h5"), before);
}

TEST(TraceFile, EachRefusalNamesTheCulprit) {
  using Group = h5::Group;
  const auto nothing = [](const Group&, const Group&) {};
  EXPECT_TRUE(contains(refusal({}, [](const Group& root, const Group&) { root.set_attribute("format", "loopgauge-dump"); }),
                       "/: format is \"loopgauge-dump\", expected \"loopgauge-trace\""));
  EXPECT_TRUE(contains(refusal({}, [](const Group& root, const Group&) { root.set_attribute("version", 3); }), "/: version is 3"));
  const auto later = [](const Group&, const Group& request) { request.set_attribute("temperature", 0.5); };
  EXPECT_TRUE(contains(refusal({}, later), "temperature")) << "version 1 does not have it";
  EXPECT_TRUE(contains(refusal({}, [](const Group& root, const Group&) { root.set_attribute("version", "1"); }),
                       "/: attribute `version` is string, expected an integer"));
  EXPECT_TRUE(contains(refusal({}, [](const Group& root, const Group&) { root.set_attribute("author", "x"); }),
                       "/: has the unknown attribute `author`"));
  EXPECT_TRUE(
      contains(refusal({}, [](const Group& root, const Group&) { root.create_group("extra"); }), "/: has the unknown member `extra`"));
  EXPECT_TRUE(contains(refusal({.vocab_size = false}, nothing), "/: attribute `vocab_size` is missing"));
  EXPECT_TRUE(contains(refusal({.requests = false}, nothing), "/: has the unknown member `detached`"));
  EXPECT_TRUE(contains(refusal({.prompt = false}, nothing), "/requests/0: has no member `prompt`, expected a dataset"));
  EXPECT_TRUE(contains(refusal({.task = false}, nothing), "/requests/0: attribute `task` is missing"));
  EXPECT_TRUE(contains(refusal({}, [](const Group& root, const Group&) { root.require_group("requests/2"); }),
                       "/requests: has member `2` where request `1` is due"));
  EXPECT_TRUE(contains(refusal({}, [](const Group&, const Group& request) { request.write("note", std::vector<float>{1}); }),
                       "/requests/0: has the unknown member `note`"));
  EXPECT_TRUE(contains(refusal({}, [](const Group&, const Group& request) { request.set_attribute("id", 1.5); }),
                       "/requests/0: attribute `id` is float64, expected an integer"));
  EXPECT_TRUE(contains(refusal({}, [](const Group&, const Group& request) { request.set_attribute("id", std::int64_t{1} << 40); }),
                       "/requests/0: attribute `id` = 1099511627776 does not fit 32 bits"));
  EXPECT_TRUE(contains(refusal({}, [](const Group&, const Group& request) { request.set_attribute("seed", -1); }),
                       "/requests/0: attribute `seed` = -1 is negative"));
  EXPECT_TRUE(contains(
      refusal({.prompt = false}, [](const Group&, const Group& request) { request.write("prompt", std::vector<std::int64_t>{1}); }),
      "/requests/0/prompt: is int64, expected int32"));
  EXPECT_TRUE(
      contains(refusal({.prompt = false}, [](const Group&, const Group& request) { request.write("prompt", std::vector<float>{1}); }),
               "/requests/0/prompt: is float32, expected int32"));
  EXPECT_TRUE(contains(refusal({.prompt = false},
                               [](const Group&, const Group& request) {
                                 request.write("prompt", Tensor<std::int32_t>({2, 1}, 1));
                               }),
                       "/requests/0/prompt: has extent [2, 1], expected [any]"));
  EXPECT_TRUE(contains(refusal({.prompt = false}, [](const Group&, const Group& request) { request.create_group("prompt"); }),
                       "/requests/0/prompt: is not a dataset"));
  EXPECT_TRUE(
      contains(refusal({.prompt = false}, [](const Group&, const Group& request) { request.write("prompt", std::vector<std::int32_t>{}); }),
               "requests/0/prompt is empty"));
  EXPECT_TRUE(
      contains(refusal({.forced = false}, [](const Group&, const Group& request) { request.write("forced", std::vector<std::int32_t>{}); }),
               "/requests/0: dataset `forced` is empty; leave it out instead"));
  EXPECT_TRUE(contains(
      refusal({.forced = false}, [](const Group&, const Group& request) { request.write("forced", std::vector<std::int32_t>{1}); }),
      "requests/0/forced has 1 entries, max_new_tokens is 2"));
  EXPECT_TRUE(contains(refusal({},
                               [](const Group&, const Group& request) {
                                 request.write("exit_depths", std::vector<std::uint8_t>{4, 5});
                               }),
                       "requests/0/exit_depths[1] = 5 is not a loop in 1..4"));
  EXPECT_TRUE(contains(refusal({.forced = false},
                               [](const Group&, const Group& request) {
                                 request.write("answer_mask", std::vector<std::uint8_t>{0, 1});
                               }),
                       "requests/0/answer_mask is present without forced"));
}

TEST(TraceFile, EventRefusals) {
  const auto with_events = [](const std::vector<std::int32_t>& submissions, const std::vector<std::string>& kinds,
                              const std::vector<std::int32_t>& requests) {
    return refusal({}, [&](const h5::Group& root, const h5::Group&) {
      const h5::Group events = root.create_group("events");
      events.write("submission", submissions);
      events.write("kind", kinds);
      events.write("request", requests);
    });
  };
  EXPECT_EQ(with_events({0, 1}, {"preempt", "resume"}, {0, 0}), "");
  EXPECT_TRUE(contains(with_events({0}, {"explode"}, {0}), "/events: kind[0] = \"explode\" is none of cancel, preempt, resume, reuse_id"));
  EXPECT_TRUE(contains(with_events({0}, {"cancel"}, {1}), "events[0]/request = 1 names none of the 1 requests"));
  EXPECT_TRUE(contains(with_events({0, 1}, {"cancel"}, {0, 0}), "/events/kind: has extent [1], expected [2]"));
  EXPECT_TRUE(contains(with_events({0}, {"cancel"}, {}), "/events/request: has extent [0], expected [1]"));
}

TEST(TraceFile, EveryFaultIsListed) {
  const test::Folder folder;
  h5::File file = h5::File::create(folder / "t.h5");
  {
    const h5::Group root = file.root();
    root.set_attribute("format", "loopgauge-trace");
    root.set_attribute("version", 1);
    root.set_attribute("name", "t");
    root.require_group("requests/0").write("prompt", std::vector<float>{1});
  }
  file.close();
  std::vector<std::string> faults;
  read_trace(folder / "t.h5", faults);
  ASSERT_EQ(faults.size(), 10u);  // description, source, vocab_size; id, arrival, max_new_tokens, eos_token_id, seed, task, prompt
  EXPECT_TRUE(contains(faults[0], "`description` is missing"));
  EXPECT_TRUE(contains(faults[3], "/requests/0: attribute `id` is missing"));
  EXPECT_TRUE(contains(faults[9], "/requests/0/prompt: is float32"));
  EXPECT_TRUE(contains(error_of([&] { read_trace(folder / "t.h5"); }), "(and 9 more faults"));
}

// A turned byte may make another valid trace or a faulty one, and libhdf5 may crash on it: what comes of it is a sentence, never a crash. The
// range holds the root's object header and the attributes that one such byte breaks.
TEST(TraceFile, ATurnedByteNeverBringsTheProgramDown) {
  const test::Folder folder;
  write_trace(folder / "whole.h5", sample());
  const std::vector<char> whole = bytes_of(folder / "whole.h5");
  ASSERT_GT(whole.size(), 2400u);
  int refused = 0;
  for (std::size_t at = 900; at < 2400; at += 7) {
    std::vector<char> turned = whole;
    turned[at] = static_cast<char>(0xd8);
    write_bytes(folder / "turned.h5", turned);
    refused += error_of([&] { read_trace(folder / "turned.h5"); }).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 10);
}

TEST(TraceFile, EveryTruncationIsRefused) {
  const test::Folder folder;
  write_trace(folder / "t.h5", sample());
  const std::vector<char> whole = bytes_of(folder / "t.h5");
  for (std::size_t length = 0; length < whole.size(); length += 97) {
    write_bytes(folder / "cut.h5", {whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)});
    EXPECT_NE(error_of([&] { read_trace(folder / "cut.h5"); }), "") << length << " bytes of " << whole.size();
  }
}

}  // namespace
}  // namespace loopgauge::harness
