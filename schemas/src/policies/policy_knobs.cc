#include "shardplan/schemas/policy_knobs.h"

#include <algorithm>

#include "policies/policies.h"

namespace shardplan {

const std::vector<PolicyKnobs>& AllPolicyKnobs() {
  static const std::vector<PolicyKnobs> kPolicies = {internal::Fsdp2PolicyKnobs(),
                                                     internal::Fsdp1PolicyKnobs()};
  return kPolicies;
}

const PolicyKnobs& KnobsOf(const std::string& policy) {
  const std::vector<PolicyKnobs>& all = AllPolicyKnobs();
  const auto found = std::ranges::find(all, policy, &PolicyKnobs::name);
  return found == all.end() ? all.front() : *found;
}

}  // namespace shardplan
