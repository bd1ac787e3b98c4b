// SPDX-License-Identifier: Apache-2.0
// Checkpoint folders made byte by byte, so that every fault can be planted. Independent of the writer in harness/.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/error.hpp"

namespace loopgauge::test {

namespace fs = std::filesystem;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> counter{0};
    path_ = fs::temp_directory_path() / ("loopgauge-models-test-" + std::to_string(getpid()) + "-" + std::to_string(counter++));
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream stream(path, std::ios::binary);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(stream.good()) << path;
}

inline std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

struct StoredTensor {
  std::string dtype = "BF16";
  std::vector<std::int64_t> shape;
  std::string bytes;
};
using StoredTensors = std::map<std::string, StoredTensor>;

// Length, header and data of a safetensors file.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i));
  return file + header + data;
}

inline nlohmann::ordered_json header_of(const StoredTensors& tensors) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::size_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {at, at + tensor.bytes.size()}}};
    at += tensor.bytes.size();
  }
  return header;
}

inline std::string data_of(const StoredTensors& tensors) {
  std::string data;
  for (const auto& [name, tensor] : tensors) data += tensor.bytes;
  return data;
}

inline std::string safetensors_bytes(const StoredTensors& tensors) {
  return safetensors_bytes(header_of(tensors).dump(), data_of(tensors));
}

// A valid model of two layers, hidden 6, two heads of 4 channels (so heads * head_dim differs from hidden), intermediate 5, vocabulary 7.
struct SmallModel {
  nlohmann::ordered_json config;
  StoredTensors tensors;

  SmallModel() {
    config = nlohmann::ordered_json::parse(R"({
      "architectures": ["OuroForCausalLM"], "model_type": "ouro", "vocab_size": 7, "hidden_size": 6, "intermediate_size": 5,
      "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "hidden_act": "silu",
      "max_position_embeddings": 32, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "rope_scaling": null, "tie_word_embeddings": false,
      "total_ut_steps": 4, "early_exit_threshold": 1.0, "attention_dropout": 0.0, "use_sliding_window": false, "bos_token_id": 5,
      "eos_token_id": 6, "pad_token_id": null, "torch_dtype": "bfloat16"})");
    add("model.embed_tokens.weight", {7, 6});
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      for (const char* name : {"q_proj", "k_proj", "v_proj"}) add(prefix + "self_attn." + name + ".weight", {8, 6});
      add(prefix + "self_attn.o_proj.weight", {6, 8});
      for (const char* name : {"gate_proj", "up_proj"}) add(prefix + "mlp." + name + ".weight", {5, 6});
      add(prefix + "mlp.down_proj.weight", {6, 5});
      for (const char* name : {"input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"}) {
        add(prefix + name + ".weight", {6});
      }
    }
    add("model.norm.weight", {6});
    add("model.early_exit_gate.weight", {1, 6});
    add("model.early_exit_gate.bias", {1});
    add("lm_head.weight", {7, 6});
  }

  // Writes config.json and model.safetensors.
  void write(const fs::path& folder) const {
    write_file(folder / "config.json", config.dump(2));
    write_file(folder / "model.safetensors", safetensors_bytes(tensors));
  }

 private:
  // Every element of the model has its own finite pattern.
  void add(const std::string& name, const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::string bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint16_t bits = static_cast<std::uint16_t>(0x3c00 + next_++);
      bytes += static_cast<char>(bits & 0xff);
      bytes += static_cast<char>(bits >> 8);
    }
    tensors[name] = {"BF16", shape, bytes};
  }
  int next_ = 0;
};

// `action` must throw a CheckpointError (exit code 3) whose one-line message holds every fragment.
inline void expect_refused(const std::function<void()>& action, const std::vector<std::string>& fragments) {
  try {
    action();
  } catch (const CheckpointError& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::input);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& fragment : fragments)
      EXPECT_NE(message.find(fragment), std::string::npos) << "\"" << fragment << "\" is not in: " << message;
    return;
  } catch (const std::exception& error) {
    FAIL() << "another exception: " << error.what();
  }
  FAIL() << "accepted, expected a refusal with \"" << (fragments.empty() ? "" : fragments.front()) << "\"";
}

}  // namespace loopgauge::test
