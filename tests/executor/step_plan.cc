// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/step_plan.h"

#include <stdexcept>
#include <utility>

#include "shardplan/planner/planner.h"
#include "tests/planner/synthetic.h"

namespace shardplan::test {

Plan MakeStepPlan(std::int64_t ranks) {
  Strategy strategy;
  strategy.policy = "fsdp2";
  strategy.units = {{.modules = {"layers.*"}}};
  strategy.optimizer.kind = OptimizerKind::kSgd;
  Result<PlannerOutput> planned =
      MakePlan(testing::LayeredTrace(3, 5, 3), strategy, testing::ClusterOf(ranks));
  if (!planned) throw std::runtime_error(ToString(planned.error()));
  return std::move(planned->plan);
}

}  // namespace shardplan::test
