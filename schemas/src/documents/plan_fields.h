// SPDX-License-Identifier: Apache-2.0
// The plan in JSON (docs/reference/plan-format.md).
#pragma once

#include "documents/cluster_fields.h"
#include "documents/plan_repetitions.h"
#include "documents/strategy_fields.h"
#include "documents/trace_fields.h"
#include "json/fields.h"
#include "json/types.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/program.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<ExtensionBuffer> = {"plan", "extension_buffer",
                                                            "A flat tensor of an all-gather extension."};
template <>
inline constexpr auto kFields<ExtensionBuffer> =
    FieldList(Required("dtype", &ExtensionBuffer::dtype, "Its dtype."),
              Required("numel", &ExtensionBuffer::numel, "Its elements.").AtMost(kMaxExact));

template <>
inline constexpr Definition kDefinition<UnitParameter> = {.says = "A parameter of a unit."};
template <>
inline constexpr auto kFields<UnitParameter> = FieldList(
    Required("fqn", &UnitParameter::fqn, "FQN."),
    Optional("shared_with", &UnitParameter::shared_with, "Other FQNs of a tied parameter."),
    Required("shape", &UnitParameter::shape,
             "Shape unsharded by FSDP; what the rank has of it where placements cut it.")
        .Shape(),
    Required("dtype", &UnitParameter::dtype, "Original dtype."),
    Optional("requires_grad", &UnitParameter::requires_grad, "Whether a gradient is computed for it."),
    Optional("index", &UnitParameter::index,
             "Place in model.parameters(), which is the optimizer's order; -1: unknown.")
        .AtLeast(-1),
    Optional("shard_dim", &UnitParameter::shard_dim, "per_parameter: the dimension that is cut."),
    Optional("flat_offset", &UnitParameter::flat_offset, "flat: elements before it, alignment included."),
    Optional("placements", &UnitParameter::placements, "Over the mesh's other dimensions."),
    Optional("param_dtype", &UnitParameter::param_dtype,
             "Gathered and computed in, where it is not the unit's."),
    Optional("grad_dtype", &UnitParameter::grad_dtype,
             "fsdp2 of 2.15: of the sharded gradient, where it is not the parameter's."),
    Optional("made_grad_dtype", &UnitParameter::made_grad_dtype,
             "fsdp2 of 2.15: what autograd leaves of its unsharded gradient, where that is not what it is "
             "computed in."),
    Optional("accumulated_grad_dtype", &UnitParameter::accumulated_grad_dtype,
             "fsdp2 of 2.15: what its gradient is in while it waits for a later micro-batch, where that is "
             "not the unit's reduce_dtype."),
    Optional("gathered", &UnitParameter::gathered,
             "All-gather extension: what one rank gathers in place of its shard."),
    Optional("unsharded", &UnitParameter::unsharded,
             "All-gather extension: what is allocated beside the gathered tensors."),
    Optional("muon", &UnitParameter::muon, "Muon steps it, not the optimizer of the rest."));

template <>
inline constexpr bool kIsBlock<Unit> = true;
template <>
inline constexpr Definition kDefinition<Unit> = {"plan", "unit", "The parameters all-gathered together."};
template <>
inline constexpr auto kFields<Unit> = FieldList(
    Required("fqn", &Unit::fqn, "\"layers.0\"; \"\" for the root."),
    Optional("modules", &Unit::modules, "FQNs of its modules."),
    Optional("parameter_group", &Unit::parameter_group,
             "fsdp2: of which parameter group of its modules the unit is, where their parameters are on "
             "several meshes."),
    Optional("layout", &Unit::layout, "How it is sharded."),
    Required("parameters", &Unit::parameters, "In buffer order.").Lines(),
    Required("orig_dtype", &Unit::orig_dtype, "Of the sharded parameters."),
    Required("param_dtype", &Unit::param_dtype, "Gathered and computed in."),
    Required("reduce_dtype", &Unit::reduce_dtype, "Of gradient reduction."),
    Optional("shard_communicator", &Unit::shard_communicator,
             "Communicator of all_gather and reduce_scatter; left out: not sharded.")
        .Ref(RefKind::kCommunicator),
    Optional("reduce_scatter_communicator", &Unit::reduce_scatter_communicator,
             "reduce_scatter's own communicator; left out: shard_communicator.")
        .Ref(RefKind::kCommunicator),
    Optional("replicate_communicator", &Unit::replicate_communicator, "Communicator of HSDP's all_reduce.")
        .Ref(RefKind::kCommunicator),
    Optional("post_forward_communicator", &Unit::post_forward_communicator,
             "Communicator of an integer reshard_after_forward.")
        .Ref(RefKind::kCommunicator),
    Optional("inner_reduce_communicator", &Unit::inner_reduce_communicator,
             "Reductions in two levels: communicator of the first, of neighbouring ranks; left out: in one.")
        .Ref(RefKind::kCommunicator),
    Optional("outer_reduce_communicator", &Unit::outer_reduce_communicator,
             "... of the second, of ranks that have the same place in theirs.")
        .Ref(RefKind::kCommunicator),
    Optional("hook_communicator", &Unit::hook_communicator,
             "fsdp2: communicator of the user's all-reduce hook.")
        .Ref(RefKind::kCommunicator),
    Optional("hook_divisor", &Unit::hook_divisor, "fsdp2: what that hook divides the gradients by in all.")
        .Positive(),
    Optional("gradient_divide_factor", &Unit::gradient_divide_factor,
             "fsdp2: what the gradients are divided by instead of the number of ranks.")
        .Positive(),
    Optional("flat_numel", &Unit::flat_numel, "flat: padded unsharded elements."));

