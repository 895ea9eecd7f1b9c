// SPDX-License-Identifier: Apache-2.0
// Which modules become units, which parameters they hold, and what is wrong with a rule.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardplan/planner/planner.h"
#include "tests/planner/planned.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::LayeredTrace;
using testing::Planned;
using testing::TraceOf;
using testing::TreeModule;
using testing::UnitNames;

// Two blocks, each an attention and an mlp; the mlp holds a parameter of its own in front of its children.
Trace Nested() {
  TreeModule list{.name = "blocks", .class_name = "ModuleList"};
  for (const char* name : {"0", "1"}) {
    TreeModule mlp{.name = "mlp",
                   .class_name = "Mlp",
                   .parameters = {{5}},
                   .children = {{.name = "up", .class_name = "Linear", .parameters = {{7, 3}}},
                                {.name = "down", .class_name = "Linear", .parameters = {{3, 7}}}}};
    list.children.push_back(
        {.name = name,
         .class_name = "Block",
         .children = {{.name = "attn", .class_name = "Attention", .parameters = {{6, 4}}}, mlp}});
  }
  return TraceOf({.class_name = "Model",
                  .children = {{.name = "embed", .class_name = "Embedding", .parameters = {{11, 2}}},
                               list,
                               {.name = "head", .class_name = "Linear", .parameters = {{11, 2}}}}});
}

std::vector<std::string> ParameterNames(const Unit& unit) {
  std::vector<std::string> names;
  for (const UnitParameter& parameter : unit.parameters) names.push_back(parameter.fqn);
  return names;
}

TEST(PartitionTest, DefaultIsOneUnitPerBlockAndTheRoot) {
  EXPECT_THAT(UnitNames(Planned(Nested(), {})), ElementsAre("", "blocks.0", "blocks.1"));
}

TEST(PartitionTest, PatternsClassesAndNestedUnits) {
  EXPECT_THAT(
      UnitNames(Planned(Nested(), {.units = {{.modules = {"class:Attention"}}, {.modules = {"blocks.*"}}}})),
      ElementsAre("", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.1.attn"));
  EXPECT_THAT(UnitNames(Planned(Nested(), {.units = {{.modules = {"blocks.?.mlp", "head"}}}})),
              ElementsAre("", "blocks.0.mlp", "blocks.1.mlp", "head"));
}

TEST(PartitionTest, GroupIsOneUnit) {
  const Plan plan =
      Planned(LayeredTrace(3, 4, 4), {.units = {{.modules = {"layers.1", "layers.2"}, .group = true}}});
  EXPECT_THAT(UnitNames(plan), ElementsAre("", "layers.1,layers.2"));
  EXPECT_THAT(plan.units[1].modules, ElementsAre("layers.1", "layers.2"));
  EXPECT_EQ(plan.units[1].parameters.size(), 2u);
}

TEST(PartitionTest, GroupDropsModulesInsideItsOthers) {
  const auto planned = [](std::vector<std::string> modules) {
    return Planned(Nested(), {.units = {{.modules = std::move(modules), .group = true}}});
  };
  const Plan nested = planned({"blocks.0.mlp.up", "blocks.0", "blocks.1.attn"});
  EXPECT_THAT(UnitNames(nested), ElementsAre("", "blocks.0,blocks.1.attn"));
  EXPECT_THAT(nested.units[1].modules, ElementsAre("blocks.0", "blocks.1.attn"));
  EXPECT_EQ(nested.units[1].parameters.size(), 5u);
  EXPECT_THAT(UnitNames(planned({"blocks.0", ""})), ElementsAre(""));
}

TEST(PartitionTest, ParameterOrderIsChildrenFirstInFsdp2AndTreeOrderInFsdp1) {
  const Strategy fsdp2{.units = {{.modules = {"blocks.0"}}}};
  EXPECT_THAT(ParameterNames(Planned(Nested(), fsdp2).units[1]),
              ElementsAre("blocks.0.attn.weight0", "blocks.0.mlp.up.weight0", "blocks.0.mlp.down.weight0",
                          "blocks.0.mlp.weight0"));
  const Strategy fsdp1{.policy = "fsdp1", .units = {{.modules = {"blocks.0"}}}};
  EXPECT_THAT(ParameterNames(Planned(Nested(), fsdp1).units[1]),
              ElementsAre("blocks.0.attn.weight0", "blocks.0.mlp.weight0", "blocks.0.mlp.up.weight0",
                          "blocks.0.mlp.down.weight0"));
}

TEST(PartitionTest, TiedParameterCountsOnceInItsUnit) {
  Trace trace = Nested();
  // head.weight0 is embed.weight0
  Module& head = trace.modules.back();
  ASSERT_EQ(head.fqn, "head");
  head.parameters[0].parameter = 0;
  trace.parameters[0].shared_with = {"head.weight0"};
  const Plan plan = Planned(trace, {});
  EXPECT_THAT(ParameterNames(plan.units[0]), ElementsAre("embed.weight0"));
  EXPECT_THAT(plan.units[0].parameters[0].shared_with, ElementsAre("head.weight0"));
}

TEST(PartitionTest, OriginalParametersOfFsdp1AreInOneUnit) {
  Trace trace = Nested();
  trace.modules.back().parameters[0].parameter = 0;
  trace.parameters[0].shared_with = {"head.weight0"};
  Strategy strategy{.policy = "fsdp1", .units = {{.modules = {"embed"}}}};
  EXPECT_TRUE(MakePlan(trace, strategy, ClusterOf(2)));
  strategy.fsdp1.use_orig_params = true;
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(2));
  ASSERT_FALSE(planned);
  EXPECT_EQ(planned.error().pointer, "/fsdp1/use_orig_params");
  EXPECT_THAT(ToString(planned.error()), HasSubstr("embed.weight0"));
}

TEST(PartitionTest, UnevenRowsArePaddedOnEveryRank) {
  const Plan plan = Planned(Nested(), {.units = {{.modules = {"blocks.0.mlp.up"}}}}, 4);
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.unit != 1) continue;
    std::int64_t expected = SizeBytes(buffer).value;
    if (buffer.role == BufferRole::kParamSharded) expected = 2 * 3 * 4;  // ceil(7 / 4) rows
    if (buffer.role == BufferRole::kAllGatherOutput) expected = 4 * 2 * 3 * 4;
    if (buffer.role == BufferRole::kGradUnsharded) expected = 7 * 3 * 4;
    EXPECT_EQ(SizeBytes(buffer).value, expected) << buffer.name;
  }
}

