// SPDX-License-Identifier: Apache-2.0
// Decode steps as CUDA graphs. What is captured is one loop of a batch of decode rows: exits are decided and blocks are sealed between loops and
// between tokens, so a loop is the longest stretch that is the same for every step.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "optimized/forward_pass.hpp"

namespace loopgauge::optimized {

// What `enqueue` puts on the stream, captured as an executable graph.
class CapturedStep {
 public:
  // Throws, with the stream usable, what `enqueue` throws; a call that a replay could not repeat fails. `enqueue` must not allocate: cudaMalloc fails, but
  // memory in stream order becomes the graph's.
  CapturedStep(cudaStream_t stream, const std::function<void()>& enqueue);
  void replay(cudaStream_t stream) const;

 private:
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { static_cast<void>(cudaGraphExecDestroy(graph)); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> graph_;
};

class StepGraphs {
 public:
  // Two steps with the same key enqueue the same kernels with the same arguments (S-GRAPH-1).
  struct Key {
    int rows = 0;                                        // bucket, padding included
    int decode_length = 0;                               // bucket of the context
    ForwardPass::Kinds kinds;
    auto operator<=>(const Key&) const = default;
  };
  enum class Outcome { ran_eagerly, captured_and_replayed, replayed };

  static constexpr int kMaxGraphs = 64;                  // captured at once; steps of further keys run eagerly
  static int bucket(int value, int smallest);            // the power of two >= value, at least `smallest`

  // Enqueues one step: eagerly until that has succeeded once for its key, which is the warm run that makes every allocation; from then on as a
  // replay. `address_version`: graphs captured under another one use memory that has moved, and are dropped.
  Outcome run(const Key& key, std::uint64_t address_version, cudaStream_t stream, const std::function<void()>& enqueue);

 private:
  std::map<Key, std::unique_ptr<const CapturedStep>> graphs_;  // null: run once
  std::uint64_t address_version_ = 0;
};

}  // namespace loopgauge::optimized
