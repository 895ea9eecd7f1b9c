#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "python_error.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan::python {
namespace {

std::string NameOf(const Plan& plan, const executor::TriggerKey& key) {
  Trigger trigger;
  trigger.kind = key.kind;
  trigger.unit = key.unit;
  trigger.microbatch = key.microbatch;
  return shardplan::Describe(plan, trigger);
}

}  // namespace

bool Fallback::IsAsPlanned(PlanPosition next, TriggerKind kind, UnitId unit) const {
  const Trigger& expected = order_.At(next);
  if (expected.kind != kind || expected.unit != unit) return false;
  for (const Instruction& i : expected.instructions) {
    const bool takes = (i.kind == InstructionKind::kGradCopyIn ||
                        i.kind == InstructionKind::kGradAccumulate || i.kind == InstructionKind::kGradCast) &&
                       plan_.buffers[i.src].role == BufferRole::kGradUnsharded;
    if (!takes) continue;
    const UnitState& state = units_[plan_.buffers[i.src].unit];
    if (state.flat) continue;  // what a backward does not reach has a gradient of zeros
    for (const std::int32_t p : buffer_parameters_[i.src]) {
      if (!state.parameters[p].unsharded().grad().defined()) return false;
    }
  }
  return true;
}

void Fallback::Begin(TriggerKind kind, UnitId unit, const executor::Replayer& replayer,
                     const std::function<void()>& publish) {
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    const bool partial = buffer.role == BufferRole::kPartialReduceOutput;
    if (partial && device_.Part(static_cast<BufferId>(b), 0).defined()) {
      throw std::runtime_error(fmt::format(
          "shardplan: the model deviates from the plan between micro-batches whose gradients are reduced "
          "over the shards but not yet over the replicas: found {}, expected {}",
          NameOf(plan_, {kind, unit, 0}), NameOf(plan_, replayer.Expected())));
    }
  }
  deviation_ = fmt::format("the model deviates from the plan: found {}, expected {} ({})",
                           NameOf(plan_, {kind, unit, replayer.Expected().microbatch}),
                           NameOf(plan_, replayer.Expected()), replayer.Where());
  {
    const ReleaseGil no_gil;
    if (Result<bool> done = device_.Synchronize(); !done) Throw(done.error());
  }
  publish();
  LogPlannedTriggers({replayer.step_index(), replayer.trigger_index()});
  for (UnitState& state : units_) state.unplanned = state.unsharded;
  active_ = true;
}

void Fallback::BeginAtBackwardEnd(std::string deviation, PlanPosition next) {
  deviation_ = std::move(deviation);
  LogPlannedTriggers(next);
  active_ = true;
  backwards_left_ = 1;
  EndBackward();
}

// What the step has passed so far was as planned.
void Fallback::LogPlannedTriggers(PlanPosition now) {
  backwards_left_ = 0;
  std::vector<SegmentGrad> made;  // since the last point; those of a trigger's compute come after it
  for (std::size_t t = 0; t < plan_.steps[now.step].triggers.size(); ++t) {
    const Trigger& trigger = plan_.steps[now.step].triggers[t];
    if (static_cast<std::int32_t>(t) >= now.trigger) {
      backwards_left_ += trigger.kind == TriggerKind::kBackwardEnd ? 1 : 0;
      continue;
    }
    log_.push_back({trigger.kind, trigger.unit, std::exchange(made, {})});
    for (const Instruction& i : trigger.instructions) {
      if (i.kind != InstructionKind::kCompute) continue;
      const std::vector<SegmentGrad>& grads = plan_.segments[i.segment].grads;
      made.insert(made.end(), grads.begin(), grads.end());
    }
  }
}

void Fallback::Pass(TriggerKind kind, UnitId unit, bool full_precision) {
  log_.push_back({kind, unit, {}});
  switch (kind) {
    case TriggerKind::kPreForward:
    case TriggerKind::kPreBackward:
      return gathers_.Unshard(unit, full_precision);
    case TriggerKind::kPostForward:
      return units_[unit].in_backward ? void() : gathers_.Reshard(unit);
    case TriggerKind::kPostBackward:
      Reduce(unit);
      return gathers_.Reshard(unit);
    case TriggerKind::kBackwardEnd:
      return EndBackward();
    default:
      return;
  }
}

