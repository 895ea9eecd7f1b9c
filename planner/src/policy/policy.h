// SPDX-License-Identifier: Apache-2.0
// What a policy is: a state machine over the points that the host passes.
#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "policy/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// A value that policies of one kind compare: see Policy::State.
class PolicyState {
 public:
  virtual ~PolicyState() = default;
  virtual bool Equals(const PolicyState& other) const = 0;
};

// T's `==` is a defaulted one, as are those of its members: no field can be forgotten in the comparison.
template <std::equality_comparable T>
class PolicyStateOf final : public PolicyState {
 public:
  explicit PolicyStateOf(T value) : value_(std::move(value)) {}
  bool Equals(const PolicyState& other) const override {
    const auto* same_kind = dynamic_cast<const PolicyStateOf*>(&other);
    return same_kind != nullptr && same_kind->value_ == value_;
  }

 private:
  T value_;
};

class Policy {
 public:
  virtual ~Policy() = default;
  // Before the first step: setup calls. kBadInput for a call that the policy does not know.
  virtual Status SetUp() = 0;
  // Emits the triggers and instructions of one hook point.
  virtual Status On(const HookPoint& event) = 0;
  // Everything that decides what later steps do: two steps that begin in equal states and have equal hook
  // points are equal. What only counts or names past steps stays out of it: a training loop repeats, and so
  // do the states in which its steps begin.
  virtual std::unique_ptr<PolicyState> State() const = 0;
  // After the last step: emits what is done on demand, of every unit. All of it on the compute stream.
  virtual Status Procedures() = 0;
  // What the verifier may rightly find in the plan because PyTorch itself does it.
  virtual std::vector<PyTorchFault> Faults() const { return {}; }
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
