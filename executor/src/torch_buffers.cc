#include "torch_buffers.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "geometry.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/executor/layout.h"

namespace shardplan::executor {
namespace {

bool IsUnpaddedGradient(BufferRole role) {
  return role == BufferRole::kGradUnsharded || role == BufferRole::kGradUnshardedAccumulated;
}

std::vector<std::int64_t> ContiguousStrides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<std::int64_t>(shape[i], 1);
  return strides;
}

std::unexpected<Error> Misfit(std::string message, std::string found, std::string expected) {
  return std::unexpected(
      Error{ErrorCode::kUsage, std::move(message), {}, {}, std::move(found), std::move(expected)});
}

}  // namespace

at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kFloat8E4M3FN:
      return at::kFloat8_e4m3fn;
    case DType::kFloat8E5M2:
      return at::kFloat8_e5m2;
    case DType::kInt64:
      return at::kLong;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt8:
      return at::kChar;
    case DType::kUInt8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
    case DType::kComplex64:
      return at::kComplexFloat;
    case DType::kComplex128:
      return at::kComplexDouble;
  }
  return at::kByte;
}

Status TorchBuffers::Prepare(const Plan& plan) {
  plan_ = &plan;
  slots_.resize(plan.buffers.size());
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    slots_[b].keeps_storage =
        plan.buffers[b].role == BufferRole::kParamUnsharded && !plan.buffers[b].persistent;
  }
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kBindUnsharded && i.src >= 0 && !plan.buffers[i.src].persistent) {
          slots_[i.src].keeps_storage = true;
        }
      }
    }
  }
  if (Status status = PrepareStreams(plan); !status) return status;
  for (auto& [buffer, parts] : std::exchange(early_, {})) {
    if (Status status = SetParts(buffer, std::move(parts)); !status) return status;
  }
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    Slot& slot = slots_[b];
    const Buffer& buffer = plan.buffers[b];
    if (buffer.persistent) {
      if (Status status = MakePersistent(static_cast<BufferId>(b)); !status) return status;
    } else if (slot.keeps_storage) {
      for (std::size_t i = 0; i < buffer.parts_bytes.size(); ++i) {
        const auto numel = PartNumel(buffer, static_cast<std::int32_t>(i));
        slot.parts.push_back(MakeTensor(numel, buffer.dtype, buffer.memory, -1));
        FillStorage(slot.parts.back(), 0, -1);
      }
    }
  }
  return {};
}

Status TorchBuffers::MakePersistent(BufferId id) {
  Slot& slot = slots_[id];
  if (slot.alive) return {};  // supplied
  const Buffer& buffer = plan_->buffers[id];
  for (std::size_t i = 0; i < buffer.parts_bytes.size(); ++i) {
    slot.parts.push_back(
        MakeTensor(PartNumel(buffer, static_cast<std::int32_t>(i)), buffer.dtype, buffer.memory, -1));
    slot.parts.back().zero_();
  }
  slot.alive = true;
  return {};
}

Result<CopyId> TorchBuffers::PrepareCopy(CopySpec spec) {
  for (const auto& [buffer, dtype] :
       {std::pair(spec.src, spec.src_dtype), std::pair(spec.dst, spec.dst_dtype)}) {
    const Buffer& description = plan().buffers[buffer];
    if (dtype == description.dtype) continue;
    return MakeInputError(
        fmt::format("/buffers/{}/dtype", buffer),
        fmt::format("{} holds parameters of several dtypes, which only the virtual backend replays",
                    description.name));
  }
  copies_.push_back(std::move(spec));
  return static_cast<CopyId>(copies_.size()) - 1;
}

Status TorchBuffers::Allocate(BufferId id, StreamId stream) {
  Slot& slot = slots_[id];
  const Buffer& buffer = plan_->buffers[id];
  if (slot.keeps_storage) {
    if (Status status = BeforeFill(id); !status) return status;
    for (std::size_t i = 0; i < slot.parts.size(); ++i) {
      FillStorage(slot.parts[i], buffer.parts_bytes[i].value, stream);
    }
  } else {
    slot.parts.clear();
    for (std::size_t i = 0; i < buffer.parts_bytes.size(); ++i) {
      slot.parts.push_back(
          MakeTensor(PartNumel(buffer, static_cast<std::int32_t>(i)), buffer.dtype, buffer.memory, stream));
    }
  }
  slot.alive = true;
  return {};
}

Status TorchBuffers::Free(BufferId id, std::span<const StreamId> safe_after) {
  Slot& slot = slots_[id];
  if (slot.alive) {
    if (Status status = BeforeFree(id, safe_after); !status) return status;
  }
  slot.alive = false;
  if (slot.keeps_storage) {
    for (const at::Tensor& part : slot.parts) FillStorage(part, 0, -1);
  } else {
    slot.parts.clear();
  }
  return {};
}

Status TorchBuffers::MakeAlias(CopyId id) {
  const CopySpec& spec = copies_[id];
  const Slot& owner = slots_[spec.src];
  Slot& alias = slots_[spec.dst];
  const Buffer& buffer = plan_->buffers[spec.dst];
  alias.parts.assign(buffer.parts_bytes.size(), owner.parts[0].narrow(0, 0, 0));
  for (const CopyRun& run : spec.runs) {
    alias.parts[run.dst_part] = owner.parts[run.src_part].narrow(0, run.src_offset, run.rows * run.row_numel);
  }
  alias.alive = true;
  return {};
}

