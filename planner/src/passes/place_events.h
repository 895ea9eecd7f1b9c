// Pass `place_events`: runs the policy over the recorded steps until its state repeats.
#pragma once

#include "policy/policy.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

// Fills plan.steps, steady_step and everything that the instructions refer to. plan.units must be there.
// kBadInput: an unknown policy or a call that it does not know.
Status PlaceEvents(const PolicyInput& input, Plan& plan, std::vector<KnownFault>& faults);

}  // namespace shardplan
