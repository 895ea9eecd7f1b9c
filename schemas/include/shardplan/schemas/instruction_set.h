// SPDX-License-Identifier: Apache-2.0
// The instruction set: what an instruction of each kind is, in one table. The reader, the text form, the
// checks of operands, GraphViz, the JSON Schema and the table in docs/reference/plan-format.md take names and
// fields from here.
//
// The table says what an instruction has. The meaning of a kind stays with those who give it one, and is
// written there kind by kind: costs (simulator), happens-before and values (verifier, planner, executor).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

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
  kOptimizer,   // sharded parameters and gradients of all units, or of one
};

// A set of buffer roles: bit number r is role r.
using RoleSet = std::uint32_t;
constexpr RoleSet RolesIn(std::initializer_list<BufferRole> roles) {
  RoleSet set = 0;
  for (const BufferRole role : roles) set |= RoleSet{1} << static_cast<unsigned>(role);
  return set;
}
constexpr bool Has(RoleSet set, BufferRole role) { return (set & RolesIn({role})) != 0; }

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
  OptionalFields optional = 0;
  std::string_view says;  // what it does, in one line of Markdown
};

namespace instruction_set {

using enum BufferRole;
using enum Access;

inline constexpr RoleSet kAnyRole = ~RoleSet{0};
inline constexpr RoleSet kShards = RolesIn({kParamSharded, kAllGatherInput, kParamPostForwardShard});
// FSDP1 gathers right into the unsharded flat parameter.
inline constexpr RoleSet kGathered = RolesIn({kAllGatherOutput, kParamUnsharded});
inline constexpr RoleSet kUnreduced =
    RolesIn({kGradUnsharded, kGradUnshardedAccumulated, kReduceScatterInput});
// Over the inner ranks alone.
inline constexpr RoleSet kInnerReduced = RolesIn({kInnerReduceOutput, kInnerReduceAccumulated});
inline constexpr RoleSet kReduced =
    RolesIn({kReduceScatterOutput, kPartialReduceOutput, kGradSharded, kGradHost});
inline constexpr RoleSet kGradients = kUnreduced | kInnerReduced | kReduced;

// In the order of the enumerators.
inline constexpr auto kTable = std::to_array<InstructionDescription>({
    {.kind = InstructionKind::kCompute,
     .name = "compute",
     .family = InstructionFamily::kCompute,
     .place = Place::kStream,
     .segment = true,
     .optional = FieldsIn({OptionalField::kMicrobatch}),
     .says = "runs the segment"},
    {.kind = InstructionKind::kAllocate,
     .name = "allocate",
     .family = InstructionFamily::kMemory,
     .place = Place::kStreamOrHost,
     .dst = {kWrite, kAnyRole},
     .says = "takes memory from the pool of that stream, in host order"},
    {.kind = InstructionKind::kFree,
     .name = "free",
     .family = InstructionFamily::kMemory,
     .place = Place::kHost,
     .src = {kWrite, kAnyRole},
     .optional = FieldsIn({OptionalField::kSafeAfter, OptionalField::kParts}),
     .says = "gives it back, in host order; work issued later on the stream it was allocated on may get it "
             "at once, unless `safe_after` names streams whose work so far must finish first "
             "(`record_stream`). With `parts` (indices into `parts_bytes`) only these go, and a `free` "
             "without `parts` ends the buffer: until then only copies of unshard and reshard use it, between "
             "parameters whose parts are left"},
    {.kind = InstructionKind::kBindUnsharded,
     .name = "bind_unsharded",
     .family = InstructionFamily::kBind,
     .place = Place::kHost,
     .src = {kRead, kGathered | RolesIn({kParamSharded})},
     .optional = FieldsIn({OptionalField::kUnit}),
     .says = "the modules' parameters become views of the buffer; where each shard is a buffer of its own, "
             "`src` is the first"},
    {.kind = InstructionKind::kBindSharded,
     .name = "bind_sharded",
     .family = InstructionFamily::kBind,
     .place = Place::kHost,
     .src = {kRead, RolesIn({kParamSharded, kParamPostForwardShard})},
     .optional = FieldsIn({OptionalField::kUnit}),
     .says = "... of the shard"},
    {.kind = InstructionKind::kCopyIn,
     .name = "copy_in",
     .family = InstructionFamily::kCopy,
     .place = Place::kStream,
     .src = {kRead, kShards | RolesIn({kModelBuffer})},
     .dst = {kWrite, kGathered | RolesIn({kAllGatherInput, kModelBuffer})},
     .says = "cast if dtypes differ, flatten into this rank's slot of the all-gather buffer: the parameters "
             "that both have"},
    {.kind = InstructionKind::kAllGather,
     .name = "all_gather",
     .family = InstructionFamily::kCollective,
     .place = Place::kStream,
     .src = {kRead, kShards | kGathered | RolesIn({kOrderCheck, kGradSharded})},
     .dst = {kWrite, kGathered | RolesIn({kOrderCheck, kGradUnshardedAccumulated})},
     .communicator = true,
     .says = "every rank gets the slots of all; `src` is its own slot, or `dst` itself"},
    {.kind = InstructionKind::kCopyOut,
     .name = "copy_out",
     .family = InstructionFamily::kCopy,
     .place = Place::kStream,
     .src = {kRead, kShards | kGathered},
     .dst = {kWrite, RolesIn({kParamUnsharded})},
     .says = "all-gather output to unsharded parameters"},
    {.kind = InstructionKind::kReshardPostForward,
     .name = "reshard_post_forward",
     .family = InstructionFamily::kCopy,
     .place = Place::kStream,
     .src = {kRead, kGathered},
     .dst = {kWrite, RolesIn({kParamPostForwardShard})},
     .says = "keep the shard of the smaller mesh, of the parameters that `dst` has"},
    {.kind = InstructionKind::kGradCopyIn,
     .name = "grad_copy_in",
     .family = InstructionFamily::kCopy,
     .place = Place::kStream,
     .src = {kRead, kUnreduced | RolesIn({kPartialReduceOutput, kInnerReduceAccumulated})},
     .dst = {kWrite, kGradients},
     .says = "unsharded gradients, cast, chunked and padded, to the reduce-scatter input; what is partly "
             "reduced to a buffer of more parameters"},
    {.kind = InstructionKind::kGradScale,
     .name = "grad_scale",
     .family = InstructionFamily::kScale,
     .place = Place::kStreamOrHost,
     .src = {kReadWrite, kGradients},
     .optional = FieldsIn({OptionalField::kDivisor}),
     .says = "in place, times 1 / divisor"},
    {.kind = InstructionKind::kGradZero,
     .name = "grad_zero",
     .family = InstructionFamily::kScale,
     .place = Place::kStream,
     .dst = {kWrite, RolesIn({kGradUnshardedAccumulated, kPartialReduceOutput, kInnerReduceAccumulated})},
     .says = "zeros, in the place of gradients that the backward did not make"},
    {.kind = InstructionKind::kReduceScatter,
     .name = "reduce_scatter",
     .family = InstructionFamily::kCollective,
     .place = Place::kStream,
     .src = {kRead, kUnreduced | kInnerReduced},
     .dst = {kWrite, kReduced | kInnerReduced},
     .communicator = true,
     .optional = FieldsIn({OptionalField::kReduceOp, OptionalField::kDivisor}),
     .says =
         "`reduce_op`: `sum` (default) or `average`. A sum with a `divisor` multiplies inputs by 1 / divisor "
         "while it adds them (NCCL's PREMUL_SUM; Gloo has none, the cpu backend divides the input before)"},
    {.kind = InstructionKind::kAllReduce,
     .name = "all_reduce",
     .family = InstructionFamily::kCollective,
     .place = Place::kStream,
     .src = {kReadWrite, kGradients | RolesIn({kOrderCheck})},
     .communicator = true,
     .optional = FieldsIn({OptionalField::kReduceOp, OptionalField::kDivisor}),
     .says = "in place"},
    {.kind = InstructionKind::kGradCast,
     .name = "grad_cast",
     .family = InstructionFamily::kCopy,
     .place = Place::kStreamOrHost,
     .src = {kRead, kGradients},
     .dst = {kWrite, kGradients},
     .says = "to the dtype of the sharded gradient; a view when it is the same"},
    {.kind = InstructionKind::kGradAccumulate,
     .name = "grad_accumulate",
     .family = InstructionFamily::kCopy,
     .place = Place::kStreamOrHost,
     .src = {kRead, kGradients},
     .dst = {kReadWrite, kGradients},
     .says = "dst += src"},
    {.kind = InstructionKind::kCopyToHost,
     .name = "copy_to_host",
     .family = InstructionFamily::kCopy,
     .place = Place::kStreamOrHost,
     .src = {kRead, kAnyRole},
     .dst = {kWrite, kAnyRole},
     .says = "offload"},
    {.kind = InstructionKind::kCopyToDevice,
     .name = "copy_to_device",
     .family = InstructionFamily::kCopy,
     .place = Place::kStreamOrHost,
     .src = {kRead, kAnyRole},
     .dst = {kWrite, kAnyRole},
     .says = "... and back"},
    {.kind = InstructionKind::kRecord,
     .name = "record",
     .family = InstructionFamily::kOrder,
     .place = Place::kStream,
     .event = true,
     .says = "the stream records the event"},
    {.kind = InstructionKind::kWait,
     .name = "wait",
     .family = InstructionFamily::kOrder,
     .place = Place::kStream,
     .event = true,
     .says = "the stream waits for the event"},
    {.kind = InstructionKind::kHostWait,
     .name = "host_wait",
     .family = InstructionFamily::kOrder,
     .place = Place::kHost,
     .event = true,
     .says = "the host waits for the event (rate limiter, offloaded gradients)"},
    {.kind = InstructionKind::kOptimizerStep,
     .name = "optimizer_step",
     .family = InstructionFamily::kOptimizer,
     .place = Place::kStreamOrHost,
     .optional = FieldsIn({OptionalField::kUnit, OptionalField::kParameter}),
     .says = "of all units, of one, or of one parameter of one (ranks without a piece of it do nothing)"},
    {.kind = InstructionKind::kZeroGrad,
     .name = "zero_grad",
     .family = InstructionFamily::kOptimizer,
     .place = Place::kHost,
     .optional = FieldsIn({OptionalField::kUnit}),
     .says = "sharded gradients are dropped"},
});

consteval bool IsInOrder() {
  for (std::size_t k = 0; k < kTable.size(); ++k) {
    if (static_cast<std::size_t>(kTable[k].kind) != k) return false;
  }
  return true;
}
static_assert(IsInOrder() && kTable.size() == kInstructionKinds, "a row for every kind, in order");

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

constexpr bool Reads(const BufferOperand& operand) {
  return operand.access == Access::kRead || operand.access == Access::kReadWrite;
}

// Every operand that the kind needs is there, and every id names something (-1: none). All memory is the
// host's if the host itself works (no stream). The error has no pointer.
//
// Which roles the buffers may have, and of which unit they are, is the verifier's.
Status CheckOperands(const Plan& plan, const Instruction& instruction);

}  // namespace shardplan
