// SPDX-License-Identifier: Apache-2.0
#include "reference/kv/block_encoder.hpp"

#include <algorithm>
#include <cmath>

#include "models/error.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/codec.hpp"

namespace loopgauge::reference {
namespace {

int group_count(int values) { return (values + kGroupSize - 1) / kGroupSize; }

// One (layer, tensor, head) of a stream.
template <class Real>
class HeadEncoder {
 public:
  HeadEncoder(KvPlanes<Real>& planes, const ModelConfig& model, int loop, int layer, KvTensor tensor, int head,
              const std::vector<std::int32_t>& rows)
      : planes_(planes), head_dim_(model.head_dim), loop_(loop), layer_(layer), head_(head), tensor_(tensor), rows_(rows) {}

  // What is encoded: X at loop 1, the difference to the reconstructed predecessor after it. [rows, head_dim]
  std::vector<Real> targets(Fault fault) {
    std::vector<Real> result(rows_.size() * static_cast<std::size_t>(head_dim_));
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const Real* x = planes_.exact(tensor_, layer_, loop_, head_, rows_[i]);
      const Real* base = loop_ == 1 ? nullptr : predecessor(rows_[i], fault);
      Real* out = result.data() + i * static_cast<std::size_t>(head_dim_);
      for (int d = 0; d < head_dim_; ++d) out[d] = base == nullptr ? x[d] : x[d] - base[d];
    }
    return result;
  }

  // Encodes `values` [rows, head_dim] in this tensor's grouping. Returns the index of the first group outside the range, or -1.
  int encode(const std::vector<Real>& values, std::uint8_t* codes, float* min, float* scale, Fault fault) {
    const int row_count = static_cast<int>(rows_.size());
    int bad_group = -1;
    const auto store = [&](const GroupCode<Real>& group, int index) {
      min[index] = static_cast<float>(group.min16);
      scale[index] = static_cast<float>(group.scale16);
      if (!group.valid && bad_group < 0) bad_group = index;
    };
    if (tensor_ == KvTensor::key) {  // [groups of rows, channels]
      for (int g = 0; g < group_count(row_count); ++g) {
        const int begin = g * kGroupSize, count = std::min(kGroupSize, row_count - begin);
        for (int d = 0; d < head_dim_; ++d) {
          const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(begin) * head_dim_ + d;
          store(encode_group(values.data() + offset, head_dim_, count, codes + offset, fault), g * head_dim_ + d);
        }
      }
    } else {  // [rows, groups of channels]
      const int groups = group_count(head_dim_);
      for (int i = 0; i < row_count; ++i) {
        for (int g = 0; g < groups; ++g) {
          const int begin = g * kGroupSize, count = std::min(kGroupSize, head_dim_ - begin);
          const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(i) * head_dim_ + begin;
          store(encode_group(values.data() + offset, 1, count, codes + offset, fault), i * groups + g);
        }
      }
    }
    return bad_group;
  }

  int parameter_index(int compact_row, int channel) const {
    return tensor_ == KvTensor::key ? compact_row / kGroupSize * head_dim_ + channel
                                    : compact_row * group_count(head_dim_) + channel / kGroupSize;
  }

  void reconstruct_present(const std::uint8_t* codes, const float* min, const float* scale, Fault fault) {
    for (int i = 0; i < static_cast<int>(rows_.size()); ++i) reconstruct_row(i, codes, min, scale, fault);
  }

  void reconstruct_row(int i, const std::uint8_t* codes, const float* min, const float* scale, Fault fault) {
    const int position = rows_[static_cast<std::size_t>(i)];
    Real* out = planes_.reconstructed(tensor_, layer_, loop_, head_, position);
    const Real* base = loop_ == 1 ? nullptr : planes_.reconstructed(tensor_, layer_, loop_ - 1, head_, position);
    for (int d = 0; d < head_dim_; ++d) {
      const int p = parameter_index(i, d);
      const Real decoded = decode_value<Real>(codes[i * head_dim_ + d], min[p], scale[p]);
      out[d] = base == nullptr ? decoded : base[d] + decoded;
      if (fault == Fault::reconstruction_in_bfloat16) out[d] = static_cast<Real>(round_to_bfloat16(static_cast<float>(out[d])));
    }
  }

