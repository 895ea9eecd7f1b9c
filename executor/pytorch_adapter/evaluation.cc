#include "evaluation.h"

#include <ATen/Functions.h>

#include <exception>
#include <string>
#include <utility>

#include "shardplan/schemas/layout.h"

namespace shardplan::python {
namespace {

// One rank's elements, gathered from all ranks: [ranks, elements of one rank].
at::Tensor Gather(at::Tensor own, std::int64_t ranks, c10d::ProcessGroup* group) {
  if (group == nullptr) return own.view({1, -1});
  at::Tensor all = at::empty({ranks * own.numel()}, own.options());
  group->_allgather_base(all, own)->wait();
  return all.view({ranks, -1});
}

// pieces: [ranks, elements of one], each a contiguous piece along the parameter's dimension. whole: 1-D.
void PutTogether(const at::Tensor& pieces, const UnitParameter* parameter, const at::Tensor& whole) {
  const std::int64_t ranks = pieces.size(0);
  std::int64_t outer = 1;  // elements of the dimensions before the one that is cut
  for (std::int32_t d = 0; parameter != nullptr && d < parameter->shard_dim; ++d)
    outer *= parameter->shape[d];
  if (outer <= 1) {
    whole.view({ranks, pieces.size(1)}).copy_(pieces);
  } else {
    whole.view({outer, ranks, -1}).copy_(pieces.reshape({ranks, outer, -1}).transpose(0, 1));
  }
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
      gathered_(plan.units.size()),
      full_(plan.units.size()) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i].role == BufferRole::kParamUnsharded && unsharded_buffer_[plan.buffers[i].unit] < 0) {
      unsharded_buffer_[plan.buffers[i].unit] = static_cast<BufferId>(i);
    }
  }
}

// Each tensor that an extension gives, as it is: bytes.
Status Evaluation::GatherExtended(UnitId id, const Extended& extended, c10d::ProcessGroup* group) {
  const std::int64_t ranks = ShardCount(plan_, plan_.units[id]);
  const auto bytes = [](const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); };
  std::int32_t other = 0;
  for (const auto& [parameter, inputs] : extended.inputs) {
    for (std::size_t t = 0; t < inputs.size(); ++t) {
      const at::Tensor whole =
          t == 0 ? device_.Part(unsharded_buffer_[id], parameter) : device_.Part(extended.others, other++);
      const at::Tensor pieces = Gather(bytes(inputs[t].to(whole.device())).contiguous(), ranks, group);
      bytes(whole).view(pieces.sizes()).copy_(pieces);
    }
  }
  return {};
}

Status Evaluation::Unshard(UnitId id, bool full_precision, const Extended& extended) {
  if (unsharded_buffer_[id] < 0) return {};  // a unit without parameters, or one that is not sharded
  // A plan may keep it from step to step (fsdp1: a frozen unit that is not resharded after the forward).
  if (device_.Part(unsharded_buffer_[id], 0).storage().nbytes() > 0) return {};
  const Unit& unit = plan_.units[id];
  const std::int64_t ranks = ShardCount(plan_, unit);
  const auto group = ranks > 1 ? groups_[unit.shard_communicator] : nullptr;
  const bool flat = unit.layout == LayoutKind::kFlat;
  try {
    if (full_precision && flat && unit.param_dtype != unit.orig_dtype) {
      const at::Device device = device_.Part(unsharded_buffer_[id], 0).device();
      full_[id] = Gather(shards_[id][0].to(device), ranks, group.get()).view({-1});
      return {};
    }
    for (const BufferId buffer : {unsharded_buffer_[id], extended.others, extended.allocated}) {
      if (buffer < 0) continue;
      if (Status allocated = device_.Allocate(buffer, 0); !allocated) return allocated;
      gathered_[id].push_back(buffer);
    }
    if (Status status = GatherExtended(id, extended, group.get()); !status) return status;
    std::vector<at::Tensor> parts, own;
    std::vector<const UnitParameter*> parameters;  // null: of a flat unit
    for (std::size_t i = 0; i < shards_[id].size(); ++i) {
      if (extended.inputs.contains(static_cast<std::int32_t>(i))) continue;
      parameters.push_back(flat ? nullptr : &unit.parameters[i]);
      parts.push_back(device_.Part(unsharded_buffer_[id], static_cast<std::int32_t>(i)));
      own.push_back(shards_[id][i].to(parts.back().device(), parts.back().scalar_type()));
    }
    // All at once, as far as they have one dtype.
    std::vector<at::Tensor> same;
    for (std::size_t i = 0, first = 0; i < own.size(); ++i) {
      same.push_back(own[i]);
      if (i + 1 < own.size() && own[i + 1].scalar_type() == own[i].scalar_type()) continue;
      const at::Tensor all = Gather(at::cat(same), ranks, group.get());
      for (std::int64_t offset = 0; first <= i; offset += own[first++].numel()) {
        PutTogether(all.narrow(1, offset, own[first].numel()), parameters[first], parts[first]);
      }
      same.clear();
    }
  } catch (const std::exception& error) {
    return MakeError(ErrorCode::kEnvironment,
                     "gathering " + unit.fqn + " for a forward under no_grad failed: " + error.what());
  }
  return {};
}

Result<at::Tensor> Evaluation::FlatView(UnitId id, std::int32_t parameter) const {
  if (!full_[id].defined()) return device_.ParameterView(unsharded_buffer_[id], parameter);
  const UnitParameter& of = plan_.units[id].parameters[parameter];
  const at::IntArrayRef shape = of.shape;
  return full_[id].narrow(0, of.flat_offset, c10::multiply_integers(shape)).view(shape);
}

Status Evaluation::Reshard(UnitId id) {
  full_[id] = at::Tensor();
  Status status;
  for (const BufferId buffer : gathered_[id]) {
    if (Status freed = device_.Free(buffer, {}); !freed) status = freed;
  }
  gathered_[id].clear();
  return status;
}

}  // namespace shardplan::python
