// SPDX-License-Identifier: Apache-2.0
#include "torch/buffers.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "replay/copy_resolver.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::executor {
namespace {

bool MayBeAsMade(const Buffer& buffer) { return DescriptionOf(buffer.role).dtype == RoleDType::kMade; }

// combine(from, to) for every run, as matrices of its rows.
template <typename Combine>
void ForEachRow(const CopySpec& spec, const std::vector<at::Tensor>& src, const std::vector<at::Tensor>& dst,
                Combine&& combine) {
  for (const CopyRun& run : spec.runs) {
    const at::Tensor& from = src[run.src_part];
    const at::Tensor& to = dst[run.dst_part];
    combine(
        from.as_strided({run.rows, run.row_numel}, {run.src_stride, 1},
                        from.storage_offset() + run.src_offset),
        to.as_strided({run.rows, run.row_numel}, {run.dst_stride, 1}, to.storage_offset() + run.dst_offset));
  }
}

std::vector<std::int64_t> ContiguousStrides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<std::int64_t>(shape[i], 1);
  return strides;
}

// Contiguous elements of a tensor from `offset` on, in that shape. Neither a view in autograd's eyes, which
// would hold the buffer of this step whatever memory it is given later, nor an operator of torch: those are
// several times as long, and this is done for every parameter several times a step.
at::Tensor Alias(const at::Tensor& of, std::int64_t offset, c10::IntArrayRef shape) {
  auto alias = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(of.storage()),
                                                    of.key_set(), of.dtype());
  alias->set_storage_offset(of.storage_offset() + offset);
  alias->set_sizes_contiguous(shape);
  return at::Tensor(std::move(alias));
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
    case DType::kComplex32:
      return at::kComplexHalf;
    case DType::kUInt16:
      return at::kUInt16;
    case DType::kUInt32:
      return at::kUInt32;
    case DType::kUInt64:
      return at::kUInt64;
    case DType::kFloat8E4M3FNUZ:
      return at::kFloat8_e4m3fnuz;
    case DType::kFloat8E5M2FNUZ:
      return at::kFloat8_e5m2fnuz;
    case DType::kFloat8E8M0FNU:
      return at::kFloat8_e8m0fnu;
  }
  return at::kByte;
}

DType TorchBuffers::DTypeOf(BufferId id, std::size_t part) const {
  return DTypeOfPart(*plan_, plan_->buffers[id], static_cast<std::int32_t>(part));
}

std::int64_t TorchBuffers::NumelOf(BufferId id, std::size_t part) const {
  return plan_->buffers[id].parts_bytes[part].value / SizeBytes(DTypeOf(id, part));
}

std::byte* TorchBuffers::ArenaPart(BufferId id, std::size_t part) const {
  return static_cast<std::byte*>(arena_.mutable_data_ptr()) + layout_.offsets[id] +
         ArenaPartOffset(plan_->buffers[id], static_cast<std::int32_t>(part));
}

// True: the buffer's place in the arena is its own until it is freed. A buffer that a plan allocates finds it
// free; an evaluation beside the plan may have taken it, or find it taken.
Result<bool> TorchBuffers::EnterArena(BufferId id, StreamId stream) {
  if (memory_ != MemorySource::kArena || layout_.offsets[id] < 0) return false;
  for (const BufferId sharer : layout_.sharers[id]) {
    if (slots_[sharer].in_arena) return false;
  }
  for (const BufferId sharer : layout_.sharers[id]) {
    if (Status status = BeforeReuse(sharer, stream); !status) return std::unexpected(status.error());
  }
  if (Status status = BeforeReuse(id, stream); !status) return std::unexpected(status.error());
  return true;
}

at::Tensor TorchBuffers::MakePart(BufferId id, std::size_t part, StreamId stream) {
  if (slots_[id].in_arena) {
    return at::from_blob(ArenaPart(id, part), {NumelOf(id, part)},
                         at::TensorOptions(ToScalarType(DTypeOf(id, part))).device(torch_device()));
  }
  return MakeTensor(NumelOf(id, part), DTypeOf(id, part), plan_->buffers[id].memory, stream);
}

