#include "verifier/verifier_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "shardplan/schemas/layout.h"

namespace shardplan::verifier {
namespace {

using enum BufferRole;
using enum InstructionKind;

std::int64_t SizeOf(const Plan& plan, CommunicatorId communicator) {
  return communicator < 0 ? 1 : plan.communicators[communicator].size;
}

// Of what is gathered of a parameter; of the first tensor where an extension makes several.
DType GatheredDType(const Unit& unit, const UnitParameter& parameter) {
  return parameter.gathered.empty() ? ComputeDType(unit, parameter) : parameter.gathered.front().dtype;
}

// Whether the buffer holds what is gathered: of an all-gather input, not a copy of the shard on the device.
bool HoldsGathered(const Unit& unit, const Buffer& buffer) {
  switch (buffer.role) {
    case kParamUnsharded:
    case kParamPostForwardShard:
    case kAllGatherOutput:
      return true;
    case kAllGatherInput:
      return buffer.dtype == unit.param_dtype;
    default:
      return false;
  }
}

DType DTypeIn(const Unit& unit, const UnitParameter& parameter, const Buffer& buffer) {
  if (buffer.role == kParamSharded) return parameter.dtype;
  return HoldsGathered(unit, buffer) ? GatheredDType(unit, parameter) : buffer.dtype;
}

// One piece of a parameter of `pieces`, or all of it, in bytes.
std::int64_t BytesIn(const Plan& plan, const Buffer& buffer, std::int32_t p, std::int64_t pieces) {
  const Unit& unit = plan.units[buffer.unit];
  const UnitParameter& parameter = unit.parameters[p];
  const std::int64_t element = SizeBytes(DTypeIn(unit, parameter, buffer));
  const bool whole = ArrangementOf(buffer.role) == Arrangement::kWhole;
  if (whole && !IsParameterRole(buffer.role)) return Numel(parameter) * element;
  const std::int64_t shards = ShardCount(plan, unit);
  const bool extended = HoldsGathered(unit, buffer) && !parameter.gathered.empty();
  const std::int64_t piece =
      extended ? parameter.gathered.front().numel : PaddedPieceNumel(parameter, shards);
  if (whole) return piece * shards * element;
  std::int64_t bytes = piece * shards / pieces * element;
  for (std::size_t t = 1; extended && t < parameter.gathered.size(); ++t) {
    bytes += parameter.gathered[t].numel * SizeBytes(parameter.gathered[t].dtype);
  }
  return bytes;
}

bool IsOnHost(const Buffer& buffer) { return buffer.memory != MemoryKind::kDevice; }

std::int64_t Numbers(const Buffer& buffer) { return SizeBytes(buffer).value / SizeBytes(buffer.dtype); }

std::vector<std::int64_t> Sizes(const std::vector<Bytes>& parts) {
  std::vector<std::int64_t> sizes;
  for (const Bytes part : parts) sizes.push_back(part.value);
  return sizes;
}

std::string Unlike(const std::vector<Bytes>& found, const std::vector<std::int64_t>& expected) {
  if (Sizes(found) == expected) return {};
  return fmt::format("parts of {} bytes, and not of {}", fmt::join(Sizes(found), ", "),
                     fmt::join(expected, ", "));
}

// The sizes of a buffer of a per_parameter unit that is cut into `pieces`: a part for each parameter, or all
// of them in one.
std::string PartsCutInto(const Plan& plan, const Buffer& buffer, std::int64_t pieces) {
  std::vector<std::int64_t> expected;
  for (const std::int32_t p : ParametersOf(plan, buffer)) {
    expected.push_back(BytesIn(plan, buffer, p, pieces));
  }
  const bool gathered = ArrangementOf(buffer.role) == Arrangement::kGathered;
  if (buffer.parts_bytes.size() == 1) {
    const std::int64_t all = std::accumulate(expected.begin(), expected.end(), std::int64_t{0});
    expected = {all * (gathered ? pieces : 1)};
  } else if (gathered) {
    return fmt::format("{} parts, and not one", buffer.parts_bytes.size());
  }
  return Unlike(buffer.parts_bytes, expected);
}

// Elements of a flat parameter without what is added at its end.
std::int64_t UnpaddedNumel(const Unit& unit) {
  std::int64_t end = 0;
  for (const UnitParameter& parameter : unit.parameters) {
    end = std::max(end, parameter.flat_offset + Numel(parameter));
  }
  return end;
}

std::string PartsOfFlat(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  const std::int64_t element = SizeBytes(buffer.dtype);
  const bool shard = ArrangementOf(buffer.role) == Arrangement::kShard;
  if (buffer.role == kGradUnsharded) {  // as autograd makes them, or the whole one
    std::vector<std::int64_t> each;
    for (const std::int32_t p : ParametersOf(plan, buffer)) {
      each.push_back(Numel(unit.parameters[p]) * element);
    }
    if (Sizes(buffer.parts_bytes) == each) return {};
  }
  // Gradients are padded when they are reduced, and the user's copy on the host is not padded.
  const bool may_lack_padding = !shard && (buffer.role != kParamUnsharded || IsOnHost(buffer));
  if (may_lack_padding && Sizes(buffer.parts_bytes) == std::vector{UnpaddedNumel(unit) * element}) return {};
  return Unlike(buffer.parts_bytes, {(shard ? unit.flat_numel / ShardCount(plan, unit) : unit.flat_numel) *
                                     element});
}

bool IsOneOf(DType dtype, std::initializer_list<DType> allowed) {
  return std::ranges::find(allowed, dtype) != allowed.end();
}

// A compressing hook of fsdp1 reduces in its own dtype.
std::optional<DType> HookDType(const Plan& plan) {
  switch (plan.strategy.fsdp1.comm_hook) {
    case Fsdp1CommHook::kFp16Compress:
      return DType::kFloat16;
    case Fsdp1CommHook::kBf16Compress:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

bool IsDTypeOfParameters(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  const bool flat = unit.layout == LayoutKind::kFlat;
  const bool may_be_original =
      buffer.role == kAllGatherInput || (flat && buffer.role == kParamUnsharded);
  if (buffer.role == kParamSharded) return buffer.dtype == unit.orig_dtype;
  if (buffer.dtype == unit.param_dtype || (may_be_original && buffer.dtype == unit.orig_dtype)) return true;
  // Parameters of several dtypes, or of another one than the unit's, are gathered as bytes.
  const auto differs = [&](std::int32_t p) {
    return GatheredDType(unit, unit.parameters[p]) != unit.param_dtype;
  };
  const auto is_its_own = [&](std::int32_t p) {
    const UnitParameter& parameter = unit.parameters[p];
    return buffer.dtype == GatheredDType(unit, parameter) ||
           (may_be_original && buffer.dtype == parameter.dtype);
  };
  const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
  if (flat || std::ranges::none_of(held, differs)) return false;
  return buffer.dtype == DType::kUInt8 || std::ranges::any_of(held, is_its_own);
}

bool IsDTypeOfGradients(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  const bool flat = unit.layout == LayoutKind::kFlat;
  const DType computed = unit.param_dtype;
  const DType reduced = HookDType(plan).value_or(unit.reduce_dtype);
  switch (buffer.role) {
    case kGradUnsharded: {
      if (flat && plan.strategy.fsdp1.full_precision_in_eval && buffer.dtype == unit.orig_dtype) return true;
      const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
      return buffer.dtype == computed || std::ranges::any_of(held, [&](std::int32_t p) {
               return buffer.dtype == ComputeDType(unit, unit.parameters[p]);
             });
    }
    case kGradUnshardedAccumulated:
      return flat ? IsOneOf(buffer.dtype, {computed, unit.orig_dtype}) : buffer.dtype == unit.reduce_dtype;
    case kReduceScatterOutput:  // cast before it is copied to the host
      if (buffer.dtype == unit.orig_dtype) return true;
      [[fallthrough]];
    case kReduceScatterInput:
    case kPartialReduceOutput:
      return IsOneOf(buffer.dtype, {reduced, unit.reduce_dtype});
    case kGradSharded:
      return buffer.dtype == unit.orig_dtype || (flat && buffer.dtype == computed);
    case kGradHost:
      return buffer.dtype == unit.orig_dtype;
    default:
      return true;
  }
}

// The buffers that something moves through. Memory that is only taken and given back holds no numbers.
std::vector<char> Touched(const Plan& plan) {
  std::vector<char> touched(plan.buffers.size(), false);
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) touched[b] = plan.buffers[b].role == kGradUnsharded;
  const auto touch = [&](BufferId id) {
    if (id >= 0 && id < std::ssize(touched)) touched[id] = true;
  };
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == kAllocate || i.kind == kFree) continue;
        touch(i.src);
        touch(i.dst);
      }
    }
  }
  return touched;
}

}  // namespace

