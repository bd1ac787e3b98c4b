// SPDX-License-Identifier: Apache-2.0
// The writer and the synthetic generator, read back by the strict loader.
#include "harness/io/checkpoint_writer.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <csignal>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "models/philox.hpp"
#include "harness/io/synthetic_checkpoint.hpp"
#include "models/checkpoint.hpp"
#include "tests/models/checkpoint_folder.hpp"

namespace loopgauge::harness {
namespace {

using test::read_file;
using test::SmallModel;
using test::TemporaryFolder;
using test::write_file;
namespace fs = std::filesystem;

using Weights = std::map<std::string, std::vector<Bfloat16Bits>>;

Weights weights_of(const Checkpoint& checkpoint) {
  Weights weights;
  for_each_tensor(checkpoint, [&](const TensorSpec& spec, const Tensor<Bfloat16Bits>& tensor) { weights[spec.name] = tensor.data; });
  return weights;
}

float widened(Bfloat16Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

ModelConfig small_config() {
  ModelConfig config = preset_config("tiny");
  config.layers = 2, config.hidden = 24, config.heads = 3, config.head_dim = 10, config.intermediate = 40, config.vocab = 300;
  return config;
}

class CheckpointWriterTest : public ::testing::Test {
 protected:
  fs::path target(const char* name = "model") const { return folder.path() / name; }
  void write(const fs::path& path, const CheckpointWriteOptions& options = {}, const SynthOptions& synth = {}) {
    write_checkpoint(path, small_config(), synthetic_values(small_config(), synth), options);
  }
  // Nothing but `names` in the folder: no temporary left behind.
  void expect_only(const std::vector<std::string>& names) {
    std::vector<std::string> found;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder.path())) found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    EXPECT_EQ(found, names);
  }
  template <class Action>
  void refuse(const Action& action, const std::string& fragment) {
    try {
      action();
      FAIL() << "accepted, expected \"" << fragment << "\"";
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what();
    }
  }
  TemporaryFolder folder;
};

TEST_F(CheckpointWriterTest, WhatIsWrittenIsLoaded) {
  write(target());
  const Checkpoint loaded = load_checkpoint(target());
  EXPECT_TRUE(loaded.notes.empty());
  const ModelConfig expected = small_config();
  EXPECT_EQ(loaded.config.layers, expected.layers);
  EXPECT_EQ(loaded.config.loops, expected.loops);
  EXPECT_EQ(loaded.config.hidden, expected.hidden);
  EXPECT_EQ(loaded.config.heads, expected.heads);
  EXPECT_EQ(loaded.config.head_dim, expected.head_dim);
  EXPECT_EQ(loaded.config.intermediate, expected.intermediate);
  EXPECT_EQ(loaded.config.vocab, expected.vocab);
  EXPECT_EQ(loaded.config.max_positions, expected.max_positions);
  EXPECT_EQ(loaded.config.rms_norm_eps, expected.rms_norm_eps);
  EXPECT_EQ(loaded.config.rope_theta, expected.rope_theta);
  EXPECT_EQ(loaded.config.bos_token_id, 256);
  EXPECT_EQ(loaded.config.eos_token_id, 257);
  expect_only({"model"});
}

// A loaded checkpoint written again, and that one written again, are the same bytes; weights of the shipped model survive.
TEST_F(CheckpointWriterTest, RoundTripOfTheShippedModel) {
  const Checkpoint shipped = load_checkpoint(fs::path(LOOPGAUGE_SOURCE_DIR) / "models" / "ouro-tiny");
  write_checkpoint(target("once"), shipped.config, values_of(shipped), {});
  const Checkpoint once = load_checkpoint(target("once"));
  EXPECT_EQ(weights_of(once), weights_of(shipped));
  write_checkpoint(target("twice"), once.config, values_of(once), {});
  EXPECT_EQ(read_file(target("twice") / "model.safetensors"), read_file(target("once") / "model.safetensors"));
  EXPECT_EQ(read_file(target("twice") / "config.json"), read_file(target("once") / "config.json"));
}

TEST_F(CheckpointWriterTest, ShardsHoldTheSameModel) {
  write(target("single"));
  const Weights single = weights_of(load_checkpoint(target("single")));
  for (const std::uint64_t bytes : {1u, 1000u, 5000u, 30000u}) {
    const fs::path path = target(("sharded-" + std::to_string(bytes)).c_str());
    CheckpointWriteOptions options;
    options.shard_bytes = bytes;
    write(path, options);
    ASSERT_TRUE(fs::exists(path / "model.safetensors.index.json"));
    EXPECT_EQ(weights_of(load_checkpoint(path)), single) << bytes;
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
      // Header and one tensor aside, no file exceeds the limit.
      if (entry.path().extension() != ".safetensors" || bytes < 30000) continue;
      EXPECT_LT(entry.file_size(), bytes + 4000) << entry.path();
    }
  }
  CheckpointWriteOptions large;
  large.shard_bytes = 1 << 30;
  write(target("large"), large);
  EXPECT_TRUE(fs::exists(target("large") / "model.safetensors"));
  EXPECT_EQ(read_file(target("large") / "model.safetensors"), read_file(target("single") / "model.safetensors"));
}