std::vector<at::Tensor> TorchBuffers::MakeParts(BufferId id, StreamId stream) {
  const Buffer& buffer = plan_->buffers[id];
  std::vector<at::Tensor> parts;
  if (!IsOneAllocation(buffer) || slots_[id].in_arena) {
    for (std::size_t p = 0; p < buffer.parts_bytes.size(); ++p) parts.push_back(MakePart(id, p, stream));
    return parts;
  }
  const at::Tensor whole =
      MakeTensor(SizeBytes(buffer).value / SizeBytes(buffer.dtype), buffer.dtype, buffer.memory, stream);
  std::int64_t offset = 0;
  for (const Bytes bytes : buffer.parts_bytes) {
    const std::int64_t numel = bytes.value / SizeBytes(buffer.dtype);
    parts.push_back(Alias(whole, offset, {numel}));
    offset += numel;
  }
  return parts;
}

Status TorchBuffers::Prepare(const Plan& plan) {
  plan_ = &plan;
  slots_.resize(plan.buffers.size());
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const bool unsharded = LifetimeOf(plan.buffers[b].role) == RoleLifetime::kUnsharded;
    slots_[b].keeps_storage = unsharded && !plan.buffers[b].persistent;
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
  if (memory_ == MemorySource::kArena) {
    layout_ = LayOutArena(plan);
    arena_ = MakeArena(layout_.size_bytes);
  }
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
        slot.parts.push_back(MakePart(static_cast<BufferId>(b), i, -1));
        FillStorage(slot.parts.back(), 0, buffer.memory, -1);
      }
    }
  }
  return {};
}

Status TorchBuffers::MakePersistent(BufferId id) {
  Slot& slot = slots_[id];
  if (slot.alive) return {};  // supplied
  slot.parts = MakeParts(id, -1);
  for (at::Tensor& part : slot.parts) part.zero_();
  slot.alive = true;
  return {};
}

Result<CopyId> TorchBuffers::PrepareCopy(CopySpec spec) {
  copies_.push_back(std::move(spec));
  return static_cast<CopyId>(copies_.size()) - 1;
}

Status TorchBuffers::Allocate(BufferId id, StreamId stream) {
  Slot& slot = slots_[id];
  const Buffer& buffer = plan_->buffers[id];
  const Result<bool> in_arena = EnterArena(id, stream);
  if (!in_arena) return std::unexpected(in_arena.error());
  slot.in_arena = *in_arena;
  if (slot.keeps_storage) {
    for (std::size_t i = 0; i < slot.parts.size(); ++i) {
      const std::int64_t bytes = buffer.parts_bytes[i].value;
      if (slot.in_arena && bytes > 0) {
        c10::StorageImpl* storage = slot.parts[i].storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(c10::DataPtr(ArenaPart(id, i), torch_device()));
        storage->set_nbytes(static_cast<std::size_t>(bytes));
      } else {
        FillStorage(slot.parts[i], bytes, buffer.memory, stream);
      }
    }
  } else {
    slot.parts = MakeParts(id, stream);
  }
  slot.alive = true;
  return {};
}

Status TorchBuffers::Free(BufferId id, std::span<const StreamId> safe_after) {
  Slot& slot = slots_[id];
  if (slot.alive) {
    if (Status status = BeforeFree(id, safe_after); !status) return status;
  }
  slot.alive = slot.in_arena = false;
  if (slot.keeps_storage) {
    for (const at::Tensor& part : slot.parts) FillStorage(part, 0, plan_->buffers[id].memory, -1);
  } else {
    slot.parts.clear();
  }
  return {};
}

Status TorchBuffers::FreeParts(BufferId id, std::span<const std::int32_t> parts,
                               std::span<const StreamId> safe_after) {
  Slot& slot = slots_[id];
  if (!slot.alive || slot.in_arena) return {};  // the place in an arena is the buffer's until its end
  if (Status status = BeforeFree(id, safe_after); !status) return status;
  for (const std::int32_t part : parts) {
    slot.keeps_storage ? FillStorage(slot.parts[part], 0, plan_->buffers[id].memory, -1)
                       : slot.parts[part].reset();
  }
  return {};
}

