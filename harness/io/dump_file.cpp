// SPDX-License-Identifier: Apache-2.0
#include "harness/io/dump_file.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "harness/io/hdf5.hpp"
#include "harness/io/replaceable.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

// A file states the lowest version that has everything it holds: 2 has rounds of speculation.
constexpr std::int64_t kVersion = 2, kVersionWithoutRounds = 1;
constexpr std::int64_t kMaxRequests = 65536;
constexpr std::size_t kCompressFrom = std::size_t{1} << 14;  // elements; below, a chunk index costs more than it saves

std::string numbered(std::string_view stem, std::size_t number) { return std::string(stem) + std::to_string(number); }

// ---- writing ---------------------------------------------------------------------------------------------------------------

template <class T>
void write_tensor(const h5::Group& group, const std::string& name, const Tensor<T>& tensor) {
  static const h5::Storage fast{1, {}};  // BF16 values in float32 have two zero bytes: shuffled, the lightest deflate finds them
  if (!tensor.empty()) group.write(name, tensor, tensor.data.size() >= kCompressFrom ? fast : h5::kContiguous);
}

template <class T>
void write_vector(const h5::Group& group, const std::string& name, const std::vector<T>& values) {
  if (!values.empty()) group.write(name, values);
}

// [P + fed, 4], empty when the run did not count.
Tensor<std::uint8_t> executions(const RequestRecord& request) {
  if (request.executions.empty()) return {};
  Tensor<std::uint8_t> table({static_cast<std::int64_t>(request.executions.size() / kLoops), kLoops});
  table.data = request.executions;
  return table;
}

// [rounds, 4]: position, proposed, accepted, emitted.
constexpr int kRoundFields = 4;
Tensor<std::int32_t> rounds_table(const RequestRecord& request) {
  if (request.rounds.empty()) return {};
  Tensor<std::int32_t> table({static_cast<std::int64_t>(request.rounds.size()), kRoundFields});
  for (std::size_t i = 0; i < request.rounds.size(); ++i) {
    const SpeculationRound& round = request.rounds[i];
    const std::array<std::int32_t, kRoundFields> fields{round.position, round.proposed, round.accepted, round.emitted};
    std::copy(fields.begin(), fields.end(), table.row(static_cast<std::int64_t>(i)).begin());
  }
  return table;
}

class RequestWriter {
 public:
  RequestWriter(const h5::Group& group, const RequestRecord& request, const std::vector<std::string>& only)
      : group_(group), request_(request), only_(only) {}

  void write() const {
    group_.set_attribute("prompt_length", request_.prompt_length);
    group_.set_attribute("outcome", to_string(request_.outcome));
    group_.write("tokens", request_.tokens);
    group_.write("exit_depths", request_.exit_depths);
    group_.write("encoded_frontier", request_.encoded_frontier);
    write_tensor(group_, "executions", executions(request_));
    write_tensor(group_, "rounds", rounds_table(request_));
    if (wanted("logits")) write_tensor(group_, "logits", request_.logits);
    if (wanted("gate")) write_tensor(group_, "gate", request_.gate);
    if (wanted("hidden") && !request_.hidden[0].empty()) {
      const h5::Group hidden = group_.create_group("hidden");
      for (std::size_t loop = 0; loop < kLoops; ++loop) write_tensor(hidden, numbered("loop", loop + 1), request_.hidden[loop]);
    }
    write_selected_tokens();
    write_selected_keys();
    if (wanted("kv") && !request_.kv.empty()) write_kv();
    if (wanted("codec") && !request_.blocks.empty()) write_codec();
  }

 private:
  bool wanted(std::string_view name) const { return only_.empty() || std::find(only_.begin(), only_.end(), name) != only_.end(); }

  void write_selected_tokens() const {
    const bool any =
        !request_.scores[0].empty() || !request_.scores[1].empty() || !request_.active[0].empty() || !request_.active[1].empty();
    if (!any) return;
    for (std::size_t i = 0; i < 2; ++i) {
      if (wanted("scores")) write_vector(group_.require_group("scores"), numbered("loop", i + 3), request_.scores[i]);
      if (wanted("active")) write_vector(group_.require_group("active"), numbered("loop", i + 3), request_.active[i]);
    }
  }

