// SPDX-License-Identifier: Apache-2.0
#include "units/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/precision.h"
#include "units/model_communicators.h"
#include "units/unit_maker.h"
#include "units/unit_parameters.h"

namespace shardplan {
namespace {

// Parameters in ignored modules and the ignored parameters themselves, under whatever name they are given.
std::set<ParameterId> IgnoredParameters(const Trace& trace, const Strategy& strategy,
                                        const std::set<ModuleId>& ignored_modules) {
  std::set<ParameterId> ignored;
  for (const ModuleId module : ignored_modules) {
    for (const NamedParameter& named : trace.modules[module].parameters) ignored.insert(named.parameter);
  }
  const std::vector<std::string>& names = strategy.ignored_parameters;
  for (std::size_t p = 0; p < trace.parameters.size(); ++p) {
    const auto named = [&](const std::string& fqn) { return std::ranges::find(names, fqn) != names.end(); };
    const Parameter& parameter = trace.parameters[p];
    if (named(parameter.fqn) || std::ranges::any_of(parameter.shared_with, named)) {
      ignored.insert(static_cast<ParameterId>(p));
    }
  }
  return ignored;
}

// By parameter: what autograd makes its gradient in, where a backward says so; the widest of them.
std::vector<std::optional<DType>> MadeGradDTypes(const Trace& trace) {
  std::vector<std::optional<DType>> made(trace.parameters.size());
  for (const Pass& pass : trace.backwards) {
    for (const TraceEvent& event : pass.events) {
      const auto* grad = std::get_if<ParameterGradEvent>(&event);
      if (grad == nullptr || !grad->dtype) continue;
      std::optional<DType>& widest = made[grad->parameter];
      widest = widest ? PromoteTypes(*widest, *grad->dtype) : *grad->dtype;
    }
  }
  return made;
}

// One unit to make: the modules of one fully_shard call (one module for FSDP1).
struct Call {
  std::vector<ModuleId> modules;
  const UnitRule* rule = nullptr;
  std::string pointer;
};

class Partitioner {
 public:
  Partitioner(const Trace& trace, const ModelIndex& index, const Strategy& strategy, UnitMaker& maker)
      : trace_(trace),
        index_(index),
        strategy_(strategy),
        maker_(maker),
        made_grad_dtypes_(MadeGradDTypes(trace)),
        operators_are_known_(HasOperators(trace.forwards)) {}

  Result<Partition> Run(std::int64_t cluster_ranks) {
    if (Status s = maker_.Begin(cluster_ranks, result_); !s) return std::unexpected(s.error());
    Result<std::set<ModuleId>> ignored_modules = maker_.IgnoredModules();
    if (!ignored_modules) return std::unexpected(ignored_modules.error());
    ignored_ = IgnoredParameters(trace_, strategy_, *ignored_modules);
    Result<std::vector<UnitRule>> rules = maker_.Rules(strategy_.units, *ignored_modules, ignored_);
    if (!rules) return std::unexpected(rules.error());
    rules_ = std::move(*rules);
    if (Status s = ExpandRules(); !s) return std::unexpected(s.error());
    if (Status s = maker_.CheckKnobs(); !s) return std::unexpected(s.error());
    result_.unit_of_module.assign(trace_.modules.size(), -1);
    result_.managed_by.assign(trace_.modules.size(), -1);
    result_.owners.resize(trace_.parameters.size());
    for (const Call& call : calls_) {
      if (Status s = MakeUnit(call); !s) return std::unexpected(s.error());
    }
    if (Status s = maker_.Check(result_); !s) return std::unexpected(s.error());
    OrderUnits();
    return std::move(result_);
  }

