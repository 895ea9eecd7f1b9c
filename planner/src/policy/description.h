// SPDX-License-Identifier: Apache-2.0
// What a policy needs of the passes. A new policy is added in policy_description.cc and nowhere else: the
// passes know no policy by name.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "policy/policy.h"
#include "units/unit_maker.h"

namespace shardplan {

struct PolicyDescription {
  std::string_view name;  // Strategy::policy

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

// Of a strategy that CheckStrategy lets through.
const PolicyDescription& FindPolicy(std::string_view name);

}  // namespace shardplan
