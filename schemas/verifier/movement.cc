// SPDX-License-Identifier: Apache-2.0
// Rule layout, of instructions: what a copy and a collective make of what lies in their buffers.
#include <fmt/format.h>

#include <algorithm>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"
#include "verifier/activations.h"
#include "verifier/layout.h"
#include "verifier/rules.h"

namespace shardplan::verifier {
namespace {

using enum BufferRole;
using enum InstructionKind;

std::int64_t Numbers(const Buffer& buffer) { return SizeBytes(buffer).value / SizeBytes(buffer.dtype); }

// Both buffers are of one unit. A buffer that names none holds all.
bool HaveParameterInCommon(const Buffer& a, const Buffer& b) {
  if (a.parameters.empty() || b.parameters.empty() || a.parameters.front() == b.parameters.front())
    return true;
  return std::ranges::any_of(a.parameters,
                             [&](std::int32_t p) { return std::ranges::binary_search(b.parameters, p); });
}

// Both parameters, both gradients, or both something else.
bool HoldAlike(const Buffer& a, const Buffer& b) {
  const auto has_layout = [](const Buffer& buffer) {
    return ArrangementOf(buffer.role) != Arrangement::kNone;
  };
  return has_layout(a) == has_layout(b) && IsParameterRole(a.role) == IsParameterRole(b.role);
}

}  // namespace

std::string LayoutOfCopy(const Plan& plan, const Instruction& copy, bool is_view) {
  const Buffer& from = plan.buffers[copy.src];
  const Buffer& to = plan.buffers[copy.dst];
  if (std::string wrong = LayoutOfActivations(plan, copy); !wrong.empty()) return wrong;
  if (!HoldAlike(from, to)) {
    return fmt::format("one holds {}, the other one does not",
                       IsParameterRole(from.role) || IsParameterRole(to.role) ? "parameters" : "gradients");
  }
  if (to.role == kParamSharded) return "the optimizer alone writes a shard";
  if (from.unit < 0 || to.unit < 0 || from.unit != to.unit) return {};  // rule reference, or of no unit
  const Unit& unit = plan.units[from.unit];
  if (!HaveParameterInCommon(from, to)) return "have no parameter in common";
  const Arrangement a = ArrangementOf(from.role);
  const Arrangement b = ArrangementOf(to.role);
  const bool flat = unit.layout == LayoutKind::kFlat;
  const CommunicatorId after = unit.post_forward_communicator;
  if (!flat && after >= 0 && from.role == kParamPostForwardShard && to.role == kAllGatherInput) {
    const std::string other = PartsCutInto(plan, to, plan.communicators[after].size);
    if (!other.empty()) return fmt::format("it takes other pieces: {}", other);
  }
  const bool one_rank = ShardCount(plan, unit) == 1;
  const bool both_whole = flat && a != Arrangement::kShard && b != Arrangement::kShard;
  const bool as_flat = both_whole && from.role != kGradUnsharded && !IsParameterRole(from.role);
  if (as_flat && copy.kind != kGradCopyIn && Numbers(from) < Numbers(to)) {
    return fmt::format("only {} adds what is missing at the end", Name(kGradCopyIn));
  }
  const bool in_parts = from.role == kGradUnsharded && from.parts_bytes.size() > 1;
  if (flat && in_parts && copy.kind != kGradCopyIn) {
    return fmt::format("only {} makes one piece of several", Name(kGradCopyIn));
  }
  // Sums over micro-batches are in the dtype of what is added.
  if (flat && to.role == kGradUnshardedAccumulated && from.dtype != to.dtype) {
    return fmt::format("{} is kept unsharded as {}", Name(from.dtype), Name(to.dtype));
  }
  const CommunicatorId cut =
      copy.kind == kReshardPostForward ? unit.post_forward_communicator : unit.shard_communicator;
  const bool of_others = copy.communicator >= 0 && !SameGroups(plan, copy.communicator, cut);
  if (of_others && (copy.kind == kReshardPostForward || !IsParameterRole(from.role))) {
    return fmt::format("communicator {} is not of the ranks that have the other pieces",
                       plan.communicators[copy.communicator].name);
  }
  const bool of_inner = IsInnerReduced(from.role);
  if (of_inner != IsInnerReduced(to.role)) {
    return fmt::format("only {} makes the one of the other", Name(kReduceScatter));
  }
  if (one_rank || both_whole || of_inner || (a == b && a != Arrangement::kSlots)) return {};
  const auto differ = [&] {
    return fmt::format("{} cannot become {}", a == Arrangement::kShard ? "a shard" : "what all ranks have",
                       b == Arrangement::kShard ? "a shard" : "it arranged otherwise");
  };
  if (is_view) return differ();
  const bool parameters = IsParameterRole(from.role) && IsParameterRole(to.role);
  if (a == Arrangement::kShard) {  // into this rank's slot
    const bool slot = parameters && (b == Arrangement::kSlots || flat);
    return slot && copy.kind != kCopyOut ? std::string() : differ();
  }
  if (b == Arrangement::kShard) {
    const bool kept = parameters && copy.kind == kReshardPostForward && a == Arrangement::kWhole;
    return kept ? std::string() : differ();
  }
  const bool out = parameters && a == Arrangement::kSlots && b == Arrangement::kWhole;
  const bool in = !parameters && a == Arrangement::kWhole && b == Arrangement::kSlots;
  return out || in ? std::string() : differ();
}

namespace {

// Buffers that a collective fills or reads rank by rank hold whole parameters.
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
  if (!HoldAlike(shard, all)) {
    return fmt::format("of {} and {} one holds parameters, the other one gradients", shard.name, all.name);
  }
  const bool first_level = IsInnerReduced(shard.role) && all.role == kReduceScatterInput;
  if (all.role != kOrderCheck && !first_level && ArrangementOf(shard.role) != Arrangement::kShard &&
      &shard != &all) {
    return fmt::format("{} holds no shard", shard.name);
  }
  if (ArrangementOf(all.role) == Arrangement::kWhole && !IsWholeInOrder(plan, all)) {
    return fmt::format("{} holds whole parameters, and not the pieces of one rank after the other", all.name);
  }
  if (ArrangementOf(all.role) == Arrangement::kShard) return fmt::format("{} is a shard", all.name);
  if (&shard != &all && shard.parameters != all.parameters &&
      ParametersOf(plan, shard) != ParametersOf(plan, all)) {
    return fmt::format("{} and {} hold different parameters", shard.name, all.name);
  }
  return {};
}

// In which dtype FSDP's own reductions add up; others (tensor parallelism's, the user's hook) as they find
// it.
std::string ReducedOtherwise(const Plan& plan, const Instruction& i, const Buffer& from) {
  if (from.unit < 0 || IsParameterRole(from.role) || ArrangementOf(from.role) == Arrangement::kNone)
    return {};
  const Unit& unit = plan.units[from.unit];
  const bool own = i.kind == kReduceScatter || SameGroups(plan, i.communicator, unit.shard_communicator) ||
                   SameGroups(plan, i.communicator, unit.replicate_communicator);
  const bool in_full_precision = unit.layout == LayoutKind::kFlat &&
                                 plan.strategy.fsdp1.full_precision_in_eval && from.dtype == unit.orig_dtype;
  const DType reduced = ReducedIn(plan, unit);
  if (!own || from.dtype == reduced || in_full_precision) return {};
  return fmt::format("{} is {}, and the unit reduces in {}", from.name, Name(from.dtype), Name(reduced));
}

}  // namespace

