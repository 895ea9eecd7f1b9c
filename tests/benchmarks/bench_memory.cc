// SPDX-License-Identifier: Apache-2.0
// The memory of a large plan: its history of allocations, the profile by category, and reserved bytes; next
// to each a plain pass over the same history that reads each action and adds one number.
#include <benchmark/benchmark.h>

#include <ctime>

#include "shardplan/simulator/memory_explanation.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"
#include "tests/support/plan_builder.h"

namespace shardplan {
namespace {

constexpr int kLayers = 126;              // Llama-3.1-405B
constexpr int kOperators = 90;            // of one layer's forward
constexpr std::int64_t kBytes = 1 << 26;  // of an activation

// A plan of the size of 405B's: in every layer the parameters are gathered, operators save and drop
// activations, the backward drops what was saved, makes a gradient and reduces it.
Plan LargePlan() {
  test::PlanBuilder b(1024);
  std::vector<BufferId> gathered, grads;
  for (int l = 0; l < kLayers; ++l) {
    const UnitId unit = b.Unit("layers." + std::to_string(l), 1, 1 << 20);
    b.Buffer(BufferRole::kParamSharded, unit);
    gathered.push_back(b.Buffer(BufferRole::kAllGatherOutput, unit));
    grads.push_back(b.Buffer(BufferRole::kGradUnsharded, unit));
    Segment& forward =
        b.plan().segments[static_cast<std::size_t>(b.Forward("forward layers." + std::to_string(l), {unit}))];
    const StorageId base = l * kOperators * 2;
    for (StorageId o = 0; o < kOperators; ++o) {
      const StorageId saved = base + 2 * o, temporary = saved + 1;
      forward.entries.push_back(AllocateEvent{saved, Bytes{kBytes + o * 4096}, StorageRole::kSaved});
      forward.entries.push_back(AllocateEvent{temporary, Bytes{kBytes / 2}, StorageRole::kForwardTemp});
      forward.entries.push_back(OperatorEvent{.name = "aten.mul", .reads = {saved}, .writes = {temporary}});
      forward.entries.push_back(FreeEvent{temporary});
    }
    Segment& backward = b.plan().segments[static_cast<std::size_t>(
        b.Backward("backward layers." + std::to_string(l), {unit}, {{unit, 0}}))];
    for (StorageId o = kOperators; o-- > 0;) {
      backward.entries.push_back(AllocateEvent{base + 2 * o + 1, Bytes{kBytes}, StorageRole::kBackwardTemp});
      backward.entries.push_back(OperatorEvent{.name = "aten.mul", .reads = {base + 2 * o}});
      backward.entries.push_back(FreeEvent{base + 2 * o});
      backward.entries.push_back(FreeEvent{base + 2 * o + 1});
    }
  }
  b.Step("steady");
  for (int l = 0; l < kLayers; ++l) {
    const auto i = static_cast<std::size_t>(l);
    b.At(TriggerKind::kPreForward, l).Allocate(gathered[i], 0).Compute(2 * l).Free(gathered[i]);
  }
  for (int l = kLayers; l-- > 0;) {
    const auto i = static_cast<std::size_t>(l);
    b.At(TriggerKind::kPreBackward, l).Allocate(gathered[i], 0).Compute(2 * l + 1).Free(gathered[i]);
    b.At(TriggerKind::kPostBackward, l).Free(grads[i]);
  }
  return b.plan();
}

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double PlainPass(const MemoryHistory& history) {
  const double begin = CpuSeconds();
  std::int64_t total = 0;
  for (const MemoryAction& action : history.actions) {
    const std::int64_t bytes = history.blocks[static_cast<std::size_t>(action.block)].requested_bytes.value;
    total += action.frees ? -bytes : bytes;
  }
  benchmark::DoNotOptimize(total);
  return CpuSeconds() - begin;
}

template <typename Work>
void Measure(benchmark::State& state, Work work) {
  const Plan plan = LargePlan();
  const MemoryHistory history = MemoryHistoryOf(plan);
  double seconds = 0, plain_seconds = 0;
  for (auto _ : state) {
    const double begin = CpuSeconds();
    work(plan, history);
    seconds += CpuSeconds() - begin;
    state.PauseTiming();
    plain_seconds += PlainPass(history);
    state.ResumeTiming();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(history.actions.size()) * state.iterations());
  state.counters["actions"] = static_cast<double>(history.actions.size());
  state.counters["times_a_plain_pass"] = seconds / plain_seconds;
}

void BuildStream(benchmark::State& state) {
  Measure(state,
          [](const Plan& plan, const MemoryHistory&) { benchmark::DoNotOptimize(MemoryHistoryOf(plan)); });
}
BENCHMARK(BuildStream);

void Profile(benchmark::State& state) {
  Measure(state, [](const Plan& plan, const MemoryHistory& history) {
    benchmark::DoNotOptimize(ProfileMemory(plan, history));
  });
}
BENCHMARK(Profile);

// From the plan, samples kept: what `shardplan memory` does.
void ProfileOfThePlan(benchmark::State& state) {
  Measure(state, [](const Plan& plan, const MemoryHistory&) {
    benchmark::DoNotOptimize(ProfileMemory(plan, {.record_samples = true}));
  });
}
BENCHMARK(ProfileOfThePlan);

void Reserved(benchmark::State& state) {
  Measure(state, [](const Plan& plan, const MemoryHistory& history) {
    benchmark::DoNotOptimize(ReserveMemory(plan, history));
  });
}
BENCHMARK(Reserved);

void Explain(benchmark::State& state) {
  Measure(state, [](const Plan& plan, const MemoryHistory& history) {
    benchmark::DoNotOptimize(ExplainMemory(plan, history));
  });
}
BENCHMARK(Explain);

}  // namespace
}  // namespace shardplan

BENCHMARK_MAIN();
