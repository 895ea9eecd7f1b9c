// SPDX-License-Identifier: Apache-2.0
// Rule tables: world_size, mesh, policy, groups of ranks and dtypes are those that the strategy asks for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <utility>

#include "tests/schemas/verifier/rules.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Only = std::set<std::string>;

class StrategyTables : public Rules {
 protected:
  static std::set<std::string> After(Plan plan, const std::function<void(Plan&)>& change) {
    change(plan);
    return RulesOf(plan);
  }
};

// ---- the mesh ----

TEST_F(StrategyTables, TheMeshHasTheRanksOfTheWorld) {
  EXPECT_EQ(After(good_, [](Plan& plan) { plan.world_size = 4; }), Only{"tables"});
  EXPECT_EQ(After(good_, [](Plan& plan) { plan.mesh[0].size = 4; }), Only{"tables"});
  EXPECT_EQ(After(good_, [](Plan& plan) { plan.mesh[0].size = 0; }), Only{"tables"});
  EXPECT_EQ(After(hsdp_, [](Plan& plan) { plan.mesh.pop_back(); }), Only{"tables"});
  Plan plan = good_;
  plan.world_size = 4;
  EXPECT_THAT(Verify(plan).at(0).message, HasSubstr("the mesh {shard 2} has 2 ranks, and world_size is 4"));
}

TEST_F(StrategyTables, TheMeshIsTheStrategys) {
  hsdp_.strategy.mesh = hsdp_.mesh;
  EXPECT_THAT(Verify(hsdp_), IsEmpty());
  EXPECT_EQ(After(hsdp_, [](Plan& plan) { std::swap(plan.mesh[0], plan.mesh[1]); }), Only{"tables"});
  EXPECT_EQ(After(hsdp_, [](Plan& plan) { plan.strategy.mesh = {{"shard", 4}}; }), Only{"tables"});
  EXPECT_EQ(After(hsdp_, [](Plan& plan) { plan.mesh.clear(); }), Only{"tables"});
}

// Without a mesh in the strategy units are sharded over all ranks, whatever groups the plan has.
TEST_F(StrategyTables, TheMeshIsOneDimensionWhereTheStrategyHasNone) {
  for (const Plan& plan : {hsdp_, Fsdp1LikePlan({.replicas = 2})}) {
    ASSERT_THAT(Verify(plan), IsEmpty());
    const auto without = [&](const std::function<void(Plan&)>& change) {
      return After(plan, [&](Plan& p) {
        p.strategy.mesh.clear();
        change(p);
      });
    };
    EXPECT_EQ(without([](Plan&) {}), Only{"tables"});
    // ... by whatever names, in whatever order.
    EXPECT_EQ(without([](Plan& p) { std::swap(p.mesh[0], p.mesh[1]); }), Only{"tables"});
    EXPECT_EQ(without([](Plan& p) { p.mesh[0].name = "dp"; }), Only{"tables"});
  }
  EXPECT_EQ(After(good_, [](Plan& plan) { plan.mesh[0].name = "dp"; }), Only{"tables"});
  // Dimensions of the model's own are behind it.
  Plan plan = good_;
  plan.world_size = 4;
  plan.mesh.push_back({"tp", 2});
  plan.communicators[0].stride = 2;
  EXPECT_EQ(RulesOf(plan), Only{"tables"});
  plan.units[0].parameters[0].placements = {{.mesh_dim = "tp", .size = 2}};
  EXPECT_THAT(Verify(plan), IsEmpty());
}

// ---- groups of ranks ----

// Each group would reduce for itself, and the halves of the job would train two models.
TEST_F(StrategyTables, UnitsAreOfAllRanksOfTheMesh) {
  const auto on_four = [](Plan& plan) { plan.world_size = plan.mesh[0].size = 4; };
  EXPECT_EQ(After(good_, on_four), Only{"tables"});
  EXPECT_EQ(After(Fsdp1LikePlan({}), on_four), Only{"tables"});
  Plan plan = good_;
  on_four(plan);
  EXPECT_THAT(
      Verify(plan).at(0).message,
      HasSubstr("unit layers.0: it is sharded over 2 by 1 and replicated over one rank, and the strategy "
                "shards and replicates over 4 by 1 and one rank"));
}

TEST_F(StrategyTables, ShardAndReplicateAreDimensionsOfTheMesh) {
  const auto swap_strides = [](Plan& plan) {
    std::swap(plan.communicators[0].stride, plan.communicators[1].stride);
  };
  EXPECT_EQ(After(hsdp_, swap_strides), Only{"tables"});
  EXPECT_EQ(After(Fsdp1LikePlan({.replicas = 2}), swap_strides), Only{"tables"});
  EXPECT_EQ(After(hsdp_,
                  [](Plan& plan) {
                    plan.strategy.data_parallel = DataParallelDims{{"shard"}, {}};
                  }),
            Only{"tables"});
}

