// SPDX-License-Identifier: Apache-2.0
// The cuda backend's collectives on one GPU: NCCL with itself. Skips without a GPU.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "shardplan/executor/backends.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/step_recorder.h"
#include "tests/executor/recorded_plan.h"
#include "tests/executor/step_plan.h"

namespace shardplan::test {
namespace {

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (!executor::CudaIsAvailable(&reason)) GTEST_SKIP() << "no GPU: " << reason;
  }
  static executor::NcclOptions Nccl(std::int64_t world_size) {
    return {std::chrono::milliseconds(60'000), c10::make_intrusive<c10d::HashStore>(), world_size};
  }
};

// A communicator of one rank, which the replayer itself would not use: NCCL is set up, moves the data, and
// comes down. Reductions copy their input.
class NcclWithItself : public Gpu, public testing::WithParamInterface<executor::MemorySource> {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    for (const char* name : {"one", "another"}) {
      plan_.communicators.push_back({.name = name, .size = 1, .stride = 1});
    }
    for (Buffer& buffer : plan_.buffers) {  // bytes like any others
      if (buffer.unit == 3) buffer.dtype = DType::kFloat8E4M3FN;
    }
    auto device = executor::MakeCudaDevice(0, GetParam());
    ASSERT_TRUE(device.has_value()) << ToString(device.error());
    device_ = std::move(*device);
    ASSERT_TRUE(device_->Prepare(plan_).has_value());
    auto collectives = executor::MakeNcclCollectives(*device_, Nccl(1));
    ASSERT_TRUE(collectives.has_value()) << ToString(collectives.error());
    collectives_ = std::move(*collectives);
    ASSERT_TRUE(collectives_->Prepare(plan_, 0).has_value());
  }

  // From a reduce-scatter's input, filled with threes, to its output.
  executor::CollectiveId Prepare(CollectiveKind kind, UnitId unit, CommunicatorId communicator = 0) {
    const BufferId input = Find(unit, BufferRole::kReduceScatterInput);
    const BufferId output = Find(unit, BufferRole::kReduceScatterOutput);
    EXPECT_TRUE(device_->Allocate(input, 0).has_value());
    EXPECT_TRUE(device_->Allocate(output, 0).has_value());
    AsBytes(input).fill_(3);
    const std::int64_t numel = device_->Part(input, 0).numel();
    const auto id = collectives_->PrepareCollective(
        {kind, communicator, input, output, 0, numel, plan_.buffers[input].dtype, ReduceOp::kSum});
    EXPECT_TRUE(id.has_value()) << ToString(id.error());
    return id.value_or(-1);
  }
  void ExpectMoved(UnitId unit) {
    const Result<bool> done = device_->Synchronize();
    ASSERT_TRUE(done.has_value()) << ToString(done.error());
    EXPECT_TRUE(collectives_->Check().has_value());
    EXPECT_TRUE(AsBytes(Find(unit, BufferRole::kReduceScatterOutput)).eq(3).all().item<bool>());
  }
  BufferId Find(UnitId unit, BufferRole role) const {
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (plan_.buffers[b].unit == unit && plan_.buffers[b].role == role) return static_cast<BufferId>(b);
    }
    ADD_FAILURE() << "no such buffer";
    return 0;
  }
  at::Tensor AsBytes(BufferId buffer) { return device_->Part(buffer, 0).view(at::kByte); }

  Plan plan_ = MakeStepPlan(1);  // units 1 to 3 have parameters
  std::unique_ptr<executor::TorchDevice> device_;
  std::unique_ptr<executor::Collectives> collectives_;
};

TEST_P(NcclWithItself, Reduces) {
  const executor::CollectiveId id = Prepare(CollectiveKind::kReduceScatter, 1);
  ASSERT_TRUE(collectives_->Issue(id, 0).has_value());
  ExpectMoved(1);
}

TEST_P(NcclWithItself, GathersFloat8) {
  const executor::CollectiveId id = Prepare(CollectiveKind::kAllGather, 3);
  ASSERT_TRUE(collectives_->Issue(id, 0).has_value());
  ExpectMoved(3);
}

TEST_P(NcclWithItself, MovesOnACommunicatorThatIsSplitFromTheWorlds) {
  Prepare(CollectiveKind::kReduceScatter, 1);
  const executor::CollectiveId id = Prepare(CollectiveKind::kReduceScatter, 2, 1);
  ASSERT_TRUE(collectives_->Issue(id, 0).has_value());
  ExpectMoved(2);
}

