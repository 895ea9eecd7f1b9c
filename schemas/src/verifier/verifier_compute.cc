#include "verifier/verifier_compute.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <variant>

#include "verifier/verifier_rules.h"

namespace shardplan::verifier {
namespace {

StorageId LargestStorage(const Plan& plan) {
  StorageId largest = -1;
  const auto see = [&](StorageId storage) { largest = std::max(largest, storage); };
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
        for (const StorageId storage : op->reads) see(storage);
        for (const StorageId storage : op->writes) see(storage);
      } else if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
        see(born->storage);
      } else {
        see(std::get<FreeEvent>(entry).storage);
      }
    }
  }
  return largest;
}

bool JoinsMicrobatches(const Plan& plan) {
  for (const StepProgram& step : plan.strategy.program) {
    for (const ProgramCall& call : step) {
      const auto* backward = std::get_if<BackwardCall>(&call);
      if (backward != nullptr && backward->microbatches.size() > 1) return true;
    }
  }
  return false;
}

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

Compute::Compute(const Plan& plan, Reporter& reporter) : plan_(plan), reporter_(reporter) {
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind != InstructionKind::kCompute) continue;
        microbatches_ = std::max(microbatches_, i.microbatch + 1);
      }
    }
  }
  // A micro-batch is one of a step's few.
  microbatches_ = std::min(microbatches_, std::int32_t{1} << 12);
  phases_.assign(static_cast<std::size_t>(microbatches_), SegmentPhase::kForward);
  runs_in_step_.resize(plan.segments.size() * static_cast<std::size_t>(microbatches_));
  const auto storages = static_cast<std::size_t>(LargestStorage(plan) + 1);
  is_gathered_.assign(plan.units.size(), 0);
  for (const Buffer& buffer : plan.buffers) {
    const bool unsharded = buffer.role == BufferRole::kParamUnsharded;
    if (unsharded && buffer.unit >= 0) is_gathered_[static_cast<std::size_t>(buffer.unit)] = 1;
  }
  read_in_step_.assign(plan.units.size() * static_cast<std::size_t>(microbatches_), -1);
  // Storages of a backward are named by its own forwards, whose micro-batches it does not say.
  joins_microbatches_ = JoinsMicrobatches(plan);
  follows_storages_ = !joins_microbatches_ && storages < (std::size_t{1} << 26) / microbatches_;
  if (!follows_storages_) return;
  lives_.assign(storages * static_cast<std::size_t>(microbatches_), Life::kAbsent);
  from_outside_.assign(storages, 0);
  const auto comes_from_outside = [&](StorageId storage) {
    if (storage >= 0 && storage < std::ssize(from_outside_)) from_outside_[storage] = 1;
  };
  for (const TraceInput& input : plan.inputs) comes_from_outside(input.storage);
  for (const ModuleBuffer& buffer : plan.model_buffers) comes_from_outside(buffer.storage);
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* born = std::get_if<AllocateEvent>(&entry);
      // Gradients are the plan's: verifier_gradients.h follows them.
      if (born != nullptr && born->role == StorageRole::kParameterGrad) comes_from_outside(born->storage);
    }
  }
}

void Compute::Add(Position at, SegmentId segment, std::string what) {
  reporter_.Add(Rule::kComputeOrder, at, segment, std::move(what),
                at.step < 0 ? std::vector<std::string>() : std::vector{"at: " + reporter_.Describe(at)});
}

// ---- the steps among each other ----

