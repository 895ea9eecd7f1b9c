// SPDX-License-Identifier: Apache-2.0
// A plan for tests that need any: three layers of one weight each, units of their own, FSDP2, one step.
#pragma once

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

Plan MakeStepPlan(std::int64_t ranks);

}  // namespace shardplan::test
