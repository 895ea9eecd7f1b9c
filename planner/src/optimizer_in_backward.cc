// The optimiser in the backward: one of its own for every parameter.
#include <algorithm>

#include "layout.h"
#include "optimizer_memory.h"

namespace shardplan {

void OptimizerMemory::StepParameters(UnitId id, StreamId stream) {
  if (optimizer_.kind == OptimizerKind::kNone) return;
  const Unit& unit = partition_.units[id].unit;
  builder_.SetReason("optimizer_in_backward");
  AllocateStates(id, stream);
  builder_.SetUnit(id);
  // Temporaries as in Step(), of one parameter at a time. Ranks hold different pieces of a flat parameter:
  // the largest that one may hold.
  const bool temporary = optimizer_.kind == OptimizerKind::kAdamW &&
                         optimizer_.implementation != OptimizerImplementation::kFused;
  const std::vector<Bytes> shards = TrainableShards(id);
  std::int64_t most = 0;
  for (const UnitParameter& parameter : unit.parameters) {
    if (parameter.requires_grad) most = std::max(most, Numel(parameter) * SizeBytes(unit.orig_dtype));
  }
  if (!shards.empty()) most = std::min(most, std::max_element(shards.begin(), shards.end())->value);
  BufferId buffer = -1;
  if (temporary) {
    const std::size_t tensors = optimizer_.implementation == OptimizerImplementation::kForLoop ? 2 : 1;
    buffer = builder_.UnitBuffer(id, BufferRole::kOptimizerTemp, unit.orig_dtype,
                                 std::vector<Bytes>(tensors, Bytes{most}), {}, {}, MemoryOf(id));
    builder_.Allocate(buffer, stream);
  }
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    if (!unit.parameters[p].requires_grad) continue;
    builder_.Emit(InstructionKind::kOptimizerStep, stream).parameter = static_cast<std::int32_t>(p);
  }
  if (buffer >= 0) builder_.Free(buffer, stream);
}

}  // namespace shardplan
