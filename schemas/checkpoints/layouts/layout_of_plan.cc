// SPDX-License-Identifier: Apache-2.0
// The state of a training plan: its parameters, and what its optimizer keeps of each.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "checkpoints/layouts/mesh_digits.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/optimizers.h"

namespace shardplan {
namespace {

class LayoutOfPlan {
 public:
  explicit LayoutOfPlan(const Plan& plan) : plan_(plan) {
    layout_.name = fmt::format("{} by {} on {} ranks", plan.model, plan.policy, plan.world_size);
    layout_.mesh = plan.mesh;
    if (layout_.mesh.empty()) layout_.mesh = {{"shard", plan.world_size}};
  }

  Result<StateLayout> Run() {
    const Optimizer& optimizer = plan_.strategy.optimizer;
    if (!StatesHaveParameterShapes(optimizer.kind)) {
      const std::string_view name = DescriptionOf(optimizer.kind).name;
      return MakeInputError("/strategy/optimizer/kind",
                            fmt::format("the state of {} has other shapes than its parameters", name),
                            std::string(name), NamesOf(KindsThatAreCut(), "or"));
    }
    if (Status status = Add("", nullptr); !status) return std::unexpected(status.error());
    for (const bool muon : {false, true}) {
      for (const OptimizerStateDescription& state : StatesOf(OptimizerOf(optimizer, muon))) {
        if (Status status = Add("state.", &state); !status) return std::unexpected(status.error());
      }
    }
    return std::move(layout_);
  }

 private:
  static OptimizerSet KindsThatAreCut() {
    OptimizerSet kinds = 0;
    for (const OptimizerDescription& is : kOptimizers) {
      if (StatesHaveParameterShapes(is.kind)) kinds |= OptimizersIn({is.kind});
    }
    return kinds;
  }

  // Adds from every unit the parameters (`state` is null), or one kind of state.
  Status Add(const std::string& prefix, const OptimizerStateDescription* state) {
    const std::string suffix = state == nullptr ? "" : fmt::format(".{}", state->name);
    const bool is_step = state != nullptr && state->shape == StateShape::kScalar;
    const bool is_muons = state != nullptr && state->kind == OptimizerKind::kMuon;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      const Unit& unit = plan_.units[u];
      const std::string at = fmt::format("/units/{}", u);
      const Result<std::vector<std::string>> shard = DimsOf(unit, at);
      if (!shard) return std::unexpected(shard.error());
      std::int32_t flat = -1;
      if (unit.layout == LayoutKind::kFlat && !is_step && !is_muons) {  // Muon's have rows
        flat = static_cast<std::int32_t>(layout_.flats.size());
        layout_.flats.push_back(
            {prefix + DisplayName(unit.fqn) + suffix, unit.orig_dtype, unit.flat_numel, *shard});
      }
      for (const UnitParameter& parameter : unit.parameters) {
        if (state != nullptr && (!parameter.requires_grad || is_muons != parameter.muon)) continue;
        if (is_step) {
          layout_.tensors.push_back({.name = prefix + parameter.fqn + suffix, .dtype = DType::kFloat32});
          continue;
        }
        layout_.tensors.push_back(TensorOf(parameter, *shard, flat, prefix + parameter.fqn + suffix));
      }
    }
    return {};
  }

  static StateTensor TensorOf(const UnitParameter& parameter, const std::vector<std::string>& shard,
                              std::int32_t flat, std::string name) {
    StateTensor tensor{.name = std::move(name), .dtype = parameter.dtype, .shape = parameter.shape};
    for (const ParameterPlacement& placement : parameter.placements) {
      if (placement.dim < 0) continue;
      tensor.shape[placement.dim] *= placement.size;
      tensor.splits.push_back({{placement.mesh_dim}, placement.dim});
    }
    tensor.flat = flat;
    if (flat >= 0) {
      tensor.flat_offset = parameter.flat_offset;
    } else if (!shard.empty() && !parameter.shape.empty()) {
      tensor.splits.push_back({shard, parameter.shard_dim});
    }
    return tensor;
  }

  // The dimensions of the mesh that shard a unit.
  Result<std::vector<std::string>> DimsOf(const Unit& unit, const std::string& at) {
    std::vector<std::string> names;
    if (unit.shard_communicator < 0) return names;
    const Communicator& shard = plan_.communicators[unit.shard_communicator];
    std::vector<CommunicatorDim> digits = shard.dims;
    if (digits.empty()) digits = {{shard.size, shard.stride}};
    std::int64_t covered = 1;
    for (const CommunicatorDim& digit : digits) {
      std::int64_t stride = RanksOf(layout_);
      for (const StrategyMeshDim& dim : layout_.mesh) {
        stride /= dim.size;
        if (dim.size == 1 || stride < digit.stride || stride * dim.size > digit.stride * digit.size) continue;
        names.push_back(dim.name);
        covered *= dim.size;
      }
    }
    if (covered == shard.size) return names;
    return MakeInputError(
        at + "/shard_communicator", "the ranks that shard the unit are no dimensions of the mesh",
        fmt::format("{} ranks", shard.size), fmt::format("{} ranks of whole dimensions", covered));
  }

  const Plan& plan_;
  StateLayout layout_;
};

}  // namespace

Result<StateLayout> StateLayoutOf(const Plan& plan) {
  Result<StateLayout> layout = LayoutOfPlan(plan).Run();
  if (!layout) return layout;
  if (Status status = CheckStateLayout(*layout); !status) return std::unexpected(status.error());
  return layout;
}

}  // namespace shardplan
