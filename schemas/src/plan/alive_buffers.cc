// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/alive_buffers.h"

#include <iterator>

#include "shardplan/schemas/instruction_set.h"

namespace shardplan {

bool MakesView(const Plan& plan, const Instruction& grad_cast, bool dst_is_alive) {
  const Buffer& src = plan.buffers[static_cast<std::size_t>(grad_cast.src)];
  const Buffer& dst = plan.buffers[static_cast<std::size_t>(grad_cast.dst)];
  return !dst_is_alive && src.dtype == dst.dtype && src.memory == dst.memory;
}

bool ZeroGradTakes(UnitId unit, const Buffer& buffer) {
  return IsFinalGradient(buffer.role) && (unit < 0 || buffer.unit == unit);
}

bool IsOneAllocation(const Buffer& buffer) {
  const BufferRoleDescription& is = DescriptionOf(buffer.role);
  const bool scattered = is.reduction == RoleReduction::kInner || is.reduction == RoleReduction::kPartial ||
                         is.reduction == RoleReduction::kReduced;
  return scattered && is.memory == RoleMemory::kDevice && !buffer.parts_bytes.empty();
}

AliveBuffers::AliveBuffers(const Plan& plan) : plan_(plan), alive_(plan.buffers.size()) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) alive_[b] = plan.buffers[b].persistent;
}

bool AliveBuffers::IsAlive(BufferId buffer) const {
  return buffer >= 0 && buffer < std::ssize(alive_) && alive_[static_cast<std::size_t>(buffer)];
}

void AliveBuffers::Set(BufferId buffer, bool alive) {
  if (buffer >= 0 && buffer < std::ssize(alive_)) alive_[static_cast<std::size_t>(buffer)] = alive;
}

bool AliveBuffers::MakesView(const Instruction& instruction) const {
  const auto exists = [&](BufferId buffer) { return buffer >= 0 && buffer < std::ssize(plan_.buffers); };
  return DescriptionOf(instruction.kind).lifetime == LifetimeEffect::kView && exists(instruction.src) &&
         exists(instruction.dst) && shardplan::MakesView(plan_, instruction, IsAlive(instruction.dst));
}

void AliveBuffers::Pass(const Instruction& instruction) {
  switch (DescriptionOf(instruction.kind).lifetime) {
    case LifetimeEffect::kNone:
      break;
    case LifetimeEffect::kBegins:
      Set(instruction.dst, true);
      break;
    case LifetimeEffect::kEnds:
      if (instruction.parts.empty()) Set(instruction.src, false);
      break;
    case LifetimeEffect::kView:
      if (MakesView(instruction)) Set(instruction.dst, true);
      break;
    case LifetimeEffect::kDrops:
      for (std::size_t b = 0; b < alive_.size(); ++b) {
        const Buffer& buffer = plan_.buffers[b];
        if (ZeroGradTakes(instruction.unit, buffer) && !buffer.persistent) alive_[b] = false;
      }
      break;
  }
}

}  // namespace shardplan
