// SPDX-License-Identifier: Apache-2.0
// The report in JSON (docs/reference/report-format.md).
#pragma once

#include "json/fields.h"
#include "shardplan/schemas/report.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<CategoryBytes> = {.says = "Memory of one category."};
template <>
inline constexpr auto kFields<CategoryBytes> =
    FieldList(Required("category", &CategoryBytes::category, "Role of a buffer or storage."),
              Required("size_bytes", &CategoryBytes::size_bytes, "At the peak."));

template <>
inline constexpr Definition kDefinition<StreamReport> = {.says = "One stream over the steady step."};
template <>
inline constexpr auto kFields<StreamReport> = FieldList(Required("stream", &StreamReport::stream, "Name."),
                                                        Required("busy_ns", &StreamReport::busy_ns, "Busy."),
                                                        Required("operations", &StreamReport::operations,
                                                                 "Operations run."));

template <>
inline constexpr Definition kDefinition<CollectiveReport> = {
    .says = "One kind of collective on one communicator."};
template <>
inline constexpr auto kFields<CollectiveReport> =
    FieldList(Required("kind", &CollectiveReport::kind, "\"all_gather\"."),
              Required("communicator", &CollectiveReport::communicator, "Name."),
              Required("count", &CollectiveReport::count, "How many."),
              Required("full_tensor_bytes", &CollectiveReport::full_tensor_bytes, "Sum of full tensors."),
              Required("busy_ns", &CollectiveReport::busy_ns, "Sum of durations."),
              Required("exposed_ns", &CollectiveReport::exposed_ns, "Part during which no compute ran."),
              Optional("cost_source", &CollectiveReport::cost_source, "Where the cost came from."));

template <>
inline constexpr Definition kDefinition<UnitReport> = {.says = "One unit over the steady step."};
template <>
inline constexpr auto kFields<UnitReport> =
    FieldList(Required("unit", &UnitReport::unit, "FQN."),
              Required("param_bytes", &UnitReport::param_bytes, "Unsharded parameters."),
              Required("forward_ns", &UnitReport::forward_ns, "Forward."),
              Required("backward_ns", &UnitReport::backward_ns, "Backward."),
              Required("exposed_ns", &UnitReport::exposed_ns,
                       "Compute stream idle because of this unit's communication."));

template <>
inline constexpr bool kIsBlock<MemoryReport> = true;
template <>
inline constexpr Definition kDefinition<MemoryReport> = {"report", "memory",
                                                         "Memory of one rank over the steady step."};
template <>
inline constexpr auto kFields<MemoryReport> = FieldList(
    Required("peak_bytes", &MemoryReport::peak_bytes,
             "Peak of allocated memory, rounded as the caching allocator does, without context."),
    Required("peak_at", &MemoryReport::peak_at, "The trigger of the peak."),
    Required("peak_by_category", &MemoryReport::peak_by_category, "Sorted by category.").Lines(),
    Required("steady_bytes", &MemoryReport::steady_bytes, "Alive at the end of the steady step."),
    Required("context_bytes", &MemoryReport::context_bytes, "CUDA context."),
    Required("device_memory_bytes", &MemoryReport::device_memory_bytes, "The device has."),
    Required("reserved_bytes", &MemoryReport::reserved_bytes,
             "Peak of what the caching allocator reserves within the device's memory; where it runs out of "
             "memory: of a device without end."),
    Required("cache_releases", &MemoryReport::cache_releases,
             "Requests that released the cache first: each synchronises the device."),
    Required("fits", &MemoryReport::fits, "The allocator never runs out of memory."),
    Optional(
        "deferred_gradient_bytes", &MemoryReport::deferred_gradient_bytes,
        "The most that gradients take in the steady step that wait for their reduction beyond a backward."),
    Optional("host_peak_bytes", &MemoryReport::host_peak_bytes,
             "Peak of this rank's host memory, pinned allocations as the next power of two."),
    Optional("host_peak_at", &MemoryReport::host_peak_at, "The trigger of that peak."),
    Optional("host_peak_by_category", &MemoryReport::host_peak_by_category, "Sorted by category.").Lines(),
    Optional("host_steady_bytes", &MemoryReport::host_steady_bytes,
             "Alive in host memory at the end of the steady step."));