std::vector<Run> Compute::RunsOf(std::int32_t step) const {
  std::vector<Run> runs;
  const std::vector<Trigger>& triggers = plan_.steps[step].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (std::size_t k = 0; k < triggers[t].instructions.size(); ++k) {
      const Instruction& i = triggers[t].instructions[k];
      const bool exists = i.segment >= 0 && i.segment < std::ssize(plan_.segments);
      if (i.kind != InstructionKind::kCompute || !exists) continue;
      runs.push_back(
          {i.segment, i.microbatch, {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(k)}});
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
  CheckReads();
}

// Which unit has a parameter of the model, the segments that compute with it say.
void Compute::CheckReads() {
  std::map<ParameterId, std::vector<SegmentId>> computing;
  for (std::size_t s = 0; s < plan_.segments.size(); ++s) {
    for (const SegmentEntry& entry : plan_.segments[s].entries) {
      const auto* op = std::get_if<OperatorEvent>(&entry);
      if (op == nullptr) continue;
      for (const ParameterId parameter : op->parameters) {
        std::vector<SegmentId>& of = computing[parameter];
        if (of.empty() || of.back() != static_cast<SegmentId>(s)) of.push_back(static_cast<SegmentId>(s));
      }
    }
  }
  for (const auto& [parameter, segments] : computing) {
    const SegmentId differs = ComputeOrderOfReads(plan_, segments);
    if (differs < 0) continue;
    Add({}, differs,
        fmt::format(
            "{} computes with parameter {} of the model, and does not read the unit that others which "
            "compute with it read",
            plan_.segments[differs].name, parameter));
  }
}

// ---- a step ----

void Compute::BeginStep() {
  entered_.clear();
  std::ranges::fill(phases_, SegmentPhase::kForward);
  ++step_;
}

void Compute::Pass(const Trigger& trigger) {
  if (trigger.kind == TriggerKind::kPreForward) entered_.push_back(trigger.unit);
  if (trigger.kind != TriggerKind::kPostForward) return;
  const auto left = std::find(entered_.rbegin(), entered_.rend(), trigger.unit);
  if (left != entered_.rend()) entered_.erase(std::next(left).base());
}

Compute::Life* Compute::Of(StorageId storage, std::int32_t microbatch) {
  if (storage < 0 || from_outside_[storage] != 0) return nullptr;
  const auto index = static_cast<std::size_t>(storage) * static_cast<std::size_t>(microbatches_);
  return &lives_[index + static_cast<std::size_t>(microbatch)];
}

void Compute::CheckStorages(const Segment& segment, const Instruction& compute, Position at) {
  const auto need = [&](StorageId storage, const char* does) {
    const Life* life = Of(storage, compute.microbatch);
    if (life == nullptr || *life == Life::kThere) return;
    Add(at, compute.segment,
        fmt::format("{} {} storage {} of micro-batch {}, which no segment has made or one has freed",
                    segment.name, does, storage, compute.microbatch));
  };
  for (const SegmentEntry& entry : segment.entries) {
    if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
      for (const StorageId storage : op->reads) need(storage, "reads");
      for (const StorageId storage : op->writes) need(storage, "writes");
    } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
      need(dead->storage, "frees");
      if (Life* life = Of(dead->storage, compute.microbatch)) *life = Life::kAbsent;
    } else {
      // What is there still is another one: of a forward that no backward followed.
      const auto& born = std::get<AllocateEvent>(entry);
      if (Life* life = Of(born.storage, compute.microbatch)) *life = Life::kThere;
    }
  }
}

void Compute::CheckGradients(const Segment& segment, const Instruction& compute, Position at) {
  const auto read_at = [&](UnitId unit) -> std::int32_t& {
    return read_in_step_[static_cast<std::size_t>(unit) * static_cast<std::size_t>(microbatches_) +
                         static_cast<std::size_t>(compute.microbatch)];
  };
  if (segment.phase == SegmentPhase::kForward || segment.phase == SegmentPhase::kLoss) {
    for (const UnitId unit : segment.reads) read_at(unit) = step_;
  }
  if (joins_microbatches_) return;
  for (const SegmentGrad& grad : segment.grads) {
    const bool is_gathered = is_gathered_[static_cast<std::size_t>(grad.unit)] != 0;
    if (!ComputeOrderOfGradient(is_gathered, read_at(grad.unit), step_)) continue;
    return Add(at, compute.segment,
               fmt::format("{} makes gradients of {} of micro-batch {}, in which no forward has read it",
                           segment.name, reporter_.UnitName(grad.unit), compute.microbatch));
  }
}

bool Compute::MayEvaluate(std::int32_t microbatch, Position at) const {
  const StepProgram* program = ProgramOf(at.step);
  if (program == nullptr || !plan_.strategy.fsdp1.full_precision_in_eval) return false;
  return std::ranges::any_of(*program, [&](const ProgramCall& call) {
    const auto* forward = std::get_if<ForwardCall>(&call);
    return forward != nullptr && forward->microbatch == microbatch && !forward->training.value_or(false);
  });
}

// How often the user's calls of the step run a part of the micro-batch: a loop may give several the same
// number.
std::int32_t Compute::CallsOf(std::int32_t step, SegmentPhase phase, std::int32_t microbatch) const {
  const StepProgram* program = ProgramOf(step);
  if (program == nullptr) return 1;
  const bool forward = phase == SegmentPhase::kForward || phase == SegmentPhase::kLoss;
  const auto is_one = [&](const ProgramCall& call) {
    if (const auto* own = std::get_if<ForwardCall>(&call)) return forward && own->microbatch == microbatch;
    const auto* backward = std::get_if<BackwardCall>(&call);
    return !forward && backward != nullptr && std::ranges::count(backward->microbatches, microbatch) > 0;
  };
  return static_cast<std::int32_t>(std::ranges::count_if(*program, is_one));
}

