// SPDX-License-Identifier: Apache-2.0
#include "harness/io/trace_recipe.hpp"

#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::contains;
using test::error_of;

using Tokens = std::vector<std::int32_t>;

RequestRecipe recipe(const std::string& text) {
  RequestRecipe result;
  result.tokens = tokens_of_text(text);
  return result;
}

TEST(TraceRecipe, BytesAreTokens) { EXPECT_EQ(tokens_of_text("A\xff\n"), (Tokens{65, 255, 10})); }

TEST(TraceRecipe, CutsPromptAndForcedContinuation) {
  RequestRecipe cut = recipe("abcdefgh");
  cut.bos = true;
  cut.offset = 1;
  cut.prompt_tokens = 3;
  cut.continuation = 2;
  cut.forced = true;
  std::int64_t used = 0;
  const TraceRequest request = cut_request(cut, &used);
  EXPECT_EQ(request.prompt, (Tokens{256, 'b', 'c'}));
  EXPECT_EQ(request.forced, (Tokens{'d', 'e'}));
  EXPECT_EQ(request.max_new_tokens, 2);
  EXPECT_EQ(used, 5);
}

TEST(TraceRecipe, WithoutALengthThePromptIsTheRest) {
  RequestRecipe cut = recipe("abcd");
  cut.continuation = 3;
  EXPECT_EQ(cut_request(cut).prompt, (Tokens{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(cut_request(cut).max_new_tokens, 3);
  EXPECT_FALSE(cut_request(cut).teacher_forced());
  cut.forced = true;
  EXPECT_EQ(cut_request(cut).prompt, (Tokens{'a'}));
  EXPECT_EQ(cut_request(cut).forced, (Tokens{'b', 'c', 'd'}));
}

TEST(TraceRecipe, BosAloneIsAPrompt) {
  RequestRecipe cut = recipe("");
  cut.bos = true;
  EXPECT_EQ(cut_request(cut).prompt, Tokens{256});
}

TEST(TraceRecipe, RefusesSourcesThatAreTooShort) {
  RequestRecipe cut = recipe("abcd");
  cut.prompt_tokens = 3;
  cut.continuation = 2;
  cut.forced = true;
  EXPECT_TRUE(contains(error_of([&] { cut_request(cut); }),
                       "the source holds 4 tokens from offset 0, but a prompt of 3 tokens and 2 forced tokens need 5"));
  cut.offset = 9;
  EXPECT_TRUE(contains(error_of([&] { cut_request(cut); }), "the source holds 0 tokens from offset 9"));
  EXPECT_TRUE(contains(error_of([&] { cut_request(recipe("")); }), "the prompt would be empty"));
}

TEST(TraceRecipe, ReadsIdFiles) {
  const test::Folder folder;
  std::ofstream(folder / "ids.txt") << "1, 2\t3\n\n65535,-1\r\n";
  EXPECT_EQ(read_id_tokens(folder / "ids.txt"), (Tokens{1, 2, 3, 65535, -1}));
  std::ofstream(folder / "bad.txt") << "1\n2\n3x 4\n";
  EXPECT_TRUE(contains(error_of([&] { read_id_tokens(folder / "bad.txt"); }), "bad.txt:3: \"3x\" is not a token id"));
  std::ofstream(folder / "wide.txt") << "99999999999";
  EXPECT_TRUE(contains(error_of([&] { read_id_tokens(folder / "wide.txt"); }), "wide.txt:1: \"99999999999\" is not a token id"));
  EXPECT_TRUE(contains(error_of([&] { read_id_tokens(folder / "missing.txt"); }), "missing.txt: no such text or description"));
}

TEST(TraceRecipe, ReadsADescription) {
  const test::Folder folder;
  std::ofstream(folder / "book.txt") << "In the beginning";
  std::ofstream(folder / "mixed.json") << R"({"name": "mixed", "requests": [
      {"text_file": "book.txt", "bos": true, "prompt_tokens": 4, "continuation": 2, "forced": true, "answer_mask": [0, 1], "task": "other"},
      {"ids": [5, 6], "continuation": 2, "exit_depths": [1, 4], "draft_tokens": [-1, 6], "temperature": 0.5, "id": 9, "arrival": 3, "eos_token_id": 7, "seed": 18446744073709551615}],
      "events": [{"submission": 2, "kind": "cancel", "request": 1}]})";
  const Trace trace = trace_from_recipe(folder / "mixed.json");
  EXPECT_EQ(trace_faults(trace), std::vector<std::string>{});
  EXPECT_EQ(trace.name, "mixed");
  EXPECT_EQ(trace.vocab_size, 264);
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].prompt, (Tokens{256, 'I', 'n', ' '}));
  EXPECT_EQ(trace.requests[0].forced, (Tokens{'t', 'h'}));
  EXPECT_EQ(trace.requests[0].answer_mask, (std::vector<std::uint8_t>{0, 1}));
  EXPECT_EQ(trace.requests[1].id, 9);
  EXPECT_EQ(trace.requests[1].arrival, 3);
  EXPECT_EQ(trace.requests[1].eos_token_id, 7);
  EXPECT_EQ(trace.requests[1].seed, 0xffffffffffffffffu);
  EXPECT_EQ(trace.requests[1].temperature, 0.5f);
  EXPECT_EQ(trace.requests[1].draft_tokens, (std::vector<std::int32_t>{-1, 6}));
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].kind, TraceEventKind::cancel);
}

TEST(TraceRecipe, EachRefusalNamesTheKey) {
  const auto refusal = [](const std::string& json) {
    const test::Folder folder;
    std::ofstream(folder / "r.json") << json;
    return error_of([&] { trace_from_recipe(folder / "r.json"); });
  };
  EXPECT_TRUE(contains(refusal("{"), "r.json"));
  EXPECT_TRUE(contains(refusal(R"({"requests": []})"), "has no \"name\""));
  EXPECT_TRUE(contains(refusal(R"({"name": "a"})"), "has no \"requests\""));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "requests": [], "nmae": 1})"), "unknown key \"nmae\""));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "name": "b", "requests": []})"), "name"));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "requests": {}})"), "requests = {} is not a list"));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "requests": [7]})"), "requests[0] = 7 is not an object"));
  EXPECT_TRUE(
      contains(refusal(R"({"name": "a", "requests": [{"continuation": 1}]})"), "requests[0].tokens: 0 of text, text_file, ids, ids_file"));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "requests": [{"text": "x", "ids": [1]}]})"), "requests[0].tokens: 2 of"));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "requests": [{"ids": [1, 2.5]}]})"), "requests[0].ids[1] = 2.5 is not an integer"));
  EXPECT_TRUE(
      contains(refusal(R"({"name": "a", "requests": [{"ids": [1, 99999999999]}]})"), "requests[0].ids[1] = 99999999999 is not an integer"));
  EXPECT_TRUE(
      contains(refusal(R"({"name": "a", "requests": [{"text": "x", "bos": 1}]})"), "requests[0].bos = 1 is neither true nor false"));
  EXPECT_TRUE(
      contains(refusal(R"({"name": "a", "requests": [{"text": "x", "prompt_tokens": 9}]})"), "requests[0]: the source holds 1 tokens"));
  EXPECT_TRUE(contains(refusal(R"({"name": "a", "requests": [{"text": "x"}], "events": [{"kind": "nap"}]})"), "\"nap\" is none of"));
}

}  // namespace
}  // namespace loopgauge::harness
