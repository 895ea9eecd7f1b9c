// SPDX-License-Identifier: Apache-2.0
// The allocator that counts what CPU ranks allocate. It stays for the process: each test takes differences.
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>

#include "shardplan/executor/backends.h"
#include "shardplan/executor/device.h"

namespace shardplan::executor {
namespace {

std::int64_t Allocated() { return CountCpuAllocations()->now().value; }

TEST(CountedMemory, CountsTensorsOfTheThreadThatTrainsUntilTheyAreFreed) {
  const std::int64_t before = Allocated();
  {
    const at::Tensor tensor = at::empty({1024}, at::kFloat);
    EXPECT_EQ(Allocated(), before + 4096);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64, 0U);
    std::thread([] { EXPECT_EQ(at::empty({1024}, at::kFloat).numel(), 1024); }).join();
    EXPECT_EQ(Allocated(), before + 4096);
  }
  EXPECT_EQ(Allocated(), before);
}

TEST(CountedMemory, HandsOutMemoryWithoutAnOwner) {
  const std::int64_t before = Allocated();
  c10::Allocator* allocator = c10::GetCPUAllocator();
  void* memory = allocator->raw_allocate(10000);
  std::memset(memory, 1, 10000);
  EXPECT_GE(Allocated(), before + 10000);
  allocator->raw_deallocate(memory);
  EXPECT_EQ(Allocated(), before);
  void* nothing = allocator->raw_allocate(0);
  allocator->raw_deallocate(nothing);
  std::thread([&] { memory = allocator->raw_allocate(10000); }).join();
  allocator->raw_deallocate(memory);  // whoever frees it
  EXPECT_EQ(Allocated(), before);
}

TEST(CountedMemory, CopiesOfOneAllocation) {
  const at::Tensor tensor = at::empty({100}, at::kByte).fill_(7);
  const c10::DataPtr copy = c10::GetCPUAllocator()->clone(tensor.data_ptr(), 100);
  EXPECT_EQ(std::memcmp(copy.get(), tensor.data_ptr(), 100), 0);
}

}  // namespace
}  // namespace shardplan::executor
