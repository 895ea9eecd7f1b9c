#include "optimizer_cost.h"

#include <algorithm>

#include "shardplan/simulator/optimizer_temporaries.h"

namespace shardplan {
namespace {

// Shards of the parameters that the optimizer updates, bytes each: parts of the units' param_sharded buffers
// that are kept on the device.
std::vector<Bytes> UpdatedShards(const Plan& plan, UnitId unit) {
  std::vector<Bytes> shards;
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.role != BufferRole::kParamSharded || buffer.memory != MemoryKind::kDevice) continue;
    if (buffer.unit < 0 || static_cast<std::size_t>(buffer.unit) >= plan.units.size()) continue;
    if (unit >= 0 && buffer.unit != unit) continue;
    const Unit& owner = plan.units[static_cast<std::size_t>(buffer.unit)];
    const bool parameter_each = buffer.parts_bytes.size() == buffer.parameters.size();
    const bool any = std::ranges::any_of(owner.parameters, &UnitParameter::requires_grad);
    for (std::size_t p = 0; p < buffer.parts_bytes.size(); ++p) {
      bool updated = any;
      if (parameter_each && owner.layout == LayoutKind::kPerParameter) {
        const auto index = static_cast<std::size_t>(buffer.parameters[p]);
        updated = index < owner.parameters.size() && owner.parameters[index].requires_grad;
      }
      if (updated && buffer.parts_bytes[p].value > 0) shards.push_back(buffer.parts_bytes[p]);
    }
  }
  return shards;
}

Bytes Sum(const std::vector<Bytes>& sizes) {
  Bytes sum;
  for (const Bytes size : sizes) sum += size;
  return sum;
}

// Shards read and written by one step, in passes over the shard, and launches (for_loop: a parameter).
struct Passes {
  std::int64_t read = 0;
  std::int64_t written = 0;
  std::int64_t kernels = 0;
};

Passes PassesOf(const Optimizer& optimizer) {
  const bool fused = optimizer.implementation == OptimizerImplementation::kFused;
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
      return {};
    case OptimizerKind::kSgd:
      if (!optimizer.momentum) return {2, 1, 1};  // p += -lr * g
      if (fused) return {3, 2, 1};
      return {5, 3, 3};  // buf *= momentum; buf += g; p += -lr * buf
    case OptimizerKind::kAdamW:
      if (fused) return {4, 3, 1};  // p, g, m, v -> p, m, v
      // p *= 1 - lr * wd; m lerp g; v *= beta2; v += g * g; t = sqrt(v); t /= c; t += eps; p += m / t
      return {12, 8, 8};
  }
  return {};
}

}  // namespace

OptimizerCost CostOfOptimizerStep(const Plan& plan, UnitId unit) {
  const Passes passes = PassesOf(plan.strategy.optimizer);
  const std::vector<Bytes> shards = UpdatedShards(plan, unit);
  if (shards.empty()) return {};
  const Bytes bytes = Sum(shards);
  OptimizerCost cost{bytes * passes.read, bytes * passes.written, passes.kernels};
  if (plan.strategy.optimizer.implementation == OptimizerImplementation::kForLoop) {
    cost.kernels *= static_cast<std::int64_t>(shards.size());
  }
  return cost;
}

std::vector<Bytes> OptimizerStateTensors(const Plan& plan, UnitId unit) {
  const Optimizer& optimizer = plan.strategy.optimizer;
  std::vector<Bytes> tensors;
  const bool adam = optimizer.kind == OptimizerKind::kAdamW;
  if (!adam && !(optimizer.kind == OptimizerKind::kSgd && optimizer.momentum)) return tensors;
  for (const Bytes shard : UpdatedShards(plan, unit)) {
    // The step count is a fp32 scalar; it lives on the host unless the fused kernel reads it.
    if (adam && optimizer.implementation == OptimizerImplementation::kFused) tensors.push_back(Bytes{4});
    tensors.push_back(shard);
    if (adam) tensors.push_back(shard);
  }
  return tensors;
}

std::vector<Bytes> OptimizerTemporaries(const Plan& plan, UnitId unit) {
  const Optimizer& optimizer = plan.strategy.optimizer;
  if (optimizer.kind != OptimizerKind::kAdamW) return {};
  return AdamWTemporaries(optimizer.implementation, UpdatedShards(plan, unit));
}

std::vector<Bytes> AdamWTemporaries(OptimizerImplementation implementation,
                                    const std::vector<Bytes>& shards) {
  if (implementation == OptimizerImplementation::kFused) return {};
  if (implementation == OptimizerImplementation::kForeach) return shards;
  std::vector<Bytes> most;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Bytes previous = i == 0 ? Bytes{} : shards[i - 1];
    if (Sum(most) < previous + shards[i] * 2) most = {previous, shards[i], shards[i]};
  }
  std::erase(most, Bytes{});
  return most;
}

}  // namespace shardplan
