// SPDX-License-Identifier: Apache-2.0
#include "replay/copy_resolver.h"

#include <fmt/format.h>

#include <algorithm>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::executor {
namespace {

std::unexpected<Error> SizeError(BufferId buffer, std::int32_t part, std::string message, std::int64_t found,
                                 std::int64_t expected) {
  return MakeInputError(fmt::format("/buffers/{}/parts_bytes/{}", buffer, part), std::move(message),
                        fmt::format("{} bytes", found), fmt::format("{} bytes", expected));
}

}  // namespace

DType DTypeOfPart(const Plan& plan, const Buffer& buffer, std::int32_t part) {
  if (buffer.unit < 0 || !buffer.storages.empty() || plan.units[buffer.unit].layout == LayoutKind::kFlat)
    return buffer.dtype;
  const std::vector<std::int32_t> parameters = ParametersOf(plan, buffer);
  const bool own =
      buffer.parts_bytes.size() == parameters.size() && ArrangementOf(buffer.role) != Arrangement::kSlots;
  if (!own) return buffer.dtype;
  // Several tensors of an extension lie behind one another.
  const UnitParameter& parameter = plan.units[buffer.unit].parameters[parameters[part]];
  if (buffer.role == BufferRole::kAllGatherInput && parameter.gathered.size() > 1) return DType::kUInt8;
  return DTypeIn(plan.units[buffer.unit], parameter, buffer);
}

std::int64_t PartNumel(const Buffer& buffer, std::int32_t part) {
  return buffer.parts_bytes[part].value / SizeBytes(buffer.dtype);
}

// Into how many pieces a parameter is cut in this buffer. After a forward a shard may belong to the smaller
// mesh; the buffer's size tells (an all-gather input holds either).
std::int64_t CopyResolver::PiecesOf(const Buffer& buffer, std::int64_t slots) const {
  const Unit& unit = plan_.units[buffer.unit];
  const std::int64_t shards = ShardCount(plan_, unit);
  if (IsInnerReduced(buffer.role)) return shards;
  if (ArrangementOf(buffer.role) == Arrangement::kSlots) return slots;
  if (unit.post_forward_communicator < 0) return shards;
  if (buffer.role == BufferRole::kParamPostForwardShard) return slots;
  if (buffer.role != BufferRole::kAllGatherInput) return shards;
  std::int64_t bytes = 0;
  for (const std::int32_t p : ParametersOf(plan_, buffer)) bytes += PlaceOf(buffer, p, shards).bytes;
  return SizeBytes(buffer).value == bytes ? shards : plan_.communicators[unit.post_forward_communicator].size;
}

// Size and dtype of a parameter in this buffer, cut into `pieces` where the buffer holds pieces.
CopyResolver::Place CopyResolver::PlaceOf(const Buffer& buffer, std::int32_t p, std::int64_t pieces) const {
  const Unit& unit = plan_.units[buffer.unit];
  const UnitParameter& parameter = unit.parameters[p];
  const std::int64_t shards = ShardCount(plan_, unit);
  const Arrangement arrangement = ArrangementOf(buffer.role);
  Place place = {.parameter = p, .dtype = DTypeIn(unit, parameter, buffer)};
  const bool extended = HoldsGathered(unit, buffer) && !parameter.gathered.empty();
  const std::int64_t piece =
      extended ? parameter.gathered.front().numel : PaddedPieceNumel(parameter, shards);
  place.numel = IsWholeGradient(buffer.role)         ? Numel(parameter)
                : arrangement == Arrangement::kWhole ? piece * shards
                                                     : piece * shards / pieces;
  place.bytes = place.numel * SizeBytes(place.dtype);
  if (extended && arrangement != Arrangement::kWhole) {
    for (std::size_t t = 1; t < parameter.gathered.size(); ++t) {
      place.bytes += parameter.gathered[t].numel * SizeBytes(parameter.gathered[t].dtype);
    }
  }
  return place;
}

