// SPDX-License-Identifier: Apache-2.0
#include "passes/place_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

// A policy whose state does not come back within this many repetitions of the last step would be a bug.
constexpr int kMaxRepetitions = 16;

// The pointer of the call in the strategy; "/program": it has none (a step that nobody wrote).
std::string PointerOf(const ModuleCall& wanted, const Strategy& strategy) {
  for (std::size_t s = 0; s < strategy.program.size(); ++s) {
    for (std::size_t c = 0; c < strategy.program[s].size(); ++c) {
      if (std::get_if<ModuleCall>(&strategy.program[s][c]) == &wanted)
        return fmt::format("/program/{}/{}", s, c);
    }
  }
  return "/program";
}

// The policy's status, else the first call that the builder has refused.
Status Of(Status of_policy, const ProgramBuilder& builder) {
  return of_policy ? builder.status() : of_policy;
}

// `offloads`: what of a step's points, in their order.
Status RunStep(const RecordedStep& step, const Strategy& strategy, Policy& policy, ProgramBuilder& builder,
               const std::vector<OffloadedUnit>& units, std::span<const OffloadPoint> offloads) {
  builder.SetReason("");
  builder.BeginTrigger(TriggerKind::kStepBegin, -1, 0);
  policy.BeginStep(step);
  for (std::size_t e = 0; e < step.events.size(); ++e) {
    const HookPoint& event = step.events[e];
    Status status = Of(policy.On(event), builder);
    for (; status && !offloads.empty() && offloads.front().behind == e; offloads = offloads.subspan(1)) {
      EmitOffload(units[offloads.front().unit], offloads.front(), builder);
    }
    if (status) continue;
    if (status.error().pointer.empty() && event.call != nullptr) {
      status.error().pointer = PointerOf(*event.call, strategy);
    }
    return status;
  }
  builder.SetReason("");
  builder.BeginTrigger(TriggerKind::kStepEnd, -1, 0);
  return {};
}

// If the repetitions of the last step came out the same from some point on, in turns of a few (two events
// that take turns): keeps one turn of these.
bool KeepOneTurnOfEqualSteps(std::size_t first_repetition, Plan& plan) {
  const std::size_t count = plan.steps.size();
  for (std::size_t turn = 1; 3 * turn <= count - first_repetition; ++turn) {
    std::size_t first_equal = count - turn;
    while (first_equal > first_repetition &&
           plan.steps[first_equal - 1].triggers == plan.steps[first_equal - 1 + turn].triggers) {
      --first_equal;
    }
    if (first_equal + 3 * turn > count) continue;
    plan.steps.resize(first_equal + turn);
    plan.steps[first_equal].name = "steady";
    plan.steady_step = static_cast<std::int32_t>(first_equal);
    return true;
  }
  return false;
}

}  // namespace

Result<PlacedProgram> PlaceEvents(const PolicyInput& input, const PolicyPasses& description,
                                  const ActivationOffloads& offloads, bool with_procedures) {
  SHARDPLAN_ASSERT(!input.steps.empty(), "record_order makes a step of every program");
  PlacedProgram placed;
  Plan& plan = placed.plan;
  for (const UnitChoice& choice : input.partition.units) plan.units.push_back(choice.unit);
  plan.communicators = input.partition.communicators;
  ProgramBuilder builder(input.trace, input.partition, plan);
  builder.Stream("compute");
  const std::unique_ptr<Policy> policy = description.make(input, builder);
  if (policy == nullptr) return MakeError(ErrorCode::kInternal, "make() has made no policy");
  if (Status status = Of(policy->SetUp(), builder); !status) return std::unexpected(status.error());
  const auto end = [&]() -> Status {
    Status status = with_procedures ? Of(policy->Procedures(), builder) : Status{};
    placed.faults = policy->Faults();
    return status;
  };

  const std::size_t given = input.steps.size();
  std::vector<std::unique_ptr<PolicyState>> seen;  // before each repetition of the last step
  for (std::size_t s = 0; s < given + kMaxRepetitions; ++s) {
    if (s + 1 >= given) {
      std::unique_ptr<PolicyState> state = policy->State();
      const auto same =
          std::ranges::find_if(seen, [&](const auto& earlier) { return earlier->Equals(*state); });
      if (same != seen.end()) {
        if (Status status = end(); !status) return std::unexpected(status.error());
        plan.steady_step = static_cast<std::int32_t>(given - 1 + (same - seen.begin()));
        plan.steps[plan.steady_step].name = "steady";
        return placed;
      }
      seen.push_back(std::move(state));
    }
    builder.BeginStep(s == 0 ? "first" : fmt::format("step {}", s));
    const std::size_t recorded = std::min(s, given - 1);
    std::span<const OffloadPoint> points;
    if (!offloads.steps.empty()) points = offloads.steps[recorded];
    if (Status status =
            RunStep(input.steps[recorded], input.strategy, *policy, builder, offloads.units, points);
        !status) {
      return std::unexpected(status.error());
    }
  }
  // Without a backward the runtimes remember ever more forwards, to no effect.
  if (Status status = end(); !status) return std::unexpected(status.error());
  if (KeepOneTurnOfEqualSteps(given - 1, plan)) return placed;
  return MakeError(ErrorCode::kInternal, "the policy's state does not repeat from step to step");
}

}  // namespace shardplan