  void write_selected_keys() const {
    for (std::size_t step = 0; step < request_.keys.size(); ++step) {
      const StepKeys& keys = request_.keys[step];
      if (wanted("mass") && !keys.mass.empty()) write_tensor(group_.require_group("mass"), numbered("step", step), keys.mass);
      if (!wanted("keys") || keys.layers.empty()) continue;
      const h5::Group out = group_.require_group(numbered("keys/step", step));
      for (std::size_t layer = 0; layer < keys.layers.size(); ++layer) write_tensor(out, numbered("layer", layer), keys.layers[layer]);
    }
  }

  void write_kv() const {
    for (std::size_t plane = 0; plane < request_.kv.size(); ++plane) {
      const h5::Group out = group_.require_group(numbered("kv/layer", plane / kLoops) + numbered("/loop", plane % kLoops + 1));
      write_tensor(out, "k", request_.kv[plane].k);
      write_tensor(out, "v", request_.kv[plane].v);
    }
  }

  void write_codec() const {
    const h5::Group codec = group_.create_group("codec");
    for (std::size_t b = 0; b < request_.blocks.size(); ++b) {
      const CodecBlock& block = request_.blocks[b];
      const h5::Group block_group = codec.create_group(numbered("block", b));
      block_group.set_attribute("begin", block.positions.begin);
      block_group.set_attribute("end", block.positions.end);
      for (std::size_t r = 0; r < kLoops; ++r) {
        const h5::Group stream = block_group.create_group(numbered("stream", r + 1));
        stream.write("rows", block.streams[r].rows);
        for (std::size_t l = 0; l < block.streams[r].layers.size(); ++l) {
          const CodecLayer& layer = block.streams[r].layers[l];
          const h5::Group out = stream.create_group(numbered("layer", l));
          write_tensor(out, "k_codes", layer.k_codes);
          write_tensor(out, "k_min", layer.k_min);
          write_tensor(out, "k_scale", layer.k_scale);
          write_tensor(out, "v_codes", layer.v_codes);
          write_tensor(out, "v_min", layer.v_min);
          write_tensor(out, "v_scale", layer.v_scale);
        }
      }
    }
  }

  const h5::Group& group_;
  const RequestRecord& request_;
  const std::vector<std::string>& only_;
};

void write_root_attributes(const h5::Group& root, const RunRecord& record, const EffectiveConfig& config, const std::string& case_id) {
  root.set_attribute("format", kDumpFormat);
  const bool speculated =
      std::any_of(record.requests.begin(), record.requests.end(), [](const RequestRecord& request) { return !request.rounds.empty(); });
  root.set_attribute("version", speculated ? kVersion : kVersionWithoutRounds);
  root.set_attribute("tool_version", LOOPGAUGE_VERSION);
  root.set_attribute("case", case_id);
  root.set_attribute("mode", record.mode);
  root.set_attribute("switches", config.switches());
  root.set_attribute("policy", to_string(config.q().policy));
  root.set_attribute("timing", to_string(config.q().timing));
  root.set_attribute("flush", to_string(config.q().flush));
  root.set_attribute("window", config.window());
  root.set_attribute("tail", config.q().tail);
  const std::vector<std::int64_t> retention(config.t().retention_bp.begin(), config.t().retention_bp.end());
  root.set_attribute("retention_bp", std::span<const std::int64_t>(retention));
  root.set_attribute("decode_key_bp", config.s().key_fraction_bp);
  root.set_attribute("exit", to_string(config.exit().mode));
  root.set_attribute("threshold", static_cast<double>(config.exit().threshold));
  root.set_attribute("min_loops", config.exit().min_loops);
  root.set_attribute("profile", record.profile);
  root.set_attribute("executor", record.executor);
  root.set_attribute("model_sha256", record.model_sha256);
  root.set_attribute("trace", record.trace);
  root.set_attribute("config", record.config_json);
}

// ---- reading ---------------------------------------------------------------------------------------------------------------

using Extents = std::vector<std::int64_t>;

// Refuses a dataset whose attribute `name` (positions or heads) lists anything but all of 0..extent-1.
void require_whole(const h5::Dataset& dataset, const std::string& name, std::int64_t extent) {
  if (!dataset.has_attribute(name)) return;
  const std::vector<std::int64_t> listed = dataset.int_array_attribute(name);
  bool whole = static_cast<std::int64_t>(listed.size()) == extent;
  for (std::size_t i = 0; whole && i < listed.size(); ++i) whole = listed[i] == static_cast<std::int64_t>(i);
  if (!whole) {
    dataset.fail("is restricted to " + std::to_string(listed.size()) + " " + name + " of " +
                 (extent < 0 ? "an unknown number" : std::to_string(extent)) +
                 "; a run's record needs whole tensors, so write the dump without restriction");
  }
}

