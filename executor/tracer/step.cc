// SPDX-License-Identifier: Apache-2.0
#include "tracer/step.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "tracer/meta.h"

namespace shardplan::executor {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// ---- the marks on inputs ----

struct GradientsDone : torch::CustomClassHolder {
  explicit GradientsDone(std::function<void()> function) : call(std::move(function)) {}
  std::function<void()> call;
};

// Passes tensors through; calls `done` when their gradients have come back.
struct MarkedInputs : torch::autograd::Function<MarkedInputs> {
  static variable_list forward(torch::autograd::AutogradContext* context,
                               const c10::intrusive_ptr<GradientsDone>& done, at::TensorList tensors) {
    context->saved_data["done"] = c10::IValue::make_capsule(done);
    variable_list passed;
    // Not detach(): that is a view in autograd's sense, which the module could not change in place.
    for (const at::Tensor& tensor : tensors) passed.push_back(tensor.variable_data());
    return passed;
  }
  static variable_list backward(torch::autograd::AutogradContext* context, variable_list gradients) {
    c10::static_intrusive_pointer_cast<GradientsDone>(context->saved_data["done"].toCapsule())->call();
    gradients.insert(gradients.begin(), at::Tensor());
    return gradients;
  }
};

bool IsMark(const Node* node) {
  return dynamic_cast<const torch::autograd::CppNode<MarkedInputs>*>(node) != nullptr;
}

// Whether a mark on several incoming gradients passes its sum on to where other gradients arrive as well.
bool MarksRegroupSums(const at::Tensor& loss) {
  using Slot = std::pair<const Node*, std::uint32_t>;
  std::set<Slot> several, once;
  std::set<const Node*> seen;
  const auto root = loss.grad_fn();
  std::vector<const Node*> waiting = {root.get()};
  while (!waiting.empty()) {
    const Node* node = waiting.back();
    waiting.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    for (const auto& edge : node->next_edges()) {
      const Slot slot(edge.function.get(), edge.input_nr);
      if (!once.insert(slot).second) several.insert(slot);
      waiting.push_back(edge.function.get());
    }
  }
  for (const Node* node : seen) {
    if (!IsMark(node)) continue;
    for (std::uint32_t i = 0; i < node->num_outputs(); ++i) {  // slot i goes on along edge i
      if (!several.contains(Slot(node, i))) continue;
      const auto next = [](const Slot& slot) {
        const auto& edge = slot.first->next_edge(slot.second);
        return Slot(edge.function.get(), edge.input_nr);
      };
      Slot target = next(Slot(node, i));
      while (target.first != nullptr && IsMark(target.first) && !several.contains(target))
        target = next(target);
      if (several.contains(target)) return true;
    }
  }
  return false;
}

bool InBackward() { return torch::autograd::get_current_graph_task_id() != -1; }

// The node of a function that the user wrote, not of a formula of torch's.
bool IsUsersFunction(const Node& node) { return node.name().starts_with("torch::autograd::CppNode<"); }

template <class Values, class Value>
bool Has(const Values& values, const Value& value) {
  return std::ranges::find(values, value) != std::ranges::end(values);
}

void AppendNew(std::vector<std::int32_t>& values, std::int32_t value) {
  if (!Has(values, value)) values.push_back(value);
}

std::int64_t TokensIn(const at::Tensor& input) {
  if (input.dim() == 0) return 0;
  const bool ids = input.dim() == 2 && !at::isFloatingType(input.scalar_type());
  return ids ? input.numel() : input.size(0);
}

c10::Device DeviceOf(const TracedTree& tree) {
  return tree.parameter_tensors.empty() ? c10::Device(c10::kCPU) : tree.parameter_tensors.front().device();
}

}  // namespace

// Stands in for the hooks after a parameter's accumulation, which it calls.
class StepTracer::GradientHook {
 public:
  GradientHook(const at::Tensor& parameter, std::function<void(const at::Tensor&)> accumulated)
      : parameter_(parameter) {
    using torch::autograd::impl::post_acc_grad_hooks;
    own_ = std::move(post_acc_grad_hooks(parameter_));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter_,
                                                   std::make_unique<Hook>(std::move(accumulated)));
  }
  ~GradientHook() { torch::autograd::impl::set_post_acc_grad_hooks(parameter_, std::move(own_)); }
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

 private:
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::function<void(const at::Tensor&)> function) : call(std::move(function)) {}
    void operator()(const torch::autograd::Variable& tensor) override { call(tensor); }
    std::function<void(const at::Tensor&)> call;
  };
  at::Tensor parameter_;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> own_;
};

