// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/record_compare.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <span>
#include <type_traits>

#include "harness/compare/causal_order.hpp"
#include "harness/compare/float_bits.hpp"
#include "harness/compare/significant.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::array kGroups{RecordGroup::tokens, RecordGroup::exit_depths, RecordGroup::encoded_frontier,
                             RecordGroup::logits, RecordGroup::hidden,      RecordGroup::gate,
                             RecordGroup::scores, RecordGroup::active,      RecordGroup::keys,
                             RecordGroup::mass,   RecordGroup::codec,       RecordGroup::kv};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

bool same_number(float a, float b) { return same_float(a, b); }
template <class T>
bool same_number(T a, T b) {
  return a == b;
}

bool has_data(const RequestRecord& record, RecordGroup group) {
  const auto any = [](const auto& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return !t.empty(); });
  };
  switch (group) {
    case RecordGroup::tokens:
      return true;
    case RecordGroup::exit_depths:
      return !record.exit_depths.empty();
    case RecordGroup::encoded_frontier:
      return !record.encoded_frontier.empty();
    case RecordGroup::logits:
      return !record.logits.empty();
    case RecordGroup::hidden:
      return any(record.hidden);
    case RecordGroup::gate:
      return !record.gate.empty();
    case RecordGroup::scores:
      return any(record.scores);
    case RecordGroup::active:
      return any(record.active);
    case RecordGroup::keys:
      return std::any_of(record.keys.begin(), record.keys.end(), [](const StepKeys& s) { return !s.layers.empty(); });
    case RecordGroup::mass:
      return std::any_of(record.keys.begin(), record.keys.end(), [](const StepKeys& s) { return !s.mass.empty(); });
    case RecordGroup::codec:
      return !record.blocks.empty();
    case RecordGroup::kv:
      return !record.kv.empty();
  }
  return false;
}

// Compares one request and keeps, per group, the count and the earliest divergence.
class RequestComparer {
 public:
  struct Found {
    std::int64_t compared = 0, different = 0;
    std::optional<Divergence> first;
    CausalKey key;
  };

  RequestComparer(const RequestRecord& expected, const RequestRecord& actual, int request, int window)
      : e_(expected), a_(actual), request_(request), order_(expected, window), actual_order_(actual, window) {}

  const Found& found(RecordGroup group) const { return found_[static_cast<std::size_t>(group)]; }

  void compare(RecordGroup group) {
    switch (group) {
      case RecordGroup::tokens:
        return tokens();
      case RecordGroup::exit_depths:
        return per_token(group, "exit_depths", e_.exit_depths, a_.exit_depths, CausalOrder::kExitDepth, 1);
      case RecordGroup::encoded_frontier:
        return per_token(group, "encoded_frontier", e_.encoded_frontier, a_.encoded_frontier, CausalOrder::kFrontier, 0);
      case RecordGroup::logits:
        return logits();
      case RecordGroup::hidden:
        return hidden();
      case RecordGroup::gate:
        return gate();
      case RecordGroup::scores:
        return scores();
      case RecordGroup::active:
        return active();
      case RecordGroup::keys:
        return keys();
      case RecordGroup::mass:
        return mass();
      case RecordGroup::codec:
        return codec();
      case RecordGroup::kv:
        return kv();
    }
  }

 private:
  struct Place {
    int loop = 0, layer = -1, position = -1, head = -1;
  };

  std::string path(const std::string& tensor) const { return "requests/" + std::to_string(request_) + "/" + tensor; }

  void record(RecordGroup group, const CausalKey& key, const std::function<Divergence()>& make) {
    Found& found = found_[static_cast<std::size_t>(group)];
    ++found.different;
    if (found.first && !(key < found.key)) return;
    found.key = key;
    found.first = make();
    found.first->group = group;
    found.first->request = request_;
    found.first->key = key;
  }

