#include "optimizer_memory.h"

#include <algorithm>

#include "layout.h"
#include "shardplan/simulator/optimizer_temporaries.h"

namespace shardplan {
OptimizerMemory::OptimizerMemory(const Optimizer& optimizer, const Partition& partition,
                                 ProgramBuilder& builder)
    : optimizer_(optimizer),
      partition_(partition),
      builder_(builder),
      has_state_(partition.units.size(), false) {}

std::vector<Bytes> OptimizerMemory::TrainableShards(UnitId id) const {
  const Unit& unit = partition_.units[id].unit;
  const std::int64_t ranks = unit.shard_communicator < 0 ? 1 : partition_.units[id].shard_size;
  std::vector<Bytes> shards = ShardParts(unit, ranks, unit.orig_dtype);
  if (unit.layout == LayoutKind::kFlat) return shards;
  std::vector<Bytes> trainable;
  for (std::size_t p = 0; p < shards.size(); ++p) {
    if (unit.parameters[p].requires_grad) trainable.push_back(shards[p]);
  }
  return trainable;
}

// Offloaded shards are stepped on the host.
MemoryKind OptimizerMemory::MemoryOf(UnitId unit) const {
  return partition_.units[unit].cpu_offload ? MemoryKind::kHost : MemoryKind::kDevice;
}

void OptimizerMemory::AllocateStates(UnitId unit, StreamId stream) {
  const bool adam = optimizer_.kind == OptimizerKind::kAdamW;
  const bool momentum = optimizer_.kind == OptimizerKind::kSgd && optimizer_.momentum;
  if (has_state_[unit] || (!adam && !momentum)) return;
  has_state_[unit] = true;
  // AdamW: exp_avg and exp_avg_sq of every parameter; its step count is a scalar on the host, with the fused
  // kernel on the parameter's device (torch/optim/adam.py, _init_group).
  std::vector<Bytes> parts;
  const bool counts_on_device = adam && optimizer_.implementation == OptimizerImplementation::kFused;
  for (const Bytes shard : TrainableShards(unit)) {
    parts.insert(parts.end(), adam ? 2 : 1, shard);
    if (counts_on_device) parts.push_back(Bytes{SizeBytes(DType::kFloat32)});
  }
  builder_.SetUnit(unit);
  builder_.Allocate(
      builder_.UnitBuffer(unit, BufferRole::kOptimizerState, partition_.units[unit].unit.orig_dtype,
                          std::move(parts), {}, {}, MemoryOf(unit)),
      MemoryOf(unit) == MemoryKind::kDevice ? stream : kHost);
}

void OptimizerMemory::Step(const std::vector<UnitId>& units) {
  builder_.SetReason("optimizer");
  std::vector<Bytes> shards;
  const bool on_host = !units.empty() && std::all_of(units.begin(), units.end(), [&](UnitId unit) {
    return MemoryOf(unit) != MemoryKind::kDevice;
  });
  const StreamId stream = on_host ? kHost : kCompute;
  for (const UnitId unit : units) {
    AllocateStates(unit, kCompute);
    if (!on_host && MemoryOf(unit) != MemoryKind::kDevice) continue;
    const std::vector<Bytes> trainable = TrainableShards(unit);
    shards.insert(shards.end(), trainable.begin(), trainable.end());
  }
  builder_.SetUnit(-1);
  BufferId temporary = -1;
  std::vector<Bytes> parts;
  if (optimizer_.kind == OptimizerKind::kAdamW) parts = AdamWTemporaries(optimizer_.implementation, shards);
  if (!parts.empty()) {
    temporary = builder_.AddBuffer({.name = "optimizer.temp",
                                    .role = BufferRole::kOptimizerTemp,
                                    .dtype = partition_.units[units.front()].unit.orig_dtype,
                                    .parts_bytes = std::move(parts),
                                    .memory = on_host ? MemoryKind::kHost : MemoryKind::kDevice});
    builder_.Allocate(temporary, stream);
  }
  if (optimizer_.kind != OptimizerKind::kNone) builder_.Emit(InstructionKind::kOptimizerStep, stream);
  if (temporary >= 0) builder_.Free(temporary, stream);
}

std::string OptimizerMemory::State() const {
  std::string state;
  for (const bool has : has_state_) state += has ? '1' : '0';
  return state;
}

}  // namespace shardplan
