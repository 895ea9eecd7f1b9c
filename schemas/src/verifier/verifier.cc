#include "shardplan/schemas/verifier.h"

#include <fmt/format.h>

#include <algorithm>

#include "verifier/verifier_collectives.h"
#include "verifier/verifier_interpreter.h"
#include "verifier/verifier_references.h"
#include "verifier/verifier_report.h"

namespace shardplan {
namespace {

bool Exists(const Plan& plan, verifier::Position at) {
  if (at.step < 0 || at.step >= std::ssize(plan.steps)) return false;
  const std::vector<Trigger>& triggers = plan.steps[at.step].triggers;
  if (at.trigger < 0 || at.trigger >= std::ssize(triggers)) return false;
  return at.instruction >= 0 && at.instruction < std::ssize(triggers[at.trigger].instructions);
}

}  // namespace

std::vector<Violation> Verify(const Plan& plan) {
  verifier::Reporter reporter(plan);
  if (!verifier::CheckTables(plan, reporter) || plan.steps.empty()) return reporter.Take();

  verifier::Interpreter interpreter(plan, reporter);
  const std::int32_t steps = static_cast<std::int32_t>(plan.steps.size());
  const std::int32_t steps_in_cycle = steps - plan.steady_step;
  for (std::int32_t step = 0; step < plan.steady_step; ++step) interpreter.RunStep(step);
  const verifier::Snapshot before = interpreter.TakeSnapshot();
  for (std::int32_t step = plan.steady_step; step < steps; ++step) interpreter.RunStep(step);
  // Round again, to see what the end of the cycle does to its beginning. Where the state differs already, a
  // second round would only repeat that in other words.
  if (interpreter.CheckCycle(before, steps_in_cycle)) {
    for (std::int32_t step = plan.steady_step; step < steps; ++step) interpreter.RunStep(step);
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
      violations.push_back({Rule::kReference,
                            -1,
                            -1,
                            -1,
                            fmt::format("rank {}: the plan is for {} ranks, but there are {}", rank,
                                        plan.world_size, plans_by_rank.size()),
                            {}});
      interpretable = false;
    }
    const auto same = std::find(plans_by_rank.begin(), plans_by_rank.begin() + rank, plan);
    if (same != plans_by_rank.begin() + rank) continue;
    all_equal = all_equal && rank == 0;
    for (Violation& v : Verify(plan)) {
      interpretable = interpretable && v.rule != Rule::kReference;
      v.message = fmt::format("rank {}: {}", rank, v.message);
      violations.push_back(std::move(v));
    }
  }
  // The same program on every rank meets itself in every collective.
  if (all_equal || !interpretable) return violations;
  const verifier::RankPrograms programs(plans_by_rank);
  std::vector<verifier::RankViolation> found = verifier::CompareOrders(programs);
  // What ranks in disagreement do is undefined; whether they hang is no question on top of that.
  if (found.empty()) found = verifier::FindDeadlock(programs);
  for (verifier::RankViolation& v : found) {
    v.violation.message = fmt::format("rank {}: {}", v.rank, v.violation.message);
    violations.push_back(std::move(v.violation));
  }
  return violations;
}

std::string Explain(const Plan& plan, const Violation& violation) {
  std::string text = fmt::format("{}: {}\n", Name(violation.rule), violation.message);
  const verifier::Position at = {violation.step, violation.trigger, violation.instruction};
  if (Exists(plan, at)) {
    const std::string where = verifier::Reporter(plan).Describe(at);
    const bool in_chain =
        std::ranges::any_of(violation.chain, [&](const std::string& link) { return link.ends_with(where); });
    if (!in_chain) text += fmt::format("  at: {}\n", where);
  }
  for (const std::string& link : violation.chain) text += fmt::format("  {}\n", link);
  return text;
}

}  // namespace shardplan
