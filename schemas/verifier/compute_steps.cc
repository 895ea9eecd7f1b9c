// SPDX-License-Identifier: Apache-2.0
// The model's own order: each call of the user runs its pass of the model from the beginning to the end.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/program.h"
#include "verifier/compute.h"
#include "verifier/rules.h"

namespace shardplan::verifier {
namespace {

std::int32_t LengthOf(const ModelPasses& passes, const PassCall& call) {
  const std::vector<std::int32_t>& lengths = call.backward ? passes.backwards : passes.forwards;
  const bool exists = call.pass >= 0 && call.pass < std::ssize(lengths);
  return exists ? lengths[static_cast<std::size_t>(call.pass)] : 0;
}

// The position of the model in a step.
class ModelPosition {
 public:
  ModelPosition(const Plan& plan, std::int32_t step)
      : plan_(plan), calls_(PassCallsOf(ProgramOfStep(plan.strategy, step))) {}

  // False: something else comes next.
  bool Run(SegmentId id, std::int32_t microbatch) {
    const Segment& segment = plan_.segments[static_cast<std::size_t>(id)];
    // One that has no length is not run twice.
    if (segment.begin == segment.end && std::pair(id, microbatch) == last_) return false;
    while (call_ < calls_.size() && ComputeOrderOfModel(segment, microbatch, calls_[call_], done_)) {
      if (done_ < LengthOf(plan_.passes, calls_[call_])) return false;
      ++call_;
      done_ = 0;
    }
    if (call_ == calls_.size()) return false;
    done_ = segment.end;
    last_ = {id, microbatch};
    return true;
  }

  // The next call; null at the end of the last call.
  const PassCall* Next() {
    while (call_ < calls_.size() && done_ >= LengthOf(plan_.passes, calls_[call_])) {
      ++call_;
      done_ = 0;
    }
    return call_ < calls_.size() ? &calls_[call_] : nullptr;
  }
  std::int32_t done() const { return done_; }

 private:
  const Plan& plan_;
  const std::vector<PassCall> calls_;
  std::size_t call_ = 0;
  std::int32_t done_ = 0;
  std::pair<SegmentId, std::int32_t> last_ = {-1, -1};
};

std::string NextOf(const Plan& plan, ModelPosition& model) {
  const PassCall* call = model.Next();
  if (call == nullptr) return "the step's calls are over";
  const auto comes_next = [&](const Segment& segment) {
    return IsBackward(segment.phase) == call->backward && segment.pass == call->pass &&
           segment.begin == model.done() && segment.end > segment.begin;
  };
  const auto segment = std::ranges::find_if(plan.segments, comes_next);
  const std::string name =
      segment != plan.segments.end()
          ? segment->name
          : fmt::format("{} of {} {}", model.done(), call->backward ? "backward" : "forward", call->pass);
  return fmt::format("{} of micro-batch {} comes next", name, fmt::join(call->microbatches, "+"));
}

}  // namespace

void Compute::CheckOrder(std::int32_t step) {
  ModelPosition model(plan_, step);
  const std::vector<Trigger>& triggers = plan_.steps[static_cast<std::size_t>(step)].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (std::size_t k = 0; k < triggers[t].instructions.size(); ++k) {
      const Instruction& i = triggers[t].instructions[k];
      const bool exists = i.segment >= 0 && i.segment < std::ssize(plan_.segments);
      if (i.kind != InstructionKind::kCompute || !exists) continue;
      const Segment& segment = plan_.segments[static_cast<std::size_t>(i.segment)];
      if (segment.phase == SegmentPhase::kOptimizer) {
        if (triggers[t].kind == TriggerKind::kOptimizerStep) continue;
        return Add({step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(k)}, i.segment,
                   fmt::format("{} is of the optimizer, and runs outside of its step", segment.name));
      }
      const std::int32_t microbatch = MicrobatchOf(triggers[t], i);
      if (model.Run(i.segment, microbatch)) continue;
      // Everything behind it is out of order, too.
      return Add(
          {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(k)}, i.segment,
          fmt::format("{} of micro-batch {} runs where {}", segment.name, microbatch, NextOf(plan_, model)));
    }
  }
  if (model.Next() == nullptr) return;
  Add({step, -1, -1}, -1,
      fmt::format("step {} ends where {}", plan_.steps[static_cast<std::size_t>(step)].name,
                  NextOf(plan_, model)));
}

void Compute::CheckSteps() {
  std::vector<char> used(plan_.segments.size(), false);
  for (std::size_t step = 0; step < plan_.steps.size(); ++step) {
    for (const Trigger& trigger : plan_.steps[step].triggers) {
      for (const Instruction& i : trigger.instructions) {
        const bool exists = i.segment >= 0 && i.segment < std::ssize(plan_.segments);
        if (DescriptionOf(i.kind).segment && exists) used[static_cast<std::size_t>(i.segment)] = true;
      }
    }
    const bool says_order = !plan_.passes.forwards.empty() || !plan_.passes.backwards.empty();
    if (says_order) CheckOrder(static_cast<std::int32_t>(step));
  }
  for (const SegmentId segment : ComputeOrderOfUnused(used)) {
    Add({}, segment, fmt::format("no step runs segment {}", plan_.segments[segment].name));
  }
}

// ---- the rules ----

bool ComputeOrderOfModel(const Segment& segment, std::int32_t microbatch, const PassCall& call,
                         std::int32_t done) {
  return segment.pass != call.pass || IsBackward(segment.phase) != call.backward || segment.begin != done ||
         call.microbatches.empty() || microbatch != MicrobatchOf(call.microbatches, segment.forward);
}

std::vector<SegmentId> ComputeOrderOfUnused(const std::vector<char>& used) {
  std::vector<SegmentId> unused;
  for (std::size_t s = 0; s < used.size(); ++s) {
    if (!used[s]) unused.push_back(static_cast<SegmentId>(s));
  }
  return unused;
}

}  // namespace shardplan::verifier
