// What policies say of themselves to the simulator and the command.
#include "shardplan/schemas/policy_description.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace shardplan::test {
namespace {

TEST(PolicyDescription, EveryPolicyHasANameOfItsOwnAndIsFoundByIt) {
  std::set<std::string> names;
  for (const PolicyDescription& policy : PolicyDescriptions()) {
    EXPECT_TRUE(names.insert(policy.name).second) << policy.name;
    EXPECT_EQ(DescriptionOf(policy.name).name, policy.name);
    EXPECT_FALSE(policy.accumulation_call.empty());
  }
  EXPECT_EQ(names, (std::set<std::string>{"fsdp1", "fsdp2"}));
  EXPECT_EQ(DescriptionOf("by_hand").name, "fsdp2");
}

TEST(PolicyDescription, EveryChangeOfMemoryIsOneStrategyThatSaysItsKnob) {
  for (const PolicyDescription& policy : PolicyDescriptions()) {
    Strategy strategy;
    strategy.policy = policy.name;
    // So that every change changes something.
    strategy.fsdp1.sharding = Fsdp1Sharding::kShardGradOp;
    strategy.fsdp1.limit_all_gathers = false;
    strategy.fsdp2.forward_prefetch = 1;
    strategy.fsdp2.reduce_scatter_inputs_in_flight = 2;
    std::set<std::string> knobs;
    for (const KnobChange& change : policy.memory_changes(strategy)) {
      EXPECT_TRUE(knobs.insert(change.knob).second) << change.knob;
      EXPECT_NE(change.strategy, strategy) << change.knob;
      EXPECT_EQ(change.strategy.policy, policy.name);
    }
    EXPECT_EQ(knobs.size(), 3U);
  }
}

TEST(PolicyDescription, AdvisesTheKnobThatReshards) {
  Strategy strategy;
  EXPECT_EQ(DescriptionOf("fsdp2").reshard_advice(strategy, "layers.0", false),
            "reshard_after_forward: true for layers.0");
  const PolicyDescription& flat = DescriptionOf("fsdp1");
  EXPECT_EQ(flat.reshard_advice(strategy, "layers.0", false), "no prefetch, forward or backward");
  strategy.fsdp1.sharding = Fsdp1Sharding::kShardGradOp;
  EXPECT_EQ(flat.reshard_advice(strategy, "layers.0", false), "sharding: full_shard");
  EXPECT_EQ(flat.reshard_advice(strategy, "(root)", true), "units of their own for the modules of (root)");
}

TEST(PolicyDescription, OnlyFlatShardsCanBeSteppedAsOriginalParameters) {
  Strategy strategy;
  EXPECT_FALSE(DescriptionOf("fsdp1").steps_original_parameters(strategy));
  strategy.fsdp1.use_orig_params = true;
  EXPECT_TRUE(DescriptionOf("fsdp1").steps_original_parameters(strategy));
  EXPECT_FALSE(DescriptionOf("fsdp2").steps_original_parameters(strategy));
}

}  // namespace
}  // namespace shardplan::test
