#include "geometry.h"

#include <fmt/format.h>

#include <algorithm>

#include "shardplan/executor/layout.h"

namespace shardplan::executor {
namespace {

std::unexpected<Error> SizeError(BufferId buffer, std::int32_t part, std::string message, std::int64_t found,
                                 std::int64_t expected) {
  return MakeInputError(fmt::format("/buffers/{}/parts_bytes/{}", buffer, part), std::move(message),
                        fmt::format("{} bytes", found), fmt::format("{} bytes", expected));
}

std::int64_t TotalNumel(const Buffer& buffer) { return SizeBytes(buffer).value / SizeBytes(buffer.dtype); }

}  // namespace

Arrangement ArrangementOf(BufferRole role) {
  switch (role) {
    case BufferRole::kParamUnsharded:
    case BufferRole::kGradUnsharded:
    case BufferRole::kGradUnshardedAccumulated:
      return Arrangement::kWhole;
    case BufferRole::kAllGatherOutput:
    case BufferRole::kReduceScatterInput:
      return Arrangement::kGathered;
    default:
      return Arrangement::kShard;
  }
}

std::int64_t PartNumel(const Buffer& buffer, std::int32_t part) {
  return buffer.parts_bytes[part].value / SizeBytes(buffer.dtype);
}

// Into how many pieces a parameter is cut in this buffer. After a forward a shard may belong to the smaller
// mesh; the buffer's size tells (an all-gather input holds either).
std::int64_t Geometry::PiecesOf(const Buffer& buffer, std::int64_t slots) const {
  const Unit& unit = plan_.units[buffer.unit];
  const std::int64_t shards = ShardCount(plan_, unit);
  if (ArrangementOf(buffer.role) == Arrangement::kGathered) return slots;
  if (unit.post_forward_communicator < 0) return shards;
  if (buffer.role == BufferRole::kParamPostForwardShard) return slots;
  if (buffer.role != BufferRole::kAllGatherInput) return shards;
  std::int64_t numel = 0;
  for (const std::int32_t p : ParametersOf(plan_, buffer)) {
    numel += PaddedPieceNumel(unit.parameters[p], shards);
  }
  return TotalNumel(buffer) == numel ? shards : plan_.communicators[unit.post_forward_communicator].size;
}

std::int64_t Geometry::SlotsForShard(const Buffer& shard) const {
  const Unit& unit = plan_.units[shard.unit];
  if (shard.role == BufferRole::kParamPostForwardShard) {
    return unit.post_forward_communicator < 0 ? 1 : plan_.communicators[unit.post_forward_communicator].size;
  }
  return shard.role == BufferRole::kAllGatherInput ? PiecesOf(shard, 1) : ShardCount(plan_, unit);
}

Result<std::vector<Geometry::Place>> Geometry::Places(BufferId id, std::int64_t slots) const {
  const Buffer& buffer = plan_.buffers[id];
  const Unit& unit = plan_.units[buffer.unit];
  const std::vector<std::int32_t> parameters = ParametersOf(plan_, buffer);
  const Arrangement arrangement = ArrangementOf(buffer.role);
  const bool joined = buffer.parts_bytes.size() == 1;
  if (!joined && (arrangement == Arrangement::kGathered || buffer.parts_bytes.size() != parameters.size())) {
    return MakeInputError(
        fmt::format("/buffers/{}/parts_bytes", id),
        fmt::format("{} has parts that are not its parameters'", buffer.name),
        fmt::format("{} parts", buffer.parts_bytes.size()),
        arrangement == Arrangement::kGathered ? "1 part" : fmt::format("{} parts", parameters.size()));
  }
  const std::int64_t shards = ShardCount(plan_, unit);
  const std::int64_t element_bytes = SizeBytes(buffer.dtype);
  std::vector<Place> places;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const UnitParameter& parameter = unit.parameters[parameters[i]];
    const std::int64_t padded = PaddedPieceNumel(parameter, shards) * shards;
    Place place = {parameters[i], joined ? 0 : static_cast<std::int32_t>(i), joined ? offset : 0, 0};
    if (arrangement == Arrangement::kWhole) {
      const bool is_gradient = buffer.role != BufferRole::kParamUnsharded;
      place.numel = is_gradient ? Numel(parameter) : padded;
    } else {
      const std::int64_t pieces = PiecesOf(buffer, slots);
      if (padded % pieces != 0) {
        return MakeInputError(
            fmt::format("/units/{}/parameters/{}", buffer.unit, parameters[i]),
            fmt::format("{} cannot be cut into {} equal pieces after the forward", parameter.fqn, pieces));
      }
      place.numel = padded / pieces;
    }
    offset += place.numel;
    if (!joined && buffer.parts_bytes[i].value < place.numel * element_bytes) {
      return SizeError(id, place.part, fmt::format("{} is too small for {}", buffer.name, parameter.fqn),
                       buffer.parts_bytes[i].value, place.numel * element_bytes);
    }
    places.push_back(place);
  }
  const std::int64_t expected = offset * (arrangement == Arrangement::kGathered ? slots : 1);
  if (joined && PartNumel(buffer, 0) < expected) {
    return SizeError(id, 0, fmt::format("{} is too small for its parameters", buffer.name),
                     buffer.parts_bytes[0].value, expected * element_bytes);
  }
  return places;
}