StepTracer::StepTracer(const TracedTree& tree, const torch::nn::Module& model, ModuleCalls& calls,
                       bool mark_inputs, RecordedKernels kernels, bool always_trains)
    : tree_(tree),
      calls_(calls),
      mark_inputs_(mark_inputs),
      kernels_(kernels),
      device_(DeviceOf(tree)),
      self_(std::make_shared<StepTracer*>(this)),
      watch_([this](c10::StorageImpl* memory) { Death(memory); }) {
  for (std::size_t i = 0; i < tree.parameter_tensors.size(); ++i) {
    const auto id = static_cast<ParameterId>(i);
    const at::Tensor& parameter = tree.parameter_tensors[i];
    parameters_[MemoryOf(parameter)] = id;
    if (!parameter.requires_grad()) continue;
    hooks_.push_back(std::make_unique<GradientHook>(parameter, [this, id](const at::Tensor& tensor) {
      const StorageId storage = tensor.grad().defined() ? StorageOf(tensor.grad()) : -1;
      if (storage >= 0) storages_[static_cast<std::size_t>(storage)].gradient_of = id;
      Emit(ParameterGradEvent{id, storage});
    }));
  }
  if (device_.is_meta()) meta_composites_.emplace(kernels, always_trains);
  try {
    calls_.Attach(model, *this);
  } catch (const std::logic_error& error) {
    throw RecordingError(ErrorCode::kUsage, error.what());
  }
  std::unordered_map<std::string_view, ModuleId> by_fqn;
  for (std::size_t i = 0; i < tree.modules.size(); ++i) {
    by_fqn.emplace(tree.modules[i].fqn, static_cast<ModuleId>(i));
  }
  for (const std::string& name : calls_.names()) module_ids_.push_back(by_fqn.at(name));
}

StepTracer::~StepTracer() {
  calls_.Detach();
  *self_ = nullptr;
}

// ---- the step ----

void StepTracer::BeginForward() {
  group_begin_ = forwards_.size();
  mode_.emplace(static_cast<OperatorHandler&>(*this));
}

void StepTracer::EndForward() {
  mode_.reset();
  if (pending_) Settle(false);
  phase_ = Phase::kOff;
}

void StepTracer::Backward(at::Tensor loss) {
  if (mark_inputs_ && MarksRegroupSums(loss)) sums_regrouped_ = true;
  Pass& pass = backwards_.emplace_back();
  pass.name = fmt::format("b{}", backwards_.size() - 1);
  for (std::size_t i = group_begin_; i < forwards_.size(); ++i) {
    pass.forwards.push_back(static_cast<std::int32_t>(i));
  }
  events_ = &pass.events;
  phase_ = Phase::kBackward;
  {
    const DispatchMode mode(*this);
    // The place of FSDP's final callback: the engine is done, the caller still holds the loss and its
    // gradient.
    loss.register_hook([self = self_](const at::TensorBase&) {
      torch::autograd::Engine::get_default_engine().queue_callback([self] {
        if (*self != nullptr) (*self)->Emit(BackwardEndEvent{});
      });
    });
    loss.backward();
    loss.reset();
  }
  for (at::Tensor& input : input_tensors_) {
    if (input.requires_grad() && input.is_leaf()) input.mutable_grad().reset();
  }
  if (pending_) Settle(false);
  phase_ = Phase::kOff;
  for (const at::Tensor& parameter : tree_.parameter_tensors) parameter.mutable_grad().reset();
}

TracedStep StepTracer::Finish() {
  if (watch_.lost_one()) {
    throw RecordingError(
        ErrorCode::kBadInput,
        "the step gives a tensor other memory (resize_, set_data), which a trace cannot say");
  }
  for (auto* passes : {&forwards_, &backwards_}) {
    for (Pass& pass : *passes) {
      for (TraceEvent& event : pass.events) {
        auto* const birth = std::get_if<AllocateEvent>(&event);
        if (birth == nullptr) continue;
        const Storage& storage = storages_[static_cast<std::size_t>(birth->storage)];
        birth->role = RoleOf(storage);
        if (birth->role == StorageRole::kParameterGrad) birth->parameter = storage.gradient_of;
      }
      for (Tensor& tensor : pass.tensors) {  // one that came with the model keeps its storage unnamed
        if (tensor.storage < 0) continue;
        const Storage& storage = storages_[static_cast<std::size_t>(tensor.storage)];
        if (!storage.announced && !storage.resident) tensor.storage = -1;
      }
    }
  }
  inputs_.insert(inputs_.end(), captured_.begin(), captured_.end());
  return {
      std::move(inputs_), std::move(buffer_storages_), std::move(forwards_), std::move(backwards_), tokens_,
      sums_regrouped_};
}

