// SPDX-License-Identifier: Apache-2.0
// Runtime: what stands between a torch module, in Python or in C++, and the replayer. The module's hooks tell
// it which point they have passed (unit_hooks.h); it fires the plan's triggers and is the replayer's Model:
// it swaps the modules' parameters and hands gradients over both ways.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/step_recorder.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/plan.h"
#include "training/off_plan/fallback.h"
#include "training/off_plan/on_demand.h"
#include "training/off_plan/plan_order.h"
#include "training/parameters/gradient_handover.h"
#include "training/parameters/unit_state.h"
#include "training/profiler_ranges.h"
#include "training/runtime/module_groups.h"
#include "training/user_lock.h"

namespace shardplan::executor {

// [Note: who passes which trigger]
// The model passes pre_forward, post_forward, pre_backward and post_backward, the autograd engine's final
// callback backward_end. All others (step_begin, the optimizer's, user calls, step_end) have no hook: they
// are fired when the next one that has comes. So the optimizer stays the user's, wherever in the loop it is
// called.
//
// Work beside the plan is in classes of its own: OnDemand (evaluation, calls of the user), Fallback (a step
// that left its plan). GradientHandover gives reduced gradients to the parameters, ParameterChanges sees what
// the user did to them, ModuleGroups knows which module runs a unit's hooks.
//
// Nothing here knows the language of the model: what it has to do with that is in a ModelParameter, in a
// FlatUnit, and in what RuntimeOptions and the virtual functions of this class say.
//
// Not thread safe, and need not be: the thread of the forward and that of the backward take turns. Members
// throw TrainingError.
struct RuntimeOptions {
  UserLock* lock = nullptr;  // outlives the runtime; null: the model has none
  // Advice in messages, in the words of the model's language.
  std::string_view after_deviation;              // a sentence
  std::string_view after_freezing;               // a sentence: a parameter was frozen or unfrozen
  std::string_view gives_up;                     // the call that gives a step up
  std::function<void(const std::string&)> warn;  // tells the user
  // Shared with the collectives; null: ranks leave a plan unasked.
  std::shared_ptr<DeviationConsensus> consensus = nullptr;
};

class Runtime : public Model, public std::enable_shared_from_this<Runtime> {
 public:
  // groups: by CommunicatorId, for evaluation.
  Runtime(std::shared_ptr<const Plan> plan, std::int64_t rank, std::unique_ptr<TorchDevice> device,
          std::unique_ptr<Collectives> collectives,
          std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups, RuntimeOptions options);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ---- while a plan is applied, in this order ----
  // The padded flat shards of a unit, one per Unit::parameters. Used in place.
  void SetShards(UnitId unit, std::vector<at::Tensor> padded);
  // Makes the replayer. After all shards.
  void Start();
  // The whole parameter, for the modules to hold; its storage is empty while the unit is not gathered.
  at::Tensor UnshardedView(UnitId unit, std::int32_t parameter) const;
  // In the order of Unit::parameters.
  void AddParameter(UnitId unit, std::unique_ptr<ModelParameter> parameter);
  // ... of a flat unit, in place of SetShards and AddParameter; runtime_flat.cc.
  void SetFlatShard(UnitId unit, at::Tensor shard);
  std::shared_ptr<FlatGradient> MakeFlatGradient(UnitId unit);
  // Is its shard in host memory, and has it a gradient of zeros there?
  bool HasZerosOnHost(UnitId unit, const FlatUnit::Options& options) const;
  void SetFlatUnit(UnitId unit, std::unique_ptr<FlatUnit> flat);

