// SPDX-License-Identifier: Apache-2.0
#include "models/handoff/descriptor.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <functional>

#include <nlohmann/json.hpp>

#include "models/handoff/bytes.hpp"
#include "models/sha256.hpp"

namespace loopgauge::handoff {
namespace {

constexpr std::string_view kMagic = "LGPDDESC";

[[noreturn]] void refuse(const std::string& field, const std::string& sentence) {
  throw HandoffError("descriptor: " + field + " " + sentence);
}

// The shortest decimal that reads back as the value.
template <class Real>
std::string number_text(Real value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::int32_t ranged(ByteReader& in, const std::string& field, std::int64_t least, std::int64_t most) {
  const auto value = in.integer<std::uint32_t>();
  if (value < least || value > most) {
    refuse(field, std::to_string(value) + " is not between " + std::to_string(least) + " and " + std::to_string(most));
  }
  return static_cast<std::int32_t>(value);
}

template <class Enum>
Enum one_of(ByteReader& in, const std::string& field, std::uint8_t least, std::uint8_t most) {
  const auto value = in.integer<std::uint8_t>();
  if (value < least || value > most)
    refuse(field, "code " + std::to_string(value) + " is not known to version " + std::to_string(kDescriptorVersion));
  return static_cast<Enum>(value);
}

std::string prompt_digest(const std::vector<std::int32_t>& prompt) {
  ByteWriter words;
  for (const std::int32_t token : prompt) words.integer(token);
  Sha256 hash;
  hash.update(words.written().data(), words.size());
  return hash.hex_digest();
}

ElementType element_of(Profile profile) { return profile == Profile::double_precision ? ElementType::float64 : ElementType::bfloat16; }

// The text is that of EffectiveConfig::canonical_json(), as far as fields say the same.
void check_configuration(const Descriptor& d) {
  const nlohmann::json json = nlohmann::json::parse(d.configuration, nullptr, false);
  if (json.is_discarded() || !json.is_object()) refuse("configuration", "is no JSON object");
  if (json.dump() != d.configuration) refuse("configuration", "is not in its canonical spelling: keys in order, no spaces");
  const auto check = [&](const char* place, const nlohmann::json& field) {
    const nlohmann::json::json_pointer pointer(place);
    const bool there = json.contains(pointer);
    if (there && json.at(pointer) == field) return;
    refuse("configuration", "says " + (there ? json.at(pointer).dump() : std::string("nothing")) + " at " + place + ", the field says " + field.dump());
  };
  check("/loops", d.loops);
  check("/window", d.window);
  check("/kv_residual_quantization/enabled", d.quantized);
  check("/kv_residual_quantization/policy", to_string(d.policy));
  check("/kv_residual_quantization/timing", to_string(d.timing));
  check("/kv_residual_quantization/flush", to_string(d.flush));
  check("/kv_residual_quantization/tail", d.tail);
  check("/kv_residual_quantization/bits", d.code_bits);
  check("/kv_residual_quantization/group", d.k_group_size);
  const bool selects = std::any_of(d.retention_bp.begin(), d.retention_bp.end(), [](std::int32_t share) { return share != kBasisPoints; });
  if (selects) check("/token_sparse_prefill/enabled", true);
  const nlohmann::json::json_pointer selecting("/token_sparse_prefill/enabled");
  if (json.contains(selecting) && json.at(selecting) == true) check("/token_sparse_prefill/retention_bp", d.retention_bp);
}

// "kv_residual_quantization.tail is 64, here it is 32".
std::string configuration_difference(const std::string& found, const std::string& expected) {
  if (found == expected) return {};
  const nlohmann::json a = nlohmann::json::parse(found, nullptr, false), b = nlohmann::json::parse(expected, nullptr, false);
  if (a.is_discarded() || b.is_discarded() || !a.is_object() || !b.is_object()) return "configuration is no JSON object";
  const std::function<std::string(const nlohmann::json&, const nlohmann::json&, const std::string&)> differing =
      [&](const nlohmann::json& x, const nlohmann::json& y, const std::string& path) -> std::string {
    if (x == y) return {};
    if (!x.is_object() || !y.is_object()) return path + " is " + x.dump() + ", here it is " + y.dump();
    for (const auto& [key, value] : y.items()) {
      const std::string inner = path + "." + key;
      if (!x.contains(key)) return inner + " is absent, here it is " + value.dump();
      if (std::string text = differing(x.at(key), value, inner); !text.empty()) return text;
    }
    for (const auto& [key, value] : x.items()) {
      if (!y.contains(key)) return path + "." + key + " is " + value.dump() + ", which is no setting here";
    }
    return {};
  };
  const std::string text = differing(a, b, "configuration");
  return text.empty() ? "configuration has another spelling" : text;
}

}  // namespace

std::string printable(std::string text) {
  for (char& c : text) c = c < ' ' || c > '~' ? '?' : c;
  return text;
}

std::vector<std::byte> sha256_bytes(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data.data(), data.size());
  return from_hexadecimal(hash.hex_digest());
}

std::vector<std::byte> from_hexadecimal(const std::string& digits) {
  const auto value = [&](char digit) -> unsigned {
    if (digit >= '0' && digit <= '9') return static_cast<unsigned>(digit - '0');
    if (digit >= 'a' && digit <= 'f') return static_cast<unsigned>(digit - 'a' + 10);
    throw InternalError("'" + digits + "' is no lower-case hexadecimal text");
  };
  if (digits.size() % 2 != 0) throw InternalError("'" + digits + "' is no whole number of bytes");
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2) bytes.push_back(static_cast<std::byte>(value(digits[i]) << 4 | value(digits[i + 1])));
  return bytes;
}

