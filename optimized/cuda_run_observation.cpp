// SPDX-License-Identifier: Apache-2.0
// What a run shows of itself: taps, hidden rows and gates of the record.
#include <algorithm>
#include <bit>

#include "optimized/cuda_run.hpp"
#include "optimized/ops/exit_gate.cuh"

namespace loopgauge::optimized {
namespace {

float widen(Bfloat16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(value)) << 16); }

}  // namespace

// Turns the rows of a forward pass into tap records. Waits for the device: which rows there are is the device's knowledge.
class CudaRun::TapObserver final : public RowObserver {
 public:
  TapObserver(CudaRun& run, const std::vector<Part>& parts, int rows)
      : run_(run), parts_(parts), rows_(run.read(run.forward_.rows(), static_cast<std::size_t>(rows))) {}

  void observe(std::string_view operation, int layer, const Bfloat16* values, std::int64_t row_stride, int width) override {
    const std::size_t rows = rows_.size(), columns = static_cast<std::size_t>(width);
    const bool before_loops = operation == "embedding";
    std::vector<Bfloat16> copy(rows * columns);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy2DAsync(copy.data(), columns * sizeof(Bfloat16), values,
                                           static_cast<std::size_t>(row_stride) * sizeof(Bfloat16), columns * sizeof(Bfloat16), rows,
                                           cudaMemcpyDeviceToHost, run_.stream_));
    run_.stream_.synchronize();
    std::vector<float> widened(copy.size());
    std::transform(copy.begin(), copy.end(), widened.begin(), widen);
    for (const Part& part : parts_) {
      if (before_loops && part.loop > 1) continue;
      for (int i = 0; i < part.rows; ++i) {
        const auto row = static_cast<std::size_t>(part.first_row + i);
        if (rows_[row].request < 0) continue;
        run_.tap_row(operation, *part.request, before_loops ? 0 : part.loop, layer, rows_[row].position,
                     std::span<const float>(widened).subspan(row * columns, columns));
      }
    }
  }

  void observe_references(int layer) override {
    const KvShape& shape = run_.kv_.shape();
    const ReferenceView view = run_.references_->view();
    for (const Part& part : parts_) {
      if (part.kind != RowKind::decode || part.loop != 2) continue;
      const RequestState& s = *part.request;
      const QueryRow& row = rows_[static_cast<std::size_t>(part.first_row)];
      if (row.request < 0) continue;
      const std::size_t first = reference_index(shape, row.reference, layer, 0);
      const std::size_t heads = static_cast<std::size_t>(shape.heads);
      std::vector<float> listed;
      const auto masks = run_.read(view.selected + first * view.mask_pages, heads * view.mask_pages);
      for (std::size_t head = 0; head < heads; ++head) {
        for (int position = 0; position <= row.position; ++position) {
          const std::uint64_t mask = masks[head * view.mask_pages + static_cast<std::size_t>(position / kPageTokens)];
          if ((mask >> (position % kPageTokens)) & 1u) listed.push_back(static_cast<float>(position));
        }
      }
      run_.tap_row("sparse_decode.keys", s, 2, layer, row.position, listed);
      run_.tap_row("sparse_decode.mass", s, 2, layer, row.position, run_.read(view.mass + first, heads));
      run_.tap_row(
          "sparse_decode.c_ref", s, 2, layer, row.position,
          run_.read(view.c_ref + first * static_cast<std::size_t>(shape.head_dim), heads * static_cast<std::size_t>(shape.head_dim)));
    }
  }

 private:
  CudaRun& run_;
  const std::vector<Part>& parts_;
  const std::vector<QueryRow> rows_;
};

std::unique_ptr<RowObserver> CudaRun::make_tap_observer(const std::vector<Part>& parts, int rows) {
  return std::make_unique<TapObserver>(*this, parts, rows);
}

void CudaRun::widen_row(std::span<const Bfloat16> from, float* to) { std::transform(from.begin(), from.end(), to, widen); }

// H of `loop` for `positions`, and its gate, where the record keeps them.
void CudaRun::record_states(RequestState& s, const Bfloat16* states, PositionRange positions, int loop) {
  const auto count = static_cast<std::size_t>(positions.size()), hidden = static_cast<std::size_t>(model_.hidden);
  if (options_.record.hidden) {
    const Bfloat16* rows = download(states, count * hidden);
    on_delivery([&s, rows, positions, loop, hidden] {
      if (s.drops_results()) return;
      widen_row(std::span(rows, static_cast<std::size_t>(positions.size()) * hidden),
                s.record.hidden[static_cast<std::size_t>(loop - 1)].row(positions.begin).data());
    });
  }
  if (options_.record.gate) {
    float* gates = state_gates_.reserve<float>(std::max<std::size_t>(count, static_cast<std::size_t>(config_.window())));
    exit_gate(states, weights_.early_exit_gate.as<Bfloat16>(), weights_.early_exit_bias.as<Bfloat16>(), gates, positions.size(),
              model_.hidden, stream_);
    const float* values = download(gates, count);
    on_delivery([&s, values, positions, loop] {
      if (s.drops_results()) return;
      for (int i = 0; i < positions.size(); ++i) s.record.gate.row(positions.begin + i)[static_cast<std::size_t>(loop - 1)] = values[i];
    });
  }
}

void CudaRun::tap_row(std::string_view operation, const RequestState& s, int loop, int layer, int position,
                      std::span<const float> values) const {
  if (options_.tap != nullptr) options_.tap->record({submission_, s.index, position, loop, layer, operation}, values);
}

}  // namespace loopgauge::optimized