  void shape_difference(RecordGroup group, const std::string& tensor, CausalKey key, const Place& place, const std::string& note) {
    record(group, key, [&] {
      Divergence d;
      d.tensor = path(tensor);
      d.loop = place.loop;
      d.layer = place.layer;
      d.position = place.position;
      d.head = place.head;
      d.ulps = kNoUlpDistance;
      d.note = note;
      return d;
    });
  }

  // Compares one innermost row; the tensor's name is built only where something differs.
  template <class T, class Name>
  void row(RecordGroup group, const Name& tensor, std::span<const T> expected, std::span<const T> actual, CausalKey key,
           const Place& place) {
    const std::size_t count = std::min(expected.size(), actual.size());
    Found& found = found_[static_cast<std::size_t>(group)];
    found.compared += static_cast<std::int64_t>(count);
    if (count > 0 && std::memcmp(expected.data(), actual.data(), count * sizeof(T)) == 0) return;
    for (std::size_t i = 0; i < count; ++i) {
      if (same_number(expected[i], actual[i])) continue;
      key.element = static_cast<std::int64_t>(i);
      record(group, key, [&] {
        Divergence d;
        d.tensor = path(tensor());
        d.loop = place.loop;
        d.layer = place.layer;
        d.position = place.position;
        d.head = place.head;
        d.element = static_cast<std::int64_t>(i);
        d.expected = static_cast<double>(expected[i]);
        d.actual = static_cast<double>(actual[i]);
        if constexpr (std::is_same_v<T, float>) {
          d.format = is_bfloat16(expected[i]) && is_bfloat16(actual[i]) ? UlpFormat::bfloat16 : UlpFormat::float32;
          d.ulps = ulp_distance(expected[i], actual[i], d.format);
        } else {
          d.ulps = kNoUlpDistance;
        }
        return d;
      });
    }
  }

  // True when both extents lists are equal; otherwise records the difference.
  template <class T>
  bool same_shape(RecordGroup group, const std::string& tensor, const Tensor<T>& expected, const Tensor<T>& actual, const CausalKey& key,
                  const Place& place) {
    if (expected.shape == actual.shape || (expected.empty() && actual.empty())) return true;
    shape_difference(group, tensor, key, place, "shape " + shape_text(actual.shape) + ", expected " + shape_text(expected.shape));
    return false;
  }

  // A tensor whose first axis is rows (which may differ in number) and whose other axes must agree.
  bool same_row_shape(RecordGroup group, const std::string& tensor, const Tensor<float>& expected, const Tensor<float>& actual,
                      const CausalKey& key, const Place& place) {
    const auto inner = [](const Tensor<float>& t) {
      return t.shape.empty() ? std::vector<std::int64_t>{} : std::vector<std::int64_t>(t.shape.begin() + 1, t.shape.end());
    };
    if (expected.empty() != actual.empty() || inner(expected) != inner(actual)) {
      shape_difference(group, tensor, key, place, "shape " + shape_text(actual.shape) + ", expected " + shape_text(expected.shape));
      return false;
    }
    return !expected.empty();
  }

  int common_positions() const { return e_.prompt_length + std::min(e_.fed, a_.fed); }

  void tokens() {
    if (e_.prompt_length != a_.prompt_length) {
      shape_difference(RecordGroup::tokens, "tokens", {}, {},
                       "prompt of " + std::to_string(a_.prompt_length) + " tokens, expected " + std::to_string(e_.prompt_length));
      return;
    }
    per_token(RecordGroup::tokens, "tokens", e_.tokens, a_.tokens, CausalOrder::kToken, 0);
    if (e_.tokens.size() != a_.tokens.size()) {
      const auto common = static_cast<int>(std::min(e_.tokens.size(), a_.tokens.size()));
      shape_difference(RecordGroup::tokens, "tokens", order_.completed(common, CausalOrder::kToken), {},
                       std::to_string(a_.tokens.size()) + " tokens, expected " + std::to_string(e_.tokens.size()));
    }
  }

