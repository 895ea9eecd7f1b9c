// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/alive_buffers.h"

#include <iterator>

namespace shardplan {

bool MakesView(const Plan& plan, const Instruction& grad_cast, bool dst_is_alive) {
  const Buffer& src = plan.buffers[static_cast<std::size_t>(grad_cast.src)];
  const Buffer& dst = plan.buffers[static_cast<std::size_t>(grad_cast.dst)];
  return !dst_is_alive && src.dtype == dst.dtype && src.memory == dst.memory;
}

bool IsFinalGradient(BufferRole role) {
  return role == BufferRole::kGradSharded || role == BufferRole::kGradHost;
}

bool IsPartlyReduced(BufferRole role) {
  return role == BufferRole::kPartialReduceOutput || role == BufferRole::kInnerReduceAccumulated;
}

bool ZeroGradTakes(UnitId unit, const Buffer& buffer) {
  return IsFinalGradient(buffer.role) && (unit < 0 || buffer.unit == unit);
}

bool IsOneAllocation(const Buffer& buffer) {
  return !buffer.parts_bytes.empty() &&
         (buffer.role == BufferRole::kGradSharded || buffer.role == BufferRole::kReduceScatterOutput ||
          buffer.role == BufferRole::kInnerReduceOutput || IsPartlyReduced(buffer.role));
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
  return instruction.kind == InstructionKind::kGradCast && exists(instruction.src) &&
         exists(instruction.dst) && shardplan::MakesView(plan_, instruction, IsAlive(instruction.dst));
}

void AliveBuffers::Pass(const Instruction& instruction) {
  switch (instruction.kind) {
    case InstructionKind::kAllocate:
      Set(instruction.dst, true);
      break;
    case InstructionKind::kFree:
      if (instruction.parts.empty()) Set(instruction.src, false);
      break;
    case InstructionKind::kGradCast:
      if (MakesView(instruction)) Set(instruction.dst, true);
      break;
    case InstructionKind::kZeroGrad:
      for (std::size_t b = 0; b < alive_.size(); ++b) {
        const Buffer& buffer = plan_.buffers[b];
        if (ZeroGradTakes(instruction.unit, buffer) && !buffer.persistent) alive_[b] = false;
      }
      break;
    case InstructionKind::kCompute:
    case InstructionKind::kBindUnsharded:
    case InstructionKind::kBindSharded:
    case InstructionKind::kCopyIn:
    case InstructionKind::kAllGather:
    case InstructionKind::kCopyOut:
    case InstructionKind::kReshardPostForward:
    case InstructionKind::kGradCopyIn:
    case InstructionKind::kGradScale:
    case InstructionKind::kGradZero:
    case InstructionKind::kReduceScatter:
    case InstructionKind::kAllReduce:
    case InstructionKind::kGradAccumulate:
    case InstructionKind::kCopyToHost:
    case InstructionKind::kCopyToDevice:
    case InstructionKind::kRecord:
    case InstructionKind::kWait:
    case InstructionKind::kHostWait:
    case InstructionKind::kOptimizerStep:
      break;
  }
}

}  // namespace shardplan
