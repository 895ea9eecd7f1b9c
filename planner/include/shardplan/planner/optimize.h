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
  // The limit of reserved bytes on a rank (device_fit.h). Default: the device's memory.
  std::optional<Bytes> budget;
  bool may_change_policy = false;  // the plan may be of another policy than the strategy's
  bool may_checkpoint = false;
  bool may_offload = false;
  bool may_offload_activations = false;  // of blocks, between forward and backward
  bool may_release_cache = false;  // a request that finds no memory may release the cache: it synchronises
  // Only what FSDP2 has a call for is decided (fsdp2_settings.h), so `shardplan export --fsdp2` leaves
  // nothing out. Of a strategy of fsdp2.
  bool of_pytorch = false;
  // The parts of the strategy that stay as they are: "units", "reshard", "layout", "prefetch", "checkpoint",
  // "accumulation", "reduction".
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
  std::function<void(const std::string&)> on_variant;  // another search begins: of a variant (variants.h)
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

}  // namespace shardplan
