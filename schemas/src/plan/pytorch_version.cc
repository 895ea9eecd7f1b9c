// SPDX-License-Identifier: Apache-2.0

#include <charconv>
#include <cstddef>
#include <system_error>
#include <utility>

#include "names/enum_names.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan {

std::string_view Name(PyTorchVersion version) { return EnumName(version); }

std::vector<std::string> PyTorchVersions() {
  return {kEnumNames<PyTorchVersion>.begin(), kEnumNames<PyTorchVersion>.end()};
}

std::optional<PyTorchVersion> PyTorchFromName(std::string_view name) {
  return EnumFromName<PyTorchVersion>(name);
}

namespace {

using Release = std::pair<int, int>;  // 2, 15

// Parses "2.15", whatever follows it but another digit.
std::optional<Release> ParseRelease(std::string_view text) {
  Release release;
  const char* const end = text.data() + text.size();
  const auto [dot, first] = std::from_chars(text.data(), end, release.first);
  if (first != std::errc{} || dot == end || *dot != '.') return std::nullopt;
  const auto [rest, second] = std::from_chars(dot + 1, end, release.second);
  return second == std::errc{} ? std::optional(release) : std::nullopt;
}

}  // namespace

std::optional<PyTorchVersion> RecordedPyTorch(std::string_view recorded_with) {
  constexpr std::string_view kProgram = "torch ";
  if (!recorded_with.starts_with(kProgram)) return std::nullopt;
  const std::optional<Release> recorded = ParseRelease(recorded_with.substr(kProgram.size()));
  if (!recorded) return std::nullopt;
  PyTorchVersion nearest = kOldestPyTorch;
  for (std::size_t v = 0; v < kEnumNames<PyTorchVersion>.size(); ++v) {
    if (ParseRelease(kEnumNames<PyTorchVersion>[v]) <= recorded) nearest = static_cast<PyTorchVersion>(v);
  }
  return nearest;
}

PyTorchVersion PlannedPyTorch(const Strategy& strategy, const Trace& trace) {
  if (strategy.pytorch) return *strategy.pytorch;
  return RecordedPyTorch(trace.recorded_with).value_or(kNewestPyTorch);
}

PyTorchRules RulesOf(const Strategy& strategy) {
  // A policy that is not built in gathers and reduces with fully_shard's code.
  const std::string_view policy = IsBuiltIn(strategy.policy) ? std::string_view(strategy.policy) : "fsdp2";
  PyTorchRules rules;
  for (const PyTorchRule& rule : kPyTorchRules) {
    const bool applies = rule.policy.empty() || rule.policy == policy;
    rules.*rule.rule = applies && PyTorchOfPlan(strategy) >= rule.since;
  }
  return rules;
}

PyTorchVersion PyTorchOfPlan(const Strategy& strategy) { return strategy.pytorch.value_or(kOldestPyTorch); }

}  // namespace shardplan