std::int64_t CopyResolver::SlotsForShard(const Buffer& shard) const {
  const Unit& unit = plan_.units[shard.unit];
  if (shard.role == BufferRole::kParamPostForwardShard) {
    return unit.post_forward_communicator < 0 ? 1 : plan_.communicators[unit.post_forward_communicator].size;
  }
  return shard.role == BufferRole::kAllGatherInput ? PiecesOf(shard, 1) : ShardCount(plan_, unit);
}

Result<std::vector<CopyResolver::Place>> CopyResolver::Places(BufferId id, std::int64_t slots) const {
  const Buffer& buffer = plan_.buffers[id];
  const Unit& unit = plan_.units[buffer.unit];
  const std::vector<std::int32_t> parameters = ParametersOf(plan_, buffer);
  const Arrangement arrangement = ArrangementOf(buffer.role);
  const bool joined = buffer.parts_bytes.size() == 1;
  if (!joined && (arrangement == Arrangement::kSlots || buffer.parts_bytes.size() != parameters.size())) {
    return MakeInputError(
        fmt::format("/buffers/{}/parts_bytes", id),
        fmt::format("{} has parts that are not its parameters'", buffer.name),
        fmt::format("{} parts", buffer.parts_bytes.size()),
        arrangement == Arrangement::kSlots ? "1 part" : fmt::format("{} parts", parameters.size()));
  }
  const std::int64_t pieces = PiecesOf(buffer, slots);
  std::vector<Place> places;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const UnitParameter& parameter = unit.parameters[parameters[i]];
    const std::int64_t padded =
        PaddedPieceNumel(parameter, ShardCount(plan_, unit)) * ShardCount(plan_, unit);
    if (arrangement != Arrangement::kWhole && padded % pieces != 0) {
      return MakeInputError(
          fmt::format("/units/{}/parameters/{}", buffer.unit, parameters[i]),
          fmt::format("{} cannot be cut into {} equal pieces after the forward", parameter.fqn, pieces));
    }
    Place place = PlaceOf(buffer, parameters[i], pieces);
    place.part = joined ? 0 : static_cast<std::int32_t>(i);
    place.offset_bytes = joined ? offset : 0;
    offset += place.bytes;
    if (!joined && buffer.parts_bytes[i].value < place.bytes) {
      return SizeError(id, place.part, fmt::format("{} is too small for {}", buffer.name, parameter.fqn),
                       buffer.parts_bytes[i].value, place.bytes);
    }
    places.push_back(place);
  }
  const std::int64_t expected = offset * (arrangement == Arrangement::kSlots ? slots : 1);
  if (joined && buffer.parts_bytes[0].value < expected) {
    return SizeError(id, 0, fmt::format("{} is too small for its parameters", buffer.name),
                     buffer.parts_bytes[0].value, expected);
  }
  return places;
}

// `slots` pieces of a gathered buffer -> the whole parameter.
void CopyResolver::Gather(const UnitParameter& parameter, const Place& src, const Place& dst,
                          std::int64_t slots, std::int64_t slot_bytes, bool by_rows, Moves& movement) const {
  const std::int64_t from = SizeBytes(src.dtype);
  const std::int64_t to = SizeBytes(dst.dtype);
  if (by_rows) {
    movement.stretches.push_back({src.part, dst.part, src.offset_bytes, dst.offset_bytes, slots, src.numel,
                                  slot_bytes, src.numel * to, src.dtype, dst.dtype});
    return;
  }
  std::int64_t outer = 1;
  for (std::int32_t d = 0; d < parameter.shard_dim; ++d) outer *= parameter.shape[d];
  const std::int64_t row = outer == 0 ? 0 : src.numel / outer;
  for (std::int64_t j = 0; j < slots; ++j) {
    movement.stretches.push_back({src.part, dst.part, src.offset_bytes + j * slot_bytes,
                                  dst.offset_bytes + j * row * to, outer, row, row * from, row * slots * to,
                                  src.dtype, dst.dtype});
  }
}

