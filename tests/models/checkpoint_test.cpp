// SPDX-License-Identifier: Apache-2.0
#include "models/checkpoint.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "models/checkpoint_layout.hpp"
#include "models/safetensors.hpp"
#include "models/sha256.hpp"
#include "tests/models/checkpoint_folder.hpp"

namespace loopgauge {
namespace {

using nlohmann::ordered_json;
using test::data_of;
using test::expect_refused;
using test::header_of;
using test::safetensors_bytes;
using test::SmallModel;
using test::StoredTensor;
using test::StoredTensors;
using test::TemporaryFolder;
using test::write_file;
namespace fs = std::filesystem;

constexpr const char* kQuery = "model.layers.1.self_attn.q_proj.weight";

class CheckpointTest : public ::testing::Test {
 protected:
  Checkpoint load() {
    model.write(folder.path());
    return load_checkpoint(folder.path());
  }
  // The message must also name the model file.
  void refuse(std::vector<std::string> fragments) {
    model.write(folder.path());
    fragments.push_back(file().string());
    expect_refused([&] { load_checkpoint(folder.path()); }, fragments);
  }
  void refuse_bytes(const std::string& bytes, std::vector<std::string> fragments) {
    write_file(folder.path() / "config.json", model.config.dump());
    write_file(file(), bytes);
    fragments.push_back(file().string());
    expect_refused([&] { load_checkpoint(folder.path()); }, fragments);
  }
  // A valid header changed by `change`, with the valid data.
  void refuse_header(const std::function<void(ordered_json&)>& change, const std::vector<std::string>& fragments) {
    ordered_json header = header_of(model.tensors);
    change(header);
    refuse_bytes(safetensors_bytes(header.dump(), data_of(model.tensors)), fragments);
  }

