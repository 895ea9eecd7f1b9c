// SPDX-License-Identifier: Apache-2.0
// The time and memory of a resharding plan on a cluster (docs/reference/reshard-format.md, "Simulation").
#pragma once

#include <cstdint>
#include <string>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

struct ReshardSimulation {
  std::int64_t rounds = 0;
  std::int64_t copies = 0;  // executed, as pieces
  Bytes local_bytes;        // stay on their rank
  Bytes node_bytes;         // cross a link inside a node
  Bytes network_bytes;      // ... between nodes
  Bytes most_sent_bytes;    // by one rank
  Bytes most_received_bytes;
  Bytes staging_peak_bytes;  // of one rank in one round
  // Memory of one rank: its storage in both layouts, and its staging buffers.
  Bytes memory_peak_bytes;
  Nanoseconds duration_ns;
  // The rank that has most to send or receive, without rounds and latency: no order is faster.
  Nanoseconds bound_ns;
};

// The plan has to verify. kBadInput: the cluster has no links.
Result<ReshardSimulation> SimulateReshard(const ReshardPlan& plan, const Cluster& cluster);

// Lines for a person.
std::string ReshardSimulationText(const ReshardSimulation& simulation);

}  // namespace shardplan