  // Compact row i under the parameters that its K groups have, V under parameters of its own. Returns the index of the first group outside
  // the range, or -1.
  int encode_row_again(int i, std::uint8_t* codes, float* min, float* scale) {
    const int position = rows_[static_cast<std::size_t>(i)];
    const Real* x = planes_.exact(tensor_, layer_, loop_, head_, position);
    const Real* base = loop_ == 1 ? nullptr : planes_.reconstructed(tensor_, layer_, loop_ - 1, head_, position);
    std::vector<Real> target(x, x + head_dim_);
    for (int d = 0; d < head_dim_ && base != nullptr; ++d) target[static_cast<std::size_t>(d)] = x[d] - base[d];
    std::uint8_t* row = codes + static_cast<std::ptrdiff_t>(i) * head_dim_;
    if (tensor_ == KvTensor::key) {
      for (int d = 0; d < head_dim_; ++d) {
        const int p = parameter_index(i, d);
        if (!std::isfinite(target[static_cast<std::size_t>(d)])) return p;
        row[d] = encode_stored<Real>(target[static_cast<std::size_t>(d)], min[p], scale[p]);
      }
      return -1;
    }
    for (int begin = 0; begin < head_dim_; begin += kGroupSize) {
      const auto group = encode_group(target.data() + begin, 1, std::min(kGroupSize, head_dim_ - begin), row + begin);
      const int p = parameter_index(i, begin);
      if (!group.valid) return p;
      min[p] = static_cast<float>(group.min16);
      scale[p] = static_cast<float>(group.scale16);
    }
    return -1;
  }

  // A row absent from the stream inherits the reconstruction of the previous loop.
  void reconstruct_absent(int position, Fault fault, const float* min) {
    const Real* base = planes_.reconstructed(tensor_, layer_, loop_ - 1, head_, position);
    Real* out = planes_.reconstructed(tensor_, layer_, loop_, head_, position);
    std::copy(base, base + head_dim_, out);
    if (fault == Fault::absent_residual_as_code_zero && tensor_ == KvTensor::key && !rows_.empty()) {
      const auto rank = std::lower_bound(rows_.begin(), rows_.end(), position) - rows_.begin();
      const int neighbour = static_cast<int>(std::min<std::ptrdiff_t>(rank, static_cast<std::ptrdiff_t>(rows_.size()) - 1));
      for (int d = 0; d < head_dim_; ++d) out[d] += min[parameter_index(neighbour, d)];
    }
  }

 private:
  const Real* predecessor(int position, Fault fault) {
    return fault == Fault::unreconstructed_predecessor ? planes_.exact(tensor_, layer_, loop_ - 1, head_, position)
                                                       : planes_.reconstructed(tensor_, layer_, loop_ - 1, head_, position);
  }

  KvPlanes<Real>& planes_;
  int head_dim_, loop_, layer_, head_;
  KvTensor tensor_;
  const std::vector<std::int32_t>& rows_;
};

}  // namespace

template <class Real>
void encode_stream(KvPlanes<Real>& planes, const ModelConfig& model, PositionRange block, int loop, CodecStream& stream, Fault fault,
                   const std::string& where) {
  const std::int64_t rows = static_cast<std::int64_t>(stream.rows.size());
  std::vector<std::string> errors(static_cast<std::size_t>(model.layers));
  stream.layers.assign(static_cast<std::size_t>(rows == 0 ? 0 : model.layers), CodecLayer{});
  std::vector<std::int32_t> absent;
  for (int position = block.begin; position < block.end; ++position) {
    if (!std::binary_search(stream.rows.begin(), stream.rows.end(), position)) absent.push_back(position);
  }
#pragma omp parallel for schedule(static)
  for (int layer = 0; layer < model.layers; ++layer) {
    for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
      const bool is_key = tensor == KvTensor::key;
      Tensor<std::uint8_t> codes({model.heads, rows, model.head_dim});
      const std::vector<std::int64_t> parameter_shape = is_key ? std::vector<std::int64_t>{model.heads, (rows + kGroupSize - 1) / kGroupSize, model.head_dim}
                                                               : std::vector<std::int64_t>{model.heads, rows, group_count(model.head_dim)};
      Tensor<float> min(parameter_shape), scale(parameter_shape);
      for (int head = 0; head < model.heads; ++head) {
        HeadEncoder<Real> encoder(planes, model, loop, layer, tensor, head, stream.rows);
        const int bad = encoder.encode(encoder.targets(fault), codes.row(head).data(), min.row(head).data(), scale.row(head).data(), fault);
        if (bad >= 0 && errors[static_cast<std::size_t>(layer)].empty()) {
          errors[static_cast<std::size_t>(layer)] = where + ": a value of tensor " + (is_key ? "K" : "V") + ", loop " + std::to_string(loop) +
                                                    ", layer " + std::to_string(layer) + ", head " + std::to_string(head) + ", positions [" +
                                                    std::to_string(block.begin) + ", " + std::to_string(block.end) + "), group " + std::to_string(bad) +
                                                    " is not finite or its minimum or scale overflows FP16";
        }
        encoder.reconstruct_present(codes.row(head).data(), min.row(head).data(), scale.row(head).data(), fault);
        for (const int position : absent) encoder.reconstruct_absent(position, fault, min.row(head).data());
      }
      if (rows > 0) {
        CodecLayer& out = stream.layers[static_cast<std::size_t>(layer)];
        (is_key ? out.k_codes : out.v_codes) = std::move(codes);
        (is_key ? out.k_min : out.v_min) = std::move(min);
        (is_key ? out.k_scale : out.v_scale) = std::move(scale);
      }
    }
  }
  for (const std::string& error : errors) {
    if (!error.empty()) throw NumericError(error);
  }
}