  // The tensors cut into two shards with their index.
  void write_shards() {
    fs::remove(file());
    write_file(folder.path() / "config.json", model.config.dump());
    shards.clear();
    weight_map = ordered_json::object();
    std::size_t i = 0;
    for (const auto& [name, tensor] : model.tensors) {
      const std::string shard = ++i % 3 == 0 ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
      shards[shard][name] = tensor;
      weight_map[name] = shard;
    }
    for (const auto& [name, tensors] : shards) write_file(folder.path() / name, safetensors_bytes(tensors));
    write_index();
  }
  void write_index() {
    write_file(folder.path() / "model.safetensors.index.json",
               ordered_json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
  }

  fs::path file() const { return folder.path() / "model.safetensors"; }

  TemporaryFolder folder;
  SmallModel model;
  std::map<std::string, StoredTensors> shards;
  ordered_json weight_map;
};

// Every tensor of the checkpoint equals the stored bytes.
void expect_holds(const Checkpoint& checkpoint, const StoredTensors& tensors) {
  std::size_t seen = 0;
  for_each_tensor(checkpoint, [&](const TensorSpec& spec, const Tensor<Bfloat16Bits>& tensor) {
    ASSERT_TRUE(tensors.contains(spec.name)) << spec.name;
    const StoredTensor& stored = tensors.at(spec.name);
    EXPECT_EQ(tensor.shape, stored.shape) << spec.name;
    ASSERT_EQ(tensor.data.size() * 2, stored.bytes.size()) << spec.name;
    EXPECT_EQ(std::memcmp(tensor.data.data(), stored.bytes.data(), stored.bytes.size()), 0) << spec.name;
    ++seen;
  });
  EXPECT_EQ(seen, tensors.size());
}

TEST_F(CheckpointTest, HoldsTheStoredBits) {
  const Checkpoint checkpoint = load();
  expect_holds(checkpoint, model.tensors);
  EXPECT_TRUE(checkpoint.notes.empty());
}

// The names are wired to the right members: a reader that swaps two of them would still satisfy the visitor.
TEST_F(CheckpointTest, MembersHoldTheTensorsOfTheirNames) {
  const Checkpoint checkpoint = load();
  const auto first = [&](const std::string& name) {
    Bfloat16Bits bits;
    std::memcpy(&bits, model.tensors.at(name).bytes.data(), 2);
    return bits;
  };
  const LayerWeights& layer = checkpoint.layers.at(1);
  const std::string prefix = "model.layers.1.";
  EXPECT_EQ(layer.q_proj.data[0], first(prefix + "self_attn.q_proj.weight"));
  EXPECT_EQ(layer.k_proj.data[0], first(prefix + "self_attn.k_proj.weight"));
  EXPECT_EQ(layer.v_proj.data[0], first(prefix + "self_attn.v_proj.weight"));
  EXPECT_EQ(layer.o_proj.data[0], first(prefix + "self_attn.o_proj.weight"));
  EXPECT_EQ(layer.gate_proj.data[0], first(prefix + "mlp.gate_proj.weight"));
  EXPECT_EQ(layer.up_proj.data[0], first(prefix + "mlp.up_proj.weight"));
  EXPECT_EQ(layer.down_proj.data[0], first(prefix + "mlp.down_proj.weight"));
  EXPECT_EQ(layer.input_layernorm.data[0], first(prefix + "input_layernorm.weight"));
  EXPECT_EQ(layer.input_layernorm_2.data[0], first(prefix + "input_layernorm_2.weight"));
  EXPECT_EQ(layer.post_attention_layernorm.data[0], first(prefix + "post_attention_layernorm.weight"));
  EXPECT_EQ(layer.post_attention_layernorm_2.data[0], first(prefix + "post_attention_layernorm_2.weight"));
  EXPECT_EQ(checkpoint.embed_tokens.data[0], first("model.embed_tokens.weight"));
  EXPECT_EQ(checkpoint.norm.data[0], first("model.norm.weight"));
  EXPECT_EQ(checkpoint.early_exit_gate.data[0], first("model.early_exit_gate.weight"));
  EXPECT_EQ(checkpoint.early_exit_bias.data[0], first("model.early_exit_gate.bias"));
  EXPECT_EQ(checkpoint.lm_head.data[0], first("lm_head.weight"));
}

TEST_F(CheckpointTest, ShippedModel) {
  const Checkpoint checkpoint = load_checkpoint(fs::path(LOOPGAUGE_SOURCE_DIR) / "models" / "ouro-tiny");
  EXPECT_EQ(checkpoint.sha256, "4598aa90855a14cf492ab3dfa7c86cd45a49b4b37d2eac42ce741adfbbf876c8");
  EXPECT_EQ(checkpoint.layers.size(), 4u);
  EXPECT_EQ(parameter_count(checkpoint.config), 7287553);
  EXPECT_TRUE(checkpoint.notes.empty());
}

// Counts of the released models, as published for them.
TEST_F(CheckpointTest, LayoutOfReleasedModels) {
  ModelConfig config;
  config.layers = 24, config.loops = 4, config.hidden = 2048, config.heads = 16, config.head_dim = 128, config.intermediate = 5632;
  config.vocab = 49152;
  EXPECT_EQ(checkpoint_tensors(config).size(), 269u);
  EXPECT_EQ(parameter_count(config), 1434652673);
  EXPECT_EQ(kv_bytes_per_token(config), 786432);
  config.layers = 48;
  EXPECT_EQ(checkpoint_tensors(config).size(), 533u);
  EXPECT_EQ(parameter_count(config), 2667974657);
  EXPECT_EQ(kv_bytes_per_token(config), 1572864);
}

// ---- names and shapes

TEST_F(CheckpointTest, RefusesEachMissingTensor) {
  const StoredTensors all = model.tensors;
  for (const auto& [name, tensor] : all) {
    model.tensors.erase(name);
    refuse({"tensor \"" + name + "\" is missing"});
    model.tensors = all;
  }
}

TEST_F(CheckpointTest, RefusesUnknownTensors) {
  for (const char* name : {"model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "lookahead_exit_gate.weight",
                           "model.layers.00.input_layernorm.weight", "lm_head.weight\n"}) {
    model = SmallModel();
    model.tensors[name] = {"BF16", {1}, std::string(2, '\0')};
    refuse({ordered_json(name).dump(), "unknown to the Ouro layout"});
  }
}

TEST_F(CheckpointTest, RefusesEachMisshapedTensor) {
  const StoredTensors all = model.tensors;
  for (const auto& [name, tensor] : all) {
    model.tensors[name].shape.push_back(1);  // the same number of elements
    refuse({"\"" + name + "\" has shape", "config.json needs " + ordered_json(tensor.shape).dump()});
    model.tensors = all;
  }
}

TEST_F(CheckpointTest, RefusesTransposedWeights) {
  std::swap(model.tensors["model.layers.0.mlp.down_proj.weight"].shape[0], model.tensors["model.layers.0.mlp.down_proj.weight"].shape[1]);
  refuse({"\"model.layers.0.mlp.down_proj.weight\" has shape [5,6], config.json needs [6,5]"});
}

TEST_F(CheckpointTest, RefusesFewerLayersThanStored) {
  model.config["num_hidden_layers"] = 1;
  refuse({"model.layers.1.", "unknown to the Ouro layout", "more faults"});
}

TEST_F(CheckpointTest, IgnoresRotaryBuffersWithANote) {
  model.tensors["model.rotary_emb.inv_freq"] = {"F32", {2}, std::string(8, '\x7f')};
  const Checkpoint checkpoint = load();
  ASSERT_EQ(checkpoint.notes.size(), 1u);
  EXPECT_NE(checkpoint.notes[0].find("model.rotary_emb.inv_freq"), std::string::npos);
  model.tensors.erase("model.rotary_emb.inv_freq");
  expect_holds(checkpoint, model.tensors);
}

// ---- the container

TEST_F(CheckpointTest, RefusesEveryTruncation) {
  const std::string whole = safetensors_bytes(model.tensors);
  for (std::size_t length = 0; length < whole.size(); length += length < 300 || length + 40 > whole.size() ? 1 : 37) {
    refuse_bytes(whole.substr(0, length), {});
  }
  refuse_bytes(whole.substr(0, 5), {"has 5 bytes"});
  refuse_bytes(whole.substr(0, 100), {"only 92 follow"});
  refuse_bytes(whole.substr(0, whole.size() - 1), {"truncated"});
}

TEST_F(CheckpointTest, RefusesTrailingBytes) {
  refuse_bytes(safetensors_bytes(model.tensors) + "x", {"last 1 bytes of the file belong to no tensor"});
}

TEST_F(CheckpointTest, RefusesAbsurdHeaderLengths) {
  const std::string whole = safetensors_bytes(model.tensors);
  refuse_bytes(std::string(8, '\xff') + whole.substr(8), {"18446744073709551615 bytes"});
  write_file(file(), std::string("\0\0\0\2\0\0\0\0", 8));
  fs::resize_file(file(), (64u << 20));  // sparse
  write_file(folder.path() / "config.json", model.config.dump());
  expect_refused([&] { load_checkpoint(folder.path()); }, {file().string(), "at most 16777216"});
}

TEST_F(CheckpointTest, RefusesOverlap) {
  refuse_header(
      [](ordered_json& header) {
        const std::size_t begin = header[kQuery]["data_offsets"][0];
        header[kQuery]["data_offsets"] = {begin - 96, begin};  // where o_proj lies
      },
      {"overlaps", "o_proj", "q_proj"});
}

TEST_F(CheckpointTest, RefusesHoles) {
  ordered_json header = header_of(model.tensors);
  header.erase("model.norm.weight");
  refuse_bytes(safetensors_bytes(header.dump(), data_of(model.tensors)), {"12 bytes of the file belong to no tensor"});

  header = header_of(model.tensors);
  header.erase("model.early_exit_gate.bias");
  refuse_bytes(safetensors_bytes(header.dump(), data_of(model.tensors)), {"2 bytes before tensor", "model.early_exit_gate.weight"});
}

TEST_F(CheckpointTest, RefusesBadEntries) {
  struct Case {
    ordered_json entry;
    const char* fragment;
  };
  const std::vector<Case> cases{
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {96, 0}}}, "end before they begin"},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {1 << 20, (1 << 20) + 96}}}, "truncated"},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {0, 18446744073709551615u}}}, "truncated"},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {0, 95}}}, "needs 96 bytes, data_offsets give it 95"},
      {{{"dtype", "F32"}, {"shape", {8, 6}}, {"data_offsets", {0, 96}}}, "needs 192 bytes"},
      {{{"dtype", "BF16"}, {"shape", {std::int64_t{1} << 62, 4}}, {"data_offsets", {0, 0}}}, "overflows"},
      {{{"dtype", "BF16"}, {"shape", {std::int64_t{1} << 33, std::int64_t{1} << 33}}, {"data_offsets", {0, 0}}}, "overflows"},
      {{{"dtype", "BF16"}, {"shape", {18446744073709551615u}}, {"data_offsets", {0, 96}}}, "overflows"},
      {{{"dtype", "BF16"}, {"shape", {-8, -6}}, {"data_offsets", {0, 96}}}, "integer >= 0"},
      {{{"dtype", "BF16"}, {"shape", {8.0, 6}}, {"data_offsets", {0, 96}}}, "integer >= 0"},
      {{{"dtype", "BF16"}, {"shape", "8x6"}, {"data_offsets", {0, 96}}}, "expected an array"},
      {{{"dtype", "BF16"}, {"shape", {1, 1, 1, 1, 1, 1, 1, 8, 6}}, {"data_offsets", {0, 96}}}, "9 dimensions"},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {0, 96, 96}}}, "expected [begin, end]"},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {-1, 95}}}, "integer >= 0"},
      {{{"dtype", "BF17"}, {"shape", {8, 6}}, {"data_offsets", {0, 96}}}, "unknown element type \"BF17\""},
      {{{"dtype", 16}, {"shape", {8, 6}}, {"data_offsets", {0, 96}}}, "unknown element type 16"},
      {{{"shape", {8, 6}}, {"data_offsets", {0, 96}}}, "no field \"dtype\""},
      {{{"dtype", "BF16"}, {"data_offsets", {0, 96}}}, "no field \"shape\""},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}}, "no field \"data_offsets\""},
      {{{"dtype", "BF16"}, {"shape", {8, 6}}, {"data_offsets", {0, 96}}, {"stride", 1}}, "unknown field \"stride\""},
      {"BF16", "expected an object"},
  };
  for (const Case& item : cases) {
    SCOPED_TRACE(item.entry.dump());
    refuse_header([&](ordered_json& header) { header[kQuery] = item.entry; }, {kQuery, item.fragment});
  }
}

