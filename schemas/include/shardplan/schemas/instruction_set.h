// SPDX-License-Identifier: Apache-2.0
// The instruction set: what an instruction of each kind is, in one table. The reader, the text form, the
// checks of operands, GraphViz, the JSON Schema and the table in docs/reference/plan-format.md take names and
// fields from here.
//
// The table says what an instruction has, and its effects on lifetimes, order and values. A rule that follows
// from the effects is written once, over a column. A meaning (a cost, a proof, an execution) is a switch over
// a column or over families, without a default: a kind that it forgets does not compile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// The place where an instruction runs.
enum class Place : std::uint8_t {
  kHost,          // in the order of the host; a stream says no more than whose pool of memory is meant
  kStream,        // on its stream
  kStreamOrHost,  // without a stream by the host itself, on memory of the host
};

enum class Access : std::uint8_t { kNone, kRead, kWrite, kReadWrite };

enum class InstructionFamily : std::uint8_t {
  kCompute,     // the model's own work
  kMemory,      // a buffer begins or ends
  kBind,        // the modules' parameters become views
  kCopy,        // moves bytes on one rank, maybe into another dtype or layout
  kCollective,  // moves bytes between ranks
  kScale,       // arithmetic in place
  kOrder,       // events
  kOptimizer,   // sharded parameters and gradients, updates made of them
};

// A buffer that an instruction names. Without access (kNone) the kind has no such operand.
struct BufferOperand {
  Access access = Access::kNone;
  RoleSet roles = 0;
};
constexpr bool Has(const BufferOperand& operand) { return operand.access != Access::kNone; }

// Fields that an instruction of some kinds may have, and need not.
enum class OptionalField : std::uint8_t {
  kUnit,
  kParameter,
  kMicrobatch,
  kReduceOp,
  kDivisor,
  kSafeAfter,
  kParts
};
using OptionalFields = std::uint32_t;  // bit number f is field f
constexpr OptionalFields FieldsIn(std::initializer_list<OptionalField> fields) {
  OptionalFields set = 0;
  for (const OptionalField field : fields) set |= OptionalFields{1} << static_cast<unsigned>(field);
  return set;
}
constexpr bool Has(OptionalFields set, OptionalField field) { return (set & FieldsIn({field})) != 0; }

// The effect on the life of a buffer (alive_buffers.h).
enum class LifetimeEffect : std::uint8_t {
  kNone,
  kBegins,  // dst
  kEnds,    // src, or parts of it
  kView,    // dst becomes a second name of src's memory where nothing changes (MakesView)
  kDrops,   // the reduced gradients of a unit, or of all
};

// The effect on the order of streams, host and ranks.
enum class OrderEffect : std::uint8_t {
  kNone,
  kRecords,    // its stream records the event
  kWaits,      // its stream waits for the event
  kHostWaits,  // the host waits for the event
  kMeets,      // every rank of the communicator takes part
};

// The effect on the numbers.
enum class ValueEffect : std::uint8_t {
  kNone,
  kUnshards,     // parameters: shards and what is gathered of them
  kReduces,      // gradients, on their way to the optimizer
  kFillsZeros,   // gradients that nothing made
  kMovesMemory,  // the same numbers between host and device
  kComputes,     // the model's own
  kSteps,        // the optimizer's
};

// The arithmetic of a copy or a scaling.
enum class Arithmetic : std::uint8_t {
  kNone,
  kMove,   // dst = src, cast where dtypes differ
  kCast,   // ... or a view where they do not
  kAdd,    // dst += src
  kScale,  // src *= 1 / divisor
  kZero,   // dst = 0
};

// Which ranks' pieces a copy deals with: whose slots its source or target has.
enum class Movement : std::uint8_t {
  kNone,
  kToSlot,         // a shard into this rank's slot
  kFromSlots,      // all slots of the gather before it into whole parameters
  kToPostForward,  // whole parameters into the shard of the smaller mesh
  kToSlots,        // whole gradients into the slots of all ranks
  kWithin,         // as it lies
};

// The name of its time in profiles (plan_ranges.h). kOfRole: the role of the buffer that begins or ends says
// it;
// kReshard: in a backward.
enum class InstructionRange : std::uint8_t { kNone, kOfRole, kAllGather, kCopyOut, kReduce, kReshard };