  // ---- from the hooks ----
  // A unit is entered: the step under way is given up if its forward or backward was not finished. -1: of a
  // unit that may be entered again in one forward; then only a backward tells.
  void GiveUpInterrupted(UnitId entered) {
    if (now_.backward_end_queued || (now_.forward_root == entered && entered >= 0)) [[unlikely]] {
      GiveUpIfInterrupted(entered);
    }
  }
  // full_precision: the unit is not to be gathered in the low one, where the plan has no say.
  void PreForward(UnitId unit, bool full_precision = false);
  // Is the unit, whose forward has begun, in no other one's? -1: a root that is no unit.
  bool IsOutermost(UnitId unit) const {
    return unit < 0 || now_.forward_root == unit || now_.evaluation_root == unit;
  }
  c10::Device torch_device() const { return device_->torch_device(); }
  // Returns the units that are left with it, the forward's outermost; see [Note: groups].
  std::vector<UnitId> PostForward(UnitId unit);
  // A module of a unit of several is entered (pre_forward) or left (post_forward), its number in the unit.
  void NoteModule(TriggerKind kind, UnitId unit, std::int32_t module);
  // run: of which forward of the unit, as Runs() counted it then.
  void PreBackward(UnitId unit, std::int64_t run);
  // Forwards of the unit that have been left.
  std::int64_t Runs(UnitId unit) const { return unit < 0 ? 0 : units_[unit].runs; }
  void PostBackward(UnitId unit);
  // Has the unit had its pre_backward in the backward under way? A forward of it is then a recomputation,
  // which finds the parameters that pre_backward gathered. A plan may name the point, but need not.
  // (FSDP1 forgets it at the post_backward.)
  bool IsRecomputing(UnitId unit) const {
    if (unit < 0) return false;
    return units_[unit].flat ? units_[unit].in_backward : units_[unit].backward_begun;
  }
  void Recompute(TriggerKind kind, UnitId unit);
  ModuleGroups& groups() { return groups_; }
  // Null: the unit's layout is per_parameter.
  FlatUnit* Flat(UnitId unit) const { return unit < 0 ? nullptr : units_[unit].flat.get(); }

  // ---- from the user ----
  // The plan's next user call of the unit, which would else be passed with the next hook. One that is not in
  // the plan gathers (frees) the unit for as long as no step follows the plan.
  void Unshard(UnitId unit);
  void Reshard(UnitId unit);
  // A call of the user's that only a plan has. Throws where it does not have one of the unit here.
  void PassCall(UnitId unit, const std::string& method);
  // Why forwards fail. Empty: they succeed.
  void Suspend(std::string reason) { user_.suspended = std::move(reason); }
  // hook(reduced gradient) after the last collective of the unit's reductions, as FSDP2's
  // set_all_reduce_hook. An exception of it fails the step. Empty: none.
  void SetReductionHook(UnitId unit, std::function<void(const at::Tensor&)> hook) {
    units_[unit].reduction_hook = std::move(hook);
  }
  // An optimizer of the model's parameters is about to step. A step of the plan that is not over then
  // deviates.
  void OptimizerSteps();
  // ... has stepped. For a recording alone.
  void OptimizerStepped();
  // Steps that begin from now on are recorded (step_recorder.h), as many as `options.steps` and, between
  // them, as many that are not. Nothing is kept of a recording under way.
  void StartRecording(RecorderOptions options);
  bool HasRecorded() const { return recording_.recorder != nullptr && recording_.recorder->done(); }
  std::int64_t recorded_steps() const { return recording_.recorder ? recording_.recorder->recorded() : 0; }
  // The recording as a document; a step under way is not in it. "": there is none.
  std::string StopRecording();
  // Optimizers of the model have been seen to step, by another runtime: OptimizerSteps will be called.
  void ExpectOptimizer() { user_.optimizer_seen = true; }
  // One is likely to: until it does, a step on demand ends where a forward follows a backward that has
  // reduced all gradients, and not before.
  void AwaitOptimizer() { user_.awaits_optimizer = true; }
  bool optimizer_seen() const { return user_.optimizer_seen; }
  // The user's setting of set_requires_gradient_sync on the units, from now on; by unit. The plan's step is
  // followed as long as it does the same.
  void SetRequiresGradientSync(const std::vector<UnitId>& units, bool value);
  void SetIsLastBackward(bool value) { user_.is_last_backward = value; }
  // The step under way is given up: gradients and gathered parameters are dropped, shards stay as they are,
  // and the next forward begins a step. Not after an error of a collective.
  void Abandon();
  // The next trigger is the plan's first. Every unit is sharded, and no gradient is left to be reduced.
  void Restart();
  // Are all ranks about to do the same, which a number stands for? Collective.
  bool Alike(std::int64_t number) { return on_demand_.Alike(number); }
  // The texts of all ranks; see DeviationConsensus::Tell.
  std::vector<std::string> Tell(const std::string& text);
  // Inside a step the modules of gathered units hold whole parameters: shows the shards, and the whole ones
  // again. For reading.
  void ShowShards(bool show);
  // The points of a step of the plan, one of those that repeat.
  std::vector<Fallback::Passed> PlannedLog() const;
  Fallback& fallback() { return fallback_; }
  const Fallback& fallback() const { return fallback_; }
  // By forward of the step under way, or of the one that deviated: was it to have full precision?
  const std::vector<bool>& full_precision_forwards() const { return now_.full_precision_forwards; }
  bool BetweenSteps() const;
  // Forwards with gradients begun, and backwards ended, in the step under way.
  std::int64_t forwards() const { return std::ssize(now_.full_precision_forwards); }
  std::int64_t backwards() const { return now_.backwards + (IsOver(now_.unseen_backward) ? 1 : 0); }
  // Steps of the training so far, of this runtime and of those before it.
  std::int64_t step() const { return replayer_->step(); }
  void CountFrom(std::int64_t step) { replayer_->CountFrom(step); }
  // The next point of the plan, or the one that is being fired.
  TriggerKey NextPoint() const { return TriggerKey(replayer_->Expected()); }
  // The position of the replayer, for people.
  std::string Where() const { return replayer_ ? replayer_->Where() : "not started"; }