TEST_F(CheckpointTest, RefusesOtherElementTypes) {
  for (const char* dtype : {"I16", "U16"}) {
    model = SmallModel();
    model.tensors[kQuery].dtype = dtype;
    refuse({kQuery, std::string("element type ") + dtype, "BF16, F16, F32"});
  }
}

TEST_F(CheckpointTest, RefusesBadHeaders) {
  const std::string data = data_of(model.tensors);
  const std::string header = header_of(model.tensors).dump();
  refuse_bytes(safetensors_bytes("", data), {"does not begin with '{'"});
  refuse_bytes(safetensors_bytes(" " + header, data), {"does not begin with '{'"});
  refuse_bytes(safetensors_bytes("{\"a\"", data), {"not valid JSON"});
  refuse_bytes(safetensors_bytes(header + "}", data), {"not valid JSON"});
  refuse_bytes(safetensors_bytes("{\"a\":" + std::string(50, '[') + std::string(50, ']') + "}", data), {"nested deeper"});
  refuse_header([](ordered_json& changed) { changed["__metadata__"] = {{"format", 1}}; }, {"__metadata__", "expected a string"});
  refuse_header([](ordered_json& changed) { changed["__metadata__"] = "pt"; }, {"__metadata__", "expected an object of strings"});
}

TEST_F(CheckpointTest, RefusesDuplicateKeys) {
  std::string header = header_of(model.tensors).dump();
  header.pop_back();
  header += std::string(",\"") + kQuery + "\":" + header_of(model.tensors)[kQuery].dump() + "}";
  refuse_bytes(safetensors_bytes(header, data_of(model.tensors)), {kQuery, "appears twice"});
}

