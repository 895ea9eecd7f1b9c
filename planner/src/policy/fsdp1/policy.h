// SPDX-License-Identifier: Apache-2.0
// PyTorch's FSDP1 (FullyShardedDataParallel) as a policy: hands the points that the host passes
// to the hooks. README.md says what of PyTorch is where.
#pragma once

#include <memory>
#include <vector>

#include "policy/fsdp1/fsdp_state.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp1 {

class Fsdp1Policy : public Policy {
 public:
  Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder);

  Status SetUp() override;
  Status On(const HookPoint& event) override;
  std::unique_ptr<PolicyState> State() const override;
  Status Procedures() override;
  std::vector<PyTorchFault> Faults() const override;

 private:
  void InitStreams();
  Status CheckKnobs() const;
  Status MakeHandles();
  void OnSegment(const HookPoint& event);
  void OptimizerStep(const HookPoint& event);
  void ZeroGrad(const HookPoint& event);
  Status UserCall(const HookPoint& event);

  // State that later steps depend on.
  struct Value {
    FsdpState fsdp;
    OptimizerMemory::State optimizer;
    bool operator==(const Value&) const = default;
  };

  OptimizerMemory optimizer_;
  FaultsSeen faults_seen_;
  Context context_;
  FsdpState state_;
};

}  // namespace shardplan::fsdp1
