// SPDX-License-Identifier: Apache-2.0
// The dtypes that a strategy asks for, of a unit's parameters and of its gradients' reduction
// (MixedPrecisionPolicy, MixedPrecision).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// Glob over FQNs: '*' any characters but '.', '?' one character but '.'.
bool Matches(std::string_view pattern, std::string_view fqn);

// The dtype that a parameter is gathered and computed in.
DType AskedParamDType(const MixedPrecision& mixed, const UnitParameter& parameter, const PyTorchRules& rules);

// [Note: dtypes of a gradient]
// The dtypes of fsdp2, parameter by parameter, from autograd to the optimizer:
//   made         what autograd leaves of the unsharded parameter: MadeGradDType
//   accumulated  what it is in while it waits for a later micro-batch: AccumulatedGradDType
//   reduced      one for all that are reduced together: ReduceDTypeOf
//   sharded      .grad of the shard, which the optimizer reads: ShardedGradDType
// Before gradients_stay_as_made autograd converts to what the parameter is computed in. From then on a wider
// dtype stays until the reduction's copy-in. If the gradient may be a partial sum over a mesh dimension that
// is not FSDP's, autograd converts it to the accumulated dtype (FSDPParamGroup._set_unsharded_grad_dtypes,
// FSDPParam.may_reduce_grad_outside_dp).

// The dtype in which autograd leaves the unsharded gradient.
DType MadeGradDType(const Unit& unit, const UnitParameter& parameter);
// The dtype in which the gradient waits for a later micro-batch (FSDPParam.unsharded_grad_dtype).
DType AccumulatedGradDType(const Unit& unit, const UnitParameter& parameter);
// The dtype in which gradients of these parameters of the unit are reduced together
// (FSDPParamGroup._get_reduce_dtype).
DType ReduceDTypeOf(const Unit& unit, const std::vector<std::int32_t>& parameters);
// The dtype of the sharded gradient: Tensor.grad_dtype of the parameter, or its dtype.
DType ShardedGradDType(const UnitParameter& parameter);
// May autograd leave the gradient wider than the parameter is computed in, of an accumulated dtype that is?
bool KeepsWiderGrads(const Unit& unit, const UnitParameter& parameter);
// May the gradient be a partial sum over a mesh dimension that is not FSDP's?
bool MayReduceOutsideDataParallel(const UnitParameter& parameter);
// torch.promote_types.
DType PromoteTypes(DType a, DType b);

// The dtype of reductions that a strategy asks for, for gradients of a unit that is computed in `computed`.
// `sharded`: their dtype after it.
DType AskedReduceDType(const MixedPrecision& mixed, DType sharded, DType computed, const PyTorchRules& rules);
// The promoted dtype of the unit's sharded gradients.
DType PromotedGradDType(const Unit& unit);

// Whether gradients that are not reduced at once are kept in another dtype than they are made in: the reduce
// dtype.
bool AccumulatesInOtherDType(const Unit& unit);

}  // namespace shardplan