TEST_F(CheckpointTest, PaddedHeadersAreFine) {
  write_file(folder.path() / "config.json", model.config.dump());
  write_file(file(), safetensors_bytes(header_of(model.tensors).dump() + "      ", data_of(model.tensors)));
  expect_holds(load_checkpoint(folder.path()), model.tensors);
}

// Nothing that a header claims is allocated before the file's size bears it out.
TEST_F(CheckpointTest, AbsurdSizesAreRefusedBeforeAllocation) {
  model.config["vocab_size"] = 1 << 24;
  model.config["hidden_size"] = 1 << 16;
  refuse({"has shape"});
}

// ---- values

std::string float_bytes(const std::vector<float>& values) {
  std::string bytes(values.size() * 4, '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
std::string word_bytes(const std::vector<std::uint16_t>& values) {
  std::string bytes(values.size() * 2, '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
float widened(Bfloat16Bits bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

TEST_F(CheckpointTest, RefusesNonFiniteWeights) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const std::vector<StoredTensor> faults{
      {"BF16", {6}, word_bytes({0x3f80, 0, 0, 0, 0x7f80, 0})}, {"BF16", {6}, word_bytes({0x3f80, 0, 0, 0, 0xffc1, 0})},
      {"F16", {6}, word_bytes({0x3c00, 0, 0, 0, 0xfc00, 0})},  {"F16", {6}, word_bytes({0x3c00, 0, 0, 0, 0x7e00, 0})},
      {"F32", {6}, float_bytes({1, 2, 3, 4, nan, 6})},         {"F32", {6}, float_bytes({1, 2, 3, 4, -inf, 6})}};
  for (const StoredTensor& fault : faults) {
    model.tensors["model.norm.weight"] = fault;
    refuse({"\"model.norm.weight\" element 4 (flat index) is not finite"});
  }
}

TEST_F(CheckpointTest, FaultyElementsOfSeveralTensorsAreAllFound) {
  model.tensors["model.norm.weight"].bytes.replace(2, 2, "\x80\x7f");
  model.tensors["lm_head.weight"].bytes.replace(82, 2, "\x80\x7f");
  model.write(folder.path());
  std::vector<std::string> faults;
  load_checkpoint(folder.path(), faults);
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_NE(faults[0].find("\"lm_head.weight\" element 41 "), std::string::npos) << faults[0];
  EXPECT_NE(faults[1].find("\"model.norm.weight\" element 1 "), std::string::npos) << faults[1];
}

TEST_F(CheckpointTest, Float32RoundsToNearestEven) {
  const std::vector<float> stored{1.0f,
                                  1.0f + 0x1p-8f,             // halfway between 1 and 1 + 2^-7: down to even
                                  1.0f + 3 * 0x1p-8f,         // halfway: up to even
                                  1.0f + 0x1p-8f + 0x1p-23f,  // just above halfway: up
                                  -0.0f,
                                  0x1p-149f};  // a subnormal far below BF16's: zero
  model.tensors["model.norm.weight"] = {"F32", {6}, float_bytes(stored)};
  const Checkpoint checkpoint = load();
  EXPECT_EQ(checkpoint.norm.data, (std::vector<Bfloat16Bits>{0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x8000, 0x0000}));
  ASSERT_EQ(checkpoint.notes.size(), 1u);
  EXPECT_NE(checkpoint.notes[0].find("model.norm.weight: F32 rounded to BF16 (nearest, ties to even); 4 of 6 values changed"),
            std::string::npos)
      << checkpoint.notes[0];
}

TEST_F(CheckpointTest, RefusesFloat32ThatOverflows) {
  const float largest = 0x1.fep+127f;  // the largest BF16; from its upper neighbour's half-way point on, values overflow
  model.tensors["model.norm.weight"] = {"F32", {6}, float_bytes({largest, -largest, std::nextafter(0x1.ffp+127f, 0.0f), 1, 1, 1})};
  EXPECT_EQ(load().norm.data, (std::vector<Bfloat16Bits>{0x7f7f, 0xff7f, 0x7f7f, 0x3f80, 0x3f80, 0x3f80}));
  model.tensors["model.norm.weight"].bytes = float_bytes({1, 1, -0x1.ffp+127f, 1, 1, 1});
  refuse({"\"model.norm.weight\" element 2 (flat index) is too large for BF16"});
}

// All finite F16 values, against arithmetic in double.
TEST_F(CheckpointTest, EveryFloat16IsRoundedToNearestEven) {
  std::vector<std::uint16_t> halves;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00) != 0x7c00) halves.push_back(static_cast<std::uint16_t>(bits));
  }
  const std::int64_t vocab = std::ssize(halves) / 8;
  ASSERT_EQ(vocab * 8, std::ssize(halves));
  model.config["vocab_size"] = vocab;
  model.config["hidden_size"] = 8;
  for (auto& [name, tensor] : model.tensors) {
    for (std::int64_t& extent : tensor.shape) extent = extent == 7 ? vocab : extent == 6 ? 8 : extent;
    std::int64_t count = 1;
    for (const std::int64_t extent : tensor.shape) count *= extent;
    tensor.bytes = std::string(static_cast<std::size_t>(count) * 2, '\x3c');
  }
  model.tensors["model.embed_tokens.weight"] = {"F16", {vocab, 8}, word_bytes(halves)};
  const Checkpoint checkpoint = load();
  std::int64_t changed = 0;
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const int exponent = (halves[i] >> 10) & 31, mantissa = halves[i] & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    int binade = 0;
    std::frexp(magnitude, &binade);
    const double step = std::ldexp(1.0, binade - 8);  // BF16 has 8 significant bits; F16's subnormals are normal in it
    const double expected = std::copysign(magnitude == 0 ? 0.0 : std::nearbyint(magnitude / step) * step, halves[i] >> 15 ? -1.0 : 1.0);
    ASSERT_EQ(static_cast<double>(widened(checkpoint.embed_tokens.data[i])), expected) << halves[i];
    ASSERT_EQ(std::signbit(widened(checkpoint.embed_tokens.data[i])), halves[i] >> 15 != 0) << halves[i];
    changed += expected != std::copysign(magnitude, expected) ? 1 : 0;
  }
  ASSERT_EQ(checkpoint.notes.size(), 1u);
  EXPECT_NE(
      checkpoint.notes[0].find("F16 rounded to BF16 (nearest, ties to even); " + std::to_string(changed) + " of 63488 values changed"),
      std::string::npos)
      << checkpoint.notes[0];
}

