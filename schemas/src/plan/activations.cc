// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <variant>

#include "shardplan/schemas/alive_buffers.h"

namespace shardplan {

std::vector<std::vector<ActivationTouch>> ActivationsTouched(const Plan& plan) {
  std::vector<std::vector<ActivationTouch>> by_segment(plan.segments.size());
  std::map<StorageId, BufferId> buffer_of;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].role != BufferRole::kActivation) continue;
    for (const StorageId storage : plan.buffers[b].storages) buffer_of[storage] = static_cast<BufferId>(b);
  }
  for (std::size_t s = 0; s < plan.segments.size() && !buffer_of.empty(); ++s) {
    std::vector<ActivationTouch>& touched = by_segment[s];
    const auto touch = [&](StorageId storage) -> ActivationTouch* {
      const auto found = buffer_of.find(storage);
      if (found == buffer_of.end()) return nullptr;
      const auto known = std::ranges::find(touched, found->second, &ActivationTouch::buffer);
      return known != touched.end() ? &*known : &touched.emplace_back(ActivationTouch{found->second, {}, {}});
    };
    for (const SegmentEntry& entry : plan.segments[s].entries) {
      if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
        for (const StorageId storage : op->reads) touch(storage);
        for (const StorageId storage : op->writes) touch(storage);
      } else if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
        if (ActivationTouch* made = touch(born->storage)) made->made.push_back(born->storage);
      } else if (const auto* free = std::get_if<FreeEvent>(&entry)) {
        if (ActivationTouch* freed = touch(free->storage)) freed->freed.push_back(free->storage);
      }
    }
  }
  return by_segment;
}

}  // namespace shardplan
