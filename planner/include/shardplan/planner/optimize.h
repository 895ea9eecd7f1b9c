// SPDX-License-Identifier: Apache-2.0
// The optimising planner: of all plans that today's strategies make for a job, the fastest within a byte
// budget, and a bound that no plan of the class goes below (docs/reference/optimize.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

struct OptimizeProgress {
  Nanoseconds step_ns;  // the best so far; 0: nothing in the budget yet
  Bytes pooled_bytes;   // of it, or of what is nearest to the budget
  std::int64_t evaluations = 0;
  bool is_better = true;  // than what was told before; otherwise the search has only made more plans
};

struct OptimizeOptions {
  // The limit of reserved bytes on a rank (reserved_memory.h). Default: the device's memory.
  std::optional<Bytes> budget;
  bool may_change_policy = false;  // the plan may be of another policy than the strategy's
  bool may_checkpoint = false;
  bool may_offload = false;
  bool may_offload_activations = false;  // of blocks, between forward and backward
  bool may_release_cache = false;  // a request that finds no memory may release the cache: it synchronises
  // Only what FSDP2 has a call for is decided (fsdp2_settings.h), so `shardplan export --fsdp2` leaves
  // nothing out. Applies to strategies of fsdp2.
  bool of_pytorch = false;
  // The parts of the strategy that stay as they are: "units", "reshard", "layout", "prefetch", "checkpoint",
  // "accumulation", "reduction", "owners".
  std::set<std::string> fixed;
  // Plan and simulate every setting of the grid, those that cannot win, too, to report the best of them as a
  // baseline.
  bool whole_grid = false;
  // Above 0: not the fastest plan, but the one whose step is shortest at the worst of the costs, when those
  // of compute, of links and of overlap are off by at most so much, each by itself.
  std::int64_t robust_ppm = 0;
  // The search ends after so many plans, wherever it is; 0: by itself. Work, and not time, so that the answer
  // is the same on every machine and under every load. Settings of the grid are not counted: what could win
  // is planned at the end of every search.
  std::int64_t plan_limit = 1'500;
  Nanoseconds time_limit_ns{0};  // or after so long; 0: no limit
  std::int32_t threads = 1;
  const std::atomic<bool>* stop = nullptr;  // true: give the best so far
  std::function<void(const OptimizeProgress&)> on_progress;
  std::function<void(const std::string&)> on_variant;  // another search begins: of a variant
};

// The values of OptimizeOptions::fixed.
const std::set<std::string>& FixableDecisions();

struct OptimizeOutput {
  Strategy strategy;  // what makes the plan
  Plan plan;
  Optimization report;
  std::optional<Certificate> certificate;  // none: the job is outside of the class; report.notes says why
};

// kNegative: no plan that was found is within the budget; the message has the least budget for which one was,
// a bound below which there is none, and what would have to be allowed. Else as MakePlan.
// The same answer on any number of threads, unless a time limit or `stop` ends the search.
Result<OptimizeOutput> Optimize(const Trace& trace, const Strategy& job, const Cluster& cluster,
                                const OptimizeOptions& options);

// A job whose mesh, or whose micro-batch, is a decision, too: each is optimised, and the fastest is taken
// (docs/reference/optimize.md).

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
