// SPDX-License-Identifier: Apache-2.0
#include "reference/run/handoff.hpp"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "models/error.hpp"
#include "models/handoff/bytes.hpp"
#include "models/handoff/planted_fault.hpp"
#include "reference/kv/block_encoder.hpp"
#include "reference/numeric/float16.hpp"
#include "reference/run/delivery.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/request_life.hpp"

namespace loopgauge::reference {
namespace {

using handoff::ByteReader;
using handoff::ByteWriter;
using handoff::Region;
using handoff::RegionKind;

template <class P>
handoff::Descriptor descriptor_of(const RunContext<P>& run, const RequestState<P>& s) {
  return handoff::make_descriptor(run.model, run.model_sha256, run.config, s.index, *s.request, run.options.profile);
}

// A value of K, V or hidden: BF16 exactly, or FP64.
void write_element(ByteWriter& out, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0xFFFF) != 0) throw InternalError("a value that is handed over is no BF16 value");
  out.integer(static_cast<std::uint16_t>(bits >> 16));
}
void write_element(ByteWriter& out, double value) { out.integer(std::bit_cast<std::uint64_t>(value)); }
void read_element(ByteReader& in, float& value) { value = std::bit_cast<float>(std::uint32_t{in.integer<std::uint16_t>()} << 16); }
void read_element(ByteReader& in, double& value) { value = std::bit_cast<double>(in.integer<std::uint64_t>()); }

// Codes are one a byte here and two a byte in a region: channel 2i in the low nibble.
void pack_codes(ByteWriter& out, const Tensor<std::uint8_t>& codes) {
  for (std::size_t i = 0; i < codes.data.size(); i += 2) out.integer(static_cast<std::uint8_t>(codes.data[i] | codes.data[i + 1] << 4));
}
void unpack_codes(ByteReader& in, Tensor<std::uint8_t>& codes) {
  for (std::size_t i = 0; i < codes.data.size(); i += 2) {
    const auto pair = in.integer<std::uint8_t>();
    codes.data[i] = pair & 15;
    codes.data[i + 1] = pair >> 4;
  }
}

void pack_parameters(ByteWriter& out, const Tensor<float>& min, const Tensor<float>& scale) {
  for (std::size_t i = 0; i < min.data.size(); ++i) out.integer(float16_bits(min.data[i])), out.integer(float16_bits(scale.data[i]));
}
void unpack_parameters(ByteReader& in, Tensor<float>& min, Tensor<float>& scale) {
  for (std::size_t i = 0; i < min.data.size(); ++i) {
    min.data[i] = float16_value(in.integer<std::uint16_t>());
    scale.data[i] = float16_value(in.integer<std::uint16_t>());
  }
}

template <class Blocks>
auto& block_at(Blocks& blocks, PositionRange positions) {
  const auto found = std::find_if(blocks.begin(), blocks.end(), [&](const CodecBlock& block) { return block.positions == positions; });
  if (found == blocks.end()) throw InternalError("a region of a block that is not there");
  return *found;
}

// Empty tensors of a stream with its rows.
CodecStream stream_with_rows(const ModelConfig& model, std::vector<std::int32_t> rows) {
  CodecStream stream;
  stream.rows = std::move(rows);
  const auto n = static_cast<std::int64_t>(stream.rows.size());
  const auto groups = [](std::int64_t count) { return (count + kGroupSize - 1) / kGroupSize; };
  if (n == 0) return stream;
  for (int layer = 0; layer < model.layers; ++layer) {
    CodecLayer out;
    out.k_codes = out.v_codes = Tensor<std::uint8_t>({model.heads, n, model.head_dim});
    out.k_min = out.k_scale = Tensor<float>({model.heads, groups(n), model.head_dim});
    out.v_min = out.v_scale = Tensor<float>({model.heads, n, groups(model.head_dim)});
    stream.layers.push_back(std::move(out));
  }
  return stream;
}

}  // namespace

// -------------------------------------------------------------------------------------------------------------------------- source

template <class P>
handoff::Descriptor HandoffSource<P>::describe(int request) const {
  return descriptor_of(run_, requests_.at(static_cast<std::size_t>(request)));
}

