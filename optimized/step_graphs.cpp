// SPDX-License-Identifier: Apache-2.0
#include "optimized/step_graphs.hpp"

#include <algorithm>
#include <bit>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { static_cast<void>(cudaGraphDestroy(graph)); }
};

}  // namespace

CapturedStep::CapturedStep(cudaStream_t stream, const std::function<void()>& enqueue) {
  // A call that a replay could not repeat fails under this mode. Memory in stream order does not: it would be the graph's (StepGraphs::run).
  LOOPGAUGE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream, &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
    throw;
  }
  LOOPGAUGE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph> owner(graph);
  cudaGraphExec_t executable = nullptr;
  LOOPGAUGE_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  graph_.reset(executable);
}

void CapturedStep::replay(cudaStream_t stream) const { LOOPGAUGE_CUDA_CHECK(cudaGraphLaunch(graph_.get(), stream)); }

int StepGraphs::bucket(int value, int smallest) {
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(value, smallest))));
}

StepGraphs::Outcome StepGraphs::run(const Key& key, std::uint64_t address_version, cudaStream_t stream,
                                    const std::function<void()>& enqueue) {
  if (address_version != address_version_) {
    // One that is still running is freed by the driver when it ends, and the memory that it uses after it, in stream order.
    for (auto& [other, graph] : graphs_) graph.reset();
    address_version_ = address_version;
  }
  const auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    enqueue();
    // Only now: what threw, for want of memory say, has not made every allocation, and a capture must make none.
    if (graphs_.size() < kMaxGraphs) graphs_.emplace(key, nullptr);
    return Outcome::ran_eagerly;
  }
  const bool fresh = found->second == nullptr;
  if (fresh) found->second = std::make_unique<const CapturedStep>(stream, enqueue);
  found->second->replay(stream);
  return fresh ? Outcome::captured_and_replayed : Outcome::replayed;
}

}  // namespace loopgauge::optimized
