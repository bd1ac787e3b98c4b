// SPDX-License-Identifier: Apache-2.0
// RAII for CUDA streams and events, and page-locked host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace loopgauge::optimized {

// A non-blocking stream of the current device. Destruction waits for nothing; work in flight completes by itself.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;

  cudaStream_t get() const { return stream_; }
  operator cudaStream_t() const { return stream_; }
  // Throws DeviceError if any earlier work of the stream failed.
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  enum class Timing { off, on };
  explicit Event(Timing timing = Timing::off);
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream);
  void synchronize() const;
  // Later work of `stream` waits for this event's last record.
  void block(cudaStream_t stream) const;
  // Milliseconds from `start` to this event; both with Timing::on, recorded and complete.
  float milliseconds_since(const Event& start) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Page-locked host memory, so that copies to and from the device are asynchronous.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(std::size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <class T>
  T* as() { return static_cast<T*>(data_); }
  template <class T>
  const T* as() const { return static_cast<const T*>(data_); }
  std::size_t size_bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace loopgauge::optimized