 private:
  Status ExpandRules() {
    if (!maker_.HasRoot()) {
      std::erase_if(rules_,
                    [](const UnitRule& rule) { return rule.modules == std::vector<std::string>{""}; });
    }
    std::set<ModuleId> taken;
    const CompiledModules compiled(trace_);
    for (std::size_t r = 0; r < rules_.size(); ++r) {
      const UnitRule& rule = rules_[r];
      const std::string pointer = fmt::format("/units/{}", r);
      Call group{.rule = &rule, .pointer = pointer};
      for (std::size_t e = 0; e < rule.modules.size(); ++e) {
        const std::string entry_pointer = fmt::format("{}/modules/{}", pointer, e);
        Result<std::vector<std::string>> matched = MatchModules(trace_, rule.modules[e]);
        if (!matched) {
          matched.error().pointer = entry_pointer;
          return std::unexpected(matched.error());
        }
        for (const std::string& fqn : *matched) {
          const ModuleId module = index_.canonical[index_.by_fqn.find(fqn)->second];
          if (!taken.insert(module).second) {
            return MakeInputError(entry_pointer, "a module is in two units", DisplayName(fqn));
          }
          if (const Module* graph = compiled.Around(trace_.modules[module]); graph != nullptr) {
            return MakeInputError(
                entry_pointer,
                "a unit lies inside of a compiled module, whose graph needs its parameters whole",
                DisplayName(fqn), fmt::format("{}, or a module outside of it", graph->fqn));
          }
          if (rule.group) {
            group.modules.push_back(module);
          } else {
            calls_.push_back({{module}, &rule, entry_pointer});
          }
        }
      }
      if (!group.modules.empty()) {
        DropInner(group.modules);
        calls_.push_back(std::move(group));
      }
    }
    if (!taken.contains(0) && maker_.HasRoot()) calls_.push_back({{0}, nullptr, "/units"});
    if (maker_.InTreeOrder()) {
      // From the inside out: pre-order reversed has children first.
      std::stable_sort(calls_.begin(), calls_.end(),
                       [](const Call& a, const Call& b) { return a.modules[0] > b.modules[0]; });
    }
    return {};
  }

  void AddReachable(ModuleId entry, std::set<ModuleId>& found) const {
    for (const ModuleId child : index_.children[index_.canonical[entry]]) {
      if (found.insert(index_.canonical[child]).second) AddReachable(child, found);
    }
  }

  // _get_root_modules: of a group's modules those that are inside another of them are nothing of their own.
  void DropInner(std::vector<ModuleId>& modules) const {
    std::set<ModuleId> inner;
    for (const ModuleId module : modules) AddReachable(module, inner);
    std::erase_if(modules, [&](ModuleId module) { return inner.contains(module); });
  }

  // _get_managed_modules: the call's modules and what is under them, without units made before, children
  // first (FSDP2) or in named_modules() order (FSDP1).
  void Collect(ModuleId entry, std::set<ModuleId>& visited, std::vector<ModuleId>& managed) const {
    const ModuleId module = index_.canonical[entry];
    if (!visited.insert(module).second) return;
    if (maker_.InTreeOrder()) managed.push_back(module);
    for (const ModuleId child : index_.children[module]) {
      const ModuleId canonical = index_.canonical[child];
      if (result_.unit_of_module[canonical] < 0) Collect(canonical, visited, managed);
    }
    if (!maker_.InTreeOrder()) managed.push_back(module);
  }

  // The parameters of one unit, and its rule.
  struct Group {
    std::optional<UnitRule> rule;
    std::vector<NamedParameter> parameters;
  };

  // One for each mesh that the rule gives its parameters, in the order of their first parameters.
  std::vector<Group> GroupsByMesh(const UnitRule* rule, const std::vector<NamedParameter>& parameters) const {
    std::vector<Group> groups;
    const std::optional<UnitRule> own = rule == nullptr ? std::nullopt : std::optional(*rule);
    if (!own || own->parameter_meshes.empty() || parameters.empty()) return {{own, parameters}};
    for (const NamedParameter& named : parameters) {
      const Parameter& parameter = trace_.parameters[named.parameter];
      UnitRule on_mesh = *own;
      const auto mesh = std::ranges::find_if(own->parameter_meshes, [&](const ParameterMeshRule& r) {
        return MatchesAny(r.parameters, parameter.fqn, parameter.shared_with);
      });
      if (mesh != own->parameter_meshes.end()) {
        on_mesh.data_parallel = mesh->data_parallel;
        if (mesh->reshard_after_forward) on_mesh.reshard_after_forward = mesh->reshard_after_forward;
      }
      auto group = std::ranges::find(groups, std::optional(on_mesh), &Group::rule);
      if (group == groups.end()) group = groups.insert(groups.end(), {on_mesh, {}});
      group->parameters.push_back(named);
    }
    return groups;
  }