std::string to_hexadecimal(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<unsigned>(byte) >> 4];
    text += "0123456789abcdef"[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

std::size_t element_bytes(ElementType type) { return type == ElementType::bfloat16 ? 2 : 8; }
std::string_view to_string(ElementType type) { return type == ElementType::bfloat16 ? "bfloat16" : "float64"; }

Descriptor make_descriptor(const ModelConfig& model, const std::string& model_sha256, const EffectiveConfig& config, int request_index,
                           const TraceRequest& request, Profile profile) {
  Descriptor d;
  d.model_sha256 = model_sha256;
  d.prompt_sha256 = prompt_digest(request.prompt);
  d.rms_norm_eps = model.rms_norm_eps;
  d.rope_theta = model.rope_theta;
  d.layers = model.layers;
  d.loops = config.loops();
  d.heads = model.heads;
  d.head_dim = model.head_dim;
  d.hidden = model.hidden;
  d.vocab = model.vocab;
  d.prompt_length = request.prompt_length();
  d.encoded_frontier = encoded_frontier(config, d.prompt_length, d.prompt_length);
  d.window = config.window();
  d.tail = config.q().tail;
  if (config.selects_tokens()) std::copy(config.t().retention_bp.begin(), config.t().retention_bp.end(), d.retention_bp.begin());
  d.element = element_of(profile);
  d.profile = profile;
  d.quantized = config.q().enabled;
  d.policy = config.q().policy;
  d.timing = config.q().timing;
  d.flush = config.q().flush;
  d.request = request_index;
  d.configuration = config.canonical_json();
  return d;
}

std::vector<std::byte> serialize(const Descriptor& d) {
  ByteWriter out;
  out.text(kMagic);
  out.integer(kDescriptorVersion);
  out.integer(static_cast<std::uint32_t>(kDescriptorFixedBytes + d.configuration.size() + kChecksumBytes));
  out.bytes(from_hexadecimal(d.model_sha256));
  out.bytes(from_hexadecimal(d.prompt_sha256));
  for (const std::int32_t value :
       {d.layers, d.loops, d.heads, d.head_dim, d.hidden, d.vocab, d.prompt_length, d.encoded_frontier, d.window, d.tail}) {
    out.integer(value);
  }
  for (const std::int32_t retention : d.retention_bp) out.integer(retention);
  out.integer(static_cast<std::uint8_t>(d.element));
  out.integer(static_cast<std::uint8_t>(d.quantized));
  out.integer(d.code_bits);
  out.integer(static_cast<std::uint8_t>(d.depth));
  out.integer(static_cast<std::uint8_t>(d.k_group_axis));
  out.integer(static_cast<std::uint8_t>(d.v_group_axis));
  out.integer(d.k_group_size);
  out.integer(d.v_group_size);
  out.integer(static_cast<std::uint8_t>(d.policy));
  out.integer(static_cast<std::uint8_t>(d.timing));
  out.integer(static_cast<std::uint8_t>(d.flush));
  out.integer(static_cast<std::uint8_t>(d.profile));
  for (int i = 0; i < 2; ++i) out.integer(std::uint8_t{0});
  out.integer(d.request);
  out.integer(std::bit_cast<std::uint32_t>(d.rms_norm_eps));
  out.integer(std::bit_cast<std::uint64_t>(d.rope_theta));
  out.integer(static_cast<std::uint32_t>(d.configuration.size()));
  if (out.size() != kDescriptorFixedBytes) throw InternalError("a descriptor's fixed part has " + std::to_string(out.size()) + " bytes");
  out.text(d.configuration);
  out.bytes(sha256_bytes(out.written()));
  return out.take();
}

Descriptor parse_descriptor(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "descriptor");
  if (in.text(kMagic.size()) != kMagic) refuse("magic", "is not " + std::string(kMagic) + ": these bytes describe no handoff");
  if (const auto version = in.integer<std::uint32_t>(); version != kDescriptorVersion) {
    refuse("version", std::to_string(version) + " is not the version " + std::to_string(kDescriptorVersion) + " that can be read");
  }
  if (const auto stated = in.integer<std::uint32_t>(); stated != bytes.size()) {
    refuse("length", "says " + std::to_string(stated) + " bytes, there are " + std::to_string(bytes.size()));
  }
  if (bytes.size() < kDescriptorFixedBytes + kChecksumBytes) refuse("length", std::to_string(bytes.size()) + " bytes hold no descriptor");
  const auto covered = bytes.first(bytes.size() - kChecksumBytes);
  if (const auto sum = sha256_bytes(covered); !std::equal(sum.begin(), sum.end(), bytes.last(kChecksumBytes).begin())) {
    refuse("checksum", "does not fit: the bytes have changed since they were written");
  }
  Descriptor d;
  d.model_sha256 = to_hexadecimal(in.take(kChecksumBytes));
  d.prompt_sha256 = to_hexadecimal(in.take(kChecksumBytes));
  d.layers = ranged(in, "layers", 1, kMaximumLayers);
  d.loops = ranged(in, "loops", 1, kLoops);
  d.heads = ranged(in, "heads", 1, kMaximumHeads);
  d.head_dim = ranged(in, "head_dim", 2, kMaximumHeadDim);
  if (d.head_dim % 2 != 0) refuse("head_dim", std::to_string(d.head_dim) + " is odd");
  d.hidden = ranged(in, "hidden", 1, kMaximumHidden);
  d.vocab = ranged(in, "vocab", 1, kMaximumVocab);
  d.prompt_length = ranged(in, "prompt_length", 1, kMaximumPositions);
  d.encoded_frontier = ranged(in, "encoded_frontier", 0, d.prompt_length);
  d.window = ranged(in, "window", kGroupSize, std::int64_t{1} << 30);
  if (d.window % kGroupSize != 0) refuse("window", std::to_string(d.window) + " is not a multiple of 64");
  d.tail = ranged(in, "tail", 0, (std::int64_t{1} << 31) - 1);
  for (std::size_t r = 0; r < d.retention_bp.size(); ++r) {
    d.retention_bp[r] = ranged(in, "retention of loop " + std::to_string(r + 1), 1, r < 2 ? kBasisPoints : d.retention_bp[r - 1]);
    if (r < 2 && d.retention_bp[r] != kBasisPoints) refuse("retention of loop " + std::to_string(r + 1), "is not 10000");
  }
  d.element = one_of<ElementType>(in, "element type", 1, 2);
  d.quantized = one_of<std::uint8_t>(in, "quantized", 0, 1) != 0;
  if (d.code_bits = in.integer<std::uint8_t>(); d.code_bits != 4) refuse("code bits", std::to_string(d.code_bits) + " are not 4");
  d.depth = one_of<DepthRepresentation>(in, "depth representation", 1, 1);
  d.k_group_axis = one_of<GroupAxis>(in, "K group axis", 1, 1);
  d.v_group_axis = one_of<GroupAxis>(in, "V group axis", 2, 2);
  d.k_group_size = in.integer<std::uint16_t>();
  d.v_group_size = in.integer<std::uint16_t>();
  if (d.k_group_size != kGroupSize || d.v_group_size != kGroupSize) {
    refuse("group size", std::to_string(d.k_group_size) + " of K, " + std::to_string(d.v_group_size) + " of V are not 64");
  }
  d.policy = one_of<EncodingPolicy>(in, "policy", 0, 2);
  d.timing = one_of<EncodingTiming>(in, "timing", 0, 1);
  d.flush = one_of<FlushRule>(in, "flush", 0, 1);
  d.profile = one_of<Profile>(in, "profile", 0, 2);
  if (d.element != element_of(d.profile)) {
    refuse("element type", "is " + std::string(to_string(d.element)) + ", which is not that of profile " + std::string(to_string(d.profile)));
  }
  for (int i = 0; i < 2; ++i) {
    if (in.integer<std::uint8_t>() != 0) refuse("padding", "is not zero");
  }
  d.request = ranged(in, "request", 0, (std::int64_t{1} << 31) - 1);
  d.rms_norm_eps = std::bit_cast<float>(in.integer<std::uint32_t>());
  if (!(d.rms_norm_eps > 0 && d.rms_norm_eps < 1)) refuse("rms_norm_eps", number_text(d.rms_norm_eps) + " is not above 0 and below 1");
  d.rope_theta = std::bit_cast<double>(in.integer<std::uint64_t>());
  if (!(d.rope_theta > 1 && d.rope_theta <= kMaximumRopeTheta)) refuse("rope_theta", number_text(d.rope_theta) + " is not above 1, up to 1e12");
  const auto length = in.integer<std::uint32_t>();
  if (length > kMaximumConfigurationBytes || length != in.left() - kChecksumBytes) {
    refuse("configuration", "of " + std::to_string(length) + " bytes does not fit into the descriptor");
  }
  d.configuration = in.text(length);
  check_configuration(d);
  return d;
}

