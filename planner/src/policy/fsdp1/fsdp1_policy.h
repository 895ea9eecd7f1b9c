// PyTorch's FSDP1 (FullyShardedDataParallel, torch 2.11) as a policy: hands the points that the host passes
// to the hooks. README.md says what of PyTorch is where.
#pragma once

#include <memory>
#include <vector>

#include "policy/fsdp1/fsdp_state.h"
#include "policy/policy.h"

namespace shardplan::fsdp1 {

class Fsdp1Policy : public Policy {
 public:
  Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder);

  Status SetUp() override;
  Status On(const HostEvent& event) override;
  std::unique_ptr<PolicyState> State() const override;
  std::vector<KnownFault> Faults() const override;

 private:
  void InitStreams();
  Status CheckKnobs() const;
  Status MakeHandles();
  void OnSegment(const HostEvent& event);
  void OptimizerStep(const HostEvent& event);
  void ZeroGrad(const HostEvent& event);
  Status UserCall(const HostEvent& event);

  // What later steps depend on.
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
