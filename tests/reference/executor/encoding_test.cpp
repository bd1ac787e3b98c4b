// SPDX-License-Identifier: Apache-2.0
// Quantized K/V in whole runs: frontiers, blocks, who reads what, immutability (S-KVQ-1..13, S-POL-1..4, S-TIME-1, S-INV-6..7).
#include <gtest/gtest.h>

#include "models/error.hpp"
#include "reference/ops/codec.hpp"
#include "tests/reference/executor/attention_rows.hpp"

namespace loopgauge::test {
namespace {

AlgorithmConfig quantized(EncodingPolicy policy, const char* text = "t0s0q1", int window = 64) {
  AlgorithmConfig config = switches(text, window);
  config.kv_residual_quantization.policy = policy;
  return config;
}

class Encoding : public testing::TestWithParam<EncodingPolicy> {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

INSTANTIATE_TEST_SUITE_P(Policies, Encoding,
                         testing::Values(EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming),
                         [](const auto& policy) { return std::string(to_string(policy.param)); });

TEST_P(Encoding, FrontiersAndBlocksFollowThePolicyAtEveryCommittedLength) {
  for (const int prompt : {1, 2, 63, 64, 127, 128, 129, 191, 192}) {
    const AlgorithmConfig requested = quantized(GetParam(), "t1s0q1");
    const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
    const RequestRecord r = run(checkpoint_, trace_of({request(0, prompt, 3)}), requested).requests[0];
    ASSERT_EQ(r.encoded_frontier.size(), 4u);
    for (int j = 0; j <= 3; ++j)
      EXPECT_EQ(r.encoded_frontier[static_cast<std::size_t>(j)], encoded_frontier(config, prompt, prompt + j)) << prompt << '+' << j;
    std::vector<PositionRange> ranges;
    for (const CodecBlock& block : r.blocks) ranges.push_back(block.positions);
    EXPECT_EQ(ranges, block_cuts(config, prompt, 0, r.encoded_frontier.back())) << prompt;
  }
}

TEST_P(Encoding, StreamsHoldTheRowsThatExecutedTheirLoop) {
  const int prompt = 200;
  const RequestRecord r = run(checkpoint_, trace_of({request(0, prompt, 70)}), quantized(GetParam(), "t1s0q1")).requests[0];
  ASSERT_FALSE(r.blocks.empty());
  for (const CodecBlock& block : r.blocks) {
    for (int loop = 1; loop <= 4; ++loop) {
      std::vector<std::int32_t> expected;
      for (int p = block.positions.begin; p < block.positions.end; ++p) {
        const auto* active = loop < 3 ? nullptr : &r.active[static_cast<std::size_t>(loop - 3)];
        if (active == nullptr || p >= prompt || std::binary_search(active->begin(), active->end(), p)) expected.push_back(p);
      }
      EXPECT_EQ(block.streams[static_cast<std::size_t>(loop - 1)].rows, expected) << block.positions.begin << " loop " << loop;
      EXPECT_EQ(block.streams[static_cast<std::size_t>(loop - 1)].layers.size(), expected.empty() ? 0u : 2u);
    }
  }
}

// The recorded logical K/V of encoded positions is the sum of the decoded streams; absent rows add nothing.
TEST_P(Encoding, ReconstructionIsTheSumOfTheStoredStreams) {
  const RequestRecord r = run(checkpoint_, trace_of({request(0, 200, 70)}), quantized(GetParam(), "t1s0q1")).requests[0];
  for (const CodecBlock& block : r.blocks) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        for (int p = block.positions.begin; p < block.positions.end; ++p) {
          std::vector<float> k(kHeadDim, 0.0f), v(kHeadDim, 0.0f);
          for (int loop = 1; loop <= 4; ++loop) {
            const CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
            const auto found = std::lower_bound(stream.rows.begin(), stream.rows.end(), p);
            if (found != stream.rows.end() && *found == p) {
              const int i = static_cast<int>(found - stream.rows.begin());
              const CodecLayer& codec = stream.layers[static_cast<std::size_t>(layer)];
              for (int d = 0; d < kHeadDim; ++d) {
                const std::size_t element = static_cast<std::size_t>(i * kHeadDim + d),
                                  group = static_cast<std::size_t>(i / 64 * kHeadDim + d);
                const float dk =
                    static_cast<float>(codec.k_codes.row(head)[element]) * codec.k_scale.row(head)[group] + codec.k_min.row(head)[group];
                const float dv =
                    static_cast<float>(codec.v_codes.row(head)[element]) * codec.v_scale.row(head)[static_cast<std::size_t>(i)] +
                    codec.v_min.row(head)[static_cast<std::size_t>(i)];
                k[static_cast<std::size_t>(d)] = loop == 1 ? dk : k[static_cast<std::size_t>(d)] + dk;
                v[static_cast<std::size_t>(d)] = loop == 1 ? dv : v[static_cast<std::size_t>(d)] + dv;
              }
            }
            ASSERT_TRUE(same_bits(k, kv_row(r, true, layer, loop, head, p))) << p << " loop " << loop;
            ASSERT_TRUE(same_bits(v, kv_row(r, false, layer, loop, head, p))) << p << " loop " << loop;
          }
        }
      }
    }
  }
}

