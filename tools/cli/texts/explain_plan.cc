// SPDX-License-Identifier: Apache-2.0
#include "texts/explain_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::cli {
namespace {

struct Reason {
  std::string_view name, words;
};

// Instruction::reason of both policies (docs/internals/planner.md).
constexpr std::array<Reason, 23> kReasons = {{
    {"pre_forward", "the unit's forward begins and needs its parameters"},
    {"post_forward", "the unit's forward is over"},
    {"pre_backward", "the gradient of an output is ready: the unit's backward needs its parameters"},
    {"post_backward", "the unit's gradients are complete"},
    {"prefetch_forward", "another unit is gathered early, while this one computes its forward"},
    {"prefetch_backward",
     "the unit that ran before this one in the order of post-forwards is gathered while this one computes "
     "its "
     "backward"},
    {"prefetch_backward_explicit", "a unit that this one's list names is gathered while this one computes"},
    {"recompute", "a checkpointed forward runs again and needs the parameters"},
    {"accumulate_grad", "autograd puts the gradients of a flat parameter's views together"},
    {"hook_returned", "the post-backward hook is over: autograd lets go of the gradient that it had for it"},
    {"autograd", "autograd has the gradients of the unit's inputs: its own gradients are complete"},
    {"final",
     "autograd never reached the unit's inputs (they need no gradient): done when the engine has finished"},
    {"finalize",
     "the backward is over: what is still running is waited for, what was gathered for nothing dropped"},
    {"reshard_only", "a frozen unit has nothing to reduce, and is resharded"},
    {"all_reduce_hook", "the user's hook on the reduced gradients"},
    {"host_memory", "the host steps offloaded parameters, and copies of their memory are still under way"},
    {"optimizer", "the user steps the optimizer"},
    {"optimizer_in_backward", "the optimizer steps a parameter as soon as its gradient is reduced"},
    {"post_optim_event", "the user's own event after the optimizer, which the next all-gathers wait for"},
    {"lazy_init",
     "the root prepares every unit at its first forward: memory for parameters is made and emptied"},
    {"summon_full_params", "the user looks at whole parameters, or has done so"},
    {"order_check", "all ranks compare which unit they gather next"},
    {"user", "the user calls it"},
}};

std::string Heading(const std::string& reason) {
  const auto known = std::ranges::find(kReasons, reason, &Reason::name);
  return known == kReasons.end() ? reason : fmt::format("{}: {}", reason, known->words);
}

void ExplainStep(const Plan& plan, const PlanStep& step, std::string& text) {
  text += fmt::format("step {}\n", Printable(step.name));
  for (const Trigger& trigger : step.triggers) {
    text += Describe(plan, trigger) + "\n";
    const Instruction* last = nullptr;
    for (const Instruction& instruction : trigger.instructions) {
      const bool same = last != nullptr && last->reason == instruction.reason;
      if (!same && !instruction.reason.empty())
        text += fmt::format("  # {}\n", Printable(Heading(instruction.reason.str())));
      text += fmt::format("  {}\n", Describe(plan, trigger, instruction));
      last = &instruction;
    }
  }
}

}  // namespace

std::string ExplainPlan(const Plan& plan, bool every_step) {
  std::string text;
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    if (every_step || static_cast<std::int32_t>(s) >= plan.steady_step)
      ExplainStep(plan, plan.steps[s], text);
  }
  return text;
}

}  // namespace shardplan::cli