StorageRole StepTracer::RoleOf(const Storage& storage) const {
  switch (storage.born) {
    case Phase::kForward:
      if (storage.died == Phase::kForward) return StorageRole::kForwardTemp;
      if (storage.died == Phase::kLoss) return StorageRole::kOutput;
      return storage.is_output && storage.died.value_or(Phase::kOff) == Phase::kOff ? StorageRole::kOutput
                                                                                    : StorageRole::kSaved;
    case Phase::kLoss:
      return storage.died == Phase::kLoss ? StorageRole::kLossTemp : StorageRole::kLossSaved;
    default:
      return storage.gradient_of >= 0 ? StorageRole::kParameterGrad : StorageRole::kBackwardTemp;
  }
}

// ---- modules ----

void StepTracer::Emit(TraceEvent event) {
  if (pending_) Settle(false);
  if (phase_ != Phase::kOff) events_->push_back(std::move(event));
}

void StepTracer::BeginPass() {
  if (pending_) Settle(false);
  Pass& pass = forwards_.emplace_back();
  pass.name = fmt::format("f{}", forwards_.size() - 1);
  pass.grad_enabled = at::GradMode::is_enabled();
  events_ = &pass.events;
  phase_ = Phase::kForward;
  names_.clear();
  counts_.clear();
  MarkNodes();
}

TensorId StepTracer::NameOf(const at::Tensor& tensor) {
  Pass& pass = forwards_.back();
  const auto next = static_cast<TensorId>(pass.tensors.size());
  const auto [known, is_new] = names_.try_emplace(
      tensor.unsafeGetTensorImpl(),
      NamedTensor{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), next});
  if (is_new) {
    Tensor named;
    named.shape = tensor.sizes().vec();
    named.dtype = ToDType(tensor.scalar_type());
    named.requires_grad = tensor.requires_grad();
    named.storage = StorageOf(tensor);
    pass.tensors.push_back(std::move(named));
  }
  return known->second.id;
}

void StepTracer::Enter(std::int32_t module, std::span<at::Tensor* const> inputs) {
  const ModuleId id = module_ids_[static_cast<std::size_t>(module)];
  const std::string& fqn = tree_.modules[static_cast<std::size_t>(id)].fqn;
  if (InBackward()) {
    throw RecordingError(
        ErrorCode::kBadInput,
        fmt::format("\"{}\" is entered in the backward: activation checkpointing is the planner's "
                    "(shardplan plan --checkpoint), not the recorded step's",
                    fqn));
  }
  if (stack_.empty()) {
    if (id != 0) {
      throw RecordingError(
          ErrorCode::kBadInput,
          fmt::format("\"{}\" is entered outside of the model: call the model itself, calls(model, ...)",
                      fqn));
    }
    if (phase_ == Phase::kOff && forwards_.empty()) AddResidents(inputs);
    BeginPass();
  }
  EnterEvent event{id, {}};
  for (const at::Tensor* tensor : inputs) event.inputs.push_back(NameOf(*tensor));
  Emit(std::move(event));
  const std::int32_t occurrence = counts_[id]++;
  stack_.push_back(id);
  open_calls_.push_back(occurrence);
  MarkNodes();
  if (!mark_inputs_ || !at::GradMode::is_enabled() || !tree_.has_parameters[static_cast<std::size_t>(id)])
    return;
  std::vector<at::Tensor*> needing;
  std::vector<at::Tensor> tensors;
  for (at::Tensor* tensor : inputs) {
    if (!tensor->requires_grad()) continue;
    needing.push_back(tensor);
    tensors.push_back(*tensor);
  }
  if (needing.empty()) return;
  const auto position = static_cast<std::int32_t>(forwards_.size() - 1 - group_begin_);
  auto done = c10::make_intrusive<GradientsDone>([self = self_, id, occurrence, position] {
    if (*self != nullptr) (*self)->Emit(InputsGradDoneEvent{id, occurrence, position});
  });
  const variable_list marked = MarkedInputs::apply(done, at::TensorList(tensors));
  for (std::size_t i = 0; i < needing.size(); ++i) {
    names_.insert_or_assign(marked[i].unsafeGetTensorImpl(),
                            NamedTensor{c10::weak_intrusive_ptr<c10::TensorImpl>(marked[i].getIntrusivePtr()),
                                        NameOf(tensors[i])});
    *needing[i] = marked[i];
  }
}

