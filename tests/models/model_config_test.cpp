// SPDX-License-Identifier: Apache-2.0
#include "models/model_config.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/models/checkpoint_folder.hpp"

namespace loopgauge {
namespace {

using nlohmann::ordered_json;
using test::expect_refused;
using test::SmallModel;
using test::TemporaryFolder;
using test::write_file;

class ModelConfigTest : public ::testing::Test {
 protected:
  ModelConfig load() {
    write_file(folder_.path() / "config.json", config.dump());
    notes.clear();
    std::vector<std::string> faults;
    const ModelConfig result = load_model_config(folder_.path(), notes, faults);
    EXPECT_TRUE(faults.empty()) << faults.front();
    return result;
  }
  void refuse(const std::vector<std::string>& fragments) {
    write_file(folder_.path() / "config.json", config.dump());
    std::vector<std::string> all = fragments;
    all.push_back((folder_.path() / "config.json").string());
    expect_refused([&] { load_model_config(folder_.path()); }, all);
  }
  void refuse_text(const std::string& text, const std::vector<std::string>& fragments) {
    write_file(folder_.path() / "config.json", text);
    expect_refused([&] { load_model_config(folder_.path()); }, fragments);
  }

  TemporaryFolder folder_;
  ordered_json config = SmallModel().config;
  std::vector<std::string> notes;
};

TEST_F(ModelConfigTest, ReadsEveryField) {
  const ModelConfig model = load();
  EXPECT_EQ(model.layers, 2);
  EXPECT_EQ(model.loops, 4);
  EXPECT_EQ(model.hidden, 6);
  EXPECT_EQ(model.heads, 2);
  EXPECT_EQ(model.head_dim, 4);
  EXPECT_EQ(model.intermediate, 5);
  EXPECT_EQ(model.vocab, 7);
  EXPECT_EQ(model.max_positions, 32);
  EXPECT_EQ(model.rms_norm_eps, 1e-6f);
  EXPECT_EQ(model.rope_theta, 10000.0);
  EXPECT_EQ(model.bos_token_id, 5);
  EXPECT_EQ(model.eos_token_id, 6);
  EXPECT_TRUE(notes.empty()) << notes.front();
}

TEST_F(ModelConfigTest, ReadsTheShippedModel) {
  const ModelConfig model = load_model_config(test::fs::path(LOOPGAUGE_SOURCE_DIR) / "models" / "ouro-tiny");
  EXPECT_EQ(model.layers, 4);
  EXPECT_EQ(model.hidden, 384);
  EXPECT_EQ(model.head_dim, 128);
  EXPECT_EQ(model.vocab, 264);
}

TEST_F(ModelConfigTest, NullOrAbsentKeyValueHeadsAreTheHeads) {
  config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(load().heads, 2);
  config.erase("num_key_value_heads");
  EXPECT_EQ(load().heads, 2);
}

TEST_F(ModelConfigTest, AbsentHeadDimIsHiddenOverHeads) {
  config["hidden_size"] = 12;
  config.erase("head_dim");
  EXPECT_EQ(load().head_dim, 6);
  config["head_dim"] = nullptr;
  EXPECT_EQ(load().head_dim, 6);
}

TEST_F(ModelConfigTest, ReadsRopeParameters) {
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_EQ(load().rope_theta, 1e6);
  config["rope_theta"] = 1e6;
  EXPECT_EQ(load().rope_theta, 1e6);
}

TEST_F(ModelConfigTest, DefaultRopeScalingIsNoScaling) {
  config["rope_scaling"] = {{"type", "default"}};
  EXPECT_EQ(load().rope_theta, 10000.0);
}

TEST_F(ModelConfigTest, AnyNumberOfLoops) {
  for (const int loops : {1, 3, 8}) {
    config["total_ut_steps"] = loops;
    EXPECT_EQ(load().loops, loops);
  }
}

TEST_F(ModelConfigTest, ToleratesWhatReleasedCheckpointsCarry) {
  config["auto_map"] = {{"AutoModelForCausalLM", "modeling_ouro.OuroForCausalLM"}};
  config["transformers_version"] = "4.55.0";
  config["layer_types"] = {"full_attention", "full_attention"};
  config["sliding_window"] = nullptr;
  config["max_window_layers"] = 2;
  config["use_cache"] = true;
  config["initializer_range"] = 0.02;
  config["attention_bias"] = false;
  load();
  EXPECT_TRUE(notes.empty()) << notes.front();
}

TEST_F(ModelConfigTest, UnknownKeysAreNoted) {
  config["lookahead_exit"] = 3;
  load();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("lookahead_exit"), std::string::npos);
}

TEST_F(ModelConfigTest, ExitKeysThatAreNotAppliedAreNoted) {
  config["early_exit_threshold"] = 0.9;
  config["early_exit_step"] = 2;
  load();
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_NE(notes[0].find("early_exit_threshold 0.9"), std::string::npos);
  EXPECT_NE(notes[1].find("early_exit_step 2"), std::string::npos);
}

TEST_F(ModelConfigTest, FirstOfSeveralEndTokensIsUsedAndNoted) {
  config["eos_token_id"] = {3, 6};
  EXPECT_EQ(load().eos_token_id, 3);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("eos_token_id"), std::string::npos);
}

