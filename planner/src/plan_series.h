// SPDX-License-Identifier: Apache-2.0
// Many plans of one trace on one cluster, made to be simulated and not to be run: what they have in common is
// made once.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "units/model_index.h"

namespace shardplan {

class PlanSeries {
 public:
  PlanSeries(const Trace& trace, const Cluster& cluster);

  // Takes as long and as much memory as the plan of MakePlan. It leaves out procedures, digests and the
  // verifier; operators say what they cost on the cluster. Errors as MakePlan's. Several threads may call it
  // at a time.
  Result<Plan> Make(const Strategy& strategy) const;

 private:
  // The trace with what the rule recomputes. Some of them are kept: a recomputation is in many plans.
  Result<std::shared_ptr<const Trace>> Recomputing(const std::optional<CheckpointRule>& rule) const;

  Trace trace_;
  const Cluster& cluster_;
  Status checked_;
  std::shared_ptr<const ModelIndex> index_;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::optional<CheckpointRule>, std::shared_ptr<const Trace>>> recomputing_;
};

}  // namespace shardplan
