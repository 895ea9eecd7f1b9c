// SPDX-License-Identifier: Apache-2.0
#include "order/group_forwards.h"

#include <algorithm>
#include <functional>

namespace shardplan {

GroupForwards::GroupForwards(const Partition& partition, const PyTorchRules& rules)
    : partition_(&partition),
      one_by_one_(rules.members_enter_one_by_one),
      to_run_(partition.units.size()),
      in_forward_(partition.units.size(), false) {}

GroupForwards::Entered GroupForwards::Enter(UnitId unit) {
  const std::vector<ModuleId>& modules = partition_->units[unit].modules;
  if (!one_by_one_) {
    if (modules.size() > 1 && !to_run_[unit].empty()) return {};
    to_run_[unit].insert(modules.begin(), modules.end());
    return {.runs_hook = true, .begins = true, .registers_inputs = true};
  }
  if (root_ < 0) root_ = unit;
  const bool begins = modules.size() == 1 || to_run_[unit].empty();
  if (to_run_[unit].empty()) to_run_[unit].insert(modules.begin(), modules.end());
  const bool registers = !in_forward_[unit];
  in_forward_[unit] = true;
  return {.runs_hook = true, .begins = begins, .registers_inputs = registers};
}

bool GroupForwards::Leave(UnitId unit, ModuleId module) {
  const bool awaited = to_run_[unit].erase(module) > 0;
  if (!to_run_[unit].empty()) return false;
  if (!one_by_one_) return true;
  if (partition_->units[unit].modules.size() > 1 && !awaited) return false;
  in_forward_[unit] = false;
  return true;
}

std::vector<UnitId> GroupForwards::Complete(UnitId unit) {
  std::vector<UnitId> completed;
  if (!one_by_one_ || root_ != unit) return completed;
  root_ = -1;
  for (std::size_t u = 0; u < to_run_.size(); ++u) {
    const auto other = static_cast<UnitId>(u);
    if (other == unit || to_run_[u].empty() || partition_->units[u].modules.size() == 1) continue;
    completed.push_back(other);
    to_run_[u].clear();
    in_forward_[u] = false;
  }
  // FSDPStateContext.all_states backwards: of named_modules().
  std::ranges::sort(completed, std::greater{},
                    [&](UnitId u) { return std::ranges::min(partition_->units[u].modules); });
  return completed;
}

void GroupForwards::PreBackward(UnitId unit) {
  in_forward_[unit] = false;
  final_callback_queued_ = true;
}

void GroupForwards::PostBackward(UnitId unit) { in_forward_[unit] = false; }

void GroupForwards::BackwardEnd(bool is_last_backward) {
  if (one_by_one_ ? !final_callback_queued_ : !is_last_backward) return;
  Reset();
}

void GroupForwards::Reset() {
  for (std::set<ModuleId>& modules : to_run_) modules.clear();
  in_forward_.assign(in_forward_.size(), false);
  root_ = -1;
  final_callback_queued_ = false;
}

}  // namespace shardplan