Status TorchBuffers::MakeAlias(CopyId id) {
  const CopySpec& spec = copies_[id];
  const Slot& owner = slots_[spec.src];
  Slot& alias = slots_[spec.dst];
  const Buffer& buffer = plan_->buffers[spec.dst];
  alias.parts.assign(buffer.parts_bytes.size(), Alias(owner.parts[0], 0, {0}));
  for (const CopyRun& run : spec.runs) {
    alias.parts[run.dst_part] = Alias(owner.parts[run.src_part], run.src_offset, {run.rows * run.row_numel});
  }
  alias.alive = true;
  return {};
}

// A persistent part is used in place and has padding; a gradient is read once and has none.
Status TorchBuffers::CheckPart(BufferId id, std::size_t part, const at::Tensor& tensor) const {
  const Buffer& buffer = plan_->buffers[id];
  // The shard of a parameter with an extension is the model's own: it is never copied from here.
  if (buffer.role == BufferRole::kParamSharded &&
      plan_->units[buffer.unit].layout == LayoutKind::kPerParameter &&
      !plan_->units[buffer.unit].parameters[ParametersOf(*plan_, buffer)[part]].gathered.empty()) {
    return {};
  }
  const bool as_planned = tensor.scalar_type() == ToScalarType(DTypeOf(id, part));
  if (!as_planned && !(MayBeAsMade(buffer) && tensor.is_floating_point())) {
    return Misfit(fmt::format("part {} of {} has another dtype", part, buffer.name),
                  c10::toString(tensor.scalar_type()), std::string(Name(DTypeOf(id, part))));
  }
  const std::int64_t expected = NumelOf(id, part);
  const bool fits = IsWholeGradient(buffer.role) ? tensor.numel() == expected : tensor.numel() >= expected;
  if (!fits) {
    return Misfit(fmt::format("part {} of {} has another size", part, buffer.name),
                  fmt::format("{} elements", tensor.numel()), fmt::format("{} elements", expected));
  }
  if (!IsWholeGradient(buffer.role) && !tensor.is_contiguous()) {
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
  bool is_as_made = false;
  if (parts.size() != buffer.parts_bytes.size()) {
    return Misfit(fmt::format("{} has another number of parts", buffer.name), std::to_string(parts.size()),
                  std::to_string(buffer.parts_bytes.size()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) {
      const at::TensorOptions options =
          at::TensorOptions(ToScalarType(DTypeOf(id, i))).device(torch_device());
      parts[i] = at::zeros({NumelOf(id, i)}, options);
    }
    if (Status status = CheckPart(id, i, parts[i]); !status) return status;
    is_as_made =
        is_as_made || (MayBeAsMade(buffer) && parts[i].scalar_type() != ToScalarType(DTypeOf(id, i)));
    const bool is_plain = parts[i].is_contiguous() && !parts[i].key_set().has(c10::DispatchKey::Python);
    const at::Tensor whole = is_plain ? parts[i] : parts[i].detach().contiguous();
    parts[i] = is_plain ? Alias(whole, 0, {whole.numel()}) : whole.view({-1});
  }
  slots_[id].parts = std::move(parts);
  slots_[id].alive = true;
  slots_[id].is_as_made = is_as_made;
  return {};
}

void TorchBuffers::CopyAsMade(const CopySpec& spec) const {
  ForEachRow(spec, slots_[spec.src].parts, slots_[spec.dst].parts,
             [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from, /*non_blocking=*/true); });
  for (const ZeroRun& zero : spec.zeros) {
    slots_[spec.dst].parts[zero.part].narrow(0, zero.offset, zero.numel).zero_();
  }
}

void TorchBuffers::AccumulateAsMade(const CopySpec& spec) const {
  ForEachRow(spec, slots_[spec.src].parts, slots_[spec.dst].parts,
             [](const at::Tensor& from, const at::Tensor& to) { to.add_(from); });
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
  return Alias(place->first, place->second, shape);
}

}  // namespace shardplan::executor