template <class T>
Tensor<T> read_tensor(const h5::Group& group, const std::string& name, const Extents& expected, std::size_t position_axis = 0) {
  static constexpr std::array<std::string_view, 2> kAttributes{"positions", "heads"};
  const h5::Dataset dataset = group.open_dataset(name);
  dataset.allow_only_attributes(kAttributes);
  if (dataset.has_attribute("positions")) require_whole(dataset, "positions", expected.at(position_axis));
  if (dataset.has_attribute("heads")) {
    const Extents shape = dataset.shape();
    // Where nothing else says how many heads there are, the listed ones have to begin at 0 without gaps.
    require_whole(dataset, "heads", shape.empty() ? 0 : expected.at(0) < 0 ? shape[0] : expected[0]);
  }
  return dataset.read<T>(expected);
}

// The number k of a member name "<stem>k", or nothing.
std::optional<std::size_t> number_of(std::string_view name, std::string_view stem) {
  if (!name.starts_with(stem)) return std::nullopt;
  const std::string_view digits = name.substr(stem.size());
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{} || end != digits.data() + digits.size() || (digits.size() > 1 && digits[0] == '0')) return std::nullopt;
  return number;
}

// Members "<stem><first>".. without gaps, as many as there are; anything else is refused. `other` is one more accepted name.
std::size_t count_numbered(const h5::Group& group, std::string_view stem, std::size_t first, std::string_view other = {}) {
  std::size_t count = 0;
  for (const std::string& name : group.members()) {
    if (name != other) ++count;
  }
  for (const std::string& name : group.members()) {
    const std::optional<std::size_t> number = number_of(name, stem);
    if (name != other && (!number || *number < first || *number >= first + count)) {
      group.fail("has member `" + name + "`, expected " + numbered(stem, first) + " to " + numbered(stem, first + count - 1) +
                 " without gaps");
    }
  }
  return count;
}

void require_ascending(const h5::Group& group, const std::string& name, std::span<const std::int32_t> values, std::int64_t begin,
                       std::int64_t end) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < begin || values[i] >= end || (i > 0 && values[i] <= values[i - 1])) {
      group.fail(name + "[" + std::to_string(i) + "] = " + std::to_string(values[i]) + " is not ascending within " + std::to_string(begin) +
                 ".." + std::to_string(end - 1));
    }
  }
}

class RequestReader {
 public:
  // `loops`: of the model; planes of deeper loops do not exist.
  RequestReader(const h5::Group& group, std::size_t loops) : group_(group), loops_(loops) {}

  RequestRecord read() {
    static constexpr std::array<std::string_view, 14> kMembers{"tokens", "logits",           "hidden",     "gate", "exit_depths",
                                                               "scores", "active",           "keys",       "mass", "kv",
                                                               "codec",  "encoded_frontier", "executions", "rounds"};
    static constexpr std::array<std::string_view, 2> kAttributes{"prompt_length", "outcome"};
    group_.allow_only(kMembers, kAttributes);
    request_.tokens = read_tensor<std::int32_t>(group_, "tokens", {-1}).data;
    request_.encoded_frontier = read_tensor<std::int32_t>(group_, "encoded_frontier", {-1}).data;
    const auto tokens = static_cast<std::int64_t>(request_.tokens.size());
    request_.exit_depths = read_tensor<std::uint8_t>(group_, "exit_depths", {tokens}).data;
    read_outcome();
    const auto entries = static_cast<std::int64_t>(request_.encoded_frontier.size());
    const bool cancelled = request_.outcome == RequestOutcome::cancelled;
    fed_ = cancelled && entries == 0 ? 0 : entries - 1;
    // Forced tokens are all forwarded, the last emitted one is not; a cancelled request stopped anywhere.
    const bool fits = cancelled ? fed_ >= 0 && fed_ <= tokens : fed_ == tokens || fed_ == std::max<std::int64_t>(0, tokens - 1);
    if (!fits) {
      group_.fail("encoded_frontier has " + std::to_string(entries) +
                  " entries, which fits neither forced nor emitted tokens (tokens has " + std::to_string(tokens) + ")");
    }
    request_.fed = static_cast<int>(fed_);
    read_prompt_length();
    if (group_.has("logits")) request_.logits = read_tensor<float>(group_, "logits", {1 + fed_, -1});
    if (group_.has("gate")) request_.gate = read_tensor<float>(group_, "gate", {rows_, kLoops});
    if (group_.has("executions")) request_.executions = read_tensor<std::uint8_t>(group_, "executions", {rows_, kLoops}).data;
    if (group_.has("rounds")) {
      const Tensor<std::int32_t> table = read_tensor<std::int32_t>(group_, "rounds", {-1, kRoundFields});
      for (std::int64_t i = 0; i < table.extent(0); ++i) {
        const auto fields = table.row(i);
        request_.rounds.push_back({fields[0], fields[1], fields[2], fields[3]});
      }
    }
    if (group_.has("hidden")) read_hidden();
    read_selected_tokens();
    if (group_.has("mass") || group_.has("keys")) read_selected_keys();
    if (group_.has("kv")) read_kv();
    if (group_.has("codec")) read_codec();
    return std::move(request_);
  }

