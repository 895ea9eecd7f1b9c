// The conformance cases on the cpu backend: real processes, real Gloo over 127.0.0.1.
//
// Each rank is a forked process that runs every case of the same world size, and leaves with the number of
// the case that went wrong (0: none).
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "shardplan/executor/cpu_backend.h"
#include "shardplan/executor/engine.h"
#include "tests/executor/sharded_plan.h"
#include "tests/executor/torch_stream.h"
#include "tests/executor/toy_model.h"

namespace shardplan::test {
namespace {

constexpr std::int64_t kSteps = 3;
constexpr std::chrono::milliseconds kTimeout{60'000};

// "" or what went wrong.
std::string RunCase(const Plan& plan, std::int64_t rank, executor::MemoryPlan memory,
                    c10::intrusive_ptr<c10d::Store> store) {
  const auto device = executor::MakeCpuDevice(memory);
  executor::GlooOptions gloo;
  gloo.store = store;
  gloo.timeout = kTimeout;
  auto groups = executor::MakeGlooGroups(plan, rank, gloo);
  if (!groups) return ToString(groups.error());
  const auto collectives =
      executor::MakeProcessGroupCollectives(*device, {std::move(*groups), kTimeout, store});
  TorchStream stream(*device, plan);
  return RunToyModel(plan, rank, *device, *collectives, stream, kSteps);
}

int RunRank(std::int64_t world_size, std::int64_t rank, const std::string& path) {
  at::set_num_threads(1);
  auto store = c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(world_size));
  const std::vector<ShardedPlanOptions> cases = ConformanceCases();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Plan plan = MakeShardedPlan(cases[i]);
    if (plan.world_size != world_size) continue;
    for (const auto memory : {executor::MemoryPlan::kAllocator, executor::MemoryPlan::kArena}) {
      const bool arena = memory == executor::MemoryPlan::kArena;
      const std::string prefix = "case" + std::to_string(i) + (arena ? "arena" : "");
      const std::string failure =
          RunCase(plan, rank, memory, c10::make_intrusive<c10d::PrefixStore>(prefix, store));
      if (failure.empty()) continue;
      std::fprintf(stderr, "%s%s, rank %d: %s\n", ToString(cases[i]).c_str(), arena ? ", arena" : "",
                   static_cast<int>(rank), failure.c_str());
      return static_cast<int>(i) + 1;
    }
  }
  return 0;
}

class CpuConformance : public testing::TestWithParam<std::int64_t> {};

TEST_P(CpuConformance, ParametersAreExactOnEveryRank) {
  const std::int64_t world_size = GetParam();
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("shardplan_cpu_test_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const std::string path = (folder / ("store" + std::to_string(world_size))).string();
  std::vector<pid_t> ranks;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) std::_Exit(RunRank(world_size, rank, path));
    ranks.push_back(pid);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(ranks[rank], &status, 0), ranks[rank]);
    EXPECT_TRUE(WIFEXITED(status)) << "rank " << rank;
    EXPECT_EQ(WEXITSTATUS(status), 0) << "rank " << rank << ": number of the case that went wrong";
  }
  std::filesystem::remove_all(folder);
}

std::vector<std::int64_t> WorldSizes() {
  std::set<std::int64_t> sizes;
  for (const ShardedPlanOptions& options : ConformanceCases())
    sizes.insert(options.shards * options.replicas);
  return {sizes.begin(), sizes.end()};
}

INSTANTIATE_TEST_SUITE_P(Ranks, CpuConformance, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace shardplan::test