  // One value per token or logits row. Entry j belongs to the completion of logits row j + row_offset.
  template <class T>
  void per_token(RecordGroup group, const char* tensor, const std::vector<T>& expected, const std::vector<T>& actual, int phase,
                 int row_offset) {
    const std::size_t count = std::min(expected.size(), actual.size());
    for (std::size_t j = 0; j < count; ++j) {
      const int row_index = static_cast<int>(j) + row_offset;
      const Place place{.position = e_.prompt_length + row_index - 1};
      const CausalKey key = group == RecordGroup::encoded_frontier ? order_.frontier(row_index) : order_.completed(row_index, phase);
      if (same_number(expected[j], actual[j])) {
        ++found_[static_cast<std::size_t>(group)].compared;
        continue;
      }
      row<T>(
          group, [&] { return std::string(tensor) + "[" + std::to_string(j) + "]"; }, std::span(&expected[j], 1), std::span(&actual[j], 1),
          key, place);
    }
  }

  void logits() {
    const Place none;
    if (!same_row_shape(RecordGroup::logits, "logits", e_.logits, a_.logits, order_.completed(0, CausalOrder::kLogits), none)) return;
    const auto rows = std::min(e_.logits.extent(0), a_.logits.extent(0));
    for (std::int64_t j = 0; j < rows; ++j) {
      const int index = static_cast<int>(j);
      row<float>(RecordGroup::logits, [&] { return "logits[" + std::to_string(j) + "]"; }, e_.logits.row(j), a_.logits.row(j),
                 order_.completed(index, CausalOrder::kLogits), {.position = e_.prompt_length + index - 1});
    }
  }

  void hidden() {
    for (int depth = 0; depth < kLoops; ++depth) {
      const auto d = static_cast<std::size_t>(depth);
      const std::string name = "hidden/loop" + std::to_string(depth + 1);
      const auto first = order_.computed(0, depth + 1, CausalOrder::kHidden);
      if (!same_row_shape(RecordGroup::hidden, name, e_.hidden[d], a_.hidden[d], first, {.loop = depth + 1})) continue;
      const auto rows = std::min({e_.hidden[d].extent(0), a_.hidden[d].extent(0), std::int64_t{common_positions()}});
      for (int p = 0; p < rows; ++p) {
        row<float>(RecordGroup::hidden, [&] { return name; }, e_.hidden[d].row(p), a_.hidden[d].row(p),
                   order_.computed(p, depth + 1, CausalOrder::kHidden), {.loop = depth + 1, .position = p});
      }
    }
  }

  void gate() {
    if (!same_row_shape(RecordGroup::gate, "gate", e_.gate, a_.gate, order_.computed(0, 1, CausalOrder::kGate), {})) return;
    const auto rows = std::min({e_.gate.extent(0), a_.gate.extent(0), std::int64_t{common_positions()}});
    for (int p = 0; p < rows; ++p) {
      for (int depth = 0; depth < kLoops; ++depth) {
        const auto d = static_cast<std::size_t>(depth);
        row<float>(RecordGroup::gate, [] { return std::string("gate"); }, e_.gate.row(p).subspan(d, 1), a_.gate.row(p).subspan(d, 1),
                   order_.computed(p, depth + 1, CausalOrder::kGate), {.loop = depth + 1, .position = p});
      }
    }
  }

  void scores() {
    for (int i = 0; i < 2; ++i) {
      const auto s = static_cast<std::size_t>(i);
      const int loop = i + 3;
      const std::string name = "scores/loop" + std::to_string(loop);
      if (e_.scores[s].size() != a_.scores[s].size()) {
        shape_difference(RecordGroup::scores, name, order_.computed(0, loop, CausalOrder::kScores), {.loop = loop},
                         std::to_string(a_.scores[s].size()) + " entries, expected " + std::to_string(e_.scores[s].size()));
        continue;
      }
      for (int p = 0; p < static_cast<int>(e_.scores[s].size()); ++p) {
        const auto at = static_cast<std::size_t>(p);
        row<float>(RecordGroup::scores, [&] { return name; }, std::span(&e_.scores[s][at], 1), std::span(&a_.scores[s][at], 1),
                   order_.computed(p, loop, CausalOrder::kScores), {.loop = loop, .position = p});
      }
    }
  }

