// SPDX-License-Identifier: Apache-2.0
// The plan that is best at the worst of the costs.
//
// [Note: corners]
// Costs of compute, of links and of overlap are each between two ends. A step is nearly monotone in them, but
// not quite: work that ends later may start in another order. So a plan is judged at all eight corners and at
// the nominal costs, and its longest step there counts. It is no shorter than that at the slow corner, where
// all costs are highest: plans are judged in the order of their steps there, until one is as long as the best
// longest.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "optimize/choice.h"
#include "optimize/evaluator.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::optimize {

class Robust {
 public:
  // `nominal` has searched. All of them outlive it.
  Robust(const Trace& trace, const Job& job, const Cluster& cluster, const OptimizeOptions& options,
         Evaluator& nominal);

  // Searches at the slow corner.
  void Search(const std::set<Choice>& refused);
  // The plan whose longest step is shortest, among those that fit: the plans of that search, the fastest of
  // the nominal one and the one that was taken from it (`plain`). None: nothing fits.
  std::optional<Choice> Best(const Choice& plain, const std::set<Choice>& refused);
  RobustReport ReportOf(const Choice& choice, const Choice& plain);

  std::int64_t evaluations() const;
  bool Ended() { return at_.front()->Ended(); }

 private:
  // At the corners, the slow one first, and at the nominal costs; empty: there is no such plan.
  std::vector<Nanoseconds> StepsOf(const Choice& choice);
  bool Fits(const Choice& choice);

  const Job& job_;
  const OptimizeOptions& options_;
  Evaluator& nominal_;
  std::vector<CornerReport> corners_;
  std::vector<Cluster> clusters_;               // at the corners
  std::vector<std::unique_ptr<Evaluator>> at_;  // them
};

}  // namespace shardplan::optimize
