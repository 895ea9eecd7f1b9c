// SPDX-License-Identifier: Apache-2.0
// How reduced gradients reach the optimizer: the sharded parameters' .grad.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/executor/torch_device.h"
#include "training/parameters/unit_state.h"
#include "training/user_lock.h"

namespace shardplan::executor {

// Gradients are handed over when the backward ends, all at once, unless the user waits for them with hooks on
// the sharded parameters (an optimizer that steps inside the backward).
class GradientHandover {
 public:
  // All outlive this.
  GradientHandover(const Plan& plan, std::int64_t rank, TorchDevice& device, std::vector<UnitState>& units,
                   const BufferParameters& buffer_parameters, UserLock* lock)
      : plan_(plan),
        rank_(rank),
        device_(device),
        units_(units),
        buffer_parameters_(buffer_parameters),
        lock_(lock) {}

  // The buffer's gradients are complete: handed over now where the user waits for them, else kept.
  Status Ready(UnitId unit, BufferId buffer);
  // The backward is over: hands over what was kept. Flat units that got nothing are given zeros, if any unit
  // got a gradient, or always (`zeros`). Throws TrainingError. Takes the lock.
  void PublishAll(bool zeros);
  // Has the user let go of a gradient that was handed over and that the plan still has (zero_grad between
  // micro-batches)? It does not matter for flat units: FlatUnit::WriteBack.
  bool IsDropped() const;
  // Gradients that were kept, or handed over, are the plan's no more.
  void Forget() {
    kept_.clear();
    published_.clear();
  }
  // An optimizer in the backward: that of one original parameter of a flat unit.
  Status StepInBackward(UnitId unit, std::int32_t parameter, StreamId stream);

 private:
  struct Kept {
    UnitId unit;
    BufferId buffer;
  };
  Status Publish(UnitId unit, BufferId buffer);
  Status PublishInBackward(UnitId unit, BufferId buffer);
  Status PublishFlat(UnitId unit, BufferId buffer);

  const Plan& plan_;
  const std::int64_t rank_;
  TorchDevice& device_;
  std::vector<UnitState>& units_;
  const BufferParameters& buffer_parameters_;
  UserLock* const lock_;
  std::vector<Kept> kept_;       // reduced in this backward
  std::vector<Kept> published_;  // handed over at the end of a backward, since the plan's zero_grad
};

}  // namespace shardplan::executor
