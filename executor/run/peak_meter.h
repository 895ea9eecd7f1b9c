// SPDX-License-Identifier: Apache-2.0
// The highest number of bytes of device memory that were allocated at once (device.h).
//
// It is looked at behind every instruction of the plan and behind every allocation of the model: what a
// kernel takes and gives back within one instruction is not seen, and no part of a simulation's peak.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "shardplan/executor/device.h"

namespace shardplan::run {

class PeakMeter {
 public:
  // Earlier allocations that `count` was not told of do not count.
  explicit PeakMeter(std::shared_ptr<const executor::AllocationCount> count) : count_(std::move(count)) {}

  void Look() { peak_ = std::max(peak_, count_->now()); }
  Bytes peak_bytes() const { return peak_; }

 private:
  std::shared_ptr<const executor::AllocationCount> count_;
  Bytes peak_;
};

}  // namespace shardplan::run
