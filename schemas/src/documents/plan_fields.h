// The plan in JSON (docs/plan-format.md).
#pragma once

#include "documents/cluster_fields.h"
#include "documents/strategy_fields.h"
#include "documents/trace_fields.h"
#include "json/json_fields.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

template <>
inline constexpr auto kFields<ExtensionBuffer> = FieldList(
    Required("dtype", &ExtensionBuffer::dtype), Required("numel", &ExtensionBuffer::numel).AtMost(kMaxExact));

template <>
inline constexpr auto kFields<UnitParameter> = FieldList(
    Required("fqn", &UnitParameter::fqn), Optional("shared_with", &UnitParameter::shared_with),
    Required("shape", &UnitParameter::shape).Shape(), Required("dtype", &UnitParameter::dtype),
    Optional("requires_grad", &UnitParameter::requires_grad),
    Optional("shard_dim", &UnitParameter::shard_dim), Optional("flat_offset", &UnitParameter::flat_offset),
    Optional("placements", &UnitParameter::placements), Optional("param_dtype", &UnitParameter::param_dtype),
    Optional("gathered", &UnitParameter::gathered), Optional("unsharded", &UnitParameter::unsharded));

template <>
inline constexpr bool kIsBlock<Unit> = true;
template <>
inline constexpr auto kFields<Unit> = FieldList(
    Required("fqn", &Unit::fqn), Optional("modules", &Unit::modules), Optional("layout", &Unit::layout),
    Required("parameters", &Unit::parameters).Lines(), Required("orig_dtype", &Unit::orig_dtype),
    Required("param_dtype", &Unit::param_dtype), Required("reduce_dtype", &Unit::reduce_dtype),
    Optional("shard_communicator", &Unit::shard_communicator).Ref(RefKind::kCommunicator),
    Optional("reduce_scatter_communicator", &Unit::reduce_scatter_communicator).Ref(RefKind::kCommunicator),
    Optional("replicate_communicator", &Unit::replicate_communicator).Ref(RefKind::kCommunicator),
    Optional("post_forward_communicator", &Unit::post_forward_communicator).Ref(RefKind::kCommunicator),
    Optional("hook_communicator", &Unit::hook_communicator).Ref(RefKind::kCommunicator),
    Optional("hook_divisor", &Unit::hook_divisor).Positive(),
    Optional("gradient_divide_factor", &Unit::gradient_divide_factor).Positive(),
    Optional("flat_numel", &Unit::flat_numel));

template <>
inline constexpr auto kFields<Buffer> =
    FieldList(Required("name", &Buffer::name), Required("role", &Buffer::role),
              Optional("unit", &Buffer::unit).Ref(RefKind::kUnit), Required("dtype", &Buffer::dtype),
              Required("parts_bytes", &Buffer::parts_bytes), Optional("parameters", &Buffer::parameters),
              Optional("memory", &Buffer::memory), Optional("persistent", &Buffer::persistent),
              Optional("pool", &Buffer::pool).Ref(RefKind::kCommunicator));

template <>
inline constexpr auto kFields<PlanStream> =
    FieldList(Required("name", &PlanStream::name),
              Optional("priority", &PlanStream::priority).AtLeast(std::numeric_limits<std::int32_t>::min()));

template <>
inline constexpr auto kFields<CommunicatorDim> =
    FieldList(Required("size", &CommunicatorDim::size).AtLeast(1),
              Required("stride", &CommunicatorDim::stride).AtLeast(1));

template <>
inline constexpr auto kFields<Communicator> = FieldList(Required("name", &Communicator::name),
                                                        Required("size", &Communicator::size).AtLeast(1),
                                                        Optional("stride", &Communicator::stride).AtLeast(1),
                                                        Optional("dims", &Communicator::dims));

template <>
inline constexpr auto kFields<SegmentGrad> = FieldList(
    Required("unit", &SegmentGrad::unit).Ref(RefKind::kUnit), Required("parameter", &SegmentGrad::parameter));

