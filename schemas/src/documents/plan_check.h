// SPDX-License-Identifier: Apache-2.0
// Rules of a plan that the field lists cannot say and later code relies on.
#pragma once

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Lists that must not be empty, and indices into the parameters of a unit. All other ids are in range already
// (the reader of the JSON or text form saw to it).
Status CheckPlan(const Plan& plan);

}  // namespace shardplan
