// SPDX-License-Identifier: Apache-2.0
#include "units/fsdp1_units.h"

#include <fmt/format.h>

#include <algorithm>

#include "shardplan/planner/planner.h"

namespace shardplan {
namespace {

constexpr std::string_view kClassPrefix = "class:";

// isinstance(module, _BatchNorm): torch.nn.modules.batchnorm's classes.
bool IsBatchNorm(std::string_view name) {
  const bool lazy = name.starts_with("Lazy");
  if (lazy) name.remove_prefix(4);
  return name == "BatchNorm1d" || name == "BatchNorm2d" || name == "BatchNorm3d" ||
         (!lazy && name == "SyncBatchNorm");
}

bool IsOneOf(const std::string& class_name, const std::vector<std::string>& classes) {
  return std::ranges::any_of(classes, [&](const std::string& wanted) {
    return wanted == class_name || (wanted == "_BatchNorm" && IsBatchNorm(class_name));
  });
}

std::int64_t NumelOf(const Parameter& parameter) {
  std::int64_t numel = 1;
  for (const std::int64_t size : parameter.shape) numel *= size;
  return numel;
}

// _recursive_wrap with size_based_auto_wrap_policy.
class SizeBasedWrapper {
 public:
  SizeBasedWrapper(const Trace& trace, const ModelIndex& index, const SizeBasedWrap& wrap,
                   const std::vector<std::string>* ignored_classes, const std::set<ModuleId>& left_out,
                   const std::set<ParameterId>& ignored_parameters)
      : trace_(trace),
        index_(index),
        wrap_(wrap),
        ignored_classes_(ignored_classes),
        left_out_(left_out),
        ignored_parameters_(ignored_parameters) {}

  // The root itself is wrapped whatever its size.
  std::vector<ModuleId> Run() {
    Wrap(0);
    return std::move(units_);
  }

 private:
  void CollectParameters(ModuleId module, std::set<ParameterId>& into) const {
    for (const NamedParameter& named : trace_.modules[module].parameters) into.insert(named.parameter);
    for (const ModuleId child : index_.children[module]) CollectParameters(index_.canonical[child], into);
  }

  std::int64_t NumelBelow(ModuleId module) const {
    std::set<ParameterId> parameters;
    CollectParameters(module, parameters);
    std::int64_t numel = 0;
    for (const ParameterId parameter : parameters) {
      if (!ignored_parameters_.contains(parameter)) numel += NumelOf(trace_.parameters[parameter]);
    }
    return numel;
  }