template <>
inline constexpr Definition kDefinition<Buffer> = {
    "plan", "buffer", "A named piece of memory; at most one instance is alive at a time."};
template <>
inline constexpr auto kFields<Buffer> = FieldList(
    Required("name", &Buffer::name, "\"layers.0.all_gather_output\"."),
    Required("role", &Buffer::role, "What it holds."),
    Optional("unit", &Buffer::unit, "Whose it is; left out: of no unit.").Ref(RefKind::kUnit),
    Required("dtype", &Buffer::dtype, "Of its elements."),
    Required("parts_bytes", &Buffer::parts_bytes,
             "The separate allocations that it consists of, as requested."),
    Optional("parameters", &Buffer::parameters, "Indices into the unit's parameters that it holds."),
    Optional("storages", &Buffer::storages,
             "activation, activation_host: the storage of the model that each part is or is a copy of."),
    Optional("memory", &Buffer::memory, "Where it lives."),
    Optional("persistent", &Buffer::persistent, "Alive before the first step and after the last."),
    Optional("pool", &Buffer::pool,
             "Allocated from this communicator's own memory pool; left out: the caching allocator.")
        .Ref(RefKind::kCommunicator));

template <>
inline constexpr Definition kDefinition<PlanStream> = {"plan", "stream",
                                                       "A stream; the first is the compute stream."};
template <>
inline constexpr auto kFields<PlanStream> = FieldList(Required("name", &PlanStream::name, "\"all_gather\"."),
                                                      Optional("priority", &PlanStream::priority,
                                                               "CUDA priority.")
                                                          .AtLeast(std::numeric_limits<std::int32_t>::min()));

template <>
inline constexpr Definition kDefinition<SegmentGrad> = {.says = "A parameter's unsharded gradient."};
template <>
inline constexpr auto kFields<SegmentGrad> =
    FieldList(Required("unit", &SegmentGrad::unit, "Whose parameter.").Ref(RefKind::kUnit),
              Required("parameter", &SegmentGrad::parameter, "Index into the unit's parameters."));

template <>
inline constexpr Definition kDefinition<ExchangedMatrix> = {
    "plan", "exchanged_matrix",
    "A matrix that its owner, or every rank, has whole while the optimizer steps."};
template <>
inline constexpr auto kFields<ExchangedMatrix> = FieldList(
    Required("unit", &ExchangedMatrix::unit, "Whose parameter.").Ref(RefKind::kUnit),
    Required("parameter", &ExchangedMatrix::parameter, "Index into the unit's parameters."),
    Optional("first_row", &ExchangedMatrix::first_row,
             "Its first row in the parameter, seen as a matrix of the parameter's last dimension."),
    Optional("rows", &ExchangedMatrix::rows, "Its rows; left out: all of the parameter."),
    Optional("owner", &ExchangedMatrix::owner,
             "Its rank in the group of the exchange's communicator; left out of every matrix: all ranks."));

template <>
inline constexpr Definition kDefinition<Exchange> = {
    "plan", "exchange",
    "Matrices that go to their owners and come back in one all_to_all each, or to all ranks in one "
    "all-gather."};
