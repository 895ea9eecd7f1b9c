// SPDX-License-Identifier: Apache-2.0
// The recording in JSON (docs/reference/recording-format.md).
#pragma once

#include "json/fields.h"
#include "json/types.h"
#include "shardplan/schemas/recording.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<RecordedThread> = {.says = "A thread of the process."};
template <>
inline constexpr auto kFields<RecordedThread> = FieldList(
    Required("name", &RecordedThread::name, "Its name in the system; \"main\"."),
    Optional("works_for", &RecordedThread::works_for,
             "The thread that waits while this one works: autograd's for the one in a backward; -1: none.")
        .OrNone());

template <>
inline constexpr Definition kDefinition<RecordedStream> = {.says = "A stream of CUDA."};
template <>
inline constexpr auto kFields<RecordedStream> = FieldList(
    Required("device", &RecordedStream::device, "Its device."),
    Optional("priority", &RecordedStream::priority, "As CUDA has it: lower numbers go first.").AtLeast(-100),
    Optional("number", &RecordedStream::number,
             "Of the device: 0 is its default stream, others in the order in which they were made.")
        .OrNone());

template <>
inline constexpr Definition kDefinition<RecordedFrame> = {.says = "A line of Python."};
template <>
inline constexpr auto kFields<RecordedFrame> =
    FieldList(Required("file", &RecordedFrame::file, "Name of the file."),
              Required("line", &RecordedFrame::line, "Line in it."),
              Required("function", &RecordedFrame::function, "Qualified name of the function."));

template <>
inline constexpr Definition kDefinition<RecordedPlace> = {"recording", "place",
                                                          "Where in the program something was issued."};
template <>
inline constexpr auto kFields<RecordedPlace> = FieldList(
    Required("frames", &RecordedPlace::frames, "Innermost first; none: no Python ran in the thread."),
    Optional("module", &RecordedPlace::module, "FQN of the module whose forward runs."),
    Optional("node", &RecordedPlace::node, "The node of autograd whose backward runs."),
    Optional("forward", &RecordedPlace::forward, "The place of that node's forward; -1: not known.")
        .OrNone());

template <>
inline constexpr Definition kDefinition<RecordedCommunicator> = {.says = "A communicator of NCCL."};
template <>
inline constexpr auto kFields<RecordedCommunicator> =
    FieldList(Required("size", &RecordedCommunicator::size, "Its ranks.").AtLeast(1),
              Required("rank", &RecordedCommunicator::rank, "This one's, in it."),
              Optional("name", &RecordedCommunicator::name, "The group's description."),
              Optional("ranks", &RecordedCommunicator::ranks, "Ranks of the job, in the group's order."));

template <>
inline constexpr Definition kDefinition<MemoryRegion> = {"recording", "region",
                                                         "Memory that is read or written."};
template <>
inline constexpr auto kFields<MemoryRegion> = FieldList(
    Required("address", &MemoryRegion::address, "Its first element.").AtMost(kMaxExact),
    Required("dtype", &MemoryRegion::dtype, "Of its elements."),
    Required("shape", &MemoryRegion::shape, "Its shape.").Shape(),
    Optional("strides", &MemoryRegion::strides, "In elements; left out: no gaps, in any order of dimensions.")
        .AtMost(kMaxExact));

// ---- events: arrays ----
template <>
inline constexpr std::string_view kTag<IssuedKernel> = "kernel";
template <>
inline constexpr bool kIsEvent<IssuedKernel> = true;
template <>
inline constexpr Definition kDefinition<IssuedKernel> = {.says = "An operator of torch runs on a stream."};
template <>
inline constexpr auto kFields<IssuedKernel> = FieldList(
    Required("thread", &IssuedKernel::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedKernel::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedKernel::stream, "Stream.").Ref(RefKind::kRecordedStream),
    Required("name", &IssuedKernel::name, "Name of the operator."),
    Required("reads", &IssuedKernel::reads, "Memory that it reads."),
    Required("writes", &IssuedKernel::writes, "Memory that it writes."),
    Optional("flops", &IssuedKernel::flops, "Floating-point operations."));

template <>
inline constexpr std::string_view kTag<IssuedLaunch> = "launch";
template <>
inline constexpr bool kIsEvent<IssuedLaunch> = true;
template <>
inline constexpr Definition kDefinition<IssuedLaunch> = {
    .says =
        "A kernel runs that no operator of torch launched: which memory it reads and writes is not known."};