 private:
  void read_outcome() {
    if (!group_.has_attribute("outcome")) return;  // written by a version without cancellation
    const std::string text = group_.string_attribute("outcome");
    if (text == to_string(RequestOutcome::cancelled)) {
      request_.outcome = RequestOutcome::cancelled;
    } else if (text != to_string(RequestOutcome::completed)) {
      group_.fail("outcome \"" + text + "\" is neither completed nor cancelled");
    }
  }

  void read_prompt_length() {
    std::int64_t length = -1;
    if (group_.has_attribute("prompt_length")) {
      length = group_.int_attribute("prompt_length");
    } else if (group_.has("gate")) {
      length = row_count(group_.open_dataset("gate")) - fed_;
    } else if (group_.has("hidden") && group_.open_group("hidden").has("loop1")) {
      length = row_count(group_.open_group("hidden").open_dataset("loop1")) - fed_;
    } else {
      group_.fail("attribute `prompt_length` is missing and neither gate nor hidden tells it");
    }
    if (length < 1 || length > std::numeric_limits<int>::max() - fed_)
      group_.fail("prompt length " + std::to_string(length) + " is not possible");
    request_.prompt_length = static_cast<int>(length);
    rows_ = length + fed_;
  }

  static std::int64_t row_count(const h5::Dataset& dataset) {
    const Extents shape = dataset.shape();
    if (shape.empty()) dataset.fail("is a scalar, expected rows");
    return shape[0];
  }

  void read_hidden() {
    const h5::Group hidden = group_.open_group("hidden");
    static constexpr std::array<std::string_view, kLoops> kMembers{"loop1", "loop2", "loop3", "loop4"};
    hidden.allow_only(kMembers, {});
    std::int64_t width = -1;
    for (std::size_t loop = 0; loop < loops_; ++loop) {
      request_.hidden[loop] = read_tensor<float>(hidden, numbered("loop", loop + 1), {rows_, width});
      width = request_.hidden[loop].shape[1];
    }
  }

  void read_selected_tokens() {
    static constexpr std::array<std::string_view, 2> kMembers{"loop3", "loop4"};
    const std::int64_t prompt = request_.prompt_length;
    for (const std::string name : {"scores", "active"}) {
      if (!group_.has(name)) continue;
      const h5::Group group = group_.open_group(name);
      group.allow_only(kMembers, {});
      for (std::size_t i = 0; i < 2; ++i) {
        const std::string loop(kMembers[i]);
        if (!group.has(loop)) continue;
        if (name == "scores") {
          request_.scores[i] = read_tensor<float>(group, loop, {prompt}).data;
        } else {
          request_.active[i] = read_tensor<std::int32_t>(group, loop, {-1}).data;
          require_ascending(group, loop, request_.active[i], 0, prompt);
        }
      }
    }
  }

  // Steps present in keys or mass; each number below fed.
  std::vector<std::size_t> steps_of(const h5::Group& group) const {
    std::vector<std::size_t> steps;
    for (const std::string& name : group.members()) {
      const std::optional<std::size_t> step = number_of(name, "step");
      if (!step || static_cast<std::int64_t>(*step) >= fed_) {
        group.fail("has member `" + name + "`, expected step0 to step" + std::to_string(fed_ - 1));
      }
      steps.push_back(*step);
    }
    return steps;
  }

