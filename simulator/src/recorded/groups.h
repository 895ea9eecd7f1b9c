// SPDX-License-Identifier: Apache-2.0
// A recorded communicator as the cluster places it.
#pragma once

#include <optional>

#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::internal {

// The digits of the rank in which its ranks differ. Nothing: they are no such group. Ranks that are not known
// lie side by side.
std::optional<Communicator> GroupOfRanks(const RecordedCommunicator& recorded);

}  // namespace shardplan::internal
