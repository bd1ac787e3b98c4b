// SPDX-License-Identifier: Apache-2.0
// `loopgauge model info` describes a checkpoint; `loopgauge model synth` makes one with random weights.
#include <array>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "harness/commands/command.hpp"
#include "harness/commands/common_options.hpp"
#include "harness/commands/option_checks.hpp"
#include "harness/interrupt.hpp"
#include "harness/io/checkpoint_writer.hpp"
#include "harness/io/data_paths.hpp"
#include "harness/io/shortest_decimal.hpp"
#include "harness/io/synthetic_checkpoint.hpp"
#include "models/checkpoint.hpp"
#include "models/checkpoint_layout.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

namespace fs = std::filesystem;

struct InfoOptions {
  std::string checkpoint;
  std::string output = "console";
};

void print_info(const InfoOptions& options) {
  constexpr std::array<std::string_view, 2> kOutputs{"console", "json"};
  require_output(options.output, kOutputs);
  const fs::path folder = options.checkpoint.empty() ? default_checkpoint() : fs::path(options.checkpoint);
  const Checkpoint checkpoint = load_checkpoint(folder);
  const ModelConfig& config = checkpoint.config;
  const std::int64_t parameters = parameter_count(config);
  const std::int64_t bytes = parameters * static_cast<std::int64_t>(sizeof(Bfloat16Bits));
  if (options.output == "json") {
    const nlohmann::ordered_json json{{"checkpoint", folder.string()},
                                      {"sha256", checkpoint.sha256},
                                      {"layers", config.layers},
                                      {"loops", config.loops},
                                      {"hidden", config.hidden},
                                      {"heads", config.heads},
                                      {"head_dim", config.head_dim},
                                      {"intermediate", config.intermediate},
                                      {"vocab", config.vocab},
                                      {"max_positions", config.max_positions},
                                      {"rms_norm_eps", shortest_decimal(config.rms_norm_eps)},
                                      {"rope_theta", config.rope_theta},
                                      {"bos_token_id", config.bos_token_id},
                                      {"eos_token_id", config.eos_token_id},
                                      {"parameters", parameters},
                                      {"weight_bytes", bytes},
                                      {"kv_bytes_per_token", kv_bytes_per_token(config)},
                                      {"notes", checkpoint.notes}};
    std::cout << json.dump(2) << "\n";
    return;
  }
  const auto token = [](int id) { return id < 0 ? std::string("none") : std::to_string(id); };
  std::cout << "checkpoint          " << folder.string() << "\n"
            << "sha256              " << checkpoint.sha256 << "\n"
            << "layers x loops      " << config.layers << " x " << config.loops << "\n"
            << "hidden              " << config.hidden << "\n"
            << "heads x head_dim    " << config.heads << " x " << config.head_dim << "\n"
            << "intermediate        " << config.intermediate << "\n"
            << "vocabulary          " << config.vocab << " (bos " << token(config.bos_token_id) << ", eos " << token(config.eos_token_id)
            << ")\n"
            << "positions           " << config.max_positions << " (rope_theta " << config.rope_theta << ")\n"
            << "rms_norm_eps        " << config.rms_norm_eps << "\n"
            << "parameters          " << parameters << " (" << bytes << " bytes in BF16)\n"
            << "K/V in BF16         " << kv_bytes_per_token(config) << " bytes per token, all layers and loops\n";
  for (const std::string& note : checkpoint.notes) std::cout << "note                " << note << "\n";
}

struct SynthCommandOptions {
  std::string preset = "tiny";
  std::optional<int> layers, hidden, heads, head_dim, intermediate, vocab, loops, max_positions;
  std::optional<double> rope_theta;
  SynthOptions synth;
  std::uint64_t shard_bytes = 0;
  bool force = false;
  std::string output;
};

ModelConfig synth_config(const SynthCommandOptions& options) {
  ModelConfig config = preset_config(options.preset);
  const auto set = [](int& field, const std::optional<int>& value) { field = value.value_or(field); };
  set(config.layers, options.layers);
  set(config.hidden, options.hidden);
  set(config.heads, options.heads);
  set(config.head_dim, options.head_dim);
  set(config.intermediate, options.intermediate);
  set(config.vocab, options.vocab);
  set(config.loops, options.loops);
  set(config.max_positions, options.max_positions);
  config.rope_theta = options.rope_theta.value_or(config.rope_theta);
  if (config.head_dim % 2 != 0) throw ConfigError("--head-dim " + std::to_string(config.head_dim) + " is odd; RoPE rotates two halves");
  // A preset's special tokens make no sense in a vocabulary too small for them.
  if (config.bos_token_id >= config.vocab) config.bos_token_id = -1;
  if (config.eos_token_id >= config.vocab) config.eos_token_id = -1;
  return config;
}

