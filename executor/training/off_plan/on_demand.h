// SPDX-License-Identifier: Apache-2.0
// Work beside the plan's steps, by the plan's procedures: in an evaluation, at a call of the user, in a
// fallback.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/executor/torch_device.h"
#include "training/parameters/gradient_presence.h"
#include "training/parameters/unit_state.h"
#include "training/profiler_ranges.h"
#include "training/user_lock.h"

namespace shardplan::executor {

// [Note: on demand]
// A plan is a program of training steps. Work that nobody knows in advance (a validation loop between two
// steps, a call of sp.unshard, a step that leaves the plan) is done unit by unit when it is needed, and
// nothing overlaps. How it is done is planned all the same: Plan::procedures. This class only decides which
// one is called. All ranks have to call the same ones in the same order.
//
// Members throw TrainingError, unless they return a Status.
class OnDemand {
 public:
  // All but `presence` outlive this. lock: null where the model has none. gives_up: the
  // call that gives a step up, for messages.
  OnDemand(const Plan& plan, std::int64_t rank, TorchDevice& device, std::vector<UnitState>& units,
           const BufferParameters& buffer_parameters, GradientPresence presence, UserLock* lock,
           std::string_view gives_up);
  // Before anything else. All outlive this.
  void Start(Replayer& replayer, Model& model, ProfilerRanges& ranges);

  // Gathers the unit and binds its parameters, unless they are bound. full_precision: not in the low one.
  void Unshard(UnitId unit, bool full_precision = false);
  // Frees what Unshard has gathered; does nothing for what a step of the plan has.
  void Reshard(UnitId unit);
  void ReshardAll();
  // The host changes sharded parameters next: waits for copies of offloaded ones that Unshard has issued.
  void AwaitShards();
  // The step leaves the plan: what it has gathered is freed by Reshard.
  void TakeOver();

  // Is the number the same on all ranks? Collective.
  bool Alike(std::int64_t number) const;
  // Has this rank gradients of the unit that are not reduced?
  bool HasGradients(UnitId unit) const;
  // Does a gradient of the parameter wait for a later backward, in memory of the plan?
  bool IsKept(UnitId unit, std::int32_t parameter) const;
  // Reduces the unit's gradients, those of this backward and those that were kept, and hands them to the
  // sharded parameters: those that any rank has. Collective. Returns the parameters whose gradients this rank
  // made since they were kept last.
  std::vector<std::int32_t> Reduce(UnitId unit);
  // Keeps them for a later Reduce, as no_sync has it. Not collective. Returns as Reduce.
  std::vector<std::int32_t> Keep(UnitId unit);
  // Reduces the rest of the way what the plan has reduced over a part of the ranks. Collective.
  void ReducePartial();
  // Units of which any rank has gradients that are not reduced. Collective.
  std::vector<UnitId> UnitsWithGradients() const;
  // The backward is over: from the next one on all units may be reduced again.
  void EndBackward();
  // Drops all gradients that are not reduced.
  void DropGradients();

  // ---- Model, while a procedure that reduces or keeps runs ----
  bool has_gradients_under_way() const { return under_way_.unit >= 0; }
  Status SupplyGradients(UnitId unit, BufferId buffer);
  Status GradientsReady(UnitId unit, BufferId buffer);
  Status StepInBackward(UnitId unit, std::int32_t parameter);

 private:
  enum class Gathered : std::uint8_t { kNo, kWhole, kFullPrecision, kBoundOnly };
  struct UnderWay {
    UnitId unit = -1;
    std::vector<bool> any;        // by parameter: does any rank have a gradient?
    std::vector<BufferId> ready;  // reduced gradients that are complete
  };

  void Call(ProcedureKind kind, UnitId unit);
  void CheckKept() const;
  bool HasFreshGradient(UnitId unit, std::int32_t parameter) const;
  bool HasKept(UnitId unit) const;
  bool ReducesZeros(UnitId unit) const;
  void FillKept(UnitId unit);
  std::vector<std::int32_t> Fresh(UnitId unit) const;
  std::vector<bool> KeptOr(const std::vector<std::int32_t>& fresh, UnitId unit) const;
  void CallWithGradients(ProcedureKind kind, UnitId unit, std::vector<bool> any);
  Status Publish(BufferId buffer);
  Status PublishFlat();
  Status PublishReady();

  const Plan& plan_;
  const std::int64_t rank_;
  TorchDevice& device_;
  std::vector<UnitState>& units_;
  const BufferParameters& buffer_parameters_;
  GradientPresence presence_;
  UserLock* const lock_;
  const std::string_view gives_up_;
  Replayer* replayer_ = nullptr;
  Model* model_ = nullptr;
  ProfilerRanges* ranges_ = nullptr;
  std::vector<BufferId> whole_;              // by unit: the first param_unsharded, -1: none
  std::vector<std::vector<BufferId>> kept_;  // by unit: where its procedures keep gradients
  std::vector<Gathered> gathered_;           // by unit
  std::vector<bool> offloads_;               // by unit: its shard is in host memory
  bool copies_shards_ = false;               // Unshard has copied one since AwaitShards
  std::vector<std::vector<bool>> keeps_;     // by unit and parameter: Keep had a gradient; empty: see IsKept
  // By unit: a parameter without a gradient is reduced with zeros, once the unit has been gathered
  // (set_reduce_scatter_unused_params).
  std::vector<bool> reduces_unused_;
  std::vector<bool> reduced_;  // by unit: in the backward under way
  UnderWay under_way_;
};

}  // namespace shardplan::executor