  // Sets: a position that only one side selected is one difference, with 1 for selected and 0 for not.
  void active() {
    for (int i = 0; i < 2; ++i) {
      const auto s = static_cast<std::size_t>(i);
      const int loop = i + 3;
      const auto& e = e_.active[s];
      const auto& a = a_.active[s];
      const auto only_actual = std::count_if(a.begin(), a.end(), [&](int p) { return std::find(e.begin(), e.end(), p) == e.end(); });
      found_[static_cast<std::size_t>(RecordGroup::active)].compared += static_cast<std::int64_t>(e.size()) + only_actual;
      const auto report = [&](const std::vector<std::int32_t>& from, const std::vector<std::int32_t>& in, bool expected_has) {
        for (const int p : from) {
          if (std::find(in.begin(), in.end(), p) != in.end()) continue;
          record(RecordGroup::active, order_.computed(p, loop, CausalOrder::kActive), [&] {
            Divergence d;
            d.tensor = path("active/loop" + std::to_string(loop));
            d.loop = loop;
            d.position = p;
            d.expected = expected_has ? 1 : 0;
            d.actual = expected_has ? 0 : 1;
            d.ulps = kNoUlpDistance;
            d.note = expected_has ? "selected by expected only" : "selected by actual only";
            return d;
          });
        }
      };
      report(e, a, true);
      report(a, e, false);
      if (e.size() == a.size() && e != a && std::is_permutation(e.begin(), e.end(), a.begin())) {
        shape_difference(RecordGroup::active, "active/loop" + std::to_string(loop), order_.computed(0, loop, CausalOrder::kActive),
                         {.loop = loop}, "the same positions in another order");
      }
    }
  }

  void keys() {
    const std::size_t steps = std::min(e_.keys.size(), a_.keys.size());
    for (std::size_t j = 0; j < steps; ++j) {
      const int p = e_.prompt_length + static_cast<int>(j);
      const std::string step = "keys/step" + std::to_string(j);
      const auto& e = e_.keys[j].layers;
      const auto& a = a_.keys[j].layers;
      if (e.size() != a.size()) {
        shape_difference(RecordGroup::keys, step, order_.computed(p, 2, CausalOrder::kLayers, 0, 1), {.loop = 2, .position = p},
                         std::to_string(a.size()) + " layers with selected keys, expected " + std::to_string(e.size()));
        continue;
      }
      for (std::size_t l = 0; l < e.size(); ++l) {
        const int layer = static_cast<int>(l);
        const CausalKey key = order_.computed(p, 2, CausalOrder::kLayers, layer, 1);
        const std::string name = step + "/layer" + std::to_string(l);
        if (!same_shape(RecordGroup::keys, name, e[l], a[l], key, {.loop = 2, .layer = layer, .position = p}) || e[l].empty()) continue;
        for (int h = 0; h < e[l].extent(0); ++h) {
          CausalKey at = key;
          at.head = h;
          row<std::int32_t>(RecordGroup::keys, [&] { return name; }, e[l].row(h), a[l].row(h), at,
                            {.loop = 2, .layer = layer, .position = p, .head = h});
        }
      }
    }
  }

  void mass() {
    const std::size_t steps = std::min(e_.keys.size(), a_.keys.size());
    for (std::size_t j = 0; j < steps; ++j) {
      const int p = e_.prompt_length + static_cast<int>(j);
      const std::string name = "mass/step" + std::to_string(j);
      const auto& e = e_.keys[j].mass;
      const auto& a = a_.keys[j].mass;
      const CausalKey first = order_.computed(p, 2, CausalOrder::kLayers, 0, 2);
      if (!same_shape(RecordGroup::mass, name, e, a, first, {.loop = 2, .position = p}) || e.empty()) continue;
      for (int l = 0; l < e.extent(0); ++l) {
        for (int h = 0; h < e.extent(1); ++h) {
          CausalKey at = order_.computed(p, 2, CausalOrder::kLayers, l, 2);
          at.head = h;
          const auto i = static_cast<std::size_t>(h);
          row<float>(RecordGroup::mass, [&] { return name; }, e.row(l).subspan(i, 1), a.row(l).subspan(i, 1), at,
                     {.loop = 2, .layer = l, .position = p, .head = h});
        }
      }
    }
  }

