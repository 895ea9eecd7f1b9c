// The actions of a plan's memory as they come, without keeping them: what a profile needs of a history.
#pragma once

#include <cstdint>

#include "memory/model_actions.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan::internal {

// What the model allocates inside a segment and no buffer stands for: most of a history.
struct ModelMemory {
  Bytes requested_bytes;
  std::int32_t category = -1;  // -1: not alive
  StreamId stream = 0;
};

class MemoryActions {
 public:
  virtual ~MemoryActions() = default;
  // An allocation or a free of `block`, or of the model's. In host order; steps ascend behind BeginRecorded.
  virtual void Act(const MemoryBlock& block, bool frees, const MemoryPoint& at) = 0;
  virtual void ActOfModel(const ModelMemory& memory, bool frees, const MemoryPoint& at) = 0;
  // What came so far was there before the steps (MemoryHistory::first_recorded).
  virtual void BeginRecorded() = 0;
};

// `model`: ModelActionsOf the plan, without operators, where somebody has it already.
void ForEachMemoryAction(const Plan& plan, const MemoryHistoryOptions& options, MemoryActions& actions,
                         const ModelActions* model = nullptr);

// shardplan::ProfileMemory with such a `model`; null: it is made.
MemoryProfile ProfileMemory(const Plan& plan, const MemoryOptions& options, const ModelActions* model);

}  // namespace shardplan::internal