void StepTracer::Leave(std::int32_t module, std::span<at::Tensor* const> outputs) {
  const ModuleId id = module_ids_[static_cast<std::size_t>(module)];
  ExitEvent event{id, {}};
  for (const at::Tensor* tensor : outputs) event.outputs.push_back(NameOf(*tensor));
  Emit(std::move(event));
  const std::int32_t occurrence = open_calls_.back();
  open_calls_.pop_back();
  stack_.pop_back();
  MarkNodes();
  const auto position = static_cast<std::int32_t>(forwards_.size() - 1 - group_begin_);
  if (at::GradMode::is_enabled()) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i]->requires_grad()) continue;
      const OutputGradReadyEvent ready{id, static_cast<std::int32_t>(i), occurrence, position};
      outputs[i]->register_hook([self = self_, ready](const at::TensorBase&) {
        if (*self != nullptr) (*self)->Emit(ready);
      });
    }
  }
  if (!stack_.empty()) return;
  for (const at::Tensor* tensor : outputs) {
    const StorageId storage = StorageOf(*tensor);
    if (storage >= 0) storages_[static_cast<std::size_t>(storage)].is_output = true;
  }
  if (pending_) Settle(false);
  phase_ = Phase::kLoss;
}

void StepTracer::Abandon(std::int32_t) noexcept {
  if (stack_.empty()) return;
  stack_.pop_back();
  open_calls_.pop_back();
}

void StepTracer::MarkNodes() {
  node_marks_.emplace_back(at::sequence_number::peek(), stack_.empty() ? -1 : stack_.back());
}

ModuleId StepTracer::CurrentModule() {
  if (!stack_.empty()) return stack_.back();
  if (phase_ != Phase::kBackward) return -1;
  const auto node = torch::autograd::get_current_node();
  if (!node) return last_module_;  // the engine adds gradients
  if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) {
    const ParameterId parameter = leaf->variable.defined() ? ParameterOf(leaf->variable) : -1;
    return parameter >= 0 ? tree_.owners[static_cast<std::size_t>(parameter)] : last_module_;
  }
  const auto behind = std::ranges::upper_bound(node_marks_, node->sequence_nr(), {},
                                               [](const auto& mark) { return mark.first; });
  last_module_ = behind == node_marks_.begin() ? -1 : std::prev(behind)->second;
  return last_module_;
}

// ---- storages ----

c10::StorageImpl* StepTracer::MemoryOf(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    throw RecordingError(ErrorCode::kBadInput,
                         "the step computes with a tensor that has no storage (a sparse one)");
  }
  return tensor.storage().unsafeGetStorageImpl();
}

bool StepTracer::IsOnDevice(const at::Tensor& tensor) const {
  return tensor.device().type() == device_.type();
}

StorageId StepTracer::Birth(c10::StorageImpl* memory, bool resident) {
  const auto id = static_cast<StorageId>(storages_.size());
  Storage storage;
  storage.size = Bytes{static_cast<std::int64_t>(memory->nbytes())};
  storage.born = resident ? Phase::kOff : phase_;
  storage.resident = resident;
  storages_.push_back(storage);
  live_[memory] = id;
  if (resident) {
    residents_.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(memory));
  } else {
    watch_.Follow(memory);
  }
  return id;
}

void StepTracer::Death(c10::StorageImpl* memory) {
  const auto found = live_.find(memory);
  if (found == live_.end()) return;
  const StorageId id = found->second;
  live_.erase(found);
  if (pending_ && pending_->target == id) {
    Settle(true);
    return;
  }
  Storage& storage = storages_[static_cast<std::size_t>(id)];
  storage.died = phase_;
  Emit(FreeEvent{id});
}

void StepTracer::Announce(StorageId storage, ModuleId module) {
  Storage& record = storages_[static_cast<std::size_t>(storage)];
  record.announced = true;
  Emit(AllocateEvent{storage, record.size, StorageRole::kForwardTemp, module, -1});
}