// What waits in another dtype than the gradient's, or flat, for a later micro-batch; in the parameter's
// shape.
at::Tensor Fallback::TakeAccumulated(UnitId unit, std::int32_t parameter) {
  at::Tensor sum;
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (buffer.role != BufferRole::kGradUnshardedAccumulated || buffer.unit != unit) continue;
    const auto id = static_cast<BufferId>(b);
    const auto held = buffer_parameters_[id];
    const auto found = std::ranges::find(held, parameter);
    if (found == held.end()) continue;
    const bool apart = held.size() == buffer.parts_bytes.size();
    if (!device_.Part(id, apart ? static_cast<std::int32_t>(found - held.begin()) : 0).defined() ||
        !accumulated_taken_.insert({id, parameter}).second) {
      continue;
    }
    const Result<at::Tensor> waiting = device_.ParameterView(id, parameter);
    if (!waiting) Throw(waiting.error());
    sum = sum.defined() ? sum + *waiting : *waiting;
  }
  return sum;
}

at::Tensor Fallback::TakeGradient(UnitId unit, std::int32_t parameter) {
  at::Tensor grad;
  if (FlatUnit* flat = units_[unit].flat.get()) {
    grad = flat->gradient().gradient(parameter);
  } else {
    const ModelParameter& model_parameter = units_[unit].parameters[parameter];
    grad = LocalGradient(model_parameter);
    model_parameter.unsharded().mutable_grad() = at::Tensor();
  }
  const at::Tensor waiting = TakeAccumulated(unit, parameter);
  if (!waiting.defined()) return grad;
  return grad.defined() ? waiting + grad.to(waiting.scalar_type()) : waiting;
}

// By parameter of the unit; those that are there are noted as made at this point.
std::vector<at::Tensor> Fallback::TakeGradients(UnitId unit) {
  std::vector<at::Tensor> grads;
  for (std::size_t p = 0; p < plan_.units[unit].parameters.size(); ++p) {
    grads.push_back(TakeGradient(unit, static_cast<std::int32_t>(p)));
    if (grads.back().defined()) log_.back().grads.push_back({unit, static_cast<std::int32_t>(p)});
  }
  return grads;
}

// A unit that has trained before in this step adds to that gradient.
void Fallback::ReduceFlat(UnitId unit) {
  FlatUnit& flat = *units_[unit].flat;
  const std::vector<at::Tensor> grads = TakeGradients(unit);
  flat.gradient().Clear();
  at::Tensor reduced;
  {
    const ReleaseGil no_gil;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    reduced = reduction_.ReduceFlat(unit, grads, device_.torch_device());
  }
  if (!reduced.defined()) return;
  const InsideUserCode guards;
  flat.ForgetGradient();
  Status status = flat.PublishGradient(reduced.to(shards_[unit][0].device()));
  if (plan_.strategy.optimizer.in_backward) {
    for (std::size_t p = 0; p < plan_.units[unit].parameters.size() && status; ++p) {
      status = flat.StepInBackward(static_cast<std::int32_t>(p));
    }
  }
  OrThrow(status);
}

void Fallback::Reduce(UnitId unit) {
  UnitState& state = units_[unit];
  if (state.flat) return ReduceFlat(unit);
  const std::vector<at::Tensor> grads = TakeGradients(unit);
  std::vector<at::Tensor> reduced;
  {
    const ReleaseGil no_gil;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    reduced = reduction_.Reduce(unit, grads);
  }
  const InsideUserCode guards;
  for (std::size_t p = 0; p < reduced.size(); ++p) {
    if (!reduced[p].defined()) continue;
    if (!state.parameters[p].PublishGrad(reduced[p])) {
      Throw(PythonError("handing a gradient to its parameter").error());
    }
    if (state.parameters[p].HasGradHooks()) state.parameters[p].RunGradHooks();
  }
}

void Fallback::EndBackward() {
  std::vector<bool> mine(units_.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (const ModelParameter& p : units_[u].parameters) mine[u] = mine[u] || p.unsharded().grad().defined();
  }
  std::vector<bool> any;
  {
    const ReleaseGil no_gil;
    any = reduction_.AnyRank(mine);
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (any[u]) Reduce(static_cast<UnitId>(u));
  }
  gathers_.ReshardAll();
  if (--backwards_left_ > 0) return;
  const HoldGil gil;
  PyRef result = PyRef::Steal(PyObject_CallNoArgs(on_step_end_.get()));
  if (!result) Throw(PythonError("planning again").error());
}

}  // namespace shardplan::python
