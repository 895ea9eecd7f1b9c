// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a Training: which tensors there are, under the names that shardplan.torch.save gives them.
#include "shardplan/checkpoints/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unordered_map>
#include <utility>

#include "shardplan/schemas/dtype.h"
#include "training/cpp/torch_names.h"
#include "training/cpp/training_impl.h"
#include "training/failure.h"

namespace shardplan::executor {
namespace {

using torch::optim::Optimizer;

DType DTypeOf(const at::Tensor& tensor) {
  if (const std::optional<DType> known = KnownDType(tensor.scalar_type())) return *known;
  throw std::invalid_argument(
      fmt::format("shardplan: checkpoints have no dtype {}", at::toString(tensor.scalar_type())));
}

// An optimizer's state of one parameter: tensors of its shape by name, and how many steps it has made.
struct StateOfParameter {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::optional<std::int64_t> step;
};

template <class State>
StateOfParameter AdamStateOf(Optimizer& optimizer, const at::Tensor& parameter, bool amsgrad, bool makes) {
  auto& states = optimizer.state();
  auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end()) {
    if (!makes) return {};
    auto state = std::make_unique<State>();
    state->step(0);
    state->exp_avg(at::zeros_like(parameter, at::MemoryFormat::Contiguous));
    state->exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Contiguous));
    if (amsgrad) state->max_exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Contiguous));
    found = states.insert({parameter.unsafeGetTensorImpl(), std::move(state)}).first;
  }
  auto& state = static_cast<State&>(*found->second);
  StateOfParameter result = {.tensors = {{"exp_avg", state.exp_avg()}, {"exp_avg_sq", state.exp_avg_sq()}},
                             .step = state.step()};
  if (amsgrad) result.tensors.emplace_back("max_exp_avg_sq", state.max_exp_avg_sq());
  return result;
}

StateOfParameter SgdStateOf(Optimizer& optimizer, const at::Tensor& parameter, bool makes) {
  auto& states = optimizer.state();
  auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end()) {
    if (!makes) return {};
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(at::zeros_like(parameter, at::MemoryFormat::Contiguous));
    found = states.insert({parameter.unsafeGetTensorImpl(), std::move(state)}).first;
  }
  auto& state = static_cast<torch::optim::SGDParamState&>(*found->second);
  if (!state.momentum_buffer().defined()) return {};
  return {.tensors = {{"momentum_buffer", state.momentum_buffer()}}, .step = {}};
}

// makes: a state that is not there yet, to be loaded. std::invalid_argument: of another optimizer.
StateOfParameter StateOf(Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group,
                         const at::Tensor& parameter, bool makes) {
  if (dynamic_cast<torch::optim::AdamW*>(&optimizer) != nullptr) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    return AdamStateOf<torch::optim::AdamWParamState>(optimizer, parameter, options.amsgrad(), makes);
  }
  if (dynamic_cast<torch::optim::Adam*>(&optimizer) != nullptr) {
    const auto& options = static_cast<const torch::optim::AdamOptions&>(group.options());
    return AdamStateOf<torch::optim::AdamParamState>(optimizer, parameter, options.amsgrad(), makes);
  }
  if (dynamic_cast<torch::optim::SGD*>(&optimizer) != nullptr) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    return options.momentum() == 0 ? StateOfParameter() : SgdStateOf(optimizer, parameter, makes);
  }
  throw std::invalid_argument("shardplan: of optimizers, AdamW, Adam and SGD are saved and loaded");
}

void SetStep(Optimizer& optimizer, const at::Tensor& parameter, std::int64_t step) {
  auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) {
    adamw->step(step);
  } else if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) {
    adam->step(step);
  }
}

}  // namespace

// Everything that a checkpoint of this rank has.
class Training::Impl::State {
 public:
  State(Training::Impl& impl, bool loads) : impl_(impl), loads_(loads) {}

