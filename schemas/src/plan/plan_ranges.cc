// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/plan_ranges.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "shardplan/schemas/instruction_set.h"

namespace shardplan {
namespace {

// FSDP2's spelling of a parameter group's modules.
std::string ModulesText(const Unit& unit) { return fmt::format("{}", fmt::join(unit.modules, ", ")); }

// FSDPParamGroup._with_fqn: nothing behind the label of the root.
std::string WithFqn(std::string_view label, const std::string& modules, const std::string& group) {
  return modules.empty() ? fmt::format("{}{}", label, group)
                         : fmt::format("{} ({}){}", label, modules, group);
}

// " [pg=4]" where the modules have several parameter groups.
std::string GroupText(const Plan& plan, const Unit& unit) {
  const auto same = [&](const Unit& other) { return other.modules == unit.modules; };
  if (unit.shard_communicator < 0 || std::ranges::count_if(plan.units, same) < 2) return {};
  return fmt::format(" [pg={}]", plan.communicators[unit.shard_communicator].size);
}

bool StartsWith(const SharedText& text, std::string_view prefix) { return text.str().starts_with(prefix); }

}  // namespace

void PlanRanges::EnterTrigger(TriggerKind kind, UnitId unit, bool outermost) {
  Begin(kind, unit);
  const Range range = outermost && kind == TriggerKind::kPreForward ? Range::kRootPreForward : RangeOf(kind);
  if (kind == TriggerKind::kPostBackward) not_reduced_ = unit;
  Set(kind == TriggerKind::kPostBackward ? kOfInstructions : kOfTrigger, range, unit);
}

void PlanRanges::EnterProcedure(ProcedureKind kind, UnitId unit) {
  const bool gathers = kind == ProcedureKind::kUnshard || kind == ProcedureKind::kUnshardFullPrecision;
  Begin(gathers ? TriggerKind::kUserCall : TriggerKind::kPostBackward, unit);
  Set(kOfTrigger, Range::kOnDemand, unit);
}

void PlanRanges::Begin(TriggerKind kind, UnitId unit) {
  if (names_.empty()) MakeNames();
  trigger_ = kind;
  unit_ = unit;
  not_reduced_ = -1;
}

void PlanRanges::MakeNames() {
  const auto make = [this](const std::string& modules, const std::string& group) {
    std::array<std::string, kRanges>& names = names_.emplace_back();
    const auto name = [&](Range range) -> std::string& { return names[static_cast<std::size_t>(range)]; };
    name(Range::kRootPreForward) = "FSDP::root_pre_forward";
    name(Range::kBackwardEnd) = "FSDP::root_post_backward_callback";
    name(Range::kPreForward) = WithFqn("FSDP::pre_forward", modules, group);
    name(Range::kPostForward) = WithFqn("FSDP::post_forward", modules, group);
    name(Range::kPreBackward) = WithFqn("FSDP::pre_backward", modules, group);
    name(Range::kAllGather) = WithFqn("FSDP::all_gather", modules, group);
    name(Range::kCopyOut) = WithFqn("FSDP::all_gather_copy_out", modules, group);
    name(Range::kReshard) = WithFqn("FSDP::post_backward_reshard", modules, group);
    name(Range::kReduce) = WithFqn("FSDP::post_backward_reduce", modules, group);
    name(Range::kReduceScatterWait) = fmt::format("FSDP::post_backward_rs_wait ({})", modules);
    name(Range::kForwardPrefetch) = "FSDP::forward_prefetch for " + modules;
    name(Range::kBackwardPrefetch) = "FSDP::backward_prefetch for " + modules;
    name(Range::kUserCall) = WithFqn("shardplan::user_call", modules, group);
    name(Range::kOnDemand) = WithFqn("shardplan::on_demand", modules, group);
    name(Range::kLazyInit) = "shardplan::lazy_init";
  };
  for (const Unit& unit : plan_.units) make(ModulesText(unit), GroupText(plan_, unit));
  make("", "");
}

const std::string& PlanRanges::NameOf(Range range, UnitId unit) const {
  const auto& names = unit < 0 ? names_.back() : names_[static_cast<std::size_t>(unit)];
  return names[static_cast<std::size_t>(range)];
}

void PlanRanges::Close(std::size_t level) {
  for (std::size_t inner = kLevels; inner-- > level;) {
    if (open_[inner].range != Range::kNone) Closed(inner);
    open_[inner].range = Range::kNone;
  }
}

void PlanRanges::Set(Level level, Range range, UnitId unit) {
  Open& open = open_[level];
  if (open.range == range && open.unit == unit) return;
  Close(level);
  if (range == Range::kNone) return;
  open.range = range;
  open.unit = unit;
  Opened(level, NameOf(range, unit));
}

// A trigger at which the user's own code runs, or nothing, is no range.
PlanRanges::Range PlanRanges::RangeOf(TriggerKind kind) {
  switch (kind) {
    case TriggerKind::kPreForward:
      return Range::kPreForward;
    case TriggerKind::kPostForward:
      return Range::kPostForward;
    case TriggerKind::kPreBackward:
      return Range::kPreBackward;
    case TriggerKind::kPostBackward:
      return Range::kReshard;
    case TriggerKind::kBackwardEnd:
      return Range::kBackwardEnd;
    case TriggerKind::kLazyInit:
      return Range::kLazyInit;
    case TriggerKind::kUserCall:  // setters have no instruction: the range begins with the first
    case TriggerKind::kStepBegin:
    case TriggerKind::kOptimizerStep:
    case TriggerKind::kZeroGrad:
    case TriggerKind::kStepEnd:
      return Range::kNone;
  }
  return Range::kNone;
}

PlanRanges::Range PlanRanges::RangeOfMemory(BufferId buffer, bool allocates) const {
  const Buffer& of = plan_.buffers[static_cast<std::size_t>(buffer)];
  switch (DescriptionOf(of.role).range) {
    case RoleRange::kNone:
      return Range::kNone;
    case RoleRange::kAllGather:
      return Range::kAllGather;
    case RoleRange::kGathered:
      return allocates ? Range::kAllGather : Range::kNone;
    case RoleRange::kUnsharded:
      if (!allocates) return InBackward() ? Range::kReshard : Range::kNone;
      return plan_.units[static_cast<std::size_t>(of.unit)].layout == LayoutKind::kFlat ? Range::kAllGather
                                                                                        : Range::kCopyOut;
    case RoleRange::kReduceScatter:
      if (allocates) return Range::kReduce;
      return not_reduced_ >= 0 ? Range::kReduceScatterWait : Range::kNone;
    case RoleRange::kReduce:
      return InBackward() ? Range::kReduce : Range::kNone;
  }
  return Range::kNone;
}

// The model's own copies between device and host are in no range.
bool PlanRanges::MovesActivation(const Instruction& instruction) const {
  const auto is_activation = [&](BufferId buffer) {
    return buffer >= 0 && IsActivation(plan_.buffers[static_cast<std::size_t>(buffer)].role);
  };
  return DescriptionOf(instruction.kind).value == ValueEffect::kMovesMemory &&
         (is_activation(instruction.src) || is_activation(instruction.dst));
}

PlanRanges::Range PlanRanges::RangeOf(const Instruction& instruction) const {
  if (MovesActivation(instruction)) return Range::kNone;
  switch (DescriptionOf(instruction.kind).range) {
    case InstructionRange::kNone:
      return Range::kNone;
    case InstructionRange::kOfRole: {
      const bool begins = DescriptionOf(instruction.kind).lifetime == LifetimeEffect::kBegins;
      return RangeOfMemory(begins ? instruction.dst : instruction.src, begins);
    }
    case InstructionRange::kAllGather:
      return Range::kAllGather;
    case InstructionRange::kCopyOut:
      return Range::kCopyOut;
    case InstructionRange::kReduce:
      return Range::kReduce;
    case InstructionRange::kReshard:
      return InBackward() ? Range::kReshard : Range::kNone;
  }
  return Range::kNone;
}

// Records and waits are in the range of what is around them.
void PlanRanges::EnterInstruction(const Instruction& instruction) {
  if (IsOrder(instruction.kind)) return;
  if (open_[kOfTrigger].range == Range::kRootPreForward) Set(kOfTrigger, Range::kPreForward, unit_);
  if (trigger_ == TriggerKind::kUserCall && open_[kOfTrigger].range == Range::kNone)
    Set(kOfTrigger, Range::kUserCall, unit_);
  const UnitId unit = instruction.unit >= 0 ? instruction.unit : unit_;
  const bool prefetches = StartsWith(instruction.reason, "prefetch_");
  const Range prefetch =
      StartsWith(instruction.reason, "prefetch_forward") ? Range::kForwardPrefetch : Range::kBackwardPrefetch;
  Set(kOfPrefetch, prefetches ? prefetch : Range::kNone, unit);
  const Range range = RangeOf(instruction);
  if (range == Range::kReshard) not_reduced_ = unit;
  Set(kOfInstructions, range, range == Range::kReduceScatterWait ? not_reduced_ : unit);
  if (range == Range::kReduce) not_reduced_ = -1;
}

}  // namespace shardplan
