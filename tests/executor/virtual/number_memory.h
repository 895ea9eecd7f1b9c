// SPDX-License-Identifier: Apache-2.0
// Memory of one rank as a model of numbers sees it, whatever the backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "shardplan/executor/virtual_backend.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// A byte of a part of a buffer.
struct BytePlace {
  BufferId buffer = -1;
  std::int32_t part = 0;
  std::int64_t byte = 0;
};

// One go of a model on a stream: reads, then writes. The spans outlive the run.
struct NumberWork {
  struct Read {
    BytePlace at;
    std::size_t bytes = 0;
  };
  struct Write {
    BytePlace at;
    std::span<const std::byte> value;
    DType dtype = DType::kFloat32;
    bool adds = false;
  };
  std::vector<Read> reads;
  std::function<void(std::span<const std::byte* const>)> check;  // gets what was read, in order; may be empty
  std::vector<Write> writes;
};

class NumberMemory {
 public:
  virtual ~NumberMemory() = default;
  virtual bool IsAlive(BufferId buffer) = 0;
  // Bytes of a part of a living buffer; 0 where there is no such part.
  virtual std::size_t SizeOf(BufferId buffer, std::int32_t part) = 0;
  // The buffers are those of now, the numbers those that the stream finds when it gets there. Stream -1: the
  // host does it, now.
  virtual Status Enqueue(StreamId stream, NumberWork work) = 0;
};

// The work, on host memory: the addresses of its reads and of its writes.
void DoOnHost(const NumberWork& work, std::span<const std::byte* const> reads,
              std::span<std::byte* const> writes);

class VirtualNumbers final : public NumberMemory {
 public:
  VirtualNumbers(executor::VirtualMachine& machine, std::int64_t rank) : machine_(machine), rank_(rank) {}
  bool IsAlive(BufferId buffer) override { return machine_.Memory(rank_, buffer, 0).data() != nullptr; }
  std::size_t SizeOf(BufferId buffer, std::int32_t part) override {
    return machine_.Memory(rank_, buffer, part).size();
  }
  Status Enqueue(StreamId stream, NumberWork work) override;

 private:
  // Null where the buffer has no such bytes.
  std::byte* At(const BytePlace& place, std::size_t bytes) const;
  executor::VirtualMachine& machine_;
  const std::int64_t rank_;
};

}  // namespace shardplan::test