// A decode row sees the frontier of its own committed length: the rows below it reconstructed, the tail in BF16.
TEST_P(Encoding, ADecodeRowReadsEncodedPositionsBelowItsFrontierAndBf16Above) {
  const int prompt = 200, steps = 5;
  Recorder taps;
  const RequestRecord r = run(checkpoint_, trace_of({request(0, prompt, steps)}), quantized(GetParam()), with_tap(taps)).requests[0];
  ASSERT_GT(r.encoded_frontier.front(), 0);
  ASSERT_EQ(r.encoded_frontier.front(), r.encoded_frontier.back()) << "the record then shows what every row saw";
  for (int p = prompt; p < prompt + steps; ++p) {
    for (int loop = 1; loop <= 4; ++loop) {
      for (int head = 0; head < kHeads; ++head) {
        const HeadPlane plane = recorded_plane(r, 1, loop, head, p + 1);
        ASSERT_EQ(tapped_output(taps, p, loop, 1, head), dense_output(taps, p, loop, 1, head, plane, p + 1)) << p << ' ' << loop;
        const auto bf16 = taps.at("rope.k", 0, loop, 1);
        ASSERT_FALSE(same_bits({bf16.data() + head * kHeadDim, kHeadDim}, kv_row(r, true, 1, loop, head, 0))) << "position 0 is encoded";
        const auto tail = taps.at("rope.k", p, loop, 1);
        ASSERT_TRUE(same_bits({tail.data() + head * kHeadDim, kHeadDim}, kv_row(r, true, 1, loop, head, p))) << "the row itself is not";
      }
    }
  }
}

TEST_P(Encoding, PrefillReadsBf16OnlyExceptUnderStreaming) {
  const Trace trace = trace_of({request(0, 200, 0)});
  const RequestRecord off = run(checkpoint_, trace, switches("t1s0q0")).requests[0],
                      on = run(checkpoint_, trace, quantized(GetParam(), "t1s0q1")).requests[0];
  const auto differing = differing_groups(off, on);
  const bool streaming = GetParam() == EncodingPolicy::streaming;
  for (const char* group : {"hidden/loop1", "hidden/loop2", "hidden/loop3", "hidden/loop4", "logits", "scores/loop3"}) {
    EXPECT_EQ(std::find(differing.begin(), differing.end(), group) != differing.end(), streaming) << group;
  }
  for (int p = 0; p < 64; ++p) {
    for (int loop = 0; loop < 4; ++loop) {
      EXPECT_TRUE(same_bits(off.hidden[static_cast<std::size_t>(loop)].row(p), on.hidden[static_cast<std::size_t>(loop)].row(p)))
          << "the first window reads itself";
    }
  }
}

TEST_P(Encoding, SealedBlocksAreTheSameBitsAfterAnyNumberOfFlushes) {
  TraceRequest longer = request(0, 150, 300), shorter = longer;
  shorter.forced.resize(70);
  shorter.max_new_tokens = 70;
  RunRecord long_run = run(checkpoint_, trace_of({longer}), quantized(GetParam(), "t1s1q1")),
            short_run = run(checkpoint_, trace_of({shorter}), quantized(GetParam(), "t1s1q1"));
  RequestRecord& a = long_run.requests[0];
  RequestRecord& b = short_run.requests[0];
  ASSERT_GE(b.blocks.size(), 2u);
  if (GetParam() != EncodingPolicy::fixed_prompt) {
    ASSERT_GE(a.blocks.size(), b.blocks.size() + 3) << "at least three flushes later";
  }
  a.blocks.resize(b.blocks.size());
  EXPECT_EQ(fingerprint(a)["codec"], fingerprint(b)["codec"]);
  EXPECT_TRUE(same_bits({a.logits.data.data(), b.logits.data.size()}, b.logits.data)) << "a longer run continues the shorter one";
}

TEST_P(Encoding, TimingsAgreeWhereOneTokenIsCommittedAtATime) {
  const Trace trace = trace_of({request(0, 150, 140)});
  AlgorithmConfig dependent = quantized(GetParam(), "t1s1q1");
  dependent.kv_residual_quantization.timing = EncodingTiming::execution_dependent;
  const RequestRecord aligned = run(checkpoint_, trace, quantized(GetParam(), "t1s1q1")).requests[0];
  EXPECT_EQ(differing_groups(aligned, run(checkpoint_, trace, dependent).requests[0]), kNone);
}

TEST_P(Encoding, GeneratedRowsAreNotQuantizedBeforeTheTailFlushes) {
  AlgorithmConfig long_tail = quantized(GetParam());
  long_tail.kv_residual_quantization.tail = 1000;
  const RequestRecord r = run(checkpoint_, trace_of({request(0, 100, 200)}), long_tail).requests[0];
  const int expected = GetParam() == EncodingPolicy::fixed_prompt ? 100 : GetParam() == EncodingPolicy::streaming ? 64 : 0;
  for (const std::int32_t frontier : r.encoded_frontier) EXPECT_EQ(frontier, expected);
}

