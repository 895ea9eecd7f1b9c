// SPDX-License-Identifier: Apache-2.0
// Buffer roles: what a buffer of each role is, in one table. Verifier, planner, simulator, executor, the
// names in documents, the page of memory and docs/reference/plan-format.md read it. A role without a row, or
// a new enumerator that a switch over a column forgets, does not compile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

enum class RoleContent : std::uint8_t {
  kParameter,
  kGradient,
  kState,       // the optimizer's: states, and what its step takes and gives back
  kUpdate,      // of matrices, between gradients and parameters
  kActivation,  // storages of the model
  kOrder,       // what ranks compare
  kModel,       // buffers of the model's modules
};

// The arrangement of a buffer's content; the unit's layout says the rest.
//
// [Note: arrangements]
// Parameters a [3, 2] and b [2] on two ranks ("--" is padding):
//
//   kShard   a[0:2]  b[0:1]                       the padded pieces of one rank, parameter by parameter
//   kSlots   a[0:2]  b[0:1] | a[2:3] --  b[1:2]   such pieces of all ranks of a group, rank by rank
//   kWhole   a[0:3] --  b[0:2]                    each parameter as it is, padded at its end
//
// The input of the first of two reductions has the pieces in the order in which they come out: InnerSlot in
// layout.h. A flat unit's pieces are equal and lie one after the other, so that its slots are whole. So are
// those of one parameter that is cut along its first dimension, and everything on one rank.
enum class Arrangement : std::uint8_t {
  kNone,  // neither parameters nor gradients of a unit: a copy moves it part by part
  kShard,
  kSlots,
  kWhole,
};

// Which dtypes of its unit a buffer may have (layout.h: DTypeIn; verifier: LayoutOfDType).
enum class RoleDType : std::uint8_t {
  kAny,
  kOriginal,              // of the parameter
  kGathered,              // that the parameter is gathered and computed in
  kGatheredOrOriginal,    // ... or a copy of the shard
  kMade,                  // that autograd leaves the gradient in
  kAccumulated,           // that waits for a later micro-batch
  kReduced,               // of the reduction
  kReducedOrShardedGrad,  // ... or, cast before it goes to the host, of the sharded gradient
  kShardedGradOrReduced,  // of the sharded gradient; fsdp1 may keep the low precision
  kShardedGrad,
};

enum class RoleMemory : std::uint8_t { kDevice, kHost, kEither };

enum class RoleLifetime : std::uint8_t {
  kScratch,      // from one instruction of a unit to the next
  kUnsharded,    // while the unit is unsharded
  kBackward,     // from the backward that makes it until it is reduced
  kAccumulated,  // until a later micro-batch reduces it
  kPasses,       // between a forward and its backward
  kOptimizer,    // one step of the optimizer
  kState,        // of the training state: from step to step, or until zero_grad
  kPersistent,   // as long as the model
};

// How far a gradient is reduced.
enum class RoleReduction : std::uint8_t {
  kNone,  // no gradient
  kUnreduced,
  kInput,    // laid out for a reduction
  kInner,    // over the inner ranks of two levels
  kPartial,  // over the shards, and not over the replicas
  kReduced,
};

// The name in profiles of the time in which a buffer of the role begins or ends (plan_ranges.h).
enum class RoleRange : std::uint8_t {
  kNone,
  kAllGather,      // FSDP::all_gather
  kGathered,       // FSDP::all_gather where it begins
  kUnsharded,      // FSDP::all_gather_copy_out where it begins (flat: all_gather), the reshard where it ends
  kReduceScatter,  // FSDP::post_backward_reduce where it begins, the wait for the one before where it ends
  kReduce,         // FSDP::post_backward_reduce
};

// Whether each parameter has a part of its own: modules and optimizers see the parts.
enum class RoleParts : std::uint8_t { kAny, kByParameter };

// Without defaults: a row that lacks a column does not compile.
struct BufferRoleDescription {
  BufferRole role;
  std::string_view name;  // in the documents
  RoleContent holds;
  Arrangement arrangement;
  RoleParts parts;
  RoleDType dtype;
  RoleMemory memory;
  RoleLifetime lifetime;
  RoleReduction reduction;
  RoleRange range;
  std::string_view pytorch;  // PyTorch's word for it, as of 2.15; "": it has none
};

