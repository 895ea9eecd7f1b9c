// SPDX-License-Identifier: Apache-2.0
// The decisions of a layout when units are chosen: the mesh, the rules, and how a unit is laid out over which
// ranks. One for each layout; the description of a policy says which.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/strategy.h"
#include "units/partition.h"

namespace shardplan {

class UnitMaker {
 public:
  virtual ~UnitMaker() = default;

  // Parameters in the order of named_modules(), and units made from the inside out whatever the order of the
  // rules (FSDP1). False: children before their parent's own, units in the order of the rules (FSDP2).
  virtual bool InTreeOrder() const = 0;
  // Whether the root is a unit. False: a rule for it is left out, and none is added.
  virtual bool HasRoot() const = 0;

  // The mesh and sizes of `partition`. kBadInput for a mesh that does not fit.
  virtual Status Begin(std::int64_t cluster_ranks, Partition& partition) = 0;
  // Modules whose parameters no unit takes, canonical. kBadInput for an entry that matches nothing.
  virtual Result<std::set<ModuleId>> IgnoredModules() const { return std::set<ModuleId>{}; }
  // The rules to make units of; `rules` is what the strategy gives.
  virtual Result<std::vector<UnitRule>> Rules(std::vector<UnitRule> rules,
                                              const std::set<ModuleId>& ignored_modules,
                                              const std::set<ParameterId>& ignored_parameters) = 0;
  // Knobs of the strategy that name modules or parameters. kBadInput for one that matches nothing.
  virtual Status CheckKnobs() { return {}; }
  // The sizes of the groups of one unit and the knobs that only this layout has, before the knobs that both
  // have are set. `rule`: of its call, or null.
  virtual Status BeginUnit(const UnitRule* rule, const std::string& pointer, UnitChoice& choice) = 0;
  // Dtypes, layout and communicators of one unit, after that.
  virtual Status FinishUnit(const std::string& pointer, UnitChoice& choice, Partition& partition) = 0;
  // Refuses units that may not be together.
  virtual Status Check(const Partition&) const { return {}; }
};

// LayoutKind::kFlat: the units of FullyShardedDataParallel.
std::unique_ptr<UnitMaker> MakeFlatUnits(const Trace& trace, const ModelIndex& index,
                                         const Strategy& strategy);
// LayoutKind::kPerParameter: the units of fully_shard.
std::unique_ptr<UnitMaker> MakePerParameterUnits(const Trace& trace, const ModelIndex& index,
                                                 const Strategy& strategy);

}  // namespace shardplan