  Status MakeUnit(const Call& call) {
    const UnitId first = static_cast<UnitId>(result_.units.size());
    std::set<ModuleId> visited;
    std::vector<ModuleId> managed;
    for (const ModuleId module : call.modules) result_.unit_of_module[module] = first;
    for (const ModuleId module : call.modules) Collect(module, visited, managed);
    std::vector<NamedParameter> parameters;
    for (const ModuleId module : managed) {
      if (result_.managed_by[module] >= 0) {
        return MakeInputError(call.pointer, "a unit inside another has to be listed before it",
                              DisplayName(trace_.modules[module].fqn));
      }
      result_.managed_by[module] = first;
      for (const NamedParameter& named : trace_.modules[module].parameters) {
        if (!ignored_.contains(named.parameter)) parameters.push_back(named);
      }
    }
    const std::vector<Group> groups = GroupsByMesh(call.rule, parameters);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (Status s = MakeUnit(call, groups[g], g, groups.size()); !s) return s;
    }
    return {};
  }

  Status MakeUnit(const Call& call, const Group& group, std::size_t index, std::size_t groups) {
    UnitChoice choice{.modules = call.modules, .groups = static_cast<std::int32_t>(groups)};
    choice.unit.parameter_group = static_cast<std::int32_t>(index);
    for (const ModuleId module : call.modules) {
      choice.is_root = choice.is_root || module == 0;
      choice.unit.modules.push_back(trace_.modules[module].fqn);
    }
    for (const std::string& fqn : choice.unit.modules) {
      choice.unit.fqn += (choice.unit.fqn.empty() ? "" : ",") + fqn;
    }
    if (groups > 1) choice.unit.fqn += fmt::format("[{}]", index);
    const UnitId id = static_cast<UnitId>(result_.units.size());
    for (const NamedParameter& named : group.parameters) AddParameter(named, id, choice);
    choice.unit.orig_dtype = choice.recorded_dtype = trace_.compute_dtype;
    choice.operators_are_known = operators_are_known_;
    choice.shard_size = result_.shard_size;
    choice.replicate_size = result_.replicate_size;
    const UnitRule* rule = group.rule ? &*group.rule : nullptr;
    if (Status s = maker_.BeginUnit(rule, call.pointer, choice); !s) return s;
    SetKnobs(rule, choice);
    if (Status s = maker_.FinishUnit(call.pointer, choice, result_); !s) return s;
    result_.units.push_back(std::move(choice));
    return {};
  }

  void AddParameter(const NamedParameter& named, UnitId id, UnitChoice& choice) {
    const Parameter& parameter = trace_.parameters[named.parameter];
    std::vector<UnitParameterRef>& owners = result_.owners[named.parameter];
    if (!owners.empty() && owners.back().unit == id) return;  // tied inside the unit
    owners.push_back({id, static_cast<std::int32_t>(choice.unit.parameters.size())});
    choice.parameter_ids.push_back(named.parameter);
    choice.made_grad_dtypes.push_back(made_grad_dtypes_[named.parameter]);
    choice.any_grad_dtype.push_back(parameter.any_grad_dtype);
    choice.unit.parameters.push_back({.fqn = parameter.fqn,
                                      .shared_with = parameter.shared_with,
                                      .shape = parameter.shape,
                                      .dtype = parameter.dtype,
                                      .requires_grad = parameter.requires_grad,
                                      .index = named.parameter,
                                      .placements = parameter.placements,
                                      .grad_dtype = parameter.grad_dtype});
  }

  void SetKnobs(const UnitRule* rule, UnitChoice& choice) {
    const auto pick = [&](auto member, const auto& fallback) {
      return rule != nullptr && (rule->*member) ? rule->*member : fallback;
    };
    choice.cpu_offload = pick(&UnitRule::cpu_offload, std::optional(strategy_.cpu_offload)).value();
    const auto mixed = pick(&UnitRule::mixed_precision, strategy_.mixed_precision);
    choice.mixed_precision_given = mixed.has_value();
    choice.mixed_precision = mixed.value_or(MixedPrecision{});
    const auto reshard = pick(&UnitRule::reshard_after_forward, strategy_.reshard_after_forward);
    choice.reshard_given = reshard.has_value();
    const std::int64_t all = choice.shard_size;
    if (!reshard) {
      choice.post_forward_size = all;  // but 0 for a root, which shows at its first forward
    } else if (const bool* flag = std::get_if<bool>(&*reshard)) {
      choice.post_forward_size = *flag ? all : 0;
    } else {
      choice.post_forward_size = std::get<std::int64_t>(*reshard);
      if (choice.post_forward_size == 1) choice.post_forward_size = 0;  // as PyTorch: 1 means False
    }
  }