TEST_F(CheckpointWriterTest, NeverOverwritesUnasked) {
  write(target());
  const std::string before = read_file(target() / "model.safetensors");
  refuse([&] { write(target(), {}, {2, 0}); }, "pass --force");
  refuse([&] { write(folder.path() / "model" / "", {}, {2, 0}); }, "pass --force");
  EXPECT_EQ(read_file(target() / "model.safetensors"), before);
  expect_only({"model"});
}

TEST_F(CheckpointWriterTest, ReplacesACheckpointButNothingElse) {
  CheckpointWriteOptions force;
  force.if_exists = IfExists::replace;
  force.shard_bytes = 5000;
  write(target());
  write(target(), force, {2, 0});
  EXPECT_FALSE(fs::exists(target() / "model.safetensors"));
  EXPECT_EQ(load_checkpoint(target()).layers.size(), 2u);

  write_file(target() / "thesis.txt", "not a checkpoint");
  refuse([&] { write(target(), force, {3, 0}); }, "\"thesis.txt\"");
  EXPECT_TRUE(fs::exists(target() / "thesis.txt"));
  write_file(target("file"), "a file");
  refuse([&] { write(target("file"), force); }, "is not a folder");
  expect_only({"file", "model"});
}

TEST_F(CheckpointWriterTest, FillsAnEmptyFolder) {
  fs::create_directory(target());
  write(target());
  EXPECT_EQ(load_checkpoint(target()).layers.size(), 2u);
}

TEST_F(CheckpointWriterTest, FailureLeavesNothing) {
  const TensorValues failing = [](const TensorSpec& tensor, std::int64_t, std::span<Bfloat16Bits>) {
    if (tensor.name == "model.norm.weight") throw FileError("stop");
  };
  refuse([&] { write_checkpoint(target(), small_config(), failing, {}); }, "stop");
  refuse([&] { write(target("absent") / "model"); }, "no such directory");
  expect_only({});
}

TEST_F(CheckpointWriterTest, WhatAKilledProcessLeftGoesWithTheNextWriting) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) write_checkpoint(target(), small_config(), [](const TensorSpec&, std::int64_t, std::span<Bfloat16Bits>) { ::raise(SIGKILL); }, {});
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
  // While one is being written another is, to the same folder and to one beside it.
  bool nested = false;
  CheckpointWriteOptions replace;
  replace.if_exists = IfExists::replace;
  const TensorValues values = synthetic_values(small_config(), {});
  write_checkpoint(
      target(), small_config(),
      [&](const TensorSpec& tensor, std::int64_t first, std::span<Bfloat16Bits> out) {
        if (!std::exchange(nested, true)) {
          write(target("beside"));
          write(target());
          write(target(), replace);
        }
        values(tensor, first, out);
      },
      replace);
  expect_only({"beside", "model"});
  EXPECT_EQ(weights_of(load_checkpoint(target())), weights_of(load_checkpoint(target("beside"))));
}

TEST_F(CheckpointWriterTest, RefusesMoreThanTheDiskHolds) {
  ModelConfig config = small_config();
  config.vocab = kMaximumVocab, config.hidden = kMaximumHidden;
  refuse([&] { write_checkpoint(target(), config, synthetic_values(config, {}), {}); }, "bytes free, the weights need");
  expect_only({});
}

