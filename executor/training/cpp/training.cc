// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/training.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "replay/first_line.h"
#include "shardplan/executor/backends.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/verifier/verifier.h"
#include "torch/agreement.h"
#include "torch/launch.h"
#include "training/cpp/torch_names.h"
#include "training/cpp/training_impl.h"
#include "training/failure.h"

namespace shardplan::executor {
namespace {

c10::intrusive_ptr<c10d::Store> Part(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name) {
  if (!store) return nullptr;
  return c10::make_intrusive<c10d::PrefixStore>(name, store);
}

bool MatchesRule(const UnitRule& rule, const std::string& fqn, const torch::nn::Module& module) {
  constexpr std::string_view kClass = "class:";
  return std::ranges::any_of(rule.modules, [&](const std::string& entry) {
    return entry.starts_with(kClass) ? entry.substr(kClass.size()) == ClassNameInDocuments(module)
                                     : Matches(entry, fqn);
  });
}

// The dtypes that a unit's inputs and outputs are cast to: what of mixed precision is in the plan's strategy
// and not in its program.
void SetCasts(const Plan& plan, const std::string& fqn, const torch::nn::Module& module,
              HookOptions& options) {
  const std::vector<UnitRule>& rules = plan.strategy.units;
  const auto rule =
      std::ranges::find_if(rules, [&](const UnitRule& r) { return MatchesRule(r, fqn, module); });
  const std::optional<MixedPrecision>& precision =
      rule != rules.end() && rule->mixed_precision ? rule->mixed_precision : plan.strategy.mixed_precision;
  if (!precision) return;
  if (precision->cast_forward_inputs.value_or(true) && precision->param_dtype) {
    options.input_dtype = ToScalarType(*precision->param_dtype);
  }
  if (precision->output_dtype) options.output_dtype = ToScalarType(*precision->output_dtype);
}

}  // namespace

// ---- LibTorchRuntime ----

// The last owner may be the autograd graph.
LibTorchRuntime::~LibTorchRuntime() { DropExecution(); }

void LibTorchRuntime::AddModuleParameter(UnitId unit, std::unique_ptr<ModuleParameter> parameter) {
  parameters_.resize(units().size());
  parameters_[unit].push_back(parameter.get());
  AddParameter(unit, std::move(parameter));
}

void LibTorchRuntime::AdoptChanges() {
  for (std::size_t u = 0; u < parameters_.size(); ++u) {
    for (std::size_t p = 0; p < parameters_[u].size(); ++p) {
      if (!parameters_[u][p]->IsReplaced()) continue;
      throw TrainingError(
          ErrorCode::kUsage,
          fmt::format("{} was given other memory after Training::Create (torch::load, Module::to, set_data): "
                      "load and convert the model before, or load through Training::Load",
                      ParameterText(plan(), static_cast<UnitId>(u), static_cast<std::int32_t>(p))));
    }
  }
}

std::string LibTorchRuntime::ExplainDeviation(UnitId unit) {
  if (unit >= std::ssize(entered_) || entered_[unit]) return {};
  return "the model has not passed that module to ModuleCalls yet";
}

// ---- TrainingOptions ----

Result<TrainingOptions> TrainingOptions::FromEnvironment(c10::DeviceType device,
                                                         std::chrono::milliseconds timeout) {
  const Result<std::optional<RankEnvironment>> read = ReadRankEnvironment();
  if (!read) return std::unexpected(read.error());
  const RankEnvironment environment = read->value_or(RankEnvironment());
  TrainingOptions options;
  options.rank = environment.rank;
  options.ranks = environment.world_size;
  options.timeout = timeout;
  if (device == c10::DeviceType::CUDA) {
    const int gpus = CudaDeviceCount();
    if (environment.local_rank >= gpus) {
      return std::unexpected(Error{.code = ErrorCode::kEnvironment,
                                   .message = "there is no GPU for this rank (LOCAL_RANK)",
                                   .found = fmt::format("{} GPUs", gpus),
                                   .expected = fmt::format("more than {}", environment.local_rank)});
    }
    options.device = c10::Device(device, static_cast<c10::DeviceIndex>(environment.local_rank));
  } else {
    options.device = c10::Device(device);
  }
  if (options.ranks == 1) return options;
  auto store = MeetAtStore(environment, timeout);
  if (!store) return std::unexpected(store.error());
  options.store = Part(*store, "shardplan/training");
  if (!environment.store_is_served) options.store_rank = 0;
  if (!IsLoopback(environment.master_address)) options.address.clear();
  return options;
}

// ---- Training::Impl ----

Training::Impl::Impl(std::shared_ptr<torch::nn::Module> model, ModuleCalls calls, Plan plan,
                     TrainingOptions options)
    : model_(std::move(model)),
      calls_(std::move(calls)),
      plan_(std::make_shared<const Plan>(std::move(plan))),
      options_(std::move(options)),
      tree_(TreeOf(*model_)) {}

Training::Impl::~Impl() {
  if (attached_) calls_.Detach();
  session_.reset();
  if (runtime_) runtime_->LeaveModel();
  hooks_.clear();
  runtime_.reset();
  if (peers_ && !options_.peers) peers_->Leave();
}

void Training::Impl::Warn(const std::string& text) const {
  if (options_.warn) return options_.warn(text);
  std::fputs((text + "\n").c_str(), stderr);
}

// Whether this rank can take part.
Status Training::Impl::CheckHere() const {
  const TrainingOptions& o = options_;
  if (o.ranks != plan_->world_size) {
    return MakeInputError("/world_size", "the plan is for another number of ranks",
                          fmt::format("{}", plan_->world_size), fmt::format("{}", o.ranks));
  }
  if (o.rank < 0 || o.rank >= o.ranks) {
    return MakeError(ErrorCode::kUsage, fmt::format("rank {} of {} ranks", o.rank, o.ranks));
  }
  if (o.ranks > 1 && !o.store) {
    return MakeError(ErrorCode::kUsage, "several ranks need a store that they share");
  }
  if (!o.device.is_cpu() && !o.device.is_cuda()) {
    return MakeError(ErrorCode::kUsage, "a training runs on cpu and cuda, not on " + o.device.str());
  }
  if (o.verify) {
    const Result<std::vector<std::string>> faults =
        CheckForUse(*plan_, "TrainingOptions::verify = false trains by it as it is");
    if (!faults) return std::unexpected(faults.error());
    for (const std::string& fault : *faults) {
      Warn("shardplan: the plan has a fault because PyTorch has it: " + fault);
    }
  } else {
    Warn("shardplan: the plan is not verified (TrainingOptions::verify)");
  }
  if (plan_->strategy.optimizer.in_backward) {
    return MakeInputError("/strategy/optimizer/in_backward",
                          "optimizers that step inside the backward are Python's", "true", "false");
  }
  for (const TreeParameter& parameter : tree_.parameters) {
    if (!parameter.tensor.is_meta()) continue;
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("parameter {} is on the meta device: modules in C++ cannot be given memory "
                                 "later; build the model on cpu",
                                 parameter.names.front()));
  }
  return CheckFits(*plan_, tree_);
}

