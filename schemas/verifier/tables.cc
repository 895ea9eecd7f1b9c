// SPDX-License-Identifier: Apache-2.0
#include "verifier/tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/precision.h"

namespace shardplan::verifier {
namespace {

// The digits of a rank, the most significant first. Neighbours that lie side by side are one; one of a single
// rank is none. Equal digits: equal groups of ranks.
using Digits = std::vector<CommunicatorDim>;

void Append(Digits& digits, CommunicatorDim next) {
  if (next.size == 1) return;
  if (!digits.empty() && digits.back().stride == next.size * next.stride) {
    digits.back() = {digits.back().size * next.size, next.stride};
  } else {
    digits.push_back(next);
  }
}

Digits DigitsOf(const Plan& plan, CommunicatorId id) {
  Digits digits;
  if (id < 0) return digits;
  const Communicator& communicator = plan.communicators[id];
  if (communicator.dims.empty()) Append(digits, {communicator.size, communicator.stride});
  for (const CommunicatorDim& dim : communicator.dims) Append(digits, dim);
  return digits;
}

// The digits of the mesh's dimensions `names`, in the mesh's order.
Digits DigitsOf(const std::vector<StrategyMeshDim>& mesh, const std::vector<std::string>& names) {
  Digits digits;
  std::int64_t stride = 1;
  for (const StrategyMeshDim& dim : mesh) stride *= dim.size;
  for (const StrategyMeshDim& dim : mesh) {
    stride /= dim.size;
    if (std::ranges::find(names, dim.name) != names.end()) Append(digits, {dim.size, stride});
  }
  return digits;
}

std::string InWords(const Digits& digits) {
  const auto digit = [](const CommunicatorDim& d) { return fmt::format("{} by {}", d.size, d.stride); };
  return digits.empty() ? "one rank"
                        : fmt::format("{}", fmt::join(digits | std::views::transform(digit), ", "));
}

std::string InWords(const std::vector<StrategyMeshDim>& mesh) {
  const auto dim = [](const StrategyMeshDim& d) { return fmt::format("{} {}", d.name, d.size); };
  return fmt::format("{{{}}}", fmt::join(mesh | std::views::transform(dim), ", "));
}

std::string_view InWords(LayoutKind layout) { return layout == LayoutKind::kFlat ? "flat" : "per_parameter"; }

std::string InWords(DType computed, DType reduced) {
  return fmt::format("{}, reduced in {}", Name(computed), Name(reduced));
}

// Null: a policy of another program, of which nothing is known.
const PolicyKnobs* KnownPolicy(const Plan& plan) {
  const PolicyKnobs& knobs = KnobsOf(plan.strategy.policy);
  return knobs.name == plan.strategy.policy ? &knobs : nullptr;
}

}  // namespace

std::string TablesOfMesh(const Plan& plan) {
  const std::vector<StrategyMeshDim>& asked = plan.strategy.mesh;
  if (!asked.empty() && plan.mesh != asked) {
    return fmt::format("the mesh is {}, and the strategy's {}", InWords(plan.mesh), InWords(asked));
  }
  if (plan.mesh.empty()) return {};
  std::int64_t ranks = 1;
  for (const StrategyMeshDim& dim : plan.mesh) {
    if (dim.size < 1 || __builtin_mul_overflow(ranks, dim.size, &ranks)) {
      return fmt::format("dimension {} of the mesh has the size {}", dim.name, dim.size);
    }
  }
  if (ranks == plan.world_size) return {};
  return fmt::format("the mesh {} has {} ranks, and world_size is {}", InWords(plan.mesh), ranks,
                     plan.world_size);
}

std::string TablesOfDefaultMesh(const Plan& plan) {
  const PolicyKnobs* policy = KnownPolicy(plan);
  if (policy == nullptr || plan.mesh.empty() || !plan.strategy.mesh.empty()) return {};
  std::set<std::string> of_model;
  for (const Unit& unit : plan.units) {
    for (const UnitParameter& parameter : unit.parameters) {
      for (const ParameterPlacement& placement : parameter.placements) of_model.insert(placement.mesh_dim);
    }
  }
  const auto is_of_model = [&](const StrategyMeshDim& dim) { return of_model.contains(dim.name); };
  const bool one_dim =
      plan.mesh.front().name == "shard" && std::ranges::all_of(plan.mesh | std::views::drop(1), is_of_model);
  if (one_dim) return {};
  return fmt::format(
      "the strategy has no mesh, so that units are sharded over all ranks, and the plan's mesh is {}",
      InWords(plan.mesh));
}

std::string TablesOfPolicy(const Plan& plan) {
  if (plan.policy.empty() || plan.policy == plan.strategy.policy) return {};
  return fmt::format("the plan's policy is {}, and its strategy's {}", plan.policy, plan.strategy.policy);
}

std::string TablesOfLayout(const Plan& plan, const Unit& unit) {
  const PolicyKnobs* policy = KnownPolicy(plan);
  if (policy == nullptr || unit.layout == policy->layout) return {};
  return fmt::format("its layout is {}, and {} makes units that are {}", InWords(unit.layout), policy->name,
                     InWords(policy->layout));
}

std::string TablesOfRanks(const Plan& plan, const Unit& unit) {
  const PolicyKnobs* policy = KnownPolicy(plan);
  if (policy == nullptr || plan.mesh.empty()) return {};
  const std::pair found(DigitsOf(plan, unit.shard_communicator), DigitsOf(plan, unit.replicate_communicator));
  std::vector<std::string> expected;
  for (const DataParallelDims& dims : policy->unit_ranks(plan.strategy, plan.mesh)) {
    const std::pair allowed(DigitsOf(plan.mesh, dims.shard), DigitsOf(plan.mesh, dims.replicate));
    if (found == allowed) return {};
    expected.push_back(fmt::format("{} and {}", InWords(allowed.first), InWords(allowed.second)));
  }
  return fmt::format(
      "it is sharded over {} and replicated over {}, and the strategy shards and replicates over {}",
      InWords(found.first), InWords(found.second), fmt::join(expected, " or over "));
}

std::string TablesOfGroup(const Plan& plan, UnitId id) {
  const Unit& unit = plan.units[id];
  if (unit.parameter_group == 0) return {};
  const bool follows = id > 0 && plan.units[id - 1].modules == unit.modules &&
                       plan.units[id - 1].parameter_group == unit.parameter_group - 1;
  return follows
             ? std::string()
             : fmt::format("it is parameter group {} of its modules, and the unit before it is not group {}",
                           unit.parameter_group, unit.parameter_group - 1);
}

std::string TablesOfPrecision(const Plan& plan, const Unit& unit) {
  const PolicyKnobs* policy = KnownPolicy(plan);
  if (policy == nullptr) return {};
  const PyTorchRules rules = RulesOf(plan.strategy);
  std::vector<std::string> expected;
  for (const MixedPrecision& mixed : policy->unit_precisions(plan.strategy, unit)) {
    const DType computed = mixed.param_dtype.value_or(unit.orig_dtype);
    const DType reduced = AskedReduceDType(mixed, PromotedGradDType(unit), computed, rules);
    const bool alike = std::ranges::all_of(unit.parameters, [&](const UnitParameter& parameter) {
      return ComputeDType(unit, parameter) == AskedParamDType(mixed, parameter, rules);
    });
    if (alike && unit.param_dtype == computed && unit.reduce_dtype == reduced) return {};
    if (std::string words = InWords(computed, reduced);
        std::ranges::find(expected, words) == expected.end()) {
      expected.push_back(std::move(words));
    }
  }
  return fmt::format("its parameters are computed with in {}, and the strategy asks for {}",
                     InWords(unit.param_dtype, unit.reduce_dtype), fmt::join(expected, " or "));
}

void CheckStrategy(const Plan& plan, Reporter& reporter) {
  std::int64_t subject = 0;
  const auto check = [&](const std::string& whose, std::string wrong) {
    if (!wrong.empty()) reporter.Add(Rule::kTables, {}, subject++, whose + std::move(wrong));
  };
  check("", TablesOfPolicy(plan));
  std::string mesh = TablesOfMesh(plan);
  if (mesh.empty()) mesh = TablesOfDefaultMesh(plan);
  check("", mesh);
  for (const Unit& unit : plan.units) {
    const std::string whose = fmt::format("unit {}: ", DisplayName(unit.fqn));
    check(whose, TablesOfLayout(plan, unit));
    check(whose, TablesOfPrecision(plan, unit));
    check(whose, TablesOfGroup(plan, static_cast<UnitId>(&unit - plan.units.data())));
    if (mesh.empty()) check(whose, TablesOfRanks(plan, unit));
  }
}

}  // namespace shardplan::verifier
