#include "units/model_index.h"

#include <fmt/format.h>

namespace shardplan {
namespace {

std::string ModulePointer(std::size_t module) { return fmt::format("/modules/{}", module); }

Status IndexChildren(const Trace& trace, ModelIndex& index) {
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    const Module& module = trace.modules[m];
    for (const std::string& child : module.children) {
      const std::string fqn = module.fqn.empty() ? child : module.fqn + "." + child;
      const auto found = index.by_fqn.find(fqn);
      if (found == index.by_fqn.end()) {
        // The children of a module registered twice are listed once, under its first name.
        if (!module.same_module_as.empty()) continue;
        return MakeInputError(ModulePointer(m) + "/children", "a child has no entry in modules", fqn);
      }
      index.children[m].push_back(found->second);
      index.parent[found->second] = static_cast<ModuleId>(m);
    }
  }
  return {};
}

Status CheckParameters(const Trace& trace) {
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    for (const NamedParameter& named : trace.modules[m].parameters) {
      if (named.parameter < 0 || named.parameter >= static_cast<ParameterId>(trace.parameters.size())) {
        return MakeInputError(
            ModulePointer(m) + "/parameters", "a module names a parameter that does not exist",
            fmt::format("{}", named.parameter), fmt::format("0 to {}", trace.parameters.size() - 1));
      }
    }
  }
  for (std::size_t p = 0; p < trace.parameters.size(); ++p) {
    for (const std::int64_t size : trace.parameters[p].shape) {
      if (size < 0) {
        return MakeInputError(fmt::format("/parameters/{}/shape", p), "a size is negative",
                              fmt::format("{}", size), "0 or more");
      }
    }
  }
  return {};
}

}  // namespace

Result<ModelIndex> MakeModelIndex(const Trace& trace) {
  if (trace.modules.empty()) return MakeInputError("/modules", "a trace needs at least the root module");
  if (!trace.modules[0].fqn.empty()) {
    return MakeInputError("/modules/0/fqn", "the first module is the root", trace.modules[0].fqn, "\"\"");
  }
  ModelIndex index;
  index.canonical.resize(trace.modules.size());
  index.parent.assign(trace.modules.size(), -1);
  index.children.resize(trace.modules.size());
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    const Module& module = trace.modules[m];
    if (!index.by_fqn.emplace(module.fqn, static_cast<ModuleId>(m)).second) {
      return MakeInputError(ModulePointer(m) + "/fqn", "two modules have the same FQN", module.fqn);
    }
  }
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    index.canonical[m] = static_cast<ModuleId>(m);
    const std::string& same = trace.modules[m].same_module_as;
    if (same.empty()) continue;
    const auto found = index.by_fqn.find(same);
    if (found == index.by_fqn.end()) {
      return MakeInputError(ModulePointer(m) + "/same_module_as", "there is no such module", same);
    }
    index.canonical[m] = found->second;
  }
  if (Status status = IndexChildren(trace, index); !status) return std::unexpected(status.error());
  if (Status status = CheckParameters(trace); !status) return std::unexpected(status.error());
  return index;
}

}  // namespace shardplan
