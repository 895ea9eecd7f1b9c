// SPDX-License-Identifier: Apache-2.0
// The streams that the model's own collectives run on (EngineStreams).
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// The communicators that have one, in the order of their streams, which are behind the plan's.
std::vector<CommunicatorId> ModelCommunicators(const Plan& plan);

}  // namespace shardplan::internal
