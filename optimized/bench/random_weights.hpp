// SPDX-License-Identifier: Apache-2.0
// A model that needs no file: weights for measurements, made on the device.
#pragma once

#include <cstdint>

#include "optimized/device_weights.hpp"

namespace loopgauge::optimized {

// Uniform BF16 values from an integer hash of (index, tensor, seed), the same on every device: matrices within 0.03, embeddings, norms and the gate's bias
// within 1. Enqueued on `stream`, in whose order the allocator hands out memory if it does. Throws what upload_weights throws.
DeviceWeights random_weights(const ModelConfig& shape, DeviceAllocator& allocator, std::uint32_t seed, cudaStream_t stream);

}  // namespace loopgauge::optimized