TEST_F(ModelConfigTest, AbsentTokensAreMinusOne) {
  config.erase("bos_token_id");
  config["eos_token_id"] = nullptr;
  const ModelConfig model = load();
  EXPECT_EQ(model.bos_token_id, -1);
  EXPECT_EQ(model.eos_token_id, -1);
}

TEST_F(ModelConfigTest, NoMissingKeyIsReplacedByADefault) {
  for (const char* key : {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "total_ut_steps"}) {
    SCOPED_TRACE(key);
    config = SmallModel().config;
    config.erase(key);
    refuse({std::string("key \"") + key + "\" is missing"});
  }
}

struct Refusal {
  const char* key;
  ordered_json value;
  const char* found;      // how the message shows it
  const char* supported;  // what the message says is supported
};

TEST_F(ModelConfigTest, RefusesWhatItDoesNotCompute) {
  const std::vector<Refusal> refusals{
      {"model_type", "llama", "\"llama\"", "\"ouro\""},
      {"tie_word_embeddings", true, "true", "false"},
      {"hidden_act", "gelu", "\"gelu\"", "\"silu\""},
      {"num_key_value_heads", 1, "1", "grouped-query attention is not implemented"},
      {"use_sliding_window", true, "true", "false"},
      {"attention_bias", true, "true", "false"},
      {"mlp_bias", true, "true", "false"},
      {"partial_rotary_factor", 0.5, "0.5", "1.0"},
      {"final_logit_softcapping", 30.0, "30.0", "null"},
      {"quantization_config", {{"bits", 4}}, "{\"bits\":4}", "null"},
      {"layer_types", {"full_attention", "sliding_attention"}, "\"sliding_attention\"", "\"full_attention\""},
      {"layer_types", {"full_attention"}, "[\"full_attention\"]", "num_hidden_layers = 2"},
      {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}, "yarn", "RoPE scaling is not implemented"},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "\"linear\"", "RoPE scaling is not implemented"},
      {"rope_scaling", {{"factor", 2.0}}, "2.0", "RoPE scaling is not implemented"},
      {"rope_scaling", "linear", "\"linear\"", "rope_type \"default\""},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5.0}}, "5.0", "10000.0"},
      {"rope_parameters", {{"rope_theta", 10000.0}}, "10000.0", "rope_type"},
      {"num_hidden_layers", 0, "0", "1 to 1024"},
      {"num_hidden_layers", -2, "-2", "1 to 1024"},
      {"num_hidden_layers", 2.0, "2.0", "integer"},
      {"num_hidden_layers", "2", "\"2\"", "integer"},
      {"num_hidden_layers", true, "true", "integer"},
      {"num_hidden_layers", 1025, "1025", "1 to 1024"},
      {"hidden_size", 18446744073709551615u, "18446744073709551615", "integer"},
      {"hidden_size", -9223372036854775807, "-9223372036854775807", "integer"},
      {"vocab_size", 1 << 30, "1073741824", "integer"},
      {"total_ut_steps", 0, "0", "1 to 64"},
      {"total_ut_steps", nullptr, "null", "1 to 64"},
      {"head_dim", 5, "5", "even"},
      {"head_dim", 0, "0", "integer"},
      {"rms_norm_eps", 0.0, "0.0", "above 0"},
      {"rms_norm_eps", -1e-6, "-1e-06", "above 0"},
      {"rms_norm_eps", 1e-300, "1e-300", "above 0"},
      {"rms_norm_eps", 1.0, "1.0", "below 1"},
      {"rms_norm_eps", "1e-6", "\"1e-6\"", "number"},
      {"rope_theta", 0.0, "0.0", "above 1"},
      {"rope_theta", 1e300, "1e+300", "1e12"},
      {"rope_theta", "10000", "\"10000\"", "number"},
      {"bos_token_id", 7, "7", "0 to 6"},
      {"eos_token_id", -3, "-3", "0 to 6"},
      {"eos_token_id", ordered_json::array(), "[]", "token id"},
      {"early_exit_threshold", "high", "\"high\"", "number"},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(std::string(refusal.key) + " = " + refusal.value.dump());
    config = SmallModel().config;
    config[refusal.key] = refusal.value;
    refuse({std::string("key \"") + refusal.key, refusal.found, refusal.supported});
  }
}

