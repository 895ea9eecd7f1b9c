// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/foreach_all_gather.h"

#include <fmt/format.h>

#include "shardplan/schemas/assert.h"
#include "units/layout.h"

namespace shardplan::fsdp2 {
namespace {

// ProcessGroupNCCL runs what is issued with async_op on a stream of its own, which waits for the current one;
// the current one waits for it at the copy-out (Work.wait).
StreamId ProcessGroupStream(const UnitScope& scope, CommunicatorId communicator) {
  return scope.program().Stream(fmt::format("nccl.{}", scope.partition().communicators[communicator].name));
}

}  // namespace

AllGatherResult ForeachAllGather(const UnitScope& scope, const FsdpParams& params,
                                 const AllGatherArguments& arguments) {
  ProgramBuilder& program = scope.program();
  const Unit& unit = scope.unit();
  const StreamId copy_in = arguments.streams.copy_in;
  const CommunicatorId communicator =
      params.is_sharded_post_forward() ? unit.post_forward_communicator : unit.shard_communicator;
  SHARDPLAN_ASSERT(communicator >= 0, "several ranks have a communicator");
  const StreamId gather =
      arguments.async_op ? ProcessGroupStream(scope, communicator) : arguments.streams.all_gather;

  const FsdpParams::AllGatherInputs inputs = params.GetAllGatherInputs(copy_in);
  // A gather over the smaller mesh moves the padding of the whole one too: its shards are cut from that.
  const Bytes gathered{Sum(GatherInputParts(unit, scope.shard_ranks())).value * scope.shard_ranks()};
  const BufferId output =
      scope.StagingBuffer(arguments.from_process_group, BufferRole::kAllGatherOutput, GatherDType(unit),
                          gathered, scope.AllParameters(), arguments.second ? "again" : "");
  program.Allocate(output, copy_in);
  for (const BufferId source : inputs.sources) {
    program.Move(InstructionKind::kCopyIn, source, output, copy_in).communicator = communicator;
  }
  program.WaitStream(gather, copy_in, fmt::format("{}.copy_in", scope.Name()));
  program.Move(InstructionKind::kAllGather, output, output, gather).communicator = communicator;
  const EventId event = scope.Event("all_gather");
  program.Record(event, gather);
  for (const BufferId buffer : inputs.temporaries) program.Free(buffer, copy_in);
  return {.output = output, .event = event, .async_op = arguments.async_op, .second = arguments.second};
}

void ForeachAllGatherCopyOut(const UnitScope& scope, const FsdpParams& params,
                             const AllGatherResult& result) {
  SHARDPLAN_ASSERT(result.output >= 0 && result.event >= 0, "several ranks gather");
  scope.program().Wait(result.event, kCompute);
  params.AllocAllGatherOutputs();
  params.CopyOut(result.output);
}

}  // namespace shardplan::fsdp2
