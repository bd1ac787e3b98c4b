// SPDX-License-Identifier: Apache-2.0
#include "harness/io/digest.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "models/sha256.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::uint32_t kCanonicalNan = 0x7fc00000;

// Writes the serialization of digest.hpp into a hash, through a buffer so that the hash is fed in large pieces.
class Serializer {
 public:
  explicit Serializer(std::string_view group) {
    text(kDigestVersion);
    text("\n");
    text(group);
    text("\n");
  }

  void integer32(std::int32_t value) { word(static_cast<std::uint32_t>(value), 4); }
  void length(std::size_t count) { integer32(static_cast<std::int32_t>(count)); }

  template <class T>
  void tensor(std::span<const std::int64_t> shape, std::span<const T> values) {
    byte(tag<T>());
    if (values.empty()) {
      integer32(0);
      return;
    }
    length(shape.size());
    for (const std::int64_t extent : shape) word(static_cast<std::uint64_t>(extent), 8);
    for (const T value : values) element(value);
  }
  template <class T>
  void tensor(const Tensor<T>& values) {
    tensor<T>(values.shape, values.data);
  }
  template <class T>
  void vector(const std::vector<T>& values) {
    const auto size = static_cast<std::int64_t>(values.size());
    tensor<T>({&size, 1}, values);
  }

  std::string finish() {
    flush();
    return hash_.hex_digest();
  }

 private:
  template <class T>
  static constexpr std::uint8_t tag() {
    if constexpr (std::is_same_v<T, std::int32_t>) return 'i';
    if constexpr (std::is_same_v<T, std::uint8_t>) return 'b';
    if constexpr (std::is_same_v<T, float>) return 'f';
  }

  void element(std::int32_t value) { word(static_cast<std::uint32_t>(value), 4); }
  void element(std::uint8_t value) { byte(value); }
  void element(float value) { word(std::isnan(value) ? kCanonicalNan : std::bit_cast<std::uint32_t>(value), 4); }

  void text(std::string_view characters) {
    for (const char character : characters) byte(static_cast<std::uint8_t>(character));
  }
  void word(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) byte(static_cast<std::uint8_t>(value >> (8 * i)));
  }
  void byte(std::uint8_t value) {
    if (used_ == buffer_.size()) flush();
    buffer_[used_++] = value;
  }
  void flush() {
    hash_.update(buffer_.data(), used_);
    used_ = 0;
  }

  Sha256 hash_;
  std::array<std::uint8_t, 1 << 14> buffer_;
  std::size_t used_ = 0;
};

void write_codec(Serializer& out, const RequestRecord& request) {
  out.length(request.blocks.size());
  for (const CodecBlock& block : request.blocks) {
    out.integer32(block.positions.begin);
    out.integer32(block.positions.end);
    for (const CodecStream& stream : block.streams) {
      out.vector(stream.rows);
      out.length(stream.layers.size());
      for (const CodecLayer& layer : stream.layers) {
        out.tensor(layer.k_codes);
        out.tensor(layer.k_min);
        out.tensor(layer.k_scale);
        out.tensor(layer.v_codes);
        out.tensor(layer.v_min);
        out.tensor(layer.v_scale);
      }
    }
  }
}

// Steps without selection leave no trace, so that a record read back from a file has the digest of the one written.
void write_keys(Serializer& out, const RequestRecord& request) {
  out.length(static_cast<std::size_t>(
      std::count_if(request.keys.begin(), request.keys.end(), [](const StepKeys& keys) { return !keys.layers.empty(); })));
  for (std::size_t step = 0; step < request.keys.size(); ++step) {
    const std::vector<Tensor<std::int32_t>>& layers = request.keys[step].layers;
    if (layers.empty()) continue;
    out.length(step);
    out.length(layers.size());
    for (const Tensor<std::int32_t>& layer : layers) out.tensor(layer);
  }
}

void write_mass(Serializer& out, const RequestRecord& request) {
  out.length(static_cast<std::size_t>(
      std::count_if(request.keys.begin(), request.keys.end(), [](const StepKeys& keys) { return !keys.mass.empty(); })));
  for (std::size_t step = 0; step < request.keys.size(); ++step) {
    if (request.keys[step].mass.empty()) continue;
    out.length(step);
    out.tensor(request.keys[step].mass);
  }
}

using WriteRequest = void (*)(Serializer&, const RequestRecord&);

const std::array<std::pair<std::string_view, WriteRequest>, 12> kGroups{{
    {"tokens", [](Serializer& out, const RequestRecord& request) { out.vector(request.tokens); }},
    {"logits", [](Serializer& out, const RequestRecord& request) { out.tensor(request.logits); }},
    {"hidden",
     [](Serializer& out, const RequestRecord& request) {
       for (const Tensor<float>& loop : request.hidden) out.tensor(loop);
     }},
    {"gate", [](Serializer& out, const RequestRecord& request) { out.tensor(request.gate); }},
    {"exits", [](Serializer& out, const RequestRecord& request) { out.vector(request.exit_depths); }},
    {"scores",
     [](Serializer& out, const RequestRecord& request) {
       for (const std::vector<float>& loop : request.scores) out.vector(loop);
     }},
    {"active",
     [](Serializer& out, const RequestRecord& request) {
       for (const std::vector<std::int32_t>& loop : request.active) out.vector(loop);
     }},
    {"keys", write_keys},
    {"mass", write_mass},
    {"kv",
     [](Serializer& out, const RequestRecord& request) {
       out.length(request.kv.size());
       for (const KvPlane& plane : request.kv) {
         out.tensor(plane.k);
         out.tensor(plane.v);
       }
     }},
    {"encoded_frontier", [](Serializer& out, const RequestRecord& request) { out.vector(request.encoded_frontier); }},
    {"codec", write_codec},
}};

}  // namespace

std::map<std::string, std::string> digests(const RunRecord& record) {
  std::map<std::string, std::string> result;
  for (const auto& [name, write_request] : kGroups) {
    Serializer out(name);
    out.length(record.requests.size());
    for (const RequestRecord& request : record.requests) write_request(out, request);
    result.emplace(name, out.finish());
  }
  Sha256 all;
  for (const auto& [name, digest] : result) {
    const std::string line = name + " " + digest + "\n";
    all.update(line.data(), line.size());
  }
  result.emplace("all", all.hex_digest());
  return result;
}

}  // namespace loopgauge::harness
