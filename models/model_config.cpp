// SPDX-License-Identifier: Apache-2.0
#include "models/model_config.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "models/collected_faults.hpp"
#include "models/error.hpp"
#include "models/strict_json.hpp"

namespace loopgauge {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaximumConfigBytes = 1 << 20;

// Keys that other software writes and reads and that change nothing computed here.
const std::set<std::string_view> kHarmlessKeys{
    "architectures", "attention_dropout", "auto_map", "dtype", "initializer_range", "max_window_layers", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "_commit_hash",
    // written by every transformers configuration
    "chunk_size_feed_forward", "id2label", "label2id", "is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torchscript"};

// Keys of related architectures that change the arithmetic, with the only value that leaves it as specified (null always does).
struct NeutralKey {
  std::string_view key;
  json neutral;
  std::string_view meaning;
};
const std::vector<NeutralKey>& neutral_keys() {
  static const std::vector<NeutralKey> keys{
      {"attention_bias", false, "biases on the attention projections"},
      {"qkv_bias", false, "biases on the attention projections"},
      {"mlp_bias", false, "biases in the MLP"},
      {"use_qk_norm", false, "normalization of queries and keys"},
      {"qk_norm", false, "normalization of queries and keys"},
      {"partial_rotary_factor", 1.0, "RoPE on a part of the head"},
      {"rope_interleaved", false, "interleaved RoPE"},
      {"use_parallel_residual", false, "parallel attention and MLP"},
      {"attn_logit_softcapping", nullptr, "soft capping of attention logits"},
      {"final_logit_softcapping", nullptr, "soft capping of output logits"},
      {"query_pre_attn_scalar", nullptr, "another attention scale"},
      {"attention_multiplier", nullptr, "another attention scale"},
      {"embedding_multiplier", 1.0, "scaled embeddings"},
      {"residual_multiplier", 1.0, "scaled residual branches"},
      {"logits_scaling", 1.0, "scaled output logits"},
      {"logit_scale", 1.0, "scaled output logits"},
      {"num_experts", nullptr, "a mixture of experts"},
      {"num_local_experts", nullptr, "a mixture of experts"},
      {"quantization_config", nullptr, "quantized weights"},
  };
  return keys;
}

class Reader {
 public:
  Reader(const json& document, std::string file) : document_(document), file_(std::move(file)) {}

  [[noreturn]] void refuse(std::string_view key, const json& found, const std::string& supported) const {
    throw CheckpointError(file_ + ": key \"" + std::string(key) + "\" is " + shown(found) + "; supported: " + supported);
  }

  // Null where absent, so that a caller that allows null allows absence.
  const json& optional(std::string_view key) const {
    static const json null;
    const auto found = document_.find(std::string(key));
    return found == document_.end() ? null : *found;
  }

  const json& required(std::string_view key, const std::string& supported) const {
    const auto found = document_.find(std::string(key));
    if (found == document_.end()) {
      throw CheckpointError(file_ + ": key \"" + std::string(key) + "\" is missing; supported: " + supported +
                            " (library defaults differ from every released Ouro model, so none is assumed)");
    }
    return *found;
  }

  void word(std::string_view key, const std::string& only) const {
    const std::string supported = "\"" + only + "\"";
    if (const json& value = required(key, supported); value != only) refuse(key, value, supported);
  }

  int integer(std::string_view key, int minimum, int maximum) const {
    return integer(key, required(key, range(minimum, maximum)), minimum, maximum);
  }

  int integer(std::string_view key, const json& value, int minimum, int maximum) const {
    const bool inside = value.is_number_unsigned() ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(maximum)
                                                   : value.is_number_integer() && value.get<std::int64_t>() <= maximum;
    if (!inside || value.get<std::int64_t>() < minimum) refuse(key, value, range(minimum, maximum));
    return value.get<int>();
  }

  double number(std::string_view key, const json& value, double minimum, double maximum, const std::string& supported) const {
    if (!value.is_number()) refuse(key, value, supported);
    const double x = value.get<double>();
    if (!(x >= minimum && x <= maximum)) refuse(key, value, supported);
    return x;
  }

  const std::string& file() const { return file_; }

 private:
  static std::string range(int minimum, int maximum) {
    return "an integer from " + std::to_string(minimum) + " to " + std::to_string(maximum);
  }

