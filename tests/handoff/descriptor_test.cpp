// SPDX-License-Identifier: Apache-2.0
// The descriptor's bytes are a promise; whatever is not one of ours is refused with the field's name (S-PD-2).
#include "models/handoff/descriptor.hpp"

#include <gtest/gtest.h>

#include "models/handoff/bytes.hpp"
#include "tests/handoff/handoff_fixture.hpp"

namespace loopgauge::test {
namespace {

using handoff::Descriptor;
using handoff::HandoffError;

Descriptor sample() {
  AlgorithmConfig config = settings("t1s0q1", EncodingPolicy::streaming, 128);
  config.kv_residual_quantization.tail = 70;
  return descriptor_of(small_model(), config, 300, 5);
}

// The checksum made right again after a change on purpose.
std::vector<std::byte> resealed(std::vector<std::byte> bytes) {
  bytes.resize(bytes.size() - handoff::kChecksumBytes);
  const auto sum = handoff::sha256_bytes(bytes);
  bytes.insert(bytes.end(), sum.begin(), sum.end());
  return bytes;
}

std::string refusal(std::span<const std::byte> bytes) {
  try {
    handoff::parse_descriptor(bytes);
    return "accepted";
  } catch (const HandoffError& error) {
    return error.what();
  }
}

TEST(Descriptor, HasTheseBytes) {
  const std::string text = handoff::to_hexadecimal(serialize(sample()));
  const std::string head =
      "4c47504444455343"  // LGPDDESC
      "03000000";         // version
  EXPECT_EQ(text.substr(0, head.size()), head);
  EXPECT_EQ(text.substr(2 * 16, 64), std::string(64, 'a'));                                                // model
  EXPECT_EQ(text.substr(2 * 48, 64), "1fbdefc8c643c6edc667cbffd9c8ece02dc1a4a5015da371e65794d0981c6c50");  // prompt
  EXPECT_EQ(text.substr(2 * 80, 2 * 88),
            "02000000"
            "04000000"
            "02000000"
            "04000000"
            "06000000"
            "2c010000"  // layers loops heads head_dim hidden vocab
            "2c010000"
            "00010000"
            "80000000"
            "46000000"  // P 300, E 256, W 128, tail 70
            "10270000"
            "10270000"
            "c4090000"
            "e8030000"  // retention
            "01"
            "01"
            "04"
            "01"
            "01"
            "02"
            "4000"
            "4000"  // element, quantized, bits, depth, axes, groups
            "02"
            "00"
            "00"
            "00"
            "0000"
            "05000000"
            "bd378635"
            "000000000088c340");  // streaming, serial_aligned, committed, declared, zero, request, rms_norm_eps 1e-6, rope_theta 10000
  const auto bytes = serialize(sample());
  EXPECT_EQ(std::to_integer<std::size_t>(bytes[168]) + 256 * std::to_integer<std::size_t>(bytes[169]), sample().configuration.size());
  EXPECT_EQ(bytes.size(), handoff::kDescriptorFixedBytes + sample().configuration.size() + handoff::kChecksumBytes);
}

TEST(Descriptor, ComesBackAsItWas) {
  for (const char* text : {"t0s0q0", "t1s1q1", "t0s1q1"}) {
    for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
      const Descriptor descriptor = descriptor_of(small_model(), settings(text, policy), 777);
      EXPECT_EQ(handoff::parse_descriptor(serialize(descriptor)), descriptor) << text;
      EXPECT_EQ(first_difference(descriptor, descriptor), "");
    }
  }
}

TEST(Descriptor, RefusesWhatItDoesNotKnow) {
  const auto good = serialize(sample());
  const auto with = [&](std::size_t offset, std::initializer_list<int> values) {
    auto bytes = good;
    std::size_t at = offset;
    for (const int value : values) bytes[at++] = static_cast<std::byte>(value);
    return refusal(resealed(bytes));
  };
  EXPECT_EQ(refusal(good), "accepted");
  EXPECT_NE(with(0, {'X'}).find("magic"), std::string::npos);
  EXPECT_EQ(with(8, {1}), "descriptor: version 1 is not the version 3 that can be read");
  EXPECT_NE(with(12, {1}).find("length"), std::string::npos);
  EXPECT_NE(with(80, {0, 0}).find("layers 0 is not between 1 and 1024"), std::string::npos);
  EXPECT_NE(with(84, {5}).find("loops 5"), std::string::npos);
  EXPECT_NE(with(92, {5}).find("head_dim 5 is odd"), std::string::npos);
  EXPECT_NE(with(108, {0x2d, 1}).find("encoded_frontier 301"), std::string::npos);
  EXPECT_NE(with(112, {0x81}).find("window 129 is not a multiple of 64"), std::string::npos);
  EXPECT_NE(with(124, {0, 1}).find("retention of loop 2"), std::string::npos);
  EXPECT_NE(with(132, {0x10, 0x27}).find("retention of loop 4 10000 is not between 1 and 2500"), std::string::npos);
  EXPECT_NE(with(136, {3}).find("element type code 3 is not known to version 3"), std::string::npos);
  EXPECT_NE(with(138, {8}).find("code bits 8 are not 4"), std::string::npos);
  EXPECT_NE(with(139, {2}).find("depth representation"), std::string::npos);
  EXPECT_NE(with(140, {2}).find("K group axis"), std::string::npos);
  EXPECT_NE(with(142, {32}).find("group size"), std::string::npos);
  EXPECT_NE(with(146, {3}).find("policy"), std::string::npos);
  EXPECT_NE(with(149, {3}).find("profile code 3 is not known to version 3"), std::string::npos);
  EXPECT_EQ(with(149, {2}), "descriptor: element type is bfloat16, which is not that of profile double");
  EXPECT_EQ(with(136, {2}), "descriptor: element type is float64, which is not that of profile declared");
  EXPECT_NE(with(150, {1}).find("padding"), std::string::npos);
  EXPECT_EQ(with(156, {0, 0, 0, 0}), "descriptor: rms_norm_eps 0 is not above 0 and below 1");
  EXPECT_NE(with(156, {0, 0, 0xc0, 0x7f}).find("rms_norm_eps nan"), std::string::npos);
  EXPECT_EQ(with(160, {0, 0, 0, 0, 0, 0, 0xf0, 0x3f}), "descriptor: rope_theta 1 is not above 1, up to 1e12");
  EXPECT_NE(with(160, {0, 0, 0, 0, 0, 0, 0xf0, 0x7f}).find("rope_theta inf"), std::string::npos);
  EXPECT_NE(with(168, {1}).find("configuration"), std::string::npos);
  auto damaged = good;
  damaged[100] ^= std::byte{1};
  EXPECT_NE(refusal(damaged).find("checksum"), std::string::npos);
  for (std::size_t count = 0; count < good.size(); ++count) EXPECT_NE(refusal(std::span(good).first(count)), "accepted") << count;
}

TEST(Descriptor, RefusesAConfigurationThatIsNoneOrSaysOtherThanTheFields) {
  const auto with_text = [](const std::string& text) {
    Descriptor changed = sample();
    changed.configuration = text;
    return refusal(serialize(changed));
  };
  const std::string good = sample().configuration;
  EXPECT_EQ(with_text(good), "accepted");
  for (const char* text : {"", "nonsense", "5", "[]", "{\"window\":", "\xff\xfe"}) EXPECT_EQ(with_text(text), "descriptor: configuration is no JSON object") << text;
  EXPECT_NE(with_text(" " + good).find("canonical spelling"), std::string::npos);
  EXPECT_EQ(with_text("{}"), "descriptor: configuration says nothing at /loops, the field says 4");
  const auto with_field = [](auto change) {
    Descriptor changed = sample();
    change(changed);
    return refusal(serialize(changed));
  };
  EXPECT_EQ(with_field([](Descriptor& d) { d.policy = EncodingPolicy::rolling; }),
            "descriptor: configuration says \"streaming\" at /kv_residual_quantization/policy, the field says \"rolling\"");
  EXPECT_NE(with_field([](Descriptor& d) { d.timing = EncodingTiming::execution_dependent; }).find("/kv_residual_quantization/timing"), std::string::npos);
  EXPECT_NE(with_field([](Descriptor& d) { d.flush = FlushRule::eager; }).find("/kv_residual_quantization/flush"), std::string::npos);
  EXPECT_NE(with_field([](Descriptor& d) { d.quantized = false; }).find("/kv_residual_quantization/enabled"), std::string::npos);
  EXPECT_NE(with_field([](Descriptor& d) { d.tail = 71; }).find("/kv_residual_quantization/tail"), std::string::npos);
  EXPECT_NE(with_field([](Descriptor& d) { d.window = 256; }).find("/window"), std::string::npos);
  EXPECT_NE(with_field([](Descriptor& d) { d.retention_bp[3] = 999; }).find("/token_sparse_prefill/retention_bp"), std::string::npos);
  EXPECT_NE(with_field([](Descriptor& d) { d.retention_bp = {10000, 10000, 10000, 10000}; }).find("/token_sparse_prefill/retention_bp"), std::string::npos);
}

TEST(Descriptor, NamesTheFieldThatDiffers) {
  const Descriptor here = sample();
  const auto differing = [&](auto change) {
    Descriptor other = here;
    change(other);
    return first_difference(other, here);
  };
  EXPECT_EQ(differing([](Descriptor& d) { d.model_sha256 = std::string(64, 'b'); }),
            "model fingerprint is " + std::string(64, 'b') + ", here it is " + std::string(64, 'a'));
  EXPECT_EQ(differing([](Descriptor& d) { d.rms_norm_eps = 1e-5f; }), "rms_norm_eps is 1e-05, here it is 1e-06");
  EXPECT_EQ(differing([](Descriptor& d) { d.rope_theta = 1e6; }), "rope_theta is 1e+06, here it is 10000");
  EXPECT_EQ(differing([](Descriptor& d) { d.layers = 3; }), "layers is 3, here it is 2");
  EXPECT_EQ(differing([](Descriptor& d) { d.tail = 64; }), "tail is 64, here it is 70");
  EXPECT_EQ(differing([](Descriptor& d) { d.policy = EncodingPolicy::rolling; }), "policy is rolling, here it is streaming");
  EXPECT_EQ(differing([](Descriptor& d) { d.prompt_length = 299; }), "prompt_length is 299, here it is 300");
  EXPECT_EQ(differing([](Descriptor& d) { d.request = 1; }), "request is 1, here it is 5");
  EXPECT_EQ(differing([](Descriptor& d) { d.profile = Profile::reordered; }), "profile is reordered, here it is declared");
  EXPECT_EQ(differing([](Descriptor& d) { d.element = handoff::ElementType::float64; }), "element type is float64, here it is bfloat16");
  EXPECT_NE(differing([](Descriptor& d) { d.prompt_sha256 = std::string(64, '0'); }).find("prompt fingerprint"), std::string::npos);
  // Settings that no field of its own carries are named by their path.
  EXPECT_EQ(differing([](Descriptor& d) {
              AlgorithmConfig config = settings("t1s0q1", EncodingPolicy::streaming, 128);
              config.kv_residual_quantization.tail = 70;
              config.sparse_decode_attention.key_fraction_bp = 500;
              d.configuration = EffectiveConfig::resolve(config, small_model()).canonical_json();
            }),
            "configuration.sparse_decode_attention.key_fraction_bp is 500, here it is 1000");
  EXPECT_EQ(differing([](Descriptor& d) { d.configuration = "{}"; }).find("configuration.exit is absent"), 0u);
  EXPECT_EQ(differing([](Descriptor& d) { d.configuration = "nonsense"; }), "configuration is no JSON object");
}

// Whatever the bytes are: an error that says what, or a descriptor whose regions can be listed or are refused. Half of the changes are
// sealed again, so that they get past the checksum.
TEST(Descriptor, ArbitraryBytesAreRefusedCleanly) {
  std::mt19937 generator(7);
  const auto good = serialize(sample());
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    auto bytes = good;
    for (unsigned changes = 1 + generator() % 3; changes > 0; --changes) mutate(bytes, generator);
    if (i % 2 == 0 && bytes.size() >= handoff::kChecksumBytes) bytes = resealed(bytes);
    try {
      const Descriptor descriptor = handoff::parse_descriptor(bytes);
      if (descriptor.prompt_length <= 1 << 16) static_cast<void>(handoff::regions_of(descriptor));
      static_cast<void>(first_difference(descriptor, sample()));
      ++accepted;
    } catch (const HandoffError&) {
    }
  }
  EXPECT_GT(accepted, 100) << "the changes never get past the checks";
}

}  // namespace
}  // namespace loopgauge::test
