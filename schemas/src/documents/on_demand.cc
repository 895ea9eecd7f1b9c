#include "shardplan/schemas/on_demand.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

namespace shardplan {
namespace {

class Writer {
 public:
  explicit Writer(const Plan& given) : given_(given) {
    Plan& plan = program_.plan;
    plan = given;
    plan.steps.clear();
    plan.segments.clear();
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
  }

  OnDemandProgram Write() {
    if (units_.empty()) return std::move(program_);
    // The first step finds no optimizer state.
    Step("first", {ProcedureKind::kReduce}, /*first=*/true);
    program_.plan.steady_step = 1;
    Step("reduce", {ProcedureKind::kReduce}, false);
    if (HasAny(ProcedureKind::kAccumulate)) {
      Step("accumulate",
           {ProcedureKind::kAccumulate, ProcedureKind::kAccumulateAgain, ProcedureKind::kReduceAccumulated},
           false);
      Step("keep", {ProcedureKind::kAccumulate, ProcedureKind::kReduceKept}, false);
    }
    return std::move(program_);
  }

 private:
  bool HasAny(ProcedureKind kind) const {
    return std::ranges::any_of(given_.procedures, [&](const Procedure& p) { return p.kind == kind; });
  }

  void MakeSegments(UnitId unit) {
    const std::string name = DisplayName(given_.units[unit].fqn);
    std::vector<Segment>& segments = program_.plan.segments;
    segments.push_back(
        {.name = "forward " + name, .phase = SegmentPhase::kForward, .unit = unit, .reads = {unit}});
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

  void Begin(TriggerKind kind, UnitId unit) {
    const auto same = [&](const Trigger& t) {
      return t.kind == kind && t.unit == unit && t.microbatch == microbatch_;
    };
    std::vector<Trigger>& triggers = program_.plan.steps.back().triggers;
    const auto before = static_cast<std::int32_t>(std::ranges::count_if(triggers, same));
    triggers.push_back({.kind = kind, .unit = unit, .microbatch = microbatch_, .occurrence = before});
    program_.origins.back().emplace_back();
  }

  void Add(Instruction instruction, OnDemandOrigin origin = {}) {
    program_.plan.steps.back().triggers.back().instructions.push_back(std::move(instruction));
    program_.origins.back().back().push_back(origin);
  }

  void Call(ProcedureKind kind, UnitId unit) {
    const Procedure* procedure = FindProcedure(given_, kind, unit);
    if (procedure == nullptr) return;
    const auto index = static_cast<std::int32_t>(procedure - given_.procedures.data());
    for (std::size_t i = 0; i < procedure->instructions.size(); ++i) {
      Add(procedure->instructions[i], {index, static_cast<std::int32_t>(i)});
    }
  }

  // which: 0, the forward; 1, the backward.
  void Compute(std::size_t unit, std::size_t which) {
    Add({.kind = InstructionKind::kCompute,
         .stream = 0,
         .segment = static_cast<SegmentId>(2 * unit + which),
         .microbatch = microbatch_});
  }

  // `as`: how its gradients are taken. A unit that has no such procedure lets them be where they are: the
  // next micro-batch adds to them.
  void Microbatch(ProcedureKind as, bool last) {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      Begin(TriggerKind::kPreForward, units_[u]);
      Call(ProcedureKind::kUnshard, units_[u]);
      Compute(u, 0);
      Begin(TriggerKind::kPostForward, units_[u]);
      Call(ProcedureKind::kReshard, units_[u]);
    }
    for (std::size_t u = units_.size(); u-- > 0;) {
      const bool has = FindProcedure(given_, as, units_[u]) != nullptr;
      Begin(TriggerKind::kPreBackward, units_[u]);
      Call(ProcedureKind::kUnshard, units_[u]);
      const bool trains = as != ProcedureKind::kReduceKept;
      if (trains || !has) Compute(u, 1);
      Begin(TriggerKind::kPostBackward, units_[u]);
      Call(has || !last ? as : ProcedureKind::kReduce, units_[u]);
      Call(ProcedureKind::kReshard, units_[u]);
    }
    Begin(TriggerKind::kBackwardEnd, -1);
  }

  // An evaluation, in full precision of the units that have it.
  void Evaluate() {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const bool full = FindProcedure(given_, ProcedureKind::kUnshardFullPrecision, units_[u]) != nullptr;
      Begin(TriggerKind::kPreForward, units_[u]);
      Call(full ? ProcedureKind::kUnshardFullPrecision : ProcedureKind::kUnshard, units_[u]);
      Compute(u, 0);
      Begin(TriggerKind::kPostForward, units_[u]);
      Call(full ? ProcedureKind::kReshardFullPrecision : ProcedureKind::kReshard, units_[u]);
    }
  }

