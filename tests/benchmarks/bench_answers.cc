// SPDX-License-Identifier: Apache-2.0
// Plan, step time and peak of a traced model in one process, by number of ranks, as sweeps ask for them.
//
//     bench_answers TRACE... [Google Benchmark's flags]
//
// Each decoder layer is a unit, gathered in bf16 and reduced in fp32. `ratio_to_empty_pass`: next to reading
// each entry of the plan's segments and each instruction once. `plan`: without the verifier; `verify`: it
// alone.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <iostream>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/verifier/verifier.h"
#include "shortest_seconds.h"

namespace shardplan::test {
namespace {

Strategy BenchStrategy() {
  Strategy strategy;
  strategy.units = {{.modules = {"model.layers.*"}}};
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  return strategy;
}

Cluster BenchCluster(std::int64_t ranks) {
  Result<Cluster> cluster =
      ReadCluster(std::string(SHARDPLAN_SOURCE_DIR) + "/tools/clusters/h100_sxm_64.json");
  if (!cluster) std::abort();
  cluster->ranks = ranks;
  return *std::move(cluster);
}

Plan Planned(const Trace& trace, std::int64_t ranks) {
  Result<PlannerOutput> planned =
      MakePlan(trace, BenchStrategy(), BenchCluster(ranks),
               {.verify = false, .skip = {"build_graph", "linearise", "digest"}, .on_pass = {}});
  if (!planned) {
    std::cerr << planned.error().message << "\n";
    std::exit(3);
  }
  return std::move(planned->plan);
}

std::int64_t InstructionsOf(const Plan& plan) {
  std::int64_t instructions = 0;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) instructions += std::ssize(trigger.instructions);
  }
  return instructions;
}

std::int64_t EmptyPass(const Plan& plan) {
  std::int64_t sum = 0;
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* event = std::get_if<OperatorEvent>(&entry);
      sum += event != nullptr ? event->flops + event->bytes_read.value : 1;
    }
  }
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) sum += i.stream + i.unit + i.src;
    }
  }
  return sum;
}

void BenchPlan(benchmark::State& state, const Trace& trace) {
  for (auto _ : state) benchmark::DoNotOptimize(Planned(trace, state.range(0)));
}

void BenchVerify(benchmark::State& state, const Trace& trace) {
  const Plan plan = Planned(trace, state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(Verify(plan));
}

void BenchSimulate(benchmark::State& state, const Trace& trace) {
  const Plan plan = Planned(trace, state.range(0));
  const auto run = [&] { benchmark::DoNotOptimize(Simulate(plan, {.record_timeline = false})); };
  for (auto _ : state) run();
  const std::int64_t instructions = InstructionsOf(plan);
  state.counters["instructions"] = static_cast<double>(instructions);
  state.counters["instructions/s"] =
      benchmark::Counter(static_cast<double>(instructions) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
  state.counters["ratio_to_empty_pass"] =
      ShortestSeconds(50, run) / ShortestSeconds(50, [&] { benchmark::DoNotOptimize(EmptyPass(plan)); });
}

void BenchAll(benchmark::State& state, const Trace& trace) {
  for (auto _ : state) {
    const Plan plan = Planned(trace, state.range(0));
    benchmark::DoNotOptimize(Simulate(plan, {.record_timeline = false}));
  }
}

void Register(const std::string& path) {
  const Result<Trace> trace = ReadTrace(path);
  if (!trace) {
    std::cerr << path << ": " << trace.error().message << "\n";
    std::exit(3);
  }
  const auto add = [&](const std::string& name, void (*run)(benchmark::State&, const Trace&)) {
    benchmark::RegisterBenchmark(("BM_" + name + "/" + trace->model).c_str(),
                                 [run, trace = *trace](benchmark::State& state) { run(state, trace); })
        ->ArgName("ranks")
        ->Arg(8)
        ->Arg(256)
        ->Arg(16'384)
        ->Unit(benchmark::kMillisecond);
  };
  add("Plan", BenchPlan);
  add("Verify", BenchVerify);
  add("Simulate", BenchSimulate);
  add("PlanAndSimulate", BenchAll);
}

}  // namespace
}  // namespace shardplan::test

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (argc < 2) {
    std::cerr << "usage: bench_answers TRACE... (as `shardplan trace` writes them)\n";
    return 2;
  }
  for (int a = 1; a < argc; ++a) shardplan::test::Register(argv[a]);
  benchmark::RunSpecifiedBenchmarks();
}