// A model re-saved in F32 is the same model.
TEST_F(CheckpointTest, Float32ResaveHoldsTheSameWeights) {
  const StoredTensors original = model.tensors;
  for (auto& [name, tensor] : model.tensors) {
    std::string wide;
    for (std::size_t i = 0; i < tensor.bytes.size(); i += 2) wide += std::string(2, '\0') + tensor.bytes.substr(i, 2);
    tensor.dtype = "F32";
    tensor.bytes = wide;
  }
  const Checkpoint checkpoint = load();
  expect_holds(checkpoint, original);
  ASSERT_EQ(checkpoint.notes.size(), 1u);
  EXPECT_NE(checkpoint.notes[0].find("and 26 more tensors: F32"), std::string::npos) << checkpoint.notes[0];
  EXPECT_NE(checkpoint.notes[0].find(" 0 of "), std::string::npos) << checkpoint.notes[0];
}

// ---- shards

TEST_F(CheckpointTest, ShardsHoldTheSameModel) {
  write_shards();
  const Checkpoint checkpoint = load_checkpoint(folder.path());
  expect_holds(checkpoint, model.tensors);
  EXPECT_TRUE(checkpoint.notes.empty());
}

TEST_F(CheckpointTest, FingerprintCoversTheFilesInNameOrder) {
  write_shards();
  const std::string both = test::read_file(folder.path() / "model-00001-of-00002.safetensors") +
                           test::read_file(folder.path() / "model-00002-of-00002.safetensors");
  Sha256 sha;
  sha.update(both.data(), both.size());
  EXPECT_EQ(load_checkpoint(folder.path()).sha256, sha.hex_digest());
}

