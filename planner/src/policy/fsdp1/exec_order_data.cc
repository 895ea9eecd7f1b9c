// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/exec_order_data.h"

#include <fmt/format.h>

#include "policy/fsdp1/flat_param_handle.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp1 {
namespace {

// _check_order: every rank tells all others how many units it is about to gather (one), then which; the host
// waits for both answers.
void CheckOrder(const Context& context) {
  ProgramBuilder& builder = context.builder;
  const Unit& root = context.UnitOf(0);
  const CommunicatorId group =
      root.shard_communicator >= 0 ? root.shard_communicator : root.replicate_communicator;
  if (group < 0) return;
  const Bytes one{SizeBytes(DType::kInt32)};
  const Bytes all = one * context.partition.communicators[group].size;
  const auto buffer = [&](const char* name, Bytes size, MemoryKind memory) {
    return builder.AddBuffer({.name = fmt::format("order_check.{}", name),
                              .role = BufferRole::kOrderCheck,
                              .dtype = DType::kInt32,
                              .parts_bytes = {size},
                              .memory = memory,
                              .persistent = memory == MemoryKind::kHost});
  };
  const InstructionLabel label(builder, -1, "order_check");
  const BufferId own = buffer("own", one, MemoryKind::kDevice),
                 gathered = buffer("all", all, MemoryKind::kDevice);
  for (const char* what : {"count", "index"}) {
    builder.Allocate(gathered, kCompute);
    builder.Allocate(own, kCompute);
    builder.Move(InstructionKind::kCopyToDevice, buffer(what, one, MemoryKind::kHost), own, kCompute);
    builder.Move(InstructionKind::kAllGather, own, gathered, kCompute).communicator = group;
    builder.Move(InstructionKind::kCopyToHost, gathered, buffer("answers", all, MemoryKind::kHost), kCompute);
    context.SynchronizeStream(kCompute, fmt::format("order_check.{}", what));
    builder.Free(own, kCompute);
    builder.Free(gathered, kCompute);
  }
}

}  // namespace

void ExecOrderData::RecordPreForward(const Context& context, FlatParamHandle& handle, bool is_training) {
  if (!is_first_iter_) return;
  if (context.strategy.fsdp1.validate_execution_order && is_training) CheckOrder(context);
  if (handle.pre_forward_order_index) return;
  handle.pre_forward_order_index = static_cast<std::int32_t>(pre_forward_order_.size());
  pre_forward_order_.push_back(handle.id());
}

void ExecOrderData::RecordPostForward(FlatParamHandle& handle) {
  // PyTorch asks for the index's truth: a unit whose index is 0 and that runs again gets that of the later
  // use.
  if (handle.post_forward_index.value_or(0) == 0) {
    handle.post_forward_index = static_cast<std::int32_t>(post_forward_order_.size());
  }
  post_forward_order_.push_back(handle.id());
}

UnitId ExecOrderData::HandleToBackwardPrefetch(const FlatParamHandle& handle) const {
  const std::int32_t index = handle.post_forward_index.value_or(0);
  if (index == 0) return -1;
  SHARDPLAN_ASSERT(index < std::ssize(post_forward_order_),
                   "the final callback clears the order and the indices into it together");
  return post_forward_order_[index - 1];
}

UnitId ExecOrderData::HandleToForwardPrefetch(const FlatParamHandle& handle) const {
  if (!handle.pre_forward_order_index) return -1;
  const std::int32_t target = *handle.pre_forward_order_index + 1;
  return target < std::ssize(pre_forward_order_) ? pre_forward_order_[target] : -1;
}

void ExecOrderData::NextIter() {
  is_first_iter_ = false;
  post_forward_order_.clear();
}

}  // namespace shardplan::fsdp1
