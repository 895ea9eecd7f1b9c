// SPDX-License-Identifier: Apache-2.0
// Pass `place_events`: runs the policy over the recorded steps until its state repeats.
#pragma once

#include "passes/offload_activations.h"
#include "policy/policy_passes.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

struct PlacedProgram {
  Plan plan;  // units, buffers, streams, events, segments, steps, steady_step
  std::vector<PyTorchFault> faults;
};

// `policy` runs the steps of `input`. kBadInput: a call that the policy does not know, or what it has the
// builder refuse. `offloads`: by step of `input`; without any step, none.
// Without procedures the plan can be simulated, and not be run.
Result<PlacedProgram> PlaceEvents(const PolicyInput& input, const PolicyPasses& policy,
                                  const ActivationOffloads& offloads = {}, bool with_procedures = true);

}  // namespace shardplan
