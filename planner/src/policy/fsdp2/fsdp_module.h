// SPDX-License-Identifier: Apache-2.0
// Calls of the user on a module that fully_shard was called on: the setters, unshard, reshard (FSDPModule in
// _fully_shard.py), and the hooks of its state dict.
#pragma once

#include "order/record_order.h"
#include "policy/fsdp2/module_states.h"
#include "shardplan/planner/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::fsdp2 {

class FsdpModule {
 public:
  FsdpModule(const ModuleStates& model, ProgramBuilder& program) : model_(model), program_(program) {}

  // Before the first step. kBadInput, here and below: no such module or call, a value that it does not take.
  Status SetUp(const ModuleCall& call);
  // In a step. Emits the trigger of the call, and what the call issues.
  Status Call(const HookPoint& event);

 private:
  Status Set(const ModuleCall& call, bool in_setup);
  void SetPostOptimEvent(FsdpState& state, bool in_setup);
  Status SetPrefetch(const ModuleCall& call, FsdpState& own, PrefetchPass pass) const;
  Status Unshard(const std::vector<FsdpParamGroup*>& groups, bool async_op) const;
  void WaitForUnshard(const std::vector<FsdpParamGroup*>& groups) const;
  void ReshardForStateDict(const ModuleCall& call);

  const ModuleStates& model_;
  ProgramBuilder& program_;
};

}  // namespace shardplan::fsdp2