// Known answers of the generator's authors (Random123, kat_vectors).
TEST(Philox, KnownAnswers) {
  using Four = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32_10({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

class SyntheticTest : public CheckpointWriterTest {
 protected:
  Checkpoint make(const SynthOptions& synth, const char* name = "model") {
    write(target(name), {}, synth);
    return load_checkpoint(target(name));
  }
};

// "synth-v1" is a promise: the same bytes on every machine and in every version.
TEST_F(SyntheticTest, BytesArePinned) {
  EXPECT_EQ(make({1, 0}, "plain").sha256, "01cfe23b488d9e3c399a6af22dfefdd55305e87f180fa61e2dfcfd0e62013934");
  EXPECT_EQ(make({0x123456789abcdef0, 3}, "outliers").sha256, "a0df43ac2e9bcc4659b95890075d848c25dd1ead2fd3470cee5cb880d8a00a0e");
}

TEST_F(SyntheticTest, PiecesDoNotMatter) {
  const TensorValues values = synthetic_values(small_config(), {5, 2});
  for (const TensorSpec& tensor : checkpoint_tensors(small_config())) {
    const auto count = static_cast<std::size_t>(element_count(tensor.shape));
    std::vector<Bfloat16Bits> whole(count), pieces(count);
    values(tensor, 0, whole);
    for (std::size_t first = 0; first < count; first += 7) {
      values(tensor, static_cast<std::int64_t>(first), std::span(pieces).subspan(first, std::min<std::size_t>(7, count - first)));
    }
    ASSERT_EQ(whole, pieces) << tensor.name;
  }
}

TEST_F(SyntheticTest, SeedsAndTensorsDiffer) {
  const Weights one = weights_of(make({1, 0}, "one")), two = weights_of(make({2, 0}, "two"));
  for (const auto& [name, values] : one) {
    if (name == "model.early_exit_gate.bias") continue;
    EXPECT_NE(values, two.at(name)) << name;
  }
  EXPECT_NE(one.at("model.layers.0.mlp.gate_proj.weight"), one.at("model.layers.0.mlp.up_proj.weight"));
  EXPECT_NE(one.at("model.layers.0.mlp.gate_proj.weight"), one.at("model.layers.1.mlp.gate_proj.weight"));
}

// Mean and deviation of the table in synthetic_checkpoint.hpp, within five standard errors.
TEST_F(SyntheticTest, MomentsAreTheDeclaredOnes) {
  const Weights weights = weights_of(make({1, 0}));
  const double hidden = std::sqrt(24.0), s = 1 / std::sqrt(4.0);
  struct Expected {
    const char* name;
    double mean, deviation;
  };
  for (const Expected& expected :
       {Expected{"model.embed_tokens.weight", 0, 1}, Expected{"lm_head.weight", 0, 3 / hidden},
        Expected{"model.layers.1.self_attn.q_proj.weight", 0, 1.5 / hidden},
        Expected{"model.layers.1.self_attn.v_proj.weight", 0, 1 / hidden},
        Expected{"model.layers.0.mlp.down_proj.weight", 0, 1 / std::sqrt(40.0)}, Expected{"model.layers.0.input_layernorm.weight", 1, 0.1},
        Expected{"model.layers.0.input_layernorm_2.weight", s, 0.1 * s}, Expected{"model.early_exit_gate.weight", 0, 0.25 / hidden}}) {
    const std::vector<Bfloat16Bits>& values = weights.at(expected.name);
    const auto n = static_cast<double>(values.size());
    double sum = 0, squares = 0;
    for (const Bfloat16Bits bits : values) sum += widened(bits);
    for (const Bfloat16Bits bits : values) squares += (widened(bits) - sum / n) * (widened(bits) - sum / n);
    EXPECT_NEAR(sum / n, expected.mean, 5 * expected.deviation / std::sqrt(n)) << expected.name;
    EXPECT_NEAR(std::sqrt(squares / (n - 1)), expected.deviation, 5 * expected.deviation / std::sqrt(2 * n)) << expected.name;
  }
  EXPECT_EQ(widened(weights.at("model.early_exit_gate.bias")[0]), -1.0f);
}

TEST_F(SyntheticTest, ZeroKeyHeadsHaveNoKeysAndChangeNothingElse) {
  const ModelConfig config = small_config();
  const Weights plain = weights_of(make({9, 0}, "plain")), zeroed = weights_of(make({9, 0, 1}, "zeroed"));
  const auto zero = static_cast<std::size_t>(config.head_dim * config.hidden);
  for (const auto& [name, values] : zeroed) {
    const std::size_t first = name.ends_with("k_proj.weight") ? zero : 0;
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], i < first ? 0 : plain.at(name)[i]) << name << " " << i;
  }
  EXPECT_THROW(static_cast<void>(synthetic_values(config, {1, 0, config.heads + 1})), ConfigError);
  EXPECT_THROW(static_cast<void>(synthetic_values(config, {1, 0, -1})), ConfigError);
}

TEST_F(SyntheticTest, OutlierChannelsAreEightTimesTheOthers) {
  constexpr int kOutliers = 3;
  const Weights plain = weights_of(make({9, 0}, "plain")), outliers = weights_of(make({9, kOutliers}, "outliers"));
  for (const auto& [name, values] : outliers) {
    const bool scaled = name.ends_with("layernorm_2.weight") || name.ends_with("k_proj.weight") || name.ends_with("v_proj.weight");
    const std::size_t row = name.ends_with("proj.weight") ? 24 : 1;
    std::size_t rows_scaled = 0;
    for (std::size_t begin = 0; begin < values.size(); begin += row) {
      const bool is_outlier = widened(values[begin]) == 8 * widened(plain.at(name)[begin]) && values[begin] != 0;
      rows_scaled += is_outlier ? 1 : 0;
      for (std::size_t i = begin; i < std::min(begin + row, values.size()); ++i) {
        ASSERT_EQ(widened(values[i]), (is_outlier ? 8 : 1) * widened(plain.at(name)[i])) << name << " " << i;
      }
    }
    EXPECT_EQ(rows_scaled, scaled ? kOutliers : 0) << name;
  }
}

TEST_F(SyntheticTest, RefusesMoreOutliersThanChannels) {
  EXPECT_THROW(synthetic_values(small_config(), {1, 25}), ConfigError);
  EXPECT_THROW(synthetic_values(small_config(), {1, -1}), ConfigError);
  EXPECT_THROW(preset_config("ouro-7b"), ConfigError);
}

// Presets are the released shapes.
TEST_F(SyntheticTest, Presets) {
  EXPECT_EQ(parameter_count(preset_config("tiny")), 7287553);
  EXPECT_EQ(parameter_count(preset_config("ouro-1.4b")), 1434652673);
  EXPECT_EQ(parameter_count(preset_config("ouro-2.6b")), 2667974657);
}

}  // namespace
}  // namespace loopgauge::harness
