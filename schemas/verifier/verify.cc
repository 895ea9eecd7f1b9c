// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "shardplan/schemas/assert.h"
#include "shardplan/verifier/verifier.h"
#include "verifier/collectives.h"
#include "verifier/interpreter.h"
#include "verifier/model_collectives.h"
#include "verifier/procedures.h"
#include "verifier/references.h"
#include "verifier/tables.h"
#include "verifier/words/rank_words.h"
#include "verifier/words/report.h"

namespace shardplan {

namespace {

std::vector<Violation> VerifySteps(const Plan& plan) {
  verifier::Reporter reporter(plan);
  const bool interpretable = verifier::CheckTables(plan, reporter);
  SHARDPLAN_ASSERT(interpretable != reporter.HasViolations(), "what cannot be interpreted is reported");
  if (!interpretable || plan.steps.empty()) return reporter.Take();

  verifier::Interpreter interpreter(plan, reporter);
  const std::int32_t steps = static_cast<std::int32_t>(plan.steps.size());
  const std::int32_t steps_in_cycle = steps - plan.steady_step;
  for (std::int32_t step = 0; step < plan.steady_step; ++step) interpreter.RunStep(step);
  const verifier::Snapshot before = interpreter.TakeSnapshot();
  for (std::int32_t step = plan.steady_step; step < steps; ++step) interpreter.RunStep(step);
  // Round again, to see what the end of the cycle does to its beginning. A difference between the first steps
  // and the cycle is no mistake if the cycle goes on from its own end for ever.
  const std::size_t known = reporter.Count();
  const bool closes = interpreter.CheckCycle(before, steps_in_cycle);
  SHARDPLAN_ASSERT(closes == (reporter.Count() == known), "a cycle that does not close is reported");
  const std::size_t told = reporter.Count();
  const verifier::Snapshot again = interpreter.TakeSnapshot();
  for (std::int32_t step = plan.steady_step; step < steps; ++step) interpreter.RunStep(step);
  if (closes) return reporter.Take();
  const bool leaves_over = interpreter.LeavesOver();
  const bool goes_on =
      !leaves_over && reporter.Count() == told && interpreter.CheckCycle(again, steps_in_cycle);
  // In other words, a second round only repeats what is wrong.
  reporter.Forget(goes_on ? known : told);
  return reporter.Take();
}

}  // namespace

std::vector<Violation> Verify(const Plan& plan) {
  std::vector<Violation> violations = VerifySteps(plan);
  const bool interpretable = std::ranges::none_of(
      violations, [](const Violation& violation) { return violation.rule == Rule::kReference; });
  if (!interpretable) return violations;  // procedures work with the same tables
  verifier::Reporter tables(plan);
  verifier::CheckStrategy(plan, tables);
  verifier::CheckProgramTables(plan, tables);
  verifier::CheckTriggers(plan, tables);
  verifier::CheckModelCollectives(plan, tables);
  const std::vector<Violation> of_tables = tables.Take();
  violations.insert(violations.begin(), of_tables.begin(), of_tables.end());
  std::ranges::stable_sort(violations, {}, [](const Violation& violation) {
    return std::tuple(violation.step, violation.trigger, violation.instruction);
  });
  for (Violation& violation : verifier::ViolationsOfProcedures(plan, VerifySteps)) {
    violations.push_back(std::move(violation));
  }
  return violations;
}

std::vector<Violation> VerifyReferences(const Plan& plan) {
  verifier::Reporter reporter(plan);
  if (!verifier::CheckTables(plan, reporter)) return reporter.Take();
  const auto check = [&](const InstructionList& instructions, verifier::Position at) {
    for (at.instruction = 0; at.instruction < std::ssize(instructions); ++at.instruction) {
      verifier::CheckInstruction(plan, instructions[at.instruction], at, reporter);
    }
  };
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    const std::vector<Trigger>& triggers = plan.steps[s].triggers;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      check(triggers[t].instructions,
            {.step = static_cast<std::int32_t>(s), .trigger = static_cast<std::int32_t>(t)});
    }
  }
  return reporter.Take();
}

std::vector<Violation> VerifyRanks(const std::vector<Plan>& plans_by_rank) {
  std::vector<Violation> violations;
  bool interpretable = true;
  bool all_equal = true;
  for (std::size_t rank = 0; rank < plans_by_rank.size(); ++rank) {
    const Plan& plan = plans_by_rank[rank];
    if (plan.world_size != std::ssize(plans_by_rank)) {
      violations.push_back(verifier::OtherWorldSize(plans_by_rank, rank));
      interpretable = false;
    }
    const auto same = std::find(plans_by_rank.begin(), plans_by_rank.begin() + rank, plan);
    if (same != plans_by_rank.begin() + rank) continue;
    all_equal = all_equal && rank == 0;
    for (Violation& v : Verify(plan)) {
      interpretable = interpretable && v.rule != Rule::kReference;
      v.rank = static_cast<std::int32_t>(rank);
      v.message = fmt::format("rank {}: {}", rank, v.message);
      violations.push_back(std::move(v));
    }
  }
  // The same program on every rank meets itself in every collective.
  if (all_equal || !interpretable) return violations;
  const verifier::RankPrograms programs(plans_by_rank);
  const std::vector<verifier::OrderFault> faults = verifier::CollectiveOrder(programs);
  for (const verifier::OrderFault& fault : faults) {
    violations.push_back(verifier::DifferentCollective(programs, fault));
  }
  // The behaviour of ranks in disagreement is undefined; whether they hang is no question on top of that.
  if (!faults.empty()) return violations;
  const std::vector<verifier::WaitLink> circle = verifier::DeadlockOfRanks(programs);
  if (!circle.empty()) violations.push_back(verifier::CircleOfWaits(programs, circle));
  return violations;
}

}  // namespace shardplan