template <>
inline constexpr auto kFields<Exchange> =
    FieldList(Required("name", &Exchange::name, "\"muon.0\"."),
              Required("communicator", &Exchange::communicator,
                       "The ranks that shard the parameters, or these and their replicas.")
                  .Ref(RefKind::kCommunicator),
              Optional("dtype", &Exchange::dtype, "Of what is sent; left out: bfloat16."),
              Required("matrices", &Exchange::matrices, "In the order in which pieces lie."));

template <>
inline constexpr bool kIsBlock<Segment> = true;
template <>
inline constexpr Definition kDefinition<Segment> = {"plan", "segment",
                                                    "The model's own compute between two triggers."};
template <>
inline constexpr auto kFields<Segment> = FieldList(
    Required("name", &Segment::name, "For people: \"forward layers.0\"."),
    Optional("phase", &Segment::phase, "The part of the step. A segment that makes gradients is backward."),
    Optional("unit", &Segment::unit,
             "In whose forward, backward or recomputation it is; left out: in none's.")
        .Ref(RefKind::kUnit),
    Optional("pass", &Segment::pass, "In which forward or backward of the model; left out: it does not say."),
    Optional("begin", &Segment::begin, "The first thing of the pass that it does."),
    Optional("end", &Segment::end, "The first thing of the pass that it does no more."),
    Optional("forward", &Segment::forward,
             "Of a backward that covers several forwards: of which of their micro-batches it is."),
    Optional("reads", &Segment::reads, "Units whose unsharded parameters it reads.").Ref(RefKind::kUnit),
    Optional("grads", &Segment::grads, "Parameters whose unsharded gradient it makes or adds to.").Lines(),
    Required("entries", &Segment::entries,
             "Operators, allocations and frees in host order; module and parameter ids are the trace's.")
        .Lines());

template <>
inline constexpr Definition kDefinition<ModelPasses> = {
    .says = "How much each pass of the model does: operators, allocations, frees and gradients."};
template <>
inline constexpr auto kFields<ModelPasses> =
    FieldList(Optional("forwards", &ModelPasses::forwards, "By forward of the trace."),
              Optional("backwards", &ModelPasses::backwards, "By backward of the trace."));

template <>
inline constexpr Definition kDefinition<Instruction> = {"plan", "instruction",
                                                        "One thing that the host issues."};
template <>
inline constexpr auto kFields<Instruction> = FieldList(
    Required("kind", &Instruction::kind, "What it does."),
    Optional("segment", &Instruction::segment, "compute, orthogonalize: the segment.").Ref(RefKind::kSegment),
    Optional(
        "exchange", &Instruction::exchange,
        "update_copy_in, all_to_all, update_gather, orthogonalize, update_apply: the exchange of matrices.")
        .Ref(RefKind::kExchange),
    Optional("matrix", &Instruction::matrix, "orthogonalize: which matrix of the exchange, by position.")
        .AtLeast(-1),
    Optional("microbatch", &Instruction::microbatch_offset, "compute: which micro-batch."),
    Optional("event", &Instruction::event, "record, wait, host_wait: the event.").Ref(RefKind::kEvent),
    Optional("src", &Instruction::src, "Buffer that is read.").Ref(RefKind::kBuffer),
    Optional("dst", &Instruction::dst, "Buffer that is written.").Ref(RefKind::kBuffer),
    Optional("communicator", &Instruction::communicator, "Communicator of a collective.")
        .Ref(RefKind::kCommunicator),
    Optional("reduce_op", &Instruction::reduce_op, "Of a reduction."),
    Optional("divisor", &Instruction::divisor,
             "grad_scale: multiply by 1 / divisor. reduce_scatter, all_reduce: a sum of inputs that are "
             "multiplied by 1 / divisor (NCCL's PREMUL_SUM).")
        .Positive(),
    Optional("stream", &Instruction::stream, "Stream; left out: host only.").Ref(RefKind::kStream),
    Optional("safe_after", &Instruction::safe_after,
             "free: streams whose work issued so far must finish before the memory is used again.")
        .Ref(RefKind::kStream),
    Optional("parts", &Instruction::parts,
             "free: only these parts of the buffer, as indices into its parts_bytes, ascending. The buffer "
             "ends with a free without parts; until then only copies of unshard and reshard use it, between "
             "parameters whose parts are left."),
    Optional("unit", &Instruction::unit, "Which unit it works on, where no buffer says it.")
        .Ref(RefKind::kUnit),
    Optional("parameter", &Instruction::parameter,
             "optimizer_step: the one parameter of the unit that is stepped, by position.")
        .AtLeast(-1),
    Optional("reason", &Instruction::reason, "Why it is here."));

