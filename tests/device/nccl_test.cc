// SPDX-License-Identifier: Apache-2.0
// NCCL of the device in software: processes as ranks.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/executor/forked_ranks.h"

namespace shardplan::test {
namespace {

constexpr int kPatienceOfRanks = 20;

std::uint32_t SeedOfCalls() {
  const char* given = std::getenv("SHARDPLAN_SEED");
  return given != nullptr ? static_cast<std::uint32_t>(std::atoi(given)) : std::random_device()();
}

// A rank's communicator and stream; the id goes through a pipe to each rank.
struct Rank {
  int rank = 0;
  int ranks = 1;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};

class Nccl : public testing::TestWithParam<std::string> {
 protected:
  using Work = std::function<void(Rank&, const Log&)>;
  // The rank that makes the id lives until all others have ended.
  ForkedRun Run(int ranks, bool blocking, const Work& work) {
    int pipes[2];
    EXPECT_EQ(pipe(pipes), 0);
    const ForkedRun run = RunForked(ranks, kPatienceOfRanks, [&](std::int64_t rank, const Log& log) {
      (void)setenv("SHARDPLAN_DEVICE_MODE", GetParam().c_str(), 1);
      ncclUniqueId id;
      if (rank == 0) {
        (void)ncclGetUniqueId(&id);
        for (int r = 1; r < ranks; ++r) (void)!write(pipes[1], &id, sizeof(id));
      } else {
        (void)!read(pipes[0], &id, sizeof(id));
      }
      Rank self = {.rank = static_cast<int>(rank), .ranks = ranks};
      (void)cudaSetDevice(self.rank % 8);
      (void)cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking ? 1 : 0;
      const ncclResult_t begun = ncclCommInitRankConfig(&self.comm, ranks, id, self.rank, &config);
      if (begun != ncclSuccess && begun != ncclInProgress) return false;
      if (WaitUntilKnown(self.comm) != ncclSuccess) return false;
      work(self, log);
      return true;
    });
    (void)close(pipes[0]);
    (void)close(pipes[1]);
    return run;
  }
  static ncclResult_t WaitUntilKnown(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    while (ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclInProgress) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return state;
  }
  static float* Floats(std::size_t count) {
    void* memory = nullptr;
    (void)cudaMalloc(&memory, count * sizeof(float));
    return static_cast<float*>(memory);
  }
  static void Fill(const Rank& self, float* memory, const std::vector<float>& values) {
    (void)cudaMemcpyAsync(memory, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice,
                          self.stream);
  }
  static std::vector<float> Read(const Rank& self, const float* memory, std::size_t count) {
    std::vector<float> values(count);
    (void)cudaMemcpyAsync(values.data(), memory, count * sizeof(float), cudaMemcpyDeviceToHost, self.stream);
    return values;
  }
};

// The numbers that rank r gives to the i-th call: their sums are exact.
std::vector<float> Given(std::uint32_t seed, int call, int rank, std::size_t count) {
  std::mt19937 random(seed + 1000U * static_cast<std::uint32_t>(call) + static_cast<std::uint32_t>(rank));
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 65) - 32);
  return values;
}

