// One function for each policy, in a file of its own.
#pragma once

#include "shardplan/schemas/policy_description.h"

namespace shardplan::internal {

PolicyDescription DescribeFsdp1();
PolicyDescription DescribeFsdp2();

}  // namespace shardplan::internal
