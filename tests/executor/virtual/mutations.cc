// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/mutations.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include "shardplan/schemas/plan_text.h"
#include "shardplan/verifier/verifier.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/effects.h"
#include "tests/executor/virtual/leftovers.h"

namespace shardplan::test {
namespace {

using PlaceInStep = std::pair<std::size_t, std::size_t>;  // trigger, instruction

bool IsCollective(InstructionKind kind) {
  return kind == InstructionKind::kAllGather || kind == InstructionKind::kReduceScatter ||
         kind == InstructionKind::kAllReduce;
}

void Erase(std::vector<Instruction>& instructions, std::size_t at) {
  instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(at));
}

// The rules that are broken, and how often: what the plan itself breaks does not count.
std::map<Rule, int> Broken(const std::vector<Violation>& violations) {
  std::map<Rule, int> broken;
  for (const Violation& violation : violations) ++broken[violation.rule];
  return broken;
}

bool IsAboutTheDocument(Rule rule) {
  return rule == Rule::kReference || rule == Rule::kLayout || rule == Rule::kTables;
}

// The plan without the tensors of the model, which the virtual machine does not have.
Plan WithoutTensors(Plan plan) {
  for (Segment& segment : plan.segments) {
    std::erase_if(segment.entries,
                  [](const SegmentEntry& entry) { return !std::holds_alternative<OperatorEvent>(entry); });
    for (SegmentEntry& entry : segment.entries) {
      std::get<OperatorEvent>(entry).reads.clear();
      std::get<OperatorEvent>(entry).writes.clear();
    }
  }
  return plan;
}

std::optional<Violation> FirstNew(const std::vector<Violation>& before, const std::vector<Violation>& after) {
  // A contradiction in the document has consequences that say less.
  std::map<Rule, int> known = Broken(before);
  std::optional<Violation> first;
  for (const Violation& violation : after) {
    if (--known[violation.rule] >= 0) continue;
    if (IsAboutTheDocument(violation.rule)) return violation;
    if (!first) first = violation;
  }
  return first;
}

// A wider dtype on the way of a parameter, or of a sum, rounds nothing away.
bool PassesOn(const Plan& plan, const Buffer& before, DType now) {
  using enum BufferRole;
  const bool on_its_way = before.role == kAllGatherInput || before.role == kAllGatherOutput ||
                          before.role == kParamPostForwardShard;
  // Parameters may be rounded before to the dtype that they are rounded to in the end.
  if (on_its_way && now == plan.units[before.unit].param_dtype) return true;
  const bool is_wider = now == DType::kFloat64 || (now == DType::kFloat32 && before.dtype != DType::kFloat64);
  return (on_its_way || before.role == kGradUnshardedAccumulated) && is_wider;
}

// Small integers are exact in every dtype. A buffer that numbers pass through on their way rounds them by its
// dtype, which the runs do not see.
std::string RoundedOtherwise(const Plan& plan, const Plan& mutated) {
  for (std::size_t b = 0; b < plan.buffers.size() && b < mutated.buffers.size(); ++b) {
    const Buffer& before = plan.buffers[b];
    const Buffer& after = mutated.buffers[b];
    if (before.dtype == after.dtype || before.unit < 0 || PassesOn(plan, before, after.dtype) ||
        before.role == BufferRole::kOptimizerState || before.role == BufferRole::kOptimizerTemp) {
      continue;
    }
    for (const PlanStep& step : plan.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& i : trigger.instructions) {
          const bool moves = i.kind != InstructionKind::kFree && i.kind != InstructionKind::kAllocate;
          const auto id = static_cast<BufferId>(b);
          if (moves && (i.src == id || i.dst == id)) return after.name + " rounds to another dtype";
        }
      }
    }
  }
  return {};
}

}  // namespace

