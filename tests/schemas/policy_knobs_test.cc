// SPDX-License-Identifier: Apache-2.0
// Knobs of policies as the simulator, the verifier and the command see them.
#include "shardplan/schemas/policy_knobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace shardplan::test {
namespace {

TEST(PolicyKnobs, EveryPolicyHasANameOfItsOwnAndIsFoundByIt) {
  std::set<std::string> names;
  for (const PolicyKnobs& policy : AllPolicyKnobs()) {
    EXPECT_TRUE(names.insert(policy.name).second) << policy.name;
    EXPECT_EQ(KnobsOf(policy.name).name, policy.name);
    EXPECT_FALSE(policy.accumulation_call.empty());
  }
  EXPECT_EQ(names, (std::set<std::string>{"fsdp1", "fsdp2"}));
  EXPECT_TRUE(IsBuiltIn("fsdp1"));
  EXPECT_FALSE(IsBuiltIn("by_hand"));
  EXPECT_EQ(KnobsOf("by_hand").name, "")
      << "it lays units out as fsdp2 does, and nothing else is known of it";
  EXPECT_EQ(KnobsOf("by_hand").layout, LayoutKind::kPerParameter);
}

TEST(PolicyKnobs, NumbersThatAreWholeHaveOneForm) {
  EXPECT_EQ(KnobNumber(2.0), KnobValue(std::int64_t{2}));
  EXPECT_EQ(KnobNumber(-0.5), KnobValue(-0.5));
  EXPECT_EQ(KnobNumber(1e300), KnobValue(1e300)) << "beyond whole numbers of 64 bits";
}

TEST(PolicyKnobs, EveryChangeOfMemoryIsOneStrategyThatSaysItsKnob) {
  for (const PolicyKnobs& policy : AllPolicyKnobs()) {
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

TEST(PolicyKnobs, AdvisesTheKnobThatReshards) {
  Strategy strategy;
  EXPECT_EQ(KnobsOf("fsdp2").reshard_advice(strategy, "layers.0", false),
            "reshard_after_forward: true for layers.0");
  const PolicyKnobs& flat = KnobsOf("fsdp1");
  EXPECT_EQ(flat.reshard_advice(strategy, "layers.0", false), "no prefetch, forward or backward");
  strategy.fsdp1.sharding = Fsdp1Sharding::kShardGradOp;
  EXPECT_EQ(flat.reshard_advice(strategy, "layers.0", false), "sharding: full_shard");
  EXPECT_EQ(flat.reshard_advice(strategy, "(root)", true), "units of their own for the modules of (root)");
}

TEST(PolicyKnobs, DivideGradientsAsTheirFactorsSay) {
  Strategy strategy;
  Unit unit;
  unit.hook_divisor = 3;
  EXPECT_EQ(KnobsOf("fsdp2").gradient_divisor(strategy, unit, 8), 24);
  EXPECT_EQ(KnobsOf("fsdp1").gradient_divisor(strategy, unit, 8), 24);
  strategy.fsdp2.gradient_divide_factor = 5;
  EXPECT_EQ(KnobsOf("fsdp2").gradient_divisor(strategy, unit, 8), 15);
  unit.gradient_divide_factor = 7;
  EXPECT_EQ(KnobsOf("fsdp2").gradient_divisor(strategy, unit, 8), 21);
  EXPECT_EQ(KnobsOf("fsdp1").gradient_divisor(strategy, unit, 8), 24);
  strategy.fsdp1.gradient_predivide_factor = 5;  // 8 ranks are divided by 4, then by 2
  EXPECT_EQ(KnobsOf("fsdp1").gradient_divisor(strategy, unit, 8), 10);
}

TEST(PolicyKnobs, OnlyFlatShardsCanBeSteppedAsOriginalParameters) {
  Strategy strategy;
  EXPECT_FALSE(KnobsOf("fsdp1").steps_original_parameters(strategy));
  strategy.fsdp1.use_orig_params = true;
  EXPECT_TRUE(KnobsOf("fsdp1").steps_original_parameters(strategy));
  EXPECT_FALSE(KnobsOf("fsdp2").steps_original_parameters(strategy));
}

}  // namespace
}  // namespace shardplan::test
