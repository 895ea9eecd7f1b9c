// SPDX-License-Identifier: Apache-2.0
// Random documents: every field gets a value other than its default now and then, names are sometimes odd
// (empty, quotes, umlauts, line breaks), lists are sometimes empty. The contents make no sense (a random plan
// does not verify), but each is a valid document: what the writer writes of it, the reader reads. The same
// seed gives the same document.
#pragma once

#include <cstdint>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/report.h"
#include "shardplan/schemas/reshard.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::test {

Trace RandomTrace(std::uint64_t seed);
Cluster RandomCluster(std::uint64_t seed);
Strategy RandomStrategy(std::uint64_t seed);
Plan RandomPlan(std::uint64_t seed);
Report RandomReport(std::uint64_t seed);
Recording RandomRecording(std::uint64_t seed);
StateLayout RandomStateLayout(std::uint64_t seed);
ReshardPlan RandomReshard(std::uint64_t seed);

}  // namespace shardplan::test
