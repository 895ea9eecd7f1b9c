// SPDX-License-Identifier: Apache-2.0
// Finishes a step that deviated from its plan.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "training/off_plan/on_demand.h"
#include "training/off_plan/plan_order.h"
#include "training/parameters/unit_state.h"

namespace shardplan::executor {

// [Note: fallback]
// A fallback finishes a step that deviated from its plan, when all ranks deviate alike, on demand: units are
// gathered when they are entered, forward and backward, and gradients are reduced unit by unit. The numbers
// are the plan's, but for the order in which the gradients of several backwards are added. It lasts until the
// optimizer steps (see Runtime::OptimizerSteps), or, where nobody sees that, until as many backwards as the
// plan has for the step are over.
//
// Members throw TrainingError.
class Fallback {
 public:
  // A point that a step passed, and the gradients that were made since the point before it.
  struct Passed {
    TriggerKind kind;
    UnitId unit;
    std::vector<SegmentGrad> grads;
    bool keeps = false;  // post_backward, backward_end: gradients were not reduced
    // No point, but where this module of a unit of several is entered (pre_forward) or left (post_forward).
    std::int32_t module = -1;
    bool seen = true;  // backward_end: a hook saw it (see [Note: backwards without an end])
  };
  // The same, in a step that follows the plan: in front of the trigger at `before`.
  struct ModulePassed {
    PlanPosition before;
    Passed passed;
  };

  // reduces(unit): are its gradients to be reduced, or kept? in_words(text): what each rank says, when all
  // say something. All outlive this.
  Fallback(const Plan& plan, const PlanOrder& order, std::vector<UnitState>& units,
           const BufferParameters& buffer_parameters, OnDemand& on_demand,
           std::function<bool(UnitId)> reduces, std::function<std::string(const std::string&)> in_words,
           UserLock* lock)
      : plan_(plan),
        order_(order),
        units_(units),
        buffer_parameters_(buffer_parameters),
        on_demand_(on_demand),
        reduces_(std::move(reduces)),
        in_words_(std::move(in_words)),
        lock_(lock) {}

  // A deviation does not end the training: its step is finished here, then on_step_end() is called.
  void Enable(std::function<void()> on_step_end) { on_step_end_ = std::move(on_step_end); }
  bool enabled() const { return static_cast<bool>(on_step_end_); }
  // Has the step under way left its plan?
  bool active() const { return active_; }
  // ... and has it had the backwards that its plan has?
  bool has_had_its_backwards() const { return backwards_left_ <= 0; }

  // Does the trigger at `next` find what the plan says: the kind, the unit, and the gradients that it takes?
  bool IsAsPlanned(PlanPosition next, TriggerKind kind, UnitId unit) const;
  // A parameter that has no gradient although the trigger at `next` takes it; "": none.
  std::string MissingGradient(PlanPosition next) const;
  // A parameter that has a gradient where `next` takes those of its unit, and that the plan does not take;
  // "": none.
  std::string ExtraGradient(PlanPosition next) const;
  // The step leaves its plan before `replayer`'s next trigger; `found` is what comes instead of `expected`,
  // for people. publish(): hands over the gradients that the plan has reduced. modules: of the step so far.
  void Begin(const std::string& found, const std::string& expected, Replayer& replayer,
             const std::function<void()>& publish, const std::vector<ModulePassed>& modules);
  // A point that is passed while active. full_precision: of a unit that is not to be gathered in the low one.
  void Pass(TriggerKind kind, UnitId unit, bool full_precision);
  // All ranks are there. Collective.
  void CheckTogether(TriggerKind kind, UnitId unit);
  // Another output tensor of a flat unit got its gradient.
  void NotePreBackward(UnitId unit) { log_.push_back({TriggerKind::kPreBackward, unit, {}}); }
  // A module of a unit of several is entered or left.
  void NoteModule(const Passed& passed);
  // The step is over: reduces what is not reduced, and calls on_step_end().
  void EndStep();
  // The step is abandoned.
  void Abandon();

  // The points of a step that follows the plan from its first trigger to the one at `until`. modules: those
  // that it entered and left, as far as they are known.
  std::vector<Passed> PlannedLog(PlanPosition until, const std::vector<ModulePassed>& modules) const;
  // The step that deviated, and what deviated first; "": none has.
  const std::vector<Passed>& log() const { return log_; }
  const std::string& deviation() const { return deviation_; }
  // The lock is held: lets go of what the user gave.
  void Clear() { on_step_end_ = {}; }

 private:
  // A gradient's tensor, and how often it was written; not to be looked into.
  using Seen = std::pair<const void*, std::uint32_t>;

  // [Note: backwards without an end]
  // A backward whose graph has no pre-backward of any unit has no end that a hook sees: FSDP2 queues none. It
  // is that of a head which is called beside the model, while another module of its unit has yet to run. The
  // log gets an end where it goes on with something else.
  struct OpenBackward {
    bool passed = false;  // has had a point, and no end
    bool ends = false;    // a hook will see its end
    bool keeps = false;
    std::int64_t id = -1;
    // A point of the backward `id` (-1: none) comes next.
    void Before(std::int64_t next, std::vector<Passed>& log);
    void Note(const Passed& passed, std::int64_t of);
  };

  std::vector<Passed> PlannedLog(PlanPosition until, const std::vector<ModulePassed>& modules,
                                 OpenBackward& open) const;
  int BackwardsFrom(PlanPosition now) const;
  void TakeGradients(UnitId unit);
  // The gradients of a unit's parameters, as they are now; none of a flat unit.
  std::vector<Seen> Gradients(UnitId unit) const;
  void EndBackward();

  const Plan& plan_;
  const PlanOrder& order_;
  std::vector<UnitState>& units_;
  const BufferParameters& buffer_parameters_;
  OnDemand& on_demand_;
  const std::function<bool(UnitId)> reduces_;
  const std::function<std::string(const std::string&)> in_words_;
  UserLock* const lock_;
  std::function<void()> on_step_end_;  // empty: a deviation is an error
  bool active_ = false;
  std::string deviation_;
  std::vector<Passed> log_;
  OpenBackward open_;       // of the log
  int backwards_left_ = 0;  // of the step that deviated
  std::vector<std::vector<Seen>>
      seen_;  // by unit and parameter: gradients that are in the log, and not reduced yet
};

// "pre_forward of layers.0".
std::string TriggerText(const Plan& plan, const TriggerKey& key);

}  // namespace shardplan::executor