  void read_selected_keys() {
    request_.keys.resize(static_cast<std::size_t>(fed_));
    if (group_.has("mass")) {
      const h5::Group mass = group_.open_group("mass");
      for (const std::size_t step : steps_of(mass)) request_.keys[step].mass = read_tensor<float>(mass, numbered("step", step), {-1, -1});
    }
    if (!group_.has("keys")) return;
    const h5::Group keys = group_.open_group("keys");
    for (const std::size_t step : steps_of(keys)) {
      const h5::Group group = keys.open_group(numbered("step", step));
      std::int64_t heads = -1, count = -1;
      const std::size_t layers = count_numbered(group, "layer", 0);
      for (std::size_t layer = 0; layer < layers; ++layer) {
        const std::string name = numbered("layer", layer);
        Tensor<std::int32_t> selected = read_tensor<std::int32_t>(group, name, {heads, count});
        heads = selected.shape[0], count = selected.shape[1];
        // The query of step j is at position P + j and sees itself and everything before.
        const std::int64_t end = request_.prompt_length + static_cast<std::int64_t>(step) + 1;
        for (std::int64_t head = 0; head < heads; ++head) {
          require_ascending(group, name + "[" + std::to_string(head) + "]", std::as_const(selected).row(head), 0, end);
        }
        request_.keys[step].layers.push_back(std::move(selected));
      }
    }
  }

  void read_kv() {
    const h5::Group kv = group_.open_group("kv");
    std::int64_t heads = -1, head_dim = -1;
    const std::size_t layers = count_numbered(kv, "layer", 0);
    for (std::size_t layer = 0; layer < layers; ++layer) {
      const h5::Group layer_group = kv.open_group(numbered("layer", layer));
      if (count_numbered(layer_group, "loop", 1) != kLoops) layer_group.fail("does not hold loop1 to loop4");
      for (std::size_t loop = 1; loop <= kLoops; ++loop) {
        static constexpr std::array<std::string_view, 2> kMembers{"k", "v"};
        const h5::Group plane_group = layer_group.open_group(numbered("loop", loop));
        plane_group.allow_only(kMembers, {});
        KvPlane plane;
        if (loop > loops_) {
          if (!plane_group.members().empty()) plane_group.fail("holds values, the model has " + std::to_string(loops_) + " loops");
          request_.kv.push_back(std::move(plane));
          continue;
        }
        plane.k = read_tensor<float>(plane_group, "k", {heads, rows_, head_dim}, 1);
        heads = plane.k.shape[0], head_dim = plane.k.shape[2];
        plane.v = read_tensor<float>(plane_group, "v", {heads, rows_, head_dim}, 1);
        request_.kv.push_back(std::move(plane));
      }
    }
  }

  void read_codec() {
    static constexpr std::array<std::string_view, 2> kAttributes{"begin", "end"};
    const h5::Group codec = group_.open_group("codec");
    const std::size_t blocks = count_numbered(codec, "block", 0);
    for (std::size_t b = 0; b < blocks; ++b) {
      const h5::Group group = codec.open_group(numbered("block", b));
      group.allow_only_attributes(kAttributes);
      if (count_numbered(group, "stream", 1) != kLoops) group.fail("does not hold stream1 to stream4");
      const std::int64_t begin = group.int_attribute("begin"), end = group.int_attribute("end");
      if (begin < 0 || end <= begin || end > rows_) {
        group.fail("covers positions " + std::to_string(begin) + " to " + std::to_string(end) + ", the request has " +
                   std::to_string(rows_));
      }
      CodecBlock block;
      block.positions = {static_cast<int>(begin), static_cast<int>(end)};
      for (std::size_t r = 0; r < kLoops; ++r) block.streams[r] = read_stream(group.open_group(numbered("stream", r + 1)), begin, end);
      request_.blocks.push_back(std::move(block));
    }
  }