namespace buffer_roles {

using enum BufferRole;
using C = RoleContent;
using A = Arrangement;
using P = RoleParts;
using D = RoleDType;
using M = RoleMemory;
using L = RoleLifetime;
using R = RoleReduction;
using N = RoleRange;

// In the order of the enumerators.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wmissing-field-initializers"
// clang-format off
inline constexpr auto kTable = std::to_array<BufferRoleDescription>({
//   role                        name                          holds           arrangement  parts            dtype                     memory       lifetime         reduction       range
    {kParamSharded,             "param_sharded",              C::kParameter,  A::kShard,   P::kByParameter, D::kOriginal,             M::kEither,  L::kState,       R::kNone,       N::kNone,          "FSDPParam._sharded_param_data, FlatParameter._local_shard"},
    {kParamUnsharded,           "param_unsharded",            C::kParameter,  A::kWhole,   P::kByParameter, D::kGathered,             M::kEither,  L::kUnsharded,   R::kNone,       N::kUnsharded,     "FSDPParam._unsharded_param, FlatParameter._full_param_padded"},
    {kParamPostForwardShard,    "param_post_forward_shard",   C::kParameter,  A::kShard,   P::kAny,         D::kGathered,             M::kDevice,  L::kScratch,     R::kNone,       N::kNone,          "FSDPParam._sharded_post_forward_param_data"},
    {kAllGatherInput,           "all_gather_input",           C::kParameter,  A::kShard,   P::kAny,         D::kGatheredOrOriginal,   M::kDevice,  L::kScratch,     R::kNone,       N::kAllGather,     "FSDPParam.all_gather_inputs, FlatParameter._mp_shard"},
    {kAllGatherOutput,          "all_gather_output",          C::kParameter,  A::kSlots,   P::kAny,         D::kGathered,             M::kDevice,  L::kScratch,     R::kNone,       N::kGathered,      "AllGatherResult.all_gather_output"},
    {kReduceScatterInput,       "reduce_scatter_input",       C::kGradient,   A::kSlots,   P::kAny,         D::kReduced,              M::kDevice,  L::kScratch,     R::kInput,      N::kReduceScatter, "ReduceScatterState.reduce_scatter_input"},
    {kReduceScatterOutput,      "reduce_scatter_output",      C::kGradient,   A::kShard,   P::kAny,         D::kReducedOrShardedGrad, M::kDevice,  L::kScratch,     R::kReduced,    N::kReduce,        "foreach_reduce's reduce_output"},
    {kGradUnsharded,            "grad_unsharded",             C::kGradient,   A::kWhole,   P::kByParameter, D::kMade,                 M::kDevice,  L::kBackward,    R::kUnreduced,  N::kReduce,        "FSDPParam.unsharded_param.grad, FlatParameter.grad"},
    {kGradUnshardedAccumulated, "grad_unsharded_accumulated", C::kGradient,   A::kWhole,   P::kAny,         D::kAccumulated,          M::kDevice,  L::kAccumulated, R::kUnreduced,  N::kNone,          "FSDPParam.unsharded_accumulated_grad"},
    {kGradSharded,              "grad_sharded",               C::kGradient,   A::kShard,   P::kByParameter, D::kShardedGradOrReduced, M::kDevice,  L::kState,       R::kReduced,    N::kReduce,        "FSDPParam.sharded_param.grad, FlatParameter._saved_grad_shard"},
    {kGradHost,                 "grad_host",                  C::kGradient,   A::kShard,   P::kByParameter, D::kShardedGrad,          M::kHost,    L::kState,       R::kReduced,    N::kReduce,        "FSDPParam.sharded_param.grad, FlatParameter._cpu_grad"},
    {kOptimizerState,           "optimizer_state",            C::kState,      A::kNone,    P::kAny,         D::kAny,                  M::kEither,  L::kState,       R::kNone,       N::kNone,          "Optimizer.state"},
    {kOptimizerTemp,            "optimizer_temp",             C::kState,      A::kNone,    P::kAny,         D::kAny,                  M::kEither,  L::kOptimizer,   R::kNone,       N::kNone,          ""},
    {kOrderCheck,               "order_check",                C::kOrder,      A::kNone,    P::kAny,         D::kAny,                  M::kEither,  L::kPersistent,  R::kNone,       N::kNone,          "_ExecOrderData._check_order"},
    {kModelBuffer,              "model_buffer",               C::kModel,      A::kNone,    P::kAny,         D::kAny,                  M::kEither,  L::kPersistent,  R::kNone,       N::kNone,          "Module.buffers()"},
    {kExtensionGathered,        "extension_gathered",         C::kParameter,  A::kNone,    P::kAny,         D::kAny,                  M::kDevice,  L::kUnsharded,   R::kNone,       N::kGathered,      "FSDPParam.all_gather_outputs"},
    {kExtensionUnsharded,       "extension_unsharded",        C::kParameter,  A::kNone,    P::kAny,         D::kAny,                  M::kDevice,  L::kUnsharded,   R::kNone,       N::kNone,          "FSDPParam._unsharded_inner_tensors"},
    {kPartialReduceOutput,      "partial_reduce_output",      C::kGradient,   A::kShard,   P::kAny,         D::kReduced,              M::kDevice,  L::kAccumulated, R::kPartial,    N::kReduce,        "FSDPParamGroup._partial_reduce_output"},
    {kInnerReduceOutput,        "inner_reduce_output",        C::kGradient,   A::kSlots,   P::kAny,         D::kReduced,              M::kDevice,  L::kScratch,     R::kInner,      N::kReduce,        ""},
    {kInnerReduceAccumulated,   "inner_reduce_accumulated",   C::kGradient,   A::kSlots,   P::kAny,         D::kReduced,              M::kDevice,  L::kAccumulated, R::kInner,      N::kReduce,        ""},
    {kActivation,               "activation",                 C::kActivation, A::kNone,    P::kAny,         D::kAny,                  M::kDevice,  L::kPasses,      R::kNone,       N::kNone,          "saved tensors"},
    {kActivationHost,           "activation_host",            C::kActivation, A::kNone,    P::kAny,         D::kAny,                  M::kHost,    L::kPasses,      R::kNone,       N::kNone,          "save_on_cpu"},
    {kUpdatePieces,             "update_pieces",              C::kUpdate,     A::kNone,    P::kAny,         D::kAny,                  M::kDevice,  L::kOptimizer,   R::kNone,       N::kNone,          ""},
    {kUpdateWhole,              "update_whole",               C::kUpdate,     A::kNone,    P::kAny,         D::kAny,                  M::kDevice,  L::kOptimizer,   R::kNone,       N::kNone,          ""},
});
// clang-format on
#pragma GCC diagnostic pop

consteval bool IsInOrder() {
  for (std::size_t r = 0; r < kTable.size(); ++r) {
    if (static_cast<std::size_t>(kTable[r].role) != r || kTable[r].name.empty()) return false;
  }
  return true;
}
static_assert(kTable.size() == kBufferRoles && !IsEnumerator<static_cast<BufferRole>(kTable.size())>(),
              "a row for every role");
static_assert(IsInOrder(), "rows in the order of the roles, each with its name");

}  // namespace buffer_roles