void synthesize(const SynthCommandOptions& options) {
  const ModelConfig config = synth_config(options);
  const TensorValues values = synthetic_values(config, options.synth);
  CheckpointWriteOptions write;
  write.shard_bytes = options.shard_bytes;
  write.if_exists = options.force ? IfExists::replace : IfExists::refuse;
  write.metadata = {{"generator", std::string(kSynthVersion)},
                    {"seed", std::to_string(options.synth.seed)},
                    {"outlier_channels", std::to_string(options.synth.outlier_channels)}};
  if (options.synth.zero_key_heads > 0) write.metadata["zero_key_heads"] = std::to_string(options.synth.zero_key_heads);
  const auto interruptible = [&values](const TensorSpec& tensor, std::int64_t first, std::span<Bfloat16Bits> out) {
    throw_if_interrupted();
    values(tensor, first, out);
  };
  write_checkpoint(options.output, config, interruptible, write);
  std::cout << options.output << ": " << parameter_count(config) << " parameters, seed " << options.synth.seed << ", "
            << options.synth.outlier_channels << " outlier channels (" << kSynthVersion << ")\n";
}

void add_info(CLI::App& model, int& exit_code) {
  CLI::App* command = model.add_subcommand("info", "Load and describe a checkpoint");
  const auto options = std::make_shared<InfoOptions>();
  command->add_option("--checkpoint", options->checkpoint, "Model folder in the Hugging Face layout (default: the shipped ouro-tiny)")
      ->type_name("DIR");
  command->add_option("--output", options->output, "console, json")->type_name("FORMAT")->capture_default_str();
  command->footer(
      "Examples:\n"
      "  loopgauge model info\n"
      "  loopgauge model info --checkpoint ~/models/Ouro-1.4B --output json");
  command->callback([options, &exit_code] {
    print_info(*options);
    exit_code = 0;
  });
}

void add_synth(CLI::App& model, int& exit_code) {
  CLI::App* command = model.add_subcommand("synth", "Write a checkpoint with random weights, the same bytes on every machine");
  const auto options = std::make_shared<SynthCommandOptions>();
  const auto size = [&](const char* flag, std::optional<int>& target, const char* help, int most) {
    command->add_option(flag, target, help)->type_name("N")->check(CLI::Range(1, most));
  };
  command->add_option("--preset", options->preset, "Shape to start from: tiny (as ouro-tiny), ouro-1.4b, ouro-2.6b")
      ->type_name("NAME")
      ->capture_default_str();
  size("--layers", options->layers, "Physical layers, shared by all loops", kMaximumLayers);
  size("--hidden", options->hidden, "Width of the hidden state", kMaximumHidden);
  size("--heads", options->heads, "Attention heads", kMaximumHeads);
  size("--head-dim", options->head_dim, "Channels of a head, even", kMaximumHeadDim);
  size("--intermediate", options->intermediate, "Width of the MLP", kMaximumIntermediate);
  size("--vocab", options->vocab, "Vocabulary", kMaximumVocab);
  size("--loops", options->loops, "Loops (total_ut_steps); FlashLoop needs four", kMaximumLoops);
  size("--max-positions", options->max_positions, "Longest sequence", kMaximumPositions);
  command->add_option("--rope-theta", options->rope_theta, "Base of the RoPE frequencies")->type_name("X")->check(real_number(1.001, kMaximumRopeTheta));
  command->add_option("--seed", options->synth.seed, "Seed of the weights")
      ->check(whole_number())
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--outlier-channels", options->synth.outlier_channels,
                   "Hidden, key and value channels with eight times the usual magnitude")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--zero-key-heads", options->synth.zero_key_heads,
                   "Heads whose keys are zero: all their attention logits tie, so selection is by position alone")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--shard-bytes", options->shard_bytes, "Most tensor bytes of one file; 0: a single file")
      ->check(whole_number())
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--force", options->force, "Replace the checkpoint in DIR");
  command->add_option("-o,--output", options->output, "Folder to write")->type_name("DIR")->required();
  command->footer(
      "Examples:\n"
      "  loopgauge model synth --preset ouro-1.4b --outlier-channels 4 -o ouro-1.4b-synth\n"
      "  loopgauge model synth --layers 2 --hidden 128 --heads 2 --head-dim 64 --seed 7 -o small\n"
      "  loopgauge model synth --preset ouro-2.6b --shard-bytes 2000000000 -o sharded");
  command->callback([options, &exit_code] {
    synthesize(*options);
    exit_code = 0;
  });
}

}  // namespace

void add_model_command(CLI::App& app, int& exit_code) {
  CLI::App* model = app.add_subcommand("model", "Describe a checkpoint, or make one with random weights");
  model->require_subcommand(1);
  model->footer(
      "Examples:\n"
      "  loopgauge model info --checkpoint models/ouro-small\n"
      "  loopgauge model synth --layers 2 --hidden 128 --heads 2 --head-dim 64 --seed 7 -o small");
  add_info(*model, exit_code);
  add_synth(*model, exit_code);
}

}  // namespace loopgauge::harness