TEST_P(Nccl, CollectivesComputeWhatTheirNamesSay) {
  const std::uint32_t seed = SeedOfCalls();
  fmt::print("SHARDPLAN_SEED={}\n", seed);
  const ForkedRun run = Run(3, seed % 2 == 0, [&](Rank& self, const Log& log) {
    std::mt19937 random(seed);
    const auto n = static_cast<std::size_t>(self.ranks);
    for (int call = 0; call < 60; ++call) {
      const std::size_t count = 1 + random() % 300;
      const int kind = static_cast<int>(random() % 5);
      const int root = static_cast<int>(random() % n);
      const std::size_t given = kind == 1 ? count * n : count;
      float* from = Floats(given);
      float* to = Floats(count * n);
      Fill(self, from, Given(seed, call, self.rank, given));
      std::vector<float> expected(kind == 0 ? count * n : count);
      for (std::size_t r = 0; r < n; ++r) {
        const std::vector<float> of = Given(seed, call, static_cast<int>(r), given);
        for (std::size_t i = 0; i < count; ++i) {
          if (kind == 0) expected[r * count + i] = of[i];
          if (kind == 1) expected[i] += of[static_cast<std::size_t>(self.rank) * count + i];
          if (kind == 2) expected[i] += of[i];
          if (kind == 3 && static_cast<int>(r) == root) expected[i] = of[i];
          if (kind == 4) expected[i] += of[i] * 0.5F;
        }
      }
      ncclRedOp_t half = ncclSum;
      float factor = 0.5F;
      if (kind == 4)
        (void)ncclRedOpCreatePreMulSum(&half, &factor, ncclFloat, ncclScalarHostImmediate, self.comm);
      const ncclResult_t result =
          kind == 0   ? ncclAllGather(from, to, count, ncclFloat, self.comm, self.stream)
          : kind == 1 ? ncclReduceScatter(from, to, count, ncclFloat, ncclSum, self.comm, self.stream)
          : kind == 3 ? ncclBroadcast(from, to, count, ncclFloat, root, self.comm, self.stream)
                      : ncclAllReduce(from, to, count, ncclFloat, half, self.comm, self.stream);
      if (result == ncclInProgress) (void)WaitUntilKnown(self.comm);
      if (Read(self, to, expected.size()) != expected)
        log(fmt::format("call {} of kind {} differs", call, kind));
      (void)cudaFree(from);
      (void)cudaFree(to);
    }
    (void)ncclCommDestroy(self.comm);
  });
  EXPECT_THAT(run.lines, testing::IsEmpty());
  EXPECT_THAT(run.faults, testing::IsEmpty());
}

TEST_P(Nccl, MessagesOfAGroupCross) {
  const ForkedRun run = Run(3, true, [](Rank& self, const Log& log) {
    float* from = Floats(3);
    float* to = Floats(3);
    for (int round = 0; round < 5; ++round) {
      const auto mine = static_cast<float>(10 * self.rank + round);
      Fill(self, from, {mine, mine + 100, mine + 200});
      (void)ncclGroupStart();
      for (int peer = 0; peer < self.ranks; ++peer) {
        (void)ncclSend(from + peer, 1, ncclFloat, peer, self.comm, self.stream);
        (void)ncclRecv(to + peer, 1, ncclFloat, peer, self.comm, self.stream);
      }
      (void)ncclGroupEnd();
      const std::vector<float> found = Read(self, to, 3);
      for (int peer = 0; peer < self.ranks; ++peer) {
        const auto expected = static_cast<float>(10 * peer + round + 100 * self.rank);
        if (found[static_cast<std::size_t>(peer)] != expected)
          log(fmt::format("from {}: {}", peer, found[peer]));
      }
    }
    (void)ncclCommDestroy(self.comm);
  });
  EXPECT_THAT(run.lines, testing::IsEmpty());
  EXPECT_THAT(run.faults, testing::IsEmpty());
}

TEST_P(Nccl, ASplitHasRanksByKey) {
  const ForkedRun run = Run(4, false, [](Rank& self, const Log& log) {
    ncclComm_t child = nullptr;
    (void)ncclCommSplit(self.comm, self.rank % 2, -self.rank, &child, nullptr);
    (void)WaitUntilKnown(self.comm);
    (void)WaitUntilKnown(child);
    int rank = 0;
    int ranks = 0;
    (void)ncclCommUserRank(child, &rank);
    (void)ncclCommCount(child, &ranks);
    float* memory = Floats(1);
    Fill(self, memory, {static_cast<float>(self.rank)});
    (void)ncclAllReduce(memory, memory, 1, ncclFloat, ncclSum, child, self.stream);
    (void)WaitUntilKnown(child);
    log(fmt::format("{}: {} of {}, sum {}", self.rank, rank, ranks, Read(self, memory, 1)[0]));
    (void)ncclCommDestroy(child);
    (void)ncclCommDestroy(self.comm);
  });
  EXPECT_THAT(run.lines, testing::UnorderedElementsAre("0: 1 of 2, sum 2", "2: 0 of 2, sum 2",
                                                       "1: 1 of 2, sum 4", "3: 0 of 2, sum 4"));
}