  // Units get their final ids in the order of their first modules in the tree, the root first.
  void OrderUnits() {
    std::vector<UnitId> order;
    std::vector<bool> seen(result_.units.size(), false);
    for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
      if (index_.canonical[m] != static_cast<ModuleId>(m)) continue;
      const UnitId unit = result_.unit_of_module[m];
      if (unit < 0) continue;
      for (const UnitId group : GroupsOf(result_, unit)) {
        if (!seen[group]) order.push_back(group);
        seen[group] = true;
      }
      result_.states.push_back(unit);
    }
    SHARDPLAN_ASSERT(order.size() == result_.units.size(), "a unit has a module in the tree");
    std::vector<UnitId> new_id(order.size());
    std::vector<UnitChoice> units;
    for (std::size_t i = 0; i < order.size(); ++i) {
      new_id[order[i]] = static_cast<UnitId>(i);
      units.push_back(std::move(result_.units[order[i]]));
    }
    result_.units = std::move(units);
    for (UnitId& unit : result_.states) unit = new_id[unit];
    for (UnitId& unit : result_.unit_of_module) unit = unit < 0 ? -1 : new_id[unit];
    for (UnitId& unit : result_.managed_by) unit = unit < 0 ? -1 : new_id[unit];
    for (std::vector<UnitParameterRef>& owners : result_.owners) {
      for (UnitParameterRef& owner : owners) owner.unit = new_id[owner.unit];
    }
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Strategy& strategy_;
  UnitMaker& maker_;
  const std::vector<std::optional<DType>> made_grad_dtypes_;
  const bool operators_are_known_;
  std::vector<UnitRule> rules_;
  std::vector<Call> calls_;
  std::set<ParameterId> ignored_;
  Partition result_;
};

}  // namespace

Result<Partition> ChooseUnits(const Trace& trace, const ModelIndex& index, const Strategy& strategy,
                              UnitMaker& maker, std::int64_t cluster_ranks) {
  Result<Partition> made = Partitioner(trace, index, strategy, maker).Run(cluster_ranks);
  if (!made) return made;
  if (Status s = AddModelCommunicators(trace, cluster_ranks, *made); !s) return std::unexpected(s.error());
  return made;
}

UnitId FirstGroupOf(const Partition& partition, UnitId unit) {
  return unit - partition.units[unit].unit.parameter_group;
}

std::vector<UnitId> GroupsOf(const Partition& partition, UnitId unit) {
  std::vector<UnitId> groups;
  const UnitId first = FirstGroupOf(partition, unit);
  for (std::int32_t g = 0; g < partition.units[unit].groups; ++g) groups.push_back(first + g);
  return groups;
}

Result<UnitId> UnitOfModule(const ModelIndex& index, const Partition& partition, const std::string& fqn) {
  const auto found = index.by_fqn.find(fqn);
  if (found == index.by_fqn.end()) return MakeInputError("", "there is no such module", fqn);
  return partition.unit_of_module[index.canonical[found->second]];
}

std::vector<UnitId> UnitsUnder(const Trace& trace, const ModelIndex& index, const Partition& partition,
                               const std::string& module) {
  std::vector<UnitId> units;
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    if (!IsUnder(trace.modules[m].fqn, module)) continue;
    const UnitId unit = partition.unit_of_module[index.canonical[m]];
    if (unit < 0 || std::ranges::find(units, unit) != units.end()) continue;
    std::ranges::copy(GroupsOf(partition, unit), std::back_inserter(units));
  }
  return units;
}

UnitId UnitAround(const ModelIndex& index, const Partition& partition, ModuleId module) {
  for (ModuleId m = module; m >= 0; m = index.parent[m]) {
    const UnitId unit = partition.unit_of_module[index.canonical[m]];
    if (unit >= 0) return unit;
  }
  return -1;
}

UnitParameterRef OwnerOf(const Partition& partition, ParameterId parameter, ModuleId module) {
  const std::vector<UnitParameterRef>& owners = partition.owners[parameter];
  if (owners.empty()) return {};
  const UnitId managing = module < 0 ? -1 : partition.managed_by[module];
  for (const UnitParameterRef& owner : owners) {
    if (owner.unit == managing) return owner;
  }
  return owners.front();
}

bool HasOperators(const std::vector<Pass>& passes) {
  return std::ranges::any_of(passes, [](const Pass& pass) {
    return std::ranges::any_of(
        pass.events, [](const TraceEvent& event) { return std::holds_alternative<OperatorEvent>(event); });
  });
}

}  // namespace shardplan
