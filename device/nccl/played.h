// SPDX-License-Identifier: Apache-2.0
// Collectives without peers (null mode).
//
// [Note: played peers]
// Each peer gives what this rank gives: an all_gather is this rank's part n times, a sum is n times it, an
// all_to_all brings from every peer what this rank would send to itself, a message what this rank sends in
// the same launch, a broadcast leaves what is there. Only numbers that a host may read are moved: integers up
// to a size and few floats. The rest is empty.
#pragma once

#include <vector>

#include "device/nccl/communicator.h"

namespace shardplan::softdevice {

// The operations of one launch, as `rank` of `ranks` sees them.
void PlayPeers(const std::vector<Operation>& operations, int rank, int ranks);

}  // namespace shardplan::softdevice
