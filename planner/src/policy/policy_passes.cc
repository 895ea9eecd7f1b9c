// SPDX-License-Identifier: Apache-2.0
#include "policy/policy_passes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "policy/fsdp1/frozen.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/policy_knobs.h"
#include "units/fsdp1_units.h"

namespace shardplan {
namespace {

// FSDP1 casts the model's buffers before the first forward.
Status CastFsdp1Buffers(const PolicyInput& input, std::vector<ModuleBuffer>& buffers) {
  Result<std::set<ModuleId>> ignored = IgnoredModules(input.trace, input.index, input.strategy);
  if (!ignored) return std::unexpected(ignored.error());
  CastBuffers(input.index, input.partition, *ignored, buffers);
  return {};
}

struct BuiltInPolicy {
  std::string_view name;  // Strategy::policy
  PolicyPasses passes;
};

constexpr std::array<BuiltInPolicy, 2> kBuiltIn = {
    {{"fsdp2", {.make_units = MakePerParameterUnits, .wraps_inputs = true, .make = MakeFsdp2Policy}},
     {"fsdp1",
      {.make_units = MakeFlatUnits,
       .wraps_inputs = false,
       .extend_gradients = WithGradientsOfFrozenParts,
       .make = MakeFsdp1Policy,
       .change_buffers = CastFsdp1Buffers}}}};

std::string_view TypeText(const KnobValue& value) {
  static constexpr std::array<std::string_view, std::variant_size_v<KnobValue>> kTypes = {
      "true or false", "a whole number", "a number", "a string"};
  return kTypes[value.index()];
}

}  // namespace

std::vector<std::string> PlannerPolicies() {
  std::vector<std::string> names;
  for (const BuiltInPolicy& policy : kBuiltIn) names.emplace_back(policy.name);
  return names;
}

Result<PolicyPasses> FindPolicy(const Strategy& strategy, const PolicyDescription* own) {
  const auto* found = std::ranges::find(kBuiltIn, strategy.policy, &BuiltInPolicy::name);
  if (found != kBuiltIn.end()) return found->passes;
  if (own != nullptr && own->name == strategy.policy) {
    return PolicyPasses{.make_units = MakePerParameterUnits, .wraps_inputs = true, .make = own->make};
  }
  const std::string other = own == nullptr ? "one of a library (--policy-library)" : own->name;
  return MakeInputError("/policy", "unknown policy", strategy.policy,
                        fmt::format("{} or {}", fmt::join(PlannerPolicies(), ", "), other));
}

Result<Strategy> WithPolicyKnobs(Strategy strategy, const PolicyDescription& own) {
  for (auto& [name, value] : strategy.policy_knobs) {
    const std::string pointer = "/policy_knobs/" + name;
    const auto knob = std::ranges::find(own.knobs, name, &PolicyKnob::name);
    if (knob == own.knobs.end()) {
      std::vector<std::string_view> names;
      for (const PolicyKnob& known : own.knobs) names.push_back(known.name);
      return MakeInputError(pointer, fmt::format("policy {} does not have this knob", PolicyText(own)), name,
                            names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")));
    }
    const bool is_number = std::holds_alternative<double>(knob->default_value);
    const bool fits = value.index() == knob->default_value.index() ||
                      (is_number && std::holds_alternative<std::int64_t>(value));
    if (fits) continue;
    return MakeInputError(pointer, fmt::format("wrong type for a knob of policy {}", PolicyText(own)),
                          std::string(TypeText(value)), std::string(TypeText(knob->default_value)));
  }
  for (const PolicyKnob& knob : own.knobs) {
    const auto* number = std::get_if<double>(&knob.default_value);
    strategy.policy_knobs.try_emplace(knob.name, number ? KnobNumber(*number) : knob.default_value);
  }
  return strategy;
}

std::string PolicyText(const PolicyDescription& own) {
  return own.library.empty() ? own.name : fmt::format("{} ({})", own.name, own.library);
}

Error OfPolicy(const PolicyDescription& own, Error error) {
  if (error.code == ErrorCode::kInternal) error.code = ErrorCode::kBadInput;
  error.message = fmt::format("policy {}: {}", PolicyText(own), error.message);
  return error;
}

}  // namespace shardplan
