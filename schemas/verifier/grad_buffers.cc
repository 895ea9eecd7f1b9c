// SPDX-License-Identifier: Apache-2.0
#include "verifier/grad_buffers.h"

#include <algorithm>
#include <ranges>

namespace shardplan::verifier {

GradBuffers::GradBuffers(const Plan& plan) : plan_(plan), by_unit_(plan.units.size()) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    if (buffer.role == BufferRole::kGradUnsharded && buffer.unit >= 0) {
      by_unit_[buffer.unit].push_back(static_cast<BufferId>(i));
    }
  }
  const bool clear = std::ranges::all_of(by_unit_, [](const auto& buffers) { return buffers.size() < 2; });
  if (clear || plan.steps.empty()) return;
  for (const Unit& unit : plan.units) next_taken_.emplace_back(unit.parameters.size(), -1);
  const std::int32_t steps = static_cast<std::int32_t>(plan.steps.size());
  // After the last step comes the steady one: what that takes first is known after reading it once.
  for (std::int32_t step = steps; step-- > plan.steady_step;) ReadBackwards(step);
  for (std::int32_t step = steps; step-- > 0;) ReadBackwards(step);
}

bool GradBuffers::Holds(BufferId buffer, std::int32_t parameter) const {
  const std::vector<std::int32_t>& held = plan_.buffers[buffer].parameters;
  return held.empty() || std::ranges::binary_search(held, parameter);
}

void GradBuffers::ReadBackwards(std::int32_t step) {
  const std::vector<Trigger>& triggers = plan_.steps[step].triggers;
  for (std::size_t t = triggers.size(); t-- > 0;) {
    const std::vector<Instruction>& instructions = triggers[t].instructions;
    for (std::size_t k = instructions.size(); k-- > 0;) {
      const Instruction& i = instructions[k];
      const bool is_segment = i.segment >= 0 && i.segment < std::ssize(plan_.segments);
      if (i.kind == InstructionKind::kCompute && is_segment) {
        const Position at = {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(k)};
        for (const SegmentGrad& grad : plan_.segments[i.segment].grads) {
          if (by_unit_[grad.unit].size() < 2) continue;
          resolved_[{at, {grad.unit, grad.parameter}}] = next_taken_[grad.unit][grad.parameter];
        }
      } else if (i.kind != InstructionKind::kFree && i.src >= 0 && i.src < std::ssize(plan_.buffers)) {
        const Buffer& buffer = plan_.buffers[i.src];
        if (buffer.role != BufferRole::kGradUnsharded || buffer.unit < 0) continue;
        std::vector<BufferId>& next = next_taken_[buffer.unit];
        for (std::int32_t p = 0; p < std::ssize(next); ++p) {
          if (Holds(i.src, p)) next[p] = i.src;
        }
      }
    }
  }
}

BufferId GradBuffers::Find(const SegmentGrad& grad, Position at) const {
  if (by_unit_[grad.unit].size() > 1) {
    const auto found = resolved_.find({at, {grad.unit, grad.parameter}});
    if (found != resolved_.end() && found->second >= 0) return found->second;
  }
  for (const BufferId buffer : by_unit_[grad.unit]) {
    if (Holds(buffer, grad.parameter)) return buffer;
  }
  return -1;
}

}  // namespace shardplan::verifier