StorageId StepTracer::StorageOf(const at::Tensor& tensor) const {
  const auto found = live_.find(MemoryOf(tensor));
  return found == live_.end() ? -1 : found->second;
}

ParameterId StepTracer::ParameterOf(const at::Tensor& tensor) const {
  const auto found = parameters_.find(MemoryOf(tensor));
  return found == parameters_.end() ? -1 : found->second;
}

StorageId StepTracer::KnownStorage(const at::Tensor& tensor) {
  const StorageId known = StorageOf(tensor);
  if (known >= 0) return known;
  // Never seen: it was made before the step.
  const StorageId id = Birth(MemoryOf(tensor), /*resident=*/true);
  captured_.push_back({fmt::format("captured.{}", captured_.size()), tensor.sizes().vec(),
                       ToDType(tensor.scalar_type()), id});
  return id;
}

void StepTracer::AddResidents(std::span<at::Tensor* const> root_inputs) {
  for (std::size_t i = 0; i < root_inputs.size(); ++i) {
    const at::Tensor& tensor = *root_inputs[i];
    if (std::ranges::any_of(input_tensors_, [&](const at::Tensor& other) { return other.is_same(tensor); }))
      continue;
    if (ParameterOf(tensor) >= 0) continue;
    const StorageId known = StorageOf(tensor);
    const StorageId storage = known >= 0 ? known : Birth(MemoryOf(tensor), /*resident=*/true);
    inputs_.push_back(
        {fmt::format("args.{}", i), tensor.sizes().vec(), ToDType(tensor.scalar_type()), storage});
    input_tensors_.push_back(tensor);
  }
  if (!input_tensors_.empty()) tokens_ = TokensIn(input_tensors_.front());
  for (const at::Tensor& buffer : tree_.buffer_tensors) {
    const StorageId known = StorageOf(buffer);
    buffer_storages_.push_back(known >= 0 ? known : Birth(MemoryOf(buffer), /*resident=*/true));
  }
}

// ---- operators ----

void StepTracer::Dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  if (phase_ == Phase::kOff) {
    CallOnAnyDevice(op, stack, kernels_);
    return;
  }
  const std::vector<c10::IValue> arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const std::size_t below = stack.size() - count;
  CallOnAnyDevice(op, stack, kernels_);
  Observe(op, arguments, c10::ArrayRef<c10::IValue>(stack.data() + below, stack.size() - below));
}

void StepTracer::Observe(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                         c10::ArrayRef<c10::IValue> results) {
  const std::string full = op.schema().name() + "." + op.schema().overload_name();
  const OperatorKind& kind = kinds_.try_emplace(full, op).first->second;
  if (pending_) Settle(false);  // its target would be gone by now
  std::vector<at::Tensor> outputs = TensorsIn(results);
  // In the order in which a kernel allocates them: this one its random state first.
  if (kind.base == "_scaled_dot_product_efficient_attention" && outputs.size() == 4) {
    std::ranges::rotate(outputs, outputs.begin() + 2);
  }
  std::erase_if(outputs, [this](const at::Tensor& tensor) { return !IsOnDevice(tensor); });
  const std::vector<at::Tensor> given = TensorsIn(arguments);
  std::vector<std::pair<at::Tensor, StorageId>> fresh;
  for (const at::Tensor& tensor : outputs) {
    c10::StorageImpl* const memory = MemoryOf(tensor);
    if (live_.contains(memory) || parameters_.contains(memory) || memory->nbytes() == 0) continue;
    const auto is_its = [&](const at::Tensor& argument) { return MemoryOf(argument) == memory; };
    if (std::ranges::any_of(given, is_its)) {
      KnownStorage(tensor);  // a view of something made before the step
    } else {
      fresh.emplace_back(tensor, Birth(memory, /*resident=*/false));
    }
  }
  if (fresh.empty() && !kind.is_mutable) return;  // a view
  const ModuleId module = CurrentModule();
  if (fresh.size() == 1 && IsInPlaceUnwatched(kind, op, arguments, fresh.front().first)) {
    Hold(kind, arguments, fresh.front().first, fresh.front().second, module);
    return;
  }
  constexpr std::array<std::string_view, 3> kZeros = {"zeros", "new_zeros", "zeros_like"};
  last_zeros_ = !fresh.empty() && Has(kZeros, kind.base) ? fresh.front().second : -1;
  for (const auto& [tensor, storage] : fresh) Announce(storage, module);
  if (!kind.allocates_only) EmitOperator(kind, arguments, results, outputs, module);
}

