// What a policy is: a state machine over the points that the host passes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "policy/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/verifier.h"

namespace shardplan {

// What the verifier will rightly find in the plan because PyTorch itself does it: violations of `rule`.
struct KnownFault {
  Rule rule = Rule::kReference;
  std::string why;
};

class Policy {
 public:
  virtual ~Policy() = default;
  // Before the first step: setup calls. kBadInput for a call that the policy does not know.
  virtual Status SetUp() = 0;
  virtual void OnStepBegin() {}
  // Emits the triggers and instructions of one host event.
  virtual Status On(const HostEvent& event) = 0;
  virtual void OnStepEnd() {}
  // Everything that decides what later steps do, as bytes: two steps that begin in equal states and have
  // equal host events are equal.
  virtual std::string State() const = 0;
  virtual std::vector<KnownFault> Faults() const { return {}; }
};

struct PolicyInput {
  const Trace& trace;
  const ModelIndex& index;
  const Partition& partition;
  const Strategy& strategy;
  const std::vector<RecordedStep>& steps;
};

std::unique_ptr<Policy> MakeFsdp2Policy(const PolicyInput& input, ProgramBuilder& builder);
std::unique_ptr<Policy> MakeFsdp1Policy(const PolicyInput& input, ProgramBuilder& builder);

}  // namespace shardplan