template <class P>
typename HandoffSource<P>::Exports& HandoffSource<P>::exports(int request) {
  const auto [entry, is_new] = exports_.try_emplace(request);
  if (is_new) {
    entry->second.descriptor = describe(request);
    entry->second.regions = handoff::regions_of(entry->second.descriptor);
    for (std::uint32_t i = 0; i < entry->second.regions.size(); ++i) entry->second.waiting.insert(i);
  }
  return entry->second;
}

template <class P>
bool HandoffSource<P>::is_final(const RequestState<P>& s, const Region& region) const {
  const RequestStorage<P>& h = *s.held;
  const int done = h.window_loops.at(static_cast<std::size_t>(region.positions.begin / run_.config.window()));
  switch (region.kind) {
    case RegionKind::validity:
      return done == run_.config.loops();
    case RegionKind::activity:
    case RegionKind::rows:
      return done >= region.loop;
    case RegionKind::base_payload:
    case RegionKind::residual_payload:
    case RegionKind::parameters:
      return run_.config.q().policy == EncodingPolicy::streaming ? done >= region.loop : h.encoded >= region.positions.end;
    case RegionKind::final_hidden:
      return !h.final_hidden.empty();
  }
  throw InternalError("unknown kind of region");
}

template <class P>
std::vector<std::byte> HandoffSource<P>::bytes_of(RequestState<P>& s, const Region& region) const {
  RequestStorage<P>& h = *s.held;
  const ModelConfig& model = run_.model;
  ByteWriter out;
  switch (region.kind) {
    case RegionKind::validity:
    case RegionKind::activity: {
      handoff::ActivityMaps maps(describe(s.index));
      const int loop = std::max(1, region.loop);
      for (int position = region.positions.begin; position < region.positions.end; ++position) {
        if (h.executed_loops[static_cast<std::size_t>(position)] >= loop) maps.set_active(loop, position);
      }
      return maps.words(loop, region.positions.begin / run_.config.window());
    }
    case RegionKind::base_payload:
    case RegionKind::residual_payload:
      for (const CodecLayer& layer : block_at(h.blocks, region.positions).streams[static_cast<std::size_t>(region.loop - 1)].layers) {
        pack_codes(out, layer.k_codes);
        pack_codes(out, layer.v_codes);
      }
      return out.take();
    case RegionKind::parameters: {
      const auto& layers = block_at(h.blocks, region.positions).streams[static_cast<std::size_t>(region.loop - 1)].layers;
      for (const CodecLayer& layer : layers) pack_parameters(out, layer.k_min, layer.k_scale);
      for (const CodecLayer& layer : layers) pack_parameters(out, layer.v_min, layer.v_scale);
      return out.take();
    }
    case RegionKind::rows:
      for (int layer = 0; layer < model.layers; ++layer) {
        for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
          for (int head = 0; head < model.heads; ++head) {
            for (int position = region.positions.begin; position < region.positions.end; ++position) {
              if (h.executed_loops[static_cast<std::size_t>(position)] < region.loop) continue;
              const auto* row = h.kv.exact(tensor, layer, region.loop, head, position);
              for (int d = 0; d < model.head_dim; ++d) write_element(out, row[d]);
            }
          }
        }
      }
      return out.take();
    case RegionKind::final_hidden:
      for (const auto value : h.final_hidden) write_element(out, value);
      return out.take();
  }
  throw InternalError("unknown kind of region");
}

template <class P>
std::vector<handoff::ExportedRegion> HandoffSource<P>::export_ready(int request, std::size_t most_bytes) {
  RequestState<P>& s = requests_.at(static_cast<std::size_t>(request));
  std::vector<handoff::ExportedRegion> ready;
  if (s.held == nullptr) return ready;
  Exports& e = exports(request);
  for (auto next = e.waiting.begin(); next != e.waiting.end();) {
    const std::uint32_t number = *next;
    if (!is_final(s, e.regions[number])) {
      ++next;
      continue;
    }
    if (!e.copies.empty() && e.bytes + e.regions[number].capacity > most_bytes) break;
    next = e.waiting.erase(next);
    std::vector<std::byte>& copy = e.copies.emplace(number, bytes_of(s, e.regions[number])).first->second;
    e.bytes += copy.size();
    ready.push_back({number, {copy.data(), copy.size(), -1}, handoff::region_checksum(copy)});
  }
  return ready;
}

template <class P>
bool HandoffSource<P>::exported_all(int request) const {
  const auto found = exports_.find(request);
  return found != exports_.end() && found->second.waiting.empty();
}

