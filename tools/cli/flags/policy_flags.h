// SPDX-License-Identifier: Apache-2.0
// A policy that is not built in: its library, and its knobs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "flags/flag_group.h"
#include "shardplan/planner/policy.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

struct PolicyFlags {
  std::string library;
  std::vector<std::string> knobs;  // "max_live_parameters=1e9"
};

void AddPolicyFlags(FlagGroup& group, PolicyFlags& flags);

// nullopt: no library is named. kBadInput as PolicyLibrary::Load.
Result<std::optional<PolicyLibrary>> LoadPolicy(const PolicyFlags& flags);

// Makes `policy` that of the strategy, and writes the knobs over its own. kUsage: a knob that the policy does
// not have, or a value of another type. `policy`: null where no library is named.
Status ApplyPolicyFlags(const PolicyFlags& flags, const PolicyDescription* policy, Strategy& strategy);

}  // namespace shardplan::cli
