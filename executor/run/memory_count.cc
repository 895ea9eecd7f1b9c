#include "memory_count.h"

#include "shardplan/schemas/alive_buffers.h"

namespace shardplan::run {

MemoryCount::MemoryCount(const Plan& plan) : plan_(plan), memory_of_(plan.buffers.size(), -1) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].persistent) Allocate(static_cast<BufferId>(b));
  }
}

void MemoryCount::Allocate(BufferId buffer) {
  if (memory_of_[buffer] >= 0) return;
  memory_of_[buffer] = static_cast<std::int32_t>(names_.size());
  names_.push_back(1);
  const bool on_device = plan_.buffers[buffer].memory == MemoryKind::kDevice;
  size_bytes_.push_back(on_device ? RoundedSizeBytes(plan_.buffers[buffer], kGranularityBytes) : Bytes{});
  Change(size_bytes_.back());
}

void MemoryCount::Free(BufferId buffer) {
  const std::int32_t memory = memory_of_[buffer];
  if (memory < 0) return;
  memory_of_[buffer] = -1;
  if (--names_[memory] == 0) Change({-size_bytes_[memory].value});
}

void MemoryCount::FreeParts(BufferId buffer, const std::vector<std::int32_t>& parts) {
  const std::int32_t memory = memory_of_[buffer];
  if (memory < 0 || plan_.buffers[buffer].memory != MemoryKind::kDevice) return;
  for (const std::int32_t part : parts) {
    const Bytes gone = plan_.buffers[buffer].parts_bytes[part];
    size_bytes_[memory] -= Rounded(gone);
    Remove(gone);
  }
}

void MemoryCount::Alias(BufferId buffer, BufferId owner) {
  if (memory_of_[buffer] >= 0 || memory_of_[owner] < 0) return;
  memory_of_[buffer] = memory_of_[owner];
  ++names_[memory_of_[owner]];
}

void MemoryCount::On(const Instruction& i) {
  if (i.kind == InstructionKind::kAllocate) Allocate(i.dst);
  if (i.kind == InstructionKind::kFree) i.parts.empty() ? Free(i.src) : FreeParts(i.src, i.parts);
  if (i.kind == InstructionKind::kGradCast && MakesView(plan_, i, memory_of_[i.dst] >= 0))
    Alias(i.dst, i.src);
  if (i.kind != InstructionKind::kZeroGrad) return;
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (ZeroGradTakes(i.unit, buffer) && !buffer.persistent) Free(static_cast<BufferId>(b));
  }
}

}  // namespace shardplan::run
