// One function for each policy, in a file of its own.
#pragma once

#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::internal {

PolicyKnobs Fsdp1PolicyKnobs();
PolicyKnobs Fsdp2PolicyKnobs();

}  // namespace shardplan::internal
