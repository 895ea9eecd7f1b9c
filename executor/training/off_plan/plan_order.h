// SPDX-License-Identifier: Apache-2.0
// The continuation of a plan, beyond the one trigger that the replayer names.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// A trigger: index into Plan::steps and index in the step.
struct PlanPosition {
  std::int32_t step = 0;
  std::int32_t trigger = 0;
};

// The fate of a unit's gradients in a backward.
enum class UnitGradients : std::uint8_t { kNone, kKept, kReduced };

class PlanOrder {
 public:
  // `plan` outlives this.
  explicit PlanOrder(const Plan& plan);

  const Trigger& At(PlanPosition position) const {
    return plan_.steps[position.step].triggers[position.trigger];
  }
  // The position after it; after the last of a step the first of the next.
  PlanPosition After(PlanPosition position) const;
  // The first trigger from `position` on that a hook passes (see PassedSilently).
  PlanPosition NextHooked(PlanPosition position) const;
  // Is it of a forward whose micro-batch has no backward: one that the loop may run under no_grad?
  bool HasNoBackward(PlanPosition position) const { return no_backward_[position.step][position.trigger]; }
  // Does the backward that this trigger is the end of forget what its forwards left behind (FSDP2's
  // set_is_last_backward)?
  bool IsLastBackward(PlanPosition position) const { return last_backward_[position.step][position.trigger]; }
  // Is it in a backward that leaves its gradients for a later one to reduce?
  bool KeepsGradients(PlanPosition position) const { return keeps_[position.step][position.trigger]; }
  // By unit, what that backward does with its gradients. Null behind the last backward of a step.
  const std::vector<UnitGradients>* Gradients(PlanPosition position) const {
    return gradients_[position.step][position.trigger].get();
  }
  // grad_unsharded buffers that its instructions take.
  const std::vector<BufferId>& GradientsTakenAt(PlanPosition position) const {
    return taken_[position.step][position.trigger];
  }
  // Parameters that train, of the units whose gradients it takes, and that no trigger takes from there on:
  // a gradient that one of them has there is of no use to the plan.
  const std::vector<SegmentGrad>& GradientsLeftAt(PlanPosition position) const {
    return left_[position.step][position.trigger];
  }
  // The next user call of the unit that does something, before the next trigger of a hook.
  std::optional<PlanPosition> NextUserCall(PlanPosition position, UnitId unit) const;
  // Whether one of any unit there takes gradients: a backward that the user finalizes.
  bool NextUserCallsTakeGradients(PlanPosition position) const;

 private:
  // The first that is `wanted` before the next trigger of a hook.
  template <typename Wanted>
  std::optional<PlanPosition> FindUserCall(PlanPosition position, const Wanted& wanted) const;

  const Plan& plan_;
  std::vector<std::vector<bool>> no_backward_;    // by step and trigger
  std::vector<std::vector<bool>> last_backward_;  // the same
  std::vector<std::vector<std::shared_ptr<const std::vector<UnitGradients>>>> gradients_;
  std::vector<std::vector<bool>> keeps_;                     // the same
  std::vector<std::vector<std::vector<BufferId>>> taken_;    // the same
  std::vector<std::vector<std::vector<SegmentGrad>>> left_;  // the same
};

// Has the model no hook for it? The user's calls are passed when the next trigger that has one comes.
bool PassedSilently(TriggerKind kind);

}  // namespace shardplan::executor
