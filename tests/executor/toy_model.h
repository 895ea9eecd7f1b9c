// A model made of integers, to find out whether a replay moved every number to its place.
//
// A forward segment folds the unsharded parameters it reads into a number h of its rank and micro-batch; a
// backward segment's gradient of element i depends on the parameter's value there, on h, i, and the rank. So
// a wrong element anywhere, at any time, changes the parameters after the step, and NaN stays NaN. All
// numbers are integers small enough to be exact in bfloat16, and gradients are multiples of the number of
// ranks: sums and means are exact in whatever order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardplan/executor/engine.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// Where the model's work runs: hands `work` the first byte of each part of the buffers, in stream order.
using BufferMemory = std::vector<std::vector<std::byte*>>;  // by position in `uses`, by part
class ToyStream {
 public:
  virtual ~ToyStream() = default;
  virtual void Submit(StreamId stream, std::vector<BufferId> uses,
                      std::function<void(const BufferMemory&)> work) = 0;
};

double ToyInitialValue(UnitId unit, std::int32_t parameter, std::int64_t element);

class ToyModel final : public executor::Model {
 public:
  ToyModel(const Plan& plan, std::int64_t rank, ToyStream& stream);

  // Submits the initial values of this rank's shards; once, after the engine is made.
  void SetInitialShards();

  Status Compute(const executor::ComputeCall& call) override;
  Status BindUnsharded(UnitId unit, BufferId buffer) override;
  Status BindSharded(UnitId unit, BufferId) override;
  Status ShardedGradientsReady(UnitId unit, BufferId buffer) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;
  Status ZeroGrad(UnitId unit) override;

 private:
  const Plan& plan_;
  const std::int64_t rank_;
  ToyStream& stream_;
  std::vector<BufferId> bound_;                   // by unit, -1
  std::vector<std::vector<BufferId>> gradients_;  // by unit: sharded gradients of this step
  std::shared_ptr<std::vector<double>> h_;        // by micro-batch
};

// The parameters after `steps` steps, computed on whole parameters without the plan's instructions (only its
// order of segments): by unit, parameter, element.
using ToyParameters = std::vector<std::vector<std::vector<double>>>;
ToyParameters ToyReference(const Plan& plan, std::int64_t steps);

// Compares a rank's shard of a unit with the whole parameters; returns "" or the first difference. `parts`:
// the first byte of each part of the param_sharded buffer.
std::string CompareShard(const Plan& plan, BufferId param_sharded, const std::vector<const std::byte*>& parts,
                         std::int64_t rank, const ToyParameters& expected);

// The param_sharded buffer of each unit.
std::vector<BufferId> ShardBuffers(const Plan& plan);

}  // namespace shardplan::test
