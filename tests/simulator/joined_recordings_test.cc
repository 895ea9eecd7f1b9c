// SPDX-License-Identifier: Apache-2.0
// Ranks of a pipeline that wait for each other: random programs beside an oracle that goes through them in
// the order in which they were made, and what does not match.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shardplan/simulator/simulate_recording.h"
#include "tests/simulator/collective_costs.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kJoinedSeeds = 500;
constexpr std::int64_t kLaunchNs = 700;

// Programs of ranks that agree, and when each rank is done. A message takes 10 ns, and one a byte.
class Job {
 public:
  explicit Job(std::int32_t ranks) : recordings(static_cast<std::size_t>(ranks)), now_ns(recordings.size()) {
    std::vector<std::int64_t> all;
    for (std::int32_t rank = 0; rank < ranks; ++rank) all.push_back(rank);
    for (std::int32_t rank = 0; rank < ranks; ++rank) {
      Recording& recording = recordings[Index(rank)];
      recording.rank = rank;
      recording.world_size = ranks;
      recording.threads = {{"main"}};
      recording.streams = {{}};
      recording.communicators = {{ranks, rank, "pp", all}};
    }
  }

  void Compute(std::int32_t rank, int launches) {
    for (int i = 0; i < launches; ++i) Add(rank, IssuedLaunch{0, -1, 0, "work"});
    now_ns[Index(rank)] += launches * kLaunchNs;
  }
  void Message(std::int32_t from, std::int32_t to, std::int64_t size) {
    Add(from, Part(CollectiveKind::kSend, to, size));
    Add(to, Part(CollectiveKind::kReceive, from, size));
    Time({{from, to, size}});
  }
  void Exchange(std::int32_t a, std::int32_t b, std::int64_t there, std::int64_t back) {
    const std::int32_t batch = batches_++;
    for (const auto& [rank, peer, sent, received] :
         {std::tuple(a, b, there, back), std::tuple(b, a, back, there)}) {
      Add(rank, Part(CollectiveKind::kSend, peer, sent, batch));
      Add(rank, Part(CollectiveKind::kReceive, peer, received, batch));
    }
    Time({{a, b, there}, {b, a, back}});
  }
  // `middle` receives and sends in one group.
  void PassOn(std::int32_t from, std::int32_t middle, std::int32_t to, std::int64_t first,
              std::int64_t second) {
    const std::int32_t batch = batches_++;
    Add(from, Part(CollectiveKind::kSend, middle, first));
    Add(middle, Part(CollectiveKind::kReceive, from, first, batch));
    Add(middle, Part(CollectiveKind::kSend, to, second, batch));
    Add(to, Part(CollectiveKind::kReceive, middle, second));
    Time({{from, middle, first}, {middle, to, second}});
  }

  Result<std::vector<RecordingSimulation>> Simulate() const {
    Cluster cluster = TwoLinks(8, 8);
    cluster.device.kernel_overhead_ns = {kLaunchNs};
    std::vector<const Recording*> ranks;
    for (const Recording& recording : recordings) ranks.push_back(&recording);
    return SimulateRecordings(ranks, cluster);
  }

  std::vector<Recording> recordings;
  std::vector<std::int64_t> now_ns;  // the oracle's

 private:
  struct Sent {
    std::int32_t from, to;
    std::int64_t size;
  };

  static std::size_t Index(std::int32_t rank) { return static_cast<std::size_t>(rank); }
  static IssuedCollective Part(CollectiveKind kind, std::int32_t peer, std::int64_t size,
                               std::int32_t batch = -1) {
    return {.thread = 0,
            .stream = 0,
            .kind = kind,
            .communicator = 0,
            .size_bytes = {size},
            .peer = peer,
            .batch = batch};
  }
  void Add(std::int32_t rank, RecordingEvent event) {
    recordings[Index(rank)].events.push_back(std::move(event));
  }

  // The messages of one call are one kernel on each rank.
  void Time(const std::vector<Sent>& messages) {
    const std::vector<std::int64_t> before = now_ns;
    for (const auto& [from, to, size] : messages) {
      const std::int64_t end = std::max(before[Index(from)], before[Index(to)]) + 10 + size;
      for (const std::int32_t rank : {from, to}) now_ns[Index(rank)] = std::max(now_ns[Index(rank)], end);
    }
  }