template <>
inline constexpr Definition kDefinition<FigureReport> = {
    .says = "What one uncertain figure of the cluster does to the step."};
template <>
inline constexpr auto kFields<FigureReport> =
    FieldList(Required("figure", &FigureReport::figure, "Which."),
              Required("origin", &FigureReport::origin, "Where it is from."),
              Required("off_ppm", &FigureReport::off_ppm, "How far it may be off, two times in three."),
              Required("better_ns", &FigureReport::better_ns, "The step when it is better by that."),
              Required("worse_ns", &FigureReport::worse_ns, "The step when it is worse by that."));

template <>
inline constexpr Definition kDefinition<ActivityReport> = {
    .says = "How long the device did one thing, and nothing that is listed before it."};
template <>
inline constexpr auto kFields<ActivityReport> =
    FieldList(Required("activity", &ActivityReport::activity,
                       "\"forward\", \"backward\", \"optimizer\", \"copies\", \"all_gather\", "
                       "\"reduce_scatter\", \"all_reduce\", \"host_link\", \"idle\"."),
              Required("time_ns", &ActivityReport::time_ns, "Part of the step."));

template <>
inline constexpr Definition kDefinition<TimelineSpan> = {
    .says = "Work on one stream without a gap that could be seen in a picture of the step."};
template <>
inline constexpr auto kFields<TimelineSpan> =
    FieldList(Required("stream", &TimelineSpan::stream, "Name."),
              Required("activity", &TimelineSpan::activity, "As in activities."),
              Required("name", &TimelineSpan::name, "\"forward layers.3\", \"all_gather layers.4\"."),
              Required("begin_ns", &TimelineSpan::begin_ns, "Since the begin of the step."),
              Required("duration_ns", &TimelineSpan::duration_ns, "Duration."));

template <>
inline constexpr Definition kDefinition<OperatorReport> = {
    .says = "Kernels of one class of operators in one part of the step."};
template <>
inline constexpr auto kFields<OperatorReport> =
    FieldList(Required("kind", &OperatorReport::kind, "\"matmul\", \"attention\", ..."),
              Required("phase", &OperatorReport::phase, "\"forward\", \"backward\" or \"optimizer\"."),
              Required("count", &OperatorReport::count, "Kernels."),
              Required("busy_ns", &OperatorReport::busy_ns, "Sum of durations."));

template <>
inline constexpr Definition kDefinition<InstructionReport> = {
    .says =
        "One instruction of the steady step as a plan's runtime measured it; times are since the begin of "
        "the step."};
template <>
inline constexpr auto kFields<InstructionReport> = FieldList(
    Required("trigger", &InstructionReport::trigger, "\"pre_forward layers.3\"."),
    Required("kind", &InstructionReport::kind,
             "\"all_gather\"; \"compute\": the model's operators, up to the next trigger."),
    Required("unit", &InstructionReport::unit, "FQN; empty: of none."),
    Required("host_begin_ns", &InstructionReport::host_begin_ns, "The host begins to issue it."),
    Required("host_end_ns", &InstructionReport::host_end_ns, "The host is done with that."),
    Optional("stream", &InstructionReport::stream, "Where its work is done; without work left out."),
    Optional("begin_ns", &InstructionReport::begin_ns, "Its work can begin in the stream."),
    Optional("end_ns", &InstructionReport::end_ns, "Its work is done."),
    Optional("allocated_bytes", &InstructionReport::allocated_bytes,
             "Allocated on the device when the host has issued it."));

template <>
inline constexpr bool kIsBlock<MeasuredReport> = true;
template <>
inline constexpr Definition kDefinition<MeasuredReport> = {"report", "measured",
                                                           "What only a measured report has."};
