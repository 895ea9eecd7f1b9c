// SPDX-License-Identifier: Apache-2.0
#include "policy/description.h"

#include <algorithm>
#include <array>

#include "policy/fsdp1/frozen.h"
#include "policy/fsdp1/units.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

// FSDP1 casts the model's buffers before the first forward.
Status CastFsdp1Buffers(const PolicyInput& input, std::vector<ModuleBuffer>& buffers) {
  Result<std::set<ModuleId>> ignored = IgnoredModules(input.trace, input.index, input.strategy);
  if (!ignored) return std::unexpected(ignored.error());
  CastBuffers(input.index, input.partition, *ignored, buffers);
  return {};
}

constexpr std::array<PolicyDescription, 2> kPolicies = {{
    {.name = "fsdp2", .make_units = MakePerParameterUnits, .wraps_inputs = true, .make = MakeFsdp2Policy},
    {.name = "fsdp1",
     .make_units = MakeFlatUnits,
     .wraps_inputs = false,
     .extend_gradients = WithGradientsOfFrozenParts,
     .make = MakeFsdp1Policy,
     .change_buffers = CastFsdp1Buffers},
}};

}  // namespace

std::vector<std::string> PlannerPolicies() {
  std::vector<std::string> names;
  for (const PolicyDescription& policy : kPolicies) names.emplace_back(policy.name);
  return names;
}

const PolicyDescription& FindPolicy(std::string_view name) {
  const auto* found = std::ranges::find(kPolicies, name, &PolicyDescription::name);
  SHARDPLAN_ASSERT(found != kPolicies.end(), "CheckStrategy knows the policies by AllPolicyKnobs");
  return *found;
}

}  // namespace shardplan
