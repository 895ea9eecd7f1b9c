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
// What gradients of parameters of this dtype, in a unit computed in `computed`, are reduced in.
DType AskedReduceDType(const MixedPrecision& mixed, DType original, DType computed,
                       const PyTorchRules& rules);

// Whether gradients that are not reduced at once are kept in another dtype than they are made in: the reduce
// dtype.
bool AccumulatesInOtherDType(const Unit& unit);

}  // namespace shardplan
