// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/reduce_scatter_copy_in.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "units/layout.h"

namespace shardplan::fsdp2 {
namespace {

struct OrderedGrads {
  std::vector<BufferId> copies;
  BufferId last_grad = -1;  // what the last of them was made of
};

// Gradients whose pieces do not lie one behind another are put in that order one by one, and freed when
// foreach_reduce's loop names them no more: its chunks are views of the latest one until the next one's turn,
// and Python's zip keeps every second tuple that it gave, beginning with the first, until it is asked for the
// second next. With gradients_are_freed_together the loop is a function's, and names none when the input is
// allocated. Moves them from `grads` to what is returned.
OrderedGrads OrderChunkedGrads(const UnitScope& scope, const std::vector<std::int32_t>& parameters,
                               std::vector<BufferId>& grads) {
  ProgramBuilder& program = scope.program();
  OrderedGrads ordered;
  std::vector<std::pair<std::size_t, BufferId>> named;  // turn and gradient
  for (std::size_t turn = 0; turn < parameters.size(); ++turn) {
    const std::int32_t p = parameters[turn];
    if (!scope.IsChunked(p)) continue;
    std::erase_if(named, [&](const auto& earlier) {
      if (earlier.first % 2 == 0 && turn < earlier.first + 2) return false;
      program.Free(earlier.second, kCompute);
      return true;
    });
    const auto grad = std::ranges::find_if(
        grads, [&](BufferId b) { return program.plan().buffers[b].parameters == std::vector{p}; });
    SHARDPLAN_ASSERT(grad != grads.end(),
                     "UnshardedGrads::Take gives a chunked gradient a buffer of its own");
    const Buffer from = program.plan().buffers[*grad];
    ordered.copies.push_back(scope.Buffer(BufferRole::kGradUnshardedAccumulated, from.dtype, from.parts_bytes,
                                          {p}, fmt::format("chunks.p{}", p)));
    program.Allocate(ordered.copies.back(), kCompute);
    program.Move(InstructionKind::kGradCopyIn, *grad, ordered.copies.back(), kCompute);
    named.emplace_back(turn, *grad);
    grads.erase(grad);
  }
  if (named.empty()) return ordered;
  if (scope.rules().gradients_are_freed_together) {
    for (const auto& [turn, grad] : named) program.Free(grad, kCompute);
    return ordered;
  }
  ordered.last_grad = named.back().second;
  named.pop_back();
  for (const auto& [turn, grad] : named) program.Free(grad, kCompute);
  return ordered;
}

// Gradients that are copied into the input are dropped, but without gradients_are_freed_together a variable
// of foreach_reduce's loop names the last one on several ranks until it returns. Returns the buffers with
// what is left.
std::vector<BufferId> DropCopiedGrads(const UnitScope& scope, std::int32_t last_parameter,
                                      const std::vector<BufferId>& grads) {
  ProgramBuilder& program = scope.program();
  const bool loop_names_last = scope.shard_ranks() > 1 && !scope.rules().gradients_are_freed_together;
  std::vector<BufferId> left;
  for (const BufferId grad : grads) {
    const std::vector<std::int32_t>& held = program.plan().buffers[grad].parameters;
    std::vector<std::int32_t> dropped;
    for (std::size_t part = 0; part < held.size(); ++part) {
      const bool named = loop_names_last && held[part] == last_parameter;
      if (!named) dropped.push_back(static_cast<std::int32_t>(part));
    }
    if (dropped.size() == held.size()) {
      program.Free(grad, kCompute);
      continue;
    }
    if (!dropped.empty()) program.FreeParts(grad, kCompute, std::move(dropped));
    left.push_back(grad);
  }
  return left;
}

}  // namespace

ReduceScatterInput ReduceScatterCopyIn(const UnitScope& scope, const UnshardedGrads::Taken& taken,
                                       bool from_process_group, DType dtype, std::string_view suffix) {
  SHARDPLAN_ASSERT(!taken.parameters.empty(), "a group without gradients reduces nothing");
  ProgramBuilder& program = scope.program();
  std::int64_t numel = 0;
  for (const std::int32_t p : taken.parameters) {
    numel += PaddedPieceNumel(scope.unit().parameters[p], scope.shard_ranks());
  }
  std::vector<BufferId> grads = taken.buffers;
  const OrderedGrads ordered = OrderChunkedGrads(scope, taken.parameters, grads);
  const BufferId input =
      scope.StagingBuffer(from_process_group, BufferRole::kReduceScatterInput, dtype,
                          Bytes{numel * scope.shard_ranks() * SizeBytes(dtype)}, taken.parameters, suffix);
  program.Allocate(input, kCompute);
  for (const std::vector<BufferId>& sources : {grads, ordered.copies}) {
    for (const BufferId source : sources) {
      program.Move(InstructionKind::kGradCopyIn, source, input, kCompute);
    }
  }
  std::vector<BufferId> left = DropCopiedGrads(scope, taken.parameters.back(), grads);
  for (const BufferId copy : ordered.copies) program.Free(copy, kCompute);
  if (ordered.last_grad >= 0) left.push_back(ordered.last_grad);
  return {.buffer = input, .named_grads = std::move(left)};
}

}  // namespace shardplan::fsdp2
