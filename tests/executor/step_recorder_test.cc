// SPDX-License-Identifier: Apache-2.0
// Recordings of a plan's steps on the virtual machine and on the CPU; gpu_test.cc has the cuda backend's.
#include "shardplan/executor/step_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "shardplan/executor/backends.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "tests/executor/recorded_plan.h"
#include "tests/executor/step_plan.h"

namespace shardplan::executor {
namespace {

using test::ExpectWholeSteps;
using ::testing::HasSubstr;

void RunStep(Replayer& replayer) {
  for (const std::int64_t step = replayer.steps_completed(); replayer.steps_completed() == step;) {
    const Status status = replayer.Fire(TriggerKey(replayer.Expected()));
    ASSERT_TRUE(status.has_value()) << ToString(status.error());
  }
}

class RecordedOnVirtual : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override {
    machine_ = VirtualMachine::Create(plan_, GetParam());
    for (std::int64_t rank = 0; rank < plan_.world_size; ++rank) {
      auto replayer = Replayer::Create(plan_, rank, machine_->device(rank), machine_->collectives(rank));
      ASSERT_TRUE(replayer.has_value());
      replayers_.push_back(std::move(*replayer));
    }
  }
  void Run(std::int64_t steps) {
    std::vector<Replayer*> all;
    for (const auto& replayer : replayers_) all.push_back(replayer.get());
    const Status status = ReplayOnVirtual(*machine_, all, steps);
    ASSERT_TRUE(status.has_value()) << ToString(status.error());
  }

  Plan plan_ = test::MakeStepPlan(2);
  std::unique_ptr<VirtualMachine> machine_;
  std::vector<std::unique_ptr<Replayer>> replayers_;
};

TEST_P(RecordedOnVirtual, StepsAreRecordedInTurns) {
  StepRecorder recorder(plan_, {.warmup = 1, .steps = 2});
  ASSERT_TRUE(replayers_[1]->SetRecorder(&recorder).has_value());
  Run(4);
  EXPECT_FALSE(recorder.done());  // the fourth, which is not recorded, ends with the begin of a fifth
  Run(3);
  EXPECT_TRUE(recorder.done());
  const Result<Recording> recording = recorder.Finish();
  ASSERT_TRUE(recording.has_value()) << ToString(recording.error());
  EXPECT_EQ(recording->steps.size(), 2);
  EXPECT_EQ(recording->unrecorded_steps_ns.size(), 2);
  EXPECT_EQ(recording->abandoned, 0);
  ExpectWholeSteps(*recording, plan_);
  EXPECT_GE(recording->steps[1].begin_ns, recording->steps[0].end_ns + recording->unrecorded_steps_ns[0]);
}

TEST_P(RecordedOnVirtual, AStepThatIsGivenUpIsNotInIt) {
  StepRecorder recorder(plan_, {.warmup = 0, .steps = 1, .compares = false});
  for (const auto& replayer : replayers_) {
    if (replayer == replayers_[0]) {
      ASSERT_TRUE(replayer->SetRecorder(&recorder).has_value());
    }
    ASSERT_TRUE(replayer->Fire({TriggerKind::kStepBegin, -1, 0}).has_value());
    ASSERT_TRUE(replayer->Restart().has_value());
  }
  Run(1);
  recorder.EndStep();
  const Result<Recording> recording = recorder.Finish();
  ASSERT_TRUE(recording.has_value()) << ToString(recording.error());
  EXPECT_EQ(recording->abandoned, 1);
  ASSERT_EQ(recording->steps.size(), 1);
  ExpectWholeSteps(*recording, plan_);
}

TEST_P(RecordedOnVirtual, NothingIsRecordedFromTheMomentThatItIsOff) {
  StepRecorder recorder(plan_, {.warmup = 0, .steps = 2, .compares = false});
  ASSERT_TRUE(replayers_[0]->SetRecorder(&recorder).has_value());
  Run(1);
  ASSERT_TRUE(replayers_[0]->SetRecorder(nullptr).has_value());
  Run(3);
  EXPECT_EQ(recorder.recorded(), 0);
  const Result<Recording> recording = recorder.Finish();
  ASSERT_TRUE(recording.has_value());
  EXPECT_TRUE(recording->steps.empty() && recording->unrecorded_steps_ns.empty());
}

INSTANTIATE_TEST_SUITE_P(Seeds, RecordedOnVirtual, ::testing::Values(1, 2, 3));

// A device that only moves memory, as one of a backend's user would be.
TEST(StepRecorder, ADeviceWithoutAClockIsAUsageError) {
  class NoClock final : public Device {
   public:
    Status Prepare(const Plan&) override { return {}; }
    Result<CopyId> PrepareCopy(CopySpec) override { return copies_++; }
    Status Allocate(BufferId, StreamId) override { return {}; }
    Status Free(BufferId, std::span<const StreamId>) override { return {}; }
    Status FreeParts(BufferId, std::span<const std::int32_t>, std::span<const StreamId>) override {
      return {};
    }
    Status MakeAlias(CopyId) override { return {}; }
    Status Copy(CopyId, StreamId) override { return {}; }
    Status Accumulate(CopyId, StreamId) override { return {}; }
    Status Scale(BufferId, double, StreamId) override { return {}; }
    Status Record(EventId, StreamId) override { return {}; }
    Status Wait(EventId, StreamId) override { return {}; }
    Result<bool> HostWait(EventId) override { return true; }
    Result<bool> Synchronize() override { return true; }

   private:
    CopyId copies_ = 0;
  } device;
  const Plan plan = test::MakeStepPlan(2);
  const auto machine = VirtualMachine::Create(plan, 1);
  const auto replayer = Replayer::Create(plan, 0, device, machine->collectives(0));
  ASSERT_TRUE(replayer.has_value());
  StepRecorder recorder(plan, {});
  const Status status = (*replayer)->SetRecorder(&recorder);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kUsage);
  EXPECT_THAT(status.error().message, HasSubstr("no clock"));
  EXPECT_TRUE((*replayer)->Fire({TriggerKind::kStepBegin, -1, 0}).has_value());
}

