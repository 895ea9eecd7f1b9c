// SPDX-License-Identifier: Apache-2.0
// Time to verify a plan, next to the time to read its document and to an empty pass over its instructions.
//
//   bench_verifier PLAN.json...
//
// `ratio_to_reading`: of the shortest of many verifications to the shortest of some readings of the text that
// is in memory already. `ratio_to_empty_pass`: to reading each instruction once and adding up its fields.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <string>

#include "shardplan/schemas/io.h"
#include "shardplan/verifier/verifier.h"
#include "shortest_seconds.h"

namespace shardplan {
namespace {

std::int64_t EmptyPass(const Plan& plan, std::int64_t& instructions) {
  std::int64_t sum = 0;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        sum +=
            static_cast<std::int64_t>(i.kind) + i.stream + i.unit + i.src + i.dst + i.event + i.communicator;
        ++instructions;
      }
    }
  }
  return sum;
}

void BM_Verify(benchmark::State& state, const std::string& text, const Plan& plan) {
  for (auto _ : state) benchmark::DoNotOptimize(Verify(plan));
  const double verify = ShortestSeconds(200, [&] { benchmark::DoNotOptimize(Verify(plan)); });
  const double read = ShortestSeconds(10, [&] { benchmark::DoNotOptimize(ParsePlan(text)); });
  std::int64_t instructions = 0;
  const double pass = ShortestSeconds(200, [&] {
    instructions = 0;
    benchmark::DoNotOptimize(EmptyPass(plan, instructions));
  });
  state.counters["instructions"] = static_cast<double>(instructions);
  state.counters["violations"] = static_cast<double>(Verify(plan).size());
  state.counters["ratio_to_reading"] = verify / read;
  state.counters["ratio_to_empty_pass"] = verify / pass;
}

}  // namespace
}  // namespace shardplan

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (int a = 1; a < argc; ++a) {
    const shardplan::Result<std::string> text = shardplan::ReadFile(argv[a]);
    if (!text) return std::fprintf(stderr, "%s\n", ToString(text.error()).c_str()), 3;
    const shardplan::Result<shardplan::Plan> plan = shardplan::ParsePlan(*text);
    if (!plan) return std::fprintf(stderr, "%s\n", ToString(plan.error()).c_str()), 3;
    benchmark::RegisterBenchmark(argv[a], [text = *text, plan = *plan](benchmark::State& state) {
      shardplan::BM_Verify(state, text, plan);
    })->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