template <>
inline constexpr bool kIsBlock<Segment> = true;
template <>
inline constexpr auto kFields<Segment> = FieldList(Required("name", &Segment::name),
                                                   Optional("phase", &Segment::phase),
                                                   Optional("unit", &Segment::unit).Ref(RefKind::kUnit),
                                                   Optional("reads", &Segment::reads).Ref(RefKind::kUnit),
                                                   Optional("grads", &Segment::grads).Lines(),
                                                   Required("entries", &Segment::entries).Lines());

template <>
inline constexpr auto kFields<Instruction> = FieldList(
    Required("kind", &Instruction::kind), Optional("segment", &Instruction::segment).Ref(RefKind::kSegment),
    Optional("microbatch", &Instruction::microbatch),
    Optional("event", &Instruction::event).Ref(RefKind::kEvent),
    Optional("src", &Instruction::src).Ref(RefKind::kBuffer),
    Optional("dst", &Instruction::dst).Ref(RefKind::kBuffer),
    Optional("communicator", &Instruction::communicator).Ref(RefKind::kCommunicator),
    Optional("reduce_op", &Instruction::reduce_op), Optional("divisor", &Instruction::divisor).Positive(),
    Optional("stream", &Instruction::stream).Ref(RefKind::kStream),
    Optional("safe_after", &Instruction::safe_after).Ref(RefKind::kStream),
    Optional("parts", &Instruction::parts), Optional("unit", &Instruction::unit).Ref(RefKind::kUnit),
    Optional("parameter", &Instruction::parameter).AtLeast(-1), Optional("reason", &Instruction::reason));

template <>
inline constexpr bool kIsBlock<Trigger> = true;
template <>
inline constexpr auto kFields<Trigger> = FieldList(Required("kind", &Trigger::kind),
                                                   Optional("unit", &Trigger::unit).Ref(RefKind::kUnit),
                                                   Optional("microbatch", &Trigger::microbatch),
                                                   Optional("occurrence", &Trigger::occurrence),
                                                   Required("instructions", &Trigger::instructions).Lines());

template <>
inline constexpr bool kIsBlock<PlanStep> = true;
template <>
inline constexpr auto kFields<PlanStep> = FieldList(Required("name", &PlanStep::name),
                                                    Required("triggers", &PlanStep::triggers).Lines());

template <>
inline constexpr auto kFields<Digests> = FieldList(Optional("trace", &Digests::trace),
                                                   Optional("strategy", &Digests::strategy),
                                                   Optional("cluster", &Digests::cluster));

template <>
inline constexpr bool kIsBlock<Plan> = true;
template <>
inline constexpr auto kFields<Plan> = FieldList(
    Required("model", &Plan::model), Required("policy", &Plan::policy), Optional("digests", &Plan::digests),
    Required("world_size", &Plan::world_size).AtLeast(1), Optional("tokens_per_step", &Plan::tokens_per_step),
    Optional("mesh", &Plan::mesh), Required("cluster", &Plan::cluster), Required("strategy", &Plan::strategy),
    Required("units", &Plan::units).Lines().Defines(RefKind::kUnit),
    Required("buffers", &Plan::buffers).Lines().Defines(RefKind::kBuffer),
    Required("streams", &Plan::streams).Lines().Defines(RefKind::kStream),
    Required("events", &Plan::events).Lines().Defines(RefKind::kEvent),
    Required("communicators", &Plan::communicators).Lines().Defines(RefKind::kCommunicator),
    Optional("inputs", &Plan::inputs).Lines(), Optional("model_buffers", &Plan::model_buffers).Lines(),
    Required("segments", &Plan::segments).Lines().Defines(RefKind::kSegment),
    Required("steps", &Plan::steps).Lines(), Optional("steady_step", &Plan::steady_step));

}  // namespace shardplan