  // One tensor [heads, n, width] of a sealed block; position(i) is the token behind index i of the middle axis.
  template <class T, class Position>
  void codec_tensor(const std::string& name, const Tensor<T>& e, const Tensor<T>& a, CausalKey key, int loop, int layer,
                    const Position& position) {
    if (!same_shape(RecordGroup::codec, name, e, a, key, {.loop = loop, .layer = layer}) || e.empty()) return;
    const auto n = e.extent(1);
    const auto width = static_cast<std::size_t>(e.extent(2));
    for (int h = 0; h < e.extent(0); ++h) {
      for (int i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(i) * width;
        key.position = position(i);
        key.head = h;
        row<T>(RecordGroup::codec, [&] { return name; }, e.row(h).subspan(at, width), a.row(h).subspan(at, width), key,
               {.loop = loop, .layer = layer, .position = key.position, .head = h});
      }
    }
  }

  void codec() {
    const std::size_t blocks = std::min(e_.blocks.size(), a_.blocks.size());
    if (e_.blocks.size() != a_.blocks.size()) {
      const auto& longer = e_.blocks.size() > a_.blocks.size() ? e_.blocks : a_.blocks;
      shape_difference(RecordGroup::codec, "codec", order_.sealed(longer[blocks].positions.end, CausalOrder::kCodec), {},
                       std::to_string(a_.blocks.size()) + " blocks, expected " + std::to_string(e_.blocks.size()));
    }
    for (std::size_t b = 0; b < blocks; ++b) {
      const CodecBlock& e = e_.blocks[b];
      const CodecBlock& a = a_.blocks[b];
      const std::string block = "codec/block" + std::to_string(b);
      const CausalKey start = order_.sealed(e.positions.end, CausalOrder::kCodec);
      if (e.positions != a.positions) {
        const auto range = [](const PositionRange& r) { return "[" + std::to_string(r.begin) + ", " + std::to_string(r.end) + ")"; };
        shape_difference(RecordGroup::codec, block, start, {.position = e.positions.begin},
                         "positions " + range(a.positions) + ", expected " + range(e.positions));
        continue;
      }
      for (int depth = 0; depth < kLoops; ++depth) {
        const int loop = depth + 1;
        const CodecStream& es = e.streams[static_cast<std::size_t>(depth)];
        const CodecStream& as = a.streams[static_cast<std::size_t>(depth)];
        const std::string stream = block + "/stream" + std::to_string(loop);
        CausalKey key = start;
        key.phase = CausalOrder::codec_phase(loop);
        key.layer = -1;  // the rows of a stream decide before any layer of it
        if (es.rows != as.rows || es.layers.size() != as.layers.size()) {
          shape_difference(
              RecordGroup::codec, stream + "/rows", key, {.loop = loop, .position = e.positions.begin},
              es.rows.size() != as.rows.size()
                  ? std::to_string(as.rows.size()) + " rows, expected " + std::to_string(es.rows.size())
                  : (es.rows != as.rows ? "other positions in the stream"
                                        : std::to_string(as.layers.size()) + " layers, expected " + std::to_string(es.layers.size())));
          continue;
        }
        const auto row_position = [&](int i) { return es.rows[static_cast<std::size_t>(i)]; };
        const auto group_position = [&](int i) { return es.rows[static_cast<std::size_t>(i * kGroupSize)]; };
        for (std::size_t l = 0; l < es.layers.size(); ++l) {
          const int layer = static_cast<int>(l);
          const std::string at = stream + "/layer" + std::to_string(l) + "/";
          const CodecLayer& el = es.layers[l];
          const CodecLayer& al = as.layers[l];
          key.layer = layer;
          codec_tensor(at + "k_min", el.k_min, al.k_min, key, loop, layer, group_position);
          codec_tensor(at + "k_scale", el.k_scale, al.k_scale, key, loop, layer, group_position);
          codec_tensor(at + "k_codes", el.k_codes, al.k_codes, key, loop, layer, row_position);
          codec_tensor(at + "v_min", el.v_min, al.v_min, key, loop, layer, row_position);
          codec_tensor(at + "v_scale", el.v_scale, al.v_scale, key, loop, layer, row_position);
          codec_tensor(at + "v_codes", el.v_codes, al.v_codes, key, loop, layer, row_position);
        }
      }
    }
  }

