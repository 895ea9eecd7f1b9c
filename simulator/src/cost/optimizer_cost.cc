// SPDX-License-Identifier: Apache-2.0
#include "cost/optimizer_cost.h"

#include <algorithm>
#include <iterator>

#include "cost/fixed_log.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/simulator/optimizer_tensors.h"

namespace shardplan {
namespace {

// Reads, writes and launches of one step. Reads and writes are passes over the shards; launches are by list
// of tensors (foreach) or by tensor, and in any case by tensor.
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

OptimizerCost CostOf(const Optimizer& optimizer, Bytes bytes, std::size_t shards) {
  if (bytes == Bytes{}) return {};
  const Passes passes = PassesOf(optimizer);
  const auto tensors = static_cast<std::int64_t>(shards);
  const bool loops = ImplementationOf(optimizer) == OptimizerImplementation::kForLoop;
  return {bytes * passes.read, bytes * passes.written,
          passes.kernels * (loops ? tensors : 1) + passes.kernels_by_tensor * tensors};
}

OptimizerSteps::OptimizerSteps(const Plan& plan)
    : plan_(plan),
      original_parameters_(KnobsOf(plan.policy).steps_original_parameters(plan.strategy)),
      places_(plan.units.size(), Place::kNowhere) {
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.role != BufferRole::kParamSharded) continue;
    if (buffer.unit < 0 || static_cast<std::size_t>(buffer.unit) >= plan.units.size()) continue;
    places_[static_cast<std::size_t>(buffer.unit)] =
        buffer.memory == MemoryKind::kDevice ? Place::kDevice : Place::kHost;
  }
}

std::vector<OptimizerShard> OptimizerSteps::Shards(UnitId unit, Place place) const {
  const std::size_t first = unit < 0 ? 0 : static_cast<std::size_t>(unit);
  const std::size_t last = unit < 0 ? plan_.units.size() : first + 1;
  std::vector<OptimizerShard> shards;
  for (std::size_t u = first; u < last; ++u) {
    if (places_[u] != place) continue;
    const Unit& owner = plan_.units[u];
    std::ranges::move(OptimizerShardsOf(owner, ShardCount(plan_, owner), original_parameters_),
                      std::back_inserter(shards));
  }
  return shards;
}

OptimizerCost OptimizerSteps::CostIn(UnitId unit, std::int32_t parameter, Place place) const {
  const std::vector<OptimizerShard> shards = Shards(unit, place);
  Bytes bytes;
  Bytes of_parameter;
  for (const OptimizerShard& shard : shards) {
    bytes += SizeBytes(shard);
    if (shard.parameter == parameter) of_parameter += SizeBytes(shard);
  }
  const Optimizer& optimizer = plan_.strategy.optimizer;
  if (unit < 0 || parameter < 0) return CostOf(optimizer, bytes, shards.size());
  const Unit& owner = plan_.units[static_cast<std::size_t>(unit)];
  if (owner.layout == LayoutKind::kPerParameter) return CostOf(optimizer, of_parameter, 1);
  std::int64_t all = 0;
  for (const UnitParameter& p : owner.parameters) all += p.requires_grad ? Numel(p) : 0;
  if (all == 0) return {};
  const std::int64_t own = Numel(owner.parameters[static_cast<std::size_t>(parameter)]);
  return CostOf(optimizer, {internal::MulDiv(bytes.value, own, all)}, 1);
}

OptimizerWork OptimizerSteps::Work(UnitId unit, std::int32_t parameter) const {
  return {CostIn(unit, parameter, Place::kDevice), CostIn(unit, parameter, Place::kHost)};
}

std::vector<Bytes> OptimizerSteps::States(UnitId unit, bool on_device) const {
  std::vector<Bytes> tensors;
  for (const OptimizerShard& shard : Shards(unit, on_device ? Place::kDevice : Place::kHost)) {
    std::ranges::copy(OptimizerStates(plan_.strategy.optimizer, shard), std::back_inserter(tensors));
  }
  return tensors;
}

std::vector<Bytes> OptimizerSteps::Temporaries(UnitId unit, bool on_device) const {
  return OptimizerTemporaries(plan_.strategy.optimizer,
                              Shards(unit, on_device ? Place::kDevice : Place::kHost));
}

std::vector<OptimizerTensorStep> OptimizerSteps::TensorSteps(bool on_device) const {
  std::vector<std::pair<std::int64_t, OptimizerShard>> placed;
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const Unit& unit = plan_.units[u];
    const bool whole = unit.layout == LayoutKind::kFlat && !original_parameters_;
    for (OptimizerShard& shard : Shards(static_cast<UnitId>(u), on_device ? Place::kDevice : Place::kHost)) {
      const std::int32_t index = unit.parameters[static_cast<std::size_t>(shard.parameter)].index;
      if (!whole && index < 0) return {};
      placed.emplace_back(whole ? static_cast<std::int64_t>(u) : index, std::move(shard));
    }
  }
  std::ranges::stable_sort(placed, {}, [](const auto& shard) { return shard.first; });
  std::vector<OptimizerShard> shards;
  for (auto& [place, shard] : placed) shards.push_back(std::move(shard));
  return OptimizerTensorSteps(plan_.strategy.optimizer, shards);
}

}  // namespace shardplan
