// The optimiser's memory and its step, as torch.optim allocates it.
#pragma once

#include <vector>

#include "program_builder.h"

namespace shardplan {

class OptimizerMemory {
 public:
  OptimizerMemory(const Optimizer& optimizer, const Partition& partition, ProgramBuilder& builder);

  // Emits the step: states of the units that have a gradient and none yet, temporaries, the step itself.
  // `units`: those with a sharded gradient now, ascending.
  void Step(const std::vector<UnitId>& units);
  // Emits a step in the backward of every trainable parameter of `unit` by an optimiser of its own, on
  // `stream` (-1: on the host).
  void StepParameters(UnitId unit, StreamId stream);
  std::string State() const;

 private:
  void AllocateStates(UnitId unit, StreamId stream);
  std::vector<Bytes> TrainableShards(UnitId unit) const;
  MemoryKind MemoryOf(UnitId unit) const;

  Optimizer optimizer_;
  const Partition& partition_;
  ProgramBuilder& builder_;
  std::vector<bool> has_state_;
};

}  // namespace shardplan
