// SPDX-License-Identifier: Apache-2.0
#include "memory/gradient_arrivals.h"

#include <algorithm>
#include <variant>

#include "memory/kernel_memory.h"
#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan::internal {
namespace {

bool HasGradient(const Plan& plan, BufferId id, const SegmentGrad& grad, BufferRole role) {
  if (id < 0 || id >= std::ssize(plan.buffers)) return false;
  const Buffer& buffer = plan.buffers[static_cast<std::size_t>(id)];
  return buffer.role == role && buffer.unit == grad.unit &&
         (buffer.parameters.empty() ||
          std::ranges::find(buffer.parameters, grad.parameter) != buffer.parameters.end());
}

// nullptr: the entry is no operator.
const OperatorEvent* OperatorAt(const Segment& segment, std::size_t entry) {
  return entry < segment.entries.size() ? std::get_if<OperatorEvent>(&segment.entries[entry]) : nullptr;
}

bool IsGradient(const SegmentEntry& entry) {
  const auto* made = std::get_if<AllocateEvent>(&entry);
  return made != nullptr && made->role == StorageRole::kParameterGrad;
}

bool HaveCommon(const std::vector<StorageId>& some, const std::vector<StorageId>& others) {
  return std::ranges::any_of(some, [&](StorageId s) { return std::ranges::find(others, s) != others.end(); });
}

// The next operator behind the entry, where it is only allocated for between; else the number of entries.
std::size_t NextOperator(const Segment& segment, std::size_t entry) {
  do {
    ++entry;
  } while (entry < segment.entries.size() && std::holds_alternative<AllocateEvent>(segment.entries[entry]));
  return OperatorAt(segment, entry) == nullptr ? segment.entries.size() : entry;
}

// The last operator of the autograd node of which the product at `op` is one: behind a weight's gradient come
// the input's, and the sum that is the bias's. All read the gradient of the output.
std::size_t EndOfNode(const Segment& segment, std::size_t op) {
  const OperatorEvent& product = *OperatorAt(segment, op);
  bool has_input = false, has_bias = false;
  for (std::size_t last = op;;) {
    const std::size_t next = NextOperator(segment, last);
    const OperatorEvent* more = OperatorAt(segment, next);
    if (more == nullptr || !HaveCommon(product.reads, more->reads)) return last;
    const bool makes_gradient = IsGradient(segment.entries[last + 1]);
    bool& has = makes_gradient ? has_bias : has_input;
    const bool belongs = makes_gradient ? more->name == "aten.sum" : UsesCublas(more->name);
    if (!belongs || has) return last;
    has = true;
    last = next;
  }
}

std::size_t BehindFrees(const Segment& segment, std::size_t entry) {
  while (entry + 1 < segment.entries.size() && std::holds_alternative<FreeEvent>(segment.entries[entry + 1]))
    ++entry;
  return entry;
}

// The engine adds the gradient of an input to what other nodes have sent there as soon as it has it.
bool IsSumOfEngine(const OperatorEvent* op, const Segment& segment, std::size_t first, std::size_t last) {
  if (op == nullptr || (op->name != "aten.add" && op->name != "aten.add_")) return false;
  for (std::size_t entry = first; entry <= last; ++entry) {
    const OperatorEvent* made = OperatorAt(segment, entry);
    if (made != nullptr && HaveCommon(made->writes, op->reads)) return true;
  }
  return false;
}

}  // namespace

bool AutogradAddsUp(const Plan& plan) {
  if (!RulesOf(plan.strategy).gradients_stay_as_made) return false;
  return std::ranges::any_of(plan.buffers, [&](const Buffer& buffer) {
    return buffer.role == BufferRole::kGradUnshardedAccumulated && buffer.unit >= 0 &&
           buffer.unit < std::ssize(plan.units) &&
           plan.units[static_cast<std::size_t>(buffer.unit)].layout == LayoutKind::kPerParameter;
  });
}

std::vector<GradientArrival> ArrivalsOf(const Plan& plan, const Segment& segment, const MemoryPoint& at) {
  std::vector<GradientArrival> arrivals(segment.grads.size());
  std::vector<bool> found(segment.grads.size(), false);
  auto left = std::ssize(segment.grads);
  const auto look_at = [&](const Instruction& i) {
    for (std::size_t g = 0; g < segment.grads.size(); ++g) {
      const SegmentGrad& grad = segment.grads[g];
      if (found[g] || !HasGradient(plan, i.src, grad, BufferRole::kGradUnsharded)) continue;
      found[g] = true;
      --left;
      const bool adds = i.kind == InstructionKind::kGradAccumulate;
      if ((!adds && i.kind != InstructionKind::kGradCast) ||
          !HasGradient(plan, i.dst, grad, BufferRole::kGradUnshardedAccumulated) ||
          plan.buffers[static_cast<std::size_t>(i.src)].dtype ==
              plan.buffers[static_cast<std::size_t>(i.dst)].dtype)
        continue;
      arrivals[g] = {adds ? GradientArrival::kIsAdded : GradientArrival::kIsWidened, i.dst};
    }
  };
  const std::vector<Trigger>& triggers = plan.steps[static_cast<std::size_t>(at.step)].triggers;
  for (auto t = static_cast<std::size_t>(at.trigger); t < triggers.size() && left > 0; ++t) {
    const bool here = t == static_cast<std::size_t>(at.trigger);
    for (std::size_t i = here ? static_cast<std::size_t>(at.instruction) + 1 : 0;
         i < triggers[t].instructions.size() && left > 0; ++i) {
      look_at(triggers[t].instructions[i]);
    }
  }
  return arrivals;
}

GradientPlaces PlacesOf(const Segment& segment, std::size_t op) {
  const OperatorEvent* maker = OperatorAt(segment, op);
  const auto at = static_cast<std::int32_t>(op);
  if (maker == nullptr) return {at, at};
  const bool product = UsesCublas(maker->name);
  const std::size_t last = product ? EndOfNode(segment, op) : op;
  std::size_t behind = BehindFrees(segment, last);
  const std::size_t next = NextOperator(segment, behind);
  if (IsSumOfEngine(OperatorAt(segment, next), segment, op, last)) behind = BehindFrees(segment, next);
  const auto added = static_cast<std::int32_t>(behind);
  return {product ? added : at, added};
}

}  // namespace shardplan::internal
