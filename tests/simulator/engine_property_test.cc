// SPDX-License-Identifier: Apache-2.0
// Properties of any plan. Seeds are printed: a failure is reproduced by RandomPlan(seed).
#include <gtest/gtest.h>

#include <algorithm>

#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/simulate.h"
#include "tests/simulator/layered_plan.h"
#include "tests/simulator/random_plan.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeeds = 400;

struct PlanRun {
  EngineProgram program;
  EngineResult result;
  EngineTimeline timeline;
};

PlanRun RunPlan(const Plan& plan) {
  PlanRun run;
  Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
  EXPECT_TRUE(program.has_value()) << ToString(program.error());
  if (!program) return run;
  run.program = *program;
  Result<EngineResult> result = RunStep(run.program, 0, &run.timeline);
  EXPECT_TRUE(result.has_value()) << ToString(result.error());
  if (result) run.result = *result;
  return run;
}

// Sum of full-rate durations of what runs on `stream` (-1: anywhere) and passes `chosen`.
template <typename Predicate>
std::int64_t WorkOf(const PlanRun& run, int stream, Predicate chosen) {
  std::int64_t sum = 0;
  for (const EngineInstruction& i : run.program.steps[0].code) {
    if (stream >= 0 && i.stream != stream) continue;
    if (i.op == EngineOp::kSegment && chosen(i)) {
      const EngineSegment& segment = run.program.segments[static_cast<std::size_t>(i.operand)];
      for (std::int32_t k = 0; k < segment.count; ++k) {
        sum += run.program.operators[static_cast<std::size_t>(segment.first + k)].duration_ns.value;
      }
    } else if (i.op == EngineOp::kWork && chosen(i)) {
      sum += i.duration_ns.value;
    }
  }
  return sum;
}

TEST(EngineProperty, NoStepIsFasterThanItsLowerBounds) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const PlanRun run = RunPlan(RandomPlan(seed));
    const auto any = [](const EngineInstruction&) { return true; };
    const auto kernel = [](const EngineInstruction& i) { return i.work != WorkClass::kCollective; };
    const std::int64_t end_ns = run.result.end_ns.value;
    EXPECT_GE(end_ns, run.result.host_busy_ns.value);
    // The kernels of all streams share one engine.
    EXPECT_GE(end_ns, WorkOf(run, -1, kernel));
    for (int s = 0; s < run.program.streams; ++s) EXPECT_GE(end_ns, WorkOf(run, s, any));
    // Collectives share the only link.
    EXPECT_GE(end_ns,
              WorkOf(run, -1, [](const EngineInstruction& i) { return i.work == WorkClass::kCollective; }));
    EXPECT_LE(run.result.compute_ns, run.result.end_ns);
    EXPECT_LE(run.result.exposed_ns, run.result.communication_ns);
  }
}

TEST(EngineProperty, SpansOfAStreamFollowEachOtherInHostOrder) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const PlanRun run = RunPlan(RandomPlan(seed));
    std::vector<EngineSpan> last(static_cast<std::size_t>(run.program.streams) + 1);
    for (const EngineSpan& span : run.timeline.spans) {
      EngineSpan& before = last[static_cast<std::size_t>(span.stream + 1)];
      ASSERT_LE(span.start_ns, span.end_ns);
      ASSERT_GE(span.start_ns, before.end_ns);
      ASSERT_GT(span.instruction, before.instruction);
      ASSERT_LE(span.end_ns, run.result.end_ns);
      before = span;
      if (span.stream >= 0) {
        // Nothing starts before the host has begun to issue it; a stall may begin before.
        const EngineInstruction& i = run.program.steps[0].code[static_cast<std::size_t>(span.instruction)];
        if (i.op != EngineOp::kWait) {
          ASSERT_GE(span.start_ns, run.timeline.host_start_ns[static_cast<std::size_t>(span.instruction)]);
        }
      }
    }
    for (const EngineFlow& flow : run.timeline.flows) {
      ASSERT_GE(flow.recorded, 0);
      ASSERT_LT(static_cast<std::size_t>(flow.waiter), run.timeline.spans.size());
      const EngineSpan& recorded = run.timeline.spans[static_cast<std::size_t>(flow.recorded)];
      const EngineSpan& waiter = run.timeline.spans[static_cast<std::size_t>(flow.waiter)];
      const EngineInstruction& i = run.program.steps[0].code[static_cast<std::size_t>(waiter.instruction)];
      // Who waits goes on when what was recorded is done.
      const bool waits = i.op == EngineOp::kWait || i.op == EngineOp::kHostWait;
      ASSERT_LE(recorded.end_ns, waits ? waiter.end_ns : waiter.start_ns);
    }
  }
}