Arrangement ArrangementOf(BufferRole role) {
  switch (role) {
    case kParamSharded:
    case kParamPostForwardShard:
    case kAllGatherInput:
    case kReduceScatterOutput:
    case kPartialReduceOutput:
    case kGradSharded:
    case kGradHost:
      return Arrangement::kShard;
    case kAllGatherOutput:
    case kReduceScatterInput:
      return Arrangement::kGathered;
    case kParamUnsharded:
    case kGradUnsharded:
    case kGradUnshardedAccumulated:
      return Arrangement::kWhole;
    default:
      return Arrangement::kNone;
  }
}

bool IsParameterRole(BufferRole role) {
  return role == kParamSharded || role == kParamUnsharded || role == kParamPostForwardShard ||
         role == kAllGatherInput || role == kAllGatherOutput;
}

std::string LayoutOfParts(const Plan& plan, const Buffer& buffer) {
  if (ArrangementOf(buffer.role) == Arrangement::kNone) return {};
  if (buffer.unit < 0) return "no unit";
  const Unit& unit = plan.units[buffer.unit];
  if (unit.layout == LayoutKind::kFlat) return PartsOfFlat(plan, buffer);
  const std::int64_t after_forward = SizeOf(plan, unit.post_forward_communicator);
  if (buffer.role == kParamPostForwardShard) return PartsCutInto(plan, buffer, after_forward);
  std::string wrong = PartsCutInto(plan, buffer, ShardCount(plan, unit));
  const bool either = buffer.role == kAllGatherInput || buffer.role == kAllGatherOutput;
  if (wrong.empty() || !either || unit.post_forward_communicator < 0) return wrong;
  return PartsCutInto(plan, buffer, after_forward).empty() ? std::string() : wrong;
}

