#include "evaluation.h"

#include <ATen/Functions.h>

#include <exception>
#include <string>
#include <utility>

#include "shardplan/executor/layout.h"

namespace shardplan::python {
namespace {

// The unit's shards, cast and concatenated, gathered from all ranks: [ranks, elements of one rank].
at::Tensor Gather(const std::vector<at::Tensor>& shards, at::ScalarType dtype, std::int64_t ranks,
                  c10d::ProcessGroup* group) {
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& shard : shards) pieces.push_back(shard.to(dtype));
  at::Tensor own = at::cat(pieces);
  if (group == nullptr) return own.view({1, -1});
  at::Tensor all = at::empty({ranks * own.numel()}, own.options());
  group->_allgather_base(all, own)->wait();
  return all.view({ranks, -1});
}

}  // namespace

Evaluation::Evaluation(const Plan& plan, executor::TorchDevice& device,
                       std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
                       const std::vector<std::vector<at::Tensor>>& shards)
    : plan_(plan),
      device_(device),
      groups_(std::move(groups)),
      shards_(shards),
      unsharded_buffer_(plan.units.size(), -1),
      gathered_(plan.units.size(), false) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i].role == BufferRole::kParamUnsharded && unsharded_buffer_[plan.buffers[i].unit] < 0) {
      unsharded_buffer_[plan.buffers[i].unit] = static_cast<BufferId>(i);
    }
  }
}

Status Evaluation::Unshard(UnitId id) {
  if (unsharded_buffer_[id] < 0) return {};  // a unit without parameters, or one that is not sharded
  // A plan may keep it from step to step (fsdp1: a frozen unit that is not resharded after the forward).
  if (device_.Part(unsharded_buffer_[id], 0).storage().nbytes() > 0) return {};
  const Unit& unit = plan_.units[id];
  const std::int64_t ranks = executor::ShardCount(plan_, unit);
  const auto group = ranks > 1 ? groups_[unit.shard_communicator] : nullptr;
  try {
    const at::Tensor all = Gather(shards_[id], executor::ToScalarType(unit.param_dtype), ranks, group.get());
    if (Status allocated = device_.Allocate(unsharded_buffer_[id], 0); !allocated) return allocated;
    gathered_[id] = true;
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < shards_[id].size(); ++i) {
      const std::int64_t numel = shards_[id][i].numel();
      at::Tensor part = device_.Part(unsharded_buffer_[id], static_cast<std::int32_t>(i));
      part.view({ranks, numel}).copy_(all.narrow(1, offset, numel));
      offset += numel;
    }
  } catch (const std::exception& error) {
    return MakeError(ErrorCode::kEnvironment,
                     "gathering " + unit.fqn + " for a forward under no_grad failed: " + error.what());
  }
  return {};
}

Status Evaluation::Reshard(UnitId id) {
  if (!gathered_[id]) return {};
  gathered_[id] = false;
  return device_.Free(unsharded_buffer_[id], {});
}

}  // namespace shardplan::python
