// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "verifier/words/words.h"

namespace shardplan::verifier {

std::vector<std::string> Words::HistoryChain(const Gradient& gradient, Position at) const {
  std::vector<std::string> chain;
  for (const Position position : gradient.history) {
    chain.push_back((chain.empty() ? "made: " : "then: ") + Describe(position));
  }
  if (chain.empty() || !(gradient.history.back() == at)) chain.push_back("then: " + Describe(at));
  return chain;
}

void Words::GradientHasNoBuffer(const SegmentGrad& grad, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, grad.unit,
                fmt::format("{} makes the gradient of {}, but no grad_unsharded buffer holds it",
                            Instruction(at), plan_.units[grad.unit].parameters[grad.parameter].fqn));
}

void Words::GradientNotMade(const Gradient& gradient, std::int32_t parameter, BufferId buffer, Position at) {
  reporter_.Add(
      Rule::kReadBeforeWrite, at, buffer,
      fmt::format("{} reads the gradient of {} in {}, but nothing has put it there", Instruction(at),
                  plan_.units[gradient.unit].parameters[parameter].fqn, Buffer(buffer)),
      HistoryChain(gradient, at));
}

void Words::AddedToMovedGradient(const Gradient& gradient, BufferId buffer, Position at) {
  reporter_.Add(
      Rule::kGradNotReduced, at, buffer,
      fmt::format("{} adds a gradient to {}, whose earlier gradient is already on its way to be reduced "
                  "and would be reduced again",
                  Instruction(at), Buffer(buffer)),
      HistoryChain(gradient, at));
}

void Words::TakenAgain(const Gradient& gradient, BufferId buffer, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, buffer,
                fmt::format("{} takes the gradient in {} a second time", Instruction(at), Buffer(buffer)),
                HistoryChain(gradient, at));
}

void Words::ChangedAfterMove(const Gradient& gradient, BufferId buffer, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, buffer,
                fmt::format("{} changes {} after its gradient went on", Instruction(at), Buffer(buffer)),
                HistoryChain(gradient, at));
}

void Words::Dropped(const Gradient& gradient, BufferId buffer, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, buffer,
                fmt::format("{} drops {}, and the gradient in it is lost before it is reduced",
                            Instruction(at), Buffer(buffer)),
                HistoryChain(gradient, at));
}

void Words::Overwritten(const Gradient& gradient, BufferId buffer, Position at) {
  reporter_.Add(
      Rule::kGradNotReduced, at, buffer,
      fmt::format("{} overwrites {}, and the gradient in it is lost", Instruction(at), Buffer(buffer)),
      HistoryChain(gradient, at));
}

void Words::ReducedTwice(const Gradient& gradient, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, gradient.unit,
                fmt::format("{} reduces a gradient of {} that was already reduced over these ranks",
                            Instruction(at), reporter_.UnitName(gradient.unit)),
                HistoryChain(gradient, at));
}

void Words::ReducedOverOtherRanks(const Gradient& gradient, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, gradient.unit,
                fmt::format("{} reduces a gradient of {} over other ranks than the unit's", Instruction(at),
                            reporter_.UnitName(gradient.unit)),
                HistoryChain(gradient, at));
}

void Words::AddedToUnlike(const Gradient& gradient, BufferId dst, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, dst,
                fmt::format("{} adds gradients that are not reduced alike", Instruction(at)),
                HistoryChain(gradient, at));
}

void Words::NotReduced(const Gradient& gradient, MissingReduction missing, BufferId buffer, Position at) {
  reporter_.Add(
      Rule::kGradNotReduced, at, buffer,
      fmt::format("the gradient of {} in {} is not reduced over the {}", reporter_.UnitName(gradient.unit),
                  Buffer(buffer), missing == MissingReduction::kShards ? "shards" : "replicas"),
      HistoryChain(gradient, at));
}

void Words::DroppedBeforeStep(const Gradient& gradient, std::int32_t parameter, BufferId buffer,
                              Position at) {
  reporter_.Add(
      Rule::kOptimizerStep, at, buffer,
      fmt::format("{} drops the gradient of {} in {} before the optimizer has stepped with it",
                  Instruction(at), plan_.units[gradient.unit].parameters[parameter].fqn, Buffer(buffer)),
      HistoryChain(gradient, at));
}

