// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "plan/partial_reductions.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/program.h"

namespace shardplan {
namespace {

class Writer {
 public:
  explicit Writer(const Plan& given) : given_(given) {
    Plan& plan = program_.plan;
    plan = given;
    plan.steps.clear();
    plan.segments.clear();
    plan.passes = {};
    plan.procedures.clear();
    plan.inputs.clear();
    plan.strategy.program.clear();
    std::erase_if(plan.strategy.setup, [](const ModuleCall& call) {
      return call.method == "set_requires_gradient_sync" || call.method == "set_requires_all_reduce" ||
             call.method == "no_sync";
    });
    plan.steady_step = 0;
    for (const Procedure& procedure : given.procedures) {
      if (units_.empty() || units_.back() != procedure.unit) units_.push_back(procedure.unit);
    }
    for (const UnitId unit : units_) MakeSegments(unit);
    partial_ = internal::PartialReductionsOf(given);
    for (std::size_t p = 0; p < partial_.size(); ++p) {
      MakePartialSegment(partial_[p]);
      partial_of_.emplace(given_.buffers[partial_[p].partial].unit, static_cast<std::ptrdiff_t>(p));
    }
    CollectOptimizer();
    AddMissingStates();
  }

  OnDemandProgram Write() {
    if (units_.empty()) return std::move(program_);
    // The first step finds no optimizer state.
    Step("first", {ProcedureKind::kReduce}, /*first=*/true);
    program_.plan.steady_step = 1;
    Step("reduce", {ProcedureKind::kReduce}, false);
    if (!partial_.empty()) Step("partial", {ProcedureKind::kReducePartial}, false);
    if (std::ranges::any_of(partial_, [](const auto& p) { return !p.again.empty(); })) {
      Step("partial_again", {ProcedureKind::kReducePartial, ProcedureKind::kReducePartial}, false);
    }
    if (HasAny(ProcedureKind::kAccumulate)) {
      Step("accumulate",
           {ProcedureKind::kAccumulate, ProcedureKind::kAccumulateAgain, ProcedureKind::kReduceAccumulated},
           false);
      Step("keep", {ProcedureKind::kAccumulate, ProcedureKind::kReduceKept}, false);
    }
    for (PlanStep& step : program_.plan.steps) step.triggers.shrink_to_fit();
    NumberPasses(program_.plan);
    return std::move(program_);
  }

 private:
  bool HasAny(ProcedureKind kind) const {
    return std::ranges::any_of(given_.procedures, [&](const Procedure& p) { return p.kind == kind; });
  }

  void MakeSegments(UnitId unit) {
    const std::string name = DisplayName(given_.units[unit].fqn);
    std::vector<Segment>& segments = program_.plan.segments;
    Segment forward{
        .name = "forward " + name, .phase = SegmentPhase::kForward, .unit = unit, .reads = {unit}};
    // Beside the steps nothing is offloaded: what would be is made and ends with the forward. Activations of
    // units that have no procedure go with those of the first unit.
    for (const Buffer& buffer : given_.buffers) {
      const bool has_one = std::ranges::find(units_, buffer.unit) != units_.end();
      if (buffer.role != BufferRole::kActivation || (has_one ? buffer.unit : units_.front()) != unit)
        continue;
      for (std::size_t p = 0; p < buffer.storages.size() && p < buffer.parts_bytes.size(); ++p) {
        forward.entries.emplace_back(
            AllocateEvent{.storage = buffer.storages[p], .size_bytes = buffer.parts_bytes[p]});
      }
      for (const StorageId storage : buffer.storages) forward.entries.emplace_back(FreeEvent{storage});
    }
    segments.push_back(std::move(forward));
    Segment backward{
        .name = "backward " + name, .phase = SegmentPhase::kBackward, .unit = unit, .reads = {unit}};
    if (FindProcedure(given_, ProcedureKind::kReduce, unit) != nullptr) {
      for (std::size_t p = 0; p < given_.units[unit].parameters.size(); ++p) {
        if (given_.units[unit].parameters[p].requires_grad) {
          backward.grads.push_back({unit, static_cast<std::int32_t>(p)});
        }
      }
    }
    segments.push_back(std::move(backward));
  }

  // The backward that makes the gradients of what is partly reduced, and no others.
  void MakePartialSegment(const internal::PartialReduction& reduction) {
    const UnitId unit = given_.buffers[reduction.partial].unit;
    Segment segment{.name = fmt::format("partial backward {}", DisplayName(given_.units[unit].fqn)),
                    .phase = SegmentPhase::kBackward,
                    .unit = unit,
                    .reads = {unit}};
    for (const std::int32_t p : reduction.parameters) segment.grads.push_back({unit, p});
    program_.plan.segments.push_back(std::move(segment));
  }

