// SPDX-License-Identifier: Apache-2.0
// Instructions of a plan simulated per second, next to an empty pass over the same instructions.
//
// The plan is a transformer of `layers` layers under the schedule of FSDP2 by hand (about 30 instructions a
// layer and step), as large as Llama-3.1-405B (126 layers). `ratio_to_empty_pass`: time of RunStep over the
// time to read each lowered instruction once and add up its fields.
#include <benchmark/benchmark.h>

#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/simulate.h"
#include "shortest_seconds.h"
#include "tests/simulator/layered_plan.h"

namespace shardplan::test {
namespace {

Plan BenchPlan(int layers, int operators) {
  Plan plan = LayeredPlan({.layers = layers});
  for (Segment& segment : plan.segments) {
    segment.entries.assign(static_cast<std::size_t>(operators), FixedOperator(100'000));
  }
  plan.cluster.host.operator_issue_ns = Nanoseconds{7'000};
  plan.cluster.host.trigger_ns = Nanoseconds{30'000};
  plan.cluster.compute_rate_while_communicating_ppm = 900'000;
  return plan;
}

std::int64_t EmptyPass(const EngineStep& step) {
  std::int64_t sum = 0;
  for (const EngineInstruction& i : step.code) {
    sum += i.duration_ns.value + i.host_ns.value + i.operand + i.sequence + i.stream + i.unit + i.phase;
  }
  return sum;
}

void BM_RunStep(benchmark::State& state) {
  const Plan plan = BenchPlan(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
  for (auto _ : state) {
    Result<EngineResult> result = RunStep(*program, 0, nullptr);
    benchmark::DoNotOptimize(result);
  }
  const EngineStep& step = program->steps[0];
  const auto instructions = static_cast<double>(step.plan_instructions);
  state.counters["instructions/s"] =
      benchmark::Counter(instructions * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  const double run = ShortestSeconds(500, [&] { benchmark::DoNotOptimize(RunStep(*program, 0, nullptr)); });
  const double empty = ShortestSeconds(500, [&] { benchmark::DoNotOptimize(EmptyPass(step)); });
  state.counters["ratio_to_empty_pass"] = run / empty;
}
BENCHMARK(BM_RunStep)->ArgNames({"layers", "operators"})->Args({32, 60})->Args({126, 60})->Args({1000, 60});

void BM_SimulateReportOnly(benchmark::State& state) {
  const Plan plan = BenchPlan(static_cast<int>(state.range(0)), 60);
  std::int64_t instructions = 0;
  for (auto _ : state) {
    const Result<Simulation> simulation = Simulate(plan, {.record_timeline = false});
    instructions += simulation->instructions;
  }
  state.counters["instructions/s"] =
      benchmark::Counter(static_cast<double>(instructions), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_SimulateReportOnly)->ArgName("layers")->Arg(32)->Arg(126);

}  // namespace
}  // namespace shardplan::test

BENCHMARK_MAIN();