std::string LayoutOfDType(const Plan& plan, const Buffer& buffer) {
  if (ArrangementOf(buffer.role) == Arrangement::kNone || buffer.unit < 0) return {};
  const bool right = IsParameterRole(buffer.role) ? IsDTypeOfParameters(plan, buffer)
                                                  : IsDTypeOfGradients(plan, buffer);
  if (right) return {};
  const Unit& unit = plan.units[buffer.unit];
  return fmt::format("dtype {}, and its unit's are {} (original), {} (computed in) and {} (reduced in)",
                     Name(buffer.dtype), Name(unit.orig_dtype), Name(unit.param_dtype),
                     Name(unit.reduce_dtype));
}

std::string LayoutOfMemory(const Plan& /*plan*/, const Buffer& buffer) {
  const bool on_host = IsOnHost(buffer);
  switch (buffer.role) {
    case kGradHost:
      return on_host ? "" : "memory of the device";
    case kParamSharded:    // offloaded
    case kParamUnsharded:  // a whole copy for the user
    case kOptimizerState:
    case kOptimizerTemp:
    case kOrderCheck:
    case kModelBuffer:
      return {};
    default:
      return on_host ? "memory of the host" : "";
  }
}

std::string LayoutOfCopy(const Plan& plan, const Instruction& copy, bool is_view) {
  const Buffer& from = plan.buffers[copy.src];
  const Buffer& to = plan.buffers[copy.dst];
  if (from.unit < 0 || to.unit < 0 || from.unit != to.unit) return {};  // rule reference, or of no unit
  const Unit& unit = plan.units[from.unit];
  const std::vector<std::int32_t> brought = ParametersOf(plan, from);
  const auto is_brought = [&](std::int32_t p) { return std::ranges::binary_search(brought, p); };
  if (std::ranges::none_of(ParametersOf(plan, to), is_brought)) return "have no parameter in common";
  const Arrangement a = ArrangementOf(from.role);
  const Arrangement b = ArrangementOf(to.role);
  const bool flat = unit.layout == LayoutKind::kFlat;
  const bool one_rank = ShardCount(plan, unit) == 1;
  const bool both_whole = flat && a != Arrangement::kShard && b != Arrangement::kShard;
  const bool as_flat = both_whole && from.role != kGradUnsharded && !IsParameterRole(from.role);
  if (as_flat && copy.kind != kGradCopyIn && Numbers(from) < Numbers(to)) {
    return fmt::format("only {} adds what is missing at the end", Name(kGradCopyIn));
  }
  if (a == b || one_rank || both_whole) return {};
  const std::string differ =
      fmt::format("{} cannot become {}", a == Arrangement::kShard ? "a shard" : "what all ranks have",
                  b == Arrangement::kShard ? "a shard" : "it arranged otherwise");
  if (is_view) return differ;
  const bool parameters = IsParameterRole(from.role) && IsParameterRole(to.role);
  if (a == Arrangement::kShard) {  // into this rank's slot
    const bool slot = parameters && (b == Arrangement::kGathered || flat);
    return slot && copy.kind != kCopyOut ? std::string() : differ;
  }
  if (b == Arrangement::kShard) {
    const bool kept = parameters && copy.kind == kReshardPostForward && a == Arrangement::kWhole;
    return kept ? std::string() : differ;
  }
  const bool out = parameters && a == Arrangement::kGathered;
  const bool in = !parameters && b == Arrangement::kGathered;
  return out || in ? std::string() : differ;
}