TEST_F(CheckpointTest, RefusesIndexFaults) {
  const fs::path index = folder.path() / "model.safetensors.index.json";
  write_shards();
  write_file(index, "{}");
  expect_refused([&] { load_checkpoint(folder.path()); }, {index.string(), "\"weight_map\" is missing"});
  write_file(index, R"({"weight_map": []})");
  expect_refused([&] { load_checkpoint(folder.path()); }, {index.string(), "\"weight_map\" is []"});
  write_file(index, R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})");
  expect_refused([&] { load_checkpoint(folder.path()); }, {index.string(), "\"a\" appears twice"});
  for (const char* shard : {"../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\model.safetensors", "..", "",
                            "model.bin", ".hidden.safetensors", "c:model.safetensors", "model.safetensors/"}) {
    weight_map[kQuery] = shard;
    write_index();
    expect_refused([&] { load_checkpoint(folder.path()); }, {index.string(), kQuery, ordered_json(shard).dump(), "plain name"});
  }
  weight_map[kQuery] = 3;
  write_index();
  expect_refused([&] { load_checkpoint(folder.path()); }, {index.string(), kQuery, "in shard 3"});
}

TEST_F(CheckpointTest, RefusesAnIndexThatDisagreesWithItsShards) {
  write_shards();
  const std::string right = weight_map[kQuery];
  const std::string wrong = right[10] == '1' ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors";
  weight_map[kQuery] = wrong;
  write_index();
  expect_refused([&] { load_checkpoint(folder.path()); }, {(folder.path() / right).string(), kQuery, "is here, but", "says " + wrong});

  weight_map.erase(kQuery);
  write_index();
  expect_refused([&] { load_checkpoint(folder.path()); },
                 {(folder.path() / right).string(), kQuery, "is not in model.safetensors.index.json"});

  weight_map[kQuery] = right;
  weight_map["model.layers.7.mlp.up_proj.weight"] = right;
  write_index();
  expect_refused([&] { load_checkpoint(folder.path()); },
                 {(folder.path() / right).string(), "model.layers.7.mlp.up_proj.weight", "is missing, although"});
}