  void kv_tensor(const std::string& name, const Tensor<float>& e, const Tensor<float>& a, int loop, int layer) {
    if (e.empty() && a.empty()) return;  // a loop that the model does not have
    const Place place{.loop = loop, .layer = layer};
    const CausalKey first = order_.computed(0, loop, CausalOrder::kLayers, layer);
    if (e.shape.size() != 3 || a.shape.size() != 3 || e.extent(0) != a.extent(0) || e.extent(2) != a.extent(2)) {
      shape_difference(RecordGroup::kv, name, first, place, "shape " + shape_text(a.shape) + ", expected " + shape_text(e.shape));
      return;
    }
    const auto rows = std::min({e.extent(1), a.extent(1), std::int64_t{common_positions()}});
    const auto width = static_cast<std::size_t>(e.extent(2));
    for (int p = 0; p < rows; ++p) {
      // A position that only one run encoded differs from the encoding on.
      const bool only_actual = p >= order_.encoded() && p < actual_order_.encoded();
      const CausalKey position_key = (only_actual ? actual_order_ : order_).kv(p, loop, layer);
      for (int h = 0; h < e.extent(0); ++h) {
        CausalKey key = position_key;
        key.head = h;
        const auto at = static_cast<std::size_t>(p) * width;
        row<float>(RecordGroup::kv, [&] { return name; }, e.row(h).subspan(at, width), a.row(h).subspan(at, width), key,
                   {.loop = loop, .layer = layer, .position = p, .head = h});
      }
    }
  }

  void kv() {
    if (e_.kv.size() != a_.kv.size()) {
      shape_difference(RecordGroup::kv, "kv", {}, {}, std::to_string(a_.kv.size()) + " planes, expected " + std::to_string(e_.kv.size()));
      return;
    }
    for (std::size_t i = 0; i < e_.kv.size(); ++i) {
      const int layer = static_cast<int>(i) / kLoops;
      const int loop = static_cast<int>(i) % kLoops + 1;
      const std::string name = "kv/layer" + std::to_string(layer) + "/loop" + std::to_string(loop) + "/";
      kv_tensor(name + "k", e_.kv[i].k, a_.kv[i].k, loop, layer);
      kv_tensor(name + "v", e_.kv[i].v, a_.kv[i].v, loop, layer);
    }
  }

  const RequestRecord& e_;
  const RequestRecord& a_;
  int request_;
  CausalOrder order_, actual_order_;
  std::array<Found, kGroups.size()> found_;
};

}  // namespace

std::string_view to_string(RecordGroup group) {
  constexpr std::array<std::string_view, kGroups.size()> kNames{
      "tokens", "exit_depths", "encoded_frontier", "logits", "hidden", "gate", "scores", "active", "keys", "mass", "codec", "kv"};
  return kNames[static_cast<std::size_t>(group)];
}

std::string_view to_string(GroupStatus status) {
  constexpr std::array<std::string_view, 6> kNames{"equal", "different", "only in expected", "only in actual", "absent", "not compared"};
  return kNames[static_cast<std::size_t>(status)];
}

