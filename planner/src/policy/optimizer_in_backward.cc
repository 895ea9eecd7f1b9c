// SPDX-License-Identifier: Apache-2.0
// The optimiser in the backward: one of its own for every parameter.
#include "policy/optimizer_memory.h"
#include "units/layout.h"

namespace shardplan {

void OptimizerMemory::StepParameters(UnitId id, StreamId stream, std::vector<std::int32_t> parameters) {
  if (optimizer_.kind == OptimizerKind::kNone) return;
  const Unit& unit = partition_.units[id].unit;
  const SteppedUnit stepped{.unit = id, .parameters = std::move(parameters)};
  builder_.SetReason("optimizer_in_backward");
  const std::vector<OptimizerShard> shards = ShardsOf(stepped);
  AllocateStates(id, shards, stream);
  builder_.SetUnit(id);
  // Temporaries as in Step(), of one parameter at a time: those of the largest.
  std::vector<Bytes> most;
  for (const OptimizerShard& shard : shards) {
    std::vector<Bytes> parts = OptimizerTemporaries(optimizer_, {shard});
    if (Sum(most) < Sum(parts)) most = std::move(parts);
  }
  BufferId buffer = -1;
  if (!most.empty()) {
    buffer = builder_.UnitBuffer(id, BufferRole::kOptimizerTemp, unit.orig_dtype, std::move(most), {}, {},
                                 MemoryOf(id));
    builder_.Allocate(buffer, stream);
  }
  for (const std::int32_t p : stepped.parameters) {
    builder_.Emit(InstructionKind::kOptimizerStep, stream).parameter = p;
  }
  if (buffer >= 0) builder_.Free(buffer, stream);
}

}  // namespace shardplan
