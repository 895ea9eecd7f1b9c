// SPDX-License-Identifier: Apache-2.0
// The optimiser's memory and its step, as torch.optim allocates it.
#pragma once

#include <map>
#include <vector>

#include "policy/muon_step.h"
#include "shardplan/planner/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/optimizers.h"
#include "units/partition.h"

namespace shardplan {

// A unit that has a gradient when the optimizer steps.
struct SteppedUnit {
  UnitId unit = -1;
  std::vector<std::int32_t> parameters;  // those that have one, ascending; of a flat unit: all, not listed
};

class OptimizerMemory {
 public:
  // State that later steps depend on.
  struct State {
    // By unit and parameter: torch.optim has made its states, in the first step that had a gradient for it.
    std::vector<std::vector<bool>> has_states;
    bool operator==(const State&) const = default;
  };

  OptimizerMemory(const Trace& trace, const Strategy& strategy, const Partition& partition,
                  ProgramBuilder& builder);

  // kBadInput for arguments that torch.optim refuses.
  Status Check() const;
  // Emits the step: states of the parameters that have a gradient and none yet, temporaries, the step itself.
  void Step(const std::vector<SteppedUnit>& units);
  // In a backward: the unit's gradients are final when `reduced` has come. Emits the beginning of the
  // exchanges that wait for nothing else.
  void Reduced(const SteppedUnit& unit, EventId reduced);
  // Emits a step in the backward of these parameters of `unit`, each by an optimiser of its own, on `stream`
  // (-1: on the host).
  void StepParameters(UnitId unit, StreamId stream, std::vector<std::int32_t> parameters);
  const State& state() const { return state_; }

 private:
  Status CheckGradDTypes() const;
  DType FlatGradDType(const UnitChoice& choice) const;
  void AllocateStates(UnitId unit, const std::vector<OptimizerShard>& shards, StreamId stream);
  std::vector<OptimizerShard> ShardsOf(const SteppedUnit& stepped) const;
  // A shard, and where it is among the optimizer's parameters.
  struct Stepped {
    std::int32_t place = 0;
    UnitId unit = -1;
    OptimizerShard shard;
  };
  std::vector<Stepped> InModelOrder(const std::vector<SteppedUnit>& units) const;
  MemoryKind MemoryOf(UnitId unit) const;

  const Optimizer& optimizer_;
  const bool use_orig_params_;
  const Fsdp1CommHook comm_hook_;
  const Partition& partition_;
  ProgramBuilder& builder_;
  MuonStep muon_;
  State state_;
  // Units whose gradients are final in this backward. Empty when a step ends.
  struct FinalGradients {
    SteppedUnit unit;
    EventId reduced = -1;
  };
  std::map<UnitId, FinalGradients> reduced_;
};

}  // namespace shardplan