TEST_F(CheckpointTest, RefusesAMissingShard) {
  write_shards();
  fs::remove(folder.path() / "model-00002-of-00002.safetensors");
  expect_refused([&] { load_checkpoint(folder.path()); }, {(folder.path() / "model-00002-of-00002.safetensors").string(), "no such file"});
}

TEST_F(CheckpointTest, RefusesATensorInTwoShards) {
  write_shards();
  auto& [first_name, first] = *shards.begin();
  auto& [second_name, second] = *shards.rbegin();
  const std::string tensor = second.begin()->first;
  first[tensor] = second.begin()->second;
  write_file(folder.path() / first_name, safetensors_bytes(first));
  weight_map[tensor] = first_name;
  write_index();
  expect_refused([&] { load_checkpoint(folder.path()); }, {(folder.path() / second_name).string(), tensor, "is also in " + first_name});
}

TEST_F(CheckpointTest, RefusesFolderWithTwoCheckpoints) {
  write_shards();
  write_file(file(), safetensors_bytes(model.tensors));
  expect_refused([&] { load_checkpoint(folder.path()); }, {folder.path().string(), "has both model.safetensors and"});
}

TEST_F(CheckpointTest, RefusesFolderWithoutWeights) {
  write_file(folder.path() / "config.json", model.config.dump());
  expect_refused([&] { load_checkpoint(folder.path()); }, {folder.path().string(), "has neither model.safetensors nor"});
}

