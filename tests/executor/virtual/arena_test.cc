// SPDX-License-Identifier: Apache-2.0
// The arena of every recorded and golden case: what is alive at the same time never overlaps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "shardplan/executor/device.h"
#include "shardplan/planner/planner.h"
#include "tests/executor/virtual/plan_cases.h"
#include "tests/planner/random_cases.h"

namespace shardplan::test {
namespace {

using executor::ArenaBytes;
using executor::ArenaLayout;

// Walks the plan as the replayer does and keeps what is alive in a map by address.
class Walker {
 public:
  Walker(const Plan& plan, const ArenaLayout& layout) : plan_(plan), layout_(layout) {}

  void Walk(const PlanStep& step) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllocate && layout_.offsets[i.dst] >= 0) Take(i.dst, i.stream);
        if (i.kind == InstructionKind::kFree && layout_.offsets[i.src] >= 0) Drop(i.src);
      }
    }
  }
  bool reuses() const { return reuses_; }
  std::string fault() const { return fault_; }
  // The most that was alive at once of each stream.
  std::int64_t alive_bytes() const {
    std::int64_t bytes = 0;
    for (const auto& [stream, level] : of_stream_) bytes += level.second;
    return bytes;
  }

 private:
  void Take(BufferId buffer, StreamId stream) {
    const std::int64_t begin = layout_.offsets[buffer];
    const std::int64_t end = begin + ArenaBytes(plan_.buffers[buffer]);
    if (end > layout_.size_bytes) fault_ = plan_.buffers[buffer].name + " ends behind the arena";
    for (const auto& [other, range] : alive_) {
      if (begin < range.second && range.first < end) {
        fault_ = plan_.buffers[buffer].name + " overlaps " + plan_.buffers[other].name;
      }
    }
    for (const auto& [other, first_stream] : stream_of_) {
      const std::int64_t at = layout_.offsets[other];
      const bool overlaps = begin < at + ArenaBytes(plan_.buffers[other]) && at < end;
      if (!overlaps || other == buffer) continue;
      reuses_ = true;
      if (first_stream != stream) fault_ = plan_.buffers[buffer].name + " is shared between streams";
      if (!std::ranges::binary_search(layout_.sharers[buffer], other)) fault_ = "a sharer is not listed";
    }
    stream_of_[buffer] = stream;
    alive_[buffer] = {begin, end};
    auto& [now, most] = of_stream_[stream];
    most = std::max(most, now += end - begin);
  }
  void Drop(BufferId buffer) {
    if (alive_.erase(buffer) > 0) of_stream_[stream_of_[buffer]].first -= ArenaBytes(plan_.buffers[buffer]);
  }

  const Plan& plan_;
  const ArenaLayout& layout_;
  std::map<BufferId, std::pair<std::int64_t, std::int64_t>> alive_;
  std::map<BufferId, StreamId> stream_of_;
  std::map<StreamId, std::pair<std::int64_t, std::int64_t>> of_stream_;  // bytes now, and at most
  bool reuses_ = false;
  std::string fault_;
};

TEST(Arena, NothingAliveOverlaps) {
  std::vector<PlanCase> cases;
  for (const std::string& name : RecordedNames()) cases.push_back(RecordedCase(name));
  for (const std::string& name : GoldenNames()) cases.push_back(GoldenCase(name));
  int reusing = 0;
  for (const PlanCase& c : cases) {
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster, {.verify = false});
    if (!planned) continue;
    const Plan& plan = planned->plan;
    const ArenaLayout layout = executor::LayOutArena(plan);
    Walker walker(plan, layout);
    for (const PlanStep& step : plan.steps) walker.Walk(step);
    for (int round = 0; round < 3; ++round) {
      for (std::size_t s = static_cast<std::size_t>(plan.steady_step); s < plan.steps.size(); ++s) {
        walker.Walk(plan.steps[s]);
      }
    }
    EXPECT_EQ(walker.fault(), "") << c.name;
    reusing += walker.reuses() ? 1 : 0;
  }
  EXPECT_GT(reusing, 20);
}

// Units of random sizes, several of them gathered ahead: packing them is a heuristic.
TEST(Arena, IsHardlyLargerThanWhatIsAliveAtOnce) {
  constexpr std::uint32_t kPlans = 12;
  double ratios = 0;
  for (std::uint32_t seed = 1; seed <= kPlans; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    testing::Random random(seed);
    testing::TreeModule list{.name = "layers", .class_name = "ModuleList"};
    for (int i = 0; i < 160; ++i) {
      list.children.push_back({.name = std::to_string(i),
                               .class_name = "Block",
                               .parameters = {{64 + random.Below(4000), 16}, {64 + random.Below(900)}}});
    }
    const Trace trace = testing::TraceOf({.name = "", .children = {list}}, 1'000);
    Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
    strategy.mixed_precision =
        MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
    strategy.fsdp2.forward_prefetch = random.Below(4);
    strategy.fsdp2.backward_prefetch = random.Below(4);
    strategy.fsdp2.reduce_scatter_inputs_in_flight = 1 + random.Below(3);
    strategy.reshard_after_forward = random.Chance(50);
    const Result<PlannerOutput> planned = MakePlan(trace, strategy, testing::ClusterOf(4), {.verify = false});
    ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
    const ArenaLayout layout = executor::LayOutArena(planned->plan);
    Walker walker(planned->plan, layout);
    for (int round = 0; round < 2; ++round) {
      for (const PlanStep& step : planned->plan.steps) walker.Walk(step);
    }
    EXPECT_EQ(walker.fault(), "");
    EXPECT_GT(walker.alive_bytes(), 0);
    EXPECT_LE(layout.size_bytes * 100, walker.alive_bytes() * 106);
    ratios += static_cast<double>(layout.size_bytes) / static_cast<double>(walker.alive_bytes());
  }
  EXPECT_LE(ratios / kPlans, 1.01);
}

}  // namespace
}  // namespace shardplan::test
