// SPDX-License-Identifier: Apache-2.0
#include "verifier/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"

namespace shardplan::verifier {
namespace {

using enum BufferRole;
using enum InstructionKind;

std::int64_t SizeOf(const Plan& plan, CommunicatorId communicator) {
  return communicator < 0 ? 1 : plan.communicators[communicator].size;
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

// An offloaded shard of a parameter with an all-gather extension, on the device, before the extension sees
// it.
bool IsCopyOfShard(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
  const auto has_extension = [&](std::int32_t p) { return !unit.parameters[p].gathered.empty(); };
  if (buffer.role != kAllGatherInput || std::ranges::none_of(held, has_extension)) return false;
  std::vector<std::int64_t> pieces;
  for (const std::int32_t p : held) {
    const UnitParameter& parameter = unit.parameters[p];
    pieces.push_back(PaddedPieceNumel(parameter, ShardCount(plan, unit)) * SizeBytes(parameter.dtype));
  }
  return Sizes(buffer.parts_bytes) == pieces;
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
  const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
  if (buffer.role == kGradUnsharded) {  // as autograd makes them
    std::vector<std::int64_t> each;
    for (const std::int32_t p : held) each.push_back(Numel(unit.parameters[p]) * element);
    return Unlike(buffer.parts_bytes, each);
  }
  if (held.size() != unit.parameters.size()) return "only some of the parameters, in one piece";
  // Gradients are padded when they are reduced, and the user's copy on the host is not padded.
  const bool may_lack_padding = !shard && (buffer.role != kParamUnsharded || IsOnHost(buffer));
  if (may_lack_padding && Sizes(buffer.parts_bytes) == std::vector{UnpaddedNumel(unit) * element}) return {};
  return Unlike(buffer.parts_bytes,
                {(shard ? unit.flat_numel / ShardCount(plan, unit) : unit.flat_numel) * element});
}

// The pieces of each rank that the second level reduces over.
std::string PiecesOfOuterRanks(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  if (unit.outer_reduce_communicator < 0) return "a unit that is reduced over all shards at once";
  std::int64_t bytes = 0;
  for (const std::int32_t p : ParametersOf(plan, buffer))
    bytes += BytesIn(plan, buffer, p, ShardCount(plan, unit));
  return Unlike(buffer.parts_bytes, {bytes * SizeOf(plan, unit.outer_reduce_communicator)});
}

bool IsOneOf(DType dtype, std::initializer_list<DType> allowed) {
  return std::ranges::find(allowed, dtype) != allowed.end();
}

bool IsDTypeOfParameters(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  const bool flat = unit.layout == LayoutKind::kFlat;
  const bool may_be_original = buffer.role == kAllGatherInput || (flat && buffer.role == kParamUnsharded);
  if (buffer.role == kParamSharded) return buffer.dtype == unit.orig_dtype;
  if (buffer.dtype == unit.param_dtype || (may_be_original && buffer.dtype == unit.orig_dtype)) return true;
  // Parameters of several dtypes, or of another one than the unit's, are gathered as bytes.
  if (flat) return false;
  const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
  const auto differs = [&](std::int32_t p) {
    return GatheredDType(unit, unit.parameters[p]) != unit.param_dtype;
  };
  const auto is_its_own = [&](std::int32_t p) {
    const UnitParameter& parameter = unit.parameters[p];
    return (differs(p) && buffer.dtype == GatheredDType(unit, parameter)) ||
           (may_be_original && buffer.dtype == parameter.dtype);
  };
  const bool as_bytes = buffer.dtype == DType::kUInt8 && buffer.role != BufferRole::kParamUnsharded;
  return (as_bytes && std::ranges::any_of(held, differs)) || std::ranges::any_of(held, is_its_own);
}

// Every mixed_precision of a strategy: its own and those of units.
std::vector<MixedPrecision> MixedPrecisions(const Strategy& strategy) {
  std::vector<MixedPrecision> all;
  if (strategy.mixed_precision) all.push_back(*strategy.mixed_precision);
  for (const UnitRule& rule : strategy.units) {
    if (rule.mixed_precision) all.push_back(*rule.mixed_precision);
  }
  return all;
}

// That of every parameter that the buffer holds; flat units have one.
bool IsShardedGradDType(const Plan& plan, const Buffer& buffer) {
  const Unit& unit = plan.units[buffer.unit];
  if (unit.layout == LayoutKind::kFlat) return buffer.dtype == unit.orig_dtype;
  return std::ranges::all_of(ParametersOf(plan, buffer), [&](std::int32_t p) {
    return !unit.parameters[p].requires_grad || buffer.dtype == ShardedGradDType(unit.parameters[p]);
  });
}

bool IsDTypeOfGradients(const Plan& plan, const Buffer& buffer, bool is_zeroed) {
  const Unit& unit = plan.units[buffer.unit];
  const bool flat = unit.layout == LayoutKind::kFlat;
  const DType computed = unit.param_dtype;
  const DType reduced = ReducedIn(plan, unit);
  switch (DescriptionOf(buffer.role).dtype) {
    case RoleDType::kMade: {
      if (flat && plan.strategy.fsdp1.full_precision_in_eval && buffer.dtype == unit.orig_dtype) return true;
      const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
      return std::ranges::any_of(
          held, [&](std::int32_t p) { return buffer.dtype == MadeGradDType(unit, unit.parameters[p]); });
    }
    case RoleDType::kAccumulated: {
      // Sums of one in the low precision and one in the other are in the other.
      if (flat) return IsOneOf(buffer.dtype, {computed, unit.orig_dtype});
      // One that is cut along another dimension than the first is put in order before it is cast.
      const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
      return std::ranges::any_of(held, [&](std::int32_t p) {
        const UnitParameter& parameter = unit.parameters[p];
        if (buffer.dtype == AccumulatedGradDType(unit, parameter)) return true;
        if (parameter.shard_dim > 0 && buffer.dtype == MadeGradDType(unit, parameter)) return true;
        return is_zeroed && buffer.dtype == ComputeDType(unit, parameter);  // zeros are made of the parameter
      });
    }
    case RoleDType::kReducedOrShardedGrad:  // cast before it is copied to the host
      if (IsShardedGradDType(plan, buffer)) return true;
      [[fallthrough]];
    case RoleDType::kReduced:
      return IsOneOf(buffer.dtype,
                     {reduced, unit.reduce_dtype, ReduceDTypeOf(unit, ParametersOf(plan, buffer))});
    case RoleDType::kShardedGradOrReduced:
      return IsShardedGradDType(plan, buffer) ||
             (flat && SomeKeepLowPrecision(plan.strategy) && IsOneOf(buffer.dtype, {computed, reduced}));
    case RoleDType::kShardedGrad:
      return IsShardedGradDType(plan, buffer);
    case RoleDType::kAny:
    case RoleDType::kOriginal:
    case RoleDType::kGathered:
    case RoleDType::kGatheredOrOriginal:
      return true;
  }
  return true;
}

// Uses of a buffer by the steps.
struct Use {
  bool is_allocated = false;
  bool is_zeroed = false;   // filled with zeros, in the place of gradients
  bool is_touched = false;  // something moves through it; memory that is only taken holds no numbers
};
std::vector<Use> UsesOf(const Plan& plan) {
  std::vector<Use> uses(plan.buffers.size());
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    uses[b].is_touched = plan.buffers[b].role == kGradUnsharded || plan.buffers[b].role == kOptimizerState;
  }
  const auto exists = [&](BufferId id) { return id >= 0 && id < std::ssize(uses); };
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == kAllocate && exists(i.dst)) uses[i.dst].is_allocated = true;
        if (i.kind == kGradZero && exists(i.dst)) uses[i.dst].is_zeroed = true;
        if (i.kind == kAllocate || i.kind == kFree) continue;
        for (const BufferId id : {i.src, i.dst}) {
          if (exists(id)) uses[id].is_touched = true;
        }
      }
    }
  }
  return uses;
}

}  // namespace