std::string_view Name(MutationKind kind) {
  static constexpr std::string_view kNames[kMutationKinds] = {
      "removed wait",           "removed record",   "removed host_wait",  "free at the trigger's beginning",
      "free a trigger earlier", "forgotten stream", "swapped collectives"};
  return kNames[static_cast<int>(kind)];
}

std::vector<Mutation> MutationsOf(const Plan& plan) {
  std::vector<Mutation> mutations;
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    const std::vector<Trigger>& triggers = plan.steps[s].triggers;
    std::map<CommunicatorId, PlaceInStep> last;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      const std::vector<Instruction>& instructions = triggers[t].instructions;
      for (std::size_t i = 0; i < instructions.size(); ++i) {
        using enum InstructionKind;
        const auto add = [&](MutationKind kind) { mutations.push_back({kind, s, t, i}); };
        const Instruction& instruction = instructions[i];
        if (instruction.kind == kWait) add(MutationKind::kRemovedWait);
        if (instruction.kind == kRecord) add(MutationKind::kRemovedRecord);
        if (instruction.kind == kHostWait) add(MutationKind::kRemovedHostWait);
        if (instruction.kind == kFree) {
          if (i > 0) add(MutationKind::kEarlyFree);
          if (t > 0) add(MutationKind::kEarlierFree);
          if (!instruction.safe_after.empty()) add(MutationKind::kForgottenStream);
        }
        if (!IsCollective(instruction.kind)) continue;
        const auto before = last.find(instruction.communicator);
        const auto same = [&](const PlaceInStep& place) {
          const Instruction& other = triggers[place.first].instructions[place.second];
          return other.kind == instruction.kind && other.src == instruction.src &&
                 other.dst == instruction.dst;
        };
        if (before != last.end() && !same(before->second)) {
          mutations.push_back(
              {MutationKind::kSwappedCollectives, s, before->second.first, before->second.second, t, i});
        }
        last[instruction.communicator] = {t, i};
      }
    }
  }
  return mutations;
}

Plan Mutated(const Plan& plan, const Mutation& m) {
  Plan mutated = plan;
  std::vector<Trigger>& triggers = mutated.steps[m.step].triggers;
  std::vector<Instruction>& instructions = triggers[m.trigger].instructions.Edit();
  const Instruction instruction = instructions[m.instruction];
  switch (m.kind) {
    case MutationKind::kRemovedWait:
    case MutationKind::kRemovedRecord:
    case MutationKind::kRemovedHostWait:
      Erase(instructions, m.instruction);
      break;
    case MutationKind::kEarlyFree:
      Erase(instructions, m.instruction);
      instructions.insert(instructions.begin(), instruction);
      break;
    case MutationKind::kEarlierFree:
      Erase(instructions, m.instruction);
      triggers[m.trigger - 1].instructions.Edit().push_back(instruction);
      break;
    case MutationKind::kForgottenStream:
      instructions[m.instruction].safe_after.clear();
      break;
    case MutationKind::kSwappedCollectives:
      std::swap(instructions[m.instruction],
                triggers[m.other_trigger].instructions.Edit()[m.other_instruction]);
      break;
  }
  return mutated;
}

std::string Describe(const Plan& plan, const Mutation& m) {
  const Trigger& trigger = plan.steps[m.step].triggers[m.trigger];
  return fmt::format("step {}, {}: {} ({})", plan.steps[m.step].name, Describe(plan, trigger),
                     Describe(plan, trigger, trigger.instructions[m.instruction]), Name(m.kind));
}

PlanJudge::PlanJudge(const Plan& plan, ExpectedValues& expected, std::set<std::string> stale,
                     std::uint64_t seeds_to_find, std::uint64_t seeds_to_trust)
    : plan_(plan),
      expected_(expected),
      stale_(std::move(stale)),
      seeds_to_find_(seeds_to_find),
      seeds_to_trust_(seeds_to_trust),
      before_(Verify(plan)) {}