TEST_F(CheckpointTest, OtherSafetensorsFilesAreNoted) {
  write_shards();
  write_file(folder.path() / "adapter.safetensors", "not read");
  const Checkpoint checkpoint = load_checkpoint(folder.path());
  ASSERT_EQ(checkpoint.notes.size(), 1u);
  EXPECT_NE(checkpoint.notes[0].find("adapter.safetensors"), std::string::npos);
}

TEST_F(CheckpointTest, RefusesLinksOutOfTheFolder) {
  TemporaryFolder outside;
  write_file(outside.path() / "weights.safetensors", safetensors_bytes(model.tensors));
  write_file(folder.path() / "config.json", model.config.dump());
  fs::create_symlink(outside.path() / "weights.safetensors", file());
  expect_refused([&] { load_checkpoint(folder.path()); },
                 {file().string(), (outside.path() / "weights.safetensors").string(), "outside the checkpoint folder"});
}

TEST_F(CheckpointTest, LinksInsideTheFolderAreFine) {
  model.write(folder.path());
  fs::rename(file(), folder.path() / "data");
  fs::create_symlink("data", file());
  expect_holds(load_checkpoint(folder.path()), model.tensors);
}

// Hub caches keep snapshots/<revision>/model.safetensors as a link to blobs/<hash>.
TEST_F(CheckpointTest, HubCacheLinksAreFine) {
  const fs::path snapshot = folder.path() / "snapshots" / "574fa66c";
  fs::create_directories(snapshot);
  fs::create_directories(folder.path() / "blobs");
  write_file(snapshot / "config.json", model.config.dump());
  write_file(folder.path() / "blobs" / "0123", safetensors_bytes(model.tensors));
  fs::create_symlink("../../blobs/0123", snapshot / "model.safetensors");
  expect_holds(load_checkpoint(snapshot), model.tensors);
}

TEST_F(CheckpointTest, RefusesWhatIsNotARegularFile) {
  write_file(folder.path() / "config.json", model.config.dump());
  fs::create_directory(file());
  expect_refused([&] { load_checkpoint(folder.path()); }, {file().string(), "not a regular file"});
}

TEST_F(CheckpointTest, ListsFaultsOfConfigurationAndFilesTogether) {
  model.config["hidden_act"] = "gelu";
  model.config["vocab_size"] = 0;
  write_file(folder.path() / "config.json", model.config.dump());
  write_file(file(), "short");
  std::vector<std::string> faults;
  load_checkpoint(folder.path(), faults);
  ASSERT_EQ(faults.size(), 3u);
  EXPECT_NE(faults[0].find("vocab_size"), std::string::npos);
  EXPECT_NE(faults[1].find("hidden_act"), std::string::npos);
  EXPECT_NE(faults[2].find("has 5 bytes"), std::string::npos);
}

}  // namespace
}  // namespace loopgauge