// Notes the device's allocated bytes behind each instruction.
class AllocatedAfterEach final : public Observer {
 public:
  explicit AllocatedAfterEach(std::shared_ptr<AllocationCount> count) : count_(std::move(count)) {}
  void AfterInstruction(const Instruction&) override { allocated.push_back(count_->now()); }
  std::vector<Bytes> allocated;

 private:
  std::shared_ptr<AllocationCount> count_;
};

// The CPU device counts what it allocates for the plan: the recorder, which is told of buffers alone, has to
// come to the same, but for the shards, which are there before it counts.
TEST(StepRecorder, BuffersAddUpToWhatTheDeviceAllocates) {
  const Plan plan = test::MakeStepPlan(1);
  const auto device = MakeCpuDevice();
  const auto count = std::make_shared<AllocationCount>();
  device->CountAllocations(count);
  const auto collectives = MakeProcessGroupCollectives(
      *device, {.groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>(plan.communicators.size())});
  const auto replayer = Replayer::Create(plan, 0, *device, *collectives);
  ASSERT_TRUE(replayer.has_value()) << ToString(replayer.error());
  StepRecorder recorder(plan, {.warmup = 1, .steps = 1, .compares = false});
  ASSERT_TRUE((*replayer)->SetRecorder(&recorder).has_value());
  RunStep(**replayer);
  AllocatedAfterEach observer(count);
  (*replayer)->SetObserver(&observer);
  (void)count->TakePeak();
  RunStep(**replayer);
  recorder.EndStep();
  const Result<Recording> recording = recorder.Finish();
  ASSERT_TRUE(recording.has_value() && recording->steps.size() == 1);
  ExpectWholeSteps(*recording, plan);
  const MeasuredStep& step = recording->steps[0];
  ASSERT_EQ(step.instructions.size(), observer.allocated.size());
  Bytes most;
  for (std::size_t i = 0; i < observer.allocated.size(); ++i) {
    EXPECT_EQ(step.instructions[i].allocated_bytes, observer.allocated[i]) << "instruction " << i;
    most = std::max(most, observer.allocated[i]);
  }
  EXPECT_GE(step.peak_bytes, most);
  EXPECT_EQ(step.peak_bytes, count->TakePeak());
}

}  // namespace
}  // namespace shardplan::executor
