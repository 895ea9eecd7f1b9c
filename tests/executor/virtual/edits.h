// SPDX-License-Identifier: Apache-2.0
// Plans edited by hand, as a person would who thinks that he knows better: an instruction or a table changed,
// in one place or wherever it occurs, and a second edit near the first one that may hide it.
#pragma once

#include <cstdint>

#include "shardplan/schemas/plan.h"
#include "tests/executor/virtual/field_mutations.h"

namespace shardplan::test {

// A version of the plan with `edits` random edits. It is the plan itself if they cancel out.
FieldMutation RandomEdits(const Plan& plan, std::uint64_t seed, int edits);

}  // namespace shardplan::test
