// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "names/enum_names.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/io.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan {
namespace {

// The faults of PyTorch that the policies know: the whole list. A rule that is not named here is never
// excused.
struct FaultKind {
  PyTorchFault fault;
  std::string_view policy;
  std::array<std::string_view, 2> rules;
  std::string_view why;
};

constexpr std::array kFaultKinds = std::to_array<FaultKind>({
    {PyTorchFault::kFsdp1OffloadedGradientReplaced,
     "fsdp1",
     {"grad_not_reduced", "steady_state"},
     "FSDP1 does not add to a gradient that it has offloaded: only no_sync() accumulates"},
    {PyTorchFault::kFsdp1ReplicasNotAdded,
     "fsdp1",
     {"grad_division", "grad_not_reduced"},
     "FSDP1's hybrid sharding over one rank takes that rank for all: it divides by the number of replicas, "
     "but does not add them up"},
    {PyTorchFault::kFsdp1NotGatheredAgain,
     "fsdp1",
     {"use_before_unshard", "steady_state"},
     "FSDP1 gathers for the first backward only of forwards that ran before it"},
    {PyTorchFault::kFsdp1LostGradient,
     "fsdp1",
     {"grad_not_reduced"},
     "FSDP1 forgets the gradient of a unit whose backward begins and brings nothing more"},
    {PyTorchFault::kFsdp1MissedHook,
     "fsdp1",
     {"grad_not_reduced"},
     "FSDP1 reduces once for several forwards: what a later backward brings stays as it is"},
    {PyTorchFault::kFsdp1MixedWithReduced,
     "fsdp1",
     {"grad_not_reduced"},
     "FSDP1 without sharding has one gradient: what no_sync accumulates is added to what is reduced already"},
    {PyTorchFault::kFsdp1DroppedUnreduced,
     "fsdp1",
     {"grad_not_reduced"},
     "the program zeroes gradients that no backward has reduced"},
    {PyTorchFault::kFsdp1KeptUnused,
     "fsdp1",
     {"leak"},
     "FSDP1 frees what it keeps after a forward in the unit's backward only, and an optimizer keeps its "
     "state: what no step that repeats uses stays"},
    {PyTorchFault::kFsdp1GradientsGrow,
     "fsdp1",
     {"steady_state"},
     "the step that repeats does not zero the gradients: they grow"},
    {PyTorchFault::kFsdp2NoUnshardInBackward,
     "fsdp2",
     {"use_before_unshard"},
     "set_unshard_in_backward(False) on a unit whose backward does read its parameters: PyTorch fails there, "
     "their storage is freed"},
    {PyTorchFault::kFsdp2PrefetchedByOtherRoot,
     "fsdp2",
     {"read_before_write"},
     "a unit of another root is prefetched on that root's streams, which wait for the optimizer only in its "
     "own pre-forward"},
    {PyTorchFault::kFsdp2DividedTwice,
     "fsdp2",
     {"grad_division"},
     "on one shard rank foreach_reduce divides by the gradient divide factor while it copies, and again "
     "where "
     "reductions are sums"},
    {PyTorchFault::kFsdp2HookInputFreed,
     "fsdp2",
     {"free_before_last_use"},
     "foreach_reduce drops a reduce-scatter's output that an all-reduce hook's stream still reads, to cast "
     "it "
     "or to add it to an earlier gradient: the next reduce-scatter may get its memory"},
    {PyTorchFault::kFsdp2GroupNotUnsharded,
     "fsdp2",
     {"use_before_unshard"},
     "a module of a group has not run in its last forward, and before the last backward nothing makes the "
     "group's hooks forget it: PyTorch does not unshard the group in the next forward, and fails"},
    {PyTorchFault::kFsdp2GradientsGrow,
     "fsdp2",
     {"steady_state", "leak"},
     "the step that repeats does not zero the gradients: they grow"},
    {PyTorchFault::kFsdp2PartialSumLeft,
     "fsdp2",
     {"grad_not_reduced", "steady_state"},
     "a unit that the micro-batch with the all-reduce does not use keeps its sum over the shards: the next "
     "step "
     "all-reduces it"},
    {PyTorchFault::kFsdp2Outdated,
     "fsdp2",
     {"wrong_value"},
     "a unit is gathered, or kept in the smaller mesh's pieces by a forward without a backward, when the "
     "optimizer steps: the next forward takes those parameters of before the step"},
});

const FaultKind& KindOf(PyTorchFault fault) {
  const auto* kind = std::ranges::find(kFaultKinds, fault, &FaultKind::fault);
  SHARDPLAN_ASSERT(kind != kFaultKinds.end(), "every fault has a line in the list");
  return *kind;
}

const Instruction* InstructionAt(const Plan& plan, const Violation& violation) {
  const auto in = [](std::int32_t index, const auto& list) { return index >= 0 && index < std::ssize(list); };
  if (in(violation.procedure, plan.procedures)) {
    const std::vector<Instruction>& instructions = plan.procedures[violation.procedure].instructions;
    return in(violation.instruction, instructions) ? &instructions[violation.instruction] : nullptr;
  }
  if (!in(violation.step, plan.steps)) return nullptr;
  const PlanStep& step = plan.steps[violation.step];
  if (!in(violation.trigger, step.triggers)) return nullptr;
  const std::vector<Instruction>& instructions = step.triggers[violation.trigger].instructions;
  return in(violation.instruction, instructions) ? &instructions[violation.instruction] : nullptr;
}

// The unit that the instruction works on, by its buffers where it names none.
std::string UnitAt(const Plan& plan, const Violation& violation) {
  const Instruction* instruction = InstructionAt(plan, violation);
  if (instruction == nullptr) return {};
  UnitId unit = instruction->unit;
  for (const BufferId buffer : {instruction->dst, instruction->src}) {
    if (unit < 0 && buffer >= 0 && buffer < std::ssize(plan.buffers)) unit = plan.buffers[buffer].unit;
  }
  return unit >= 0 && unit < std::ssize(plan.units) ? DisplayName(plan.units[unit].fqn) : std::string();
}

KnownFault AsCarried(const Plan& plan, const FoundFault& found) {
  const Violation& violation = found.violation;
  return {.fault = found.fault,
          .rule = std::string(Name(violation.rule)),
          .step = violation.step,
          .trigger = violation.trigger,
          .instruction = violation.instruction,
          .procedure = violation.procedure,
          .unit = UnitAt(plan, violation)};
}

std::string PointerTo(const Plan& plan, const Violation& violation) {
  if (InstructionAt(plan, violation) == nullptr) return {};
  if (violation.procedure >= 0) {
    return fmt::format("/procedures/{}/instructions/{}", violation.procedure, violation.instruction);
  }
  return fmt::format("/steps/{}/triggers/{}/instructions/{}", violation.step, violation.trigger,
                     violation.instruction);
}

Error Refusal(const Plan& plan, const Judgement& judgement, std::string_view way_out) {
  const std::size_t count = judgement.violations.size();
  std::string message;
  Error error{.code = ErrorCode::kNegative};
  if (count > 0) {
    message = fmt::format("the plan does not verify ({} violation{}, `shardplan validate` lists them): {}",
                          count, count == 1 ? "" : "s", Explain(plan, judgement.violations.front()));
    error.pointer = PointerTo(plan, judgement.violations.front());
  }
  if (!judgement.distrust.empty()) {
    message += (count > 0 ? "and " : "") + judgement.distrust + "\n";
    if (count == 0) error.pointer = "/known_faults";
  }
  error.message = fmt::format("{}plan it again; {}", message, way_out);
  return error;
}

}  // namespace

