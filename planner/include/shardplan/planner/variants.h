// SPDX-License-Identifier: Apache-2.0
// A job whose mesh, or whose micro-batch, is a decision, too: each is optimised, and the fastest is taken
// (docs/reference/optimize.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// Both outlive what is made of them.
struct NamedTrace {
  std::string path;
  const Trace* trace = nullptr;
};

struct JobVariant {
  const Trace* trace = nullptr;
  Strategy job;
  VariantReport says;  // its outcome is OptimizeVariants' to fill
};

struct VariantOptions {
  bool meshes = false;  // the mesh is a decision
  // Samples of a step over all ranks: the micro-batch, of the traces', and how many of them a step has are
  // decisions.
  std::optional<std::int64_t> global_batch;
};

// "mesh replicate=2,shard=4, micro-batch 2 x 4 a step".
std::string VariantText(const VariantReport& variant);

// Meshes to shard over, the largest shard first: all ranks, whole nodes, and parts of a node, all that divide
// the ranks. Not ranks alone: the bound knows little of plans without collectives of shards.
std::vector<std::vector<StrategyMeshDim>> MeshesOf(const Cluster& cluster);

// Samples of a trace's micro-batch: the first dimension, which all its inputs have. kBadInput: they do not.
Result<std::int64_t> MicrobatchSizeOf(const Trace& trace);

// Every mesh with every trace. One variant where neither is a decision. kUsage: the job has a mesh or a
// training loop of its own where these are decisions, or the global batch is no multiple of a micro-batch on
// all ranks. kBadInput: the traces are not of one model at different micro-batches.
Result<std::vector<JobVariant>> MakeVariants(const std::vector<NamedTrace>& traces, const Strategy& job,
                                             const Cluster& cluster, const VariantOptions& options);

// The fastest of the variants' plans: each variant is searched as Optimize does, with the whole limit of
// plans, unless it is proven that none of its plans fits or is faster. A time limit is for all of them.
Result<OptimizeOutput> OptimizeVariants(const std::vector<JobVariant>& variants, const Cluster& cluster,
                                        const OptimizeOptions& options);

}  // namespace shardplan
