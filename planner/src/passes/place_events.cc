#include "passes/place_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace shardplan {
namespace {

// A policy whose state does not come back within this many repetitions of the last step would be a bug.
constexpr int kMaxRepetitions = 16;

Result<std::unique_ptr<Policy>> MakePolicy(const PolicyInput& input, ProgramBuilder& builder) {
  if (input.strategy.policy == "fsdp2") return MakeFsdp2Policy(input, builder);
  if (input.strategy.policy == "fsdp1") return MakeFsdp1Policy(input, builder);
  return MakeInputError("/policy", "unknown policy", input.strategy.policy, "fsdp2 or fsdp1");
}

Status RunStep(const RecordedStep& step, Policy& policy, ProgramBuilder& builder) {
  builder.SetReason("");
  builder.BeginTrigger(TriggerKind::kStepBegin, -1, 0);
  for (const HostEvent& event : step.events) {
    if (Status status = policy.On(event); !status) return status;
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

Status PlaceEvents(const PolicyInput& input, Plan& plan, std::vector<KnownFault>& faults) {
  ProgramBuilder builder(input.trace, input.partition, plan);
  Result<std::unique_ptr<Policy>> policy = MakePolicy(input, builder);
  if (!policy) return std::unexpected(policy.error());
  if (Status status = (*policy)->SetUp(); !status) return status;

  const std::size_t given = input.steps.size();
  std::vector<std::unique_ptr<PolicyState>> seen;  // before each repetition of the last step
  for (std::size_t s = 0; s < given + kMaxRepetitions; ++s) {
    if (s + 1 >= given) {
      std::unique_ptr<PolicyState> state = (*policy)->State();
      const auto same =
          std::ranges::find_if(seen, [&](const auto& earlier) { return earlier->Equals(*state); });
      if (same != seen.end()) {
        faults = (*policy)->Faults();
        plan.steady_step = static_cast<std::int32_t>(given - 1 + (same - seen.begin()));
        plan.steps[plan.steady_step].name = "steady";
        return {};
      }
      seen.push_back(std::move(state));
    }
    builder.BeginStep(s == 0 ? "first" : fmt::format("step {}", s));
    if (Status status = RunStep(input.steps[std::min(s, given - 1)], **policy, builder); !status)
      return status;
  }
  // Without a backward the runtimes remember ever more forwards, to no effect.
  faults = (*policy)->Faults();
  if (KeepOneTurnOfEqualSteps(given - 1, plan)) return {};
  return std::unexpected(
      Error{.code = ErrorCode::kInternal, .message = "the policy's state does not repeat from step to step"});
}

}  // namespace shardplan