struct BadCase {
  Strategy strategy;
  const char* pointer;
  const char* message;
};

TEST(PartitionTest, BadStrategiesAreRefusedWithThePlace) {
  const std::vector<BadCase> cases = {
      {{.units = {{.modules = {"nowhere"}}}}, "/units/0/modules/0", "no module has this name"},
      {{.units = {{.modules = {"class:None"}}}}, "/units/0/modules/0", "no module has this class"},
      {{.units = {{.modules = {"head"}}, {.modules = {"*"}}}}, "/units/1/modules/0", "two units"},
      {{.units = {{.modules = {"blocks.0"}}, {.modules = {"blocks.0.mlp"}}}},
       "/units/1/modules/0",
       "before it"},
      {{.mesh = {{"shard", 3}}}, "/mesh", "does not cover"},
      {{.mesh = {{"tensor", 2}}}, "/mesh", "named shard or replicate"},
      {{.mesh = {{"shard", 1}, {"shard", 2}}}, "/mesh/1/name", "two dimensions"},
      {{.data_parallel = DataParallelDims{.shard = {"dp"}}}, "/data_parallel", "no such dimension"},
      {{.fsdp2 = {.shard_dims = {{.parameters = {"nothing"}}}}},
       "/fsdp2/shard_dims/0/parameters/0",
       "no parameter"},
      {{.fsdp2 = {.all_reduce_hooks = {{.mesh_dim = "x"}}}},
       "/fsdp2/all_reduce_hooks/0/mesh_dim",
       "no such dimension"},
      {{.fsdp2 = {.shared_comm_contexts = {{"x"}}}}, "/fsdp2/shared_comm_contexts/0/0", "no such unit"},
      {{.setup = {{.method = "set_gradient_divide_factor"}}}, "/setup/0", "takes a number"},
      {{.reshard_after_forward = std::int64_t{3}}, "/units", "divisor"},
      {{.policy = "fsdp3"}, "/policy", "unknown policy"},
      {{.setup = {{.method = "explode"}}}, "/setup/0", "does not know"},
      {{.program = {{ForwardCall{0, 7}}}}, "/program/0/0/trace", "no such forward"},
      {{.checkpoint = CheckpointRule{.modules = {"x"}}}, "/checkpoint/modules/0", "no module"},
  };
  for (const BadCase& c : cases) {
    const Result<PlannerOutput> planned = MakePlan(Nested(), c.strategy, ClusterOf(2));
    ASSERT_FALSE(planned) << c.pointer;
    EXPECT_EQ(planned.error().code, ErrorCode::kBadInput) << c.pointer;
    EXPECT_THAT(planned.error().pointer, HasSubstr(c.pointer));
    EXPECT_THAT(planned.error().message, HasSubstr(c.message));
  }
}

}  // namespace
}  // namespace shardplan