  // The optimizer's temporaries and its steps, of all steps of the given plan: on demand every unit that
  // trains has gradients, in every step. Those that no step of the plan steps are stepped on the compute
  // stream.
  void StepOptimizer() {
    std::set<BufferId> temporaries;
    std::vector<Instruction> steps, frees;
    for (const PlanStep& step : given_.steps) {
      for (const Trigger& trigger : step.triggers) {
        if (trigger.kind != TriggerKind::kOptimizerStep) continue;
        for (const Instruction& i : trigger.instructions) {
          const auto same = [&](const Instruction& other) {
            return other.unit == i.unit && other.parameter == i.parameter;
          };
          if (i.kind == InstructionKind::kOptimizerStep && std::ranges::none_of(steps, same))
            steps.push_back(i);
          if (i.kind == InstructionKind::kAllocate && IsTemporary(i.dst) && temporaries.insert(i.dst).second)
            Add(i);
          const auto frees_it = [&](const Instruction& other) { return other.src == i.src; };
          if (i.kind == InstructionKind::kFree && IsTemporary(i.src) &&
              std::ranges::none_of(frees, frees_it)) {
            frees.push_back(i);
          }
        }
      }
    }
    if (steps.empty()) return;
    const auto of_all = std::ranges::find(steps, -1, &Instruction::unit);
    if (of_all != steps.end()) steps = {Instruction(*of_all)};
    for (const Instruction& step : steps) Add(step);
    for (const UnitId unit : units_) {
      const auto steps_it = [&](const Instruction& step) { return step.unit < 0 || step.unit == unit; };
      const bool trains = FindProcedure(given_, ProcedureKind::kReduce, unit) != nullptr;
      if (trains && std::ranges::none_of(steps, steps_it)) {
        Add({.kind = InstructionKind::kOptimizerStep, .stream = 0, .unit = unit});
      }
    }
    for (const Instruction& free : frees) Add(free);
  }

  bool HasOptimizerStep() const {
    return std::ranges::any_of(given_.steps, [](const PlanStep& step) {
      return std::ranges::any_of(step.triggers, [](const Trigger& trigger) {
        return trigger.kind == TriggerKind::kOptimizerStep &&
               std::ranges::any_of(trigger.instructions, [](const Instruction& i) {
                 return i.kind == InstructionKind::kOptimizerStep;
               });
      });
    });
  }
  bool IsTemporary(BufferId buffer) const {
    return given_.buffers[buffer].role == BufferRole::kOptimizerTemp;
  }

  // Of all optimizers, those that step in the backward included.
  void AllocateStates() {
    std::set<BufferId> made;
    for (const PlanStep& step : given_.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& i : trigger.instructions) {
          const bool state = i.kind == InstructionKind::kAllocate &&
                             given_.buffers[i.dst].role == BufferRole::kOptimizerState;
          if (state && made.insert(i.dst).second) Add(i);
        }
      }
    }
  }

  // As a loop would have it. (That gradients which are kept are reduced without another backward is no
  // call of any loop.)
  void AddToProgram(const std::vector<ProcedureKind>& microbatches, bool evaluates) {
    StepProgram& program = program_.plan.strategy.program.emplace_back();
    if (evaluates) {
      program.emplace_back(
          ForwardCall{.microbatch = static_cast<std::int32_t>(microbatches.size()), .training = false});
    }
    const auto reduces = [&](bool value) {
      program.emplace_back(ModuleCall{.method = "set_requires_gradient_sync", .value = value});
    };
    for (std::size_t m = 0; m < microbatches.size(); ++m) {
      const auto microbatch = static_cast<std::int32_t>(m);
      const bool last = m + 1 == microbatches.size();
      if (microbatches.size() > 1 && (m == 0 || last)) reduces(last);
      program.emplace_back(ForwardCall{.microbatch = microbatch});
      if (microbatches[m] == ProcedureKind::kReduceKept) continue;
      program.emplace_back(BackwardCall{.microbatches = {microbatch}});
    }
    if (HasOptimizerStep()) program.emplace_back(OptimizerStepCall{});
    program.emplace_back(ZeroGradCall{});
  }

  void Step(std::string name, const std::vector<ProcedureKind>& microbatches, bool first) {
    program_.plan.steps.push_back({.name = std::move(name)});
    const bool evaluates = first && HasAny(ProcedureKind::kUnshardFullPrecision);
    AddToProgram(microbatches, evaluates);
    program_.origins.emplace_back();
    microbatch_ = 0;
    Begin(TriggerKind::kStepBegin, -1);
    if (first) AllocateStates();
    if (evaluates) {
      microbatch_ = static_cast<std::int32_t>(microbatches.size());
      Evaluate();
    }
    for (std::size_t m = 0; m < microbatches.size(); ++m) {
      microbatch_ = static_cast<std::int32_t>(m);
      Microbatch(microbatches[m], m + 1 == microbatches.size());
    }
    microbatch_ = 0;
    if (!given_.steps.empty() && HasOptimizerStep()) {
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
  std::int32_t microbatch_ = 0;
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
