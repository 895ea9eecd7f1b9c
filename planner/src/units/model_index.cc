// SPDX-License-Identifier: Apache-2.0
#include "units/model_index.h"

namespace shardplan {
namespace {

void IndexChildren(const Trace& trace, ModelIndex& index) {
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    const Module& module = trace.modules[m];
    for (const std::string& child : module.children) {
      const auto found = index.by_fqn.find(module.fqn.empty() ? child : module.fqn + "." + child);
      // The children of a module registered twice are listed once, under its first name.
      if (found == index.by_fqn.end()) continue;
      index.children[m].push_back(found->second);
      index.parent[found->second] = static_cast<ModuleId>(m);
    }
  }
}

}  // namespace

bool IsUnder(std::string_view fqn, const std::string& module) {
  return module.empty() || fqn == module || fqn.starts_with(module + ".");
}

ModelIndex MakeModelIndex(const Trace& trace) {
  ModelIndex index;
  index.canonical.resize(trace.modules.size());
  index.parent.assign(trace.modules.size(), -1);
  index.children.resize(trace.modules.size());
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    index.by_fqn.emplace(trace.modules[m].fqn, static_cast<ModuleId>(m));
  }
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    const std::string& same = trace.modules[m].same_module_as;
    index.canonical[m] = same.empty() ? static_cast<ModuleId>(m) : index.by_fqn.find(same)->second;
  }
  IndexChildren(trace, index);
  return index;
}

}  // namespace shardplan