  // ---- Model ----
  bool RunsItself() const override { return true; }
  Status ShardedParametersRead(UnitId unit, StreamId stream) override;
  Status BindUnsharded(UnitId unit, BufferId buffer) override;
  Status BindSharded(UnitId unit, BufferId buffer) override;
  Status TakeGradients(UnitId unit, BufferId buffer) override;
  Status DropGradients(UnitId unit, BufferId buffer, std::span<const std::int32_t> parts) override;
  Status GradientsReduced(UnitId unit, BufferId buffer, StreamId stream) override;
  Status ShardedGradientsReady(UnitId unit, BufferId buffer) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;
  Status ZeroGrad(UnitId unit) override;

 protected:
  static constexpr UnitId kNoUnit = -2;

  // The user may have replaced sharded parameters of the units that are sharded since the step before.
  virtual void AdoptChanges() {}
  // A parameter that was frozen or unfrozen since the plan was made, in words; "": none was.
  std::string RequiresGradChange() const;
  // Why the model may not pass a point of the unit, for people; "": unknown.
  virtual std::string ExplainDeviation(UnitId) { return {}; }

  // Does the next forward begin a step, or follow a step on demand whose end no optimizer showed, which is
  // over with a backward that has reduced everything?
  bool BeginsStep() const;
  // ... or an evaluation between steps?
  bool BeginsForward() const;
  bool FollowsLastBackward() const;
  void EndFallback();

  const Plan& plan() const { return *plan_; }
  TorchDevice& device() { return *device_; }
  Collectives& collectives() { return *collectives_; }
  const at::Tensor& FlatShard(UnitId unit) const { return shards_[unit][0]; }
  const std::vector<UnitState>& units() const { return units_; }
  UserLock* lock() const { return lock_; }
  // For a destructor: of what needs the lock to die, and of what must die without it.
  void DropObjects();
  void DropExecution();

