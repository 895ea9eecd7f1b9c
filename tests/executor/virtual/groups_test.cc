// SPDX-License-Identifier: Apache-2.0
// Which collectives the replayer lets a backend launch as one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "tests/support/plan_builder.h"

namespace shardplan::executor {
namespace {

using testing::ElementsAre;

// Writes down what the replayer asks for and issues nothing.
class Recorder final : public Collectives {
 public:
  explicit Recorder(const Plan& plan) : plan_(plan) {}
  Status Prepare(const Plan&, std::int64_t) override { return {}; }
  Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) override {
    specs_.push_back(spec);
    return static_cast<CollectiveId>(specs_.size()) - 1;
  }
  Status Issue(CollectiveId id, StreamId) override {
    calls.push_back(plan_.buffers[specs_[id].dst].name);
    return {};
  }
  Status BeginGroup() override {
    calls.emplace_back("(");
    return {};
  }
  Status EndGroup() override {
    calls.emplace_back(")");
    return {};
  }
  Status Check() override { return {}; }
  void Abort(const std::string&) override {}

  std::vector<std::string> calls;

 private:
  const Plan& plan_;
  std::vector<CollectiveSpec> specs_;
};

// A trigger with units a, b, c, whose all-gather outputs are there.
class Groups : public ::testing::Test {
 protected:
  Groups() {
    builder_.plan().world_size = 4;
    builder_.plan().communicators = {{.name = "shard", .size = 2, .stride = 1},
                                     {.name = "replicate", .size = 2, .stride = 2}};
    gather_ = builder_.Stream("all_gather");
    for (const char* name : {"a", "b", "c"}) {
      const UnitId unit = builder_.Unit(name);
      outputs_.push_back(builder_.Buffer(BufferRole::kAllGatherOutput, unit));
      inputs_.push_back(builder_.Buffer(BufferRole::kReduceScatterInput, unit));
      reduced_.push_back(builder_.Buffer(BufferRole::kReduceScatterOutput, unit));
    }
    for (Buffer& buffer : builder_.plan().buffers) {
      buffer.persistent = true;
      const bool shard = buffer.role == BufferRole::kReduceScatterOutput;
      buffer.parts_bytes = {Bytes(shard ? 32 : 64)};
    }
    builder_.Step("only").At(TriggerKind::kStepBegin);
  }
  std::vector<std::string> Calls() {
    const Plan& plan = builder_.plan();
    const auto machine = VirtualMachine::Create(plan, 1);
    Recorder recorder(plan);
    auto replayer = Replayer::Create(plan, 0, machine->device(0), recorder, nullptr);
    if (!replayer) return {ToString(replayer.error())};
    const Status status = (*replayer)->Fire({TriggerKind::kStepBegin, -1, 0});
    return status ? recorder.calls : std::vector<std::string>{ToString(status.error())};
  }
  test::PlanBuilder& Gather(int unit) { return builder_.AllGather(outputs_[unit], outputs_[unit], gather_); }

  test::PlanBuilder builder_;
  StreamId gather_ = -1;
  std::vector<BufferId> outputs_, inputs_, reduced_;
};

TEST_F(Groups, OneAloneIsNoGroup) {
  Gather(0);
  EXPECT_THAT(Calls(), ElementsAre("a.all_gather_output"));
}

TEST_F(Groups, GathersOfSeveralUnitsThatFollowOneAnotherAreOne) {
  Gather(0);
  Gather(1);
  Gather(2);
  EXPECT_THAT(Calls(),
              ElementsAre("(", "a.all_gather_output", "b.all_gather_output", "c.all_gather_output", ")"));
}

// A record between two says when the first is done: it must not be launched with the second.
TEST_F(Groups, AnythingBetweenTwoKeepsThemApart) {
  const EventId event = builder_.Event("gathered");
  Gather(0).Record(event, gather_);
  Gather(1);
  Gather(2);
  EXPECT_THAT(Calls(),
              ElementsAre("a.all_gather_output", "(", "b.all_gather_output", "c.all_gather_output", ")"));
}

TEST_F(Groups, WhatNeedsTheOneBeforeIsIssuedAfterIt) {
  builder_.ReduceScatter(inputs_[0], reduced_[0], gather_).AllReduce(reduced_[0], gather_);
  builder_.ReduceScatter(inputs_[1], reduced_[1], gather_);
  Gather(1);
  EXPECT_THAT(Calls(), ElementsAre("a.reduce_scatter_output", "a.reduce_scatter_output",
                                   "b.reduce_scatter_output", "b.all_gather_output"));
}

TEST_F(Groups, OtherStreamsAndOtherCommunicatorsStandForThemselves) {
  Gather(0);
  builder_.AllGather(outputs_[1], outputs_[1], 0);
  builder_.AllGather(outputs_[2], outputs_[2], 0, 1);
  EXPECT_THAT(Calls(), ElementsAre("a.all_gather_output", "b.all_gather_output", "c.all_gather_output"));
}

}  // namespace
}  // namespace shardplan::executor
