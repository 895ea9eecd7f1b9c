#include "cost/optimizer_cost.h"

#include <algorithm>
#include <iterator>

#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/simulator/optimizer_tensors.h"

namespace shardplan {
namespace {

// What the optimizer updates on the device, unit by unit.
std::vector<OptimizerShard> UpdatedShards(const Plan& plan, UnitId unit) {
  const bool original_parameters = KnobsOf(plan.policy).steps_original_parameters(plan.strategy);
  std::vector<OptimizerShard> shards;
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.role != BufferRole::kParamSharded || buffer.memory != MemoryKind::kDevice) continue;
    if (buffer.unit < 0 || static_cast<std::size_t>(buffer.unit) >= plan.units.size()) continue;
    if (unit >= 0 && buffer.unit != unit) continue;
    const Unit& owner = plan.units[static_cast<std::size_t>(buffer.unit)];
    const std::int32_t c = owner.shard_communicator;
    const bool sharded = c >= 0 && static_cast<std::size_t>(c) < plan.communicators.size();
    const std::int64_t ranks = sharded ? plan.communicators[static_cast<std::size_t>(c)].size : 1;
    std::ranges::move(OptimizerShardsOf(owner, ranks, original_parameters), std::back_inserter(shards));
  }
  return shards;
}

// What one step reads and writes, in passes over the shards, and launches: by list of tensors (foreach) or by
// tensor, and in any case by tensor.
struct Passes {
  std::int64_t read = 0;
  std::int64_t written = 0;
  std::int64_t kernels = 0;
  std::int64_t kernels_by_tensor = 0;
};

Passes PassesOf(const Optimizer& optimizer) {
  const bool fused = ImplementationOf(optimizer) == OptimizerImplementation::kFused;
  Passes passes;
  const auto add = [&](bool when, Passes more) {
    if (!when) return;
    passes.read += more.read;
    passes.written += more.written;
    passes.kernels += more.kernels;
  };
  const bool sgd = optimizer.kind == OptimizerKind::kSgd;
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
      return {};
    case OptimizerKind::kSgd:
      passes = {2, 1, 1};  // p += -lr * g
      if (fused) {
        add(optimizer.momentum, {1, 1, 0});
        return passes;
      }
      add(optimizer.momentum, {3, 2, 2});  // buf *= momentum; buf += g
      add(optimizer.nesterov, {2, 1, 1});  // g += momentum * buf
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      if (fused) {
        passes = {4, 3, 1};  // p, g, m, v -> p, m, v
        add(optimizer.amsgrad, {1, 1, 0});
        return passes;
      }
      // p *= 1 - lr * wd; m lerp g; v *= beta2; v += g * g; t = sqrt(v); t /= c; t += eps; p += m / t
      passes = {12, 8, 8};
      add(optimizer.amsgrad, {2, 1, 1});  // max(v)
      break;
    case OptimizerKind::kAdafactor:
      // |p|; |rows of g|; |columns of g|; t = r x c; t /= mean(r); clamp; rsqrt; t *= g; |t|; (t *= a); p +=
      // t
      passes = {11, 6, 12, 7};
      break;
  }
  add(optimizer.maximize, {1, 1, 1});
  add(optimizer.weight_decay && (sgd || optimizer.kind == OptimizerKind::kAdam), {2, 1, 1});
  return passes;
}

}  // namespace

OptimizerCost CostOfOptimizerStep(const Plan& plan, UnitId unit) {
  const Optimizer& optimizer = plan.strategy.optimizer;
  const Passes passes = PassesOf(optimizer);
  const std::vector<OptimizerShard> shards = UpdatedShards(plan, unit);
  Bytes bytes;
  for (const OptimizerShard& shard : shards) bytes += SizeBytes(shard);
  if (bytes == Bytes{}) return {};
  const auto tensors = static_cast<std::int64_t>(shards.size());
  const bool loops = ImplementationOf(optimizer) == OptimizerImplementation::kForLoop;
  return {bytes * passes.read, bytes * passes.written,
          passes.kernels * (loops ? tensors : 1) + passes.kernels_by_tensor * tensors};
}

std::vector<Bytes> OptimizerStateTensors(const Plan& plan, UnitId unit) {
  std::vector<Bytes> tensors;
  for (const OptimizerShard& shard : UpdatedShards(plan, unit)) {
    std::ranges::copy(OptimizerStates(plan.strategy.optimizer, shard), std::back_inserter(tensors));
  }
  return tensors;
}

std::vector<Bytes> OptimizerTemporaries(const Plan& plan, UnitId unit) {
  return OptimizerTemporaries(plan.strategy.optimizer, UpdatedShards(plan, unit));
}

}  // namespace shardplan