TEST_F(StrategyTables, AUnitMayHaveDimensionsOfItsOwn) {
  Plan plan = hsdp_;
  plan.strategy.data_parallel = DataParallelDims{{"replicate", "shard"}, {}};
  EXPECT_EQ(RulesOf(plan), Only{"tables"});
  plan.strategy.units = {
      {.modules = {"layers.*"}, .data_parallel = DataParallelDims{{"shard"}, {"replicate"}}}};
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST_F(StrategyTables, ShardingOfFsdp1SaysWhichRanks) {
  const Plan plan = Fsdp1LikePlan({.replicas = 2});
  ASSERT_THAT(Verify(plan), IsEmpty());
  for (const Fsdp1Sharding sharding :
       {Fsdp1Sharding::kFullShard, Fsdp1Sharding::kShardGradOp, Fsdp1Sharding::kNoShard}) {
    EXPECT_EQ(After(plan, [&](Plan& p) { p.strategy.fsdp1.sharding = sharding; }), Only{"tables"});
    EXPECT_THAT(
        After(plan, [&](Plan& p) { p.strategy.units = {{.modules = {"layers.*"}, .sharding = sharding}}; }),
        IsEmpty());
  }
}

// ---- dtypes ----

TEST_F(StrategyTables, UnitsComputeAndReduceInTheDTypesOfAMixedPrecision) {
  for (const Plan& plan :
       {Fsdp2LikePlan({.mixed_precision = true}), Fsdp1LikePlan({.mixed_precision = true})}) {
    ASSERT_THAT(Verify(plan), IsEmpty());
    const auto with = [&](const std::function<void(MixedPrecision&)>& change) {
      return After(plan, [&](Plan& p) { change(*p.strategy.mixed_precision); });
    };
    EXPECT_EQ(with([](MixedPrecision& m) { m.param_dtype.reset(); }), Only{"tables"});
    EXPECT_EQ(with([](MixedPrecision& m) { m.param_dtype = DType::kFloat16; }), Only{"tables"});
    EXPECT_EQ(with([](MixedPrecision& m) { m.reduce_dtype.reset(); }), Only{"tables"});
    EXPECT_EQ(After(plan, [](Plan& p) { p.strategy.mixed_precision.reset(); }), Only{"tables"});
    EXPECT_THAT(
        After(plan,
              [](Plan& p) {
                p.strategy.units = {{.modules = {"layers.*"}, .mixed_precision = p.strategy.mixed_precision}};
                p.strategy.mixed_precision.reset();
              }),
        IsEmpty());
  }
}

// With a wrap policy fsdp1 leaves modules of some classes in full precision.
TEST_F(StrategyTables, UnitsOfAWrapPolicyMayBeInFullPrecision) {
  Plan plan = Fsdp1LikePlan({});
  plan.strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
  EXPECT_EQ(RulesOf(plan), Only{"tables"});
  plan.strategy.units = {{.modules = {"class:Block"}}};
  EXPECT_THAT(Verify(plan), IsEmpty());
  plan.units[0].fqn.clear();  // the root is of no such class
  EXPECT_THAT(RulesOf(plan), Contains("tables"));
  plan.strategy.mixed_precision->module_classes_to_ignore.clear();
  plan.units[0].fqn = "layers.0";
  EXPECT_EQ(RulesOf(plan), Only{"tables"});
}

// Gathered in its own dtype, a parameter is computed with in it, too.
TEST_F(StrategyTables, NoParameterHasADTypeOfItsOwnThatTheStrategyForbids) {
  Plan plan = Fsdp2LikePlan({.mixed_precision = true});
  plan.units[0].parameters[0].param_dtype = DType::kFloat16;
  EXPECT_THAT(RulesOf(plan), Contains("tables"));
}

// ---- the policy ----

TEST_F(StrategyTables, ThePolicyIsTheStrategys) {
  EXPECT_EQ(After(good_, [](Plan& plan) { plan.policy = "fsdp1"; }), Only{"tables"});
  EXPECT_EQ(After(good_, [](Plan& plan) { plan.strategy.policy = "fsdp1"; }), Only{"tables"});
  EXPECT_THAT(After(good_, [](Plan& plan) { plan.policy = plan.strategy.policy = "fsdp1"; }),
              Contains("tables"));
  // One of another program: nothing is known of it.
  EXPECT_THAT(After(good_, [](Plan& plan) { plan.policy = plan.strategy.policy = "mine"; }), IsEmpty());
}

TEST_F(StrategyTables, OfAPlanWithoutAMeshNothingIsSaid) {
  EXPECT_THAT(After(hsdp_,
                    [](Plan& plan) {
                      plan.mesh.clear();
                      plan.strategy.mesh.clear();
                    }),
              IsEmpty());
}

}  // namespace
}  // namespace shardplan::test
