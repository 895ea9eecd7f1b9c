// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/foreach_reduce.h"

#include <fmt/format.h>

#include <cassert>
#include <string>
#include <string_view>
#include <utility>

#include "policy/fsdp2/gradient_divide_factors.h"
#include "policy/fsdp2/reduce_scatter_copy_in.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"
#include "units/layout.h"

namespace shardplan::fsdp2 {
namespace {

// FSDPParamGroup._get_reduce_dtype.
DType ReduceDType(const ForeachReduceArguments& arguments, const UnshardedGrads::Taken& grads) {
  const DType dtype = ReduceDTypeOf(arguments.scope.unit(), grads.parameters);
  if (arguments.partial_reduce_output < 0) return dtype;
  return PromoteTypes(dtype, arguments.scope.program().plan().buffers[arguments.partial_reduce_output].dtype);
}

// One call.
class Reduction {
 public:
  Reduction(const ForeachReduceArguments& arguments, const UnshardedGrads::Taken& grads)
      : arguments_(arguments),
        scope_(arguments.scope),
        program_(arguments.scope.program()),
        grads_(grads),
        reduce_dtype_(ReduceDType(arguments, grads)),
        factors_(GetGradientDivideFactors(arguments.scope, arguments.settings, reduce_dtype_)),
        reduce_scatter_stream_(arguments.comm_ctx.reduce_scatter_stream()) {
    result_.partial_reduce_output = arguments.partial_reduce_output;
  }

  Status CheckPartial() const;
  ForeachReduceResult Run();
  ForeachReduceResult RunPartial();

 private:
  bool InTwoLevels() const { return scope_.unit().inner_reduce_communicator >= 0; }
  BufferRole FirstRole(bool is_kept) const;
  BufferId Output(BufferRole role) const;
  void PreparePartial();
  void ReduceScatter(BufferId input, BufferId output) const;
  void AddToPartial(BufferId output);
  BufferId ReduceOverOuter(BufferId inner);
  void DropPartial();
  void HandOver(BufferId output);
  void RecordPostReduce(StreamId stream);
  StreamId AllReduce(BufferId output);
  StreamId RunHook(BufferId output, StreamId stream);
  void Deliver(BufferId output, StreamId stream) const;

