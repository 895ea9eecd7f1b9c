// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/free_event_queue.h"

#include <algorithm>
#include <string>

namespace shardplan::fsdp1 {
namespace {

// _max_num_inflight_all_gathers
constexpr std::size_t kMaxInflightAllGathers = 2;

}  // namespace

EventId FreeEventQueue::NewEvent(ProgramBuilder& builder, std::string name) const {
  while (std::ranges::find(queue_, builder.Event(name)) != queue_.end()) name += ".again";
  return builder.Event(name);
}

void FreeEventQueue::Enqueue(EventId free_event) { queue_.push_back(free_event); }

std::optional<EventId> FreeEventQueue::DequeueIfNeeded() {
  if (queue_.size() < kMaxInflightAllGathers) return std::nullopt;
  const EventId oldest = queue_.front();
  queue_.pop_front();
  return oldest;
}

}  // namespace shardplan::fsdp1