// A prefill row of a window that starts at `a` sees positions below a reconstructed from streams 1..r and its own window in BF16.
TEST(EncodingStreaming, APrefillRowReadsEarlierWindowsEncodedAndItsOwnInBf16) {
  const Checkpoint checkpoint = tiny_checkpoint();
  Recorder taps;
  const RequestRecord r = run(checkpoint, trace_of({request(0, 192, 0)}), quantized(EncodingPolicy::streaming), with_tap(taps)).requests[0];
  ASSERT_EQ(r.encoded_frontier.front(), 192);
  for (const int p : {64, 100, 127, 128, 191}) {
    const int a = p / 64 * 64;
    for (int loop = 1; loop <= 4; ++loop) {
      for (int head = 0; head < kHeads; ++head) {
        HeadPlane plane = recorded_plane(r, 1, loop, head, p + 1);
        const HeadPlane encoded = plane;
        for (int j = a; j <= p; ++j) {
          const auto& k = taps.at("rope.k", j, loop, 1);
          const auto& v = taps.at("linear.v_proj", j, loop, 1);
          std::copy_n(k.begin() + head * kHeadDim, kHeadDim, plane.k.begin() + j * kHeadDim);
          std::copy_n(v.begin() + head * kHeadDim, kHeadDim, plane.v.begin() + j * kHeadDim);
        }
        ASSERT_EQ(tapped_output(taps, p, loop, 1, head), dense_output(taps, p, loop, 1, head, plane, p + 1)) << p << ' ' << loop;
        ASSERT_NE(plane.k, encoded.k);
      }
    }
  }
}

TEST(EncodingRolling, LateStreamsMayBeAbsentAndAreMadeByALaterFlush) {
  // One row of 64 is active at loop 4; with a tail that leaves it out, the first block has no stream 4.
  const Checkpoint checkpoint = tiny_checkpoint();
  AlgorithmConfig config = quantized(EncodingPolicy::rolling, "t1s1q1", 256);
  config.token_sparse_prefill.retention_bp = {10000, 10000, 1, 1};
  bool seen_absent = false;
  for (int id = 0; id < 6; ++id) {
    TraceRequest r = request(0, 200, 140, 40 + static_cast<std::uint64_t>(id));
    const RequestRecord record = run(checkpoint, trace_of({r}), config).requests[0];
    const int active = record.active[1].at(0);
    ASSERT_EQ(record.active[1].size(), 1u);
    ASSERT_EQ(record.blocks[0].positions, (PositionRange{0, 128}));
    EXPECT_EQ(record.blocks[0].streams[3].rows.empty(), active >= 128);
    seen_absent |= active >= 128;
    EXPECT_FALSE(record.blocks.back().streams[3].rows.empty()) << "a flush of generated rows has all streams";
  }
  EXPECT_TRUE(seen_absent) << "none of the prompts had its active row in the tail";
}

TEST(EncodingRefusal, AValueOutsideTheCodecNamesTensorLoopLayerAndGroup) {
  Checkpoint huge = tiny_checkpoint();
  for (Bfloat16Bits& w : huge.layers[1].v_proj.data) w = bf16_bits(plain_bf16(reference::bfloat16_to_float(w) * 0x1p20f));
  try {
    run(huge, trace_of({request(0, 130, 1)}), quantized(EncodingPolicy::rolling));
    FAIL() << "accepted";
  } catch (const NumericError& error) {
    const std::string message = error.what();
    for (const char* part : {"request 0", "tensor V", "loop 1", "layer 1", "group 0"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

// Worked example S-EX-5, in groups that are always full.
TEST(EncodingPayload, RatioOfTheDefaultRetentionIsAbout6Point81) {
  const double packed = (1 + 1 + 0.25 + 0.10) * 4, dense = 4 * 16;
  EXPECT_NEAR(dense / packed, 6.81, 0.005);
  // The same from a run's stored codes, with windows of 320 in which 25 % and 10 % are whole rows.
  const Checkpoint checkpoint = tiny_checkpoint();
  AlgorithmConfig config = quantized(EncodingPolicy::fixed_prompt, "t1s0q1", 320);
  const RequestRecord r = run(checkpoint, trace_of({request(0, 640, 0)}), config).requests[0];
  std::size_t codes = 0;
  for (const CodecBlock& block : r.blocks) {
    for (const CodecStream& stream : block.streams) {
      for (const CodecLayer& layer : stream.layers) codes += layer.k_codes.data.size() + layer.v_codes.data.size();
    }
  }
  const double bf16_bits_total = 2.0 * 4 * 640 * 2 * 32 * 16;  // layers x loops x positions x (K, V) x width x 16 bits
  EXPECT_NEAR(bf16_bits_total / (4.0 * static_cast<double>(codes)), 6.81, 0.005);
}

}  // namespace
}  // namespace loopgauge::test