std::string_view Name(PyTorchFault fault) { return EnumName(fault); }
std::string_view Why(PyTorchFault fault) { return KindOf(fault).why; }

bool Explains(PyTorchFault fault, Rule rule, std::string_view policy) {
  const FaultKind& kind = KindOf(fault);
  return kind.policy == policy && std::ranges::find(kind.rules, Name(rule)) != kind.rules.end();
}

std::vector<std::string> Explain(const Plan& plan, const std::vector<FoundFault>& found) {
  std::vector<std::string> paragraphs;
  for (const FaultKind& kind : kFaultKinds) {
    const auto first = std::ranges::find(found, kind.fault, &FoundFault::fault);
    if (first == found.end()) continue;
    const auto count = std::ranges::count(found, kind.fault, &FoundFault::fault);
    const std::string times = count == 1 ? "" : fmt::format(" ({} violations, the first:)", count);
    paragraphs.push_back(fmt::format("{}{}\n{}", kind.why, times, Explain(plan, first->violation)));
  }
  return paragraphs;
}

std::string ProgramDigest(const Plan& plan) {
  Plan program = plan;
  program.known_faults.clear();
  program.digests.program.clear();
  return DigestOfJson(program, MicrobatchText::kAll);  // as versions that know no repetitions have it
}

Result<std::vector<FoundFault>> CarryFaults(Plan& plan, const std::vector<PyTorchFault>& possible) {
  std::vector<FoundFault> found;
  for (Violation& violation : Verify(plan)) {
    const auto fault = std::ranges::find_if(
        possible, [&](PyTorchFault candidate) { return Explains(candidate, violation.rule, plan.policy); });
    if (fault == possible.end()) {
      return MakeError(ErrorCode::kInternal, Explain(plan, violation));
    }
    found.push_back({*fault, std::move(violation)});
  }
  plan.known_faults.clear();
  plan.digests.program.clear();
  for (const FoundFault& fault : found) plan.known_faults.push_back(AsCarried(plan, fault));
  if (!found.empty()) plan.digests.program = ProgramDigest(plan);
  return found;
}

Judgement Judge(const Plan& plan) {
  Judgement judgement;
  std::vector<KnownFault> carried = plan.known_faults;
  if (!carried.empty() && plan.digests.program != ProgramDigest(plan)) {
    judgement.distrust =
        "the plan was changed since it was made, and carries faults of PyTorch's: which of what is wrong in "
        "it "
        "is PyTorch's cannot be told any longer";
    carried.clear();
  }
  for (Violation& violation : Verify(plan)) {
    const auto same = std::ranges::find_if(carried, [&](const KnownFault& fault) {
      return Explains(fault.fault, violation.rule, plan.policy) &&
             AsCarried(plan, {fault.fault, violation}) == fault;
    });
    if (same == carried.end()) {
      judgement.violations.push_back(std::move(violation));
    } else {
      judgement.carried.push_back({same->fault, std::move(violation)});
      carried.erase(same);
    }
  }
  if (!carried.empty()) {
    judgement.distrust = fmt::format(
        "the plan carries a fault of PyTorch's ({}, rule {}) that is not in it: another version of shardplan "
        "made it",
        Name(carried.front().fault), carried.front().rule);
  }
  return judgement;
}

Result<std::vector<std::string>> CheckForUse(const Plan& plan, std::string_view way_out) {
  const Judgement judgement = Judge(plan);
  if (!judgement.good()) return std::unexpected(Refusal(plan, judgement, way_out));
  return Explain(plan, judgement.carried);
}

}  // namespace shardplan
