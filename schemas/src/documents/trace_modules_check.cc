// SPDX-License-Identifier: Apache-2.0
#include "documents/trace_modules_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace shardplan {
namespace {

class ModulesCheck {
 public:
  explicit ModulesCheck(const Trace& trace) : trace_(trace) {}

  Status Run() {
    if (trace_.modules.empty())
      return MakeInputError("/modules", "there is no module", "an empty list", "the root");
    if (!trace_.modules[0].fqn.empty()) {
      return MakeInputError("/modules/0/fqn", "the first module is the root", trace_.modules[0].fqn, "\"\"");
    }
    for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
      if (modules_.emplace(trace_.modules[m].fqn, m).second) continue;
      return MakeInputError(Pointer(m, "/fqn"), "another module has the same name", trace_.modules[m].fqn,
                            "a new name");
    }
    for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
      if (Status status = CheckModule(m); !status) return status;
    }
    return CheckParameters();
  }

 private:
  static std::string Pointer(std::size_t module, std::string_view field) {
    return fmt::format("/modules/{}{}", module, field);
  }

  Status CheckModule(std::size_t m) {
    const Module& module = trace_.modules[m];
    if (const std::string& same = module.same_module_as; !same.empty()) {
      const auto first = modules_.find(same);
      if (first == modules_.end() || first->second >= m ||
          !trace_.modules[first->second].same_module_as.empty()) {
        return MakeInputError(Pointer(m, "/same_module_as"), "no module before this one was first seen so",
                              same, "the name of a module before this one");
      }
    }
    if (m > 0 && !listed_.contains(module.fqn)) {
      return MakeInputError(Pointer(m, "/fqn"), "no module before this one has it as a child", module.fqn,
                            "a module behind the one that it is a child of");
    }
    for (std::size_t c = 0; c < module.children.size(); ++c) {
      if (Status status = CheckChild(m, c); !status) return status;
    }
    return CheckRegistered(m);
  }

  Status CheckChild(std::size_t m, std::size_t c) {
    const Module& module = trace_.modules[m];
    const std::string fqn = ChildName(module, module.children[c]);
    const std::string pointer = Pointer(m, fmt::format("/children/{}", c));
    const auto child = modules_.find(fqn);
    // The children of a module registered twice are listed once, under its first name.
    if (child == modules_.end() && !module.same_module_as.empty()) return {};
    if (child == modules_.end()) {
      return MakeInputError(pointer, "a child has no entry in modules", fqn, "the name of a module");
    }
    if (!listed_.insert(child->first).second) {
      return MakeInputError(pointer, "this module is a child already", fqn, "each module once");
    }
    return {};
  }

  Status CheckRegistered(std::size_t m) const {
    const Module& module = trace_.modules[m];
    for (std::size_t p = 0; p < module.parameters.size(); ++p) {
      const NamedParameter& named = module.parameters[p];
      const std::string pointer = Pointer(m, fmt::format("/parameters/{}/parameter", p));
      if (named.parameter < 0 || named.parameter >= std::ssize(trace_.parameters)) {
        return MakeInputError(pointer, "a module names a parameter that does not exist",
                              fmt::format("{}", named.parameter),
                              fmt::format("less than {}", trace_.parameters.size()));
      }
    }
    return {};
  }

  Status CheckParameters() const {
    std::unordered_set<std::string_view> names;
    for (std::size_t p = 0; p < trace_.parameters.size(); ++p) {
      const Parameter& parameter = trace_.parameters[p];
      const std::string pointer = fmt::format("/parameters/{}", p);
      if (!names.insert(parameter.fqn).second) {
        return MakeInputError(pointer + "/fqn", "another parameter has the same name", parameter.fqn,
                              "a new name");
      }
      const auto negative = std::ranges::find_if(parameter.shape, [](std::int64_t size) { return size < 0; });
      if (negative != parameter.shape.end()) {
        return MakeInputError(pointer + "/shape", "a size is negative", fmt::format("{}", *negative),
                              "0 or more");
      }
    }
    return {};
  }

  static std::string ChildName(const Module& module, const std::string& name) {
    return module.fqn.empty() ? name : module.fqn + "." + name;
  }

  const Trace& trace_;
  std::unordered_map<std::string_view, std::size_t> modules_;
  std::unordered_set<std::string_view> listed_;  // children of the modules before
};

}  // namespace

Status CheckModules(const Trace& trace) { return ModulesCheck(trace).Run(); }

std::vector<ModuleId> CanonicalModules(const Trace& trace) {
  std::unordered_map<std::string_view, ModuleId> modules;
  std::vector<ModuleId> canonical;
  for (const Module& module : trace.modules) {
    const auto id = static_cast<ModuleId>(canonical.size());
    modules.emplace(module.fqn, id);
    canonical.push_back(module.same_module_as.empty() ? id : modules.at(module.same_module_as));
  }
  return canonical;
}

}  // namespace shardplan
