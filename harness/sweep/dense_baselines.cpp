// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/dense_baselines.hpp"

#include <utility>

namespace loopgauge::harness {

DenseBaselines::Claim::Claim(Claim&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)), trace_(std::move(other.trace_)) {}

DenseBaselines::Claim& DenseBaselines::Claim::operator=(Claim&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(trace_, other.trace_);
  return *this;
}

DenseBaselines::Claim::~Claim() {
  if (owner_ != nullptr) owner_->settle(trace_, nullptr);
}

void DenseBaselines::Claim::fulfil(RunRecord record) {
  std::exchange(owner_, nullptr)->settle(trace_, std::make_shared<const RunRecord>(std::move(record)));
}

DenseBaselines::Claim DenseBaselines::claim(const std::string& trace) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[trace];
  if (entry.record || entry.in_progress) return {};
  entry.in_progress = true;
  return {this, trace};
}

std::shared_ptr<const RunRecord> DenseBaselines::get(const std::string& trace, const std::function<RunRecord()>& make) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !entries_[trace].in_progress; });
    Entry& entry = entries_[trace];
    if (entry.record) return entry.record;
    entry.in_progress = true;
  }
  Claim mine(this, trace);
  mine.fulfil(make());
  const std::lock_guard lock(mutex_);
  return entries_[trace].record;
}

void DenseBaselines::forget(const std::string& trace) {
  const std::lock_guard lock(mutex_);
  entries_.erase(trace);
}

void DenseBaselines::settle(const std::string& trace, std::shared_ptr<const RunRecord> record) {
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[trace];
    entry.in_progress = false;
    if (record) entry.record = std::move(record);
  }
  changed_.notify_all();
}

}  // namespace loopgauge::harness
