// SPDX-License-Identifier: Apache-2.0
// The gradient of a flat parameter: what autograd, FlatParamHandle and the user do with it (_flat_param.py).
// How it is reduced is in reduce_grad.h.
#pragma once

#include "policy/fsdp1/flat_param_handle.h"

namespace shardplan::fsdp1 {

// The dtype of the gradient that autograd makes.
DType GradDType(const FlatParamHandle& handle);
// That it is reduced in.
DType ReduceDType(const FlatParamHandle& handle);
// The dtype of the sharded gradient. NO_SHARD keeps the dtype of the reduction when it is asked to keep low
// precision.
DType ShardedGradDType(const FlatParamHandle& handle);
// The communication hook casts, not FSDP1 (_low_precision_hook_enabled).
bool LowPrecisionHookEnabled(const Context& context);

// The sharded gradient, in the dtype that it is reduced to.
BufferId ShardedGrad(const FlatParamHandle& handle);

// Autograd's work before the post-backward hook: the gradients of the views become .grad, or are added to it.
// Returns the buffer that was added; -1: nothing was. The engine holds it until the node's hooks have run,
// then it is the caller's to free (FreeAddedGrad).
BufferId AccumulateGrad(FlatParamHandle& handle);
void FreeAddedGrad(FlatParamHandle& handle, BufferId added);
// Puts the reduced gradient aside. A shard that was kept in the low precision is added to in the original
// dtype.
void PrepareGradientForBackward(FlatParamHandle& handle);
// Drops the device's copy of an offloaded gradient; with keep_low_precision_grads casts the shard.
void PrepareGradientForOptim(FlatParamHandle& handle, StreamId stream);
// summon_full_params(with_grads): the ranks count those without a gradient, and gather it unless all are.
void UnshardGrad(FlatParamHandle& handle);
void ReshardGrad(FlatParamHandle& handle);
// _reset_flat_param_grad_info_if_needed, of one that the user has zeroed: the gradients are no more.
void ResetGrad(FlatParamHandle& handle);

}  // namespace shardplan::fsdp1
