// SPDX-License-Identifier: Apache-2.0
#include "harness/io/checkpoint_writer.hpp"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "harness/io/shortest_decimal.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is written as it lies");

constexpr std::size_t kPieceElements = 1u << 20;

std::uint64_t bytes_of(const TensorSpec& tensor) { return static_cast<std::uint64_t>(element_count(tensor.shape)) * sizeof(Bfloat16Bits); }

std::string config_text(const ModelConfig& config) {
  ordered_json json{{"architectures", ordered_json::array({"OuroForCausalLM"})},
                    {"model_type", "ouro"},
                    {"vocab_size", config.vocab},
                    {"hidden_size", config.hidden},
                    {"intermediate_size", config.intermediate},
                    {"num_hidden_layers", config.layers},
                    {"num_attention_heads", config.heads},
                    {"num_key_value_heads", config.heads},
                    {"head_dim", config.head_dim},
                    {"hidden_act", "silu"},
                    {"max_position_embeddings", config.max_positions},
                    {"rms_norm_eps", shortest_decimal(config.rms_norm_eps)},
                    {"rope_theta", config.rope_theta},
                    {"rope_scaling", nullptr},
                    {"tie_word_embeddings", false},
                    {"total_ut_steps", config.loops},
                    {"early_exit_threshold", 1.0},
                    {"use_sliding_window", false}};
  if (config.bos_token_id >= 0) json["bos_token_id"] = config.bos_token_id;
  if (config.eos_token_id >= 0) json["eos_token_id"] = config.eos_token_id;
  json["torch_dtype"] = "bfloat16";
  return json.dump(2) + "\n";
}

// Tensors in ascending name order, cut into files.
std::vector<std::vector<TensorSpec>> shards_of(const ModelConfig& config, std::uint64_t shard_bytes) {
  std::vector<TensorSpec> tensors = checkpoint_tensors(config);
  std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  if (shard_bytes == 0) return {std::move(tensors)};
  std::vector<std::vector<TensorSpec>> shards;
  std::uint64_t used = 0;
  for (TensorSpec& tensor : tensors) {
    const std::uint64_t bytes = bytes_of(tensor);
    if (shards.empty() || bytes > shard_bytes - std::min(used, shard_bytes)) {
      shards.emplace_back();
      used = 0;
    }
    used += bytes;
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  const auto five_digits = [](std::size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(5 - std::min<std::size_t>(5, digits.size()), '0') + digits;
  };
  return count == 1 ? "model.safetensors" : "model-" + five_digits(index + 1) + "-of-" + five_digits(count) + ".safetensors";
}

std::string header_text(const std::vector<TensorSpec>& tensors, const std::map<std::string, std::string>& metadata) {
  ordered_json json;
  json["__metadata__"] = {{"format", "pt"}};
  for (const auto& [key, value] : metadata) json["__metadata__"][key] = value;
  std::uint64_t at = 0;
  for (const TensorSpec& tensor : tensors) {
    json[tensor.name] = {{"dtype", "BF16"}, {"shape", tensor.shape}, {"data_offsets", {at, at + bytes_of(tensor)}}};
    at += bytes_of(tensor);
  }
  std::string text = json.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // data starts at a multiple of 8
  return text;
}

class OutputFile {
 public:
  explicit OutputFile(fs::path path) : path_(std::move(path)), stream_(path_, std::ios::binary) { check(); }
  void write(const void* data, std::size_t bytes) {
    stream_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    check();
  }
  void close() {
    stream_.close();
    check();
  }

 private:
  void check() const {
    if (!stream_) throw FileError(path_.string() + ": cannot be written; is the disk full?");
  }
  fs::path path_;
  std::ofstream stream_;
};

void write_text(const fs::path& path, const std::string& text) {
  OutputFile file(path);
  file.write(text.data(), text.size());
  file.close();
}

void write_shard(const fs::path& path, const std::vector<TensorSpec>& tensors, const TensorValues& values,
                 const std::map<std::string, std::string>& metadata) {
  OutputFile file(path);
  const std::string header = header_text(tensors, metadata);
  const std::uint64_t length = header.size();
  file.write(&length, sizeof(length));
  file.write(header.data(), header.size());
  std::vector<Bfloat16Bits> piece;
  for (const TensorSpec& tensor : tensors) {
    const std::int64_t count = element_count(tensor.shape);
    for (std::int64_t first = 0; first < count; first += std::ssize(piece)) {
      piece.resize(std::min<std::size_t>(kPieceElements, static_cast<std::size_t>(count - first)));
      values(tensor, first, piece);
      file.write(piece.data(), piece.size() * sizeof(Bfloat16Bits));
    }
  }
  file.close();
}

// A folder under construction beside its destination; removed unless committed.
class PendingFolder {
 public:
  PendingFolder(fs::path destination, IfExists if_exists) : destination_(std::move(destination)), if_exists_(if_exists) {
    std::error_code error;
    if (fs::is_symlink(destination_, error)) destination_ = fs::weakly_canonical(destination_, error);
    if (!destination_.has_filename()) destination_ = destination_.parent_path();  // "out/"
    if (destination_.filename().empty() || destination_.filename() == "." || destination_.filename() == "..") {
      throw FileError("\"" + destination_.string() + "\" is not a folder name to write a checkpoint to");
    }
    refuse_unless_replaceable();
    const fs::path parent = destination_.has_parent_path() ? destination_.parent_path() : fs::path(".");
    if (!fs::is_directory(parent, error)) throw FileError(parent.string() + ": no such directory; create it first");
    remove_left_behind();
    while (!make_temporary()) {
    }
  }
  ~PendingFolder() {
    std::error_code ignored;
    if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
    ::close(descriptor_);
  }
  PendingFolder(const PendingFolder&) = delete;
  PendingFolder& operator=(const PendingFolder&) = delete;

  const fs::path& path() const { return temporary_; }

  void commit() {
    refuse_unless_replaceable();
    std::error_code error;
    fs::path old;
    // Both are there at any moment, where the file system can exchange them.
    if (fs::exists(destination_, error) && ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, destination_.c_str(), RENAME_EXCHANGE) == 0) {
      fs::remove_all(std::exchange(temporary_, fs::path()), error);
      return;
    }
    if (fs::exists(destination_, error) && !fs::is_empty(destination_, error)) {
      old = temporary_.string() + "-replaced";
      fs::rename(destination_, old, error);
      if (error) throw FileError(destination_.string() + ": cannot be replaced (" + error.message() + ")");
    }
    fs::rename(temporary_, destination_, error);
    if (error) {
      std::error_code ignored;
      if (!old.empty()) fs::rename(old, destination_, ignored);
      throw FileError(destination_.string() + ": cannot be created (" + error.message() + ")");
    }
    temporary_.clear();
    if (!old.empty()) fs::remove_all(old, error);
  }

 private:
  // What killed processes left: folders whose lock (flock) nobody holds.
  void remove_left_behind() const {
    for (const fs::path& partial : partial_paths(destination_)) {
      const int descriptor = ::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      if (descriptor < 0) continue;
      std::error_code ignored;
      if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) fs::remove_all(partial, ignored);
      ::close(descriptor);
    }
  }

  // False when the name was taken, or another process took the folder for one that was left behind before it was locked.
  bool make_temporary() {
    temporary_ = new_partial_path(destination_);
    if (::mkdir(temporary_.c_str(), 0777) != 0) {
      if (errno == EEXIST) return false;
      throw FileError(destination_.string() + ": its folder does not accept new ones: " + std::strerror(errno));
    }
    descriptor_ = ::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor_ < 0) {
      if (errno == ENOENT) return false;
      const int error = errno;
      ::rmdir(temporary_.c_str());
      throw FileError(destination_.string() + ": cannot be created: " + std::strerror(error));
    }
    ::flock(descriptor_, LOCK_EX | LOCK_NB);
    struct stat locked {}, there {};
    if (::fstat(descriptor_, &locked) == 0 && ::lstat(temporary_.c_str(), &there) == 0 && locked.st_ino == there.st_ino) return true;
    ::close(descriptor_);
    return false;
  }

  void refuse_unless_replaceable() const {
    std::error_code error;
    if (!fs::exists(destination_, error)) return;
    if (!fs::is_directory(destination_, error)) throw FileError(destination_.string() + ": exists and is not a folder");
    for (const fs::directory_entry& entry : fs::directory_iterator(destination_, error)) {
      if (if_exists_ == IfExists::refuse) {
        throw FileError(destination_.string() +
                        ": exists and is not empty; choose another name or pass --force to replace the checkpoint in it");
      }
      const std::string name = entry.path().filename().string();
      const bool of_a_checkpoint = name == "config.json" || name == "model.safetensors.index.json" || name.ends_with(".safetensors");
      if (!of_a_checkpoint || entry.is_directory(error)) {
        throw FileError(destination_.string() + ": holds \"" + name +
                        "\", which is no part of a checkpoint, and is not replaced; remove it first");
      }
    }
    if (error) throw FileError(destination_.string() + ": cannot be read (" + error.message() + ")");
  }

  fs::path destination_;
  fs::path temporary_;
  int descriptor_ = -1;  // of the temporary folder, locked
  IfExists if_exists_;
};