  // Index into partial_; -1: no step leaves the unit's gradients reduced over the shards alone.
  std::ptrdiff_t PartialOf(UnitId unit) const {
    const auto found = partial_of_.find(unit);
    return found == partial_of_.end() ? -1 : found->second;
  }

  void Begin(TriggerKind kind, UnitId unit, std::int32_t procedure = -1) {
    const std::int32_t before = passed_[{kind, unit, microbatch_}]++;
    program_.plan.steps.back().triggers.push_back(
        {.kind = kind, .unit = unit, .microbatch = microbatch_, .occurrence = before});
    program_.procedures.back().push_back(procedure);
  }

  void Add(Instruction instruction) {
    SHARDPLAN_ASSERT(program_.procedures.back().back() < 0, "a procedure is a trigger of its own");
    program_.plan.steps.back().triggers.back().instructions.Edit().push_back(std::move(instruction));
  }

  void Call(ProcedureKind kind, UnitId unit) {
    const Procedure* procedure = FindProcedure(given_, kind, unit);
    if (procedure == nullptr) return;
    Begin(TriggerKind::kUserCall, unit, static_cast<std::int32_t>(procedure - given_.procedures.data()));
    program_.plan.steps.back().triggers.back().instructions = procedure->instructions;
  }

  void Compute(std::size_t segment) {
    Add({.kind = InstructionKind::kCompute, .stream = 0, .segment = static_cast<SegmentId>(segment)});
  }
  std::size_t ForwardOf(std::size_t unit) const { return 2 * unit; }
  std::size_t BackwardOf(std::size_t unit) const { return 2 * unit + 1; }

  // `as`: how its gradients are taken. A unit that has no such procedure lets them be where they are: the
  // next micro-batch adds to them.
  void Microbatch(ProcedureKind as, bool last) {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      Call(ProcedureKind::kUnshard, units_[u]);
      Begin(TriggerKind::kPreForward, units_[u]);
      Compute(ForwardOf(u));
      Begin(TriggerKind::kPostForward, units_[u]);
      Call(ProcedureKind::kReshard, units_[u]);
    }
    for (std::size_t u = units_.size(); u-- > 0;) {
      Call(ProcedureKind::kUnshard, units_[u]);
      Begin(TriggerKind::kPreBackward, units_[u]);
      if (as == ProcedureKind::kReducePartial) {
        BackwardToPartial(u, last);
      } else {
        Backward(u, as, last);
      }
      Call(ProcedureKind::kReshard, units_[u]);
    }
    Begin(TriggerKind::kBackwardEnd, -1);
    if (as != ProcedureKind::kReducePartial || !last) return;
    for (const UnitId unit : units_) {
      if (PartialOf(unit) >= 0) Call(ProcedureKind::kReducePartial, unit);
    }
  }

  void Backward(std::size_t u, ProcedureKind as, bool last) {
    const bool has = FindProcedure(given_, as, units_[u]) != nullptr;
    const bool trains = as != ProcedureKind::kReduceKept;
    if (trains || !has) Compute(BackwardOf(u));
    Begin(TriggerKind::kPostBackward, units_[u]);
    Call(has || !last ? as : ProcedureKind::kReduce, units_[u]);
  }

  // Issues what the steps issue when they leave gradients reduced over the shards alone. Units that never do
  // reduce theirs, in the last micro-batch all at once.
  void BackwardToPartial(std::size_t u, bool last) {
    const std::ptrdiff_t index = PartialOf(units_[u]);
    if (index < 0) {
      Compute(BackwardOf(u));
      Begin(TriggerKind::kPostBackward, units_[u]);
      if (last) Call(ProcedureKind::kReduce, units_[u]);
      return;
    }
    const internal::PartialReduction& reduction = partial_[static_cast<std::size_t>(index)];
    const std::vector<Instruction>& taken = microbatch_ == 0 ? reduction.first : reduction.again;
    if (!taken.empty()) Compute(2 * units_.size() + static_cast<std::size_t>(index));
    Begin(TriggerKind::kPostBackward, units_[u]);
    for (const Instruction& i : taken) Add(i);
  }

  // An evaluation, in full precision of the units that have it.
  void Evaluate() {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const bool full = FindProcedure(given_, ProcedureKind::kUnshardFullPrecision, units_[u]) != nullptr;
      Call(full ? ProcedureKind::kUnshardFullPrecision : ProcedureKind::kUnshard, units_[u]);
      Begin(TriggerKind::kPreForward, units_[u]);
      Compute(ForwardOf(u));
      Begin(TriggerKind::kPostForward, units_[u]);
      Call(full ? ProcedureKind::kReshardFullPrecision : ProcedureKind::kReshard, units_[u]);
    }
  }

