// SPDX-License-Identifier: Apache-2.0
#include "cpu/counted_memory.h"

#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "shardplan/executor/backends.h"

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

// In front of the memory that CountingAllocator hands out. Kernels that take memory without an owner
// (c10::Allocator::raw_allocate: oneDNN's scratchpads) demand that the owner of memory is its address.
struct Front {
  c10::DataPtr memory;
  AllocationCount* count;  // null: it is not counted
  std::int64_t bytes;
};
constexpr std::size_t kFrontBytes = 64;  // torch aligns the memory of CPU tensors to as many
static_assert(sizeof(Front) <= kFrontBytes);

void FreeWithFront(void* data) {
  if (data == nullptr) return;
  auto* front = reinterpret_cast<Front*>(static_cast<char*>(data) - kFrontBytes);
  const c10::DataPtr memory = std::move(front->memory);  // where the front is: it goes last
  if (front->count) front->count->Freed(front->bytes);
  front->~Front();
}

// The allocator of torch's CPU tensors, counted where the thread that trains makes them.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator(c10::Allocator& base, AllocationCount& count) : base_(base), count_(count) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &FreeWithFront, c10::Device(c10::DeviceType::CPU)};
    c10::DataPtr memory = base_.allocate(bytes + kFrontBytes);
    const c10::Device device = memory.device();
    auto* const begin = static_cast<char*>(memory.mutable_get());
    auto* const front = new (begin) Front{std::move(memory), nullptr, static_cast<std::int64_t>(bytes)};
    if (uncounted == 0 && std::this_thread::get_id() == trains_) {
      front->count = &count_;
      count_.Allocated(front->bytes);
    }
    void* const data = begin + kFrontBytes;
    return {data, data, &FreeWithFront, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &FreeWithFront; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    base_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& base_;
  AllocationCount& count_;
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
  c10::SetCPUAllocator(new CountingAllocator(*c10::GetCPUAllocator(), *counting.count), 0);
  return counting.count;
}

std::shared_ptr<AllocationCount> CpuAllocations() {
  Counting& counting = OfProcess();
  const std::scoped_lock lock(counting.mutex);
  return counting.count;
}

}  // namespace shardplan::executor