  std::int32_t batches_ = 0;
};

Job RandomJob(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  const std::int32_t ranks = 3 + below(4);
  Job job(ranks);
  for (int i = 0; i < 40; ++i) {
    std::vector<std::int32_t> order;
    for (std::int32_t rank = 0; rank < ranks; ++rank) order.push_back(rank);
    std::ranges::shuffle(order, random);
    switch (below(5)) {
      case 0:
        job.Message(order[0], order[1], 1 + below(3000));
        break;
      case 1:
        job.Exchange(order[0], order[1], 1 + below(3000), 1 + below(3000));
        break;
      case 2:
        job.PassOn(order[0], order[1], order[2], 1 + below(3000), 1 + below(3000));
        break;
      default:
        job.Compute(order[0], 1 + below(6));
    }
  }
  return job;
}

TEST(JoinedRecordings, RanksAreDoneWhenTheOracleSays) {
  for (std::uint64_t seed = 1; seed <= kJoinedSeeds; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Job job = RandomJob(seed);
    const auto simulated = job.Simulate();
    ASSERT_TRUE(simulated.has_value()) << ToString(simulated.error());
    std::vector<std::int64_t> ends;
    for (const RecordingSimulation& rank : *simulated) {
      ends.push_back(rank.end_ns.value);
      EXPECT_EQ(rank.report.step_ns.value, std::ranges::max(job.now_ns));
      Nanoseconds all;
      for (const ActivityReport& activity : rank.report.activities) all += activity.time_ns;
      EXPECT_EQ(all, rank.report.step_ns);
    }
    ASSERT_EQ(ends, job.now_ns);
  }
}

// p ranks, m micro-batches, one launch for each pass and none for a message but its 11 ns: the fill of the
// pipe, then the slowest rank.
TEST(JoinedRecordings, APipelineOfForwardsIsFilledAndDrained) {
  constexpr std::int32_t kRanks = 4;
  constexpr std::int64_t kMicroBatches = 6;
  Job job(kRanks);
  for (std::int64_t m = 0; m < kMicroBatches; ++m) {
    for (std::int32_t rank = 0; rank < kRanks; ++rank) {
      job.Compute(rank, 1);
      if (rank + 1 < kRanks) job.Message(rank, rank + 1, 1);
    }
  }
  const auto simulated = job.Simulate();
  ASSERT_TRUE(simulated.has_value()) << ToString(simulated.error());
  // A rank in the middle receives, works and sends: 11 + 700 + 11 for each micro-batch.
  EXPECT_EQ(simulated->front().report.step_ns.value,
            (kRanks - 1) * (kLaunchNs + 11) + (kMicroBatches - 1) * (kLaunchNs + 22) + kLaunchNs);
}

// The last rank is met through a kernel with messages of two peers alone.
TEST(JoinedRecordings, AllRanksThatMessagesConnectAreOnePipeline) {
  Job job(3);
  job.PassOn(0, 1, 2, 10, 10);
  IssuedKernel lookup{.thread = 0, .stream = 0, .name = "triton_poi_fused_embedding_0"};
  lookup.reads = {{.address = 4096, .dtype = DType::kFloat32, .shape = {100, 8}},
                  {.address = 8192, .dtype = DType::kInt64, .shape = {60}}};
  job.recordings[0].events.insert(job.recordings[0].events.begin(), lookup);
  for (Recording& recording : job.recordings) recording.world_size = 6;  // two pipelines
  const auto simulated = job.Simulate();
  ASSERT_TRUE(simulated.has_value()) << ToString(simulated.error());
  const Report& report = simulated->front().report;
  const std::int64_t tokens_per_second = 2 * 60 * 1'000'000'000LL / report.step_ns.value;
  EXPECT_EQ(report.tokens_per_second_per_rank, tokens_per_second / 6);
}

