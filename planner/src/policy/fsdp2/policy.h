// SPDX-License-Identifier: Apache-2.0
// PyTorch's FSDP2 (torch.distributed.fsdp.fully_shard) as a policy: the state machine of its
// runtime, with the same names, issuing plan instructions instead of kernels. The classes are laid out as
// PyTorch's (README.md); this one hands them the points that the host passes.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "policy/fault_list.h"
#include "policy/fsdp2/exchanges_in_backward.h"
#include "policy/fsdp2/fsdp_module.h"
#include "policy/fsdp2/module_states.h"
#include "policy/fsdp2/param_groups.h"
#include "policy/optimizer_memory.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp2 {

// All that decides what later steps do.
struct Fsdp2PolicyState {
  // By unit. Each has all that a state, its contexts and its group hold.
  std::vector<FsdpState::Snapshot> units;
  // Queued in the autograd engine: by FsdpState::PreBackward, until the end of the backward.
  std::vector<FsdpState*> final_callbacks;
  // The unit of the last pre-backward, until the end of the backward. -1: none. The backward of a trace
  // without operators reads its parameters.
  UnitId backward_unit = -1;
  OptimizerMemory::State optimizer;
  bool operator==(const Fsdp2PolicyState&) const = default;
};

class Fsdp2Policy : public Policy {
 public:
  Fsdp2Policy(const PolicyInput& input, ProgramBuilder& program);

  Status SetUp() override;
  Status On(const HookPoint& event) override;
  std::unique_ptr<PolicyState> State() const override;
  Status Procedures() override;
  std::vector<PyTorchFault> Faults() const override { return faults_.faults(); }

 private:
  Status CallSetters();
  UnitId FirstCalled() const;
  Status PostBackward(const HookPoint& event);
  Status BackwardEnd(const HookPoint& event);
  void OptimizerStep(const HookPoint& event);

  const PolicyInput input_;
  ProgramBuilder& program_;
  FaultList faults_;
  OptimizerMemory optimizer_;
  ExchangesInBackward exchanges_;
  ModuleStates model_;
  ParamGroups groups_;
  FsdpModule module_calls_;
  std::vector<FsdpState*> final_callbacks_;
  UnitId backward_unit_ = -1;
};

}  // namespace shardplan::fsdp2