// The verifier's objection to the version (of the last rank alone) that it did not have before.
std::optional<Violation> PlanJudge::Objection(const Plan& version, bool on_last_rank) const {
  if (!on_last_rank) return FirstNew(before_, Verify(version));
  std::vector<Plan> ranks(static_cast<std::size_t>(plan_.world_size), plan_);
  const std::vector<Violation> before = VerifyRanks(ranks);
  ranks.back() = version;
  return FirstNew(before, VerifyRanks(ranks));
}

std::string PlanJudge::Run(const Plan& version, bool on_last_rank, std::uint64_t seeds,
                           std::uint64_t& tried) const {
  std::string wrong = RoundedOtherwise(plan_, version);
  while (tried < seeds && wrong.empty()) {
    const std::uint64_t seed = ++tried;
    const Findings findings =
        on_last_rank ? RunChecked(plan_, expected_, seed, &version) : RunChecked(version, expected_, seed);
    wrong = findings.failure;
    for (const std::string& unit : findings.stale) {
      if (wrong.empty() && !stale_.contains(unit)) wrong = "reads stale parameters of " + unit;
    }
  }
  return wrong;
}

Judgement PlanJudge::JudgeVersion(const Plan& version, bool on_last_rank, std::uint64_t seeds_to_find) const {
  Judgement judgement;
  const std::optional<Violation> objection = Objection(version, on_last_rank);
  if (objection) judgement.verifier = objection->message;
  const bool objects = objection.has_value();
  const bool of_document = objects && IsAboutTheDocument(objection->rule);
  const std::uint64_t to_find = of_document ? std::min<std::uint64_t>(seeds_to_find, 20) : seeds_to_find;
  judgement.run = Run(version, on_last_rank, objects ? to_find : seeds_to_trust_, judgement.seeds);
  const bool wrong = !judgement.run.empty();
  judgement.verdict = objects ? (wrong ? Verdict::kCaught : Verdict::kMissedByVirtual)
                              : (wrong ? Verdict::kMissedByVerifier : Verdict::kHarmless);
  if (judgement.verdict != Verdict::kMissedByVirtual) return judgement;
  const auto of_tensors = [&] {
    return !on_last_rank && !FirstNew(Verify(WithoutTensors(plan_)), Verify(WithoutTensors(version)));
  };
  if (of_document || of_tensors()) {
    judgement.verdict = Verdict::kMisstated;
    return judgement;
  }
  if (!on_last_rank && LeftOver(version) != LeftOver(plan_)) {
    judgement.verdict = Verdict::kLeft;
    return judgement;
  }
  // Work that nobody reads may still be written over what is somebody else's by then.
  const bool unread_moves = objection->rule != Rule::kFreeBeforeLastUse;
  const Plan without = WithoutIdleWork(plan_, unread_moves);
  const PlanJudge idle(without, expected_, stale_, 0, 0);
  if (!idle.Objection(WithoutIdleWork(version, unread_moves), on_last_rank)) {
    judgement.verdict = Verdict::kIdle;
  }
  return judgement;
}

Judgement PlanJudge::Judge(const Mutation& mutation) const {
  const bool on_last_rank = mutation.kind == MutationKind::kSwappedCollectives;
  return JudgeVersion(Mutated(plan_, mutation), on_last_rank, seeds_to_find_);
}

Judgement PlanJudge::Judge(const FieldMutation& mutation) const {
  // A mutation with a known answer needs few runs.
  const std::uint64_t seeds =
      mutation.repeats || mutation.restates ? std::min<std::uint64_t>(seeds_to_find_, 20) : seeds_to_find_;
  Judgement judgement = JudgeVersion(mutation.plan, false, seeds);
  if (judgement.verdict != Verdict::kMissedByVirtual) return judgement;
  if (mutation.repeats) judgement.verdict = Verdict::kIdle;
  if (mutation.restates) judgement.verdict = Verdict::kMisstated;
  return judgement;
}

}  // namespace shardplan::test