// The whole gradient -> `slots` pieces, padded with zeros. `first_level`: ranks of the first of two
// reductions.
void CopyResolver::Scatter(const UnitParameter& parameter, const Place& src, const Place& dst,
                           std::int64_t slots, std::int64_t first_level, std::int64_t slot_bytes,
                           Moves& movement) const {
  const std::int64_t from = SizeBytes(src.dtype);
  const std::int64_t size = SizeBytes(dst.dtype);
  const std::int32_t dim = parameter.shape.empty() ? 0 : parameter.shard_dim;
  const std::int64_t rows = parameter.shape.empty() ? 1 : parameter.shape[dim];
  std::int64_t outer = 1;
  for (std::int32_t d = 0; d < dim; ++d) outer *= parameter.shape[d];
  const std::int64_t inner = rows * outer == 0 ? 0 : Numel(parameter) / rows / outer;
  for (std::int64_t j = 0; j < slots; ++j) {
    const RowRange range = ChunkRows(rows, slots, j);
    const std::int64_t row = range.count * inner;
    const std::int64_t to = dst.offset_bytes + InnerSlot(j, first_level, slots) * slot_bytes;
    if (row > 0) {
      movement.stretches.push_back({src.part, dst.part, src.offset_bytes + range.first * inner * from, to,
                                    outer, row, rows * inner * from, row * size, src.dtype, dst.dtype});
    }
    if (row * outer < dst.numel) {
      movement.zeros.push_back({dst.part, to + row * outer * size, (dst.numel - row * outer) * size});
    }
  }
}

void CopyResolver::AddMovement(const Instruction& instruction, const Place& src, const Place& dst,
                               std::int64_t slots, std::int64_t slot, Moves& movement) const {
  const Buffer& from = plan_.buffers[instruction.src];
  const Buffer& to = plan_.buffers[instruction.dst];
  const Arrangement a = ArrangementOf(from.role);
  const Arrangement b = ArrangementOf(to.role);
  const UnitParameter& parameter = plan_.units[from.unit].parameters[src.parameter];
  const auto contiguous = [&](std::int64_t src_bytes, std::int64_t dst_bytes, std::int64_t numel) {
    movement.stretches.push_back({src.part, dst.part, src_bytes, dst_bytes, 1, numel,
                                  numel * SizeBytes(src.dtype), numel * SizeBytes(dst.dtype), src.dtype,
                                  dst.dtype});
  };
  if (a == Arrangement::kSlots && b == Arrangement::kWhole) {
    // A shard that was cut from the whole again for the smaller mesh is a plain piece of it, whatever the
    // dimension.
    const bool by_rows = parameter.shard_dim == 0 || slots != ShardCount(plan_, plan_.units[from.unit]);
    Gather(parameter, src, dst, slots, SizeBytes(from).value / slots, by_rows, movement);
  } else if (a == Arrangement::kWhole && b == Arrangement::kSlots) {
    const CommunicatorId inner = plan_.units[to.unit].inner_reduce_communicator;
    Scatter(parameter, src, dst, slots, inner < 0 ? slots : plan_.communicators[inner].size,
            SizeBytes(to).value / slots, movement);
  } else if (a == Arrangement::kSlots && b == Arrangement::kSlots) {  // of other parameters
    for (std::int64_t j = 0; j < slots; ++j)
      contiguous(src.offset_bytes + j * (SizeBytes(from).value / slots),
                 dst.offset_bytes + j * (SizeBytes(to).value / slots), std::min(src.numel, dst.numel));
  } else if (a == Arrangement::kShard && b == Arrangement::kSlots) {
    const std::int64_t begin = dst.offset_bytes + slot * (SizeBytes(to).value / slots);
    contiguous(src.offset_bytes, begin, std::min(src.numel, dst.numel));
    const std::int64_t first = src.numel * SizeBytes(src.dtype);
    if (src.dtype == dst.dtype && src.bytes == dst.bytes && src.bytes > first) {  // an extension's others
      const std::int64_t rest = src.bytes - first;
      movement.stretches.push_back({src.part, dst.part, src.offset_bytes + first, begin + first, 1, rest,
                                    rest, rest, DType::kUInt8, DType::kUInt8});
    }
  } else if (a == Arrangement::kWhole && b == Arrangement::kShard && slots > 1) {
    contiguous(src.offset_bytes + slot * dst.numel * SizeBytes(src.dtype), dst.offset_bytes, dst.numel);
  } else {
    contiguous(src.offset_bytes, dst.offset_bytes, std::min(src.numel, dst.numel));
  }
}