  const json& document_;
  std::string file_;
};

constexpr std::string_view kThetaRange = "a number above 1, up to 1e12";

double rope_theta(const Reader& reader, std::string_view key, const json& value) {
  return reader.number(key, value, std::nextafter(1.0, 2.0), kMaximumRopeTheta, std::string(kThetaRange));
}

// The `rope_scaling` (transformers 4) or `rope_parameters` (5) object: only unscaled RoPE. Returns its rope_theta, where it has one.
std::optional<double> unscaled_rope(const Reader& reader, std::string_view key) {
  const json& object = reader.optional(key);
  if (object.is_null()) return std::nullopt;
  if (!object.is_object()) reader.refuse(key, object, "null, or an object with rope_type \"default\"");
  // The type first: it says more than the parameters that go with it.
  bool has_type = false;
  for (const char* name : {"rope_type", "type"}) {
    const auto type = object.find(name);
    if (type == object.end()) continue;
    has_type = true;
    if (*type != "default") reader.refuse(std::string(key) + "." + name, *type, "\"default\" (RoPE scaling is not implemented)");
  }
  std::optional<double> theta;
  for (const auto& [name, value] : object.items()) {
    const std::string path = std::string(key) + "." + name;
    if (name == "rope_theta") {
      theta = rope_theta(reader, path, value);
    } else if (name == "partial_rotary_factor") {
      if (!value.is_null() && value != 1.0) reader.refuse(path, value, "1 (RoPE covers the whole head)");
    } else if (name != "rope_type" && name != "type" && !value.is_null()) {
      reader.refuse(path, value, "only rope_type \"default\" and rope_theta (RoPE scaling is not implemented)");
    }
  }
  if (!has_type) reader.refuse(key, object, "an object that states rope_type \"default\"");
  return theta;
}

double read_rope_theta(const Reader& reader) {
  if (unscaled_rope(reader, "rope_scaling")) {
    reader.refuse("rope_scaling", reader.optional("rope_scaling"), "rope_theta stated at the top level or in rope_parameters");
  }
  const std::optional<double> nested = unscaled_rope(reader, "rope_parameters");
  if (nested && reader.optional("rope_theta").is_null()) return *nested;
  const double theta =
      rope_theta(reader, "rope_theta", reader.required("rope_theta", std::string(kThetaRange) + ", here or as rope_parameters.rope_theta"));
  if (nested && *nested != theta) reader.refuse("rope_parameters.rope_theta", *nested, "the value of rope_theta, " + shown(theta));
  return theta;
}

void refuse_grouped_queries(const Reader& reader, const ModelConfig& config) {
  const json& kv_heads = reader.optional("num_key_value_heads");
  if (kv_heads.is_null() || reader.integer("num_key_value_heads", kv_heads, 1, kMaximumHeads) == config.heads) return;
  reader.refuse("num_key_value_heads", kv_heads,
                "num_attention_heads = " + std::to_string(config.heads) + " or null (grouped-query attention is not implemented)");
}

int read_head_dim(const Reader& reader, const ModelConfig& config) {
  const json& stated = reader.optional("head_dim");
  if (stated.is_null() && config.hidden % config.heads != 0) {
    reader.refuse("head_dim", stated,
                  "an even integer, to be stated because hidden_size " + std::to_string(config.hidden) +
                      " is not a multiple of num_attention_heads " + std::to_string(config.heads));
  }
  const json value = stated.is_null() ? json(config.hidden / config.heads) : stated;
  const int head_dim = reader.integer("head_dim", value, 2, kMaximumHeadDim);
  if (head_dim % 2 != 0) reader.refuse("head_dim", value, "an even integer (RoPE rotates two halves)");
  return head_dim;
}

void refuse_sliding_window(const Reader& reader) {
  const json& use = reader.optional("use_sliding_window");
  const json& size = reader.optional("sliding_window");
  if (!use.is_null() && use != false) reader.refuse("use_sliding_window", use, "false (every layer attends to the whole history)");
  if (use.is_null() && !size.is_null()) reader.refuse("sliding_window", size, "null, or use_sliding_window stated as false");
}

void refuse_other_layer_types(const Reader& reader, const ModelConfig& config) {
  const json& types = reader.optional("layer_types");
  if (types.is_null()) return;
  if (!types.is_array() || types.size() != static_cast<std::size_t>(config.layers)) {
    reader.refuse("layer_types", types, "an array of num_hidden_layers = " + std::to_string(config.layers) + " times \"full_attention\"");
  }
  for (std::size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] != "full_attention") reader.refuse("layer_types[" + std::to_string(layer) + "]", types[layer], "\"full_attention\"");
  }
}

int token_id(const Reader& reader, std::string_view key, int vocab, std::vector<std::string>& notes) {
  const json& value = reader.optional(key);
  if (value.is_null()) return -1;
  if (!value.is_array()) return reader.integer(key, value, 0, vocab - 1);
  if (value.empty()) reader.refuse(key, value, "a token id, a list of them, or null");
  int first = -1;
  for (const json& id : value) {
    const int checked = reader.integer(key, id, 0, vocab - 1);
    if (first < 0) first = checked;
  }
  if (value.size() > 1)
    notes.push_back("config.json: " + std::string(key) + " lists several ids; " + std::to_string(first) + ", the first, is used");
  return first;
}

// Keys that select among loops are read by other software; here the exit mode of the algorithm configuration decides.
void note_exit_keys(const Reader& reader, std::vector<std::string>& notes) {
  const json& threshold = reader.optional("early_exit_threshold");
  if (!threshold.is_null() && !threshold.is_number()) reader.refuse("early_exit_threshold", threshold, "a number or null");
  if (threshold.is_number() && threshold.get<double>() < 1.0) {
    notes.push_back("config.json: early_exit_threshold " + shown(threshold) +
                    " is not applied; the exit mode of a run is chosen when it is started");
  }
  const json& step = reader.optional("early_exit_step");
  if (!step.is_null()) {
    notes.push_back("config.json: early_exit_step " + shown(step) + " is not applied; the exit mode of a run is chosen when it is started");
  }
}