void Words::SteppedTwice(const Gradient& gradient, std::int32_t parameter, BufferId buffer, Position at) {
  reporter_.Add(Rule::kOptimizerStep, at, buffer,
                fmt::format("{} steps {} a second time with the gradient in {}", Instruction(at),
                            plan_.units[gradient.unit].parameters[parameter].fqn, Buffer(buffer)),
                HistoryChain(gradient, at));
}

void Words::InTwoBuffers(UnitId unit, std::int32_t parameter, BufferId first, BufferId second, Position at) {
  reporter_.Add(Rule::kOptimizerStep, at, second,
                fmt::format("{} finds gradients of {} in {} and in {}: one of them is lost", Instruction(at),
                            plan_.units[unit].parameters[parameter].fqn, Buffer(first), Buffer(second)),
                {"at: " + Describe(at)});
}

void Words::SteppedWithout(BufferId own, UnitId unit, Position at) {
  const std::string of = unit < 0 ? "" : " of " + reporter_.UnitName(unit);
  reporter_.Add(Rule::kOptimizerStep, at, own,
                fmt::format("{} has no {}{}: {} is not allocated", Instruction(at),
                            Name(plan_.buffers[own].role), of, Buffer(own)),
                {"at: " + Describe(at)});
}

void Words::SteppedWithoutStates(UnitId unit, Position at) {
  reporter_.Add(Rule::kOptimizerStep, at, unit,
                fmt::format("{} steps {}, which has no {}: other units have one", Instruction(at),
                            reporter_.UnitName(unit), Name(BufferRole::kOptimizerState)),
                {"at: " + Describe(at)});
}

void Words::SteppedWithoutGradient(UnitId unit, std::int32_t parameter, Position at) {
  reporter_.Add(Rule::kOptimizerStep, at, unit,
                fmt::format("{} steps {}, which has no reduced gradient", Instruction(at),
                            plan_.units[unit].parameters[parameter].fqn),
                {"at: " + Describe(at)});
}

void Words::NeverAllocated(BufferId own) {
  reporter_.Add(Rule::kOptimizerStep, {}, own, fmt::format("nothing allocates {}", Buffer(own)));
}

void Words::AllocatedBehindStep(BufferId state, Position allocated) {
  reporter_.Add(
      Rule::kOptimizerStep, allocated, state,
      fmt::format("{} is allocated, and no optimizer step behind it in the step fills it", Buffer(state)),
      {"allocated: " + Describe(allocated)});
}

void Words::SteppedOutOfReach(BufferId shard, bool on_host, Position at) {
  reporter_.Add(Rule::kLayout, at, shard,
                fmt::format("{} steps {}, which is in memory of the {}", Instruction(at), Buffer(shard),
                            on_host ? "host" : "device"),
                {"at: " + Describe(at)});
}

void Words::SteppedInOtherDType(BufferId grad, Position at) {
  reporter_.Add(Rule::kOptimizerStep, at, grad,
                fmt::format("{} steps with {} in {}, but the strategy keeps gradients in the low precision",
                            Instruction(at), Buffer(grad), Name(plan_.buffers[grad].dtype)),
                {"at: " + Describe(at)});
}

void Words::StillOnItsWay(const Gradient& gradient, BufferId buffer, Position at) {
  reporter_.Add(Rule::kGradNotReduced, at, buffer,
                fmt::format("{} runs while the gradient of {} in {} is not reduced", Instruction(at),
                            reporter_.UnitName(gradient.unit), Buffer(buffer)),
                HistoryChain(gradient, at));
}

void Words::DividedWrongly(const Gradient& gradient, double expected, BufferId buffer, Position at) {
  reporter_.Add(Rule::kGradDivision, gradient.history.back(), buffer,
                fmt::format("the gradient of {} in {} is divided by {} in all, but the strategy asks for {}",
                            reporter_.UnitName(gradient.unit), Buffer(buffer), gradient.divisor, expected),
                HistoryChain(gradient, at));
}

void Words::AddedToDividedUnlike(const Gradient& into, const Gradient& gradient, BufferId dst, Position at) {
  reporter_.Add(Rule::kGradDivision, at, dst,
                fmt::format("{} adds a gradient divided by {} to one divided by {}", Instruction(at),
                            gradient.divisor, into.divisor),
                HistoryChain(gradient, at));
}

}  // namespace shardplan::verifier