template <class Real>
void reconstruct_stream(KvPlanes<Real>& planes, const ModelConfig& model, PositionRange block, int loop, const CodecStream& stream,
                        Fault fault) {
  for (int layer = 0; layer < model.layers; ++layer) {
    for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
      for (int head = 0; head < model.heads; ++head) {
        HeadEncoder<Real> decoder(planes, model, loop, layer, tensor, head, stream.rows);
        const float* min = nullptr;
        if (!stream.rows.empty()) {
          const CodecLayer& from = stream.layers.at(static_cast<std::size_t>(layer));
          const bool is_key = tensor == KvTensor::key;
          min = (is_key ? from.k_min : from.v_min).row(head).data();
          decoder.reconstruct_present((is_key ? from.k_codes : from.v_codes).row(head).data(), min,
                                      (is_key ? from.k_scale : from.v_scale).row(head).data(), fault);
        }
        for (int position = block.begin; position < block.end; ++position) {
          if (!std::binary_search(stream.rows.begin(), stream.rows.end(), position)) decoder.reconstruct_absent(position, fault, min);
        }
      }
    }
  }
}

template <class Real>
void encode_rows_again(KvPlanes<Real>& planes, const ModelConfig& model, int loop, CodecStream& stream, PositionRange positions,
                       const std::string& where) {
  for (int layer = 0; layer < model.layers; ++layer) {
    CodecLayer& codec = stream.layers.at(static_cast<std::size_t>(layer));
    for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
      const bool is_key = tensor == KvTensor::key;
      auto& codes = is_key ? codec.k_codes : codec.v_codes;
      auto &min = is_key ? codec.k_min : codec.v_min, &scale = is_key ? codec.k_scale : codec.v_scale;
      for (int head = 0; head < model.heads; ++head) {
        HeadEncoder<Real> encoder(planes, model, loop, layer, tensor, head, stream.rows);
        for (int position = positions.begin; position < positions.end; ++position) {
          const auto found = std::lower_bound(stream.rows.begin(), stream.rows.end(), position);
          if (found == stream.rows.end() || *found != position) throw InternalError(where + ": a row to be encoded again is not in its stream");
          const int row = static_cast<int>(found - stream.rows.begin());
          const int bad = encoder.encode_row_again(row, codes.row(head).data(), min.row(head).data(), scale.row(head).data());
          if (bad >= 0) {
            throw NumericError(where + ": a value of tensor " + (is_key ? "K" : "V") + ", loop " + std::to_string(loop) + ", layer " +
                               std::to_string(layer) + ", head " + std::to_string(head) + ", position " + std::to_string(position) + ", group " +
                               std::to_string(bad) + " is not finite or its minimum or scale overflows FP16");
          }
          encoder.reconstruct_row(row, codes.row(head).data(), min.row(head).data(), scale.row(head).data(), Fault::none);
        }
      }
    }
  }
}

template void reconstruct_stream<float>(KvPlanes<float>&, const ModelConfig&, PositionRange, int, const CodecStream&, Fault);
template void reconstruct_stream<double>(KvPlanes<double>&, const ModelConfig&, PositionRange, int, const CodecStream&, Fault);
template void encode_rows_again<float>(KvPlanes<float>&, const ModelConfig&, int, CodecStream&, PositionRange, const std::string&);
template void encode_rows_again<double>(KvPlanes<double>&, const ModelConfig&, int, CodecStream&, PositionRange, const std::string&);
template void encode_stream<float>(KvPlanes<float>&, const ModelConfig&, PositionRange, int, CodecStream&, Fault, const std::string&);
template void encode_stream<double>(KvPlanes<double>&, const ModelConfig&, PositionRange, int, CodecStream&, Fault, const std::string&);

}  // namespace loopgauge::reference
