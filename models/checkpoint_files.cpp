// SPDX-License-Identifier: Apache-2.0
#include "models/checkpoint_files.hpp"

#include <algorithm>
#include <set>
#include <span>
#include <string_view>
#include <system_error>

#include "models/checkpoint_layout.hpp"
#include "models/collected_faults.hpp"
#include "models/error.hpp"
#include "models/strict_json.hpp"

namespace loopgauge {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::uint64_t kMaximumIndexBytes = 16u << 20;
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

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

std::map<std::string, std::string> read_index(const fs::path& file) {
  const json document = read_json_object(file, kMaximumIndexBytes);
  const std::string label = file.string();
  const auto map = document.find("weight_map");
  if (map == document.end() || !map->is_object() || map->empty()) {
    throw CheckpointError(label + ": key \"weight_map\" is " + (map == document.end() ? "missing" : shown(*map)) +
                          "; expected an object of tensor names and shard files");
  }
  std::map<std::string, std::string> weights;
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
std::vector<std::string> find_files(const fs::path& folder, std::map<std::string, std::string>& weights, std::vector<std::string>& notes) {
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

}  // namespace

bool is_rotary_buffer(const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); }

CheckpointFiles open_checkpoint_files(const fs::path& folder, std::vector<std::string>& notes, std::vector<std::string>& faults) {
  CheckpointFiles files;
  std::vector<std::string> names;
  collect(faults, [&] { names = find_files(folder, files.indexed, notes); });
  for (const std::string& name : names) {
    collect(faults, [&] {
      check_location(folder / name, folder);
      files.shards.push_back(open_shard(folder / name));
    });
  }
  return files;
}

void check_tensors(const CheckpointFiles& files, const ModelConfig& config, const fs::path& folder, std::vector<std::string>& notes,
                   std::vector<std::string>& faults) {
  std::map<std::string, std::vector<std::int64_t>> expected;
  for (TensorSpec& spec : checkpoint_tensors(config)) expected.emplace(std::move(spec.name), std::move(spec.shape));

  std::map<std::string, fs::path> holder;  // tensor name -> file
  const auto check = [&](const Shard& shard, const SafetensorsEntry& entry) {
    const std::string where = shard.path.string() + ": tensor " + shown(entry.name);
    const auto [first, inserted] = holder.emplace(entry.name, shard.path.filename());
    if (!inserted) throw CheckpointError(where + " is also in " + first->second.string());
    if (!files.indexed.empty()) {
      const auto indexed = files.indexed.find(entry.name);
      if (indexed == files.indexed.end()) throw CheckpointError(where + " is not in " + kIndexFile);
      if (indexed->second != shard.path.filename())
        throw CheckpointError(where + " is here, but " + kIndexFile + " says " + indexed->second);
    }
    if (is_rotary_buffer(entry.name)) {
      notes.push_back(entry.name + ": ignored, the RoPE table is made from rope_theta");
      return;
    }
    const auto spec = expected.find(entry.name);
    if (spec == expected.end()) throw CheckpointError(where + " is unknown to the Ouro layout");
    if (entry.shape != spec->second) {
      throw CheckpointError(where + " has shape " + shown(json(entry.shape)) + ", config.json needs " + shown(json(spec->second)));
    }
    if (entry.dtype != "BF16" && entry.dtype != "F16" && entry.dtype != "F32") {
      throw CheckpointError(where + " has element type " + entry.dtype + "; supported: BF16, F16, F32");
    }
  };
  for (const Shard& shard : files.shards) {
    for (const SafetensorsEntry& entry : shard.header.entries) collect(faults, [&] { check(shard, entry); });
  }

  for (const auto& [tensor, shard] : files.indexed) {
    if (holder.contains(tensor)) continue;
    faults.push_back((folder / shard).string() + ": tensor " + shown(tensor) + " is missing, although " + kIndexFile + " places it here");
  }
  for (const auto& [tensor, shape] : expected) {
    if (holder.contains(tensor) || files.indexed.contains(tensor)) continue;
    const fs::path where = files.shards.size() == 1 ? files.shards[0].path : folder;
    faults.push_back(where.string() + ": tensor \"" + tensor + "\" is missing");
  }
}

}  // namespace loopgauge