// Before anything is communicated. Every rank has an error, or none.
Status Training::Impl::AgreeWithOthers(const Status& here) {
  if (options_.ranks == 1 || !options_.store) return here;
  peers_ = options_.peers;
  if (!peers_) {
    peers_ = std::make_shared<Peers>(PeersOptions{.store = options_.store,
                                                  .rank = options_.rank,
                                                  .ranks = options_.ranks,
                                                  .store_rank = options_.store_rank,
                                                  .speak = nullptr});
  }
  Statement statement{.facts = {}, .failure = here ? "" : ToString(here.error())};
  if (here) {
    statement.facts = {
        {"the plan", Digest(ToJson(*plan_))},
        {"shardplan's version", SHARDPLAN_VERSION},
        {"the model (names, shapes and dtypes of its parameters and buffers)", SignatureOf(tree_)}};
  }
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(options_.ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  Status agreed =
      Agree(Part(options_.store, "agree"), options_.rank, ranks, statement, options_.timeout, peers_.get());
  if (!here) return here;
  if (!agreed && peers_->Dead()) peers_->Fail();
  return agreed;
}

Result<std::shared_ptr<LibTorchRuntime>> Training::Impl::MakeRuntime() {
  const TrainingOptions& o = options_;
  const GlooOptions gloo = {
      .store = Part(o.store, "groups"), .address = o.address, .timeout = o.timeout, .peers = peers_};
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups(plan_->communicators.size());
  c10::intrusive_ptr<c10d::ProcessGroup> world;
  if (o.ranks > 1) {
    // The plan's communicators, and one of all ranks.
    Plan with_world;
    with_world.world_size = plan_->world_size;
    with_world.communicators = plan_->communicators;
    with_world.communicators.push_back({.name = "world", .size = plan_->world_size, .stride = 1, .dims = {}});
    auto made = MakeGlooGroups(with_world, o.rank, gloo);
    if (!made) return std::unexpected(made.error());
    world = std::move(made->back());
    made->pop_back();
    groups = std::move(*made);
  }
  groups_ = std::make_unique<HostGroups>(groups, world, peers_);
  std::unique_ptr<TorchDevice> device;
  std::unique_ptr<Collectives> collectives;
  std::shared_ptr<DeviationConsensus> consensus;
  if (o.ranks > 1) {
    std::vector<std::int64_t> names(static_cast<std::size_t>(o.ranks));
    std::iota(names.begin(), names.end(), 0);
    consensus = std::make_shared<DeviationConsensus>(Part(o.store, "deviations"), o.rank, std::move(names),
                                                     o.timeout, peers_);
  }
  if (o.device.is_cuda()) {
    auto cuda = MakeCudaDevice(std::max<int>(o.device.index(), 0), o.memory);
    if (!cuda) return std::unexpected(cuda.error());
    device = std::move(*cuda);
    allocations_ = CudaAllocations(std::max<int>(o.device.index(), 0));
    auto nccl = MakeNcclCollectives(
        *device, {o.timeout, Part(o.store, "nccl"), plan_->world_size, peers_, {}, consensus});
    if (!nccl) return std::unexpected(nccl.error());
    collectives = std::move(*nccl);
  } else {
    allocations_ = CountCpuAllocations();
    device = MakeCpuDevice(o.memory);
    collectives = MakeProcessGroupCollectives(
        *device, {groups, o.timeout, Part(o.store, "progress"), peers_, {}, consensus});
  }
  RuntimeOptions options = {
      .after_deviation = "Plan the step as it is trained, or train with OnDeviation::kOnDemand",
      .after_freezing =
          "it was changed after Training::Create. Set it before, and trace and plan the model "
          "again, or leave it as it was and keep the parameter out of the optimizer",
      .gives_up = "Training::AbandonStep",
      .warn = [this](const std::string& text) { Warn(text); },
      .consensus = std::move(consensus)};
  return std::make_shared<LibTorchRuntime>(plan_, o.rank, std::move(device), std::move(collectives),
                                           std::move(groups), std::move(options));
}

Status Training::Impl::ShardUnit(UnitId id) {
  const Unit& unit = plan_->units[id];
  const std::int64_t pieces = ShardCount(*plan_, unit);
  const std::int64_t place = unit.shard_communicator < 0
                                 ? 0
                                 : RankInGroup(plan_->communicators[unit.shard_communicator], options_.rank);
  const bool on_host = std::ranges::any_of(plan_->buffers, [&](const Buffer& buffer) {
    return buffer.unit == id && buffer.role == BufferRole::kParamSharded &&
           buffer.memory != MemoryKind::kDevice;
  });
  const c10::Device device = on_host ? c10::Device(at::kCPU) : options_.device;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> padded;
  for (const UnitParameter& expected : unit.parameters) {
    at::Tensor parameter = tree_.parameters[tree_.by_name.at(expected.fqn)].tensor;
    const at::Tensor whole = parameter.detach();
    at::TensorOptions options = whole.options().device(device);
    if (on_host && options_.device.is_cuda()) options = options.pinned_memory(true);
    at::Tensor& own = padded.emplace_back(at::zeros({PaddedPieceNumel(expected, pieces)}, options));
    const std::vector<std::int64_t> shape = ShardShape(expected, pieces, place);
    const std::int64_t numel =
        std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    const at::Tensor shard = own.narrow(0, 0, numel).view(shape);
    if (numel > 0) {
      const bool is_cut = !expected.shape.empty();
      const std::int64_t dim = expected.shard_dim;
      const RowRange rows = is_cut ? ChunkRows(expected.shape[dim], pieces, place) : RowRange{0, 1};
      shard.copy_(is_cut ? whole.narrow(dim, rows.first, rows.count) : whole);
    }
    parameter.set_data(shard);
  }
  runtime_->SetShards(id, std::move(padded));
  return {};
}

Status Training::Impl::Shard() {
  for (std::size_t u = 0; u < plan_->units.size(); ++u) {
    if (Status status = ShardUnit(static_cast<UnitId>(u)); !status) return status;
  }
  for (const auto& [name, tensor] : tree_.buffers) {
    at::Tensor buffer = tensor;
    if (buffer.device() != options_.device) buffer.set_data(buffer.to(options_.device));
  }
  runtime_->Start();
  for (std::size_t u = 0; u < plan_->units.size(); ++u) {
    const auto id = static_cast<UnitId>(u);
    for (std::size_t p = 0; p < plan_->units[u].parameters.size(); ++p) {
      const at::Tensor& parameter =
          tree_.parameters[tree_.by_name.at(plan_->units[u].parameters[p].fqn)].tensor;
      runtime_->AddModuleParameter(
          id, std::make_unique<ModuleParameter>(parameter,
                                                runtime_->UnshardedView(id, static_cast<std::int32_t>(p))));
    }
  }
  runtime_->PrepareToEnter();
  runtime_->AwaitOptimizer();  // Training::Step, once it has been called
  return {};
}

void Training::Impl::HookModules() {
  calls_.Attach(*model_, *this);
  attached_ = true;
  std::map<const torch::nn::Module*, std::size_t> numbers;
  for (std::size_t m = 0; m < calls_.names().size(); ++m) {
    const torch::nn::Module* module = tree_.modules.at(calls_.names()[m]);
    numbers.emplace(module, m);
    of_module_.push_back({module, {}});
  }
  const auto hook = [&](UnitId unit, const std::vector<std::string>& names) {
    HookOptions options{.unit = unit, .modules = {}, .input_dtype = {}, .output_dtype = {}};
    for (const std::string& name : names) options.modules.push_back(tree_.modules.at(name));
    SetCasts(*plan_, names.front(), *tree_.modules.at(names.front()), options);
    if (unit < 0 && !options.input_dtype && !options.output_dtype) return;
    hooks_.push_back(std::make_unique<UnitHooks>(runtime_, std::move(options)));
    for (const std::string& name : names) {
      of_module_[numbers.at(tree_.modules.at(name))].units.push_back(hooks_.back().get());
    }
  };
  bool root_is_unit = false;
  for (std::size_t u = 0; u < plan_->units.size(); ++u) {
    const Unit& unit = plan_->units[u];
    hook(static_cast<UnitId>(u), unit.modules);
    root_is_unit = root_is_unit || std::ranges::find(unit.modules, "") != unit.modules.end();
  }
  // A root without parameters of its own is no unit, yet it casts inputs and outputs.
  if (!root_is_unit) hook(-1, {""});
}

Status Training::Impl::Begin() {
  if (Status agreed = AgreeWithOthers(CheckHere()); !agreed) return agreed;
  try {
    auto runtime = MakeRuntime();
    if (!runtime) return std::unexpected(runtime.error());
    runtime_ = std::move(*runtime);
    if (Status sharded = Shard(); !sharded) return sharded;
    if (options_.on_deviation == OnDeviation::kOnDemand) {
      runtime_->fallback().Enable([this] {
        Warn("shardplan: " + runtime_->fallback().deviation() + "; the step was finished on demand");
        runtime_->Restart();
      });
    }
    HookModules();
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, FirstLine(exception));
  }
  return {};
}