// A persistent part is used in place and has padding; a gradient is read once and has none.
Status TorchBuffers::CheckPart(BufferId id, std::size_t part, const at::Tensor& tensor) const {
  const Buffer& buffer = plan_->buffers[id];
  if (tensor.scalar_type() != ToScalarType(buffer.dtype)) {
    return Misfit(fmt::format("part {} of {} has another dtype", part, buffer.name),
                  c10::toString(tensor.scalar_type()), std::string(Name(buffer.dtype)));
  }
  const std::int64_t expected = PartNumel(buffer, static_cast<std::int32_t>(part));
  const bool fits = IsUnpaddedGradient(buffer.role) ? tensor.numel() == expected : tensor.numel() >= expected;
  if (!fits) {
    return Misfit(fmt::format("part {} of {} has another size", part, buffer.name),
                  fmt::format("{} elements", tensor.numel()), fmt::format("{} elements", expected));
  }
  if (!IsUnpaddedGradient(buffer.role) && !tensor.is_contiguous()) {
    return Misfit(fmt::format("part {} of {} is used in place", part, buffer.name), "a tensor with strides",
                  "a contiguous tensor");
  }
  return {};
}

Status TorchBuffers::SetParts(BufferId id, std::vector<at::Tensor> parts) {
  if (plan_ == nullptr) {
    early_.emplace_back(id, std::move(parts));
    return {};
  }
  if (id < 0 || id >= std::ssize(plan_->buffers))
    return Misfit("there is no such buffer", std::to_string(id), {});
  const Buffer& buffer = plan_->buffers[id];
  if (parts.size() != buffer.parts_bytes.size()) {
    return Misfit(fmt::format("{} has another number of parts", buffer.name), std::to_string(parts.size()),
                  std::to_string(buffer.parts_bytes.size()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::int64_t numel = PartNumel(buffer, static_cast<std::int32_t>(i));
    if (!parts[i].defined()) {
      parts[i] = at::zeros({numel}, at::TensorOptions(ToScalarType(buffer.dtype)).device(torch_device()));
    }
    if (Status status = CheckPart(id, i, parts[i]); !status) return status;
    parts[i] = parts[i].detach().contiguous().view({-1});
  }
  slots_[id].parts = std::move(parts);
  slots_[id].alive = true;
  return {};
}

at::Tensor TorchBuffers::Part(BufferId buffer, std::int32_t part) const {
  const Slot& slot = slots_[buffer];
  return static_cast<std::size_t>(part) < slot.parts.size() ? slot.parts[part] : at::Tensor();
}

// The tensor that holds the parameter in a buffer, and the parameter's first element there. `pieces`: cut
// into so many; 0: whole.
Result<std::pair<at::Tensor, std::int64_t>> TorchBuffers::Place(BufferId id, std::int32_t parameter,
                                                                std::int64_t pieces) const {
  const Buffer& buffer = plan_->buffers[id];
  const Slot& slot = slots_[id];
  if (slot.parts.empty() || (!slot.alive && !slot.keeps_storage)) {
    return MakeError(ErrorCode::kUsage, fmt::format("{} is not alive", buffer.name));
  }
  const Unit& unit = plan_->units[buffer.unit];
  const std::vector<std::int32_t> parameters = ParametersOf(*plan_, buffer);
  const auto found = std::ranges::find(parameters, parameter);
  if (found == parameters.end()) {
    return MakeError(ErrorCode::kUsage, fmt::format("{} does not hold parameter {}", buffer.name, parameter));
  }
  const auto index = static_cast<std::size_t>(found - parameters.begin());
  if (slot.parts.size() > 1) return std::pair(slot.parts[index], std::int64_t{0});
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < index && pieces > 0; ++i) {
    offset += PaddedPieceNumel(unit.parameters[parameters[i]], pieces);
  }
  return std::pair(slot.parts[0], offset);
}

Result<at::Tensor> TorchBuffers::ParameterView(BufferId id, std::int32_t parameter) const {
  const Unit& unit = plan_->units[plan_->buffers[id].unit];
  auto place = Place(id, parameter, 0);
  if (!place) return std::unexpected(std::move(place.error()));
  const UnitParameter& p = unit.parameters[parameter];
  const std::int64_t offset = unit.layout == LayoutKind::kFlat ? p.flat_offset : 0;
  // as_strided does not look at the storage's size, which is 0 while the parameter is sharded.
  at::Tensor view = place->first.detach();
  view.unsafeGetTensorImpl()->set_storage_offset(place->first.storage_offset() + offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(p.shape, ContiguousStrides(p.shape));
  return view;
}

Result<at::Tensor> TorchBuffers::ShardedView(BufferId id, std::int32_t parameter, std::int64_t rank) const {
  const Unit& unit = plan_->units[plan_->buffers[id].unit];
  const std::int64_t pieces = ShardCount(*plan_, unit);
  if (unit.layout == LayoutKind::kFlat) {
    auto place = Place(id, parameter, 0);
    if (!place) return std::unexpected(std::move(place.error()));
    return place->first;
  }
  auto place = Place(id, parameter, pieces);
  if (!place) return std::unexpected(std::move(place.error()));
  const std::int64_t index =
      unit.shard_communicator < 0 ? 0 : RankInGroup(plan_->communicators[unit.shard_communicator], rank);
  const std::vector<std::int64_t> shape = ShardShape(unit.parameters[parameter], pieces, index);
  return place->first.as_strided(shape, ContiguousStrides(shape),
                                 place->first.storage_offset() + place->second);
}

}  // namespace shardplan::executor