// In elements of the two buffers; in bytes where that does not say it (parameters of several dtypes), which
// nothing may be converted for.
Result<CopySpec> CopyResolver::InElements(const Instruction& instruction, const Moves& movement) const {
  CopySpec copy = {instruction.src,
                   instruction.dst,
                   plan_.buffers[instruction.src].dtype,
                   plan_.buffers[instruction.dst].dtype,
                   {},
                   {}};
  bool converts = false, alike = true, as_buffers = true;
  for (const Stretch& s : movement.stretches) {
    const Stretch& first = movement.stretches.front();
    converts = converts || s.src_dtype != s.dst_dtype;
    alike = alike && s.src_dtype == first.src_dtype && s.dst_dtype == first.dst_dtype;
    as_buffers = as_buffers && s.src_dtype == copy.src_dtype && s.dst_dtype == copy.dst_dtype;
  }
  if (converts && !alike) {
    return MakeInputError(
        fmt::format("/buffers/{}/dtype", instruction.dst),
        fmt::format("{} to {} converts between several dtypes at once", plan_.buffers[instruction.src].name,
                    plan_.buffers[instruction.dst].name));
  }
  if (!as_buffers && !movement.stretches.empty()) {
    copy.src_dtype = converts ? movement.stretches.front().src_dtype : DType::kUInt8;
    copy.dst_dtype = converts ? movement.stretches.front().dst_dtype : DType::kUInt8;
  }
  const std::int64_t from = SizeBytes(copy.src_dtype);
  const std::int64_t to = SizeBytes(copy.dst_dtype);
  for (const Stretch& s : movement.stretches) {
    const std::int64_t numel = s.row_numel * SizeBytes(s.src_dtype) / from;
    copy.runs.push_back({s.src_part, s.dst_part, s.src_bytes / from, s.dst_bytes / to, s.rows, numel,
                         s.src_stride_bytes / from, s.dst_stride_bytes / to});
  }
  for (const Zeros& z : movement.zeros) {
    copy.zeros.push_back({z.part, z.bytes_before / to, z.bytes / to});
  }
  return copy;
}

// Gradients as autograd makes them, one part per parameter -> the flat gradient, zeros between and after
// them.
Result<CopySpec> CopyResolver::JoinGradients(const Instruction& instruction) const {
  const Buffer& from = plan_.buffers[instruction.src];
  const Buffer& to = plan_.buffers[instruction.dst];
  const Unit& unit = plan_.units[from.unit];
  const std::vector<std::int32_t> parameters = ParametersOf(plan_, from);
  CopySpec copy = {instruction.src, instruction.dst, from.dtype, to.dtype, {}, {}};
  std::int64_t end = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const UnitParameter& parameter = unit.parameters[parameters[i]];
    const std::int64_t numel = Numel(parameter);
    const auto part = static_cast<std::int32_t>(i);
    if (PartNumel(from, part) < numel) {
      return SizeError(instruction.src, part, fmt::format("{} is too small for {}", from.name, parameter.fqn),
                       from.parts_bytes[i].value, numel * SizeBytes(from.dtype));
    }
    if (parameter.flat_offset > end) copy.zeros.push_back({0, end, parameter.flat_offset - end});
    end = parameter.flat_offset + numel;
    if (numel > 0) copy.runs.push_back({part, 0, 0, parameter.flat_offset, 1, numel, numel, numel});
  }
  const std::int64_t total = PartNumel(to, 0);
  if (total < end) {
    return SizeError(instruction.dst, 0, fmt::format("{} is too small for its parameters", to.name),
                     to.parts_bytes[0].value, end * SizeBytes(to.dtype));
  }
  if (total > end) copy.zeros.push_back({0, end, total - end});
  return copy;
}

