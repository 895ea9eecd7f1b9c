// SPDX-License-Identifier: Apache-2.0
// The needs of a policy in the passes. A policy that is built in is added in policy_passes.cc and nowhere
// else: the passes know no policy by name.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "shardplan/planner/policy.h"
#include "units/unit_maker.h"

namespace shardplan {

struct PolicyPasses {
  // choose_units: how the policy lays units out.
  std::unique_ptr<UnitMaker> (*make_units)(const Trace&, const ModelIndex&, const Strategy&) = nullptr;

  // join_tensors, record_order: whether each unit puts an autograd function around its inputs. Its backward
  // is the unit's post_backward then. Without one, post_backward hangs on what accumulates the gradients.
  bool wraps_inputs = true;

  // extend_gradients: the trace as the policy's parameters make its backward. nullopt: as it is. Null: the
  // policy changes nothing.
  std::optional<Trace> (*extend_gradients)(const Trace&, const ModelIndex&, const Partition&) = nullptr;

  // place_events.
  std::unique_ptr<Policy> (*make)(const PolicyInput&, ProgramBuilder&) = nullptr;

  // describe: what the policy does to the model's buffers. Null: nothing.
  Status (*change_buffers)(const PolicyInput&, std::vector<ModuleBuffer>& buffers) = nullptr;
};

// The passes of the strategy's policy. `own`: one that is not built in, or null. kBadInput: there is no such
// policy.
Result<PolicyPasses> FindPolicy(const Strategy& strategy, const PolicyDescription* own);

// `strategy`, of this policy, with the default of each knob that it does not give. kBadInput: a knob that the
// policy does not have, or of another type.
Result<Strategy> WithPolicyKnobs(Strategy strategy, const PolicyDescription& own);

// "zero3 (libzero3.so)"
std::string PolicyText(const PolicyDescription& own);

// The error as one of this policy, never of shardplan.
Error OfPolicy(const PolicyDescription& own, Error error);

std::unique_ptr<Policy> MakeFsdp2Policy(const PolicyInput& input, ProgramBuilder& builder);
std::unique_ptr<Policy> MakeFsdp1Policy(const PolicyInput& input, ProgramBuilder& builder);

}  // namespace shardplan