  Status Add(Optimizer* optimizer, const std::map<std::string, at::Tensor>& extra) {
    Plan without_optimizer = impl_.plan();
    without_optimizer.strategy.optimizer = {.kind = OptimizerKind::kNone};
    Result<StateLayout> parameters = StateLayoutOf(without_optimizer);
    if (!parameters) return std::unexpected(parameters.error());
    layout_ = {.name = parameters->name, .mesh = parameters->mesh, .flats = {}, .tensors = {}};
    for (const StateTensor& tensor : parameters->tensors) AddParameter(tensor);
    for (const auto& [name, buffer] : impl_.tree().buffers) AddWhole({"model", name}, buffer);
    if (optimizer != nullptr) {
      for (const StateTensor& tensor : parameters->tensors) AddStates(*optimizer, tensor);
    }
    for (const auto& [name, tensor] : extra) AddWhole({"extra", name}, tensor);
    for (const Saved& saved : saved_) layout_.tensors.push_back(saved.tensor);
    return CheckStateLayout(layout_);
  }

  Result<SessionState> ToSave(std::int64_t rank) const {
    Result<SessionState> state = StateOfRank(layout_, rank, Storage());
    if (!state) return state;
    for (const Saved& saved : saved_) {
      std::vector<CheckpointKey>& keys = state->description.keys[saved.tensor.name];
      for (const std::string& key : saved.path) keys.push_back({CheckpointKey::Kind::kText, key});
    }
    return state;
  }

  const StateLayout& layout() const { return layout_; }
  ReshardStorage Storage() const {
    return [this](const StateTensor& tensor) {
      const auto found = by_name_.find(tensor.name);
      return found == by_name_.end() ? at::Tensor() : saved_[found->second].storage;
    };
  }
  // Puts what was loaded into copies where it belongs.
  void Loaded(Optimizer* optimizer) {
    for (const LoadedStep& step : steps_) {
      SetStep(*optimizer, step.parameter, static_cast<std::int64_t>(step.value.item<float>()));
    }
    for (auto& [to, from] : copies_) to.copy_(from);
  }

 private:
  // A tensor of the checkpoint, and this rank's storage of it.
  struct Saved {
    StateTensor tensor;
    at::Tensor storage;             // contiguous
    std::vector<std::string> path;  // the keys of the nested dicts that the name comes from
  };
  // A count of steps that was loaded, and the parameter whose it is.
  struct LoadedStep {
    at::Tensor parameter;
    at::Tensor value;
  };

  const at::Tensor& ParameterOf(const std::string& fqn) const {
    const ModelTree& tree = impl_.tree();
    return tree.parameters[tree.by_name.at(fqn)].tensor;
  }

  void Add(std::vector<std::string> path, StateTensor tensor, const at::Tensor& value) {
    tensor.name = fmt::format("{}", fmt::join(path, "."));
    tensor.dtype = DTypeOf(value);
    at::Tensor storage = value.detach();
    if (!storage.is_contiguous()) {
      storage = storage.contiguous();
      if (loads_) copies_.emplace_back(value.detach(), storage);
    }
    by_name_.emplace(tensor.name, saved_.size());
    saved_.push_back({std::move(tensor), std::move(storage), std::move(path)});
  }

  void AddParameter(const StateTensor& tensor) {
    const ModelTree& tree = impl_.tree();
    const TreeParameter& parameter = tree.parameters[tree.by_name.at(tensor.name)];
    // A tied one is there under each of its names, as in a state_dict; one of them is enough to load it.
    const std::size_t names = loads_ ? 1 : parameter.names.size();
    for (std::size_t n = 0; n < names; ++n) Add({"model", parameter.names[n]}, tensor, parameter.tensor);
  }

  void AddStates(Optimizer& optimizer, const StateTensor& tensor) {
    const at::Tensor& parameter = ParameterOf(tensor.name);
    for (const auto& group : optimizer.param_groups()) {
      const auto is_it = [&](const at::Tensor& other) { return other.is_same(parameter); };
      if (std::ranges::none_of(group.params(), is_it)) continue;
      const StateOfParameter state =
          StateOf(optimizer, group, parameter, loads_ && parameter.requires_grad());
      for (const auto& [name, value] : state.tensors) {
        Add({"optimizer", "state", tensor.name, name}, tensor, value);
      }
      if (state.step) {
        const at::Tensor count = at::full({}, static_cast<double>(*state.step), at::kFloat);
        if (loads_) steps_.push_back({parameter, count});
        AddWhole({"optimizer", "state", tensor.name, "step"}, count);
      }
    }
  }