  static CodecStream read_stream(const h5::Group& group, std::int64_t begin, std::int64_t end) {
    CodecStream stream;
    stream.rows = read_tensor<std::int32_t>(group, "rows", {-1}).data;
    require_ascending(group, "rows", stream.rows, begin, end);
    const auto rows = static_cast<std::int64_t>(stream.rows.size());
    const std::size_t layers = count_numbered(group, "layer", 0, "rows");
    if ((rows == 0) != (layers == 0)) group.fail("has " + std::to_string(rows) + " rows but " + std::to_string(layers) + " layers");
    for (std::size_t l = 0; l < layers; ++l) {
      static constexpr std::array<std::string_view, 6> kMembers{"k_codes", "k_min", "k_scale", "v_codes", "v_min", "v_scale"};
      const h5::Group in = group.open_group(numbered("layer", l));
      in.allow_only(kMembers, {});
      const auto groups = [](std::int64_t values) { return (values + kGroupSize - 1) / kGroupSize; };
      CodecLayer layer;
      layer.k_codes = read_tensor<std::uint8_t>(in, "k_codes", {-1, rows, -1}, 1);
      const std::int64_t heads = layer.k_codes.shape[0], head_dim = layer.k_codes.shape[2];
      layer.k_min = read_tensor<float>(in, "k_min", {heads, groups(rows), head_dim});
      layer.k_scale = read_tensor<float>(in, "k_scale", {heads, groups(rows), head_dim});
      layer.v_codes = read_tensor<std::uint8_t>(in, "v_codes", {heads, rows, head_dim}, 1);
      layer.v_min = read_tensor<float>(in, "v_min", {heads, rows, groups(head_dim)});
      layer.v_scale = read_tensor<float>(in, "v_scale", {heads, rows, groups(head_dim)});
      for (const auto* codes : {&layer.k_codes, &layer.v_codes}) {
        const auto bad = std::find_if(codes->data.begin(), codes->data.end(), [](std::uint8_t code) { return code > 15; });
        if (bad != codes->data.end()) in.fail("holds code " + std::to_string(*bad) + ", codes have 4 bits");
      }
      stream.layers.push_back(std::move(layer));
    }
    return stream;
  }

  const h5::Group& group_;
  std::size_t loops_;
  RequestRecord request_;
  std::int64_t fed_ = 0;
  std::int64_t rows_ = 0;  // P + fed
};

// The effective configuration says so; a dump without it is of four loops.
std::size_t loops_of(const std::string& config_json) {
  const nlohmann::json config = nlohmann::json::parse(config_json, nullptr, false);
  if (!config.is_object() || !config.contains("loops") || !config["loops"].is_number_unsigned()) return kLoops;
  return std::clamp<std::size_t>(config["loops"].get<std::size_t>(), 1, kLoops);
}

int small_attribute(const h5::Group& root, const std::string& name) {
  const std::int64_t value = root.int_attribute(name);
  if (value < 0 || value > std::numeric_limits<int>::max())
    root.fail("attribute `" + name + "` = " + std::to_string(value) + " is out of range");
  return static_cast<int>(value);
}

DumpInfo read_root_attributes(const h5::Group& root) {
  static constexpr std::array<std::string_view, 21> kAttributes{
      "format",    "version",   "tool_version", "case",     "mode",         "switches",      "policy",
      "timing",    "flush",     "window",       "tail",     "retention_bp", "decode_key_bp", "exit",
      "threshold", "min_loops", "profile",      "executor", "model_sha256", "trace",         "config"};
  static constexpr std::array<std::string_view, 1> kMembers{"requests"};
  const std::string format = root.string_attribute("format");
  if (format == kExpectedFormat) {
    root.fail("is an expected file of the handed cases, which holds a selection of rows; compare a dump with it by data/cases/compare.py");
  }
  if (format != kDumpFormat) root.fail("format is \"" + format + "\", expected \"" + std::string(kDumpFormat) + "\"");
  require_dump_version(root);
  root.allow_only(kMembers, kAttributes);

  const auto optional = [&](const char* name) { return root.has_attribute(name) ? root.string_attribute(name) : std::string(); };
  DumpInfo info;
  info.tool_version = root.string_attribute("tool_version");
  info.case_id = optional("case");
  info.mode = root.string_attribute("mode");
  info.switches = root.string_attribute("switches");
  info.policy = root.string_attribute("policy");
  info.timing = root.string_attribute("timing");
  info.flush = optional("flush");
  info.window = small_attribute(root, "window");
  info.tail = small_attribute(root, "tail");
  const std::vector<std::int64_t> retention = root.int_array_attribute("retention_bp");
  if (retention.size() != kLoops) root.fail("attribute `retention_bp` has " + std::to_string(retention.size()) + " entries, expected 4");
  for (std::size_t loop = 0; loop < kLoops; ++loop) {
    if (retention[loop] < 0 || retention[loop] > kBasisPoints)
      root.fail("attribute `retention_bp` holds " + std::to_string(retention[loop]));
    info.retention_bp[loop] = static_cast<int>(retention[loop]);
  }
  info.decode_key_bp = small_attribute(root, "decode_key_bp");
  info.exit = root.string_attribute("exit");
  info.threshold = root.double_attribute("threshold");
  info.min_loops = small_attribute(root, "min_loops");
  info.profile = root.string_attribute("profile");
  info.executor = root.string_attribute("executor");
  info.model_sha256 = root.string_attribute("model_sha256");
  info.trace = optional("trace");
  return info;
}

}  // namespace

