// SPDX-License-Identifier: Apache-2.0
#include "plan_series.h"

#include <algorithm>
#include <utility>

#include "passes/checkpointing.h"
#include "pipeline.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {
namespace {

template <typename Change>
void ForEachOperator(Trace& trace, Change change) {
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (Pass& pass : *passes) {
      for (TraceEvent& event : pass.events) {
        if (auto* op = std::get_if<OperatorEvent>(&event)) change(*op);
      }
    }
  }
}

}  // namespace

PlanSeries::PlanSeries(const Trace& trace, const Cluster& cluster)
    : trace_(trace), cluster_(cluster), checked_(CheckTrace(trace)) {
  if (!checked_) return;
  if (checked_ = CheckCluster(cluster); !checked_) return;
  index_ = std::make_shared<const ModelIndex>(MakeModelIndex(trace_));
  const std::unique_ptr<CostModel> costs = MakeCostModel(cluster);
  ForEachOperator(trace_, [&](OperatorEvent& op) {
    if (!op.collective) op.duration_ns = costs->Operator(op);
  });
}

Result<std::shared_ptr<const Trace>> PlanSeries::Recomputing(
    const std::optional<CheckpointRule>& rule) const {
  constexpr std::size_t kMostKept = 32;
  {
    const std::lock_guard lock(mutex_);
    const auto known = std::ranges::find(recomputing_, rule, [](const auto& entry) { return entry.first; });
    if (known != recomputing_.end()) {
      std::rotate(known, known + 1, recomputing_.end());  // the one that was asked for last is the last
      return recomputing_.back().second;
    }
  }
  Result<Trace> made = rule ? CheckpointChecked(trace_, *index_, *rule) : trace_;
  if (!made) return std::unexpected(std::move(made.error()));
  // The reads and writes of operators are looked at where ties are split, and nowhere behind.
  const bool tied =
      std::ranges::any_of(made->parameters, [](const Parameter& p) { return !p.shared_with.empty(); });
  if (!tied) {
    ForEachOperator(*made, [](OperatorEvent& op) {
      op.reads = {};
      op.writes = {};
    });
  }
  auto trace = std::make_shared<const Trace>(*std::move(made));
  const std::lock_guard lock(mutex_);
  if (recomputing_.size() >= kMostKept) recomputing_.erase(recomputing_.begin());
  recomputing_.emplace_back(rule, trace);
  return trace;
}

Result<Plan> PlanSeries::Make(const Strategy& strategy) const {
  if (!checked_) return std::unexpected(checked_.error());
  Result<Strategy> completed = CompleteStrategy(strategy, trace_, cluster_.ranks);
  if (!completed) return std::unexpected(std::move(completed.error()));
  Strategy planned = *std::move(completed);
  if (Status s = CheckKnobs(planned); !s) return std::unexpected(std::move(s.error()));
  Result<RewrittenTrace> recomputing = Recomputing(strategy.checkpoint);
  if (!recomputing) return std::unexpected(std::move(recomputing.error()));
  const Result<PolicyPasses> policy = FindPolicy(planned, nullptr);
  if (!policy) return std::unexpected(policy.error());
  const Task task{trace_, std::move(planned), cluster_, *policy, nullptr, false};
  const PlanOptions options{.verify = false,
                            .skip = {"apply_checkpointing", "build_graph", "linearise", "digest"}};
  Made made{.rewritten = *std::move(recomputing), .units = {.index = index_, .partition = {}}};
  if (Status s = RunPasses(task, "", options, made); !s) return std::unexpected(std::move(s.error()));
  return std::move(made.plan);
}

}  // namespace shardplan
