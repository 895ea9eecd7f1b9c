// SPDX-License-Identifier: Apache-2.0
// Which cluster a trace is planned for: what --cluster, --ranks and the mesh say together.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

struct ClusterFlags {
  std::string cluster;            // a file, the name of a shipped one or of a device; "": not given
  std::int64_t ranks = 0;         // 0: not given
  std::int64_t traced_ranks = 1;  // of the job that was traced; 1: the trace is of no distributed one
};

// --cluster and --ranks.
void AddClusterFlags(CLI::App& command, ClusterFlags& flags, const std::string& cluster_words);

struct ChosenCluster {
  Cluster cluster;
  std::string note;  // what was not said and therefore assumed; "": nothing
};

// The ranks of --ranks, else those of the mesh, else of the traced job; 0: none of them.
std::int64_t WantedRanks(const ClusterFlags& flags, const Strategy& strategy);

// Cluster documents by path.
using ReadClusterFunction = std::function<Result<Cluster>(const std::string&)>;

// The cluster with as many ranks as wanted, else those of the cluster that is named, else of `otherwise`.
// kUsage: --ranks and the mesh differ. kBadInput: the mesh and the named cluster do, or as ResolveCluster and
// WithRanks.
Result<ChosenCluster> ChooseCluster(const ClusterFlags& flags, const Strategy& strategy, Cluster otherwise,
                                    const ReadClusterFunction& read = ReadCluster);

// The cluster with so many of its devices; its name says so. kBadInput: these are several nodes, and it has
// links inside a node only.
Result<Cluster> WithRanks(Cluster cluster, std::int64_t ranks);

}  // namespace shardplan::cli
