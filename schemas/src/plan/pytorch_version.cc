#include "shardplan/schemas/pytorch_version.h"

#include <fmt/format.h>

#include <cstddef>

#include "names/enum_names.h"
#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan {

std::string_view Name(PyTorchVersion version) { return EnumName(version); }

std::vector<std::string> PyTorchVersions() {
  return {kEnumNames<PyTorchVersion>.begin(), kEnumNames<PyTorchVersion>.end()};
}

std::optional<PyTorchVersion> PyTorchFromName(std::string_view name) {
  return EnumFromName<PyTorchVersion>(name);
}

std::optional<PyTorchVersion> RecordedPyTorch(std::string_view recorded_with) {
  for (std::size_t v = 0; v < kEnumNames<PyTorchVersion>.size(); ++v) {
    if (recorded_with.starts_with(fmt::format("torch {}.", kEnumNames<PyTorchVersion>[v]))) {
      return static_cast<PyTorchVersion>(v);
    }
  }
  return std::nullopt;
}

PyTorchVersion PlannedPyTorch(const Strategy& strategy, const Trace& trace) {
  if (strategy.pytorch) return *strategy.pytorch;
  return RecordedPyTorch(trace.recorded_with).value_or(kNewestPyTorch);
}

PyTorchRules RulesOf(const Strategy& strategy) {
  PyTorchRules rules;
  for (const PyTorchRule& rule : kPyTorchRules) {
    const bool applies = rule.policy.empty() || rule.policy == strategy.policy;
    rules.*rule.rule = applies && PyTorchOfPlan(strategy) >= rule.since;
  }
  return rules;
}

PyTorchVersion PyTorchOfPlan(const Strategy& strategy) { return strategy.pytorch.value_or(kOldestPyTorch); }

}  // namespace shardplan
