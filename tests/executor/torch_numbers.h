// SPDX-License-Identifier: Apache-2.0
// The numbers of the checked model in LibTorch's tensors: the cpu and the cuda backend.
#pragma once

#include <vector>

#include "shardplan/executor/torch_device.h"
#include "tests/executor/virtual/number_memory.h"

namespace shardplan::test {

// Work on host memory is done at once. The stream copies what is read of a GPU's memory to the host, and
// Finish looks at it: so the checks make nobody wait.
class TorchNumbers final : public NumberMemory {
 public:
  explicit TorchNumbers(executor::TorchDevice& device) : device_(device) {}
  // Whole parameters are one tensor for ever, whose storage comes and goes.
  bool IsAlive(BufferId buffer) override {
    const at::Tensor part = device_.Part(buffer, 0);
    return part.defined() && (part.numel() == 0 || part.storage().nbytes() > 0);
  }
  std::size_t SizeOf(BufferId buffer, std::int32_t part) override {
    return device_.Part(buffer, part).nbytes();
  }
  Status Enqueue(StreamId stream, NumberWork work) override;
  // Once the device has done all its work.
  void Finish();

 private:
  struct Unchecked {
    NumberWork work;
    std::vector<at::Tensor> found;
  };
  at::Tensor Bytes(const BytePlace& place, std::size_t bytes) const;
  void Read(NumberWork& work);
  static void Check(const Unchecked& unchecked);
  void Write(const NumberWork::Write& write) const;

  executor::TorchDevice& device_;
  std::vector<Unchecked> unchecked_;
};

}  // namespace shardplan::test
