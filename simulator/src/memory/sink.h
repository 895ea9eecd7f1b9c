// SPDX-License-Identifier: Apache-2.0
// Who is told of the allocations and frees of a plan's memory, one by one, in host order.
#pragma once

#include <cstdint>

#include "memory/model_actions.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan::internal {

// Memory that the model allocates inside a segment and no buffer stands for: most of what happens.
struct ModelMemory {
  Bytes requested_bytes;
  std::int32_t category = -1;  // -1: not alive
  StreamId stream = 0;
  std::int32_t born = -1;  // what the sink called it
};

class MemorySink {
 public:
  virtual ~MemorySink() = default;
  // Returns what the sink calls the allocation: `born`, when it is freed. Steps ascend behind BeginRecorded.
  virtual std::int32_t Allocate(const MemoryBlock& block, const MemoryPoint& at) = 0;
  virtual std::int32_t AllocateForModel(const ModelMemory& memory, UnitId unit, std::int32_t microbatch,
                                        const MemoryPoint& at) = 0;
  // recorded_on is known by now.
  virtual void Free(const MemoryBlock& block, const MemoryPoint& at) = 0;
  virtual void FreeOfModel(const ModelMemory& memory, const MemoryPoint& at) = 0;
  // A block that the model has made turns out to be a buffer's: its unit, buffer and part are others.
  virtual void Rename(const MemoryBlock& /*block*/) {}
  // Everything so far was there before the steps (MemoryHistory::first_recorded). May come again: then all
  // that came so far was.
  virtual void BeginRecorded() = 0;
};

// `model`: ModelActionsOf the plan, without operators, where somebody has it already.
void WalkMemory(const Plan& plan, const MemoryHistoryOptions& options, MemorySink& sink,
                const ModelActions* model = nullptr);

// shardplan::ProfileMemory with such a `model`; null: it is made.
MemoryProfile ProfileMemory(const Plan& plan, const MemoryOptions& options, const ModelActions* model);

}  // namespace shardplan::internal
