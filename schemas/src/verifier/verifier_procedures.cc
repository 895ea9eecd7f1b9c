#include "verifier/verifier_procedures.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/on_demand.h"

namespace shardplan::verifier {
namespace {

std::string NameOf(const Plan& plan, const Procedure& procedure) {
  return fmt::format("{} of {}", Name(procedure.kind), DisplayName(plan.units[procedure.unit].fqn));
}

// The procedure's instruction that `violation` is about, or else the last procedure before it in its trigger
// (of a leak, say, that shows at the end of a step: none).
OnDemandOrigin OriginOf(const OnDemandProgram& program, const Violation& violation) {
  if (violation.step < 0 || violation.trigger < 0) return {};
  const std::vector<OnDemandOrigin>& of_trigger =
      program.origins[static_cast<std::size_t>(violation.step)][static_cast<std::size_t>(violation.trigger)];
  if (violation.instruction >= 0) return of_trigger[static_cast<std::size_t>(violation.instruction)];
  return of_trigger.empty() ? OnDemandOrigin{} : of_trigger.back();
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
  std::vector<Violation> once;  // the program calls a procedure more than once
  for (Violation& violation : violations) {
    const OnDemandOrigin origin = OriginOf(program, violation);
    const std::string where = origin.procedure < 0
                                  ? "what is done on demand"
                                  : NameOf(plan, plan.procedures[static_cast<std::size_t>(origin.procedure)]);
    violation.step = violation.trigger = -1;
    violation.procedure = origin.procedure;
    violation.instruction = origin.instruction;
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
