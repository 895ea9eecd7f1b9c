// What a policy is: a state machine over the points that the host passes.
#pragma once

#include <memory>
#include <string>

#include "program_builder.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

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
