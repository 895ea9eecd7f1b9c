#include "shardplan/schemas/verifier.h"

#include "verifier_interpreter.h"
#include "verifier_references.h"
#include "verifier_report.h"

namespace shardplan {

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

std::string Explain(const Plan& plan, const Violation& violation) {
  verifier::Reporter words(plan);
  std::string text = std::string(Name(violation.rule)) + ": " + violation.message;
  const verifier::Position at = {violation.step, violation.trigger, violation.instruction};
  const bool exists = violation.step >= 0 && violation.trigger >= 0 && violation.instruction >= 0;
  if (exists) text += "\n  where: " + words.Describe(at);
  for (const std::string& link : violation.chain) text += "\n  - " + link;
  return text + "\n";
}

}  // namespace shardplan
