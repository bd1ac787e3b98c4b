// SPDX-License-Identifier: Apache-2.0
// The dense run of every trace, made once and shared by the threads that measure drift against it.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "models/run_record.hpp"

namespace loopgauge::harness {

class DenseBaselines {
 public:
  // The right and duty to make the baseline of a trace. Dropped unfulfilled (the run failed), it lets the next one in need make it.
  class Claim {
   public:
    Claim() = default;
    Claim(Claim&& other) noexcept;
    Claim& operator=(Claim&& other) noexcept;
    ~Claim();
    explicit operator bool() const { return owner_ != nullptr; }
    void fulfil(RunRecord record);

   private:
    friend class DenseBaselines;
    Claim(DenseBaselines* owner, std::string trace) : owner_(owner), trace_(std::move(trace)) {}
    DenseBaselines* owner_ = nullptr;
    std::string trace_;
  };

  // An empty claim when the baseline exists or is being made.
  Claim claim(const std::string& trace);

  // The baseline; waits for whoever is making it; calls `make` when nobody is. What `make` throws passes through.
  std::shared_ptr<const RunRecord> get(const std::string& trace, const std::function<RunRecord()>& make);

  // Frees the baseline of a trace that no later case needs.
  void forget(const std::string& trace);

 private:
  struct Entry {
    bool in_progress = false;
    std::shared_ptr<const RunRecord> record;
  };
  void settle(const std::string& trace, std::shared_ptr<const RunRecord> record);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Entry> entries_;
};

}  // namespace loopgauge::harness