template <class P>
void HandoffSource<P>::sent(int request, std::uint32_t region) {
  Exports& e = exports(request);
  const auto found = e.copies.find(region);
  if (found == e.copies.end()) throw InternalError("a region was sent that was not exported");
  e.bytes -= found->second.size();
  e.copies.erase(found);
}

template <class P>
void HandoffSource<P>::release(int request) {
  exports_.erase(request);
  RequestState<P>& s = requests_.at(static_cast<std::size_t>(request));
  if (s.held == nullptr) return;
  s.phase = RequestState<P>::Phase::ended;
  close_record(run_, s);
  loopgauge::reference::release(run_, s);
}

template <class P>
std::int64_t HandoffSource<P>::regions_held() const {
  std::int64_t count = 0;
  for (const auto& [_, e] : exports_) count += static_cast<std::int64_t>(e.copies.size());
  return count;
}

// -------------------------------------------------------------------------------------------------------------------------- target

template <class P>
handoff::Descriptor HandoffTarget<P>::expected(int request) const {
  if (request < 0 || static_cast<std::size_t>(request) >= requests_.size()) {
    throw handoff::HandoffError("request " + std::to_string(request) + " is none of the " + std::to_string(requests_.size()) +
                                " of trace " + run_.trace.name);
  }
  return descriptor_of(run_, requests_[static_cast<std::size_t>(request)]);
}

template <class P>
std::vector<handoff::Memory> HandoffTarget<P>::reserve(int request, const handoff::Descriptor& descriptor) {
  if (const std::string text = first_difference(descriptor, expected(request)); !text.empty())
    throw handoff::HandoffError("handoff refused: " + text);
  RequestState<P>& s = requests_.at(static_cast<std::size_t>(request));
  if (s.phase != RequestState<P>::Phase::waiting || reservations_.contains(request)) {
    throw handoff::HandoffError("handoff refused: " + name(s) + " is here already");
  }
  Reservation reservation{descriptor, handoff::regions_of(descriptor), {}, make_storage(run_, s)};
  std::vector<handoff::Memory> memory;
  for (const Region& region : reservation.regions) {
    std::vector<std::byte>& bytes = reservation.memory.emplace_back(region.capacity);
    memory.push_back({bytes.data(), bytes.size(), -1});
    bytes_ += bytes.size();
  }
  most_bytes_ = std::max(most_bytes_, bytes_);
  reservations_.emplace(request, std::move(reservation));
  return memory;
}

template <class P>
void HandoffTarget<P>::activate(int request, std::span<const handoff::RegionSummary> summaries) {
  RequestState<P>& s = requests_.at(static_cast<std::size_t>(request));
  Reservation& reservation = reservations_.at(request);
  std::vector<std::span<const std::byte>> data(reservation.memory.begin(), reservation.memory.end());
  if (const std::string fault = activation_fault(reservation.descriptor, reservation.regions, summaries, data); !fault.empty()) {
    throw handoff::HandoffError("handoff of " + name(s) + " not activated: " + fault);
  }
  plant_fault(reservation, summaries);
  s.held = std::move(reservation.storage);
  s.generation = run_.generations++;
  s.phase = RequestState<P>::Phase::live;
  unpack(s, reservation, summaries);
  emit_prompt(run_, s);
  s.held->final_hidden.clear();
  abort(request);
}