template <>
inline constexpr bool kIsBlock<Trigger> = true;
template <>
inline constexpr Definition kDefinition<Trigger> = {"plan", "trigger",
                                                    "A point that the host passes in every step."};
template <>
inline constexpr auto kFields<Trigger> = FieldList(
    Required("kind", &Trigger::kind, "Which point."),
    Optional("unit", &Trigger::unit, "Whose trigger; left out: of no unit.").Ref(RefKind::kUnit),
    Optional("microbatch", &Trigger::microbatch, "Which micro-batch."),
    Optional("occurrence", &Trigger::occurrence, "How often it was passed before in this step."),
    Required("instructions", &Trigger::instructions, "In the order in which the host issues them.").Lines());

// [Note: micro-batches in documents] A document has the micro-batch of a compute, memory its distance to the
// trigger's: AfterReading() makes the one of the other, AsWritten() the reverse.
inline void AfterReading(Trigger& trigger, InstructionSharing& sharing) {
  if (trigger.microbatch != 0) {
    for (Instruction& i : trigger.instructions.Edit()) {
      if (i.kind == InstructionKind::kCompute) i.microbatch_offset -= trigger.microbatch;
    }
  }
  sharing.Share(trigger);
}
inline Trigger AsWritten(Trigger trigger) {
  if (trigger.microbatch == 0) return trigger;
  for (Instruction& i : trigger.instructions.Edit()) i = AsWritten(trigger, std::move(i));
  return trigger;
}

template <>
inline constexpr bool kIsBlock<PlanStep> = true;
template <>
inline constexpr Definition kDefinition<PlanStep> = {.says = "One step."};
template <>
inline constexpr auto kFields<PlanStep> = FieldList(
    Required("name", &PlanStep::name, "\"first\", \"steady\"."),
    Required("triggers", &PlanStep::triggers,
             "In the order in which the host passes them, with entries that stand for triggers again.")
        .Lines());

template <>
inline constexpr bool kIsBlock<Procedure> = true;
template <>
inline constexpr Definition kDefinition<Procedure> = {
    "plan", "procedure", "What is done of a unit on demand, beside the steps, on the compute stream."};
template <>
inline constexpr auto kFields<Procedure> = FieldList(
    Required("kind", &Procedure::kind, "What it does."),
    Required("unit", &Procedure::unit, "Of which unit.").Ref(RefKind::kUnit),
    Required("instructions", &Procedure::instructions, "In the order in which the host issues them.")
        .Lines());

template <>
inline constexpr Definition kDefinition<Digests> = {
    .says = "Digests of the documents it was made from, \"sha256:...\"; \"\" when there was none."};
template <>
inline constexpr auto kFields<Digests> = FieldList(Optional("trace", &Digests::trace, "Of the trace."),
                                                   Optional("strategy", &Digests::strategy,
                                                            "Of the strategy."),
                                                   Optional("cluster", &Digests::cluster, "Of the cluster."),
                                                   Optional("program", &Digests::program,
                                                            "With known_faults: of the plan itself without "
                                                            "them."));

template <>
inline constexpr Definition kDefinition<KnownFault> = {
    "plan", "known_fault", "A violation that the verifier finds because PyTorch does the same."};
template <>
inline constexpr auto kFields<KnownFault> =
    FieldList(Required("fault", &KnownFault::fault, "What PyTorch does wrong."),
              Required("rule", &KnownFault::rule, "The verifier's rule that is broken."),
              Required("step", &KnownFault::step, "Index of the step.").OrNone(),
              Required("trigger", &KnownFault::trigger, "Index of the trigger in the step.").OrNone(),
              Required("instruction", &KnownFault::instruction,
                       "Index of the instruction in the trigger; -1: of no instruction.")
                  .OrNone(),
              Optional("procedure", &KnownFault::procedure,
                       "Index of the procedure that it is in, where it is in no step.")
                  .OrNone(),
              Optional("unit", &KnownFault::unit, "The unit that it works on; left out: none."));

template <>
inline constexpr Definition kDefinition<UnmanagedParameters> = {
    "plan", "unmanaged",
    "Parameters in no unit, which every rank has whole beside the plan's own memory: bytes in blocks of "
    "512."};
template <>
inline constexpr auto kFields<UnmanagedParameters> =
    FieldList(Required("parameter_bytes", &UnmanagedParameters::parameter_bytes, "The parameters."),
              Required("gradient_bytes", &UnmanagedParameters::gradient_bytes, "Their gradients."),
              Required("state_bytes", &UnmanagedParameters::state_bytes, "Their optimizer states."));