// `slots` pieces of a gathered buffer -> the whole parameter.
void Geometry::Gather(const UnitParameter& parameter, const Place& src, const Place& dst, std::int64_t slots,
                      std::int64_t slot_numel, bool by_rows, CopySpec& copy) const {
  if (by_rows) {
    copy.runs.push_back(
        {src.part, dst.part, src.offset, dst.offset, slots, src.numel, slot_numel, src.numel});
    return;
  }
  std::int64_t outer = 1;
  for (std::int32_t d = 0; d < parameter.shard_dim; ++d) outer *= parameter.shape[d];
  const std::int64_t row = outer == 0 ? 0 : src.numel / outer;
  for (std::int64_t j = 0; j < slots; ++j) {
    copy.runs.push_back({src.part, dst.part, src.offset + j * slot_numel, dst.offset + j * row, outer, row,
                         row, row * slots});
  }
}

// The whole gradient -> `slots` pieces, padded with zeros.
void Geometry::Scatter(const UnitParameter& parameter, const Place& src, const Place& dst, std::int64_t slots,
                       std::int64_t slot_numel, CopySpec& copy) const {
  const std::int32_t dim = parameter.shape.empty() ? 0 : parameter.shard_dim;
  const std::int64_t rows = parameter.shape.empty() ? 1 : parameter.shape[dim];
  std::int64_t outer = 1;
  for (std::int32_t d = 0; d < dim; ++d) outer *= parameter.shape[d];
  const std::int64_t inner = rows * outer == 0 ? 0 : Numel(parameter) / rows / outer;
  for (std::int64_t j = 0; j < slots; ++j) {
    const RowRange range = ChunkRows(rows, slots, j);
    const std::int64_t row = range.count * inner;
    const std::int64_t to = dst.offset + j * slot_numel;
    if (row > 0) {
      copy.runs.push_back(
          {src.part, dst.part, src.offset + range.first * inner, to, outer, row, rows * inner, row});
    }
    if (row * outer < dst.numel) copy.zeros.push_back({dst.part, to + row * outer, dst.numel - row * outer});
  }
}

void Geometry::AddRuns(const Instruction& instruction, const Place& src, const Place& dst, std::int64_t slots,
                       std::int64_t slot, CopySpec& copy) const {
  const Buffer& from = plan_.buffers[instruction.src];
  const Buffer& to = plan_.buffers[instruction.dst];
  const Arrangement a = ArrangementOf(from.role);
  const Arrangement b = ArrangementOf(to.role);
  const UnitParameter& parameter = plan_.units[from.unit].parameters[src.parameter];
  const auto contiguous = [&](std::int64_t src_offset, std::int64_t dst_offset, std::int64_t numel) {
    copy.runs.push_back({src.part, dst.part, src_offset, dst_offset, 1, numel, numel, numel});
  };
  if (a == Arrangement::kGathered && b == Arrangement::kWhole) {
    // What was cut from the whole again for the smaller mesh is a plain piece of it, whatever the dimension.
    const bool by_rows = parameter.shard_dim == 0 || slots != ShardCount(plan_, plan_.units[from.unit]);
    Gather(parameter, src, dst, slots, TotalNumel(from) / slots, by_rows, copy);
  } else if (a == Arrangement::kWhole && b == Arrangement::kGathered) {
    Scatter(parameter, src, dst, slots, TotalNumel(to) / slots, copy);
  } else if (a == Arrangement::kShard && b == Arrangement::kGathered) {
    contiguous(src.offset, dst.offset + slot * (TotalNumel(to) / slots), src.numel);
  } else if (a == Arrangement::kWhole && b == Arrangement::kShard && slots > 1) {
    contiguous(src.offset + slot * dst.numel, dst.offset, dst.numel);
  } else {
    contiguous(src.offset, dst.offset, std::min(src.numel, dst.numel));
  }
}

// Gradients as autograd makes them, one part per parameter -> the flat gradient, zeros between and after
// them.
Result<CopySpec> Geometry::JoinGradients(const Instruction& instruction) const {
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
Result<CopySpec> Geometry::FlatCopy(const Instruction& instruction, std::int64_t slots,
                                    std::int64_t slot) const {
  const Buffer& from = plan_.buffers[instruction.src];
  const Buffer& to = plan_.buffers[instruction.dst];
  const bool by_parameter = from.role == BufferRole::kGradUnsharded && to.parts_bytes.size() == 1 &&
                            from.parts_bytes.size() == ParametersOf(plan_, from).size();
  if (by_parameter && instruction.kind == InstructionKind::kGradCopyIn) return JoinGradients(instruction);
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
  if (instruction.kind == InstructionKind::kCopyIn && dst_numel == src_numel * slots)
    dst_offset = slot * src_numel;
  if (instruction.kind == InstructionKind::kReshardPostForward) {
    numel = dst_numel;
    src_offset = slot * numel;
  }
  copy.runs.push_back({0, 0, src_offset, dst_offset, 1, numel, numel, numel});
  if (instruction.kind == InstructionKind::kGradCopyIn && dst_numel > src_numel) {
    copy.zeros.push_back({0, src_numel, dst_numel - src_numel});
  }
  return copy;
}

Result<CopySpec> Geometry::Copy(const Instruction& instruction, std::int64_t slots, std::int64_t slot) const {
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
  CopySpec copy = {instruction.src, instruction.dst, from.dtype, to.dtype, {}, {}};
  bool any = targets->empty();
  for (const Place& target : *targets) {
    const auto source =
        std::ranges::find_if(*sources, [&](const Place& p) { return p.parameter == target.parameter; });
    if (source == sources->end())
      continue;  // comes from another buffer (accumulated gradients and fresh ones)
    any = true;
    if (target.numel > 0) AddRuns(instruction, *source, target, slots, slot, copy);
  }
  if (!any) {
    return MakeInputError(fmt::format("/buffers/{}/parameters", instruction.src),
                          fmt::format("{} and {} have no parameter in common", from.name, to.name));
  }
  return copy;
}

}  // namespace shardplan::executor
