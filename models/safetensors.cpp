// SPDX-License-Identifier: Apache-2.0
#include "models/safetensors.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>

#include "models/error.hpp"
#include "models/strict_json.hpp"

namespace loopgauge {
namespace {

using nlohmann::json;

constexpr std::size_t kMaximumDimensions = 8;

// Bytes of one element; 0 when the type is not one of the format's whole-byte types.
std::uint64_t element_bytes(std::string_view dtype) {
  static const std::map<std::string_view, std::uint64_t> bytes{
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
      {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
  const auto found = bytes.find(dtype);
  return found == bytes.end() ? 0 : found->second;
}

std::string text_of(const SafetensorsEntry& entry) { return "tensor " + shown(entry.name); }

std::uint64_t unsigned_integer(const json& value, const std::string& label, const std::string& what) {
  if (!value.is_number_unsigned()) throw CheckpointError(label + ": " + what + " is " + shown(value) + ", expected an integer >= 0");
  return value.get<std::uint64_t>();
}

// Bytes that shape and element type need; throws when that does not fit 63 bits.
std::uint64_t needed_bytes(const SafetensorsEntry& entry, const std::string& label) {
  std::uint64_t bytes = element_bytes(entry.dtype);
  for (const std::int64_t extent : entry.shape) {
    const auto count = static_cast<std::uint64_t>(extent);
    if (count != 0 && bytes > std::numeric_limits<std::int64_t>::max() / count) {
      throw CheckpointError(label + ": " + text_of(entry) + " has a shape whose size in bytes overflows 64 bits");
    }
    bytes *= count;
  }
  return bytes;
}

SafetensorsEntry parse_entry(const std::string& name, const json& object, std::uint64_t data_begin, std::uint64_t data_bytes,
                             const std::string& label) {
  SafetensorsEntry entry;
  entry.name = name;
  const std::string what = text_of(entry);
  if (name.empty()) throw CheckpointError(label + ": a tensor has an empty name");
  if (!object.is_object()) throw CheckpointError(label + ": " + what + " is described by " + shown(object) + ", expected an object");
  for (const auto& [key, value] : object.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      throw CheckpointError(label + ": " + what + " has the unknown field " + shown(key));
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!object.contains(key)) throw CheckpointError(label + ": " + what + " has no field \"" + key + "\"");
  }

  const json& dtype = object["dtype"];
  if (!dtype.is_string() || element_bytes(dtype.get_ref<const std::string&>()) == 0) {
    throw CheckpointError(label + ": " + what + " has the unknown element type " + shown(dtype));
  }
  entry.dtype = dtype.get<std::string>();

  const json& shape = object["shape"];
  if (!shape.is_array()) throw CheckpointError(label + ": " + what + " has shape " + shown(shape) + ", expected an array");
  if (shape.size() > kMaximumDimensions) {
    throw CheckpointError(label + ": " + what + " has " + std::to_string(shape.size()) + " dimensions, at most " +
                          std::to_string(kMaximumDimensions) + " are read");
  }
  for (const json& extent : shape) {
    const std::uint64_t value = unsigned_integer(extent, label, "an extent of " + what);
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      throw CheckpointError(label + ": " + what + " has a shape whose size in bytes overflows 64 bits");
    }
    entry.shape.push_back(static_cast<std::int64_t>(value));
  }

  const json& offsets = object["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) {
    throw CheckpointError(label + ": " + what + " has data_offsets " + shown(offsets) + ", expected [begin, end]");
  }
  const std::uint64_t begin = unsigned_integer(offsets[0], label, "a data offset of " + what);
  const std::uint64_t end = unsigned_integer(offsets[1], label, "a data offset of " + what);
  if (begin > end) throw CheckpointError(label + ": " + what + " has data_offsets " + shown(offsets) + ", which end before they begin");
  if (end > data_bytes) {
    throw CheckpointError(label + ": " + what + " ends at data byte " + std::to_string(end) + ", but the file has only " +
                          std::to_string(data_bytes) + " data bytes; it is truncated or corrupt");
  }
  if (const std::uint64_t needed = needed_bytes(entry, label); needed != end - begin) {
    throw CheckpointError(label + ": " + what + " of type " + entry.dtype + " and shape " + shown(shape) + " needs " +
                          std::to_string(needed) + " bytes, data_offsets give it " + std::to_string(end - begin));
  }
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  return entry;
}

void check_metadata(const json& metadata, const std::string& label) {
  if (!metadata.is_object()) throw CheckpointError(label + ": __metadata__ is " + shown(metadata) + ", expected an object of strings");
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) throw CheckpointError(label + ": __metadata__." + shown(key) + " is " + shown(value) + ", expected a string");
  }
}

// Sorts by position and checks that the tensors follow each other without overlap or hole up to the end of the file.
void check_coverage(SafetensorsHeader& header, std::uint64_t file_bytes, const std::string& label) {
  std::sort(header.entries.begin(), header.entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t covered = header.data_begin;
  const SafetensorsEntry* previous = nullptr;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin < covered) throw CheckpointError(label + ": " + text_of(entry) + " overlaps " + text_of(*previous));
    if (entry.begin > covered) {
      throw CheckpointError(label + ": " + std::to_string(entry.begin - covered) + " bytes before " + text_of(entry) +
                            " belong to no tensor");
    }
    covered = entry.end;
    previous = &entry;
  }
  if (covered != file_bytes) {
    throw CheckpointError(label + ": the last " + std::to_string(file_bytes - covered) + " bytes of the file belong to no tensor");
  }
}

}  // namespace

std::uint64_t safetensors_header_bytes(std::span<const std::uint8_t> first_bytes, std::uint64_t file_bytes, const std::string& label) {
  if (file_bytes < 8 || first_bytes.size() < 8) {
    throw CheckpointError(label + ": has " + std::to_string(file_bytes) + " bytes, too few for a safetensors file");
  }
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | first_bytes[static_cast<std::size_t>(i)];
  if (length > file_bytes - 8) {
    throw CheckpointError(label + ": states a header of " + std::to_string(length) + " bytes, but only " + std::to_string(file_bytes - 8) +
                          " follow; it is truncated or not a safetensors file");
  }
  if (length > kMaximumSafetensorsHeaderBytes) {
    throw CheckpointError(label + ": states a header of " + std::to_string(length) + " bytes, at most " +
                          std::to_string(kMaximumSafetensorsHeaderBytes) + " are read");
  }
  return length;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::uint8_t> header, std::uint64_t file_bytes, const std::string& label) {
  const std::string_view text(reinterpret_cast<const char*>(header.data()), header.size());
  if (!text.starts_with('{')) throw CheckpointError(label + ": the header does not begin with '{'; it is not a safetensors file");
  const json document = parse_json_object(text, label);

  SafetensorsHeader result;
  result.data_begin = 8 + header.size();
  if (file_bytes < result.data_begin) throw CheckpointError(label + ": is shorter than its header");
  for (const auto& [name, object] : document.items()) {
    if (name == "__metadata__") {
      check_metadata(object, label);
    } else {
      result.entries.push_back(parse_entry(name, object, result.data_begin, file_bytes - result.data_begin, label));
    }
  }
  check_coverage(result, file_bytes, label);
  return result;
}

}  // namespace loopgauge
