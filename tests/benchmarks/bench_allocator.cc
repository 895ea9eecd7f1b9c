// SPDX-License-Identifier: Apache-2.0
// Actions per second of the allocator model, and next to it a plain pass over the same actions: reading each
// and writing one number. Counters: actions a second; `ratio` of the model is reported by the pair of
// figures.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <ctime>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {
namespace {

// A request stream without lookups: allocations write a slot, frees read it.
struct Action {
  std::int64_t bytes;  // 0: free
  std::int32_t slot;
  std::int32_t stream;
};

struct Stream {
  std::vector<Action> actions;
  std::int32_t slots = 0;
};

// The requests of a log, blocks that are live before it allocated first; what is left at the end is freed, so
// that the stream can be run again and again.
Stream FromLog(const std::string& path) {
  const Result<AllocatorLog> log = ReadAllocatorLog(path);
  Stream stream;
  if (!log) return stream;
  std::unordered_map<DeviceAddress, std::int32_t> slots;
  auto allocate = [&](DeviceAddress address, std::int64_t bytes) {
    slots[address] = stream.slots;
    stream.actions.push_back({bytes, stream.slots++, 0});
  };
  auto free = [&](std::int32_t slot) { stream.actions.push_back({0, slot, 0}); };
  for (const auto& segment : log->initial_segments) {
    for (const auto& block : segment.blocks) allocate(block.address, block.requested_bytes.value);
  }
  for (const LogAction& action : log->actions) {
    if (action.kind == LogActionKind::kAlloc) allocate(action.address, action.size_bytes.value);
    if (action.kind != LogActionKind::kFree) continue;
    free(slots.at(action.address));
    slots.erase(action.address);
  }
  std::vector<std::int32_t> rest;
  for (const auto& [address, slot] : slots) rest.push_back(slot);
  std::sort(rest.begin(), rest.end());
  for (const std::int32_t slot : rest) free(slot);
  return stream;
}

// Random sizes and lifetimes with `live` blocks at a time: many free blocks, the hard case.
Stream Fragmented(std::int32_t live) {
  std::mt19937_64 random(7);
  Stream stream;
  std::vector<std::int32_t> slots;
  for (int i = 0; i < 200'000; ++i) {
    if (slots.size() < static_cast<std::size_t>(live)) {
      slots.push_back(stream.slots);
      stream.actions.push_back({static_cast<std::int64_t>(1 + random() % (24 << 20)), stream.slots++, 0});
    } else {
      std::swap(slots[random() % slots.size()], slots.back());
      stream.actions.push_back({0, slots.back(), 0});
      slots.pop_back();
    }
  }
  for (const std::int32_t slot : slots) stream.actions.push_back({0, slot, 0});
  return stream;
}

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double PlainPass(const Stream& stream, std::vector<std::int64_t>& slots) {
  const double begin = CpuSeconds();
  std::int64_t total = 0;
  for (const Action& action : stream.actions) {
    if (action.bytes > 0) {
      slots[static_cast<std::size_t>(action.slot)] = action.bytes;
      total += action.bytes;
    } else {
      total -= slots[static_cast<std::size_t>(action.slot)];
    }
  }
  benchmark::DoNotOptimize(total);
  return CpuSeconds() - begin;
}

void Run(benchmark::State& state, const Stream& stream, const AllocatorSettings& settings) {
  if (stream.actions.empty()) return state.SkipWithError("no log");
  std::vector<BlockId> blocks(static_cast<std::size_t>(stream.slots));
  std::vector<std::int64_t> plain(static_cast<std::size_t>(stream.slots));
  CachingAllocator allocator(settings);
  SimpleDevice device({std::int64_t{1} << 50});
  double model_seconds = 0, plain_seconds = 0;
  for (auto _ : state) {
    const double begin = CpuSeconds();
    for (const Action& action : stream.actions) {
      BlockId& block = blocks[static_cast<std::size_t>(action.slot)];
      if (action.bytes > 0) {
        block = allocator.Allocate({action.bytes}, action.stream, device);
      } else {
        allocator.Free(block);
      }
    }
    model_seconds += CpuSeconds() - begin;
    benchmark::DoNotOptimize(allocator.stats());
    state.PauseTiming();
    plain_seconds += PlainPass(stream, plain);
    state.ResumeTiming();
  }
  const auto actions = static_cast<double>(stream.actions.size()) * static_cast<double>(state.iterations());
  state.SetItemsProcessed(static_cast<std::int64_t>(actions));
  state.counters["plain_actions_per_second"] = actions / plain_seconds;
  state.counters["times_a_plain_pass"] = model_seconds / plain_seconds;
}

const std::string kLog =
    std::string(SHARDPLAN_SOURCE_DIR) + "/tests/simulator/allocator/data/h100_training_step.json";

void TrainingStep(benchmark::State& state) { Run(state, FromLog(kLog), {}); }
BENCHMARK(TrainingStep);

void TrainingStepExpandable(benchmark::State& state) {
  AllocatorSettings settings;
  settings.expandable_segments = true;
  Run(state, FromLog(kLog), settings);
}
BENCHMARK(TrainingStepExpandable);

void FragmentedPool(benchmark::State& state) {
  Run(state, Fragmented(static_cast<std::int32_t>(state.range(0))), {});
}
BENCHMARK(FragmentedPool)->Arg(100)->Arg(1000)->Arg(10000);

// Reading rows, finding blocks by address and comparing every action included.
void ReplayOfTheLog(benchmark::State& state) {
  const Result<AllocatorLog> log = ReadAllocatorLog(kLog);
  if (!log) return state.SkipWithError("no log");
  for (auto _ : state) benchmark::DoNotOptimize(ReplayAllocatorLog(*log));
  state.SetItemsProcessed(static_cast<std::int64_t>(log->actions.size()) * state.iterations());
}
BENCHMARK(ReplayOfTheLog);

}  // namespace
}  // namespace shardplan

BENCHMARK_MAIN();