TEST_P(NcclWithItself, LaunchesAGroupAsOne) {
  const executor::CollectiveId first = Prepare(CollectiveKind::kReduceScatter, 1);
  const executor::CollectiveId second = Prepare(CollectiveKind::kReduceScatter, 2);
  ASSERT_TRUE(collectives_->BeginGroup().has_value());
  ASSERT_TRUE(collectives_->Issue(first, 0).has_value());
  ASSERT_TRUE(collectives_->Issue(second, 0).has_value());
  ASSERT_TRUE(collectives_->EndGroup().has_value());
  ExpectMoved(1);
  ExpectMoved(2);
}

TEST_P(NcclWithItself, AnAbortIsTheErrorOfWhateverFollows) {
  const executor::CollectiveId id = Prepare(CollectiveKind::kReduceScatter, 1);
  ASSERT_TRUE(collectives_->BeginGroup().has_value());
  ASSERT_TRUE(collectives_->Issue(id, 0).has_value());
  collectives_->Abort("the model deviates from the plan");
  for (const Status& status :
       {collectives_->Check(), collectives_->Issue(id, 0), collectives_->BeginGroup()}) {
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().message, "the model deviates from the plan");
  }
}

INSTANTIATE_TEST_SUITE_P(MemoryPlans, NcclWithItself,
                         ::testing::Values(executor::MemorySource::kAllocator,
                                           executor::MemorySource::kArena));

// One rank: copies, scalings and allocations of a step, in the plan's streams.
TEST_F(Gpu, RecordsStepsWithTheTimesOfItsStreams) {
  const Plan plan = MakeStepPlan(1);
  auto device = executor::MakeCudaDevice(0);
  ASSERT_TRUE(device.has_value()) << ToString(device.error());
  const auto collectives = executor::MakeNcclCollectives(**device, Nccl(1));
  ASSERT_TRUE(collectives.has_value()) << ToString(collectives.error());
  const auto replayer = executor::Replayer::Create(plan, 0, **device, **collectives);
  ASSERT_TRUE(replayer.has_value()) << ToString(replayer.error());
  const auto count = executor::CudaAllocations(0);
  ASSERT_TRUE(count != nullptr);
  EXPECT_EQ(count, executor::CudaAllocations(0));
  executor::StepRecorder recorder(plan, {.warmup = 1, .steps = 2, .compares = true, .allocations = count});
  ASSERT_TRUE((*replayer)->SetRecorder(&recorder).has_value());
  while (!recorder.done()) {
    const Status status = (*replayer)->Fire(executor::TriggerKey((*replayer)->Expected()));
    ASSERT_TRUE(status.has_value()) << ToString(status.error());
  }
  const Result<executor::Recording> recording = recorder.Finish();
  ASSERT_TRUE(recording.has_value()) << ToString(recording.error());
  ASSERT_EQ(recording->steps.size(), 2);
  ExpectWholeSteps(*recording, plan, /*slack_ns=*/200'000);
  for (const executor::MeasuredStep& step : recording->steps) {
    for (const executor::RecordedInstruction& one : step.instructions) {
      const bool copies = PlannedOf(plan, one).kind == InstructionKind::kCopyOut;
      EXPECT_TRUE(!copies || one.span >= 0);
      EXPECT_LE(one.allocated_bytes, step.peak_bytes);
    }
    EXPECT_EQ(step.steady_bytes, recording->steps[0].steady_bytes);
  }
  EXPECT_FALSE((*device)->Facts().name.empty());
  EXPECT_GT((*device)->Facts().memory_bytes.value, 0);
}

// Its library registers them when it is loaded; nothing else in this program needs it.
TEST(CudaBackend, TorchsCudaKernelsAreThere) {
  const auto empty = c10::Dispatcher::singleton().findSchema({"aten::empty", "memory_format"});
  ASSERT_TRUE(empty.has_value());
  EXPECT_TRUE(empty->hasKernelForDispatchKey(c10::DispatchKey::CUDA));
}

TEST(CudaBackend, WithoutAGpuADeviceIsAnEnvironmentError) {
  if (executor::CudaIsAvailable(nullptr)) GTEST_SKIP() << "there is a GPU";
  const auto device = executor::MakeCudaDevice(0);
  ASSERT_FALSE(device.has_value());
  EXPECT_EQ(device.error().code, ErrorCode::kEnvironment);
}

}  // namespace
}  // namespace shardplan::test