std::string PartsCutInto(const Plan& plan, const Buffer& buffer, std::int64_t pieces) {
  std::vector<std::int64_t> expected;
  for (const std::int32_t p : ParametersOf(plan, buffer)) {
    expected.push_back(BytesIn(plan, buffer, p, pieces));
  }
  const bool gathered = ArrangementOf(buffer.role) == Arrangement::kSlots;
  if (buffer.parts_bytes.size() == 1 && DescriptionOf(buffer.role).parts != RoleParts::kByParameter) {
    const std::int64_t all = std::accumulate(expected.begin(), expected.end(), std::int64_t{0});
    expected = {all * (gathered ? pieces : 1)};
  } else if (gathered) {
    return fmt::format("{} parts, and not one", buffer.parts_bytes.size());
  }
  return Unlike(buffer.parts_bytes, expected);
}

bool SomeKeepLowPrecision(const Strategy& strategy) {
  return std::ranges::any_of(MixedPrecisions(strategy), &MixedPrecision::keep_low_precision_grads);
}

bool AllKeepLowPrecision(const Strategy& strategy) {
  return SomeKeepLowPrecision(strategy) &&
         std::ranges::all_of(MixedPrecisions(strategy), &MixedPrecision::keep_low_precision_grads);
}

DType ReducedIn(const Plan& plan, const Unit& unit) {
  switch (plan.strategy.fsdp1.comm_hook) {
    case Fsdp1CommHook::kFp16Compress:
      return DType::kFloat16;
    case Fsdp1CommHook::kBf16Compress:
      return DType::kBFloat16;
    default:
      return unit.reduce_dtype;
  }
}

