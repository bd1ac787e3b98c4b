// SPDX-License-Identifier: Apache-2.0
// Two passes: first every header is read and every name, shape, type and offset is checked; only then is memory taken, never more than
// the bytes that are really in the files. The second pass reads each file once, front to back, into the tensors and the fingerprint.
#include "models/checkpoint.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <new>
#include <set>
#include <span>
#include <system_error>

#include "models/checkpoint_layout.hpp"
#include "models/error.hpp"
#include "models/safetensors.hpp"
#include "models/sha256.hpp"
#include "models/strict_json.hpp"

namespace loopgauge {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is read as it lies");

constexpr std::uint64_t kMaximumIndexBytes = 16u << 20;
constexpr std::size_t kReadBytes = 1u << 20;
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

struct Shard {
  fs::path path;
  std::ifstream stream;
  std::vector<std::uint8_t> prefix;  // length and header, as read
  SafetensorsHeader header;
};

// tensor name -> shard file name; empty for a single-file checkpoint
using WeightMap = std::map<std::string, std::string>;

bool inside(const fs::path& file, const fs::path& folder) {
  const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
  return end == folder.end() && rest != file.end();
}

// A shard may be a symbolic link, but only to a file of the folder, or, in a Hugging Face cache, from `snapshots/<revision>` to `blobs`.
void check_location(const fs::path& file, const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(file, error)) throw CheckpointError(file.string() + ": no such file");
  const fs::path target = fs::canonical(file, error);
  if (error) throw CheckpointError(file.string() + ": cannot be resolved (" + error.message() + ")");
  const fs::path home = fs::canonical(folder, error);
  if (error) throw CheckpointError(folder.string() + ": cannot be resolved (" + error.message() + ")");
  const fs::path snapshots = home.parent_path();
  const bool in_cache = snapshots.filename() == "snapshots" && inside(target, snapshots.parent_path() / "blobs");
  if (!inside(target, home) && !in_cache) {
    throw CheckpointError(file.string() + ": is a link to " + target.string() + ", outside the checkpoint folder");
  }
  if (!fs::is_regular_file(target, error)) throw CheckpointError(file.string() + ": not a regular file");
}

WeightMap read_index(const fs::path& file) {
  const json document = read_json_object(file, kMaximumIndexBytes);
  const std::string label = file.string();
  const auto map = document.find("weight_map");
  if (map == document.end() || !map->is_object() || map->empty()) {
    throw CheckpointError(label + ": key \"weight_map\" is " + (map == document.end() ? "missing" : shown(*map)) +
                          "; expected an object of tensor names and shard files");
  }
  WeightMap weights;
  for (const auto& [tensor, shard] : map->items()) {
    const std::string name = shard.is_string() ? shard.get<std::string>() : "";
    const bool plain = name.find_first_of(std::string("/\\:\0", 4)) == std::string::npos && !name.starts_with('.');
    if (!plain || !name.ends_with(".safetensors")) {
      throw CheckpointError(label + ": tensor " + shown(tensor) + " is in shard " + shown(shard) +
                            "; expected the plain name of a .safetensors file in the same folder");
    }
    weights.emplace(tensor, name);
  }
  return weights;
}

// The files to read, in file name order, and the index, where there is one.
std::vector<std::string> find_files(const fs::path& folder, WeightMap& weights, std::vector<std::string>& notes) {
  const bool single = fs::exists(folder / kSingleFile);
  std::set<std::string> names;
  if (fs::exists(folder / kIndexFile)) {
    weights = read_index(folder / kIndexFile);
    for (const auto& [tensor, shard] : weights) names.insert(shard);
    if (single && !names.contains(kSingleFile)) {
      throw CheckpointError(folder.string() + ": has both " + kSingleFile + " and " + kIndexFile +
                            ", which does not name it; remove the one that is not meant");
    }
  } else if (single) {
    names.insert(kSingleFile);
  } else {
    throw CheckpointError(folder.string() + ": has neither " + kSingleFile + " nor " + kIndexFile);
  }
  std::set<std::string> ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors" && !names.contains(entry.path().filename().string())) {
      ignored.insert(entry.path().filename().string());
    }
  }
  for (const std::string& name : ignored) notes.push_back(shown(name) + ": not part of the checkpoint and ignored");
  return {names.begin(), names.end()};
}

Shard open_shard(const fs::path& path) {
  const std::string label = path.string();
  std::error_code error;
  const std::uintmax_t file_bytes = fs::file_size(path, error);
  if (error) throw CheckpointError(label + ": cannot read its size (" + error.message() + ")");
  Shard shard{path, std::ifstream(path, std::ios::binary), {}, {}};
  const auto read_more = [&](std::uint64_t bytes) {
    const std::size_t old = shard.prefix.size();
    shard.prefix.resize(old + static_cast<std::size_t>(bytes));
    if (!shard.stream.read(reinterpret_cast<char*>(shard.prefix.data() + old), static_cast<std::streamsize>(bytes))) {
      throw CheckpointError(label + ": cannot be read");
    }
  };
  read_more(std::min<std::uintmax_t>(8, file_bytes));
  read_more(safetensors_header_bytes(shard.prefix, file_bytes, label));
  shard.header = parse_safetensors_header(std::span(shard.prefix).subspan(8), file_bytes, label);
  return shard;
}