// Alone on the machine (no sharing, no slowing), busy time is the work itself.
TEST(EngineProperty, WorkIsConserved) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Plan plan = RandomPlan(seed);
    plan.cluster.compute_rate_while_communicating_ppm = 1'000'000;
    plan.cluster.communication_rate_while_computing_ppm = 1'000'000;
    const PlanRun run = RunPlan(plan);
    const std::int64_t kernels =
        WorkOf(run, -1, [](const EngineInstruction& i) { return i.work == WorkClass::kCompute; });
    std::int64_t operators = 0;
    for (const EngineInstruction& i : run.program.steps[0].code) {
      if (i.op == EngineOp::kSegment)
        operators += run.program.segments[static_cast<std::size_t>(i.operand)].count;
    }
    // Sharing loses at most a nanosecond at each completion.
    EXPECT_GE(run.result.compute_ns.value, kernels - operators);
    EXPECT_LE(run.result.compute_ns.value, kernels + operators);
  }
}

// A random plan without the effects that make scheduling anomalies possible: every stream has its own
// resource, so more order can only delay.
TEST(EngineProperty, AddingAWaitNeverSpeedsUp) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Plan plan = RandomPlan(seed);
    plan.cluster.compute_rate_while_communicating_ppm = 1'000'000;
    plan.cluster.communication_rate_while_computing_ppm = 1'000'000;
    plan.cluster.host = {};
    // Segments on one stream only; each communicator has a stream of its own; no shared link.
    plan.cluster.links.clear();
    for (Trigger& trigger : plan.steps[0].triggers) {
      for (Instruction& i : trigger.instructions.Edit()) {
        if (i.kind == InstructionKind::kCompute) i.stream = 0;
      }
    }
    const PlanRun before = RunPlan(plan);
    std::vector<Instruction>* longest = nullptr;
    for (Trigger& trigger : plan.steps[0].triggers) {
      if (longest == nullptr || trigger.instructions.size() > longest->size())
        longest = &trigger.instructions.Edit();
    }
    const auto stream = static_cast<StreamId>(seed % plan.streams.size());
    const auto at = static_cast<std::ptrdiff_t>(seed % (longest->size() + 1));
    longest->insert(longest->begin() + at, {.kind = InstructionKind::kWait, .stream = stream, .event = 1});
    EXPECT_GE(RunPlan(plan).result.end_ns, before.result.end_ns);
  }
}

TEST(EngineProperty, RecordingTheTimelineChangesNothingAndRunsAreEqual) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const Result<Simulation> with = Simulate(plan, {.record_timeline = true});
    const Result<Simulation> again = Simulate(plan, {.record_timeline = true});
    const Result<Simulation> without = Simulate(plan, {.record_timeline = false});
    ASSERT_TRUE(with && again && without);
    EXPECT_EQ(with->report, without->report);
    EXPECT_EQ(with->report, again->report);
    EXPECT_EQ(TimelineJson(plan, *with), TimelineJson(plan, *again));
    EXPECT_EQ(ReportHtml({&plan}, {&*with}), ReportHtml({&plan}, {&*again}));
    EXPECT_TRUE(without->spans.empty());
  }
}

// Order alone cannot block a step: whatever an instruction waits for was issued before it. Rates can: here
// compute stands still while a collective is in flight, and the reverse.
TEST(Engine, ReportsAStepThatNeverEnds) {
  Plan plan = LayeredPlan({});
  plan.cluster.compute_rate_while_communicating_ppm = 0;
  plan.cluster.communication_rate_while_computing_ppm = 0;
  const Result<Simulation> simulation = Simulate(plan);
  ASSERT_FALSE(simulation.has_value());
  EXPECT_EQ(simulation.error().code, ErrorCode::kNegative);
  EXPECT_TRUE(simulation.error().pointer.starts_with("/steps/0/triggers/")) << simulation.error().pointer;
  EXPECT_EQ(simulation.error().found, "pre_forward layers.0: forward layers.0");
}

TEST(Engine, RejectsIdsOutOfRange) {
  Plan plan = LayeredPlan({});
  plan.steps[0].triggers[1].instructions.Edit().push_back(
      {.kind = InstructionKind::kCompute, .stream = 0, .segment = 99});
  const Result<Simulation> simulation = Simulate(plan);
  ASSERT_FALSE(simulation.has_value());
  EXPECT_EQ(simulation.error().code, ErrorCode::kBadInput);
  EXPECT_TRUE(simulation.error().pointer.starts_with("/steps/0/triggers/1/instructions/"));
  plan = LayeredPlan({});
  plan.steps[0].triggers[1].instructions.Edit().push_back(
      {.kind = InstructionKind::kCompute, .stream = -1, .segment = 0});
  EXPECT_FALSE(Simulate(plan).has_value());
  plan.steps.clear();
  EXPECT_FALSE(Simulate(plan).has_value());
}

}  // namespace
}  // namespace shardplan::test