template <>
inline constexpr bool kIsBlock<Plan> = true;
template <>
inline constexpr Definition kDefinition<Plan> = {"plan", "plan",
                                                 "One explicit program: the schedule of a training step."};
template <>
inline constexpr auto kFields<Plan> = FieldList(
    Required("model", &Plan::model, "Name of the model."),
    Required("policy", &Plan::policy, "Policy that made the plan."),
    Optional("digests", &Plan::digests,
             "Digests of the documents it was made from, \"sha256:...\"; \"\" when there was none."),
    Optional(
        "known_faults", &Plan::known_faults,
        "What the verifier finds in this plan because PyTorch does the same; a plan that was changed since "
        "is refused.")
        .Lines(),
    Required("world_size", &Plan::world_size, "Ranks.").AtLeast(1),
    Optional("tokens_per_step", &Plan::tokens_per_step, "That one rank works on."),
    Optional("ranks_per_batch", &Plan::ranks_per_batch,
             "Ranks that work on the same tokens together: along tensor parallelism, say.")
        .AtLeast(1),
    Optional("mesh", &Plan::mesh, "Outermost first."),
    Required("cluster", &Plan::cluster, "Costs are computed from it when no other is given."),
    Required("strategy", &Plan::strategy, "What the plan was made by."),
    Required("units", &Plan::units, "Units in the order of their ids.").Lines().Defines(RefKind::kUnit),
    Required("buffers", &Plan::buffers, "All memory that the plan manages.")
        .Lines()
        .Defines(RefKind::kBuffer),
    Required("streams", &Plan::streams, "The first is the compute stream.")
        .Lines()
        .NotEmpty()
        .Defines(RefKind::kStream),
    Required("events", &Plan::events, "Names of the events.").Lines().Defines(RefKind::kEvent),
    Required("communicators", &Plan::communicators, "Groups of ranks.")
        .Lines()
        .Defines(RefKind::kCommunicator),
    Optional("inputs", &Plan::inputs, "Alive from the beginning of a step to its end.").Lines(),
    Optional("model_buffers", &Plan::model_buffers, "Alive for ever.").Lines(),
    Optional("unmanaged", &Plan::unmanaged, "Memory of parameters in no unit. Left out: there are none."),
    Optional("passes", &Plan::passes,
             "Which passes the model has. Left out: nothing is known of the order of segments."),
    Optional("exchanges", &Plan::exchanges, "Exchanges of a matrix optimizer.")
        .Lines()
        .Defines(RefKind::kExchange),
    Required("segments", &Plan::segments, "The model's own compute.").Lines().Defines(RefKind::kSegment),
    Required("steps", &Plan::steps, "The steps as run.").Lines().NotEmpty(),
    Optional("steady_step", &Plan::steady_step, "After the last step, go on with this one."),
    Optional("procedures", &Plan::procedures, "What is done on demand, beside the steps.").Lines());

// plan_json.cc defines them.
extern template const JsonObjectType& JsonObjectTypeOf<Plan>();
extern template const JsonObjectType& JsonObjectTypeOf<Unit>();
extern template const JsonObjectType& JsonObjectTypeOf<UnitParameter>();
extern template const JsonObjectType& JsonObjectTypeOf<Buffer>();
extern template const JsonObjectType& JsonObjectTypeOf<PlanStream>();
extern template const JsonObjectType& JsonObjectTypeOf<SegmentGrad>();
extern template const JsonObjectType& JsonObjectTypeOf<ExchangedMatrix>();
extern template const JsonObjectType& JsonObjectTypeOf<Exchange>();
extern template const JsonObjectType& JsonObjectTypeOf<Segment>();
extern template const JsonObjectType& JsonObjectTypeOf<ModelPasses>();
extern template const JsonObjectType& JsonObjectTypeOf<Trigger>();
extern template const JsonObjectType& JsonObjectTypeOf<Instruction>();
extern template const JsonObjectType& JsonObjectTypeOf<Procedure>();
extern template const JsonObjectType& JsonObjectTypeOf<RepeatedTriggers>();
extern template const JsonObjectType& JsonObjectTypeOf<Digests>();
extern template const JsonObjectType& JsonObjectTypeOf<UnmanagedParameters>();
extern template const JsonObjectType& JsonObjectTypeOf<KnownFault>();

}  // namespace shardplan
