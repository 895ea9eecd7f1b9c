#include "on_demand.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::python {
namespace {

// The whole gradient as [ranks, padded piece]: cut along the parameter's dimension, zeros behind the end.
at::Tensor InPieces(const at::Tensor& grad, std::int64_t dim, std::int64_t ranks) {
  const std::int64_t rows = grad.size(dim);
  const std::int64_t rows_each = (rows + ranks - 1) / ranks;
  std::vector<std::int64_t> padding = grad.sizes().vec();
  padding[dim] = rows_each * ranks - rows;
  const at::Tensor padded =
      padding[dim] == 0 ? grad : at::cat({grad, at::zeros(padding, grad.options())}, dim);
  std::vector<at::Tensor> pieces;
  for (std::int64_t j = 0; j < ranks; ++j)
    pieces.push_back(padded.narrow(dim, j * rows_each, rows_each).reshape({-1}));
  return at::stack(pieces);
}

}  // namespace

void OnDemandReduction::SumOver(CommunicatorId communicator, at::Tensor& tensor, bool maximum) const {
  if (communicator < 0 || plan_.communicators[communicator].size == 1) return;
  c10d::AllreduceOptions options;
  options.reduceOp = maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors = {tensor};
  groups_[communicator]->allreduce(tensors, options)->wait();
}

std::vector<bool> OnDemandReduction::AnyRankOf(const Unit& unit, const std::vector<bool>& mine) const {
  at::Tensor flags = at::zeros({static_cast<std::int64_t>(mine.size())}, at::kInt);
  for (std::size_t i = 0; i < mine.size(); ++i) flags[static_cast<std::int64_t>(i)] = mine[i] ? 1 : 0;
  const auto groups = {unit.shard_communicator, unit.replicate_communicator};
  for (const CommunicatorId group : groups) {
    if (group < 0 || plan_.communicators[group].size == 1) continue;
    flags = flags.to(groups_[group]->getBoundDeviceId().value_or(at::kCPU));
    SumOver(group, flags, /*maximum=*/true);
  }
  flags = flags.cpu();
  std::vector<bool> any(mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) any[i] = flags[static_cast<std::int64_t>(i)].item<int>() != 0;
  return any;
}

std::vector<bool> OnDemandReduction::AnyRank(const std::vector<bool>& mine) const {
  const auto sharded = std::ranges::find_if(plan_.units, [](const Unit& u) { return !u.parameters.empty(); });
  return sharded == plan_.units.end() ? mine : AnyRankOf(*sharded, mine);
}

at::Tensor OnDemandReduction::ReducePieces(const Unit& unit, const at::Tensor& pieces) const {
  at::Tensor output = pieces.view({-1});
  if (pieces.size(0) > 1) {
    output = at::empty({pieces.size(1)}, pieces.options());
    at::Tensor flat = pieces.view({-1});
    groups_[unit.shard_communicator]->_reduce_scatter_base(output, flat)->wait();
  }
  SumOver(unit.replicate_communicator, output, /*maximum=*/false);
  const std::int64_t replicas =
      unit.replicate_communicator < 0 ? 1 : plan_.communicators[unit.replicate_communicator].size;
  output.div_(
      plan_.strategy.fsdp2.gradient_divide_factor.value_or(static_cast<double>(pieces.size(0) * replicas)));
  return output;
}

at::Tensor OnDemandReduction::ReduceFlat(UnitId id, const std::vector<at::Tensor>& grads,
                                         c10::Device device) const {
  const Unit& unit = plan_.units[id];
  const bool mine = std::ranges::any_of(grads, [](const at::Tensor& grad) { return grad.defined(); });
  if (grads.empty() || !AnyRankOf(unit, {mine})[0]) return {};
  const auto options = at::TensorOptions(executor::ToScalarType(unit.reduce_dtype)).device(device);
  const at::Tensor whole = at::zeros({unit.flat_numel}, options);
  for (std::size_t p = 0; p < grads.size(); ++p) {
    if (!grads[p].defined()) continue;
    whole.narrow(0, unit.parameters[p].flat_offset, grads[p].numel()).copy_(grads[p].reshape({-1}));
  }
  const at::Tensor reduced = ReducePieces(unit, whole.view({ShardCount(plan_, unit), -1}));
  return reduced.to(executor::ToScalarType(unit.orig_dtype));
}

std::vector<at::Tensor> OnDemandReduction::Reduce(UnitId id, const std::vector<at::Tensor>& grads) const {
  const Unit& unit = plan_.units[id];
  const std::int64_t ranks = ShardCount(plan_, unit);
  const at::ScalarType reduce_dtype = executor::ToScalarType(unit.reduce_dtype);
  std::vector<bool> mine;
  for (const at::Tensor& grad : grads) mine.push_back(grad.defined());
  const std::vector<bool> any = AnyRankOf(unit, mine);
  const auto own = std::ranges::find_if(grads, [](const at::Tensor& grad) { return grad.defined(); });
  const at::Device device = own == grads.end() ? at::Device(at::kCPU) : own->device();

  std::vector<at::Tensor> pieces;
  for (std::size_t p = 0; p < grads.size(); ++p) {
    if (!any[p]) continue;
    const UnitParameter& parameter = unit.parameters[p];
    const at::Tensor grad = grads[p].defined()
                                ? grads[p].to(reduce_dtype)
                                : at::zeros(parameter.shape, at::TensorOptions(reduce_dtype).device(device));
    pieces.push_back(InPieces(grad, parameter.shard_dim, ranks));
  }
  std::vector<at::Tensor> reduced(grads.size());
  if (pieces.empty()) return reduced;
  const at::Tensor output = ReducePieces(unit, at::cat(pieces, 1).contiguous());
  const std::int64_t index =
      ranks == 1 ? 0 : executor::RankInGroup(plan_.communicators[unit.shard_communicator], rank_);
  std::int64_t offset = 0;
  for (std::size_t p = 0; p < grads.size(); ++p) {
    if (!any[p]) continue;
    const UnitParameter& parameter = unit.parameters[p];
    const std::vector<std::int64_t> shape = ShardShape(parameter, ranks, index);
    std::int64_t numel = 1;
    for (const std::int64_t size : shape) numel *= size;
    // Only pieces of dim 0 are padded: their own rows come first.
    reduced[p] =
        output.narrow(0, offset, numel).view(shape).to(executor::ToScalarType(unit.orig_dtype), false, true);
    offset += PaddedPieceNumel(parameter, ranks);
  }
  return reduced;
}

}  // namespace shardplan::python