void StepTracer::EmitOperator(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments,
                              c10::ArrayRef<c10::IValue> results, const std::vector<at::Tensor>& outputs,
                              ModuleId module) {
  OperatorEvent event;
  event.name = kind.name;
  event.module = module;
  std::vector<at::Tensor> inputs;
  using Place =
      std::tuple<c10::StorageImpl*, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;
  std::set<Place> seen;
  for (const ReadTensor& read : ReadTensors(kind, arguments, outputs)) {
    const at::Tensor& tensor = read.tensor;
    if (!IsOnDevice(tensor)) continue;
    inputs.push_back(tensor);
    const ParameterId parameter = ParameterOf(tensor);
    const StorageId storage = parameter < 0 ? KnownStorage(tensor) : -1;
    if (!seen.emplace(MemoryOf(tensor), tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec())
             .second) {
      continue;
    }
    event.bytes_read += Bytes{read.read_bytes};
    if (parameter >= 0) {
      AppendNew(event.parameters, parameter);
    } else {
      AppendNew(event.reads, storage);
    }
  }
  const std::vector<at::Tensor> written = kind.is_mutable ? WrittenArguments(kind, arguments) : outputs;
  for (const at::Tensor& tensor : written) {
    if (!IsOnDevice(tensor) || MemoryOf(tensor)->nbytes() == 0) continue;
    if (ParameterOf(tensor) < 0) AppendNew(event.writes, KnownStorage(tensor));
    event.bytes_written += Bytes{TouchedBytes(tensor)};
  }
  if (inputs.empty() && event.writes.empty()) return;  // nothing on the device
  event.dtype = ArithmeticDType(inputs, outputs.empty() ? written : outputs);
  event.flops = Flops(kind, arguments, results);
  Emit(std::move(event));
}

// See [Note: in place on real tensors].
bool StepTracer::IsInPlaceUnwatched(const OperatorKind& kind, const c10::OperatorHandle& op,
                                    c10::ArrayRef<c10::IValue> arguments, const at::Tensor& result) const {
  if (phase_ != Phase::kBackward || !InBackward()) return false;
  if (arguments.empty() || !arguments[0].isTensor()) return false;
  const at::Tensor& target = arguments[0].toTensor();
  if (!target.defined() || !IsDense(target)) return false;
  const StorageId storage = StorageOf(target);
  if (storage < 0 || storages_[static_cast<std::size_t>(storage)].born != Phase::kBackward ||
      target.scalar_type() != result.scalar_type() || target.sizes() != result.sizes()) {
    return false;
  }
  if (kind.name == "aten.add" && op.schema().overload_name() == "Tensor") {
    const at::Tensor& addend = arguments[1].toTensor();
    return addend.sizes() == target.sizes() && !target.is_view();
  }
  constexpr std::array<std::string_view, 4> kFillZeros = {"index_put", "scatter", "scatter_add", "index_add"};
  const auto node = torch::autograd::get_current_node();
  return Has(kFillZeros, kind.base) && last_zeros_ == storage && node && !IsUsersFunction(*node);
}

void StepTracer::Hold(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments,
                      const at::Tensor& result, StorageId storage, ModuleId module) {
  OperatorEvent event;
  event.name = kind.name;
  event.module = module;
  const std::vector<at::Tensor> inputs = TensorsIn(arguments);
  for (const at::Tensor& tensor : inputs) {
    AppendNew(event.reads, KnownStorage(tensor));
    event.bytes_read += Bytes{TouchedBytes(tensor)};
  }
  event.dtype = ArithmeticDType(inputs, {result});
  event.bytes_written = Bytes{result.numel() * static_cast<std::int64_t>(result.element_size())};
  pending_ = Pending{StorageOf(arguments[0].toTensor()), storage, MemoryOf(result), std::move(event)};
}

void StepTracer::Settle(bool in_place) {
  Pending pending = std::move(*pending_);
  pending_.reset();
  if (in_place) {
    // The result lives on under the target's id; its own, the last one given, is free again.
    storages_.pop_back();
    live_[pending.memory] = pending.target;
    pending.event.name += "_";
    pending.event.writes = {pending.target};
  } else {
    Announce(pending.result, pending.event.module);
    pending.event.writes = {pending.result};
  }
  Emit(std::move(pending.event));
}

}  // namespace shardplan::executor
