// SPDX-License-Identifier: Apache-2.0
// Two passes: first every header is read and every name, shape, type and offset is checked; only then is memory taken, never more than
// the bytes that are really in the files. The second pass reads each file once, front to back, into the tensors and the fingerprint.
#include "models/checkpoint.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <new>
#include <span>
#include <system_error>

#include "models/checkpoint_files.hpp"
#include "models/checkpoint_layout.hpp"
#include "models/collected_faults.hpp"
#include "models/error.hpp"
#include "models/sha256.hpp"
#include "models/strict_json.hpp"

namespace loopgauge {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is read as it lies");

constexpr std::size_t kReadBytes = 1u << 20;

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

void read_data(std::vector<Shard>& shards, Checkpoint& checkpoint, std::vector<std::string>& faults) {
  std::map<std::string, Tensor<Bfloat16Bits>*> destination;
  checkpoint.layers.resize(static_cast<std::size_t>(checkpoint.config.layers));
  for_each_tensor(checkpoint, [&](const TensorSpec& spec, Tensor<Bfloat16Bits>& tensor) { destination.emplace(spec.name, &tensor); });

  Sha256 sha;
  std::map<std::string, Conversions> conversions;  // by stored element type
  for (Shard& shard : shards) {
    sha.update(shard.prefix.data(), shard.prefix.size());
    TensorReader reader(shard, sha);
    for (const SafetensorsEntry& entry : shard.header.entries) {
      const bool good = collect(faults, [&] {
        if (is_rotary_buffer(entry.name)) {
          reader.skip(entry);
        } else {
          reader.read(entry, *destination.at(entry.name), conversions[entry.dtype]);
        }
      });
      if (!good) shard.stream.seekg(static_cast<std::streamoff>(entry.end));  // the remaining tensors are still checked
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
  std::vector<std::string> faults;
  Checkpoint checkpoint = load_checkpoint(folder, faults);
  throw_first(faults);
  return checkpoint;
}

Checkpoint load_checkpoint(const std::filesystem::path& folder, std::vector<std::string>& faults) {
  Checkpoint checkpoint;
  const auto faultless = [&faults, start = faults.size()] { return faults.size() == start; };
  try {
    checkpoint.config = load_model_config(folder, checkpoint.notes, faults);
    if (std::error_code ignored; !std::filesystem::is_directory(folder, ignored)) return checkpoint;
    CheckpointFiles files = open_checkpoint_files(folder, checkpoint.notes, faults);
    // Tensors that seem missing or misshaped would only repeat what is wrong with the configuration or with a file.
    if (!faultless()) return checkpoint;
    check_tensors(files, checkpoint.config, folder, checkpoint.notes, faults);
    if (faultless()) read_data(files.shards, checkpoint, faults);
  } catch (const std::filesystem::filesystem_error& error) {
    faults.push_back(folder.string() + ": cannot be read (" + error.code().message() + ")");
  } catch (const std::bad_alloc&) {
    throw UnsupportedError(folder.string() + ": not enough memory to load " + std::to_string(parameter_count(checkpoint.config)) +
                           " parameters");
  }
  return checkpoint;
}

}  // namespace loopgauge
