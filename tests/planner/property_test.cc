// Random module trees, units and knobs: every plan verifies, is the same twice, reads back, and gathers and
// reduces as often as the policy's rule says.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/verifier.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using testing::TraceOf;
using testing::TreeModule;

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  int Below(int bound) { return static_cast<int>(engine_() % static_cast<std::uint32_t>(bound)); }
  bool Chance(int percent) { return Below(100) < percent; }

 private:
  std::mt19937 engine_;
};

TreeModule RandomTree(Random& random, const std::string& name, int depth, bool may_freeze) {
  TreeModule module{.name = name};
  const int parameters = depth == 0 ? 1 + random.Below(3) : random.Below(2);
  for (int p = 0; p < parameters; ++p) {
    module.parameters.push_back({1 + random.Below(9), 1 + random.Below(4)});
  }
  module.trainable = !may_freeze || !random.Chance(25);
  const int children = depth == 0 ? 0 : 1 + random.Below(3);
  for (int c = 0; c < children; ++c) {
    module.children.push_back(
        RandomTree(random, std::string(1, static_cast<char>('a' + c)), depth - 1, may_freeze));
  }
  return module;
}

// Inner modules first, each with a chance to become a unit.
void AddUnits(Random& random, const Trace& trace, Strategy& strategy) {
  for (auto module = trace.modules.rbegin(); module != trace.modules.rend(); ++module) {
    if (module->fqn.empty() || !random.Chance(40)) continue;
    UnitRule rule{.modules = {module->fqn}};
    if (strategy.policy == "fsdp2" && random.Chance(20)) rule.reshard_after_forward = random.Chance(50);
    strategy.units.push_back(std::move(rule));
  }
  strategy.units.push_back({.modules = {""}});
}

struct Case {
  Trace trace;
  Strategy strategy;
  std::int64_t ranks = 4;
};

Case RandomCase(std::uint32_t seed, bool may_freeze) {
  Random random(seed);
  Case c;
  c.trace = TraceOf(RandomTree(random, "", 1 + random.Below(3), may_freeze));
  Strategy& s = c.strategy;
  s.policy = random.Chance(50) ? "fsdp2" : "fsdp1";
  AddUnits(random, c.trace, s);
  if (random.Chance(40)) {
    s.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
    if (random.Chance(50)) s.mixed_precision->reduce_dtype = DType::kFloat32;
  }
  if (random.Chance(30)) s.mesh = {{"replicate", 2}, {"shard", 2}};
  if (random.Chance(10)) s.mesh = {{"shard", c.ranks = 1}};
  if (random.Chance(20)) s.reshard_after_forward = std::int64_t{2};
  if (c.ranks == 1) s.reshard_after_forward.reset();
  s.pin_memory = random.Chance(70);
  s.fsdp2.forward_prefetch = random.Below(3);
  s.fsdp2.backward_prefetch = random.Below(4) - 1;
  s.fsdp1.forward_prefetch = random.Chance(30);
  s.fsdp1.backward_prefetch = static_cast<Fsdp1BackwardPrefetch>(random.Below(3));
  s.fsdp1.limit_all_gathers = random.Chance(70);
  s.fsdp1.use_orig_params = may_freeze || random.Chance(30);
  s.fsdp1.sharding = s.mesh.size() == 2  ? (random.Chance(50) ? Fsdp1Sharding::kHybridShard
                                                              : Fsdp1Sharding::kHybridShardZero2)
                     : random.Chance(60) ? Fsdp1Sharding::kFullShard
                     : random.Chance(70) ? Fsdp1Sharding::kShardGradOp
                                         : Fsdp1Sharding::kNoShard;
  s.optimizer.kind = static_cast<OptimizerKind>(1 + random.Below(2));
  if (random.Chance(40)) {  // accumulation, with or without synchronisation
    const bool sync = random.Chance(30);
    const ModuleCall off{.method = "set_requires_gradient_sync", .value = sync};
    const ModuleCall on{.method = "set_requires_gradient_sync", .value = true};
    s.program = {{off, ForwardCall{0, 0}, BackwardCall{{0}, 0}, on, ForwardCall{1, 0}, BackwardCall{{1}, 0},
                  OptimizerStepCall{}, ZeroGradCall{}}};
  }
  if (random.Chance(30)) s.checkpoint = CheckpointRule{.modules = {"a"}, .early_stop = random.Chance(70)};
  // A recomputation may prefetch a unit whose gradients are out already; nothing makes the host wait for that
  // copy of the shards before it steps them (in PyTorch neither).
  s.cpu_offload = s.policy == "fsdp2" && !s.checkpoint && random.Chance(20);
  return c;
}