void Compute::Pass(const Instruction& compute, const Trigger& trigger, Position at) {
  const Segment& segment = plan_.segments[compute.segment];
  if (compute.microbatch < 0 || compute.microbatch >= microbatches_) {
    return Add(at, compute.segment, fmt::format("there is no micro-batch {}", compute.microbatch));
  }
  RunsInStep& runs =
      runs_in_step_[static_cast<std::size_t>(compute.segment) * static_cast<std::size_t>(microbatches_) +
                    static_cast<std::size_t>(compute.microbatch)];
  if (runs.step != step_) runs = {step_, 0};
  if (++runs.count > 1 && runs.count > CallsOf(at.step, segment.phase, compute.microbatch)) {
    Add(at, compute.segment,
        fmt::format("{} of micro-batch {} runs twice in a step", segment.name, compute.microbatch));
  }
  if (ComputeOrderOfMicrobatch(plan_, compute, trigger)) {
    Add(at, compute.segment,
        fmt::format("{} runs for micro-batch {} where the host is in micro-batch {}", segment.name,
                    compute.microbatch, trigger.microbatch));
  }
  if (ComputeOrderOfForward(segment, entered_)) {
    Add(at, compute.segment,
        fmt::format("{} runs while the host is in the forward of {}", segment.name,
                    reporter_.UnitName(entered_.back())));
  }
  if (ComputeOrderOfPhases(phases_[compute.microbatch], segment.phase)) {
    Add(at, compute.segment,
        fmt::format("{} of micro-batch {} runs behind a part of its backward", segment.name,
                    compute.microbatch));
  }
  phases_[compute.microbatch] = segment.phase;
  CheckGradients(segment, compute, at);
  if (follows_storages_) CheckStorages(segment, compute, at);
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

SegmentId ComputeOrderOfReads(const Plan& plan, const std::vector<SegmentId>& segments) {
  const auto is_shared = [&](UnitId unit) {
    return std::ranges::any_of(plan.units[unit].parameters,
                               [](const UnitParameter& parameter) { return !parameter.shared_with.empty(); });
  };
  std::vector<UnitId> common = plan.segments[segments.front()].reads;
  for (const SegmentId segment : segments) {
    const std::vector<UnitId>& reads = plan.segments[segment].reads;
    std::erase_if(common, [&](UnitId unit) { return std::ranges::find(reads, unit) == reads.end(); });
  }
  if (!common.empty()) return -1;
  // A tied parameter may be in several units. What most segments read is meant.
  std::map<UnitId, std::int64_t> readers;
  for (const SegmentId segment : segments) {
    for (const UnitId unit : plan.segments[segment].reads) {
      if (is_shared(unit)) return -1;
      ++readers[unit];
    }
  }
  if (readers.empty()) return -1;
  const UnitId meant =
      std::ranges::max_element(readers, {}, [](const auto& entry) { return entry.second; })->first;
  return *std::ranges::find_if(segments, [&](SegmentId segment) {
    return std::ranges::count(plan.segments[segment].reads, meant) == 0;
  });
}

bool ComputeOrderOfGradient(bool is_gathered, std::int32_t read_in_step, std::int32_t step) {
  return is_gathered && read_in_step != step;
}

bool ComputeOrderOfMicrobatch(const Plan& plan, const Instruction& compute, const Trigger& trigger) {
  if (compute.microbatch == trigger.microbatch) return false;
  const SegmentPhase phase = plan.segments[compute.segment].phase;
  if (phase == SegmentPhase::kForward || phase == SegmentPhase::kLoss) return true;
  // What begins a backward comes before its first trigger: behind one of whatever was before.
  const bool in_backward =
      trigger.kind == TriggerKind::kPreBackward || trigger.kind == TriggerKind::kPostBackward;
  if (!in_backward) return false;
  const auto joins = [&](const ProgramCall& call) {
    const auto* backward = std::get_if<BackwardCall>(&call);
    return backward != nullptr && std::ranges::count(backward->microbatches, compute.microbatch) > 0 &&
           std::ranges::count(backward->microbatches, trigger.microbatch) > 0;
  };
  return std::ranges::none_of(plan.strategy.program,
                              [&](const StepProgram& step) { return std::ranges::any_of(step, joins); });
}

bool ComputeOrderOfPhases(SegmentPhase before, SegmentPhase now) {
  const bool in_backward = before == SegmentPhase::kBackward || before == SegmentPhase::kRecompute;
  return in_backward && now == SegmentPhase::kLoss;
}

bool ComputeOrderOfForward(const Segment& segment, const std::vector<UnitId>& entered) {
  if (segment.phase != SegmentPhase::kForward || segment.unit < 0 || entered.empty()) return false;
  return entered.back() != segment.unit;
}

}  // namespace shardplan::verifier