void Training::Impl::Enter(std::int32_t module, std::span<at::Tensor* const> inputs) {
  for (UnitHooks* hooks : of_module_[module].units) {
    if (hooks->options().unit >= 0) runtime_->NoteEntered(hooks->options().unit);
    const UnitHooks::InputWork work = hooks->PreForward(of_module_[module].module, /*full_precision=*/false);
    if (!work.any()) continue;
    std::vector<at::Tensor> tensors;
    tensors.reserve(inputs.size());
    for (const at::Tensor* input : inputs) tensors.push_back(*input);
    if (!hooks->Prepare(work, /*is_cast=*/false, tensors)) continue;
    for (std::size_t i = 0; i < tensors.size(); ++i) *inputs[i] = std::move(tensors[i]);
  }
}

void Training::Impl::Leave(std::int32_t module, std::span<at::Tensor* const> outputs) {
  for (UnitHooks* hooks : of_module_[module].units) {
    const UnitHooks::OutputWork work = hooks->PostForward(of_module_[module].module);
    if (!work.any()) continue;
    std::vector<at::Tensor> tensors;
    tensors.reserve(outputs.size());
    for (const at::Tensor* output : outputs) tensors.push_back(*output);
    hooks->HookOutputs(work, tensors);
    if (!work.casts || !CastFloatingPoint(tensors, *hooks->options().output_dtype)) continue;
    for (std::size_t i = 0; i < tensors.size(); ++i) *outputs[i] = std::move(tensors[i]);
  }
}