template <>
inline constexpr auto kFields<IssuedLaunch> = FieldList(
    Required("thread", &IssuedLaunch::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedLaunch::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedLaunch::stream, "Stream.").Ref(RefKind::kRecordedStream),
    Required("name", &IssuedLaunch::name, "Name of the kernel."));

template <>
inline constexpr std::string_view kTag<IssuedCopy> = "copy";
template <>
inline constexpr bool kIsEvent<IssuedCopy> = true;
template <>
inline constexpr Definition kDefinition<IssuedCopy> = {.says = "Memory is copied."};
template <>
inline constexpr auto kFields<IssuedCopy> = FieldList(
    Required("thread", &IssuedCopy::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedCopy::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedCopy::stream, "Stream.").Ref(RefKind::kRecordedStream),
    Required("direction", &IssuedCopy::direction, "From where to where."),
    Required("size_bytes", &IssuedCopy::size_bytes, "Bytes copied."),
    Required("reads", &IssuedCopy::reads, "Memory that it reads; pageable memory of the host is left out."),
    Required("writes", &IssuedCopy::writes,
             "Memory that it writes; pageable memory of the host is left out."));

template <>
inline constexpr std::string_view kTag<IssuedMemset> = "memset";
template <>
inline constexpr bool kIsEvent<IssuedMemset> = true;
template <>
inline constexpr Definition kDefinition<IssuedMemset> = {.says = "Memory is set."};
template <>
inline constexpr auto kFields<IssuedMemset> = FieldList(
    Required("thread", &IssuedMemset::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedMemset::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedMemset::stream, "Stream.").Ref(RefKind::kRecordedStream),
    Required("writes", &IssuedMemset::writes, "Memory that it writes."));

template <>
inline constexpr std::string_view kTag<IssuedCollective> = "collective";
template <>
inline constexpr bool kIsEvent<IssuedCollective> = true;
template <>
inline constexpr Definition kDefinition<IssuedCollective> = {.says = "NCCL's collective, or a message."};
template <>
inline constexpr auto kFields<IssuedCollective> = FieldList(
    Required("thread", &IssuedCollective::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedCollective::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedCollective::stream, "Stream.").Ref(RefKind::kRecordedStream),
    Required("kind", &IssuedCollective::kind, "Kind of collective."),
    Required("communicator", &IssuedCollective::communicator, "Communicator: index into communicators.")
        .Ref(RefKind::kRecordedCommunicator),
    Required("dtype", &IssuedCollective::dtype, "Of its elements."),
    Required("size_bytes", &IssuedCollective::size_bytes,
             "The full tensor: the output of an all_gather, the input of a reduce_scatter, what a rank sends "
             "in an all_to_all or a send."),
    Required("reads", &IssuedCollective::reads, "Memory that it reads."),
    Required("writes", &IssuedCollective::writes, "Memory that it writes."),
    Required("peer", &IssuedCollective::peer, "send, recv: the other rank of the communicator, or -1.")
        .OrNone(),
    Required("batch", &IssuedCollective::batch, "What is issued as one group has one number, or -1.")
        .OrNone());

template <>
inline constexpr std::string_view kTag<IssuedRecord> = "record";
template <>
inline constexpr bool kIsEvent<IssuedRecord> = true;
template <>
inline constexpr Definition kDefinition<IssuedRecord> = {.says = "An event is recorded on a stream."};
template <>
inline constexpr auto kFields<IssuedRecord> = FieldList(
    Required("thread", &IssuedRecord::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedRecord::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedRecord::stream, "Stream.").Ref(RefKind::kRecordedStream),
    Required("event", &IssuedRecord::event, "Number of the record."));

template <>
inline constexpr std::string_view kTag<IssuedWait> = "wait";
template <>
inline constexpr bool kIsEvent<IssuedWait> = true;
template <>
inline constexpr Definition kDefinition<IssuedWait> = {.says = "A stream waits for a recorded event."};
template <>
inline constexpr auto kFields<IssuedWait> = FieldList(
    Required("thread", &IssuedWait::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &IssuedWait::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &IssuedWait::stream, "Stream that waits.").Ref(RefKind::kRecordedStream),
    Required("event", &IssuedWait::event, "Number of the record."));

template <>
inline constexpr std::string_view kTag<HostWaitForEvent> = "wait_for_event";
template <>
inline constexpr bool kIsEvent<HostWaitForEvent> = true;
template <>
inline constexpr Definition kDefinition<HostWaitForEvent> = {
    .says = "The host waits for a recorded event, or is told that it is over."};