TEST(JoinedRecordings, ACollectiveOfStagesIsOneForAll) {
  Job job(2);
  job.Compute(1, 5);
  for (Recording& recording : job.recordings) {
    recording.events.push_back(IssuedCollective{
        .thread = 0, .stream = 0, .kind = CollectiveKind::kAllReduce, .communicator = 0, .size_bytes = {2}});
  }
  const auto simulated = job.Simulate();
  ASSERT_TRUE(simulated.has_value()) << ToString(simulated.error());
  EXPECT_GT((*simulated)[0].end_ns.value, 5 * kLaunchNs);
  EXPECT_EQ((*simulated)[0].end_ns, (*simulated)[1].end_ns);
  EXPECT_EQ((*simulated)[0].report.communication_ns, (*simulated)[1].report.communication_ns);
}

TEST(JoinedRecordings, OtherCollectivesOfStagesAreAnError) {
  Job job(2);
  for (Recording& recording : job.recordings) {
    const CollectiveKind kind = recording.rank == 0 ? CollectiveKind::kAllReduce : CollectiveKind::kAllGather;
    recording.events.push_back(
        IssuedCollective{.thread = 0, .stream = 0, .kind = kind, .communicator = 0, .size_bytes = {2}});
  }
  const auto simulated = job.Simulate();
  ASSERT_FALSE(simulated.has_value());
  EXPECT_EQ(simulated.error().message, "collective 0 of ranks 0 and 1 is not the same");
}

TEST(JoinedRecordings, OneRankAloneDoesNotWait) {
  Job job(2);
  job.Compute(0, 2);
  job.Message(0, 1, 90);
  Cluster cluster = TwoLinks(2, 8);
  cluster.device.kernel_overhead_ns = {kLaunchNs};
  const auto alone = SimulateRecording(job.recordings[1], cluster);
  ASSERT_TRUE(alone.has_value()) << ToString(alone.error());
  EXPECT_EQ(alone->report.step_ns.value, 100);
  ASSERT_FALSE(alone->remarks.empty());
  EXPECT_EQ(alone->remarks.front(),
            "rank 1 exchanges messages with rank 0, not recorded here: nobody is waited for");
}

// Rings, as of context parallelism: all ranks do the same, and one stands for those that are not there.
TEST(JoinedRecordings, ExchangesOfAsManyBytesNeedNobody) {
  Job job(3);
  job.Exchange(0, 1, 50, 50);
  job.Exchange(1, 2, 50, 50);
  job.recordings.pop_back();
  EXPECT_TRUE(job.Simulate().has_value());
}

TEST(JoinedRecordings, WhatDoesNotMatchIsAnError) {
  const auto said = [](Job job) {
    const auto simulated = job.Simulate();
    return simulated.has_value() ? std::string("nothing") : simulated.error().message;
  };
  Job job(3);
  job.Message(0, 1, 10);
  job.Message(1, 2, 10);
  EXPECT_EQ(said(job), "nothing");
  Job missing = job;
  missing.recordings.pop_back();
  EXPECT_EQ(said(missing), "rank 1 sends to rank 2, whose recording is not there");
  Job twice = job;
  twice.recordings[2] = twice.recordings[0];
  EXPECT_EQ(said(twice), "two recordings are of one rank");
  Job other = job;
  other.recordings[1].world_size = 2;
  EXPECT_EQ(said(other), "the recording of rank 1 is of another job");
  Job fewer = job;
  fewer.recordings[2].events.clear();
  EXPECT_EQ(said(fewer), "rank 1 sends rank 2 other messages than that receives");
  Job smaller = job;
  std::get<IssuedCollective>(smaller.recordings[2].events.front()).size_bytes = {4};
  EXPECT_EQ(said(smaller), "message 0 from rank 1 to rank 2 is not what is received");
  Job unknown = job;
  unknown.recordings[1].communicators.front().ranks.clear();
  EXPECT_EQ(said(unknown), "rank 1 has messages in communicator 0, whose ranks are not known");
  Job crossed(2);
  crossed.Message(0, 1, 10);
  crossed.Message(1, 0, 10);
  std::ranges::reverse(crossed.recordings[0].events);
  EXPECT_EQ(said(crossed), "the step of rank 0 never ends: this waits for ever");
  Job collective(2);
  collective.recordings[0].events.push_back(IssuedCollective{
      .thread = 0, .stream = 0, .kind = CollectiveKind::kAllReduce, .communicator = 0, .size_bytes = {2}});
  EXPECT_EQ(said(collective), "ranks 0 and 1 are in one communicator, and differ in its collectives");
}

}  // namespace
}  // namespace shardplan::test
