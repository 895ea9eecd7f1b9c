// SPDX-License-Identifier: Apache-2.0
// What dtypes a strategy asks for, of a unit's parameters and of its gradients' reduction
// (MixedPrecisionPolicy, MixedPrecision).
#pragma once

#include <string_view>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// Glob over FQNs: '*' any characters but '.', '?' one character but '.'.
bool Matches(std::string_view pattern, std::string_view fqn);

// What a parameter is gathered and computed in.
DType AskedParamDType(const MixedPrecision& mixed, const UnitParameter& parameter, const PyTorchRules& rules);
// What sharded gradients of the unit are in: the grad_dtype of its parameters, which is one, or their dtype.
DType ShardedGradDType(const Unit& unit);
// What gradients are reduced in, of a unit that is computed in `computed`; `sharded`: what they are in after.
DType AskedReduceDType(const MixedPrecision& mixed, DType sharded, DType computed, const PyTorchRules& rules);

// Whether gradients that are not reduced at once are kept in another dtype than they are made in: the reduce
// dtype.
bool AccumulatesInOtherDType(const Unit& unit);

}  // namespace shardplan
