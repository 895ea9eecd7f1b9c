// SPDX-License-Identifier: Apache-2.0
// Unsharded gradients: segments make them, and buffers of the plan have them.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/buffer_memory.h"
#include "memory/gradient_arrivals.h"
#include "memory/live_blocks.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

class GradientMemory {
 public:
  GradientMemory(const Plan& plan, bool kernel_temporaries, BufferMemory& buffers, LiveBlocks& blocks);

  // ---- a segment ----
  void BeginSegment(const Segment& segment, const MemoryPoint& at);
  // A block that the model has made for a gradient, by the operator at this entry.
  void Add(std::int32_t block, std::size_t op);
  // The segment comes to the entry: what autograd has widened or added up before it
  // ([Note: gradients that autograd adds up], gradient_arrivals.h).
  void ComeTo(std::int32_t entry) {
    if (!arriving_.empty()) Arrive(entry);
  }
  // The gradients that the segment lists are alive from now on. A block that was allocated for a gradient
  // that existed before was added to that one and is freed. Others are allocated as `block` says.
  void EndSegment(const Segment& segment, MemoryBlock block);

  // ---- buffers ----
  // A gradient may have several buffers: taken with others of its unit in one step, and by itself in another.
  // It is freed with the buffer that the plan frees, whichever of them it was counted for.
  bool IsShared(BufferId id) const;
  void Free(BufferId id, const std::vector<std::int32_t>& parts, const std::vector<StreamId>& recorded_on);

  // ---- original parameters of flat units ----
  // Behind a unit's backward, whose parameters `bound` has made views of the shard: a gradient that is not
  // reduced becomes that of the original parameters. `hook`: what the post-backward hook has issued.
  void ViewGradients(const Instruction& bound, const InstructionList& hook);
  // They are dropped, of a unit or of all (-1).
  void Zero(UnitId unit);

 private:
  const Buffer& BufferOf(BufferId id) const { return plan_.buffers[static_cast<std::size_t>(id)]; }
  std::int32_t* BlockOf(BufferId id, std::int32_t parameter);
  bool TakeMade(BufferId id, std::size_t part, std::vector<std::int32_t>& parts);

  struct Arriving {
    std::int32_t block = -1;
    std::size_t gradient = 0;  // which of the segment's
    std::int32_t behind = -1;  // an entry
  };
  void Arrive(std::int32_t entry);
  // The block becomes, by its size, one of the segment's gradients that do not stay: which. Their number:
  // none.
  std::size_t NameArriving(std::int32_t block);

  const Plan& plan_;
  BufferMemory& buffers_;
  LiveBlocks& blocks_;
  std::vector<std::vector<BufferId>> buffers_of_;  // by unit
  std::vector<std::int32_t> made_;                 // blocks, of the segment that runs
  const bool autograd_adds_up_;
  const Segment* segment_ = nullptr;       // that runs
  std::vector<GradientArrival> arrivals_;  // by gradient of the segment, where autograd adds up
  std::vector<bool> arrived_;              // ... a block is it
  std::vector<Arriving> arriving_;
  bool views_gradients_ = false;    // original parameters, of flat units
  std::vector<bool> has_gradient_;  // by unit: its original parameters have one
};

}  // namespace shardplan::internal