  // The same on all ranks.
  void AddWhole(std::vector<std::string> path, const at::Tensor& value) {
    Add(std::move(path), {.name = {}, .dtype = {}, .shape = value.sizes().vec()}, value);
  }

  Training::Impl& impl_;
  const bool loads_;
  StateLayout layout_;
  std::vector<Saved> saved_;
  std::unordered_map<std::string, std::size_t> by_name_;  // index into saved_
  std::vector<LoadedStep> steps_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

namespace {

Status CheckBetweenSteps(Runtime& runtime, std::string_view what) {
  if (runtime.BetweenSteps()) return {};
  return MakeError(ErrorCode::kUsage, fmt::format("{} works between steps only ({})", what, runtime.Where()));
}

}  // namespace

Session& Training::Impl::SessionOfAll() {
  if (!session_) {
    SessionOptions options;
    options.rank = options_.rank;
    options.ranks = options_.ranks;
    options.peers = peers_;
    options.timeout = options_.timeout;
    if (options_.store) options.store = c10::make_intrusive<c10d::PrefixStore>("saves", options_.store);
    session_ = std::make_unique<Session>(std::move(options));
  }
  return *session_;
}

Status Training::Impl::Save(const std::string& path, Optimizer* optimizer,
                            const std::map<std::string, at::Tensor>& extra, const SaveOptions& options,
                            bool background) {
  if (Status between = CheckBetweenSteps(*runtime_, "a save"); !between) return between;
  const at::NoGradGuard no_grad;
  runtime_->ShowShards(true);
  State state(*this, /*loads=*/false);
  Status added = state.Add(optimizer, extra);
  Result<SessionState> to_save =
      added ? state.ToSave(options_.rank) : Result<SessionState>(std::unexpected(added.error()));
  runtime_->ShowShards(false);
  if (!to_save) return std::unexpected(to_save.error());
  Session& session = SessionOfAll();
  return background ? session.SaveInBackground(path, std::move(*to_save), options)
                    : session.Save(path, std::move(*to_save), options);
}

Status Training::Impl::Load(const std::string& path, Optimizer* optimizer,
                            const std::map<std::string, at::Tensor>& extra) {
  if (Status between = CheckBetweenSteps(*runtime_, "a load"); !between) return between;
  const at::NoGradGuard no_grad;
  State state(*this, /*loads=*/true);
  if (Status added = state.Add(optimizer, extra); !added) return added;
  if (Status loaded = SessionOfAll().Load(path, state.layout(), state.Storage()); !loaded) return loaded;
  state.Loaded(optimizer);
  return {};
}

Status Training::Save(const std::string& path, Optimizer* optimizer,
                      const std::map<std::string, at::Tensor>& extra, const SaveOptions& options) {
  return impl_->Save(path, optimizer, extra, options, /*background=*/false);
}

Status Training::SaveInBackground(const std::string& path, Optimizer* optimizer,
                                  const std::map<std::string, at::Tensor>& extra,
                                  const SaveOptions& options) {
  return impl_->Save(path, optimizer, extra, options, /*background=*/true);
}

Status Training::Wait() { return impl_->session() == nullptr ? Status() : impl_->session()->Wait(); }
bool Training::IsSaving() const { return impl_->session() != nullptr && impl_->session()->IsSaving(); }
SaveFigures Training::save_figures() const {
  return impl_->session() == nullptr ? SaveFigures() : impl_->session()->figures();
}

Status Training::Load(const std::string& path, Optimizer* optimizer,
                      const std::map<std::string, at::Tensor>& extra) {
  return impl_->Load(path, optimizer, extra);
}

}  // namespace shardplan::executor