 private:
  PlanPosition Position() const { return {replayer_->step_index(), replayer_->trigger_index()}; }
  bool IsEvaluation(UnitId entered);
  bool PassUserCall(UnitId unit);
  // full_precision: as in PreForward.
  void Pass(TriggerKind kind, UnitId unit, bool full_precision = false);
  bool Deviates(TriggerKind kind, UnitId unit) const;
  void Fire(const TriggerKey& trigger);
  Status FireWatched(const TriggerKey& trigger);
  void BackwardEnd();
  // [Note: backwards without an end]
  bool IsOver(std::int64_t unseen_backward) const;
  void CountUnseenBackward();
  void QueueBackwardEnd();
  // [Note: what autograd converts gradients to]
  // FSDPParamGroup._set_unsharded_grad_dtypes. A gradient that may be wider than its parameter stays as it is
  // made in a backward that reduces it, or that adds to it. Elsewhere autograd converts it to the dtype in
  // which it waits.
  void SetGradDTypes(UnitId unit, bool in_backward);
  bool Waits(UnitId unit) const;
  void CheckNoGradientIsLeft();
  bool InForward() const;
  bool Reduces(UnitId unit) const;
  std::string FoundText(TriggerKind kind, UnitId unit) const;
  void FollowSetters();
  // instead_of: what the plan has; "": its next trigger. only_missing: the point is the plan's, but for
  // gradients that were not made. False: the step goes on as planned, with zeros for these, as other ranks
  // have them.
  bool Deviate(const std::string& found, const std::string& instead_of = {}, bool only_missing = false);
  // The plan's next trigger, with zeros for gradients that were not made.
  void FireWithZeros();
  bool GoOnWithZeros(const std::string& text);  // false
  std::string Explained(const std::string& expected, UnitId unit);
  void GiveUpIfInterrupted(UnitId entered);
  bool ReducesAll() const;
  bool IsAnotherMicrobatch() const;
  void CheckIsNoMicrobatch();
  Status BindFlatViews(UnitId unit, BufferId buffer);
  bool MissesPostBackward(UnitId unit) const;
  Status TakeFlatGradients(UnitId unit, BufferId buffer);
  bool AddToAccumulated(UnitId unit, const FlatGradient::Gradients& gradients);
  std::span<const std::int32_t> ParametersOf(BufferId buffer) const {
    return tables_.buffer_parameters[buffer];
  }

  // Look-up tables of the plan.
  struct Tables {
    explicit Tables(const Plan& plan);

    BufferParameters buffer_parameters;
    std::vector<BufferId> unsharded_buffer;  // by UnitId
    PlanOrder order;
    const bool grads_stay_as_made;
  };
  // Set or done by the user, or told to the user.
  struct FromUser {
    std::string suspended;                  // why forwards fail; "": they succeed
    std::optional<std::vector<bool>> sync;  // by unit, once it is set
    std::optional<bool> is_last_backward;
    bool awaits_optimizer = false;
    bool optimizer_seen = false;  // OptimizerSteps has been called
    bool knows_zeros = false;     // has been told of zeros_for_missing
  };
  // Progress of the step under way, by the hooks that were passed.
  struct UnderWay {
    UnitId forward_root = kNoUnit;     // the unit entered first in the forward of the plan that is under way
    UnitId evaluation_root = kNoUnit;  // in the forward outside the plan
    bool backward_end_queued = false;
    bool reduced_all = false;  // the last backward
    std::int64_t backwards = 0;
    std::int64_t unseen_backward = -1;  // the graph task of a backward whose end no hook sees
    UnitId unit_of_unseen = kNoUnit;    // the last one that it went through
    std::vector<bool> full_precision_forwards;
    std::vector<Fallback::ModulePassed> modules;   // of units of several, while the plan is followed
    bool zeros_for_missing = false;                // see FireWithZeros
    TriggerKind firing = TriggerKind::kStepBegin;  // the trigger under way, or the last one
  };
  struct Recorded {
    std::unique_ptr<StepRecorder> recorder;  // null: nothing is recorded
    DeviceFacts facts;                       // when it was made
  };

  std::shared_ptr<const Plan> plan_;
  std::int64_t rank_;
  std::unique_ptr<TorchDevice> device_;
  UserLock* const lock_;
  const RuntimeOptions options_;
  std::unique_ptr<Collectives> collectives_;
  std::unique_ptr<Replayer> replayer_;
  std::vector<UnitState> units_;
  std::vector<std::vector<at::Tensor>> shards_;  // by unit and parameter
  Tables tables_;
  OnDemand on_demand_;
  Fallback fallback_;
  GradientHandover handover_;
  ProfilerRanges ranges_;
  Recorded recording_;
  ModuleGroups groups_;
  FromUser user_;
  UnderWay now_;
};

}  // namespace shardplan::executor
