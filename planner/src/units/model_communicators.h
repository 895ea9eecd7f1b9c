// SPDX-License-Identifier: Apache-2.0
// The communicators of the collectives that the model itself issues.
#pragma once

#include "units/partition.h"

namespace shardplan {

// Adds to the partition's communicators those of the trace that some collective uses, and fills
// Partition::model_communicators. One of FSDP's of the same name and ranks is shared. kBadInput: its groups
// are not all there on so many ranks, or they grow with the job and the traced job had other ranks.
Status AddModelCommunicators(const Trace& trace, std::int64_t ranks, Partition& partition);

// Ranks that work on one batch together: the product of the trace's dimensions of that kind.
std::int64_t RanksPerBatch(const Trace& trace);

}  // namespace shardplan
