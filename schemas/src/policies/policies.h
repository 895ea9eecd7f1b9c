// One function for each policy, in a file of its own.
#pragma once

#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::internal {

// What a strategy gives to units that give none themselves.
DataParallelDims GivenDims(const Strategy& strategy);
// ... and every mixed precision that it or one of its units gives.
std::vector<MixedPrecision> GivenPrecisions(const Strategy& strategy);

PolicyKnobs Fsdp1PolicyKnobs();
PolicyKnobs Fsdp2PolicyKnobs();

}  // namespace shardplan::internal
