// SPDX-License-Identifier: Apache-2.0
#include "verifier/procedures.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/program.h"
#include "verifier/tables.h"

namespace shardplan::verifier {
namespace {

std::string NameOf(const Plan& plan, const Procedure& procedure) {
  return fmt::format("{} of {}", Name(procedure.kind), DisplayName(plan.units[procedure.unit].fqn));
}

// A wait for an event that the procedure has not recorded itself.
std::vector<Violation> WaitsForOthers(const Plan& plan) {
  std::vector<Violation> violations;
  for (std::size_t p = 0; p < plan.procedures.size(); ++p) {
    const Procedure& procedure = plan.procedures[p];
    const std::int32_t k = WaitBeforeRecordInProcedure(procedure);
    if (k < 0) continue;
    Violation violation{.rule = Rule::kWaitBeforeRecord, .instruction = k, .message = {}, .chain = {}};
    violation.procedure = static_cast<std::int32_t>(p);
    violation.message =
        fmt::format("{} (on demand): {} waits for an event that this procedure has not recorded before",
                    NameOf(plan, procedure), Describe(plan, procedure.instructions[k]));
    violations.push_back(std::move(violation));
  }
  return violations;
}

// Index into Plan::procedures; -1: the violation is in none (a leak, say, that shows at the end of a step).
std::int32_t ProcedureOf(const OnDemandProgram& program, const Violation& violation) {
  if (violation.step < 0 || violation.trigger < 0) return -1;
  return program
      .procedures[static_cast<std::size_t>(violation.step)][static_cast<std::size_t>(violation.trigger)];
}

}  // namespace

std::vector<Violation> ViolationsOfProcedures(const Plan& plan,
                                              std::vector<Violation> (*verify)(const Plan&)) {
  if (plan.procedures.empty()) return {};
  for (std::size_t p = 0; p < plan.procedures.size(); ++p) {
    const UnitId unit = plan.procedures[p].unit;
    if (unit >= 0 && unit < std::ssize(plan.units)) continue;
    Violation violation;
    violation.procedure = static_cast<std::int32_t>(p);
    violation.message = fmt::format("a procedure is of unit {}, which does not exist", unit);
    return {violation};
  }
  const OnDemandProgram program = OnDemandProgramOf(plan);
  std::vector<Violation> violations = verify(program.plan);
  std::vector<Violation> once = WaitsForOthers(plan);  // the program calls a procedure more than once
  for (Violation& violation : violations) {
    violation.procedure = ProcedureOf(program, violation);
    const std::string where =
        violation.procedure < 0
            ? "what is done on demand"
            : NameOf(plan, plan.procedures[static_cast<std::size_t>(violation.procedure)]);
    violation.step = violation.trigger = -1;
    if (violation.procedure < 0) violation.instruction = -1;
    violation.message = fmt::format("{} (on demand): {}", where, violation.message);
    const bool told = std::ranges::any_of(once, [&](const Violation& other) {
      return other.rule == violation.rule && other.procedure == violation.procedure &&
             other.instruction == violation.instruction;
    });
    if (!told) once.push_back(std::move(violation));
  }
  return once;
}

}  // namespace shardplan::verifier
