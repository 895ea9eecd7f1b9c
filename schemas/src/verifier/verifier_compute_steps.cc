// What the steps of a plan say of each other, and its segments.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <variant>

#include "verifier/verifier_compute.h"
#include "verifier/verifier_rules.h"

namespace shardplan::verifier {
namespace {

// What the segments do, wherever one ends and the next begins: a step that passes other triggers is cut
// elsewhere.
struct WorkOf {
  std::int32_t microbatch = 0;
  const SegmentEntry* entry = nullptr;  // of the model ...
  std::int64_t grad = -1;               // ... or a gradient
  UnitId reads = -1;                    // ... or a unit, where others came before
  bool operator==(const WorkOf& other) const {
    if (microbatch != other.microbatch || grad != other.grad || reads != other.reads) return false;
    return entry == other.entry || (entry != nullptr && other.entry != nullptr && *entry == *other.entry);
  }
};
std::vector<WorkOf> WorkIn(const Plan& plan, const std::vector<Run>& runs) {
  std::vector<WorkOf> entries, grads, reads;
  for (const Run& run : runs) {
    const Segment& segment = plan.segments[run.segment];
    for (const SegmentEntry& entry : segment.entries) entries.push_back({run.microbatch, &entry});
    for (const SegmentGrad& grad : segment.grads) {
      grads.push_back({run.microbatch, nullptr, (std::int64_t{grad.unit} << 32) + grad.parameter});
    }
    for (const UnitId unit : segment.reads) {
      const WorkOf read = {run.microbatch, nullptr, static_cast<std::int64_t>(segment.phase), unit};
      if (std::ranges::find(reads, read) == reads.end()) reads.push_back(read);
    }
  }
  entries.insert(entries.end(), grads.begin(), grads.end());
  entries.insert(entries.end(), reads.begin(), reads.end());
  return entries;
}

}  // namespace

std::vector<Run> Compute::RunsOf(std::int32_t step) const {
  std::vector<Run> runs;
  const std::vector<Trigger>& triggers = plan_.steps[step].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (std::size_t k = 0; k < triggers[t].instructions.size(); ++k) {
      const Instruction& i = triggers[t].instructions[k];
      const bool exists = i.segment >= 0 && i.segment < std::ssize(plan_.segments);
      if (i.kind != InstructionKind::kCompute || !exists) continue;
      runs.push_back({i.segment,
                      MicrobatchOf(triggers[t], i),
                      {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(k)}});
    }
  }
  return runs;
}

// What the user calls in the step; null: the calls that every training step has.
const StepProgram* Compute::ProgramOf(std::int32_t step) const {
  const std::vector<StepProgram>& program = plan_.strategy.program;
  if (program.empty()) return nullptr;
  return &program[std::min<std::size_t>(static_cast<std::size_t>(step), program.size() - 1)];
}

void Compute::CheckAlike(const std::vector<Run>& earlier, const std::vector<Run>& later, std::int32_t step,
                         bool cut_alike) {
  const std::size_t differs = ComputeOrderOfSteps(plan_, earlier, later, cut_alike);
  if (differs == std::max(earlier.size(), later.size())) return;
  const auto name = [&](const std::vector<Run>& runs) {
    if (differs >= runs.size()) return std::string("nothing");
    return fmt::format("{} of micro-batch {}", plan_.segments[runs[differs].segment].name,
                       runs[differs].microbatch);
  };
  const Position at = differs < later.size() ? later[differs].at : Position{step, -1, -1};
  Add(at, differs < later.size() ? later[differs].segment : -1,
      fmt::format("step {} runs {} where an earlier step, with the same calls, runs {}",
                  plan_.steps[step].name, name(later), name(earlier)));
}

// What the model passes: where segments end.
bool Compute::PassSameTriggers(std::int32_t a, std::int32_t b) const {
  const auto passed = [&](std::int32_t step) {
    std::vector<std::tuple<TriggerKind, UnitId, std::int32_t>> triggers;
    for (const Trigger& trigger : plan_.steps[step].triggers) {
      using enum TriggerKind;
      const bool of_model = trigger.kind == kPreForward || trigger.kind == kPostForward ||
                            trigger.kind == kPreBackward || trigger.kind == kPostBackward ||
                            trigger.kind == kBackwardEnd;
      if (of_model) triggers.emplace_back(trigger.kind, trigger.unit, trigger.microbatch);
    }
    return triggers;
  };
  return passed(a) == passed(b);
}

void Compute::CheckForwards(const std::vector<Run>& runs, std::int32_t step) {
  const StepProgram* program = ProgramOf(step);
  if (program == nullptr) return;
  const auto forward_of = [&](std::int32_t microbatch) {
    std::vector<Run> forward;
    for (const Run& run : runs) {
      const SegmentPhase phase = plan_.segments[run.segment].phase;
      const bool in_it = phase == SegmentPhase::kForward || phase == SegmentPhase::kLoss;
      if (run.microbatch == microbatch && in_it) forward.push_back({run.segment, 0, run.at});
    }
    return forward;
  };
  std::vector<ForwardCall> calls;
  for (const ProgramCall& call : *program) {
    const auto* forward = std::get_if<ForwardCall>(&call);
    if (forward == nullptr) continue;
    for (const ForwardCall& earlier : calls) {
      const bool same = earlier.trace == forward->trace && earlier.training == forward->training;
      if (!same || earlier.microbatch == forward->microbatch) continue;
      CheckAlike(forward_of(earlier.microbatch), forward_of(forward->microbatch), step, false);
      break;
    }
    calls.push_back(*forward);
  }
}

void Compute::CheckSteps() {
  std::vector<std::vector<Run>> runs;
  std::vector<char> used(plan_.segments.size(), false);
  for (std::int32_t step = 0; step < std::ssize(plan_.steps); ++step) {
    runs.push_back(RunsOf(step));
    for (const Run& run : runs.back()) used[run.segment] = true;
    CheckForwards(runs.back(), step);
    std::int32_t like = -1;
    bool cut_alike = false;
    for (std::int32_t other = 0; other < step && !cut_alike; ++other) {
      const StepProgram* a = ProgramOf(other);
      const StepProgram* b = ProgramOf(step);
      if (a != b && !(*a == *b)) continue;
      cut_alike = PassSameTriggers(other, step);
      if (like < 0 || cut_alike) like = other;
    }
    if (like >= 0) CheckAlike(runs[like], runs.back(), step, cut_alike);
  }
  for (const SegmentId segment : ComputeOrderOfUnused(used)) {
    Add({}, segment, fmt::format("no step runs segment {}", plan_.segments[segment].name));
  }
}

// ---- the rules ----

std::size_t ComputeOrderOfSteps(const Plan& plan, const std::vector<Run>& earlier,
                                const std::vector<Run>& later, bool cut_alike) {
  const auto [a, b] = std::ranges::mismatch(earlier, later, [](const Run& x, const Run& y) {
    return x.segment == y.segment && x.microbatch == y.microbatch;
  });
  const bool alike = a == earlier.end() && b == later.end();
  if (!alike && !cut_alike && WorkIn(plan, earlier) == WorkIn(plan, later))
    return std::max(earlier.size(), later.size());
  return static_cast<std::size_t>(a - earlier.begin());
}

std::vector<SegmentId> ComputeOrderOfUnused(const std::vector<char>& used) {
  std::vector<SegmentId> unused;
  for (std::size_t s = 0; s < used.size(); ++s) {
    if (!used[s]) unused.push_back(static_cast<SegmentId>(s));
  }
  return unused;
}

}  // namespace shardplan::verifier
