// SPDX-License-Identifier: Apache-2.0
// Effects of segments on memory, read from a plan once: most of a history.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "memory/categories.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// The effect of an entry of a segment on memory.
struct ModelAction {
  enum Kind : std::uint8_t { kMakes, kMakesGrad, kDrops, kRuns };
  Bytes bytes;
  StorageId storage = -1;
  std::int32_t entry = -1;
  std::int32_t category = -1;
  Kind kind = kMakes;
};

// Segments are begun, and their entries added, in order.
class ModelActions {
 public:
  void BeginSegment() { first_of_.push_back(actions_.size()); }
  void Add(const SegmentEntry& entry, std::int32_t at) {
    if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
      Note(born->storage, born->size_bytes);
      const bool grad = born->role == StorageRole::kParameterGrad;
      actions_.push_back({born->size_bytes, born->storage, at, CategoryOf(born->role),
                          grad ? ModelAction::kMakesGrad : ModelAction::kMakes});
    } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
      actions_.push_back({{}, dead->storage, at, -1, ModelAction::kDrops});
    } else {
      actions_.push_back({{}, -1, at, -1, ModelAction::kRuns});
    }
  }

  // The actions of a segment: [first, end).
  const ModelAction* First(std::size_t segment) const { return actions_.data() + first_of_[segment]; }
  const ModelAction* End(std::size_t segment) const {
    return segment + 1 < first_of_.size() ? First(segment + 1) : actions_.data() + actions_.size();
  }
  // By storage, of those that segments make.
  const std::vector<Bytes>& storage_bytes() const { return storage_bytes_; }

 private:
  void Note(StorageId storage, Bytes bytes) {
    if (storage < 0) return;
    const auto index = static_cast<std::size_t>(storage);
    if (index >= storage_bytes_.size()) storage_bytes_.resize(index + 1);
    storage_bytes_[index] = bytes;
  }

  std::vector<ModelAction> actions_;
  std::vector<std::size_t> first_of_;  // by segment
  std::vector<Bytes> storage_bytes_;
};

// `operators`: those are actions, too (kRuns).
inline ModelActions ModelActionsOf(const Plan& plan, bool operators) {
  ModelActions actions;
  for (const Segment& segment : plan.segments) {
    actions.BeginSegment();
    for (std::size_t e = 0; e < segment.entries.size(); ++e) {
      const SegmentEntry& entry = segment.entries[e];
      if (std::holds_alternative<CollectiveWaitEvent>(entry)) continue;
      if (operators || !std::holds_alternative<OperatorEvent>(entry))
        actions.Add(entry, static_cast<std::int32_t>(e));
    }
  }
  return actions;
}

}  // namespace shardplan::internal
