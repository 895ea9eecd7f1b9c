// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/policy_knobs.h"

#include <algorithm>
#include <cmath>

#include "policies/policies.h"

namespace shardplan {

DataParallelDims internal::GivenDims(const Strategy& strategy) {
  return strategy.data_parallel.value_or(DataParallelDims{{"shard"}, {"replicate"}});
}

bool internal::Trains(const Unit& unit) {
  return std::ranges::any_of(unit.parameters, &UnitParameter::requires_grad);
}

std::vector<MixedPrecision> internal::GivenPrecisions(const Strategy& strategy) {
  std::vector<MixedPrecision> all = {strategy.mixed_precision.value_or(MixedPrecision{})};
  for (const UnitRule& rule : strategy.units) {
    if (rule.mixed_precision) all.push_back(*rule.mixed_precision);
  }
  return all;
}

const std::vector<PolicyKnobs>& AllPolicyKnobs() {
  static const std::vector<PolicyKnobs> kPolicies = {internal::Fsdp2PolicyKnobs(),
                                                     internal::Fsdp1PolicyKnobs()};
  return kPolicies;
}

KnobValue KnobNumber(double value) {
  constexpr double kTwoTo63 = 9223372036854775808.0;
  const bool whole = value >= -kTwoTo63 && value < kTwoTo63 && std::trunc(value) == value;
  return whole ? KnobValue(static_cast<std::int64_t>(value)) : KnobValue(value);
}

bool IsBuiltIn(std::string_view policy) {
  return std::ranges::find(AllPolicyKnobs(), policy, &PolicyKnobs::name) != AllPolicyKnobs().end();
}

const PolicyKnobs& KnobsOf(const std::string& policy) {
  static const PolicyKnobs kForeign = internal::ForeignPolicyKnobs();
  const std::vector<PolicyKnobs>& all = AllPolicyKnobs();
  const auto found = std::ranges::find(all, policy, &PolicyKnobs::name);
  return found == all.end() ? kForeign : *found;
}

}  // namespace shardplan