std::string LayoutOfParts(const Plan& plan, const Buffer& buffer) {
  const bool has_layout = ArrangementOf(buffer.role) != Arrangement::kNone;
  if (buffer.unit < 0) return has_layout || buffer.role == kOptimizerState ? "no unit" : "";
  if (!has_layout) return {};
  const Unit& unit = plan.units[buffer.unit];
  if (unit.layout == LayoutKind::kFlat) return PartsOfFlat(plan, buffer);
  if (IsInnerReduced(buffer.role)) return PiecesOfOuterRanks(plan, buffer);
  const std::int64_t after_forward = SizeOf(plan, unit.post_forward_communicator);
  if (buffer.role == kParamPostForwardShard) return PartsCutInto(plan, buffer, after_forward);
  std::string wrong = PartsCutInto(plan, buffer, ShardCount(plan, unit));
  if (IsCopyOfShard(plan, buffer)) return {};
  const bool either = buffer.role == kAllGatherInput || buffer.role == kAllGatherOutput;
  if (wrong.empty() || !either || unit.post_forward_communicator < 0) return wrong;
  return PartsCutInto(plan, buffer, after_forward).empty() ? std::string() : wrong;
}

std::string LayoutOfDType(const Plan& plan, const Buffer& buffer, bool is_zeroed) {
  if (ArrangementOf(buffer.role) == Arrangement::kNone || buffer.unit < 0) return {};
  const bool right = IsParameterRole(buffer.role) ? IsDTypeOfParameters(plan, buffer)
                                                  : IsDTypeOfGradients(plan, buffer, is_zeroed);
  if (right) return {};
  const Unit& unit = plan.units[buffer.unit];
  return fmt::format("dtype {}, and its unit's are {} (original), {} (computed in) and {} (reduced in)",
                     Name(buffer.dtype), Name(unit.orig_dtype), Name(unit.param_dtype),
                     Name(unit.reduce_dtype));
}

std::string LayoutOfMemory(const Plan& /*plan*/, const Buffer& buffer) {
  const bool on_host = IsOnHost(buffer);
  switch (DescriptionOf(buffer.role).memory) {
    case RoleMemory::kHost:
      return on_host ? "" : "memory of the device";
    case RoleMemory::kDevice:
      return on_host ? "memory of the host" : "";
    case RoleMemory::kEither:  // offloaded, or a whole copy for the user
      return {};
  }
  return {};
}

bool LayoutOfUnfilled(const Buffer& buffer, bool is_allocated, bool is_touched) {
  return IsFinalGradient(buffer.role) && is_allocated && !is_touched;
}

void CheckBuffers(const Plan& plan, Reporter& reporter) {
  const std::vector<Use> uses = UsesOf(plan);
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (LayoutOfUnfilled(buffer, uses[b].is_allocated, uses[b].is_touched)) {
      reporter.Add(Rule::kLayout, {}, static_cast<std::int64_t>(b),
                   fmt::format("buffer {} has the role {}, and no gradient comes into it", buffer.name,
                               Name(buffer.role)));
    }
    if (!uses[b].is_touched) continue;
    for (const std::string& wrong :
         {LayoutOfParts(plan, buffer), LayoutOfDType(plan, buffer, uses[b].is_zeroed),
          LayoutOfMemory(plan, buffer)}) {
      if (wrong.empty()) continue;
      reporter.Add(Rule::kLayout, {}, static_cast<std::int64_t>(b),
                   fmt::format("buffer {} ({}{}) has {}", buffer.name, Name(buffer.role),
                               buffer.unit < 0 ? "" : " of " + reporter.UnitName(buffer.unit), wrong));
      break;
    }
  }
}

}  // namespace shardplan::verifier