  // Elements in the units made of `module` and below. The classes that mixed precision ignores are a second
  // policy beside the size, which always looks further down: then no class is a leaf.
  std::int64_t Wrap(ModuleId module) {
    const std::string& name = trace_.modules[module].class_name;
    const std::int64_t numel = NumelBelow(module);
    const bool descends = ignored_classes_ != nullptr ||
                          (numel >= wrap_.min_num_params && !IsOneOf(name, wrap_.force_leaf_modules));
    if (!descends) return 0;
    std::int64_t wrapped = 0;
    for (const ModuleId child : index_.children[module]) {
      const ModuleId canonical = index_.canonical[child];
      if (left_out_.contains(canonical) || !visited_.insert(canonical).second) continue;
      wrapped += Wrap(canonical);
    }
    if (module == 0) return wrapped;
    const bool large = numel - wrapped >= wrap_.min_num_params && !IsOneOf(name, wrap_.exclude_wrap_modules);
    const bool own = ignored_classes_ != nullptr && IsOneOf(name, *ignored_classes_);
    if (!large && !own) return wrapped;
    units_.push_back(module);
    return numel;
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const SizeBasedWrap& wrap_;
  const std::vector<std::string>* ignored_classes_;  // null: no mixed precision
  const std::set<ModuleId>& left_out_;
  const std::set<ParameterId>& ignored_parameters_;
  std::set<ModuleId> visited_;
  std::vector<ModuleId> units_;
};

}  // namespace

Result<std::set<ModuleId>> IgnoredModules(const Trace& trace, const ModelIndex& index,
                                          const Strategy& strategy) {
  std::set<ModuleId> ignored;
  const std::vector<std::string>& entries = strategy.fsdp1.ignored_modules;
  for (std::size_t e = 0; e < entries.size(); ++e) {
    Result<std::vector<std::string>> matched = MatchModules(trace, entries[e]);
    if (!matched) {
      matched.error().pointer = fmt::format("/fsdp1/ignored_modules/{}", e);
      return std::unexpected(matched.error());
    }
    std::vector<ModuleId> open;
    for (const std::string& fqn : *matched) open.push_back(index.canonical[index.by_fqn.find(fqn)->second]);
    while (!open.empty()) {
      const ModuleId module = open.back();
      open.pop_back();
      if (!ignored.insert(module).second) continue;
      for (const ModuleId child : index.children[module]) open.push_back(index.canonical[child]);
    }
  }
  return ignored;
}

Result<std::vector<UnitRule>> ExpandWrapPolicy(const Trace& trace, const ModelIndex& index,
                                               const Strategy& strategy, std::vector<UnitRule> rules,
                                               const std::set<ModuleId>& ignored_modules,
                                               const std::set<ParameterId>& ignored_parameters) {
  std::set<ModuleId> taken;  // in a unit by hand, or not to be in one
  const auto module_of = [&](const std::string& fqn) {
    return index.canonical[index.by_fqn.find(fqn)->second];
  };
  bool has_policy = strategy.fsdp1.size_based_wrap.has_value();
  for (std::size_t r = 0; r < rules.size(); ++r) {
    for (std::size_t e = 0; e < rules[r].modules.size(); ++e) {
      if (rules[r].modules[e].starts_with(kClassPrefix)) {
        has_policy = true;
        continue;
      }
      Result<std::vector<std::string>> matched = MatchModules(trace, rules[r].modules[e]);
      if (!matched) {
        matched.error().pointer = fmt::format("/units/{}/modules/{}", r, e);
        return std::unexpected(matched.error());
      }
      for (const std::string& fqn : *matched) taken.insert(module_of(fqn));
    }
  }
  taken.insert(ignored_modules.begin(), ignored_modules.end());
  for (std::size_t r = 0; r < rules.size(); ++r) {
    std::vector<std::string> modules;
    for (std::size_t e = 0; e < rules[r].modules.size(); ++e) {
      const std::string& entry = rules[r].modules[e];
      if (!entry.starts_with(kClassPrefix)) {
        modules.push_back(entry);
        continue;
      }
      Result<std::vector<std::string>> matched = MatchModules(trace, entry);
      if (!matched) {
        matched.error().pointer = fmt::format("/units/{}/modules/{}", r, e);
        return std::unexpected(matched.error());
      }
      for (const std::string& fqn : *matched) {
        if (taken.insert(module_of(fqn)).second) modules.push_back(fqn);
      }
    }
    rules[r].modules = std::move(modules);
  }
  if (!has_policy) return rules;
  const std::vector<std::string>* classes =
      strategy.mixed_precision ? &strategy.mixed_precision->module_classes_to_ignore : nullptr;
  std::vector<ModuleId> made;
  if (strategy.fsdp1.size_based_wrap) {
    made = SizeBasedWrapper(trace, index, *strategy.fsdp1.size_based_wrap, classes, taken, ignored_parameters)
               .Run();
  } else if (classes != nullptr) {
    for (std::size_t m = 0; m < trace.modules.size(); ++m) {
      const ModuleId module = static_cast<ModuleId>(m);
      const bool first = index.canonical[m] == module && !taken.contains(module);
      if (first && IsOneOf(trace.modules[m].class_name, *classes)) made.push_back(module);
    }
  }
  UnitRule by_policy, in_full_precision{.mixed_precision = MixedPrecision{}};
  for (const ModuleId module : made) {
    const Module& chosen = trace.modules[module];
    const bool full = classes != nullptr && IsOneOf(chosen.class_name, *classes);
    (full ? in_full_precision : by_policy).modules.push_back(chosen.fqn);
  }
  for (UnitRule* rule : {&by_policy, &in_full_precision}) {
    if (!rule->modules.empty()) rules.push_back(std::move(*rule));
  }
  return rules;
}

void CastBuffers(const ModelIndex& index, const Partition& partition,
                 const std::set<ModuleId>& ignored_modules, std::vector<ModuleBuffer>& buffers) {
  for (ModuleBuffer& buffer : buffers) {
    const std::size_t dot = buffer.fqn.rfind('.');
    const auto owner = index.by_fqn.find(dot == std::string::npos ? "" : buffer.fqn.substr(0, dot));
    if (owner == index.by_fqn.end() || !IsFloatingPoint(buffer.dtype)) continue;
    ModuleId module = owner->second;
    if (ignored_modules.contains(index.canonical[module])) continue;
    while (partition.unit_of_module[index.canonical[module]] < 0) module = index.parent[module];
    const UnitChoice& unit = partition.units[partition.unit_of_module[index.canonical[module]]];
    buffer.dtype = unit.mixed_precision.buffer_dtype.value_or(buffer.dtype);
  }
}

}  // namespace shardplan
