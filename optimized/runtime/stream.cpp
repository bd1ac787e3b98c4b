// SPDX-License-Identifier: Apache-2.0
#include "optimized/runtime/stream.hpp"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {

Stream::Stream() { LOOPGAUGE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }

Stream::~Stream() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

void Stream::synchronize() const { LOOPGAUGE_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

Event::Event(Timing timing) {
  LOOPGAUGE_CUDA_CHECK(cudaEventCreateWithFlags(&event_, timing == Timing::on ? cudaEventDefault : cudaEventDisableTiming));
}

Event::~Event() {
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
}

void Event::record(cudaStream_t stream) { LOOPGAUGE_CUDA_CHECK(cudaEventRecord(event_, stream)); }
void Event::synchronize() const { LOOPGAUGE_CUDA_CHECK(cudaEventSynchronize(event_)); }
void Event::block(cudaStream_t stream) const { LOOPGAUGE_CUDA_CHECK(cudaStreamWaitEvent(stream, event_)); }

float Event::milliseconds_since(const Event& start) const {
  float milliseconds = 0.0f;
  LOOPGAUGE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.event_, event_));
  return milliseconds;
}

PinnedBuffer::PinnedBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes != 0) LOOPGAUGE_CUDA_CHECK(cudaMallocHost(&data_, bytes));
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) static_cast<void>(cudaFreeHost(data_));
}

}  // namespace loopgauge::optimized
