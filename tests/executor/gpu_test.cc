// The cuda backend on one GPU: the conformance cases of one rank, and NCCL with itself. Skips without a GPU.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "shardplan/executor/cuda_backend.h"
#include "shardplan/executor/engine.h"
#include "tests/executor/sharded_plan.h"
#include "tests/executor/torch_stream.h"

namespace shardplan::test {
namespace {

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (!executor::CudaIsAvailable(&reason)) GTEST_SKIP() << "no GPU: " << reason;
  }
  static executor::NcclOptions Nccl(std::int64_t world_size) {
    return {std::chrono::milliseconds(60'000), c10::make_intrusive<c10d::HashStore>(), world_size};
  }
};

TEST_F(Gpu, ParametersAreExactOnOneRank) {
  for (const auto& [flat, memory] :
       {std::pair(false, executor::MemoryPlan::kAllocator), std::pair(true, executor::MemoryPlan::kAllocator),
        std::pair(false, executor::MemoryPlan::kArena)}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Plan plan = MakeShardedPlan({.shards = 1, .microbatches = 2, .flat = flat, .param_dtype = dtype});
      auto device = executor::MakeCudaDevice(0, memory);
      ASSERT_TRUE(device.has_value()) << ToString(device.error());
      auto collectives = executor::MakeNcclCollectives(**device, Nccl(1));
      ASSERT_TRUE(collectives.has_value()) << ToString(collectives.error());
      TorchStream stream(**device, plan);
      EXPECT_EQ(RunToyModel(plan, 0, **device, **collectives, stream, 3), "");
    }
  }
}

// A communicator of one rank, which the engine itself would not use: NCCL is set up, moves the data, and
// comes down.
TEST_F(Gpu, NcclGathersAndReducesWithItself) {
  const Plan plan = MakeShardedPlan({.shards = 1});
  auto device = executor::MakeCudaDevice(0);
  ASSERT_TRUE(device.has_value()) << ToString(device.error());
  ASSERT_TRUE((*device)->Prepare(plan).has_value());
  auto collectives = executor::MakeNcclCollectives(**device, Nccl(1));
  ASSERT_TRUE(collectives.has_value()) << ToString(collectives.error());
  ASSERT_TRUE((*collectives)->Prepare(plan, 0).has_value());
  BufferId input = -1;
  BufferId output = -1;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].unit != 0) continue;
    if (plan.buffers[b].role == BufferRole::kReduceScatterInput) input = static_cast<BufferId>(b);
    if (plan.buffers[b].role == BufferRole::kReduceScatterOutput) output = static_cast<BufferId>(b);
  }
  ASSERT_TRUE((*device)->Allocate(input, 0).has_value());
  ASSERT_TRUE((*device)->Allocate(output, 0).has_value());
  (*device)->Part(input, 0).fill_(3);
  const std::int64_t numel = (*device)->Part(input, 0).numel();
  const auto id = (*collectives)
                      ->PrepareCollective({CollectiveKind::kReduceScatter, 0, input, output, 0, numel,
                                           DType::kFloat32, ReduceOp::kSum});
  ASSERT_TRUE(id.has_value()) << ToString(id.error());
  ASSERT_TRUE((*collectives)->Issue(*id, 0).has_value());
  ASSERT_TRUE((*device)->Synchronize().has_value());
  EXPECT_TRUE((*collectives)->Check().has_value());
  EXPECT_EQ((*device)->Part(output, 0).sum().item<float>(), 3.0F * static_cast<float>(numel));
}

TEST(CudaBackend, WithoutAGpuADeviceIsAnEnvironmentError) {
  if (executor::CudaIsAvailable(nullptr)) GTEST_SKIP() << "there is a GPU";
  const auto device = executor::MakeCudaDevice(0);
  ASSERT_FALSE(device.has_value());
  EXPECT_EQ(device.error().code, ErrorCode::kEnvironment);
}

}  // namespace
}  // namespace shardplan::test
