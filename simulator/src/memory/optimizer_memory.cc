// SPDX-License-Identifier: Apache-2.0
#include "memory/optimizer_memory.h"

#include <algorithm>
#include <utility>

#include "allocator/sizes.h"
#include "memory/categories.h"
#include "shardplan/schemas/buffer_roles.h"

namespace shardplan::internal {

OptimizerMemory::OptimizerMemory(const Plan& plan, bool on_device, LiveBlocks& blocks)
    : blocks_(blocks), optimizer_(plan), on_device_(on_device), states_made_(plan.units.size() + 1) {
  plan_says_it_ =
      std::ranges::any_of(plan.buffers, [](const Buffer& buffer) { return IsOptimizerMemory(buffer.role); });
}

bool OptimizerMemory::Plays(const Buffer& buffer) {
  if (buffer.role != BufferRole::kOptimizerTemp || buffer.unit >= 0) return false;
  if (!temporaries_) temporaries_ = optimizer_.TensorSteps(on_device_);
  Bytes now, most, whole;
  std::vector<Bytes> taken;
  for (const OptimizerTensorStep& step : *temporaries_) {
    if (step.dropped < 0) {
      taken.push_back(InBlocks(step.taken));
      now += taken.back();
    } else {
      now -= taken[static_cast<std::size_t>(step.dropped)];
    }
    most = std::max(most, now);
  }
  for (const Bytes part : buffer.parts_bytes) whole += InBlocks(part);
  return most.value > 0 && most == whole;
}

void OptimizerMemory::Play(MemoryBlock block) {
  std::vector<std::int32_t> blocks;
  for (const OptimizerTensorStep& step : *temporaries_) {
    block.requested_bytes = step.taken;
    if (step.dropped < 0) {
      blocks.push_back(blocks_.Allocate(block));
    } else {
      blocks_.Free(std::exchange(blocks[static_cast<std::size_t>(step.dropped)], -1));
    }
  }
  for (const std::int32_t left : blocks) blocks_.Free(left);
}

void OptimizerMemory::Step(UnitId unit) {
  if (plan_says_it_) return;
  MemoryBlock block{.category = CategoryOf(BufferRole::kOptimizerState), .unit = unit};
  std::vector<bool>::reference made = states_made_[static_cast<std::size_t>(unit) + 1];
  if (!made) {
    made = true;
    for (const Bytes tensor : optimizer_.States(unit, on_device_)) {
      block.requested_bytes = tensor;
      blocks_.Allocate(block);
    }
  }
  block.category = CategoryOf(BufferRole::kOptimizerTemp);
  std::vector<std::int32_t> blocks;
  for (const Bytes tensor : optimizer_.Temporaries(unit, on_device_)) {
    block.requested_bytes = tensor;
    blocks.push_back(blocks_.Allocate(block));
  }
  for (const std::int32_t number : blocks) blocks_.Free(number);
}

}  // namespace shardplan::internal
