// The actions of a plan's memory as they come, without keeping them: what a profile needs of a history.
#pragma once

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"

namespace shardplan::internal {

class MemoryActions {
 public:
  virtual ~MemoryActions() = default;
  // An allocation or a free of `block`. In host order; steps ascend behind BeginRecorded.
  virtual void Act(const MemoryBlock& block, bool frees, const MemoryPoint& at) = 0;
  // What came so far was there before the steps (MemoryHistory::first_recorded).
  virtual void BeginRecorded() = 0;
};

void ForEachMemoryAction(const Plan& plan, const MemoryHistoryOptions& options, MemoryActions& actions);

}  // namespace shardplan::internal