  // Collects the optimizer's instructions of any step of the given plan, each once: on demand every unit that
  // trains has gradients, in every step. States are those of all optimizers, of those that step in the
  // backward, too.
  void CollectOptimizer() {
    for (const PlanStep& step : given_.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& i : trigger.instructions) CollectFrom(i, trigger.kind);
      }
    }
    // A step of all units is of all parameters but Muon's.
    const auto of_all = [](const Instruction& step) { return step.unit < 0; };
    if (std::ranges::none_of(optimizer_steps_, of_all)) return;
    std::erase_if(optimizer_steps_, [&](const Instruction& step) {
      return !of_all(step) &&
             (step.parameter < 0 || !given_.units[step.unit].parameters[step.parameter].muon);
    });
  }

  void CollectFrom(const Instruction& i, TriggerKind trigger) {
    const auto add_once = [&](std::vector<Instruction>& to, auto... of) {
      const auto same = [&](const Instruction& other) { return (... && (other.*of == i.*of)); };
      if (std::ranges::none_of(to, same)) to.push_back(i);
    };
    const auto is_of = [&](BufferId buffer, BufferRole role) { return given_.buffers[buffer].role == role; };
    const bool allocates = i.kind == InstructionKind::kAllocate;
    if (allocates && is_of(i.dst, BufferRole::kOptimizerState)) add_once(states_, &Instruction::dst);
    if (trigger != TriggerKind::kOptimizerStep) return;
    if (allocates && is_of(i.dst, BufferRole::kOptimizerTemp)) add_once(temporaries_, &Instruction::dst);
    if (i.kind == InstructionKind::kFree && is_of(i.src, BufferRole::kOptimizerTemp)) {
      add_once(freed_temporaries_, &Instruction::src);
    }
    if (i.kind == InstructionKind::kOptimizerStep) {
      add_once(optimizer_steps_, &Instruction::unit, &Instruction::parameter);
    }
    // An exchange is the business of steps; on demand its matrices are stepped one by one.
    if (i.kind != InstructionKind::kUpdateApply) return;
    for (const ExchangedMatrix& matrix : given_.exchanges[i.exchange].matrices) {
      const Instruction step{.kind = InstructionKind::kOptimizerStep,
                             .stream = 0,
                             .unit = matrix.unit,
                             .parameter = matrix.parameter};
      if (std::ranges::find(optimizer_steps_, step) == optimizer_steps_.end())
        optimizer_steps_.push_back(step);
    }
  }

  // A unit that no step of the plan trains has no states there. On demand it may train, as the others do.
  void AddMissingStates() {
    std::vector<Buffer>& buffers = program_.plan.buffers;
    const auto is_state = [](const Buffer& buffer) { return buffer.role == BufferRole::kOptimizerState; };
    if (std::ranges::none_of(buffers, is_state)) return;
    std::vector<std::ptrdiff_t> shard_of(given_.units.size(), -1);
    std::vector<char> has_state(given_.units.size(), 0);
    for (std::size_t b = buffers.size(); b-- > 0;) {
      if (buffers[b].unit < 0) continue;
      const auto unit = static_cast<std::size_t>(buffers[b].unit);
      if (is_state(buffers[b])) has_state[unit] = 1;
      if (buffers[b].role == BufferRole::kParamSharded) shard_of[unit] = static_cast<std::ptrdiff_t>(b);
    }
    for (const UnitId unit : units_) {
      const bool trains = FindProcedure(given_, ProcedureKind::kReduce, unit) != nullptr;
      const std::ptrdiff_t shard = shard_of[static_cast<std::size_t>(unit)];
      if (!trains || shard < 0 || has_state[static_cast<std::size_t>(unit)] != 0) continue;
      Buffer state = buffers[static_cast<std::size_t>(shard)];
      state.name += ".optimizer_state.on_demand";
      state.role = BufferRole::kOptimizerState;
      state.persistent = false;
      states_.push_back({.kind = InstructionKind::kAllocate,
                         .stream = 0,
                         .unit = unit,
                         .dst = static_cast<BufferId>(buffers.size())});
      buffers.push_back(std::move(state));
    }
  }

  // Units that no step of the plan steps are stepped on the compute stream.
  void StepOptimizer() {
    for (const Instruction& allocate : temporaries_) Add(allocate);
    for (const Instruction& step : optimizer_steps_) Add(step);
    for (const UnitId unit : units_) {
      const auto steps_it = [&](const Instruction& step) { return step.unit < 0 || step.unit == unit; };
      const bool trains = FindProcedure(given_, ProcedureKind::kReduce, unit) != nullptr;
      if (trains && std::ranges::none_of(optimizer_steps_, steps_it)) {
        Add({.kind = InstructionKind::kOptimizerStep, .stream = 0, .unit = unit});
      }
    }
    for (const Instruction& free : freed_temporaries_) Add(free);
  }

  // No unit has a backward in a micro-batch that only reduces what is kept.
  bool KeepsAll() const {
    return std::ranges::all_of(units_, [&](UnitId unit) {
      return FindProcedure(given_, ProcedureKind::kReduceKept, unit) != nullptr;
    });
  }

  // The calls are those of a loop. (That gradients which are kept are reduced without another backward is no
  // call of any loop.)
  void AddToProgram(const std::vector<ProcedureKind>& microbatches, bool evaluates) {
    StepProgram& program = program_.plan.strategy.program.emplace_back();
    if (evaluates) {
      program_.plan.strategy.fsdp1.full_precision_in_eval = true;
      program.emplace_back(
          ForwardCall{.microbatch = static_cast<std::int32_t>(microbatches.size()), .training = false});
    }
    const bool partial = microbatches.front() == ProcedureKind::kReducePartial;
    const auto reduces = [&](bool value) {
      program.emplace_back(ModuleCall{
          .method = partial ? "set_requires_all_reduce" : "set_requires_gradient_sync", .value = value});
    };
    for (std::size_t m = 0; m < microbatches.size(); ++m) {
      const auto microbatch = static_cast<std::int32_t>(m);
      const bool last = m + 1 == microbatches.size();
      if ((partial || microbatches.size() > 1) && (m == 0 || last)) reduces(last);
      program.emplace_back(ForwardCall{.microbatch = microbatch});
      if (microbatches[m] == ProcedureKind::kReduceKept && KeepsAll()) continue;
      program.emplace_back(BackwardCall{.microbatches = {microbatch}});
    }
    if (!optimizer_steps_.empty()) program.emplace_back(OptimizerStepCall{});
    program.emplace_back(ZeroGradCall{});
  }

  void Step(std::string name, const std::vector<ProcedureKind>& microbatches, bool first) {
    program_.plan.steps.push_back({.name = std::move(name)});
    const bool evaluates = first && HasAny(ProcedureKind::kUnshardFullPrecision);
    AddToProgram(microbatches, evaluates);
    program_.procedures.emplace_back();
    passed_.clear();
    microbatch_ = 0;
    Begin(TriggerKind::kStepBegin, -1);
    if (first) {
      for (const Instruction& allocate : states_) Add(allocate);
    }
    if (evaluates) {
      microbatch_ = static_cast<std::int32_t>(microbatches.size());
      Evaluate();
    }
    for (std::size_t m = 0; m < microbatches.size(); ++m) {
      microbatch_ = static_cast<std::int32_t>(m);
      Microbatch(microbatches[m], m + 1 == microbatches.size());
    }
    microbatch_ = 0;
    if (!optimizer_steps_.empty()) {
      Begin(TriggerKind::kOptimizerStep, -1);
      StepOptimizer();
    }
    Begin(TriggerKind::kZeroGrad, -1);
    Add({.kind = InstructionKind::kZeroGrad});
    Begin(TriggerKind::kStepEnd, -1);
  }

  const Plan& given_;
  OnDemandProgram program_;
  std::vector<UnitId> units_;  // that have procedures
  std::vector<internal::PartialReduction> partial_;
  std::map<UnitId, std::ptrdiff_t> partial_of_;  // index into partial_
  std::vector<Instruction> states_, temporaries_, optimizer_steps_, freed_temporaries_;
  std::int32_t microbatch_ = 0;
  std::map<std::tuple<TriggerKind, UnitId, std::int32_t>, std::int32_t> passed_;  // in this step
};

}  // namespace

const Procedure* FindProcedure(const Plan& plan, ProcedureKind kind, UnitId unit) {
  const auto before = [](const Procedure& p, const std::pair<UnitId, ProcedureKind>& key) {
    return std::pair(p.unit, p.kind) < key;
  };
  const auto found =
      std::lower_bound(plan.procedures.begin(), plan.procedures.end(), std::pair(unit, kind), before);
  const bool is_it = found != plan.procedures.end() && found->unit == unit && found->kind == kind;
  return is_it ? &*found : nullptr;
}

OnDemandProgram OnDemandProgramOf(const Plan& plan) { return Writer(plan).Write(); }

}  // namespace shardplan
