// SPDX-License-Identifier: Apache-2.0
// A plan in the terms of PyTorch's FSDP2: the settings nearest to it, and what they leave out.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// A setting of the plan's strategy that FSDP2 has no call for.
struct LeftOut {
  std::string pointer;  // "/strategy/fsdp2/part_after_backward", in the plan
  std::string what;     // in words, and what stands in its place
  bool operator==(const LeftOut&) const = default;
};

struct Fsdp2Settings {
  Strategy strategy;  // of policy fsdp2; every knob of it is a call of PyTorch's
  std::vector<LeftOut> left_out;
};

// `strategy` without what FSDP2 of its release (default: the newest) has no call for. Nothing is taken over
// from another policy's strategy: see Fsdp2SettingsOf.
Fsdp2Settings WithoutWhatFsdp2Lacks(Strategy strategy);

// A rule for each unit, the root's last.
std::vector<UnitRule> UnitRulesOf(const std::vector<Unit>& units);

// ... of a plan: one of fsdp1 gets FSDP2 with the same units, dtypes and sharding. kNegative: the plan does
// not shard, which FSDP2 always does.
Result<Fsdp2Settings> Fsdp2SettingsOf(const Plan& plan);

}  // namespace shardplan