template <>
inline constexpr auto kFields<MeasuredReport> = FieldList(
    Required("device", &MeasuredReport::device, "What the rank computed on."),
    Required("rank", &MeasuredReport::rank, "Whose report it is."),
    Required("ranks", &MeasuredReport::ranks, "Whose profiles were read."),
    Required("steps_ns", &MeasuredReport::steps_ns, "Each profiled step; step_ns is their median."),
    Optional("waiting_ns", &MeasuredReport::waiting_ns,
             "Part of communication_ns in which this rank was there, and another one was not yet."),
    Optional("unassigned_kernels", &MeasuredReport::unassigned_kernels,
             "Device work that belongs to no unit, optimizer or collective of the plan: how many ..."),
    Optional("unassigned_ns", &MeasuredReport::unassigned_ns, "... and how long."),
    Optional("collectives_beside_plan", &MeasuredReport::collectives_beside_plan,
             "Collectives that the plan has not, or has with other bytes."),
    Optional("collectives_missing", &MeasuredReport::collectives_missing,
             "Collectives of the plan that the profile has not."),
    Optional("unrecorded_steps_ns", &MeasuredReport::unrecorded_steps_ns,
             "Of a plan that measured itself: the steps between the recorded ones."),
    Optional("recording_ns", &MeasuredReport::recording_ns,
             "What recording adds to a step: median of the recorded steps less that of those between them."));

template <>
inline constexpr bool kIsBlock<Report> = true;
template <>
inline constexpr Definition kDefinition<Report> = {"report", "report",
                                                   "What the simulator says of a plan, or what was measured "
                                                   "of a training."};
template <>
inline constexpr auto kFields<Report> = FieldList(
    Required("model", &Report::model, "Name of the model."),
    Required("policy", &Report::policy, "Policy of the plan."),
    Required("cluster", &Report::cluster, "Name of the cluster."),
    Optional("plan_digest", &Report::plan_digest, "Digest of the plan, \"sha256:...\"."),
    Required("world_size", &Report::world_size, "Ranks.").AtLeast(1),
    Required("step_ns", &Report::step_ns, "One steady step."),
    Optional("step_low_ns", &Report::step_low_ns, "Two times in three the step is above this ..."),
    Optional("step_high_ns", &Report::step_high_ns, "... and below this."),
    Required("forward_ns", &Report::forward_ns,
             "Step begin to the end of the last forward segment, loss included."),
    Required("backward_ns", &Report::backward_ns, "Backward."),
    Required("optimizer_ns", &Report::optimizer_ns, "The optimizer."),
    Required("compute_ns", &Report::compute_ns, "Compute engine busy."),
    Required("communication_ns", &Report::communication_ns, "Any collective in flight."),
    Required("exposed_communication_ns", &Report::exposed_communication_ns,
             "A collective in flight and no compute."),
    Required("overlap_ppm", &Report::overlap_ppm, "1 - exposed / communication.").AtMost(1'000'000),
    Required("host_ns", &Report::host_ns, "Host not blocked: it issues or works."),
    Optional("host_work_ns", &Report::host_work_ns,
             "Part of host_ns in which the host computes itself, in host memory."),
    Required("tokens_per_second_per_rank", &Report::tokens_per_second_per_rank,
             "Tokens per second of one rank."),
    Required("model_flops_utilization_ppm", &Report::model_flops_utilization_ppm,
             "Model FLOPs per second over the peak."),
    Required("streams", &Report::streams, "What each stream did.").Lines(),
    Required("collectives", &Report::collectives, "By kind and communicator.").Lines(),
    Required("units", &Report::units, "By unit.").Lines(),
    Required("memory", &Report::memory, "Of one rank."),
    Optional("figures", &Report::figures,
             "What uncertain figures of the cluster do to the step, the widest first.")
        .Lines(),
    Optional("activities", &Report::activities,
             "What the device did at each moment: the times add up to step_ns.")
        .Lines(),
    Optional("operators", &Report::operators, "Kernels by class of operators and part of the step.").Lines(),
    Optional("timeline", &Report::timeline, "What ran when, of a measured report.").Lines(),
    Optional("instructions", &Report::instructions,
             "Instructions of the steady step, of a plan that measured itself.")
        .Lines(),
    Optional("measured", &Report::measured, "What only a measured report has."),
    Optional("notes", &Report::notes, "Where figures came from, what was assumed.").Lines());

}  // namespace shardplan