// Flat buffers have one part, except gradients as autograd makes them; a gathered one is its shards one after
// the other, so offsets are all that matters.
Result<CopySpec> CopyResolver::FlatCopy(const Instruction& instruction, std::int64_t slots,
                                        std::int64_t slot) const {
  const Buffer& from = plan_.buffers[instruction.src];
  const Buffer& to = plan_.buffers[instruction.dst];
  const bool by_parameter = from.role == BufferRole::kGradUnsharded && to.parts_bytes.size() == 1 &&
                            from.parts_bytes.size() == ParametersOf(plan_, from).size();
  if (by_parameter && DescriptionOf(instruction.kind).movement == Movement::kToSlots)
    return JoinGradients(instruction);
  for (const BufferId id : {instruction.src, instruction.dst}) {
    if (plan_.buffers[id].parts_bytes.size() == 1) continue;
    return MakeInputError(fmt::format("/buffers/{}/parts_bytes", id),
                          fmt::format("{} belongs to a flat unit", plan_.buffers[id].name),
                          fmt::format("{} parts", plan_.buffers[id].parts_bytes.size()), "1 part");
  }
  CopySpec copy = {instruction.src, instruction.dst, from.dtype, to.dtype, {}, {}};
  const std::int64_t src_numel = PartNumel(from, 0);
  const std::int64_t dst_numel = PartNumel(to, 0);
  std::int64_t dst_offset = 0;
  std::int64_t src_offset = 0;
  std::int64_t numel = std::min(src_numel, dst_numel);
  const Movement moves = DescriptionOf(instruction.kind).movement;
  if (moves == Movement::kToSlot && dst_numel == src_numel * slots) dst_offset = slot * src_numel;
  if (moves == Movement::kToPostForward) {
    numel = dst_numel;
    src_offset = slot * numel;
  }
  copy.runs.push_back({0, 0, src_offset, dst_offset, 1, numel, numel, numel});
  if (moves == Movement::kToSlots && dst_numel > src_numel) {
    copy.zeros.push_back({0, src_numel, dst_numel - src_numel});
  }
  return copy;
}

Result<CopySpec> CopyResolver::Copy(const Instruction& instruction, std::int64_t slots,
                                    std::int64_t slot) const {
  const Buffer& from = plan_.buffers[instruction.src];
  const Buffer& to = plan_.buffers[instruction.dst];
  if (from.unit < 0 || from.unit != to.unit) {
    return MakeInputError(fmt::format("/buffers/{}/unit", instruction.dst),
                          fmt::format("{} copies {} to {}, which belong to different units",
                                      Name(instruction.kind), from.name, to.name));
  }
  if (plan_.units[from.unit].layout == LayoutKind::kFlat) return FlatCopy(instruction, slots, slot);
  Result<std::vector<Place>> sources = Places(instruction.src, slots);
  if (!sources) return std::unexpected(sources.error());
  Result<std::vector<Place>> targets = Places(instruction.dst, slots);
  if (!targets) return std::unexpected(targets.error());
  const auto source_of = [&](const Place& target) {
    return std::ranges::find_if(*sources, [&](const Place& p) { return p.parameter == target.parameter; });
  };
  // Straight from the shards goes what is gathered as it is, if anything is; the others are converted on
  // their way, through buffers of their own.
  const auto as_it_is = [&](const Place& target) {
    const auto source = source_of(target);
    return source != sources->end() && source->dtype == target.dtype && source->bytes == target.bytes;
  };
  const bool straight = from.role == BufferRole::kParamSharded && to.role == BufferRole::kAllGatherOutput &&
                        std::ranges::any_of(*targets, as_it_is);
  Moves movement;
  bool any = targets->empty();
  for (const Place& target : *targets) {
    const auto source = source_of(target);
    if (source == sources->end())
      continue;  // comes from another buffer (accumulated gradients and fresh ones)
    any = true;
    if (straight && !as_it_is(target)) continue;
    if (target.numel > 0) AddMovement(instruction, *source, target, slots, slot, movement);
  }
  if (!any) {
    return MakeInputError(fmt::format("/buffers/{}/parameters", instruction.src),
                          fmt::format("{} and {} have no parameter in common", from.name, to.name));
  }
  return InElements(instruction, movement);
}

}  // namespace shardplan::executor