template <class P>
void HandoffTarget<P>::unpack(RequestState<P>& s, const Reservation& reservation, std::span<const handoff::RegionSummary> summaries) const {
  RequestStorage<P>& h = *s.held;
  const ModelConfig& model = run_.model;
  const auto bytes = [&](std::size_t i) {
    return std::span<const std::byte>(reservation.memory[i]).first(static_cast<std::size_t>(summaries[i].bytes));
  };
  handoff::ActivityMaps maps(reservation.descriptor);
  for (std::size_t i = 0; i < reservation.regions.size(); ++i) {
    const Region& region = reservation.regions[i];
    if (region.kind == RegionKind::validity || region.kind == RegionKind::activity) {
      maps.set_words(std::max(1, region.loop), window_of(reservation.descriptor, region.positions.begin), bytes(i));
    }
  }
  for (int position = 0; position < s.prompt_length; ++position) {
    h.executed_loops[static_cast<std::size_t>(position)] = static_cast<std::uint8_t>(maps.executed_loops(position));
  }
  std::fill(h.window_loops.begin(), h.window_loops.end(), run_.config.loops());
  for (std::size_t i = 0; i < reservation.regions.size(); ++i) {  // loops of a range come in ascending order
    const Region& region = reservation.regions[i];
    ByteReader in(bytes(i), "region");  // the sizes were checked against the activity
    const std::size_t r = static_cast<std::size_t>(std::max(1, region.loop) - 1);
    switch (region.kind) {
      case RegionKind::validity:
      case RegionKind::activity:
        break;
      case RegionKind::base_payload:
        h.blocks.push_back({region.positions, {}});
        [[fallthrough]];
      case RegionKind::residual_payload: {
        CodecStream& stream = h.blocks.back().streams[r];
        stream = stream_with_rows(model, maps.rows(region.loop, region.positions));
        for (CodecLayer& layer : stream.layers) unpack_codes(in, layer.k_codes), unpack_codes(in, layer.v_codes);
        break;
      }
      case RegionKind::parameters: {
        CodecStream& stream = h.blocks.back().streams[r];
        for (CodecLayer& layer : stream.layers) unpack_parameters(in, layer.k_min, layer.k_scale);
        for (CodecLayer& layer : stream.layers) unpack_parameters(in, layer.v_min, layer.v_scale);
        reconstruct_stream(h.kv, model, region.positions, region.loop, stream, run_.options.fault);
        h.encoded = region.positions.end;
        break;
      }
      case RegionKind::rows: {
        const std::vector<std::int32_t> rows = maps.rows(region.loop, region.positions);
        for (int layer = 0; layer < model.layers; ++layer) {
          for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
            for (int head = 0; head < model.heads; ++head) {
              for (const int position : rows) {
                auto* row = h.kv.exact(tensor, layer, region.loop, head, position);
                for (int d = 0; d < model.head_dim; ++d) read_element(in, row[d]);
              }
            }
          }
        }
        for (int position = region.positions.begin; position < region.positions.end; ++position) {
          if (!maps.active(std::max(1, region.loop), position)) h.kv.inherit_row(region.loop, position);
        }
        break;
      }
      case RegionKind::final_hidden:
        h.final_hidden.resize(static_cast<std::size_t>(model.hidden));
        for (auto& value : h.final_hidden) read_element(in, value);
        break;
    }
  }
  h.committed = s.prompt_length;
}

// What a receiver without checks would do with bytes that are not those of this handoff.
template <class P>
void HandoffTarget<P>::plant_fault(Reservation& reservation, std::span<const handoff::RegionSummary> summaries) const {
  const Fault fault = run_.options.fault;
  const std::vector<Region>& regions = reservation.regions;
  std::vector<std::vector<std::byte>>& memory = reservation.memory;
  for (const auto& [region, begin] : handoff::forgotten_bytes(fault, regions, summaries))
    std::fill(memory[region].begin() + static_cast<std::ptrdiff_t>(begin), memory[region].end(), std::byte{0});
  for (const auto& [from, to, bytes] : handoff::repeated_bytes(fault, regions)) std::copy_n(memory[from].begin(), bytes, memory[to].begin());
  if (fault != Fault::handoff_wrong_activity) return;
  handoff::ActivityMaps maps(reservation.descriptor);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (is_bitmap(regions[i]))
      maps.set_words(std::max(1, regions[i].loop), window_of(reservation.descriptor, regions[i].positions.begin), memory[i]);
  }
  const handoff::ActivityMaps wrong = handoff::planted_activity(fault, reservation.descriptor, regions, maps);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].kind == RegionKind::activity) memory[i] = wrong.words(regions[i].loop, window_of(reservation.descriptor, regions[i].positions.begin));
  }
}

template <class P>
void HandoffTarget<P>::abort(int request) {
  const auto found = reservations_.find(request);
  if (found == reservations_.end()) return;
  for (const auto& memory : found->second.memory) bytes_ -= memory.size();
  reservations_.erase(found);
}

template <class P>
std::int64_t HandoffTarget<P>::regions_held() const {
  std::int64_t count = 0;
  for (const auto& [_, reservation] : reservations_) count += static_cast<std::int64_t>(reservation.memory.size());
  return count;
}

#define LOOPGAUGE_INSTANTIATE(P)   \
  template class HandoffSource<P>; \
  template class HandoffTarget<P>;
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
