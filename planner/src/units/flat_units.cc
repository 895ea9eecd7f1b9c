// SPDX-License-Identifier: Apache-2.0
// The units of FullyShardedDataParallel: one flat parameter each.
#include <fmt/format.h>

#include <algorithm>

#include "shardplan/planner/planner.h"
#include "units/fsdp1_units.h"
#include "units/layout.h"
#include "units/unit_maker.h"

namespace shardplan {
namespace {

bool IsHybrid(Fsdp1Sharding sharding) {
  return sharding == Fsdp1Sharding::kHybridShard || sharding == Fsdp1Sharding::kHybridShardZero2;
}

class FlatUnits final : public UnitMaker {
 public:
  FlatUnits(const Trace& trace, const ModelIndex& index, const Strategy& strategy)
      : trace_(trace), index_(index), strategy_(strategy) {}

  bool InTreeOrder() const override { return true; }
  bool HasRoot() const override { return true; }

  // The mesh: {shard} or {replicate, shard}.
  Status Begin(std::int64_t cluster_ranks, Partition& partition) override {
    partition.mesh = strategy_.mesh;
    if (partition.mesh.empty()) partition.mesh = {{"shard", cluster_ranks}};
    std::int64_t ranks = 1;
    for (const StrategyMeshDim& dim : partition.mesh) {
      (dim.name == "shard" ? partition.shard_size : partition.replicate_size) = dim.size;
      ranks *= dim.size;  // CheckStrategy keeps them small
    }
    if (ranks != cluster_ranks) {
      return MakeInputError("/mesh", "the mesh does not cover the cluster's ranks", fmt::format("{}", ranks),
                            fmt::format("{}", cluster_ranks));
    }
    UnitChoice as_most{.sharding = strategy_.fsdp1.sharding};
    SetFlatGroups(as_most, partition);  // their communicators come first
    return {};
  }

  Result<std::vector<UnitRule>> Rules(std::vector<UnitRule> rules, const std::set<ModuleId>& ignored_modules,
                                      const std::set<ParameterId>& ignored_parameters) override {
    if (rules.empty() && !strategy_.fsdp1.size_based_wrap) rules = DefaultUnits(trace_);
    return ExpandWrapPolicy(trace_, index_, strategy_, std::move(rules), ignored_modules, ignored_parameters);
  }

  Result<std::set<ModuleId>> IgnoredModules() const override {
    return shardplan::IgnoredModules(trace_, index_, strategy_);
  }

  Status BeginUnit(const UnitRule* rule, const std::string&, UnitChoice& choice) override {
    const auto pick = [&](auto member, auto of_all) {
      return rule == nullptr ? of_all : (rule->*member).value_or(of_all);
    };
    const Fsdp1Knobs& knobs = strategy_.fsdp1;
    choice.sharding = pick(&UnitRule::sharding, knobs.sharding);
    choice.backward_prefetch = pick(&UnitRule::backward_prefetch, knobs.backward_prefetch);
    choice.forward_prefetch = pick(&UnitRule::forward_prefetch, knobs.forward_prefetch);
    return {};
  }

  Status FinishUnit(const std::string& pointer, UnitChoice& choice, Partition& partition) override {
    if (Status s = SetFlatDtypes(pointer, choice); !s) return s;
    SetFlatGroups(choice, partition);
    Unit& unit = choice.unit;
    unit.layout = LayoutKind::kFlat;
    // Aligned flat parameters are padded for the whole process group even where they are not sharded.
    const bool aligned = strategy_.fsdp1.use_orig_params;
    const bool no_shard = choice.sharding == Fsdp1Sharding::kNoShard;
    LayOutFlat(unit, aligned, unit.param_dtype,
               no_shard && aligned ? choice.replicate_size : choice.shard_size);
    return {};
  }

  // With use_orig_params FSDP1 makes a shard of the original parameter: the other unit's modules are left
  // with that.
  Status Check(const Partition& partition) const override {
    if (!strategy_.fsdp1.use_orig_params) return {};
    for (std::size_t p = 0; p < partition.owners.size(); ++p) {
      if (partition.owners[p].size() < 2) continue;
      return MakeInputError("/fsdp1/use_orig_params", "FSDP1 breaks a parameter that two units share",
                            trace_.parameters[p].fqn, "false, or one unit that has it");
    }
    return {};
  }

 private:
  // The ranks that a unit communicates with: the mesh's dimensions with hybrid sharding, all ranks with any
  // other.
  static void SetFlatGroups(UnitChoice& choice, Partition& partition) {
    const std::int64_t ranks = partition.shard_size * partition.replicate_size;
    const bool hybrid = IsHybrid(choice.sharding);
    const bool no_shard = choice.sharding == Fsdp1Sharding::kNoShard;
    Unit& unit = choice.unit;
    choice.shard_size = hybrid ? partition.shard_size : no_shard ? 1 : ranks;
    choice.replicate_size = ranks / choice.shard_size;
    if (choice.shard_size > 1) unit.shard_communicator = FlatGroup("shard", choice.shard_size, 1, partition);
    // One rank has a communicator, too: in hybrid sharding over one replica, and where nothing is sharded
    // because there is one rank.
    if (choice.shard_size == 1) {
      // FSDP1 takes the one rank that it would shard over for all that there are.
      unit.replicate_communicator = FlatGroup("replicate", hybrid ? 1 : ranks, 1, partition);
    } else if (hybrid) {
      unit.replicate_communicator =
          FlatGroup("replicate", choice.replicate_size, choice.shard_size, partition);
    }
  }

  static CommunicatorId FlatGroup(const std::string& name, std::int64_t size, std::int64_t stride,
                                  Partition& partition) {
    std::vector<Communicator>& groups = partition.communicators;
    Communicator group{name, size, stride};
    const auto same =
        std::ranges::find_if(groups, [&](const Communicator& g) { return SameRanks(g, group); });
    if (same != groups.end()) return static_cast<CommunicatorId>(same - groups.begin());
    if (std::ranges::find(groups, name, &Communicator::name) != groups.end()) group.name = name + ".all";
    groups.push_back(std::move(group));
    return static_cast<CommunicatorId>(groups.size()) - 1;
  }

  Status SetFlatDtypes(const std::string& pointer, UnitChoice& choice) const {
    Unit& unit = choice.unit;
    std::optional<DType> original;
    for (const UnitParameter& parameter : unit.parameters) {
      if (!original) original = parameter.dtype;
      if (parameter.dtype != *original) {
        return MakeInputError(pointer, "the parameters of a unit differ in dtype",
                              fmt::format("{} is {}", parameter.fqn, Name(parameter.dtype)),
                              std::string(Name(*original)));
      }
    }
    const MixedPrecision& mixed = choice.mixed_precision;
    unit.orig_dtype = original.value_or(trace_.compute_dtype);
    unit.param_dtype = mixed.param_dtype.value_or(unit.orig_dtype);
    unit.reduce_dtype = mixed.reduce_dtype.value_or(unit.param_dtype);
    return {};
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Strategy& strategy_;
};

}  // namespace

std::unique_ptr<UnitMaker> MakeFlatUnits(const Trace& trace, const ModelIndex& index,
                                         const Strategy& strategy) {
  return std::make_unique<FlatUnits>(trace, index, strategy);
}

}  // namespace shardplan