TEST_F(ModelConfigTest, RefusesASlidingWindowWithoutTheSwitch) {
  config.erase("use_sliding_window");
  config["sliding_window"] = 4096;
  refuse({"key \"sliding_window\" is 4096", "use_sliding_window"});
}

TEST_F(ModelConfigTest, AnUnusedSlidingWindowIsFine) {
  config["sliding_window"] = 4096;
  load();
}

TEST_F(ModelConfigTest, RefusesHiddenThatHeadsDoNotDivide) {
  config.erase("head_dim");
  config["hidden_size"] = 7;
  refuse({"key \"head_dim\" is null", "hidden_size 7", "num_attention_heads 2"});
}

TEST_F(ModelConfigTest, RefusesOddHeadDimOfDivision) {
  config.erase("head_dim");
  refuse({"key \"head_dim\" is 3", "even"});
}

TEST_F(ModelConfigTest, CollectsEveryFault) {
  config["hidden_act"] = "relu";
  config["num_hidden_layers"] = -1;
  config["vocab_size"] = "many";
  config["rope_theta"] = false;
  write_file(folder_.path() / "config.json", config.dump());
  std::vector<std::string> faults;
  load_model_config(folder_.path(), notes, faults);
  ASSERT_EQ(faults.size(), 4u);
  EXPECT_NE(faults[0].find("num_hidden_layers"), std::string::npos);
  EXPECT_NE(faults[1].find("vocab_size"), std::string::npos);
  EXPECT_NE(faults[2].find("hidden_act"), std::string::npos);
  EXPECT_NE(faults[3].find("rope_theta"), std::string::npos);
  refuse({"num_hidden_layers", "(and 3 more faults)"});
}

TEST_F(ModelConfigTest, RefusesWhatIsNotStrictJson) {
  const std::string file = (folder_.path() / "config.json").string();
  refuse_text("", {file, "not valid JSON"});
  refuse_text("[1]", {file, "expected a JSON object"});
  refuse_text("{\"a\": 1,}", {file, "not valid JSON"});
  refuse_text("{\"vocab_size\": NaN}", {file, "not valid JSON"});
  refuse_text("{\"rope_theta\": 1e999}", {file, "not valid JSON"});
  refuse_text("{\"a\": \"\xff\"}", {file, "not valid JSON"});
  refuse_text("{\"hidden_size\": 1, \"hidden_size\": 2}", {file, "\"hidden_size\" appears twice"});
  refuse_text("{\"auto_map\": {\"x\": 1, \"x\": 1}}", {file, "\"x\" appears twice"});
  refuse_text("{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + "}", {file, "nested deeper than 16"});
  refuse_text(std::string(2 << 20, ' '), {file, "2097152 bytes"});
}

TEST_F(ModelConfigTest, SameKeyInDifferentObjectsIsFine) {
  std::string text = config.dump();
  text.pop_back();
  write_file(folder_.path() / "config.json", text + R"(, "auto_map": {"model_type": "x"}, "id2label": {"model_type": "y"}})");
  EXPECT_EQ(load_model_config(folder_.path()).layers, 2);
}

TEST_F(ModelConfigTest, RefusesMissingFolderAndFile) {
  expect_refused([&] { load_model_config(folder_.path() / "absent"); }, {(folder_.path() / "absent").string(), "no such directory"});
  expect_refused([&] { load_model_config(folder_.path()); }, {(folder_.path() / "config.json").string(), "no such file"});
  test::fs::create_directory(folder_.path() / "config.json");
  expect_refused([&] { load_model_config(folder_.path()); }, {(folder_.path() / "config.json").string(), "not a regular file"});
}

}  // namespace
}  // namespace loopgauge