namespace {

// What a collective puts or takes one rank after the other is whole parameters.
bool IsWholeInOrder(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  if (unit.layout == LayoutKind::kFlat || ShardCount(plan, unit) == 1) return true;
  const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
  if (held.size() != 1) return false;
  const UnitParameter& parameter = unit.parameters[held.front()];
  std::int64_t outer = 1;
  for (std::int32_t d = 0; d < parameter.shard_dim; ++d) outer *= parameter.shape[d];
  return outer == 1;
}

std::string Arranged(const Plan& plan, const Buffer& shard, const Buffer& all) {
  if (all.unit < 0) return {};
  if (all.role != kOrderCheck && ArrangementOf(shard.role) != Arrangement::kShard && &shard != &all) {
    return fmt::format("{} holds no shard", shard.name);
  }
  if (ArrangementOf(all.role) == Arrangement::kWhole && !IsWholeInOrder(plan, all)) {
    return fmt::format("{} holds whole parameters, and not the pieces of one rank after the other", all.name);
  }
  if (ArrangementOf(all.role) == Arrangement::kShard) return fmt::format("{} is a shard", all.name);
  if (&shard != &all && ParametersOf(plan, shard) != ParametersOf(plan, all)) {
    return fmt::format("{} and {} hold different parameters", shard.name, all.name);
  }
  return {};
}

}  // namespace