// Until the first error of a communicator; then the abort lets the stream go on.
std::string ErrorThenAbort(Rank& self) {
  ncclResult_t state = ncclSuccess;
  while (state == ncclSuccess || state == ncclInProgress) {
    (void)ncclCommGetAsyncError(self.comm, &state);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)cudaStreamQuery(self.stream);
  }
  std::string words = ncclGetLastError(self.comm);
  (void)ncclCommAbort(self.comm);
  (void)cudaStreamSynchronize(self.stream);
  return words;
}

TEST_P(Nccl, DifferentCollectivesAreAnErrorOfAllRanks) {
  const ForkedRun run = Run(2, true, [](Rank& self, const Log& log) {
    float* memory = Floats(8);
    if (self.rank == 0) {
      (void)ncclAllGather(memory, memory, 4, ncclFloat, self.comm, self.stream);
    } else {
      (void)ncclAllGather(memory, memory, 3, ncclFloat, self.comm, self.stream);
    }
    log(ErrorThenAbort(self));
  });
  EXPECT_EQ(run.lines.size(), 2U);
  EXPECT_THAT(run.lines,
              testing::Each(testing::ContainsRegex(
                  "collective 0 differs: here all_gather of [34] elements.*all_gather of [34] elements")));
}

TEST_P(Nccl, ACollectiveThatARankNeverIssuesIsAnErrorWhenItLeaves) {
  const ForkedRun run = Run(2, true, [](Rank& self, const Log& log) {
    float* memory = Floats(8);
    if (self.rank == 1) {
      (void)ncclCommDestroy(self.comm);
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      return;
    }
    (void)ncclAllGather(memory, memory, 4, ncclFloat, self.comm, self.stream);
    log(ErrorThenAbort(self));
  });
  EXPECT_THAT(run.lines, testing::ElementsAre("rank 1 has left the communicator"));
}

TEST_P(Nccl, ADeadProcessIsFound) {
  const ForkedRun run = Run(2, true, [](Rank& self, const Log& log) {
    if (self.rank == 1) (void)raise(SIGKILL);
    float* memory = Floats(8);
    (void)ncclAllGather(memory, memory, 4, ncclFloat, self.comm, self.stream);
    log(ErrorThenAbort(self));
  });
  EXPECT_THAT(run.lines, testing::ElementsAre("the process of rank 1 is gone"));
}

// The kernel hangs, the host does not.
TEST_P(Nccl, AnAbortEndsWhatHangs) {
  const ForkedRun run = Run(2, true, [](Rank& self, const Log& log) {
    if (self.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return;
    }
    float* memory = Floats(8);
    (void)ncclAllGather(memory, memory, 4, ncclFloat, self.comm, self.stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    log(cudaStreamQuery(self.stream) == cudaErrorNotReady ? "hangs" : "ends");
    (void)ncclCommAbort(self.comm);
    log(cudaStreamSynchronize(self.stream) == cudaSuccess ? "ended" : "broken");
  });
  EXPECT_THAT(run.lines, testing::ElementsAre("hangs", "ended"));
}

// A rank that waits for its peers makes them do their part, though nobody waits there.
TEST_P(Nccl, AHostThatDoesNotWaitDelaysNobody) {
  const ForkedRun run = Run(2, true, [](Rank& self, const Log& log) {
    float* memory = Floats(2);
    float* marker = Floats(1);
    Fill(self, marker, {static_cast<float>(self.rank + 1)});
    (void)ncclAllGather(marker, memory, 1, ncclFloat, self.comm, self.stream);
    if (self.rank == 0) log(fmt::format("{}", Read(self, memory, 2)[1]));
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
  });
  EXPECT_THAT(run.lines, testing::ElementsAre("2"));
}

INSTANTIATE_TEST_SUITE_P(Modes, Nccl, testing::Values("inline", "lazy:1"), [](const auto& info) {
  std::string name = info.param;
  std::erase(name, ':');
  return name;
});

}  // namespace
}  // namespace shardplan::test
