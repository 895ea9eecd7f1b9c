// SPDX-License-Identifier: Apache-2.0
#include "cost/optimizer_cost.h"

#include <algorithm>
#include <iterator>

#include "cost/fixed_log.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/policy_knobs.h"

namespace shardplan {

OptimizerCost CostOf(const Optimizer& optimizer, Bytes bytes, std::size_t shards) {
  if (bytes == Bytes{}) return {};
  const OptimizerPasses passes = PassesOf(optimizer);
  const auto tensors = static_cast<std::int64_t>(shards);
  const bool loops = ImplementationOf(optimizer) == OptimizerImplementation::kForLoop;
  return {bytes * passes.read, bytes * passes.written,
          passes.kernels * (loops ? tensors : 1) + passes.kernels_by_tensor * tensors};
}

OptimizerCost CostOfUpdate(const Plan& plan, const Instruction& instruction) {
  const Exchange& exchange = plan.exchanges[static_cast<std::size_t>(instruction.exchange)];
  const ExchangeLayout layout(plan, exchange);
  const bool nesterov = !plan.strategy.optimizer.muon || plan.strategy.optimizer.muon->nesterov;
  OptimizerCost cost;
  for (std::size_t m = 0; m < exchange.matrices.size(); ++m) {
    const ExchangedMatrix& matrix = exchange.matrices[m];
    const UnitParameter& parameter = plan.units[static_cast<std::size_t>(matrix.unit)]
                                         .parameters[static_cast<std::size_t>(matrix.parameter)];
    const std::int64_t numel = layout.PieceNumel(m, 0);
    if (numel == 0) continue;
    const Bytes shard{numel * SizeBytes(parameter.dtype)};
    const Bytes gradient{numel * SizeBytes(parameter.grad_dtype.value_or(parameter.dtype))};
    const Bytes piece{numel * SizeBytes(exchange.dtype)};
    if (instruction.kind == InstructionKind::kUpdateApply) {
      cost = cost + OptimizerCost{shard * 2 + piece, shard * 2, 2};
      continue;
    }
    // momentum.lerp_(gradient); a copy of the momentum, or of its interpolation with the gradient.
    cost = cost + OptimizerCost{gradient * 3, gradient + piece, 2};
    if (nesterov) cost = cost + OptimizerCost{gradient * 2, gradient, 1};
  }
  return cost;
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
  std::size_t stepped = 0;
  for (const OptimizerShard& shard : shards) {
    if (shard.muon) continue;  // segments and exchanges have its work
    ++stepped;
    bytes += SizeBytes(shard);
    if (shard.parameter == parameter) of_parameter += SizeBytes(shard);
  }
  const Optimizer& optimizer = plan_.strategy.optimizer;
  if (unit < 0 || parameter < 0) return CostOf(optimizer, bytes, stepped);
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