std::string LayoutOfCollective(const Plan& plan, const Instruction& i) {
  const Buffer& from = plan.buffers[i.src];
  const Buffer& to = plan.buffers[i.kind == kAllReduce ? i.src : i.dst];
  const std::int64_t ranks = plan.communicators[i.communicator].size;
  for (const Buffer* buffer : {&from, &to}) {
    if (buffer->parts_bytes.size() != 1) {
      return fmt::format("{} has {} parts, and a collective has one", buffer->name,
                         buffer->parts_bytes.size());
    }
  }
  if (from.dtype != to.dtype) {
    return fmt::format("{} is {} and {} is {}: a collective does not convert", from.name, Name(from.dtype),
                       to.name, Name(to.dtype));
  }
  if (i.kind == kAllReduce) return {};
  const bool gathers = i.kind == kAllGather;
  const Buffer& shard = gathers ? from : to;
  const Buffer& all = gathers ? to : from;
  const std::int64_t all_bytes = all.parts_bytes[0].value;
  const bool fits = i.src == i.dst ? all_bytes % ranks == 0 : shard.parts_bytes[0].value * ranks == all_bytes;
  if (!fits) {
    return fmt::format("{} has {} bytes and {} has {}, on {} ranks", from.name, from.parts_bytes[0].value,
                       to.name, to.parts_bytes[0].value, ranks);
  }
  return Arranged(plan, shard, all);
}

std::string LayoutOfReach(const Plan& plan, const Instruction& i, bool is_view) {
  if (is_view) return {};
  const auto on_host = [&](BufferId id) { return IsOnHost(plan.buffers[id]); };
  const BufferId other = i.dst >= 0 ? i.dst : i.src;
  if (i.stream < 0) {
    for (const BufferId id : {i.src, other}) {
      if (!on_host(id)) return fmt::format("the host cannot work on {}", plan.buffers[id].name);
    }
    return {};
  }
  const bool to_host = i.kind == kCopyToHost;
  const bool to_device = i.kind == kCopyToDevice;
  // Alone, a rank copies an offloaded shard right to where it is computed with.
  const bool either = (i.kind == kCopyIn || i.kind == kCopyOut) && on_host(i.src);
  if (!either && on_host(i.src) != to_device) {
    return fmt::format("{} is in memory of the {}", plan.buffers[i.src].name, to_device ? "device" : "host");
  }
  if (on_host(other) != to_host) {
    return fmt::format("{} is in memory of the {}", plan.buffers[other].name, to_host ? "device" : "host");
  }
  return {};
}

void CheckBuffers(const Plan& plan, Reporter& reporter) {
  const std::vector<char> touched = Touched(plan);
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (!touched[b]) continue;
    for (const std::string& wrong :
         {LayoutOfParts(plan, buffer), LayoutOfDType(plan, buffer), LayoutOfMemory(plan, buffer)}) {
      if (wrong.empty()) continue;
      reporter.Add(Rule::kLayout, {}, static_cast<std::int64_t>(b),
                   fmt::format("buffer {} ({}{}) has {}", buffer.name, Name(buffer.role),
                               buffer.unit < 0 ? "" : " of " + reporter.UnitName(buffer.unit), wrong));
      break;
    }
  }
}

void CheckMovement(const Plan& plan, const Instruction& i, bool is_view, Position at, Reporter& reporter) {
  const bool collective = i.kind == kAllGather || i.kind == kReduceScatter || i.kind == kAllReduce;
  const bool copies = i.kind == kCopyIn || i.kind == kCopyOut || i.kind == kReshardPostForward ||
                      i.kind == kGradCopyIn || i.kind == kGradCast || i.kind == kGradAccumulate ||
                      i.kind == kCopyToHost || i.kind == kCopyToDevice;
  if (!collective && !copies && i.kind != kGradScale) return;
  std::string wrong = collective ? LayoutOfCollective(plan, i) : std::string();
  if (copies) {
    wrong = LayoutOfCopy(plan, i, is_view);
    if (!wrong.empty()) {
      wrong = fmt::format("{} and {}: {}", plan.buffers[i.src].name, plan.buffers[i.dst].name, wrong);
    }
  }
  if (wrong.empty()) wrong = LayoutOfReach(plan, i, is_view);
  if (wrong.empty()) return;
  reporter.Add(Rule::kLayout, at, i.src, fmt::format("{}: {}", reporter.Instruction(at), wrong),
               {"at: " + reporter.Describe(at)});
}

}  // namespace shardplan::verifier