void require_dump_version(const h5::Group& root) {
  const std::int64_t version = root.int_attribute("version");
  if (version >= kVersionWithoutRounds && version <= kVersion) return;
  root.fail("version is " + std::to_string(version) + ", this program reads versions " + std::to_string(kVersionWithoutRounds) + " and " +
            std::to_string(kVersion));
}

void require_dump_replaceable(const std::filesystem::path& dump_file) {
  if (dump_file.empty()) return;
  const std::filesystem::path folder = dump_file.has_parent_path() ? dump_file.parent_path() : std::filesystem::path(".");
  std::error_code ignored;
  const std::filesystem::file_status existing = std::filesystem::status(dump_file, ignored);
  if (std::filesystem::exists(existing) && !std::filesystem::is_regular_file(existing)) {
    throw FileError("--dump " + dump_file.string() + ": is not a regular file, so it cannot be replaced as a whole; write to a file name");
  }
  if (!std::filesystem::is_directory(folder, ignored)) throw FileError("--dump " + dump_file.string() + ": folder " + folder.string() + " does not exist");
  require_replaceable(dump_file, kDumpFormat, "--dump");
}

const std::vector<std::string>& dump_group_names() {
  static const std::vector<std::string> names{"tokens", "logits", "hidden", "gate", "exit_depths",      "scores",
                                              "active", "keys",   "mass",   "kv",   "encoded_frontier", "codec"};
  return names;
}

RecordGroups record_groups(const std::vector<std::string>& only) {
  if (only.empty()) return RecordGroups::all();
  RecordGroups groups;
  groups.logits = false;
  for (const std::string& name : only) {
    const std::vector<std::string>& names = dump_group_names();
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      std::string list;
      for (const std::string& known : names) list += (list.empty() ? "" : ", ") + known;
      throw ConfigError("dump group \"" + name + "\" is none of " + list);
    }
    if (name == "logits") groups.logits = true;
    if (name == "hidden") groups.hidden = true;
    if (name == "gate") groups.gate = true;
    if (name == "keys" || name == "mass") groups.keys = true;
    if (name == "kv") groups.kv = true;
    if (name == "codec") groups.codec = true;
  }
  return groups;
}

void write_dump(const std::filesystem::path& path, const RunRecord& record, const EffectiveConfig& config, const DumpOptions& options) {
  record_groups(options.only);  // refuses unknown names
  AtomicOutput output(path, options.if_exists);
  h5::File file = h5::File::create(output);
  {
    const h5::Group root = file.root();
    write_root_attributes(root, record, config, options.case_id);
    const h5::Group requests = root.create_group("requests");
    for (std::size_t i = 0; i < record.requests.size(); ++i) {
      const h5::Group group = requests.create_group(std::to_string(i));
      RequestWriter(group, record.requests[i], options.only).write();
    }
  }
  file.close();
  output.commit();
}

RunRecord read_dump(const std::filesystem::path& path, DumpInfo& info) {
  const h5::File file = h5::File::open_readonly(path);
  const h5::Group root = file.root();
  info = read_root_attributes(root);
  RunRecord record;
  record.mode = info.mode;
  record.executor = info.executor;
  record.profile = info.profile;
  record.model_sha256 = info.model_sha256;
  record.trace = info.trace;
  if (root.has_attribute("config")) record.config_json = root.string_attribute("config");
  const std::size_t loops = loops_of(record.config_json);
  const h5::Group requests = root.open_group("requests");
  const std::size_t count = count_numbered(requests, "", 0);
  if (static_cast<std::int64_t>(count) > kMaxRequests) requests.fail("holds " + std::to_string(count) + " requests");
  for (std::size_t i = 0; i < count; ++i) {
    const h5::Group group = requests.open_group(std::to_string(i));
    record.requests.push_back(RequestReader(group, loops).read());
  }
  return record;
}

}  // namespace loopgauge::harness
