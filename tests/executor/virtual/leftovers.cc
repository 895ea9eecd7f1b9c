// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/leftovers.h"

#include <algorithm>
#include <cstddef>

namespace shardplan::test {
namespace {

using enum InstructionKind;

class Walk {
 public:
  explicit Walk(const Plan& plan) : plan_(plan) {}

  void Step(const PlanStep& step) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) Pass(i);
    }
  }
  const std::set<BufferId>& alive() const { return alive_; }
  std::set<BufferId> used;

 private:
  bool IsBuffer(BufferId id) const { return id >= 0 && id < std::ssize(plan_.buffers); }
  const Buffer& At(BufferId id) const { return plan_.buffers[static_cast<std::size_t>(id)]; }

  void Pass(const Instruction& i) {
    for (const BufferId id : {i.src, i.dst}) {
      if (IsBuffer(id)) used.insert(id);
    }
    if (i.kind == kAllocate && IsBuffer(i.dst)) alive_.insert(i.dst);
    if (i.kind == kFree && i.parts.empty()) alive_.erase(i.src);
    const bool names_again = i.kind == kGradCast && IsBuffer(i.src) && IsBuffer(i.dst) &&
                             At(i.src).dtype == At(i.dst).dtype && At(i.src).memory == At(i.dst).memory;
    if (names_again) alive_.insert(i.dst);
    if (i.kind == kZeroGrad) {
      std::erase_if(alive_, [&](BufferId id) {
        const bool reduced = At(id).role == BufferRole::kGradSharded || At(id).role == BufferRole::kGradHost;
        return reduced && (i.unit < 0 || At(id).unit == i.unit);
      });
    }
    if (i.kind == kCompute && i.segment >= 0 && i.segment < std::ssize(plan_.segments)) {
      for (const SegmentGrad& grad : plan_.segments[static_cast<std::size_t>(i.segment)].grads) Make(grad);
    }
  }

  void Make(const SegmentGrad& grad) {
    BufferId found = -1;
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      const Buffer& buffer = plan_.buffers[b];
      if (buffer.role != BufferRole::kGradUnsharded || buffer.unit != grad.unit) continue;
      if (std::ranges::count(buffer.parameters, grad.parameter) == 0) continue;
      if (found >= 0) return;
      found = static_cast<BufferId>(b);
    }
    if (found < 0) return;
    alive_.insert(found);
    used.insert(found);
  }

  const Plan& plan_;
  std::set<BufferId> alive_;
};

}  // namespace

std::set<BufferId> LeftOver(const Plan& plan) {
  const auto steady = static_cast<std::size_t>(plan.steady_step);
  Walk walk(plan);
  for (std::size_t s = 0; s < steady; ++s) walk.Step(plan.steps[s]);
  const std::set<BufferId> before = walk.alive();
  walk.used.clear();
  for (std::size_t s = steady; s < plan.steps.size(); ++s) walk.Step(plan.steps[s]);
  std::set<BufferId> left;
  for (const BufferId id : walk.alive()) {
    const Buffer& buffer = plan.buffers[static_cast<std::size_t>(id)];
    if (buffer.persistent || buffer.role == BufferRole::kOptimizerState) continue;
    if (!before.contains(id) || !walk.used.contains(id)) left.insert(id);
  }
  return left;
}

}  // namespace shardplan::test