std::string LayoutOfCollective(const Plan& plan, const Instruction& i) {
  const Buffer& from = plan.buffers[i.src];
  const Buffer& to = plan.buffers[Has(DescriptionOf(i.kind).dst) ? i.dst : i.src];
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
  const bool gathers = DescriptionOf(i.kind).collective == CollectiveKind::kAllGather;
  if (std::string wrong = gathers ? std::string() : ReducedOtherwise(plan, i, from); !wrong.empty())
    return wrong;
  if (i.kind == kAllReduce || i.kind == kAllToAll) return {};  // of an all_to_all: exchanges.h
  const Buffer& shard = gathers ? from : to;
  const Buffer& all = gathers ? to : from;
  const std::int64_t all_bytes = all.parts_bytes[0].value;
  const bool fits = i.src == i.dst ? all_bytes % ranks == 0 : shard.parts_bytes[0].value * ranks == all_bytes;
  if (!fits) {
    return fmt::format("{} has {} bytes and {} has {}, on {} ranks", from.name, from.parts_bytes[0].value,
                       to.name, to.parts_bytes[0].value, ranks);
  }
  return i.exchange >= 0 ? std::string() : Arranged(plan, shard, all);  // of an exchange: exchanges.h
}

std::string LayoutOfReach(const Plan& plan, const Instruction& i, bool is_view) {
  const auto on_host = [&](BufferId id) { return IsOnHost(plan.buffers[id]); };
  const BufferId other = i.dst >= 0 ? i.dst : i.src;
  if (i.stream < 0 || is_view) return {};  // the host's own work: CheckOperands
  const bool to_host = i.kind == kCopyToHost;
  const bool to_device = i.kind == kCopyToDevice;
  // Alone, a rank copies an offloaded shard right to where it is computed with.
  const bool either = (i.kind == kCopyIn || i.kind == kCopyOut) && on_host(i.src);
  if (!either && i.src >= 0 && on_host(i.src) != to_device) {
    return fmt::format("{} is in memory of the {}", plan.buffers[i.src].name, to_device ? "device" : "host");
  }
  if (on_host(other) != to_host) {
    return fmt::format("{} is in memory of the {}", plan.buffers[other].name, to_host ? "device" : "host");
  }
  return {};
}

void CheckMovement(const Plan& plan, const Instruction& i, bool is_view, Position at, Reporter& reporter) {
  const InstructionFamily family = DescriptionOf(i.kind).family;
  const bool collective = family == InstructionFamily::kCollective;
  const bool copies = family == InstructionFamily::kCopy;
  if (!collective && !copies && family != InstructionFamily::kScale) return;
  std::string wrong = collective ? LayoutOfCollective(plan, i) : std::string();
  if (copies) {
    wrong = LayoutOfCopy(plan, i, is_view);
    if (!wrong.empty()) {
      wrong = fmt::format("{} and {}: {}", plan.buffers[i.src].name, plan.buffers[i.dst].name, wrong);
    }
  }
  if (wrong.empty()) wrong = LayoutOfReach(plan, i, is_view);
  if (wrong.empty()) return;
  reporter.Add(Rule::kLayout, at, i.src >= 0 ? i.src : i.dst,
               fmt::format("{}: {}", reporter.Instruction(at), wrong), {"at: " + reporter.Describe(at)});
}

}  // namespace shardplan::verifier
