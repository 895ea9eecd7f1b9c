// What finishes a step that deviated from its plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "fallback_reduction.h"
#include "plan_order.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/torch_device.h"
#include "unit_state.h"
#include "unplanned_gathers.h"

namespace shardplan::python {

// See [Note: fallback]. Members throw std::runtime_error with a message for a person.
class Fallback {
 public:
  // A point that a step passed, and the gradients that were made since the point before it.
  struct Passed {
    TriggerKind kind;
    UnitId unit;
    std::vector<SegmentGrad> grads;
  };

  // groups: by CommunicatorId. shards: by unit and parameter. All but `groups` outlive this.
  Fallback(const Plan& plan, std::int64_t rank, const PlanOrder& order, executor::TorchDevice& device,
           std::vector<UnitState>& units, const BufferParameters& buffer_parameters,
           const std::vector<std::vector<at::Tensor>>& shards, UnplannedGathers& gathers,
           std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups)
      : plan_(plan),
        order_(order),
        device_(device),
        units_(units),
        buffer_parameters_(buffer_parameters),
        shards_(shards),
        gathers_(gathers),
        reduction_(plan, rank, std::move(groups)) {}

  // A deviation does not end the training: its step is finished here, then on_step_end() is called.
  void Enable(PyRef on_step_end) { on_step_end_ = std::move(on_step_end); }
  bool enabled() const { return static_cast<bool>(on_step_end_); }
  // Has the step under way left its plan?
  bool active() const { return active_; }

  // Does the trigger at `next` find what the plan says: the kind, the unit, and the gradients that it takes?
  bool IsAsPlanned(PlanPosition next, TriggerKind kind, UnitId unit) const;
  // The step leaves its plan: (kind, unit) is passed where the replayer expects another trigger. publish():
  // hands over the gradients that the plan has reduced.
  void Begin(TriggerKind kind, UnitId unit, const executor::Replayer& replayer,
             const std::function<void()>& publish);
  // Every trigger up to `next` was as planned, but there are gradients that they did not reduce.
  void BeginAtBackwardEnd(std::string deviation, PlanPosition next);
  // A point that is passed while active. full_precision: of a unit that is not to be gathered in the low one.
  void Pass(TriggerKind kind, UnitId unit, bool full_precision);
  // Another output tensor of a flat unit got its gradient.
  void NotePreBackward(UnitId unit) { log_.push_back({TriggerKind::kPreBackward, unit, {}}); }

  // Of the step that deviated, and what deviated first; "": none has.
  const std::vector<Passed>& log() const { return log_; }
  const std::string& deviation() const { return deviation_; }
  // The GIL is held: lets go of Python objects.
  void Clear() { on_step_end_ = {}; }

 private:
  void LogPlannedTriggers(PlanPosition now);
  at::Tensor TakeGradient(UnitId unit, std::int32_t parameter);
  at::Tensor TakeAccumulated(UnitId unit, std::int32_t parameter);
  std::vector<at::Tensor> TakeGradients(UnitId unit);
  void Reduce(UnitId unit);
  void ReduceFlat(UnitId unit);
  void EndBackward();

  const Plan& plan_;
  const PlanOrder& order_;
  executor::TorchDevice& device_;
  std::vector<UnitState>& units_;
  const BufferParameters& buffer_parameters_;
  const std::vector<std::vector<at::Tensor>>& shards_;
  UnplannedGathers& gathers_;
  FallbackReduction reduction_;
  PyRef on_step_end_;  // null: a deviation is an error
  bool active_ = false;
  std::string deviation_;
  std::vector<Passed> log_;
  std::set<std::pair<BufferId, std::int32_t>> accumulated_taken_;
  int backwards_left_ = 0;  // of the step that deviated
};

}  // namespace shardplan::python
