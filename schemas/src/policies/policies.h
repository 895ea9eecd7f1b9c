// SPDX-License-Identifier: Apache-2.0
// One function for each policy, in a file of its own.
#pragma once

#include <array>

#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::internal {

// The defaults that a strategy gives to its units.
DataParallelDims GivenDims(const Strategy& strategy);
// ... and every mixed precision that it or one of its units gives.
std::vector<MixedPrecision> GivenPrecisions(const Strategy& strategy);

// Whether anything of the unit trains.
bool Trains(const Unit& unit);
// The kinds of procedures that keep gradients for a later micro-batch.
inline constexpr std::array kKeepingKinds = {ProcedureKind::kAccumulate, ProcedureKind::kAccumulateAgain,
                                             ProcedureKind::kReduceAccumulated, ProcedureKind::kReduceKept};

PolicyKnobs Fsdp1PolicyKnobs();
PolicyKnobs Fsdp2PolicyKnobs();
// The knobs of every policy that is not built in: fsdp2's, but for what its hooks decide.
PolicyKnobs ForeignPolicyKnobs();

}  // namespace shardplan::internal