template <>
inline constexpr auto kFields<HostWaitForEvent> = FieldList(
    Required("thread", &HostWaitForEvent::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &HostWaitForEvent::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("event", &HostWaitForEvent::event, "Number of the record."));

template <>
inline constexpr std::string_view kTag<HostLearned> = "learn";
template <>
inline constexpr bool kIsEvent<HostLearned> = true;
template <>
inline constexpr Definition kDefinition<HostLearned> = {
    .says = "torch's own code is told that a recorded event is over, and gives up what it held until then."};
template <>
inline constexpr auto kFields<HostLearned> =
    FieldList(Required("thread", &HostLearned::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("event", &HostLearned::event, "Number of the record."));

template <>
inline constexpr std::string_view kTag<HostWaitForStream> = "wait_for_stream";
template <>
inline constexpr bool kIsEvent<HostWaitForStream> = true;
template <>
inline constexpr Definition kDefinition<HostWaitForStream> = {.says = "The host waits for a stream."};
template <>
inline constexpr auto kFields<HostWaitForStream> =
    FieldList(Required("thread", &HostWaitForStream::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("place", &HostWaitForStream::place, "Where in the program, or -1.")
                  .Ref(RefKind::kPlace)
                  .OrNone(),
              Required("stream", &HostWaitForStream::stream, "Stream.").Ref(RefKind::kRecordedStream));

template <>
inline constexpr std::string_view kTag<HostWaitForDevice> = "wait_for_device";
template <>
inline constexpr bool kIsEvent<HostWaitForDevice> = true;
template <>
inline constexpr Definition kDefinition<HostWaitForDevice> = {.says = "The host waits for a device."};
template <>
inline constexpr auto kFields<HostWaitForDevice> =
    FieldList(Required("thread", &HostWaitForDevice::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("place", &HostWaitForDevice::place, "Where in the program, or -1.")
                  .Ref(RefKind::kPlace)
                  .OrNone(),
              Required("device", &HostWaitForDevice::device, "Device."));

template <>
inline constexpr std::string_view kTag<HostOperator> = "host";
template <>
inline constexpr bool kIsEvent<HostOperator> = true;
template <>
inline constexpr Definition kDefinition<HostOperator> = {
    .says = "An operator of the host reads or writes pinned memory."};
template <>
inline constexpr auto kFields<HostOperator> = FieldList(
    Required("thread", &HostOperator::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &HostOperator::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("name", &HostOperator::name, "Name of the operator."),
    Required("reads", &HostOperator::reads, "Memory that it reads."),
    Required("writes", &HostOperator::writes, "Memory that it writes."));

template <>
inline constexpr std::string_view kTag<HandOver> = "hand_over";
template <>
inline constexpr bool kIsEvent<HandOver> = true;
template <>
inline constexpr Definition kDefinition<HandOver> = {.says =
                                                         "A thread says that everything before it is over."};
template <>
inline constexpr auto kFields<HandOver> =
    FieldList(Required("thread", &HandOver::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("object", &HandOver::object, "What carries it."));

template <>
inline constexpr std::string_view kTag<TakeOver> = "take_over";
template <>
inline constexpr bool kIsEvent<TakeOver> = true;
template <>
inline constexpr Definition kDefinition<TakeOver> = {.says = "A thread learns what was handed over."};
template <>
inline constexpr auto kFields<TakeOver> =
    FieldList(Required("thread", &TakeOver::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("object", &TakeOver::object, "What carries it."));

template <>
inline constexpr std::string_view kTag<MemoryReserved> = "reserve";
template <>
inline constexpr bool kIsEvent<MemoryReserved> = true;
template <>
inline constexpr Definition kDefinition<MemoryReserved> = {.says = "The driver gives memory."};
template <>
inline constexpr auto kFields<MemoryReserved> =
    FieldList(Required("address", &MemoryReserved::address, "Its first byte.").AtMost(kMaxExact),
              Required("size_bytes", &MemoryReserved::size_bytes, "Bytes."),
              Required("device", &MemoryReserved::device, "Device; -1: pinned memory of the host.").OrNone());

template <>
inline constexpr std::string_view kTag<MemoryReleased> = "release";
template <>
inline constexpr bool kIsEvent<MemoryReleased> = true;
template <>
inline constexpr Definition kDefinition<MemoryReleased> = {
    .says = "The driver takes memory back. The host waits for the device."};
template <>
inline constexpr auto kFields<MemoryReleased> =
    FieldList(Required("thread", &MemoryReleased::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("address", &MemoryReleased::address, "Its first byte.").AtMost(kMaxExact));

template <>
inline constexpr std::string_view kTag<BlockAllocated> = "allocate";
template <>
inline constexpr bool kIsEvent<BlockAllocated> = true;
template <>
inline constexpr Definition kDefinition<BlockAllocated> = {.says = "The allocator hands a block out."};
template <>
inline constexpr auto kFields<BlockAllocated> = FieldList(
    Required("thread", &BlockAllocated::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &BlockAllocated::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &BlockAllocated::stream, "Stream that it is for.").Ref(RefKind::kRecordedStream),
    Required("address", &BlockAllocated::address, "Its first byte.").AtMost(kMaxExact),
    Required("size_bytes", &BlockAllocated::size_bytes, "As requested."));

template <>
inline constexpr std::string_view kTag<BlockFreed> = "free";
template <>
inline constexpr bool kIsEvent<BlockFreed> = true;
template <>
inline constexpr Definition kDefinition<BlockFreed> = {.says = "The allocator is given a block back."};
template <>
inline constexpr auto kFields<BlockFreed> = FieldList(
    Required("thread", &BlockFreed::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &BlockFreed::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("address", &BlockFreed::address, "Its first byte.").AtMost(kMaxExact),
    Required("size_bytes", &BlockFreed::size_bytes, "As requested."),
    Optional("is_behind", &BlockFreed::is_behind,
             "The place is the last that the thread was known to be at, before it."));

template <>
inline constexpr std::string_view kTag<BlockUsed> = "use";
template <>
inline constexpr bool kIsEvent<BlockUsed> = true;
template <>
inline constexpr Definition kDefinition<BlockUsed> = {.says = "Tensor.record_stream."};
template <>
inline constexpr auto kFields<BlockUsed> = FieldList(
    Required("thread", &BlockUsed::thread, "Thread that issued it.").Ref(RefKind::kThread),
    Required("place", &BlockUsed::place, "Where in the program, or -1.").Ref(RefKind::kPlace).OrNone(),
    Required("stream", &BlockUsed::stream, "Stream that uses it, too.").Ref(RefKind::kRecordedStream),
    Required("address", &BlockUsed::address, "First byte of the storage.").AtMost(kMaxExact));

template <>
inline constexpr std::string_view kTag<BlockHeld> = "hold";
template <>
inline constexpr bool kIsEvent<BlockHeld> = true;
template <>
inline constexpr Definition kDefinition<BlockHeld> = {
    .says = "The allocator keeps a block that was freed until what the stream has is over."};
template <>
inline constexpr auto kFields<BlockHeld> =
    FieldList(Required("thread", &BlockHeld::thread, "Thread that issued it.").Ref(RefKind::kThread),
              Required("stream", &BlockHeld::stream, "Stream.").Ref(RefKind::kRecordedStream),
              Required("address", &BlockHeld::address, "Its first byte.").AtMost(kMaxExact));

template <>
inline constexpr std::string_view kTag<PhaseEnded> = "phase";
template <>
inline constexpr bool kIsEvent<PhaseEnded> = true;
template <>
inline constexpr Definition kDefinition<PhaseEnded> = {.says = "A phase of a step ends."};
template <>
inline constexpr auto kFields<PhaseEnded> = FieldList(
    Required("phase", &PhaseEnded::phase, "forward, backward or optimizer; setup before the first step."),
    Required("step", &PhaseEnded::step, "From 1; 0: setup."));

template <>
inline constexpr Definition kDefinition<RecordingEvent> = {
    "recording", "event", "One event, in the order of issue; the first element is its kind."};

template <>
inline constexpr bool kIsBlock<Recording> = true;
template <>
inline constexpr Definition kDefinition<Recording> = {"recording", "recording",
                                                      "What one rank of a job gave to its devices."};
template <>
inline constexpr auto kFields<Recording> = FieldList(
    Required("job", &Recording::job, "The command, for people."),
    Required("recorded_with", &Recording::recorded_with, "Program and version, \"torch 2.15.0\"."),
    Required("device", &Recording::device, "Its name."), Required("rank", &Recording::rank, "Of the job."),
    Required("world_size", &Recording::world_size, "Ranks of the job.").AtLeast(1),
    Required("threads", &Recording::threads, "Threads of the process.").Lines().Defines(RefKind::kThread),
    Required("streams", &Recording::streams, "Streams of CUDA.").Lines().Defines(RefKind::kRecordedStream),
    Required("places", &Recording::places, "Lines of the program.").Lines().Defines(RefKind::kPlace),
    Required("communicators", &Recording::communicators, "Communicators of NCCL.")
        .Lines()
        .Defines(RefKind::kRecordedCommunicator),
    Required("events", &Recording::events, "In the order of issue, over all threads.").Lines());

}  // namespace shardplan