void refuse_small_disk(const fs::path& folder, const ModelConfig& config) {
  const std::uint64_t needed = static_cast<std::uint64_t>(parameter_count(config)) * sizeof(Bfloat16Bits);
  std::error_code error;
  const fs::space_info space = fs::space(folder, error);
  if (!error && space.available < needed) {
    throw FileError(folder.parent_path().string() + ": has " + std::to_string(space.available) + " bytes free, the weights need " +
                    std::to_string(needed));
  }
}

}  // namespace

TensorValues values_of(const Checkpoint& checkpoint) {
  auto tensors = std::make_shared<std::map<std::string, const Tensor<Bfloat16Bits>*>>();
  for_each_tensor(checkpoint, [&](const TensorSpec& spec, const Tensor<Bfloat16Bits>& tensor) { tensors->emplace(spec.name, &tensor); });
  return [tensors](const TensorSpec& spec, std::int64_t first, std::span<Bfloat16Bits> out) {
    std::copy_n(tensors->at(spec.name)->data.begin() + first, out.size(), out.begin());
  };
}

void write_checkpoint(const fs::path& folder, const ModelConfig& config, const TensorValues& values,
                      const CheckpointWriteOptions& options) {
  PendingFolder pending(folder, options.if_exists);
  refuse_small_disk(pending.path(), config);
  const std::vector<std::vector<TensorSpec>> shards = shards_of(config, options.shard_bytes);
  ordered_json weight_map = ordered_json::object();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_shard(pending.path() / name, shards[i], values, options.metadata);
    for (const TensorSpec& tensor : shards[i]) weight_map[tensor.name] = name;
  }
  if (shards.size() > 1) {
    const ordered_json index{{"metadata", {{"total_size", parameter_count(config) * std::int64_t{sizeof(Bfloat16Bits)}}}},
                             {"weight_map", weight_map}};
    write_text(pending.path() / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  write_text(pending.path() / "config.json", config_text(config));
  pending.commit();
}

}  // namespace loopgauge::harness
