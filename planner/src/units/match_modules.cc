// SPDX-License-Identifier: Apache-2.0
// MatchModules and DefaultUnits: which modules an entry of a unit rule means.
#include <fmt/format.h>

#include <map>

#include "shardplan/planner/planner.h"
#include "units/model_index.h"

namespace shardplan {

namespace {

constexpr std::string_view kClassEntry = "class:";

// A container without a forward of its own; PyTorch refuses to make a unit of it.
bool IsContainer(const Module& module) {
  return module.class_name == "ModuleList" || module.class_name == "ModuleDict";
}

}  // namespace

Result<std::vector<std::string>> MatchModules(const Trace& trace, std::string_view entry) {
  std::vector<std::string> matches;
  const bool by_class = entry.starts_with(kClassEntry);
  const std::string_view wanted = by_class ? entry.substr(kClassEntry.size()) : entry;
  const bool by_name = by_class || wanted.find_first_of("*?") == std::string_view::npos;
  for (const Module& module : trace.modules) {
    if (!module.same_module_as.empty()) continue;  // reached by its first name
    const std::string& of_module = by_class ? module.class_name : module.fqn;
    if (by_name ? of_module == wanted : Matches(wanted, of_module)) matches.push_back(module.fqn);
  }
  if (matches.empty()) {
    return MakeInputError("", by_class ? "no module has this class" : "no module has this name",
                          std::string(entry), "an FQN, a pattern over FQNs, or class:NAME");
  }
  return matches;
}

namespace {

// The elements of containers of this class, not nested in another such element, that repeat.
UnitRule BlocksIn(const Trace& trace, std::string_view container) {
  std::map<std::string, std::size_t> index;
  for (std::size_t m = 0; m < trace.modules.size(); ++m) index.emplace(trace.modules[m].fqn, m);
  UnitRule blocks;
  std::string inside;  // prefix of the block being passed over (modules are in pre-order)
  for (const Module& module : trace.modules) {
    if (!inside.empty() && module.fqn.starts_with(inside + ".")) continue;
    const std::size_t dot = module.fqn.rfind('.');
    if (module.fqn.empty() || !module.same_module_as.empty()) continue;
    const auto parent = index.find(dot == std::string::npos ? "" : module.fqn.substr(0, dot));
    if (parent == index.end()) continue;
    const Module& list = trace.modules[parent->second];
    if (list.class_name != container || list.children.size() < 2 || IsContainer(module)) continue;
    blocks.modules.push_back(module.fqn);
    inside = module.fqn;
  }
  return blocks;
}

}  // namespace

// Blocks are what people wrap by hand: the elements of ModuleLists; in a model without any, of ModuleDicts
// (torchtitan's layers).
std::vector<UnitRule> DefaultUnits(const Trace& trace) {
  UnitRule blocks = BlocksIn(trace, "ModuleList");
  if (blocks.modules.empty()) blocks = BlocksIn(trace, "ModuleDict");
  std::vector<UnitRule> rules;
  if (!blocks.modules.empty()) rules.push_back(std::move(blocks));
  rules.push_back(UnitRule{.modules = {""}});
  return rules;
}

}  // namespace shardplan