inline constexpr const auto& kBufferRoleTable = buffer_roles::kTable;

// Any role that a reader or a policy makes has a row.
constexpr const BufferRoleDescription& DescriptionOf(BufferRole role) {
  return kBufferRoleTable[static_cast<std::size_t>(role)];
}

// A set of buffer roles: bit number r is role r.
using RoleSet = std::uint32_t;
static_assert(kBufferRoles <= 32);
constexpr RoleSet RolesIn(std::initializer_list<BufferRole> roles) {
  RoleSet set = 0;
  for (const BufferRole role : roles) set |= RoleSet{1} << static_cast<unsigned>(role);
  return set;
}
constexpr bool Has(RoleSet set, BufferRole role) { return (set & RolesIn({role})) != 0; }
// The roles whose row satisfies `is`.
template <typename Is>
consteval RoleSet RolesWhere(Is is) {
  RoleSet set = 0;
  for (const BufferRoleDescription& row : kBufferRoleTable) {
    if (is(row)) set |= RolesIn({row.role});
  }
  return set;
}

constexpr RoleContent ContentOf(BufferRole role) { return DescriptionOf(role).holds; }
constexpr Arrangement ArrangementOf(BufferRole role) { return DescriptionOf(role).arrangement; }
constexpr RoleLifetime LifetimeOf(BufferRole role) { return DescriptionOf(role).lifetime; }

// Parameters that lie as the unit's layout says, not what an extension makes of them.
constexpr bool IsParameterRole(BufferRole role) {
  return ContentOf(role) == RoleContent::kParameter && ArrangementOf(role) != Arrangement::kNone;
}
// Tensors that an all-gather extension gathers or allocates beside the first.
constexpr bool IsOfExtension(BufferRole role) {
  return ContentOf(role) == RoleContent::kParameter && ArrangementOf(role) == Arrangement::kNone;
}
constexpr bool IsActivation(BufferRole role) { return ContentOf(role) == RoleContent::kActivation; }
constexpr bool IsOptimizerMemory(BufferRole role) { return ContentOf(role) == RoleContent::kState; }

// Memory that the optimizer makes itself: also that of exchanges.
constexpr bool IsOptimizersOwn(BufferRole role) {
  return IsOptimizerMemory(role) || ContentOf(role) == RoleContent::kUpdate;
}

// Reduced gradients, those that the optimizer reads.
constexpr bool IsFinalGradient(BufferRole role) {
  return ContentOf(role) == RoleContent::kGradient && LifetimeOf(role) == RoleLifetime::kState;
}
// Gradients of whole parameters, as autograd makes them or as micro-batches add to them: without padding.
constexpr bool IsWholeGradient(BufferRole role) {
  return ContentOf(role) == RoleContent::kGradient && ArrangementOf(role) == Arrangement::kWhole;
}
// Gradients that are reduced over the inner ranks of two levels alone: of each rank of the second level the
// pieces, rank by rank.
constexpr bool IsInnerReduced(BufferRole role) {
  return DescriptionOf(role).reduction == RoleReduction::kInner;
}
// Gradients that are reduced over a part of the ranks and wait for the rest.
constexpr bool IsPartlyReduced(BufferRole role) {
  const RoleReduction reduction = DescriptionOf(role).reduction;
  return LifetimeOf(role) == RoleLifetime::kAccumulated &&
         (reduction == RoleReduction::kInner || reduction == RoleReduction::kPartial);
}
// Buffers that the optimizer reads and writes: shards, their gradients, states.
constexpr bool IsTrainingState(BufferRole role) { return LifetimeOf(role) == RoleLifetime::kState; }

}  // namespace shardplan
