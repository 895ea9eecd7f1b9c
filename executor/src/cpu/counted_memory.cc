// SPDX-License-Identifier: Apache-2.0
#include "cpu/counted_memory.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <thread>
#include <utility>

#include "shardplan/executor/cpu_backend.h"

namespace shardplan::executor {
namespace {

struct CountedMemory {
  c10::DataPtr memory;
  std::shared_ptr<AllocationCount> count;
  std::int64_t bytes;
};

void FreeCounted(void* context) {
  const std::unique_ptr<CountedMemory> counted(static_cast<CountedMemory*>(context));
  counted->count->Freed(counted->bytes);
}

thread_local int uncounted = 0;  // how many Uncounted live

// What torch's CPU tensors are made of, counted where the thread that trains makes them.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator(c10::Allocator& base, std::shared_ptr<AllocationCount> count)
      : base_(base), count_(std::move(count)) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0 || uncounted > 0 || std::this_thread::get_id() != trains_) return base_.allocate(bytes);
    return Counted(base_.allocate(bytes), static_cast<std::int64_t>(bytes), count_);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    base_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& base_;
  std::shared_ptr<AllocationCount> count_;
  const std::thread::id trains_ = std::this_thread::get_id();
};

struct Counting {
  std::mutex mutex;
  std::shared_ptr<AllocationCount> count;
};

// Torch has one CPU allocator in a process, and memory of it outlives whoever asked for the count.
Counting& OfProcess() {
  static auto* counting = new Counting();
  return *counting;
}

}  // namespace

Uncounted::Uncounted() { ++uncounted; }
Uncounted::~Uncounted() { --uncounted; }

c10::DataPtr Counted(c10::DataPtr memory, std::int64_t bytes, std::shared_ptr<AllocationCount> count) {
  count->Allocated(bytes);
  void* data = memory.mutable_get();
  const c10::Device device = memory.device();
  auto counted = std::make_unique<CountedMemory>(std::move(memory), std::move(count), bytes);
  return {data, counted.release(), &FreeCounted, device};
}

std::shared_ptr<AllocationCount> CountCpuAllocations() {
  Counting& counting = OfProcess();
  const std::scoped_lock lock(counting.mutex);
  if (counting.count) return counting.count;
  counting.count = std::make_shared<AllocationCount>();
  // Torch keeps the pointer.
  c10::SetCPUAllocator(new CountingAllocator(*c10::GetCPUAllocator(), counting.count), 0);
  return counting.count;
}

std::shared_ptr<AllocationCount> CpuAllocations() {
  Counting& counting = OfProcess();
  const std::scoped_lock lock(counting.mutex);
  return counting.count;
}

}  // namespace shardplan::executor