bool same_value(const json& found, const json& neutral) {
  if (neutral.is_boolean() || neutral.is_null()) return found == neutral;
  return found.is_number() && found.get<double>() == neutral.get<double>();
}

void note_unknown_keys(const json& document, std::vector<std::string>& notes) {
  static const std::set<std::string_view> read_keys{
      "model_type",   "vocab_size",     "hidden_size",    "intermediate_size",   "num_hidden_layers",   "num_attention_heads",
      "head_dim",     "hidden_act",     "total_ut_steps", "num_key_value_heads", "rms_norm_eps",        "max_position_embeddings",
      "rope_theta",   "rope_scaling",   "layer_types",    "rope_parameters",     "use_sliding_window",  "tie_word_embeddings",
      "bos_token_id", "sliding_window", "eos_token_id",   "early_exit_step",     "early_exit_threshold"};
  for (const auto& [key, value] : document.items()) {
    const auto is_neutral_key = [&name = key](const NeutralKey& entry) { return entry.key == name; };
    if (value.is_null() || read_keys.contains(key) || kHarmlessKeys.contains(key) || std::ranges::any_of(neutral_keys(), is_neutral_key))
      continue;
    notes.push_back("config.json: key " + shown(key) + " is not known and was ignored (value " + shown(value) + ")");
  }
}

}  // namespace

ModelConfig load_model_config(const std::filesystem::path& folder) {
  std::vector<std::string> notes, faults;
  const ModelConfig config = load_model_config(folder, notes, faults);
  throw_first(faults);
  return config;
}

ModelConfig load_model_config(const std::filesystem::path& folder, std::vector<std::string>& notes, std::vector<std::string>& faults) {
  ModelConfig config;
  const std::filesystem::path file = folder / "config.json";
  json document;
  const bool readable = collect(faults, [&] {
    std::error_code error;
    if (!std::filesystem::is_directory(folder, error)) {
      throw CheckpointError(folder.string() + ": no such directory; a checkpoint is a directory with config.json and model.safetensors");
    }
    document = read_json_object(file, kMaximumConfigBytes);
  });
  if (!readable) return config;

  // A check that builds on other keys is left out where those are at fault themselves: they are zero then.
  const Reader reader(document, file.string());
  const auto check = [&](const auto& step) { collect(faults, step); };
  check([&] { reader.word("model_type", "ouro"); });
  check([&] { config.layers = reader.integer("num_hidden_layers", 1, kMaximumLayers); });
  check([&] { config.loops = reader.integer("total_ut_steps", 1, kMaximumLoops); });
  check([&] { config.hidden = reader.integer("hidden_size", 1, kMaximumHidden); });
  check([&] { config.heads = reader.integer("num_attention_heads", 1, kMaximumHeads); });
  check([&] { config.intermediate = reader.integer("intermediate_size", 1, kMaximumIntermediate); });
  check([&] { config.vocab = reader.integer("vocab_size", 1, kMaximumVocab); });
  check([&] { config.max_positions = reader.integer("max_position_embeddings", 1, kMaximumPositions); });
  if (config.heads > 0) {
    check([&] { refuse_grouped_queries(reader, config); });
    if (config.hidden > 0) check([&] { config.head_dim = read_head_dim(reader, config); });
  }
  check([&] { reader.word("hidden_act", "silu"); });
  check([&] {
    const json& tied = reader.required("tie_word_embeddings", "false");
    if (tied != false) reader.refuse("tie_word_embeddings", tied, "false (lm_head.weight is a tensor of its own)");
  });
  check([&] {
    const std::string range = "a number above 0 and below 1";
    constexpr double kSmallest = std::numeric_limits<float>::min();
    config.rms_norm_eps =
        static_cast<float>(reader.number("rms_norm_eps", reader.required("rms_norm_eps", range), kSmallest, 1.0 - 0x1p-24, range));
  });
  check([&] { config.rope_theta = read_rope_theta(reader); });
  check([&] { refuse_sliding_window(reader); });
  if (config.layers > 0) check([&] { refuse_other_layer_types(reader, config); });
  if (config.vocab > 0) {
    check([&] { config.bos_token_id = token_id(reader, "bos_token_id", config.vocab, notes); });
    check([&] { config.eos_token_id = token_id(reader, "eos_token_id", config.vocab, notes); });
  }
  check([&] { note_exit_keys(reader, notes); });
  for (const NeutralKey& entry : neutral_keys()) {
    check([&] {
      const json& found = reader.optional(entry.key);
      if (found.is_null() || same_value(found, entry.neutral)) return;
      reader.refuse(entry.key, found, shown(entry.neutral) + " (" + std::string(entry.meaning) + " is not part of the Ouro layout)");
    });
  }
  note_unknown_keys(document, notes);
  return config;
}

}  // namespace loopgauge