struct InstructionDescription {
  InstructionKind kind = InstructionKind::kCompute;
  std::string_view name;  // in the documents
  InstructionFamily family = InstructionFamily::kCompute;
  Place place = Place::kHost;
  BufferOperand src = {};
  BufferOperand dst = {};
  bool event = false;
  bool communicator = false;
  bool segment = false;
  bool exchange = false;
  OptionalFields optional = 0;
  LifetimeEffect lifetime = LifetimeEffect::kNone;
  OrderEffect order = OrderEffect::kNone;
  ValueEffect value = ValueEffect::kNone;
  Arithmetic arithmetic = Arithmetic::kNone;
  Movement movement = Movement::kNone;
  std::optional<CollectiveKind> collective;
  InstructionRange range = InstructionRange::kNone;
  std::string_view op;    // the operator by which PyTorch does it, as profiles call it; "": none of its own
  std::string_view says;  // what it does, in one line of Markdown
};

namespace instruction_set {

using enum BufferRole;
using enum Access;

inline constexpr RoleSet kAnyRole = ~RoleSet{0};
using Role = const BufferRoleDescription&;
inline constexpr RoleSet kParamShards = RolesIn({kParamSharded, kParamPostForwardShard});
inline constexpr RoleSet kShards =
    RolesWhere([](Role r) { return IsParameterRole(r.role) && r.arrangement == Arrangement::kShard; });
// FSDP1 gathers right into the unsharded flat parameter.
inline constexpr RoleSet kGathered =
    RolesWhere([](Role r) { return IsParameterRole(r.role) && r.arrangement != Arrangement::kShard; });
inline constexpr RoleSet kUnreduced = RolesWhere(
    [](Role r) { return r.reduction == RoleReduction::kUnreduced || r.reduction == RoleReduction::kInput; });
inline constexpr RoleSet kInnerReduced = RolesWhere([](Role r) { return IsInnerReduced(r.role); });
inline constexpr RoleSet kReduced = RolesWhere(
    [](Role r) { return r.reduction == RoleReduction::kReduced || r.reduction == RoleReduction::kPartial; });
inline constexpr RoleSet kGradients = RolesWhere([](Role r) { return r.holds == RoleContent::kGradient; });
inline constexpr RoleSet kPartlyReduced = RolesWhere([](Role r) { return IsPartlyReduced(r.role); });
inline constexpr RoleSet kUnscattered = kUnreduced | kPartlyReduced;
// Both sides of an exchange of matrices.
inline constexpr RoleSet kUpdates = RolesWhere([](Role r) { return r.holds == RoleContent::kUpdate; });
// Gradients that a grad_zero may have to stand for.
inline constexpr RoleSet kZeroed = kPartlyReduced | RolesIn({kGradUnshardedAccumulated});

using enum InstructionKind;
using F = InstructionFamily;
using P = Place;
using O = OptionalField;

// The fields of an instruction of each kind, in the order of the enumerators.
struct Fields {
  InstructionKind kind;
  std::string_view name;
  InstructionFamily family;
  Place place;
  BufferOperand src;
  BufferOperand dst;
  OptionalFields optional;
};
// clang-format off
inline constexpr auto kFields = std::to_array<Fields>({
//   kind                  name                    family           place             src                                                             dst                                                               may have
    {kCompute,            "compute",              F::kCompute,     P::kStream,       {},                                                             {},                                                               FieldsIn({O::kMicrobatch})},
    {kAllocate,           "allocate",             F::kMemory,      P::kStreamOrHost, {},                                                             {kWrite, kAnyRole},                                               0},
    {kFree,               "free",                 F::kMemory,      P::kHost,         {kWrite, kAnyRole},                                             {},                                                               FieldsIn({O::kSafeAfter, O::kParts})},
    {kBindUnsharded,      "bind_unsharded",       F::kBind,        P::kHost,         {kRead, kGathered | RolesIn({kParamSharded})},                  {},                                                               FieldsIn({O::kUnit})},
    {kBindSharded,        "bind_sharded",         F::kBind,        P::kHost,         {kRead, kParamShards},                                          {},                                                               FieldsIn({O::kUnit})},
    {kCopyIn,             "copy_in",              F::kCopy,        P::kStream,       {kRead, kShards | RolesIn({kModelBuffer})},                     {kWrite, kGathered | RolesIn({kAllGatherInput, kModelBuffer})},   0},
    {kAllGather,          "all_gather",           F::kCollective,  P::kStream,       {kRead, kShards | kGathered | RolesIn({kOrderCheck, kGradSharded})}, {kWrite, kGathered | RolesIn({kOrderCheck, kGradUnshardedAccumulated})}, 0},
    {kCopyOut,            "copy_out",             F::kCopy,        P::kStream,       {kRead, kShards | kGathered},                                   {kWrite, RolesIn({kParamUnsharded})},                             0},
    {kReshardPostForward, "reshard_post_forward", F::kCopy,        P::kStream,       {kRead, kGathered},                                             {kWrite, RolesIn({kParamPostForwardShard})},                      0},
    {kGradCopyIn,         "grad_copy_in",         F::kCopy,        P::kStream,       {kRead, kUnscattered},                                          {kWrite, kGradients},                                             0},
    {kGradScale,          "grad_scale",           F::kScale,       P::kStreamOrHost, {kReadWrite, kGradients},                                       {},                                                               FieldsIn({O::kDivisor})},
    {kGradZero,           "grad_zero",            F::kScale,       P::kStream,       {},                                                             {kWrite, kZeroed},                                                0},
    {kReduceScatter,      "reduce_scatter",       F::kCollective,  P::kStream,       {kRead, kUnreduced | kInnerReduced},                            {kWrite, kReduced | kInnerReduced},                               FieldsIn({O::kReduceOp, O::kDivisor})},
    {kAllReduce,          "all_reduce",           F::kCollective,  P::kStream,       {kReadWrite, kGradients | RolesIn({kOrderCheck})},              {},                                                               FieldsIn({O::kReduceOp, O::kDivisor})},
    {kGradCast,           "grad_cast",            F::kCopy,        P::kStreamOrHost, {kRead, kGradients},                                            {kWrite, kGradients},                                             0},
    {kGradAccumulate,     "grad_accumulate",      F::kCopy,        P::kStreamOrHost, {kRead, kGradients},                                            {kReadWrite, kGradients},                                         0},
    {kCopyToHost,         "copy_to_host",         F::kCopy,        P::kStreamOrHost, {kRead, kAnyRole},                                              {kWrite, kAnyRole},                                               0},
    {kCopyToDevice,       "copy_to_device",       F::kCopy,        P::kStreamOrHost, {kRead, kAnyRole},                                              {kWrite, kAnyRole},                                               0},
    {kRecord,             "record",               F::kOrder,       P::kStream,       {},                                                             {},                                                               0},
    {kWait,               "wait",                 F::kOrder,       P::kStream,       {},                                                             {},                                                               0},
    {kHostWait,           "host_wait",            F::kOrder,       P::kHost,         {},                                                             {},                                                               0},
    {kUpdateCopyIn,       "update_copy_in",       F::kOptimizer,   P::kStream,       {},                                                             {kWrite, RolesIn({kUpdatePieces})},                               0},
    {kAllToAll,           "all_to_all",           F::kCollective,  P::kStream,       {kRead, kUpdates},                                              {kWrite, kUpdates},                                               0},
    {kUpdateGather,       "update_gather",        F::kCollective,  P::kStream,       {kRead, RolesIn({kUpdatePieces})},                              {kWrite, RolesIn({kUpdateWhole})},                                0},
    {kOrthogonalize,      "orthogonalize",        F::kOptimizer,   P::kStream,       {},                                                             {kReadWrite, RolesIn({kUpdateWhole})},                            0},
    {kUpdateApply,        "update_apply",         F::kOptimizer,   P::kStream,       {kRead, kUpdates},                                              {},                                                               0},
    {kOptimizerStep,      "optimizer_step",       F::kOptimizer,   P::kStreamOrHost, {},                                                             {},                                                               FieldsIn({O::kUnit, O::kParameter})},
    {kZeroGrad,           "zero_grad",            F::kOptimizer,   P::kHost,         {},                                                             {},                                                               FieldsIn({O::kUnit})},
});
// clang-format on

using L = LifetimeEffect;
using E = OrderEffect;
using V = ValueEffect;
using A = Arithmetic;
using M = Movement;
using C = CollectiveKind;
using R = InstructionRange;

// The effects of an instruction of each kind.
struct Effects {
  InstructionKind kind;
  LifetimeEffect lifetime;
  OrderEffect order;
  ValueEffect value;
  Arithmetic arithmetic;
  Movement movement;
  std::optional<CollectiveKind> collective;
  InstructionRange range;
  std::string_view op;
};
inline constexpr std::nullopt_t kNo = std::nullopt;
// clang-format off
inline constexpr auto kEffects = std::to_array<Effects>({
//   kind                  lifetime    order           value             arithmetic  movement            collective          range           PyTorch's operator
    {kCompute,            L::kNone,   E::kNone,       V::kComputes,     A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kAllocate,           L::kBegins, E::kNone,       V::kNone,         A::kNone,   M::kNone,           kNo,                R::kOfRole,     ""},
    {kFree,               L::kEnds,   E::kNone,       V::kNone,         A::kNone,   M::kNone,           kNo,                R::kOfRole,     ""},
    {kBindUnsharded,      L::kNone,   E::kNone,       V::kNone,         A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kBindSharded,        L::kNone,   E::kNone,       V::kNone,         A::kNone,   M::kNone,           kNo,                R::kReshard,    ""},
    {kCopyIn,             L::kNone,   E::kNone,       V::kUnshards,     A::kMove,   M::kToSlot,         kNo,                R::kAllGather,  "fsdp::all_gather_copy_in"},
    {kAllGather,          L::kNone,   E::kMeets,      V::kUnshards,     A::kNone,   M::kNone,           C::kAllGather,      R::kAllGather,  ""},
    {kCopyOut,            L::kNone,   E::kNone,       V::kUnshards,     A::kMove,   M::kFromSlots,      kNo,                R::kCopyOut,    "fsdp::split_with_sizes_copy"},
    {kReshardPostForward, L::kNone,   E::kNone,       V::kUnshards,     A::kMove,   M::kToPostForward,  kNo,                R::kNone,       ""},
    {kGradCopyIn,         L::kNone,   E::kNone,       V::kReduces,      A::kMove,   M::kToSlots,        kNo,                R::kReduce,     "fsdp::chunk_cat"},
    {kGradScale,          L::kNone,   E::kNone,       V::kReduces,      A::kScale,  M::kNone,           kNo,                R::kReduce,     "aten::div_"},
    {kGradZero,           L::kNone,   E::kNone,       V::kFillsZeros,   A::kZero,   M::kNone,           kNo,                R::kReduce,     "aten::zero_"},
    {kReduceScatter,      L::kNone,   E::kMeets,      V::kReduces,      A::kNone,   M::kNone,           C::kReduceScatter,  R::kReduce,     ""},
    {kAllReduce,          L::kNone,   E::kMeets,      V::kReduces,      A::kNone,   M::kNone,           C::kAllReduce,      R::kReduce,     ""},
    {kGradCast,           L::kView,   E::kNone,       V::kReduces,      A::kCast,   M::kWithin,         kNo,                R::kReduce,     "aten::_to_copy"},
    {kGradAccumulate,     L::kNone,   E::kNone,       V::kReduces,      A::kAdd,    M::kWithin,         kNo,                R::kReduce,     "aten::add_"},
    {kCopyToHost,         L::kNone,   E::kNone,       V::kMovesMemory,  A::kMove,   M::kWithin,         kNo,                R::kReduce,     ""},
    {kCopyToDevice,       L::kNone,   E::kNone,       V::kMovesMemory,  A::kMove,   M::kWithin,         kNo,                R::kAllGather,  ""},
    {kRecord,             L::kNone,   E::kRecords,    V::kNone,         A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kWait,               L::kNone,   E::kWaits,      V::kNone,         A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kHostWait,           L::kNone,   E::kHostWaits,  V::kNone,         A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kUpdateCopyIn,       L::kNone,   E::kNone,       V::kSteps,        A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kAllToAll,           L::kNone,   E::kMeets,      V::kSteps,        A::kNone,   M::kNone,           C::kAllToAll,       R::kNone,       ""},
    {kUpdateGather,       L::kNone,   E::kMeets,      V::kSteps,        A::kNone,   M::kNone,           C::kAllGather,      R::kNone,       ""},
    {kOrthogonalize,      L::kNone,   E::kNone,       V::kSteps,        A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kUpdateApply,        L::kNone,   E::kNone,       V::kSteps,        A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kOptimizerStep,      L::kNone,   E::kNone,       V::kSteps,        A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
    {kZeroGrad,           L::kDrops,  E::kNone,       V::kNone,         A::kNone,   M::kNone,           kNo,                R::kNone,       ""},
});
// clang-format on

// In one line of Markdown.
struct Says {
  InstructionKind kind;
  std::string_view says;
};
inline constexpr auto kSays = std::to_array<Says>({
    {kCompute, "runs the segment"},
    {kAllocate, "takes memory from the pool of that stream, in host order"},
    {kFree,
     "gives it back, in host order; work issued later on the stream it was allocated on may get it at once, "
     "unless `safe_after` names streams whose work so far must finish first (`record_stream`). With `parts` "
     "(indices into `parts_bytes`) only these go, and a `free` without `parts` ends the buffer: until then "
     "only copies of unshard and reshard use it, between parameters whose parts are left"},
    {kBindUnsharded,
     "the modules' parameters become views of the buffer; where each shard is a buffer of its own, `src` is "
     "the first"},
    {kBindSharded, "... of the shard"},
    {kCopyIn,
     "cast if dtypes differ, flatten into this rank's slot of the all-gather buffer: the parameters that "
     "both have"},
    {kAllGather, "every rank gets the slots of all; `src` is its own slot, or `dst` itself"},
    {kCopyOut, "all-gather output to unsharded parameters"},
    {kReshardPostForward, "keep the shard of the smaller mesh, of the parameters that `dst` has"},
    {kGradCopyIn,
     "unsharded gradients, cast, chunked and padded, to the reduce-scatter input; what is partly reduced to "
     "a buffer of more parameters"},
    {kGradScale, "in place, times 1 / divisor"},
    {kGradZero, "zeros, in the place of gradients that the backward did not make"},
    {kReduceScatter,
     "`reduce_op`: `sum` (default) or `average`. A sum with a `divisor` multiplies inputs by 1 / divisor "
     "while it adds them (NCCL's PREMUL_SUM; Gloo has none, the cpu backend divides the input before)"},
    {kAllReduce, "in place"},
    {kGradCast, "to the dtype of the sharded gradient; a view when it is the same"},
    {kGradAccumulate, "dst += src"},
    {kCopyToHost, "offload"},
    {kCopyToDevice, "... and back"},
    {kRecord, "the stream records the event"},
    {kWait, "the stream waits for the event"},
    {kHostWait, "the host waits for the event (rate limiter, offloaded gradients)"},
    {kUpdateCopyIn,
     "of the exchange's matrices: the momentum takes in the gradient, and this rank's rows of the update go "
     "to their owners' places"},
    {kAllToAll, "pieces to their owners, or an owner's result to all ranks that have rows of it"},
    {kUpdateGather, "of an exchange without owners: every rank gets the pieces of all"},
    {kOrthogonalize,
     "`matrix` of the exchange, in place, by `segment`: on its owner alone, without owners on every rank"},
    {kUpdateApply, "of the exchange's matrices: this rank's rows of the parameters take in the update"},
    {kOptimizerStep,
     "of all units, of one, or of one parameter of one (ranks without a piece of it do nothing)"},
    {kZeroGrad, "sharded gradients are dropped"},
});
#pragma GCC diagnostic pop

static_assert(kFields.size() == kInstructionKinds && kEffects.size() == kInstructionKinds &&
                  kSays.size() == kInstructionKinds &&
                  !IsEnumerator<static_cast<InstructionKind>(kFields.size())>(),
              "a row for every kind in each of the three tables");
consteval bool IsInOrder() {
  for (std::size_t k = 0; k < kInstructionKinds; ++k) {
    const auto kind = static_cast<InstructionKind>(k);
    if (kFields[k].kind != kind || kEffects[k].kind != kind || kSays[k].kind != kind) return false;
    if (kFields[k].name.empty() || kSays[k].says.empty()) return false;
  }
  return true;
}
static_assert(IsInOrder(), "rows in the order of the kinds, each with its name and its words");

inline constexpr auto kTable = [] {
  std::array<InstructionDescription, kInstructionKinds> table;
  for (std::size_t k = 0; k < kInstructionKinds; ++k) {
    const Fields& has = kFields[k];
    const Effects& does = kEffects[k];
    table[k] = {.kind = has.kind,
                .name = has.name,
                .family = has.family,
                .place = has.place,
                .src = has.src,
                .dst = has.dst,
                .event = has.family == InstructionFamily::kOrder,
                .communicator = has.family == InstructionFamily::kCollective,
                .segment = has.family == InstructionFamily::kCompute || has.kind == kOrthogonalize,
                .exchange = has.kind == kUpdateCopyIn || has.kind == kAllToAll || has.kind == kUpdateGather ||
                            has.kind == kOrthogonalize || has.kind == kUpdateApply,
                .optional = has.optional,
                .lifetime = does.lifetime,
                .order = does.order,
                .value = does.value,
                .arithmetic = does.arithmetic,
                .movement = does.movement,
                .collective = does.collective,
                .range = does.range,
                .op = does.op,
                .says = kSays[k].says};
  }
  return table;
}();

// The columns agree with one another.
static_assert([] {
  for (const InstructionDescription& is : kTable) {
    const bool meets = is.order == OrderEffect::kMeets;
    if (is.collective.has_value() != is.communicator || meets != is.communicator) return false;
    if ((is.family == InstructionFamily::kOrder) != (is.order != OrderEffect::kNone && !meets)) return false;
    if ((is.family == InstructionFamily::kMemory) != (is.range == InstructionRange::kOfRole)) return false;
    const bool works = is.family == InstructionFamily::kCopy || is.family == InstructionFamily::kScale;
    if (works != (is.arithmetic != Arithmetic::kNone)) return false;
    if ((is.family == InstructionFamily::kCopy) != (is.movement != Movement::kNone)) return false;
  }
  return true;
}());

}  // namespace instruction_set

inline constexpr const auto& kInstructionSet = instruction_set::kTable;

// Any kind that a reader or a policy makes has a row.
constexpr const InstructionDescription& DescriptionOf(InstructionKind kind) {
  return kInstructionSet[static_cast<std::size_t>(kind)];
}

constexpr bool IsCollective(InstructionKind kind) {
  return DescriptionOf(kind).family == InstructionFamily::kCollective;
}

// Whether it takes time on a device: it computes, moves or reduces something.
constexpr bool IsWork(InstructionKind kind) {
  switch (DescriptionOf(kind).family) {
    case InstructionFamily::kCompute:
    case InstructionFamily::kCopy:
    case InstructionFamily::kCollective:
    case InstructionFamily::kScale:
      return true;
    case InstructionFamily::kOptimizer:
      return DescriptionOf(kind).place != Place::kHost;
    case InstructionFamily::kMemory:
    case InstructionFamily::kBind:
    case InstructionFamily::kOrder:
      return false;
  }
  return false;
}

// Records and waits.
constexpr bool IsOrder(InstructionKind kind) {
  return DescriptionOf(kind).family == InstructionFamily::kOrder;
}
// A reduction of gradients between ranks.
constexpr bool ReducesGradients(InstructionKind kind) {
  return IsCollective(kind) && DescriptionOf(kind).value == ValueEffect::kReduces;
}
// The buffer that has the slots of all ranks: an all_gather's dst, every other collective's src.
constexpr BufferId FullTensorOf(const Instruction& collective) {
  return DescriptionOf(collective.kind).collective == CollectiveKind::kAllGather ? collective.dst
                                                                                 : collective.src;
}

constexpr bool Reads(const BufferOperand& operand) {
  return operand.access == Access::kRead || operand.access == Access::kReadWrite;
}

// Every operand that the kind needs is there, and every id names something (-1: none). All memory is the
// host's if the host itself works (no stream). The error has no pointer.
//
// Which roles the buffers may have, and of which unit they are, is the verifier's.
Status CheckOperands(const Plan& plan, const Instruction& instruction);

}  // namespace shardplan
