#include "shardplan/schemas/policy_description.h"

#include <algorithm>

#include "policies/policy_descriptions.h"

namespace shardplan {

const std::vector<PolicyDescription>& PolicyDescriptions() {
  static const std::vector<PolicyDescription> kDescriptions = {internal::DescribeFsdp2(),
                                                               internal::DescribeFsdp1()};
  return kDescriptions;
}

const PolicyDescription& DescriptionOf(const std::string& policy) {
  const std::vector<PolicyDescription>& all = PolicyDescriptions();
  const auto found = std::ranges::find(all, policy, &PolicyDescription::name);
  return found == all.end() ? all.front() : *found;
}

}  // namespace shardplan