  const ForeachReduceArguments& arguments_;
  const UnitScope& scope_;
  ProgramBuilder& program_;
  const UnshardedGrads::Taken& grads_;
  const DType reduce_dtype_;
  const GradientDivideFactors factors_;
  const StreamId reduce_scatter_stream_;
  ForeachReduceResult result_;
};

// The gradients that wait for the all-reduce are one buffer: it has to be of the same parameters every time.
Status Reduction::CheckPartial() const {
  const BufferId partial = arguments_.partial_reduce_output;
  if (scope_.rules().partial_sums_get_zeros || partial < 0 ||
      program_.plan().buffers[partial].parameters == grads_.parameters)
    return {};
  return MakeInputError(
      "/program",
      "PyTorch adds the gradients that wait for the all-reduce to those of other parameters here: it fails, "
      "or where both have one number of elements, or what is added has a single one, gives wrong gradients",
      scope_.Name());
}

// The role of the first collective's output.
BufferRole Reduction::FirstRole(bool is_kept) const {
  if (InTwoLevels()) return is_kept ? BufferRole::kInnerReduceAccumulated : BufferRole::kInnerReduceOutput;
  return is_kept ? BufferRole::kPartialReduceOutput : BufferRole::kReduceScatterOutput;
}

BufferId Reduction::Output(BufferRole role) const {
  const Unit& unit = scope_.unit();
  std::int64_t numel = 0;
  for (const std::int32_t p : grads_.parameters) {
    numel += PaddedPieceNumel(unit.parameters[p], scope_.shard_ranks());
  }
  if (IsInnerReduced(role)) numel *= program_.plan().communicators[unit.outer_reduce_communicator].size;
  return scope_.StagingBuffer(arguments_.settings.allocate_memory_from_process_group, role, reduce_dtype_,
                              Bytes{numel * SizeBytes(reduce_dtype_)}, grads_.parameters);
}

// FSDPParamGroup._prepare_partial_reduce_output: a parameter that has come in has zeros in it.
void Reduction::PreparePartial() {
  const BufferId partial = result_.partial_reduce_output;
  if (partial < 0) return;
  if (scope_.rules().partial_sums_are_awaited) {
    program_.WaitStream(reduce_scatter_stream_, kCompute, fmt::format("{}.partial_awaited", scope_.Name()));
  }
  const Buffer& before = program_.plan().buffers[partial];
  if (before.parameters == grads_.parameters && before.dtype == reduce_dtype_) return;
  result_.partial_reduce_output = Output(program_.plan().buffers[partial].role);
  program_.Allocate(result_.partial_reduce_output, reduce_scatter_stream_);
  Instruction& zero = program_.Emit(InstructionKind::kGradZero, reduce_scatter_stream_);
  zero.dst = result_.partial_reduce_output;
  program_.Move(InstructionKind::kGradCopyIn, partial, result_.partial_reduce_output, reduce_scatter_stream_);
  program_.Free(partial, reduce_scatter_stream_);
}

void Reduction::ReduceScatter(BufferId input, BufferId output) const {
  const Unit& unit = scope_.unit();
  DivIfNeeded(factors_.pre, input, reduce_scatter_stream_, program_);
  if (scope_.shard_ranks() > 1) {
    Instruction& reduce =
        program_.Move(InstructionKind::kReduceScatter, input, output, reduce_scatter_stream_);
    reduce.communicator = InTwoLevels() ? unit.inner_reduce_communicator
                          : arguments_.settings.separate_reduce_scatter_group
                              ? unit.reduce_scatter_communicator
                              : unit.shard_communicator;
    reduce.reduce_op = factors_.reduce_scatter;
    reduce.divisor = factors_.premultiply.value_or(1.0);
    return;
  }
  program_.Move(InstructionKind::kGradCopyIn, input, output, reduce_scatter_stream_);
  DivIfNeeded(factors_.copy, output, reduce_scatter_stream_, program_);
  if (factors_.copy && (factors_.pre || factors_.post)) {
    arguments_.faults.Add(PyTorchFault::kFsdp2DividedTwice);
  }
}

// Accumulation of HSDP, reduced over the shards and not yet over the replicas, or of two levels.
void Reduction::AddToPartial(BufferId output) {
  if (result_.partial_reduce_output < 0) {
    result_.partial_reduce_output = output;
  } else {
    program_.Move(InstructionKind::kGradAccumulate, output, result_.partial_reduce_output,
                  reduce_scatter_stream_);
    program_.Free(output, reduce_scatter_stream_);
  }
  RecordPostReduce(reduce_scatter_stream_);
}

void Reduction::RecordPostReduce(StreamId stream) {
  program_.Record(result_.post_reduce_event, stream);
  result_.post_reduce_stream = stream;
}

// The second of two levels, of what the first has made, now and in earlier micro-batches. Both are on one
// stream, so what is between them is free behind it.
BufferId Reduction::ReduceOverOuter(BufferId inner) {
  if (result_.partial_reduce_output >= 0) {
    program_.Move(InstructionKind::kGradAccumulate, result_.partial_reduce_output, inner,
                  reduce_scatter_stream_);
    DropPartial();
  }
  const BufferId output = Output(BufferRole::kReduceScatterOutput);
  program_.Allocate(output, reduce_scatter_stream_);
  Instruction& reduce = program_.Move(InstructionKind::kReduceScatter, inner, output, reduce_scatter_stream_);
  reduce.communicator = scope_.unit().outer_reduce_communicator;
  reduce.reduce_op = factors_.reduce_scatter;
  program_.Free(inner, reduce_scatter_stream_);
  return output;
}

void Reduction::DropPartial() {
  if (result_.partial_reduce_output < 0) return;
  program_.Free(result_.partial_reduce_output, reduce_scatter_stream_);
  result_.partial_reduce_output = -1;
}

StreamId Reduction::AllReduce(BufferId output) {
  const CommunicatorId communicator = scope_.unit().replicate_communicator;
  if (communicator < 0) return reduce_scatter_stream_;
  if (result_.partial_reduce_output >= 0) {
    program_.Move(InstructionKind::kGradAccumulate, result_.partial_reduce_output, output,
                  reduce_scatter_stream_);
  }
  const StreamId stream = arguments_.comm_ctx.AllReduceStream();
  program_.WaitStream(stream, reduce_scatter_stream_, fmt::format("{}.all_reduce_input", scope_.Name()));
  Instruction& reduce = program_.Emit(InstructionKind::kAllReduce, stream);
  reduce.src = output;
  reduce.communicator = communicator;
  reduce.reduce_op = factors_.all_reduce;
  const EventId event = scope_.Event("all_reduce");
  program_.Record(event, stream);
  result_.all_reduce = AllReduceState{.input = output, .event = event};
  return stream;
}

// set_all_reduce_hook: after the reduce-scatter, with HSDP after its all-reduce. Later work stays on the
// hook's stream.
StreamId Reduction::RunHook(BufferId output, StreamId stream) {
  const std::optional<AllReduceHook>& hook = scope_.choice().all_reduce_hook;
  if (!hook) return stream;
  const std::string reason = program_.reason();
  stream = hook->own_stream ? program_.Stream("all_reduce_hook") : arguments_.comm_ctx.AllReduceStream();
  program_.WaitStream(stream, reduce_scatter_stream_, fmt::format("{}.all_reduce_hook", scope_.Name()));
  program_.SetReason("all_reduce_hook");
  if (scope_.unit().hook_communicator >= 0) {
    Instruction& reduce = program_.Emit(InstructionKind::kAllReduce, stream);
    reduce.src = output;
    reduce.communicator = scope_.unit().hook_communicator;
    reduce.reduce_op = hook->reduce_op;
  }
  DivIfNeeded(hook->divide, output, stream, program_);
  program_.SetReason(reason);
  if (scope_.rules().hook_input_is_held) {
    const EventId event = scope_.Event("all_reduce");
    program_.Record(event, stream);
    result_.all_reduce = AllReduceState{.input = output, .event = event};
  }
  return stream;
}

// With HSDP the all-reduce's input is kept. Without hook_input_is_held a hook's is not: where no gradient is
// a view of it, it is freed while the hook's stream may still be using it.
void Reduction::Deliver(BufferId output, StreamId stream) const {
  const bool is_gradient = arguments_.sharded_grads.Deliver(output, stream, grads_.parameters);
  if (!result_.all_reduce) {
    program_.Free(output, reduce_scatter_stream_);
    if (!is_gradient && stream != reduce_scatter_stream_) {
      arguments_.faults.Add(PyTorchFault::kFsdp2HookInputFreed);
    }
  }
  if (arguments_.optimizer_in_backward == nullptr) return;
  arguments_.sharded_grads.StepInBackward(*arguments_.optimizer_in_backward, stream, grads_.parameters);
}

ForeachReduceResult Reduction::Run() {
  const UnitId id = scope_.id();
  PreparePartial();
  const ParamGroupSettings& settings = arguments_.settings;
  // With several in flight a unit that reduces again may meet its own last input.
  const std::size_t same = arguments_.comm_ctx.ReduceScattersOf(id);
  const std::string again = same == 0 ? "" : fmt::format("again_{}", same + 1);
  const ReduceScatterInput input =
      ReduceScatterCopyIn(scope_, grads_, settings.allocate_memory_from_process_group, reduce_dtype_, again);
  program_.WaitStream(reduce_scatter_stream_, kCompute, fmt::format("{}.grads_ready", scope_.Name()));

  const bool has_another_level = InTwoLevels() || scope_.unit().replicate_communicator >= 0;
  const bool partial_only = has_another_level && !settings.all_reduce_grads;
  const bool new_partial = partial_only && result_.partial_reduce_output < 0;
  const BufferId output = Output(FirstRole(new_partial));
  program_.Allocate(output, reduce_scatter_stream_);
  ReduceScatter(input.buffer, output);
  const EventId event = scope_.Event(again.empty() ? "reduce_scatter" : "reduce_scatter." + again);
  program_.Record(event, reduce_scatter_stream_);
  result_.reduce_scatter = {.unit = id, .input = input.buffer, .event = event};
  result_.post_reduce_event = scope_.Event("post_reduce");
  if (partial_only) {
    AddToPartial(output);
  } else {
    HandOver(InTwoLevels() ? ReduceOverOuter(output) : output);
    DropPartial();
  }
  for (const BufferId grad : input.named_grads) program_.Free(grad, kCompute);
  return result_;
}

ForeachReduceResult Reduction::RunPartial() {
  const BufferId partial = std::exchange(result_.partial_reduce_output, -1);
  result_.post_reduce_event = scope_.Event("post_reduce");
  HandOver(InTwoLevels() ? ReduceOverOuter(partial) : partial);
  return result_;
}

// Hands over gradients that are reduced over all shards: over the replicas, and to who wants them.
void Reduction::HandOver(BufferId output) {
  const StreamId stream = RunHook(output, AllReduce(output));
  DivIfNeeded(factors_.post, output, stream, program_);
  Deliver(output, stream);
  RecordPostReduce(stream);
}

}  // namespace

ForeachReduceResult ReducePartialOutput(const ForeachReduceArguments& arguments) {
  const Buffer& partial = arguments.scope.program().plan().buffers[arguments.partial_reduce_output];
  const UnshardedGrads::Taken grads{.parameters = partial.parameters, .buffers = {}};
  return Reduction(arguments, grads).RunPartial();
}

Result<ForeachReduceResult> ForeachReduce(const ForeachReduceArguments& arguments,
                                          const UnshardedGrads::Taken& grads) {
  Reduction reduction(arguments, grads);
  if (Status s = reduction.CheckPartial(); !s) return std::unexpected(s.error());
  return reduction.Run();
}

}  // namespace shardplan::fsdp2
