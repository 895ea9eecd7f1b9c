// SPDX-License-Identifier: Apache-2.0
// The rate limiter (_limiter_utils.py).
//
// [Note: record_stream]
// FSDP1 allocates on side streams and hands memory back by record_stream: the allocator holds a block until
// the recorded streams have passed. Frees carry those streams in safe_after. This queue bounds the memory
// then: the host waits for the event of an earlier free before it issues an all-gather.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "shardplan/planner/program_builder.h"

namespace shardplan::fsdp1 {

class FreeEventQueue {
 public:
  // An event for the next free: of that name, or of another while one of that name is pending.
  EventId NewEvent(ProgramBuilder& builder, std::string name) const;
  void Enqueue(EventId free_event);
  // The oldest, when the limit of pending frees is reached.
  std::optional<EventId> DequeueIfNeeded();

  bool operator==(const FreeEventQueue&) const = default;

 private:
  std::deque<EventId> queue_;  // _queue: of frees that no all-gather has waited for, the oldest first
};

}  // namespace shardplan::fsdp1