std::string Why(const Plan& plan, const std::vector<Violation>& violations) {
  return violations.empty() ? "" : Explain(plan, violations.front()) + "\n" + PlanText(plan);
}

TEST(PlannerPropertyTest, PlansVerifyAndAreDeterministic) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case c = RandomCase(seed, /*may_freeze=*/seed % 2 == 0);
    const PlanOptions options{.verify = false};
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), options);
    ASSERT_TRUE(planned) << ToString(planned.error()) << "\n" << ToJson(c.strategy);
    ASSERT_EQ(Why(planned->plan, Verify(planned->plan)), "") << ToJson(c.strategy);
    const std::string bytes = ToJson(planned->plan);
    const Result<PlannerOutput> again = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), options);
    ASSERT_EQ(bytes, ToJson(again->plan));
    const Result<Plan> read = ParsePlan(bytes);
    ASSERT_TRUE(read) << ToString(read.error());
    ASSERT_EQ(*read, planned->plan);
  }
}

TEST(PlannerPropertyTest, EachUnitIsGatheredAndReducedAsOftenAsThePolicySays) {
  int checked = 0;
  for (std::uint32_t seed = 1000; seed < 1300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c = RandomCase(seed, /*may_freeze=*/false);
    c.strategy.program.clear();
    c.strategy.checkpoint.reset();  // gathers what it runs again
    if (c.ranks == 1 || c.strategy.fsdp1.sharding == Fsdp1Sharding::kNoShard) continue;
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks));
    ASSERT_TRUE(planned) << ToString(planned.error());
    const Plan& plan = planned->plan;
    std::map<UnitId, int> gathers, reduces;
    for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllGather) ++gathers[plan.buffers[i.dst].unit];
        if (i.kind == InstructionKind::kReduceScatter) ++reduces[plan.buffers[i.src].unit];
      }
    }
    const bool fsdp1 = c.strategy.policy == "fsdp1";
    const bool zero2 = c.strategy.fsdp1.sharding == Fsdp1Sharding::kShardGradOp ||
                       c.strategy.fsdp1.sharding == Fsdp1Sharding::kHybridShardZero2;
    for (std::size_t u = 0; u < plan.units.size(); ++u) {
      const Unit& unit = plan.units[u];
      const auto id = static_cast<UnitId>(u);
      const int expected_reduces = unit.parameters.empty() ? 0 : 1;
      EXPECT_EQ(reduces[id], expected_reduces) << unit.fqn;
      int expected = unit.parameters.empty() ? 0 : 2;
      if (expected == 0) {
        EXPECT_EQ(gathers[id], 0);
        continue;
      }
      if (fsdp1) {
        if (unit.fqn.empty() || zero2) expected = 1;
      } else {
        std::optional<ReshardAfterForward> reshard = c.strategy.reshard_after_forward;
        for (const UnitRule& rule : c.strategy.units) {
          if (rule.modules[0] == unit.fqn && rule.reshard_after_forward) reshard = rule.reshard_after_forward;
        }
        const bool keeps = reshard ? *reshard == ReshardAfterForward(false) : unit.fqn.empty();
        if (keeps) expected = 1;
      }
      EXPECT_EQ(gathers[id], expected) << unit.fqn << "\n" << ToJson(c.strategy);
      ++checked;
    }
  }
  EXPECT_GT(checked, 500);
}

}  // namespace
}  // namespace shardplan
