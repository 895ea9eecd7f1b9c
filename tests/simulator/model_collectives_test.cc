// SPDX-License-Identifier: Apache-2.0
// Collectives that the model issues itself: when they run, what waits for them, and what they share links
// with.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/simulate.h"
#include "tests/simulator/layered_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

constexpr std::int64_t kKernelNs = 10 * kMillisecond;
constexpr std::int64_t kLinkNs = 4 * kMillisecond;

// A collective of the model on communicator `id`; every one of them takes kLinkNs.
OperatorEvent Collective(CollectiveKind kind, CommunicatorId id, std::int32_t work = -1) {
  OperatorEvent op{.name = "c10d." + std::string(Name(kind)) + "_"};
  op.collective = ModelCollective{.kind = kind, .communicator = id, .size_bytes = Bytes{1'000}, .work = work};
  return op;
}

// One segment of the forward on two ranks; FSDP's communicator 0 and the model's 1.
class OneSegment {
 public:
  explicit OneSegment(std::vector<SegmentEntry> entries) {
    unit_ = b_.Unit("a");
    b_.Communicator("tp", 2);
    const SegmentId forward = b_.Forward("forward a", {unit_});
    b_.plan().segments[static_cast<std::size_t>(forward)].entries = std::move(entries);
    b_.Step("steady").At(TriggerKind::kPreForward, unit_).Compute(forward);
    Link link{.name = "link"};
    b_.plan().cluster.links = {link};
    b_.plan().cluster.ranks = 2;
    for (const CollectiveKind kind :
         {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce,
          CollectiveKind::kAllToAll, CollectiveKind::kSend}) {
      b_.plan().cluster.collectives.push_back(
          {.kind = kind, .ranks = 2, .link = "link", .points = {{Bytes{1'000}, Nanoseconds{kLinkNs}}}});
    }
  }

  Plan& plan() { return b_.plan(); }
  Simulation Run() {
    Result<Simulation> simulation = Simulate(b_.plan(), {.record_timeline = true});
    EXPECT_TRUE(simulation.has_value()) << ToString(simulation.error());
    return simulation ? *std::move(simulation) : Simulation{};
  }

 private:
  PlanBuilder b_{2};
  UnitId unit_ = -1;
};

TEST(ModelCollectives, OneThatIsWaitedForAtOnceHoldsTheComputeStream) {
  OneSegment segment(
      {FixedOperator(kKernelNs), Collective(CollectiveKind::kAllReduce, 1), FixedOperator(kKernelNs)});
  const Report report = segment.Run().report;
  EXPECT_EQ(report.step_ns.value, 2 * kKernelNs + kLinkNs);
  EXPECT_EQ(report.communication_ns.value, kLinkNs);
  EXPECT_EQ(report.exposed_communication_ns.value, kLinkNs);
}

TEST(ModelCollectives, AnAsynchronousOneRunsBesideKernelsUntilItIsWaitedFor) {
  OneSegment segment({FixedOperator(kKernelNs), Collective(CollectiveKind::kAllToAll, 1, 0),
                      FixedOperator(kLinkNs / 2), CollectiveWaitEvent{0}, FixedOperator(kKernelNs)});
  const Report report = segment.Run().report;
  EXPECT_EQ(report.step_ns.value, 2 * kKernelNs + kLinkNs);
  EXPECT_EQ(report.exposed_communication_ns.value, kLinkNs / 2);
}

TEST(ModelCollectives, OneThatNothingWaitsForIsHidden) {
  OneSegment segment({Collective(CollectiveKind::kAllGather, 1, 0), FixedOperator(kKernelNs)});
  EXPECT_EQ(segment.Run().report.step_ns.value, kKernelNs);
}

// Sends and receives of a group are one kernel; apart they are one after the other.
TEST(ModelCollectives, AGroupOfTransfersIsOneKernel) {
  const auto half = [](CollectiveKind kind, std::int32_t batch) {
    OperatorEvent op = Collective(kind, 1);
    op.collective->peer = 1;
    op.collective->batch = batch;
    return op;
  };
  OneSegment together({half(CollectiveKind::kSend, 0), half(CollectiveKind::kReceive, 0)});
  EXPECT_EQ(together.Run().report.step_ns.value, kLinkNs);
  OneSegment apart({half(CollectiveKind::kSend, -1), half(CollectiveKind::kReceive, -1)});
  EXPECT_EQ(apart.Run().report.step_ns.value, 2 * kLinkNs);
}

TEST(ModelCollectives, AMeasuredOneTakesItsDuration) {
  OperatorEvent measured = Collective(CollectiveKind::kAllReduce, 1);
  measured.duration_ns = Nanoseconds{7};
  EXPECT_EQ(OneSegment({measured}).Run().report.step_ns.value, 7);
}

// The same communicator: one after the other. Another one on the same link: both at half of its rate.
TEST(ModelCollectives, TheyShareCommunicatorsAndLinksWithFsdps) {
  for (const bool shared : {true, false}) {
    PlanBuilder b(2);
    const UnitId unit = b.Unit("a", 1, 250);
    const BufferId whole = b.Buffer(BufferRole::kParamUnsharded, unit);
    b.Communicator("tp", 2);
    const StreamId gather = b.Stream("all_gather");
    const SegmentId forward = b.Forward("forward a", {unit});
    b.plan().segments[0].entries = {Collective(CollectiveKind::kAllReduce, shared ? 0 : 1)};
    b.Step("steady").At(TriggerKind::kPreForward, unit).AllGather(whole, whole, gather);
    b.Compute(forward);
    b.plan().cluster.ranks = 2;
    b.plan().cluster.links = {{.name = "link", .bytes_per_second = 1'000'000}};  // a byte a microsecond
    Result<Simulation> simulation = Simulate(b.plan());
    ASSERT_TRUE(simulation.has_value()) << ToString(simulation.error());
    // Alone the all_gather takes 500 us (half of 1,000 bytes), the all_reduce twice that. Both need all of
    // the link: whatever is shared, it is busy for 1,500 us.
    EXPECT_EQ(simulation->report.step_ns.value, 1'500'000) << shared;
    const auto busy = [&](std::string_view kind) {
      return std::ranges::find(simulation->report.collectives, kind, &CollectiveReport::kind)->busy_ns.value;
    };
    EXPECT_EQ(busy("all_gather"), shared ? 500'000 : 1'000'000);
    EXPECT_EQ(busy("all_reduce"), shared ? 1'000'000 : 1'500'000);
  }
}

TEST(ModelCollectives, TheTimelineNamesThemOnStreamsOfTheirOwn) {
  OneSegment segment(
      {FixedOperator(kKernelNs), Collective(CollectiveKind::kAllToAll, 1), FixedOperator(kKernelNs)});
  const Simulation simulation = segment.Run();
  EXPECT_EQ(EngineStreams(segment.plan()), (std::vector<std::string>{"compute", "model tp"}));
  EXPECT_EQ(simulation.report.streams.back().stream, "model tp");
  const std::string timeline = TimelineJson(segment.plan(), simulation);
  EXPECT_NE(timeline.find("\"stream model tp\""), std::string::npos);
  EXPECT_NE(timeline.find("\"all_to_all on tp\""), std::string::npos);
  EXPECT_NE(ReportHtml({&segment.plan()}, {&simulation}).find("all_to_all on tp"), std::string::npos);
  const std::string kineto = KinetoTrace(segment.plan(), simulation, segment.plan().cluster);
  EXPECT_NE(kineto.find("ncclDevKernel_SendRecv"), std::string::npos);
  const auto on_model = [](const Span& span) { return span.stream == 1 && span.entry == 1; };
  const auto found = std::ranges::find_if(simulation.spans, on_model);
  ASSERT_NE(found, simulation.spans.end());
  EXPECT_EQ(found->start_ns.value, kKernelNs);
  EXPECT_EQ(found->end_ns.value, kKernelNs + kLinkNs);
}

TEST(ModelCollectives, RanksThatShareABatchCountItsTokensOnce) {
  OneSegment segment({FixedOperator(kMillisecond)});
  segment.plan().tokens_per_step = 80;
  EXPECT_EQ(segment.Run().report.tokens_per_second_per_rank, 80'000);
  segment.plan().ranks_per_batch = 8;
  EXPECT_EQ(segment.Run().report.tokens_per_second_per_rank, 10'000);
}

}  // namespace
}  // namespace shardplan::test
