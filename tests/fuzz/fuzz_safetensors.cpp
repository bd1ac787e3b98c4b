// SPDX-License-Identifier: Apache-2.0
// The safetensors reader on hostile bytes: the header checks alone (fast, so most inputs), and the whole loader on a folder whose model
// file is the input.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "models/checkpoint.hpp"
#include "models/checkpoint_layout.hpp"
#include "models/safetensors.hpp"
#include "tests/fuzz/fuzz_driver.hpp"

namespace {

using loopgauge::fuzz::Bytes;
namespace fs = std::filesystem;

constexpr const char* kConfig = R"({"model_type": "ouro", "vocab_size": 3, "hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1,
  "num_attention_heads": 1, "hidden_act": "silu", "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "tie_word_embeddings": false, "total_ut_steps": 4})";

// A folder of this process, removed at its end.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("loopgauge-fuzz-" + std::to_string(getpid()))) {
    fs::create_directories(path_);
    std::ofstream(path_ / "config.json") << kConfig;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

const Folder& folder() {
  static const Folder instance;
  return instance;
}

void fuzz_one_input(std::span<const std::uint8_t> bytes) {
  const std::uint64_t length =
      loopgauge::safetensors_header_bytes(bytes.first(std::min<std::size_t>(8, bytes.size())), bytes.size(), "input");
  const loopgauge::SafetensorsHeader header =
      loopgauge::parse_safetensors_header(bytes.subspan(8, static_cast<std::size_t>(length)), bytes.size(), "input");
  // What the checks promise to whoever reads the data.
  std::uint64_t at = header.data_begin;
  for (const loopgauge::SafetensorsEntry& entry : header.entries) {
    if (entry.begin != at || entry.end < entry.begin || entry.end > bytes.size())
      throw std::logic_error("accepted data that does not line up");
    at = entry.end;
  }
  if (at != bytes.size()) throw std::logic_error("accepted a file that the tensors do not cover");

  std::ofstream(folder().path() / "model.safetensors", std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  const loopgauge::Checkpoint checkpoint = loopgauge::load_checkpoint(folder().path());
  if (checkpoint.layers.size() != 1 || checkpoint.lm_head.data.size() != 12) throw std::logic_error("loaded a checkpoint of another shape");
}

Bytes valid_file(const std::string& dtype, std::size_t element_bytes) {
  loopgauge::ModelConfig config;
  config.layers = 1, config.loops = 4, config.hidden = 4, config.heads = 1, config.head_dim = 4, config.intermediate = 5, config.vocab = 3;
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::size_t at = 0;
  for (const loopgauge::TensorSpec& spec : loopgauge::checkpoint_tensors(config)) {
    std::string shape;
    for (const std::int64_t extent : spec.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    const std::size_t end = at + static_cast<std::size_t>(loopgauge::element_count(spec.shape)) * element_bytes;
    header += ",\"" + spec.name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(at) +
              "," + std::to_string(end) + "]}";
    at = end;
  }
  header += "}";
  Bytes bytes(8 + header.size() + at);
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(header.size() >> (8 * i));
  std::copy(header.begin(), header.end(), bytes.begin() + 8);
  for (std::size_t i = 8 + header.size(); i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i % 61);
  return bytes;
}

std::vector<Bytes> fuzz_seeds() { return {valid_file("BF16", 2), valid_file("F16", 2), valid_file("F32", 4)}; }

}  // namespace

LOOPGAUGE_FUZZ_ENTRY(fuzz_one_input, fuzz_seeds)