// Recomputed from rope_theta when the model runs; old exports carry them all the same.
bool is_rotary_buffer(const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); }

void check_names_and_shapes(const std::vector<Shard>& shards, const WeightMap& weights, const ModelConfig& config, const fs::path& folder,
                            std::vector<std::string>& notes) {
  std::map<std::string, std::vector<std::int64_t>> expected;
  for (TensorSpec& spec : checkpoint_tensors(config)) expected.emplace(std::move(spec.name), std::move(spec.shape));
  std::map<std::string, const Shard*> holder;
  for (const Shard& shard : shards) {
    const std::string label = shard.path.string();
    for (const SafetensorsEntry& entry : shard.header.entries) {
      const std::string tensor = "tensor " + shown(entry.name);
      const auto [first, inserted] = holder.emplace(entry.name, &shard);
      if (!inserted) throw CheckpointError(label + ": " + tensor + " is also in " + first->second->path.filename().string());
      if (!weights.empty()) {
        const auto indexed = weights.find(entry.name);
        if (indexed == weights.end()) throw CheckpointError(label + ": " + tensor + " is not in " + kIndexFile);
        if (indexed->second != shard.path.filename().string()) {
          throw CheckpointError(label + ": " + tensor + " is here, but " + kIndexFile + " says " + indexed->second);
        }
      }
      if (is_rotary_buffer(entry.name)) {
        notes.push_back(entry.name + ": ignored, the RoPE table is made from rope_theta");
        continue;
      }
      const auto spec = expected.find(entry.name);
      if (spec == expected.end()) throw CheckpointError(label + ": " + tensor + " is unknown to the Ouro layout");
      if (entry.shape != spec->second) {
        throw CheckpointError(label + ": " + tensor + " has shape " + shown(json(entry.shape)) + ", config.json needs " +
                              shown(json(spec->second)));
      }
      if (entry.dtype != "BF16" && entry.dtype != "F16" && entry.dtype != "F32") {
        throw CheckpointError(label + ": " + tensor + " has element type " + entry.dtype + "; supported: BF16, F16, F32");
      }
    }
  }
  for (const auto& [tensor, shard] : weights) {
    if (!holder.contains(tensor))
      throw CheckpointError((folder / shard).string() + ": tensor " + shown(tensor) + " is missing, although " + kIndexFile +
                            " places it here");
  }
  for (const auto& [name, shape] : expected) {
    if (holder.contains(name)) continue;
    const std::string where = shards.size() == 1 ? shards[0].path.string() : folder.string();
    throw CheckpointError(where + ": tensor \"" + name + "\" is missing");
  }
}

float float_of_half(std::uint16_t bits) {
  const float magnitude = (bits & 0x7c00) == 0
                              ? std::ldexp(static_cast<float>(bits & 0x3ff), -24)
                              : std::bit_cast<float>((static_cast<std::uint32_t>(bits & 0x7fff) << 13) + ((127u - 15u) << 23));
  const bool special = (bits & 0x7c00) == 0x7c00;
  return std::copysign(special ? INFINITY : magnitude, (bits & 0x8000) != 0 ? -1.0f : 1.0f);
}

// Round to nearest, ties to even; a value above the largest BF16 becomes infinite.
Bfloat16Bits bfloat16_of_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<Bfloat16Bits>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

bool is_finite(Bfloat16Bits bits) { return (bits & 0x7f80) != 0x7f80; }

struct Conversions {
  std::int64_t tensors = 0, elements = 0, changed = 0;
  std::string first;
};

class TensorReader {
 public:
  TensorReader(Shard& shard, Sha256& sha) : shard_(shard), sha_(sha), buffer_(kReadBytes) {}

  void skip(const SafetensorsEntry& entry) {
    for_each_chunk(entry, [](std::span<const std::uint8_t>, std::int64_t) {});
  }