std::string first_difference(const Descriptor& found, const Descriptor& expected) {
  std::string text;
  const auto check = [&](const char* field, const auto& a, const auto& b) {
    if (!text.empty() || a == b) return;
    if constexpr (std::is_same_v<std::decay_t<decltype(a)>, std::string>) {
      text = std::string(field) + " is " + a + ", here it is " + b;
    } else if constexpr (std::is_floating_point_v<std::decay_t<decltype(a)>>) {
      text = std::string(field) + " is " + number_text(a) + ", here it is " + number_text(b);
    } else {
      text = std::string(field) + " is " + std::to_string(static_cast<long long>(a)) + ", here it is " +
             std::to_string(static_cast<long long>(b));
    }
  };
  const auto check_word = [&](const char* field, auto a, auto b) { check(field, std::string(to_string(a)), std::string(to_string(b))); };
  check("model fingerprint", found.model_sha256, expected.model_sha256);
  check("rms_norm_eps", found.rms_norm_eps, expected.rms_norm_eps);
  check("rope_theta", found.rope_theta, expected.rope_theta);
  check("layers", found.layers, expected.layers);
  check("loops", found.loops, expected.loops);
  check("heads", found.heads, expected.heads);
  check("head_dim", found.head_dim, expected.head_dim);
  check("hidden", found.hidden, expected.hidden);
  check("vocab", found.vocab, expected.vocab);
  check_word("profile", found.profile, expected.profile);
  check_word("element type", found.element, expected.element);
  if (text.empty()) text = configuration_difference(found.configuration, expected.configuration);
  check("window", found.window, expected.window);
  check("tail", found.tail, expected.tail);
  for (std::size_t r = 0; r < found.retention_bp.size(); ++r) check("retention", found.retention_bp[r], expected.retention_bp[r]);
  check("quantization", found.quantized, expected.quantized);
  check("code bits", found.code_bits, expected.code_bits);
  check_word("policy", found.policy, expected.policy);
  check_word("timing", found.timing, expected.timing);
  check_word("flush", found.flush, expected.flush);
  check("K group size", found.k_group_size, expected.k_group_size);
  check("V group size", found.v_group_size, expected.v_group_size);
  check("request", found.request, expected.request);
  check("prompt_length", found.prompt_length, expected.prompt_length);
  check("prompt fingerprint", found.prompt_sha256, expected.prompt_sha256);
  check("encoded_frontier", found.encoded_frontier, expected.encoded_frontier);
  if (text.empty() && !(found == expected)) text = "depth representation or group axes differ";
  return text;
}

}  // namespace loopgauge::handoff
