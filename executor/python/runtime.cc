#include "runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "shardplan/executor/layout.h"

namespace shardplan::python {
namespace {

[[noreturn]] void Throw(const Error& error) { throw std::runtime_error("shardplan: " + ToString(error)); }

void OrThrow(const Status& status) {
  if (!status) Throw(status.error());
}

// The error of a Python call that failed, as a Status.
Status PythonError(const char* doing) {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyRef text = PyRef::Steal(value ? PyObject_Str(value) : nullptr);
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  std::string message = fmt::format("{}: {}", doing, utf8 ? utf8 : "unknown Python error");
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return MakeError(ErrorCode::kInternal, std::move(message));
}

// The GIL for a callback of the engine, which runs without it.
class HoldGil {
 public:
  HoldGil() : state_(PyGILState_Ensure()) {}
  ~HoldGil() { PyGILState_Release(state_); }
  HoldGil(const HoldGil&) = delete;
  HoldGil& operator=(const HoldGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Lets go of the GIL, if this thread holds it, while the engine may block on other ranks.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

// Has the model no hook for it?
bool PassedSilently(TriggerKind kind) {
  switch (kind) {
    case TriggerKind::kStepBegin:
    case TriggerKind::kOptimizerStep:
    case TriggerKind::kZeroGrad:
    case TriggerKind::kUserCall:
    case TriggerKind::kStepEnd:
      return true;
    default:
      return false;
  }
}

}  // namespace

Runtime::Runtime(std::shared_ptr<const Plan> plan, std::int64_t rank,
                 std::unique_ptr<executor::TorchDevice> device,
                 std::unique_ptr<executor::Collectives> collectives,
                 std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups)
    : plan_(std::move(plan)),
      rank_(rank),
      device_(std::move(device)),
      collectives_(std::move(collectives)),
      units_(plan_->units.size()),
      shards_(plan_->units.size()),
      evaluation_(std::make_unique<Evaluation>(*plan_, *device_, std::move(groups), shards_)),
      unsharded_buffer_(plan_->units.size(), -1) {
  for (std::size_t i = 0; i < plan_->buffers.size(); ++i) {
    const Buffer& buffer = plan_->buffers[i];
    buffer_parameters_.push_back(buffer.unit < 0 ? std::vector<std::int32_t>()
                                                 : executor::ParametersOf(*plan_, buffer));
    if (buffer.role == BufferRole::kParamUnsharded) unsharded_buffer_[buffer.unit] = static_cast<BufferId>(i);
  }
}

// The last owner may be the autograd graph, which lets go without the GIL. Python objects need it to die;
// process groups must die without it: they wait for their threads, and these may want it.
Runtime::~Runtime() {
  if (Py_IsInitialized() != 0) {
    const HoldGil gil;
    for (UnitState& unit : units_) unit.parameters.clear();
    const ReleaseGil no_gil;
    engine_.reset();
    collectives_.reset();
    evaluation_.reset();
  }
}

void Runtime::SetShards(UnitId unit, std::vector<at::Tensor> padded) {
  for (std::size_t i = 0; i < plan_->buffers.size(); ++i) {
    const Buffer& buffer = plan_->buffers[i];
    if (buffer.role != BufferRole::kParamSharded || buffer.unit != unit) continue;
    std::vector<at::Tensor> parts;
    for (const std::int32_t parameter : buffer_parameters_[i]) parts.push_back(padded[parameter]);
    OrThrow(device_->SetParts(static_cast<BufferId>(i), std::move(parts)));
  }
  shards_[unit] = std::move(padded);
}

void Runtime::Start() {
  auto engine = executor::Engine::Create(*plan_, rank_, *device_, *collectives_, this);
  if (!engine) Throw(engine.error());
  engine_ = std::move(*engine);
}

at::Tensor Runtime::UnshardedView(UnitId unit, std::int32_t parameter) const {
  Result<at::Tensor> view = device_->ParameterView(unsharded_buffer_[unit], parameter);
  if (!view) Throw(view.error());
  return *view;
}

void Runtime::AddParameter(UnitId unit, ModelParameter parameter) {
  units_[unit].parameters.push_back(std::move(parameter));
}

bool Runtime::BetweenSteps() const {
  const TriggerKind next = engine_->Expected().kind;
  return engine_->AtStepBegin() || next == TriggerKind::kOptimizerStep || next == TriggerKind::kZeroGrad ||
         next == TriggerKind::kStepEnd;
}

void Runtime::Fire(const executor::TriggerKey& trigger) {
  const ReleaseGil no_gil;
  // Below autograd, and without counting versions: what is copied into an unsharded parameter is no change
  // that a saved tensor has to know of (and dispatch is cheaper).
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  OrThrow(engine_->Fire(trigger));
}

void Runtime::Pass(TriggerKind kind, UnitId unit) {
  while (PassedSilently(engine_->Expected().kind)) {
    if (engine_->AtStepBegin()) CheckParametersInPlace();
    Fire(executor::TriggerKey(engine_->Expected()));
  }
  Fire({kind, unit, engine_->Expected().microbatch});
}

// See [Note: evaluation].
bool Runtime::IsEvaluation() const { return !at::GradMode::is_enabled() && BetweenSteps(); }

void Runtime::Evaluate(TriggerKind kind, UnitId unit) {
  const ReleaseGil no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (kind == TriggerKind::kPreForward) {
    OrThrow(evaluation_->Unshard(unit));
    OrThrow(BindUnsharded(unit, -1));
  } else {
    OrThrow(BindSharded(unit, -1));
    OrThrow(evaluation_->Reshard(unit));
  }
}

void Runtime::PreForward(UnitId unit) {
  if (unit < 0) return;
  IsEvaluation() ? Evaluate(TriggerKind::kPreForward, unit) : Pass(TriggerKind::kPreForward, unit);
}

void Runtime::PostForward(UnitId unit) {
  if (unit < 0) return;
  IsEvaluation() ? Evaluate(TriggerKind::kPostForward, unit) : Pass(TriggerKind::kPostForward, unit);
}

void Runtime::PreBackward(UnitId unit) {
  QueueBackwardEnd();
  if (unit < 0) return;
  UnitState& state = units_[unit];
  if (state.in_backward) {
    // Another output tensor of the unit: a point that a plan may name, but need not.
    const executor::TriggerKey& expected = engine_->Expected();
    if (expected.kind != TriggerKind::kPreBackward || expected.unit != unit) return;
  }
  Pass(TriggerKind::kPreBackward, unit);
  state.in_backward = true;
}

void Runtime::PostBackward(UnitId unit) {
  units_[unit].in_backward = false;
  Pass(TriggerKind::kPostBackward, unit);
}

void Runtime::QueueBackwardEnd() {
  if (backward_end_queued_) return;
  backward_end_queued_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->BackwardEnd(); });
}

void Runtime::BackwardEnd() {
  backward_end_queued_ = false;
  // Units none of whose inputs needed a gradient.
  while (engine_->Expected().kind == TriggerKind::kPostBackward) {
    Fire(executor::TriggerKey(engine_->Expected()));
  }
  Pass(TriggerKind::kBackwardEnd, -1);
  for (UnitState& unit : units_) unit.in_backward = false;
  PublishGradients();
  CheckNoGradientIsLeft();
}

void Runtime::PublishGradients() {
  const HoldGil gil;
  for (const auto& [unit, buffer] : ready_) {
    for (const std::int32_t parameter : ParametersOf(buffer)) {
      Result<at::Tensor> local = device_->ShardedView(buffer, parameter, rank_);
      if (!local) Throw(local.error());
      if (!units_[unit].parameters[parameter].PublishGrad(*local)) {
        OrThrow(PythonError("handing a gradient to its parameter"));
      }
    }
  }
  ready_.clear();
}

Status Runtime::BindUnsharded(UnitId unit, BufferId) {
  const HoldGil gil;
  for (const ModelParameter& parameter : units_[unit].parameters) {
    if (!parameter.BindUnsharded()) return PythonError("binding an unsharded parameter");
  }
  return {};
}

Status Runtime::BindSharded(UnitId unit, BufferId) {
  const HoldGil gil;
  for (const ModelParameter& parameter : units_[unit].parameters) {
    if (!parameter.BindSharded()) return PythonError("binding a sharded parameter");
  }
  return {};
}

Status Runtime::TakeGradients(UnitId unit, BufferId buffer) {
  std::vector<at::Tensor> parts;
  parts.reserve(ParametersOf(buffer).size());
  for (const std::int32_t parameter : ParametersOf(buffer)) {
    const at::Tensor& grad = units_[unit].parameters[parameter].unsharded().grad();
    if (!grad.defined()) {
      return MakeError(
          ErrorCode::kNegative,
          fmt::format("{} got no gradient in this backward, but the plan reduces it: the model does not "
                      "use it as in the trace",
                      Describe(unit, parameter)));
    }
    parts.push_back(grad);
  }
  return device_->SetParts(buffer, std::move(parts));
}

Status Runtime::DropGradients(UnitId unit, BufferId buffer) {
  for (const std::int32_t parameter : ParametersOf(buffer)) {
    units_[unit].parameters[parameter].unsharded().mutable_grad() = at::Tensor();
  }
  return {};
}

Status Runtime::ShardedGradientsReady(UnitId unit, BufferId buffer) {
  const auto same = [&](const ReadyGradients& ready) { return ready.buffer == buffer; };
  if (std::none_of(ready_.begin(), ready_.end(), same)) ready_.push_back({unit, buffer});
  return {};
}

std::string Runtime::Describe(UnitId unit, std::int32_t parameter) const {
  return fmt::format("parameter {}", plan_->units[unit].parameters[parameter].fqn);
}

void Runtime::CheckParametersInPlace() const {
  const HoldGil gil;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (std::size_t i = 0; i < units_[unit].parameters.size(); ++i) {
      if (units_[unit].parameters[i].IsBoundSharded()) continue;
      throw std::runtime_error(
          fmt::format("shardplan: {} was replaced after shardplan.torch.apply; change it in place, or apply "
                      "the plan to the new model",
                      Describe(static_cast<UnitId>(unit), static_cast<std::int32_t>(i))));
    }
  }
}

void Runtime::CheckNoGradientIsLeft() const {
  if (!BetweenSteps()) return;  // another micro-batch follows
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (std::size_t i = 0; i < units_[unit].parameters.size(); ++i) {
      if (!units_[unit].parameters[i].unsharded().grad().defined()) continue;
      throw std::runtime_error(fmt::format(
          "shardplan: {} got a gradient that the plan does not reduce: the model uses it in another way "
          "than in the trace",
          Describe(static_cast<UnitId>(unit), static_cast<std::int32_t>(i))));
    }
  }
}

}  // namespace shardplan::python