  void read(const SafetensorsEntry& entry, Tensor<Bfloat16Bits>& tensor, Conversions& conversions) {
    tensor = Tensor<Bfloat16Bits>(entry.shape);
    Bfloat16Bits* out = tensor.data.data();
    for_each_chunk(entry, [&](std::span<const std::uint8_t> bytes, std::int64_t offset) {
      if (entry.dtype == "F32") {
        convert<float>(entry, bytes, offset / 4, out, conversions, [](float x) { return x; });
      } else if (entry.dtype == "F16") {
        convert<std::uint16_t>(entry, bytes, offset / 2, out, conversions, float_of_half);
      } else {
        std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::uint8_t*>(out) + offset);
        for (std::int64_t i = offset / 2; i < (offset + std::ssize(bytes)) / 2; ++i) {
          if (!is_finite(out[i])) refuse(entry, i, "is not finite");
        }
      }
    });
    if (entry.dtype == "BF16") return;
    if (conversions.tensors++ == 0) conversions.first = entry.name;
    conversions.elements += std::ssize(tensor.data);
  }

 private:
  template <class Visit>
  void for_each_chunk(const SafetensorsEntry& entry, Visit visit) {
    for (std::uint64_t at = entry.begin; at < entry.end;) {
      const std::size_t bytes = static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), entry.end - at));
      if (!shard_.stream.read(reinterpret_cast<char*>(buffer_.data()), static_cast<std::streamsize>(bytes))) {
        throw CheckpointError(shard_.path.string() + ": tensor " + shown(entry.name) +
                              " cannot be read; the file changed or the disk failed");
      }
      const auto chunk = std::span<const std::uint8_t>(buffer_).first(bytes);
      sha_.update(chunk.data(), chunk.size());
      visit(chunk, static_cast<std::int64_t>(at - entry.begin));
      at += bytes;
    }
  }

  template <class Stored, class ToFloat>
  void convert(const SafetensorsEntry& entry, std::span<const std::uint8_t> bytes, std::int64_t first, Bfloat16Bits* out,
               Conversions& conversions, ToFloat to_float) {
    for (std::size_t i = 0; i < bytes.size() / sizeof(Stored); ++i) {
      std::array<std::uint8_t, sizeof(Stored)> raw;
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(i * sizeof(Stored)), sizeof(Stored), raw.begin());
      const float value = to_float(std::bit_cast<Stored>(raw));
      const std::int64_t index = first + static_cast<std::int64_t>(i);
      if (!std::isfinite(value)) refuse(entry, index, "is not finite");
      out[index] = bfloat16_of_float(value);
      if (!is_finite(out[index])) refuse(entry, index, "is too large for BF16");
      if (std::bit_cast<float>(std::uint32_t{out[index]} << 16) != value) ++conversions.changed;
    }
  }

  [[noreturn]] void refuse(const SafetensorsEntry& entry, std::int64_t index, const char* fault) const {
    throw CheckpointError(shard_.path.string() + ": tensor " + shown(entry.name) + " element " + std::to_string(index) + " (flat index) " +
                          fault);
  }

  Shard& shard_;
  Sha256& sha_;
  std::vector<std::uint8_t> buffer_;
};

void read_data(std::vector<Shard>& shards, Checkpoint& checkpoint) {
  std::map<std::string, Tensor<Bfloat16Bits>*> destination;
  checkpoint.layers.resize(static_cast<std::size_t>(checkpoint.config.layers));
  for_each_tensor(checkpoint, [&](const TensorSpec& spec, Tensor<Bfloat16Bits>& tensor) { destination.emplace(spec.name, &tensor); });

  Sha256 sha;
  std::map<std::string, Conversions> conversions;  // by stored element type
  for (Shard& shard : shards) {
    sha.update(shard.prefix.data(), shard.prefix.size());
    TensorReader reader(shard, sha);
    for (const SafetensorsEntry& entry : shard.header.entries) {
      if (is_rotary_buffer(entry.name)) {
        reader.skip(entry);
      } else {
        reader.read(entry, *destination.at(entry.name), conversions[entry.dtype]);
      }
    }
  }
  checkpoint.sha256 = sha.hex_digest();
  for (const auto& [dtype, count] : conversions) {
    if (count.tensors == 0) continue;
    checkpoint.notes.push_back(count.first + (count.tensors > 1 ? " and " + std::to_string(count.tensors - 1) + " more tensors" : "") +
                               ": " + dtype + " rounded to BF16 (nearest, ties to even); " + std::to_string(count.changed) + " of " +
                               std::to_string(count.elements) + " values changed");
  }
}

}  // namespace

Checkpoint load_checkpoint(const std::filesystem::path& folder) {
  Checkpoint checkpoint;
  try {
    checkpoint.config = load_model_config(folder, checkpoint.notes);
    WeightMap weights;
    std::vector<Shard> shards;
    for (const std::string& name : find_files(folder, weights, checkpoint.notes)) {
      check_location(folder / name, folder);
      shards.push_back(open_shard(folder / name));
    }
    check_names_and_shapes(shards, weights, checkpoint.config, folder, checkpoint.notes);
    read_data(shards, checkpoint);
  } catch (const fs::filesystem_error& error) {
    throw CheckpointError(folder.string() + ": cannot be read (" + error.code().message() + ")");
  } catch (const std::bad_alloc&) {
    throw UnsupportedError(folder.string() + ": not enough memory to load " + std::to_string(parameter_count(checkpoint.config)) +
                           " parameters");
  }
  return checkpoint;
}

}  // namespace loopgauge