std::vector<UnitId> Training::Impl::UnitsOf(const std::string& fqn) const {
  std::vector<UnitId> units;
  for (std::size_t u = 0; u < plan_->units.size(); ++u) {
    const std::vector<std::string>& modules = plan_->units[u].modules;
    if (std::ranges::find(modules, fqn) != modules.end()) units.push_back(static_cast<UnitId>(u));
  }
  if (units.empty()) {
    throw std::invalid_argument(fmt::format("shardplan: \"{}\" is no module of a unit of the plan", fqn));
  }
  return units;
}

// ---- Training ----

Training::Training(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Training::~Training() = default;

Result<std::unique_ptr<Training>> Training::Create(std::shared_ptr<torch::nn::Module> model,
                                                   ModuleCalls calls, Plan plan, TrainingOptions options) {
  auto impl = std::make_unique<Impl>(std::move(model), std::move(calls), std::move(plan), std::move(options));
  if (Status begun = impl->Begin(); !begun) return std::unexpected(begun.error());
  return std::unique_ptr<Training>(new Training(std::move(impl)));
}

const Plan& Training::plan() const { return impl_->plan(); }
c10::Device Training::device() const { return impl_->options().device; }

std::vector<at::Tensor> Training::parameters() const {
  std::vector<at::Tensor> parameters;
  for (const TreeParameter& parameter : impl_->tree().parameters) parameters.push_back(parameter.tensor);
  return parameters;
}

void Training::Step(torch::optim::Optimizer& optimizer) {
  Step([&] { optimizer.step(); });
}

void Training::Step(const std::function<void()>& step) {
  Runtime& runtime = impl_->runtime();
  runtime.OptimizerSteps();
  if (Session* session = impl_->session(); session != nullptr) session->HoldBack();
  // Modules hold whole parameters still if the plan does not reshard after the backward.
  runtime.ShowShards(true);
  step();
  runtime.ShowShards(false);
  runtime.OptimizerStepped();
}

void Training::SetRequiresGradientSync(bool value) {
  std::vector<UnitId> units(plan().units.size());
  std::iota(units.begin(), units.end(), 0);
  impl_->runtime().SetRequiresGradientSync(units, value);
}

double Training::MeanOverRanks(double mine) {
  const at::Tensor value = at::full({1}, mine, at::TensorOptions().dtype(at::kDouble));
  return impl_->groups().ReduceAll(value, HostGroups::Operation::kSum).item<double>() /
         static_cast<double>(impl_->options().ranks);
}

bool Training::AnyRank(bool mine) {
  const at::Tensor flag = at::full({1}, mine ? 1 : 0, at::TensorOptions().dtype(at::kInt));
  return impl_->groups().ReduceAll(flag, HostGroups::Operation::kMax).item<int>() != 0;
}

void Training::AbandonStep() { impl_->runtime().Abandon(); }

void Training::Unshard(const std::string& fqn) {
  for (const UnitId unit : impl_->UnitsOf(fqn)) impl_->runtime().Unshard(unit);
}

void Training::Reshard(const std::string& fqn) {
  for (const UnitId unit : impl_->UnitsOf(fqn)) impl_->runtime().Reshard(unit);
}

std::string Training::deviation() const { return impl_->runtime().fallback().deviation(); }
std::int64_t Training::step() const { return impl_->runtime().step(); }
std::string Training::Where() const { return impl_->runtime().Where(); }

TrainingMemory Training::TakeMemory() {
  AllocationCount* count = impl_->allocations();
  if (count == nullptr) return {};
  return {.allocated_bytes = count->now().value, .peak_bytes = count->TakePeak().value};
}

}  // namespace shardplan::executor
