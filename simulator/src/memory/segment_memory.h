// SPDX-License-Identifier: Apache-2.0
// Memory that segments take and drop: the model's own storages, and temporaries of kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/gradient_memory.h"
#include "memory/kernel_memory.h"
#include "memory/live_blocks.h"
#include "memory/model_actions.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

class SegmentMemory {
 public:
  // `model`: with operators where kernels' temporaries are asked for. Moves the cursor through the entries of
  // a segment.
  SegmentMemory(const Plan& plan, const ModelActions& model, bool kernel_temporaries,
                GradientMemory& gradients, LiveBlocks& blocks, MemoryCursor& cursor);

  void Run(const Instruction& compute);
  // Activations that come back from the host, and those that have left for it: all storages of the buffer, of
  // the micro-batch that the cursor is at.
  void Make(const Buffer& activations, StreamId stream);
  void Drop(const Buffer& activations);

 private:
  static constexpr std::size_t kNoKernel = static_cast<std::size_t>(-1);
  // The memory that an operator has taken so far.
  struct Kernel {
    std::size_t entry = kNoKernel;  // the operator's, in the segment
    std::vector<KernelStep> steps;
    std::size_t next = 0;
    std::vector<std::int32_t> blocks;  // by order of taking, -1: given back
  };

  void SizeStorages();
  ModelMemory& Storage(StorageId storage);
  void Make(const ModelAction& action, const MemoryBlock& block);
  void Drop(StorageId storage);
  void PassKernel(const Segment& segment, std::size_t entry, const MemoryBlock& block);
  std::vector<KernelStep> StepsOf(const OperatorEvent& op, const Segment& segment, std::size_t entry) const;
  void RunKernel(MemoryBlock block, bool to_the_end);
  std::vector<Bytes> StorageSizes(const std::vector<StorageId>& storages) const;
  void RunCublas(const OperatorEvent& op, const Segment& segment, const MemoryBlock& block);

  const Plan& plan_;
  const ModelActions& model_;
  const bool kernel_temporaries_;
  GradientMemory& gradients_;
  LiveBlocks& blocks_;
  MemoryCursor& cursor_;
  std::vector<ModelMemory> storages_;  // by micro-batch and storage
  std::size_t storages_per_batch_ = 0;
  std::vector<Bytes> storage_bytes_;  // by storage
  const PyTorchRules rules_;
  Kernel kernel_;
  bool workspace_made_[2] = {false, false};
};

}  // namespace shardplan::internal
