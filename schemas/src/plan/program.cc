// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/program.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

// The computes of a step that one call makes, in order.
struct Group {
  PassCall call;
  std::vector<Instruction*> computes;
};

std::vector<Group> GroupsOf(const Plan& plan, PlanStep& step) {
  std::vector<Group> groups;
  for (Trigger& trigger : step.triggers) {
    const auto computes = [](const Instruction& i) { return i.kind == InstructionKind::kCompute; };
    if (std::ranges::none_of(trigger.instructions, computes)) continue;
    for (Instruction& i : trigger.instructions.Edit()) {
      if (!computes(i)) continue;
      const bool backward = IsBackward(plan.segments[static_cast<std::size_t>(i.segment)].phase);
      const std::int32_t microbatch = MicrobatchOf(trigger, i);
      if (groups.empty() || groups.back().call.backward != backward ||
          groups.back().call.microbatches.front() != microbatch) {
        groups.push_back({.call = {.backward = backward, .microbatches = {microbatch}}});
      }
      groups.back().computes.push_back(&i);
    }
  }
  return groups;
}

class Numbering {
 public:
  explicit Numbering(Plan& plan) : plan_(plan) {}

  void Run() {
    const bool has_program = !plan_.strategy.program.empty();
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      std::vector<Group> groups = GroupsOf(plan_, plan_.steps[s]);
      for (Group& group : groups) Number(group);
      if (has_program) {
        SHARDPLAN_ASSERT(s < plan_.strategy.program.size(), "a program for every step, or none");
        NumberCalls(groups, plan_.strategy.program[s]);
      } else {
        WriteCalls(groups);
      }
    }
  }

 private:
  // The same segments in the same order are the same pass.
  void Number(Group& group) {
    std::vector<SegmentId> segments;
    for (const Instruction* i : group.computes) segments.push_back(i->segment);
    auto& known = passes_[group.call.backward ? 1 : 0];
    auto found = std::ranges::find(known, segments, &Known::given);
    if (found == known.end()) {
      const auto pass = static_cast<std::int32_t>(known.size());
      known.push_back({.given = segments});
      found = std::prev(known.end());
      for (std::size_t k = 0; k < segments.size(); ++k) {
        found->numbered.push_back(Place(segments[k], pass, static_cast<std::int32_t>(k)));
      }
      auto& lengths = group.call.backward ? plan_.passes.backwards : plan_.passes.forwards;
      lengths.push_back(static_cast<std::int32_t>(segments.size()));
    }
    group.call.pass = static_cast<std::int32_t>(found - known.begin());
    for (std::size_t k = 0; k < segments.size(); ++k) group.computes[k]->segment = found->numbered[k];
  }

  SegmentId Place(SegmentId id, std::int32_t pass, std::int32_t position) {
    if (plan_.segments[static_cast<std::size_t>(id)].pass >= 0) {
      plan_.segments.push_back(Segment(plan_.segments[static_cast<std::size_t>(id)]));
      id = static_cast<SegmentId>(plan_.segments.size() - 1);
    }
    Segment& segment = plan_.segments[static_cast<std::size_t>(id)];
    segment.pass = pass;
    segment.begin = position;
    segment.end = position + 1;
    return id;
  }

  // A call in which nothing is computed is none.
  static void NumberCalls(const std::vector<Group>& groups, StepProgram& program) {
    auto next = groups.begin();
    std::erase_if(program, [&](ProgramCall& call) {
      auto* forward = std::get_if<ForwardCall>(&call);
      auto* backward = std::get_if<BackwardCall>(&call);
      if (forward == nullptr && backward == nullptr) return false;
      const std::int32_t microbatch =
          forward != nullptr ? forward->microbatch : backward->microbatches.front();
      const bool runs = next != groups.end() && next->call.backward == (backward != nullptr) &&
                        next->call.microbatches.front() == microbatch;
      if (runs) (forward != nullptr ? forward->trace : backward->trace) = next++->call.pass;
      return !runs;
    });
    SHARDPLAN_ASSERT(next == groups.end(), "what the step computes is called in the program");
  }

  void WriteCalls(const std::vector<Group>& groups) {
    StepProgram& program = plan_.strategy.program.emplace_back();
    for (const Group& group : groups) {
      if (group.call.backward) {
        program.emplace_back(BackwardCall{.microbatches = group.call.microbatches, .trace = group.call.pass});
      } else {
        program.emplace_back(
            ForwardCall{.microbatch = group.call.microbatches.front(), .trace = group.call.pass});
      }
    }
    program.emplace_back(OptimizerStepCall{});
    program.emplace_back(ZeroGradCall{});
  }

  struct Known {
    std::vector<SegmentId> given, numbered;
  };
  Plan& plan_;
  std::vector<Known> passes_[2];  // forwards, backwards
};

}  // namespace

const StepProgram& ProgramOfStep(const Strategy& strategy, std::int64_t step) {
  static const StepProgram kUsual = {ForwardCall{}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}};
  static const StepProgram kStepsInBackward = {ForwardCall{}, BackwardCall{}};
  if (strategy.program.empty()) return strategy.optimizer.in_backward ? kStepsInBackward : kUsual;
  const auto last = static_cast<std::int64_t>(strategy.program.size()) - 1;
  return strategy.program[static_cast<std::size_t>(std::min(step, last))];
}

void AddMicrobatch(const Trace& trace, std::int32_t microbatch, StepProgram& step) {
  static const std::vector<TraceCall> kUsual = {TracedForward{}, TracedBackward{}};
  for (const TraceCall& call : trace.calls.empty() ? kUsual : trace.calls) {
    if (const auto* forward = std::get_if<TracedForward>(&call)) {
      step.emplace_back(ForwardCall{.microbatch = microbatch, .trace = forward->forward});
    } else {
      step.emplace_back(
          BackwardCall{.microbatches = {microbatch}, .trace = std::get<TracedBackward>(call).backward});
    }
  }
}

Strategy WithCallsOf(const Trace& trace, Strategy strategy) {
  if (!strategy.program.empty() || trace.calls.empty()) return strategy;
  StepProgram& step = strategy.program.emplace_back();
  AddMicrobatch(trace, 0, step);
  AddStepEnd(strategy.optimizer, step);
  return strategy;
}

void AddStepEnd(const Optimizer& optimizer, StepProgram& step) {
  if (optimizer.in_backward) return;
  step.emplace_back(OptimizerStepCall{});
  step.emplace_back(ZeroGradCall{});
}

bool IsReset(const ModuleCall& call) { return call.method == "reset_iter_state"; }

std::vector<PassCall> PassCallsOf(const StepProgram& program) {
  std::vector<PassCall> calls;
  for (const ProgramCall& call : program) {
    if (const auto* forward = std::get_if<ForwardCall>(&call)) {
      calls.push_back({false, forward->trace, {forward->microbatch}});
    } else if (const auto* backward = std::get_if<BackwardCall>(&call)) {
      calls.push_back({true, backward->trace, backward->microbatches});
    }
  }
  return calls;
}

std::int32_t MicrobatchOf(const std::vector<std::int32_t>& microbatches, std::int32_t forward) {
  const bool has = forward >= 0 && forward < std::ssize(microbatches);
  return has ? microbatches[static_cast<std::size_t>(forward)] : microbatches.back();
}

bool IsBackward(SegmentPhase phase) {
  return phase == SegmentPhase::kBackward || phase == SegmentPhase::kRecompute;
}

void NumberPasses(Plan& plan) { Numbering(plan).Run(); }

}  // namespace shardplan
