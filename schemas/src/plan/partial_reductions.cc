// SPDX-License-Identifier: Apache-2.0
#include "plan/partial_reductions.h"

#include <algorithm>
#include <optional>
#include <ranges>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/program.h"

namespace shardplan::internal {
namespace {

using enum InstructionKind;

bool IsInPlan(const Plan& plan, BufferId buffer) { return buffer >= 0 && buffer < std::ssize(plan.buffers); }

bool IsAmong(const std::vector<BufferId>& buffers, BufferId buffer) {
  return buffer >= 0 && std::ranges::find(buffers, buffer) != buffers.end();
}

// The instructions of a trigger that bring gradients to `last`, in order: backwards from it, whatever fills
// what they read. Without what orders streams and what takes and frees memory; empty where not all of it
// begins in the trigger, with gradients as the model has just made them.
std::vector<Instruction> ChainTo(const Plan& plan, const Trigger& trigger, std::size_t last) {
  std::vector<BufferId> wanted = {trigger.instructions[last].src, trigger.instructions[last].dst};
  std::vector<BufferId> made;
  std::vector<Instruction> chain;
  for (std::size_t k = last + 1; k-- > 0;) {
    const Instruction& i = trigger.instructions[k];
    if (i.kind == kGradZero && IsAmong(wanted, i.dst)) return {};
    const bool orders = DescriptionOf(i.kind).family == InstructionFamily::kMemory || IsOrder(i.kind);
    if (orders || (!IsAmong(wanted, i.dst) && !(i.kind == kGradScale && IsAmong(wanted, i.src)))) continue;
    if (i.kind != kGradScale) made.push_back(i.dst);
    if (IsInPlan(plan, i.src) && !IsAmong(wanted, i.src)) wanted.push_back(i.src);
    chain.push_back(i);
  }
  std::ranges::reverse(chain);
  const BufferId target = trigger.instructions[last].dst;
  const bool begins = std::ranges::all_of(wanted, [&](BufferId buffer) {
    return buffer == target || IsAmong(made, buffer) ||
           plan.buffers[buffer].role == BufferRole::kGradUnsharded;
  });
  return begins ? chain : std::vector<Instruction>();
}

// On the compute stream, in memory of its own; nothing is left but `target`, which `is_new` or was there.
std::vector<Instruction> InOneStream(const Plan& plan, const std::vector<Instruction>& chain, BufferId target,
                                     bool is_new) {
  std::vector<BufferId> used;
  for (const Instruction& i : chain) {
    for (const BufferId buffer : {i.src, i.dst}) {
      if (IsInPlan(plan, buffer) && !IsAmong(used, buffer)) used.push_back(buffer);
    }
  }
  std::vector<Instruction> alone;
  for (const BufferId buffer : used) {
    const bool made_by_model = plan.buffers[buffer].role == BufferRole::kGradUnsharded;
    if (made_by_model || (buffer == target && !is_new)) continue;
    alone.push_back({.kind = kAllocate, .stream = 0, .dst = buffer});
  }
  for (const Instruction& i : chain) alone.emplace_back(i).stream = 0;
  for (const BufferId buffer : used) {
    if (buffer != target) alone.push_back({.kind = kFree, .stream = -1, .src = buffer});
  }
  return alone;
}

// The divisions of `partial` behind instruction `k` of trigger `t`, before anything else happens to it.
void AddDivisions(const PlanStep& step, std::size_t t, std::size_t k, BufferId partial,
                  std::vector<Instruction>& chain) {
  for (std::size_t begin = k + 1; t < step.triggers.size(); ++t, begin = 0) {
    for (const Instruction& i : step.triggers[t].instructions | std::views::drop(begin)) {
      if (i.src != partial && i.dst != partial) continue;
      if (i.kind != kGradScale) return;
      chain.push_back(i);
    }
  }
}

// The chain at the first place in the steps that fills `partial`, or adds to it.
std::vector<Instruction> ChainInSteps(const Plan& plan, BufferId partial, bool adds) {
  for (const PlanStep& step : plan.steps) {
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      const Trigger& trigger = step.triggers[t];
      for (std::size_t k = 0; k < trigger.instructions.size(); ++k) {
        const Instruction& i = trigger.instructions[k];
        const bool fills = i.kind == kReduceScatter || i.kind == kGradCopyIn;
        if (i.dst != partial || !IsInPlan(plan, i.src) || !(adds ? i.kind == kGradAccumulate : fills))
          continue;
        std::vector<Instruction> chain = ChainTo(plan, trigger, k);
        if (chain.empty()) continue;
        AddDivisions(step, t, k, partial, chain);
        return InOneStream(plan, chain, partial, !adds);
      }
    }
  }
  return {};
}

}  // namespace

std::vector<PartialReduction> PartialReductionsOf(const Plan& plan) {
  std::vector<PartialReduction> reductions;
  for (const Procedure& procedure : plan.procedures) {
    if (procedure.kind != ProcedureKind::kReducePartial) continue;
    const auto found = std::ranges::find_if(procedure.instructions, [&](const Instruction& i) {
      return IsInPlan(plan, i.src) && IsPartlyReduced(plan.buffers[i.src].role) &&
             plan.buffers[i.src].unit == procedure.unit;
    });
    if (found == procedure.instructions.end()) continue;
    PartialReduction reduction{.partial = found->src,
                               .parameters = ParametersOf(plan, plan.buffers[found->src]),
                               .first = ChainInSteps(plan, found->src, false),
                               .again = ChainInSteps(plan, found->src, true)};
    if (!reduction.first.empty()) reductions.push_back(std::move(reduction));
  }
  return reductions;
}

}  // namespace shardplan::internal