std::string Divergence::text() const {
  std::string line = tensor + ": request " + std::to_string(request);
  if (loop > 0) line += " loop " + std::to_string(loop);
  if (layer >= 0) line += " layer " + std::to_string(layer);
  if (position >= 0) line += " position " + std::to_string(position);
  if (head >= 0) line += " head " + std::to_string(head);
  if (element >= 0) line += " element " + std::to_string(element);
  if (!note.empty()) return line + ": " + note;
  line += ": " + significant(actual, 9) + ", expected " + significant(expected, 9);
  if (ulps != kNoUlpDistance) line += " (" + std::to_string(ulps) + (format == UlpFormat::bfloat16 ? " bfloat16" : " float32") + " ulp)";
  return line;
}

bool RecordComparison::identical() const {
  bool compared = false;
  for (const auto& group : groups) {
    if (group.status != GroupStatus::equal && group.status != GroupStatus::absent) return false;
    compared = compared || group.compared > 0;
  }
  return compared && !first;
}

std::int64_t RecordComparison::different() const {
  std::int64_t total = 0;
  for (const auto& group : groups) total += group.different;
  return total;
}

RecordComparison compare_records(const RunRecord& expected, const RunRecord& actual, int window) {
  if (window < 1) throw InternalError("comparison window of " + std::to_string(window) + " tokens");
  RecordComparison result;
  const std::size_t common = std::min(expected.requests.size(), actual.requests.size());
  std::vector<RequestComparer> comparers;
  comparers.reserve(common);
  for (std::size_t i = 0; i < common; ++i) {
    comparers.emplace_back(expected.requests[i], actual.requests[i], static_cast<int>(i), window);
  }
  std::vector<CausalKey> keys(common);
  result.requests.resize(std::max(expected.requests.size(), actual.requests.size()));

  for (const RecordGroup group : kGroups) {
    GroupComparison& summary = result.groups.emplace_back();
    summary.group = group;
    const auto in = [&](const RunRecord& record) {
      return std::any_of(record.requests.begin(), record.requests.end(), [&](const RequestRecord& r) { return has_data(r, group); });
    };
    const bool in_expected = in(expected);
    const bool in_actual = in(actual);
    if (group == RecordGroup::tokens && expected.requests.size() != actual.requests.size()) {
      Divergence missing;
      missing.tensor = "requests";
      missing.request = static_cast<int>(common);
      missing.ulps = kNoUlpDistance;
      missing.note = std::to_string(actual.requests.size()) + " requests, expected " + std::to_string(expected.requests.size());
      summary.different = 1;
      summary.status = GroupStatus::different;
      summary.first = result.requests[common] = missing;
    }
    if (!in_expected || !in_actual) {
      if (summary.different > 0) continue;  // the number of requests has said it
      summary.status = in_expected ? GroupStatus::only_expected : in_actual ? GroupStatus::only_actual : GroupStatus::absent;
      continue;
    }
    if (summary.different == 0) summary.status = GroupStatus::equal;
    bool left_out = false;
    for (std::size_t i = 0; i < common; ++i) {
      // Different prompts make every other tensor a different thing.
      if (group != RecordGroup::tokens && expected.requests[i].prompt_length != actual.requests[i].prompt_length) {
        left_out = true;
        continue;
      }
      comparers[i].compare(group);
      const auto& found = comparers[i].found(group);
      summary.compared += found.compared;
      summary.different += found.different;
      if (!found.first) continue;
      if (!summary.first || summary.first->request > found.first->request) summary.first = found.first;
      if (!result.requests[i] || found.key < keys[i]) {
        result.requests[i] = found.first;
        keys[i] = found.key;
      }
    }
    if (summary.different > 0) summary.status = GroupStatus::different;
    if (left_out && summary.compared == 0) summary.status = GroupStatus::not_compared;
  }
  for (const auto& first : result.requests) {
    if (first) {
      result.first = first;
      break;
    }
  }
  return result;
}

}  // namespace loopgauge::harness
