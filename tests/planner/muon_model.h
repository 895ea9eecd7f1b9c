// SPDX-License-Identifier: Apache-2.0
// A model whose matrices Muon steps, its plans and their time.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "shardplan/planner/planner.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "tests/planner/bound_cases.h"
#include "tests/planner/synthetic.h"

namespace shardplan::testing {

// Kernels and links take about as long as each other.
inline Cluster BalancedOf(std::int64_t ranks) { return BalancedCluster(ranks, 2, 4'000'000'000); }

inline Plan MuonPlanOf(const Trace& trace, const Strategy& strategy, std::int64_t ranks = 2) {
  Result<PlannerOutput> planned = MakePlan(trace, strategy, BalancedOf(ranks));
  if (!planned) ADD_FAILURE() << ToString(planned.error());
  return planned ? std::move(planned->plan) : Plan{};
}

inline Trace MuonModel(int layers, std::int64_t rows = 64) {
  TreeModule list{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < layers; ++i) {
    list.children.push_back(
        {.name = std::to_string(i),
         .class_name = "Block",
         .children = {{.name = "norm", .class_name = "Norm", .parameters = {{rows}}},
                      {.name = "up", .class_name = "Linear", .parameters = {{3 * rows, 32}}},
                      {.name = "down", .class_name = "Linear", .parameters = {{rows, 32}}}}});
  }
  return TraceOf({.name = "",
                  .children = {{.name = "embed", .class_name = "Embedding", .parameters = {{2 * rows, 32}}},
                               list,
                               {.name = "lm_head", .class_name = "Linear", .parameters = {{2 * rows, 32}}}}});
}

inline Strategy WithMuon(Muon muon = {}) { return {.optimizer = {.muon = std::move(muon)}}; }
inline Strategy ByOwners(bool over_replicas = false) {
  return WithMuon({.compute = {{.over_replicas = over_replicas}}});
}

inline Nanoseconds MuonStepTime(const Plan& plan) {
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
  EXPECT_TRUE(program.has_value()) << ToString(program.error());
  const Result<EngineResult> run =
      RunStep(*program, static_cast<std::int32_t>(program->steps.size()) - 1, nullptr);
  EXPECT_TRUE(run.has_value()) << ToString(run.error());
  return run->end_ns;
}

}  // namespace shardplan::testing
