// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "documents/trace_modules_check.h"
#include "json/fields.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {
namespace {

// A call of a module in a forward: the module, and which of its calls.
using ModuleCallId = std::pair<ModuleId, std::int32_t>;

// State that a forward leaves to later ones and to its backward.
struct Left {
  std::unordered_set<StorageId> alive;
  std::map<ModuleCallId, std::size_t> outputs;  // by call: how many tensors it returned
};

class PassesCheck {
 public:
  explicit PassesCheck(const Trace& trace)
      : trace_(trace), canonical_(CanonicalModules(trace)), compiled_(trace) {}

  Status Run() {
    for (const TraceInput& input : trace_.inputs) outside_.insert(input.storage);
    for (const ModuleBuffer& buffer : trace_.buffers) outside_.insert(buffer.storage);
    outside_.insert(-1);
    alive_ = outside_;
    if (Status status = CheckSizes(); !status) return status;
    if (!trace_.calls.empty()) return CheckCalls();
    for (std::size_t f = 0; f < trace_.forwards.size(); ++f) {
      if (Status status = CheckForward(f); !status) return status;
    }
    for (std::size_t b = 0; b < trace_.backwards.size(); ++b) {
      if (Status status = CheckBackward(b); !status) return status;
    }
    return {};
  }

 private:
  // ---- what is there before ----

  Status CheckSizes() {
    const auto check = [&](const auto& tensors, std::string_view list) -> Status {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        std::int64_t elements = 1;
        for (const std::int64_t size : tensors[i].shape) elements *= size;  // at most 2^53
        if (Status status =
                AddBytes(elements * SizeBytes(tensors[i].dtype), fmt::format("/{}/{}/shape", list, i));
            !status) {
          return status;
        }
      }
      return {};
    };
    if (Status status = check(trace_.parameters, "parameters"); !status) return status;
    if (Status status = check(trace_.buffers, "buffers"); !status) return status;
    return check(trace_.inputs, "inputs");
  }

  Status AddBytes(std::int64_t bytes, const std::string& pointer) {
    total_bytes_ += bytes;
    if (total_bytes_ <= kMaxExact) return {};
    return MakeInputError(pointer, "the model and its storages have too many bytes together",
                          fmt::format("{}", total_bytes_), fmt::format("at most {}", kMaxExact));
  }

  // ---- calls: each finds what those before it left ----

  Status CheckCalls() {
    std::size_t forwards = 0, backwards = 0;
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
      const auto* forward = std::get_if<TracedForward>(&trace_.calls[c]);
      const std::int32_t pass =
          forward != nullptr ? forward->forward : std::get<TracedBackward>(trace_.calls[c]).backward;
      std::size_t& next = forward != nullptr ? forwards : backwards;
      if (std::cmp_not_equal(pass, next)) return WrongCall(fmt::format("/calls/{}/1", c), pass, next);
      call_ = fmt::format("/calls/{}", c);
      if (Status status = forward != nullptr ? CheckForward(next) : CheckBackward(next); !status)
        return status;
      ++next;
    }
    if (forwards == trace_.forwards.size() && backwards == trace_.backwards.size()) return {};
    return MakeInputError("/calls", "passes that are never called",
                          fmt::format("{} forwards and {} backwards", forwards, backwards),
                          fmt::format("all: {} and {}", trace_.forwards.size(), trace_.backwards.size()));
  }

  static Status WrongCall(std::string pointer, std::int32_t found, std::size_t next) {
    return MakeInputError(std::move(pointer), "passes are called once, in the order of their list",
                          fmt::format("{}", found), fmt::format("{}", next));
  }

  // ---- forwards: a later one finds what those before it left ----

  Status CheckForward(std::size_t f) {
    list_ = fmt::format("/forwards/{}", f);
    const Pass& pass = trace_.forwards[f];
    left_.emplace_back();
    open_.clear();
    born_here_.clear();
    released_.clear();
    std::map<ModuleId, std::int32_t> calls;
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      event_ = i;
      Status status;
      if (const auto* enter = std::get_if<EnterEvent>(&pass.events[i])) {
        const ModuleId module = canonical_[static_cast<std::size_t>(enter->module)];
        status = CheckOutsideOfGraphs(trace_.modules[static_cast<std::size_t>(module)]);
        open_.emplace_back(module, calls[module]++);
      } else if (const auto* exit = std::get_if<ExitEvent>(&pass.events[i])) {
        status = Exit(*exit);
      } else if (IsOfBackward(pass.events[i])) {
        status = MakeInputError(At("/0"), "an event of a backward in a forward");
      } else {
        status = CheckMemory(pass.events[i]);
      }
      if (!status) return status;
    }
    if (!open_.empty() && !pass.abandoned) {
      return MakeInputError(list_ + "/events", "a module is entered and never left",
                            trace_.modules[static_cast<std::size_t>(open_.back().first)].fqn, "its \"exit\"");
    }
    left_.back().alive = alive_;
    return CheckTensors(pass);
  }

  Status CheckOutsideOfGraphs(const Module& entered) {
    if (compiled_.Around(entered) == nullptr) return {};
    return MakeInputError(At("/1"), "a module inside a compiled one runs as part of its graph", entered.fqn,
                          "a module outside of compiled ones");
  }

  static bool IsOfBackward(const TraceEvent& event) {
    return std::holds_alternative<OutputGradReadyEvent>(event) ||
           std::holds_alternative<InputsGradDoneEvent>(event) ||
           std::holds_alternative<ParameterGradEvent>(event) ||
           std::holds_alternative<RecomputeEnterEvent>(event) ||
           std::holds_alternative<RecomputeExitEvent>(event) ||
           std::holds_alternative<BackwardEndEvent>(event);
  }

  // Behind the events of the pass.
  Status CheckTensors(const Pass& pass) const {
    for (std::size_t i = 0; i < pass.tensors.size(); ++i) {
      const StorageId storage = pass.tensors[i].storage;
      if (outside_.contains(storage) || born_.contains(storage)) continue;
      return MakeInputError(fmt::format("{}/tensors/{}/storage", list_, i),
                            "this storage is never born, and belongs to no input or buffer",
                            fmt::format("{}", storage), "a storage of a \"+\" event, an input or a buffer");
    }
    return {};
  }

  Status Exit(const ExitEvent& exit) {
    const std::string& fqn = trace_.modules[static_cast<std::size_t>(exit.module)].fqn;
    if (open_.empty()) return MakeInputError(At("/1"), "a module is left that was not entered", fqn);
    if (open_.back().first != canonical_[static_cast<std::size_t>(exit.module)]) {
      return MakeInputError(At("/1"), "a module is left inside another one", fqn,
                            trace_.modules[static_cast<std::size_t>(open_.back().first)].fqn);
    }
    left_.back().outputs[open_.back()] = exit.outputs.size();
    open_.pop_back();
    return {};
  }

  // ---- backwards: each finds what its forwards left ----

  Status CheckBackward(std::size_t b) {
    list_ = fmt::format("/backwards/{}", b);
    pass_ = &trace_.backwards[b];
    if (Status status = CoverForwards(); !status) return status;
    open_.clear();
    born_here_.clear();
    ready_.clear();
    done_.clear();
    reduced_.clear();
    grads_.clear();
    ended_ = false;
    for (std::size_t i = 0; i < pass_->events.size(); ++i) {
      event_ = i;
      Status status = std::visit([&](const auto& event) { return OnBackward(event); }, pass_->events[i]);
      if (!status) return status;
    }
    if (open_.empty() || pass_->abandoned) return CheckTensors(*pass_);
    return MakeInputError(list_ + "/events", "a recomputation begins and never ends",
                          trace_.modules[static_cast<std::size_t>(open_.back().first)].fqn,
                          "its \"recompute_exit\"");
  }

  Status CoverForwards() {
    if (pass_->forwards.empty()) {
      return MakeInputError(list_ + "/forwards", "a backward covers a forward", "an empty list",
                            "its forwards");
    }
    const bool in_order = !trace_.calls.empty();
    if (!in_order) alive_ = outside_;
    for (std::size_t k = 0; k < pass_->forwards.size(); ++k) {
      const std::int32_t f = pass_->forwards[k];
      const std::string pointer = fmt::format("{}/forwards/{}", list_, k);
      if (f < 0 || f >= std::ssize(left_)) {
        return in_order ? MakeInputError(call_, "the backward covers a forward that no call before it runs",
                                         fmt::format("forward {}", f),
                                         fmt::format("[\"forward\", {}] before it", f))
                        : MakeInputError(pointer, "there is no such forward", fmt::format("{}", f),
                                         fmt::format("less than {}", left_.size()));
      }
      if (in_order) continue;
      const std::unordered_set<StorageId>& left = left_[static_cast<std::size_t>(f)].alive;
      alive_.insert(left.begin(), left.end());
    }
    return {};
  }

  Status OnBackward(const OutputGradReadyEvent& ready) {
    Result<std::size_t> outputs = OutputsOf(ready.module, ready.occurrence, ready.forward, "/3", "/4");
    if (!outputs) return std::unexpected(std::move(outputs.error()));
    if (ready.index < 0 || static_cast<std::size_t>(ready.index) >= *outputs) {
      return MakeInputError(At("/2"), "this call of the module did not return so many tensors",
                            fmt::format("{}", ready.index), fmt::format("less than {}", *outputs));
    }
    const ModuleId module = canonical_[static_cast<std::size_t>(ready.module)];
    if (!ready_.emplace(module, ready.index, ready.occurrence, ready.forward).second) {
      return MakeInputError(At("/0"), "the gradient of this output is ready already");
    }
    return BeforeTheEnd();
  }
  Status OnBackward(const InputsGradDoneEvent& done) {
    Result<std::size_t> outputs = OutputsOf(done.module, done.occurrence, done.forward, "/2", "/3");
    if (!outputs) return std::unexpected(std::move(outputs.error()));
    const ModuleId module = canonical_[static_cast<std::size_t>(done.module)];
    if (!done_.emplace(module, done.occurrence, done.forward).second) {
      return MakeInputError(At("/0"), "the gradients of this call's inputs are done already");
    }
    return BeforeTheEnd();
  }
  Status OnBackward(const ParameterGradEvent& grad) {
    const Parameter& parameter = trace_.parameters[static_cast<std::size_t>(grad.parameter)];
    if (!parameter.requires_grad) {
      return MakeInputError(At("/1"), "a frozen parameter gets no gradient", parameter.fqn,
                            "a parameter with requires_grad");
    }
    if (!reduced_.insert(grad.parameter).second) {
      return MakeInputError(At("/1"), "this parameter has its gradient already", parameter.fqn);
    }
    if (!alive_.contains(grad.storage)) return NotAlive(At("/2"), grad.storage);
    if (grad.storage >= 0) {
      const auto of = grads_.find(grad.storage);
      if (of == grads_.end() || of->second != grad.parameter) {
        return MakeInputError(
            At("/2"), "this storage is not the gradient of this parameter", fmt::format("{}", grad.storage),
            fmt::format("a storage of the role parameter_grad of parameter {}", grad.parameter));
      }
    }
    return BeforeTheEnd();
  }
  Status OnBackward(const RecomputeEnterEvent& enter) {
    open_.emplace_back(canonical_[static_cast<std::size_t>(enter.module)], 0);
    return {};
  }
  // An early stop leaves the modules inside, too.
  Status OnBackward(const RecomputeExitEvent& exit) {
    const ModuleId module = canonical_[static_cast<std::size_t>(exit.module)];
    while (!open_.empty() && open_.back().first != module) open_.pop_back();
    if (open_.empty()) {
      return MakeInputError(At("/1"), "a recomputation ends that did not begin",
                            trace_.modules[static_cast<std::size_t>(exit.module)].fqn);
    }
    open_.pop_back();
    return {};
  }
  Status OnBackward(const BackwardEndEvent&) {
    Status status = BeforeTheEnd();
    ended_ = true;
    return status;
  }
  Status OnBackward(const EnterEvent&) { return OfForward(); }
  Status OnBackward(const ExitEvent&) { return OfForward(); }
  Status OnBackward(const ReleaseEvent&) { return OfForward(); }
  Status OnBackward(const AllocateEvent& allocate) {
    if (allocate.role == StorageRole::kParameterGrad) grads_[allocate.storage] = allocate.parameter;
    return CheckMemory(allocate);
  }
  Status OnBackward(const FreeEvent& free) { return CheckMemory(free); }
  Status OnBackward(const OperatorEvent& op) { return CheckMemory(op); }
  Status OnBackward(const CollectiveWaitEvent& wait) { return CheckMemory(wait); }

  Status OfForward() const { return MakeInputError(At("/0"), "an event of a forward in a backward"); }
  Status BeforeTheEnd() const {
    if (!ended_) return {};
    return MakeInputError(At("/0"), "the backward has ended already");
  }

  // How many tensors the call returned.
  Result<std::size_t> OutputsOf(ModuleId entry, std::int32_t occurrence, std::int32_t forward,
                                std::string_view occurrence_at, std::string_view forward_at) const {
    if (forward < 0 || forward >= std::ssize(pass_->forwards)) {
      return MakeInputError(At(forward_at), "not one of the forwards that this backward covers",
                            fmt::format("{}", forward), fmt::format("less than {}", pass_->forwards.size()));
    }
    const auto covered = static_cast<std::size_t>(pass_->forwards[static_cast<std::size_t>(forward)]);
    const std::map<ModuleCallId, std::size_t>& outputs = left_[covered].outputs;
    const auto call = outputs.find({canonical_[static_cast<std::size_t>(entry)], occurrence});
    if (call != outputs.end()) return call->second;
    return MakeInputError(At(occurrence_at),
                          fmt::format("forward {} does not call this module so often", covered),
                          fmt::format("call {} of {}", occurrence,
                                      DisplayName(trace_.modules[static_cast<std::size_t>(entry)].fqn)));
  }

  // ---- storages ----

  // Births, deaths and uses.
  Status CheckMemory(const TraceEvent& event) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) {
      if (Status status = CheckUses(op->reads, "/8"); !status) return status;
      if (Status status = CheckUses(op->writes, "/9"); !status) return status;
      return op->collective ? CheckCollective(*op->collective) : Status{};
    }
    if (const auto* wait = std::get_if<CollectiveWaitEvent>(&event)) {
      if (works_.contains(wait->work)) return {};
      return MakeInputError(At("/1"), "no collective of this number is issued before",
                            fmt::format("{}", wait->work), "the work of a collective");
    }
    if (const auto* allocate = std::get_if<AllocateEvent>(&event)) {
      born_.insert(allocate->storage);
      if (outside_.contains(allocate->storage) || !born_here_.insert(allocate->storage).second) {
        return MakeInputError(At("/1"), "a storage is born once, and one of an input or a buffer never",
                              fmt::format("{}", allocate->storage), "a new number");
      }
      alive_.insert(allocate->storage);
      return AddBytes(allocate->size_bytes.value, At("/2"));
    }
    if (const auto* release = std::get_if<ReleaseEvent>(&event)) return CheckRelease(*release);
    const auto* free = std::get_if<FreeEvent>(&event);
    if (free == nullptr) return {};
    if (outside_.contains(free->storage)) {
      return MakeInputError(At("/1"), "inputs and buffers live on", fmt::format("{}", free->storage),
                            "a storage of a \"+\" event");
    }
    if (alive_.erase(free->storage) == 0) return NotAlive(At("/1"), free->storage);
    return {};
  }

  Status CheckRelease(const ReleaseEvent& release) {
    if (!alive_.contains(release.storage)) return NotAlive(At("/1"), release.storage);
    if (born_here_.contains(release.storage) && released_.insert(release.storage).second) return {};
    return MakeInputError(At("/1"), "a storage is released once, in the forward that it is born in",
                          fmt::format("{}", release.storage));
  }

  Status CheckCollective(const ModelCollective& collective) {
    if (collective.work >= 0) works_.insert(collective.work);
    if (collective.communicator < 0)
      return MakeInputError(At("/11/communicator"), "a collective of the model has a communicator",
                            fmt::format("{}", collective.communicator), "one of the trace's");
    const std::int64_t size = trace_.communicators[static_cast<std::size_t>(collective.communicator)].size;
    const std::int64_t most_ppm = collective.kind == CollectiveKind::kAllToAll ? size * 1'000'000 : 1'000'000;
    if (collective.busiest_ppm > most_ppm) {
      return MakeInputError(At("/11/busiest_ppm"),
                            "the busiest rank of an all_to_all moves no more than all of them",
                            fmt::format("{}", collective.busiest_ppm), fmt::format("at most {}", most_ppm));
    }
    const bool transfers = DescriptionOf(collective.kind).movement == CollectiveMovement::kTransfer;
    if (transfers ? collective.peer >= 1 && collective.peer < size : collective.peer < 0) return {};
    return MakeInputError(At("/11/peer"), "a send and a receive say to whom, and nothing else does",
                          fmt::format("{}", collective.peer),
                          transfers ? fmt::format("1 to {}", size - 1) : "no peer");
  }

  Status CheckUses(const std::vector<StorageId>& storages, std::string_view field) const {
    for (std::size_t i = 0; i < storages.size(); ++i) {
      if (!alive_.contains(storages[i])) return NotAlive(At(fmt::format("{}/{}", field, i)), storages[i]);
    }
    return {};
  }
  std::unexpected<Error> NotAlive(const std::string& pointer, StorageId storage) const {
    return MakeInputError(
        pointer,
        born_.contains(storage) ? "this storage is not alive here"
                                : "this storage is not born before, and belongs to no input or buffer",
        fmt::format("{}", storage), "a storage of a \"+\" event before, an input or a buffer");
  }

  std::string At(std::string_view field) const { return fmt::format("{}/events/{}{}", list_, event_, field); }

  const Trace& trace_;
  const std::vector<ModuleId> canonical_;
  const CompiledModules compiled_;
  std::unordered_set<StorageId> outside_;  // of inputs and buffers, and -1
  std::unordered_set<StorageId> born_;     // in any pass
  std::int64_t total_bytes_ = 0;
  std::vector<Left> left_;  // by forward

  // The pass that is walked over:
  std::string list_;  // its pointer
  std::string call_;  // that of the call, where the trace lists calls
  std::size_t event_ = 0;
  const Pass* pass_ = nullptr;
  std::unordered_set<StorageId> born_here_;
  std::unordered_set<StorageId> released_;
  std::unordered_set<StorageId> alive_;
  std::vector<ModuleCallId> open_;  // modules that run, or run again
  std::set<std::tuple<ModuleId, std::int32_t, std::int32_t, std::int32_t>> ready_;
  std::set<std::tuple<ModuleId, std::int32_t, std::int32_t>> done_;
  std::set<ParameterId> reduced_;
  std::unordered_map<StorageId, ParameterId> grads_;
  std::unordered_set<std::int32_t> works_;  // of asynchronous collectives, in any pass
  bool ended_ = false;
};

// Groups of ranks that the traced job has, and dimensions that something names.
Status CheckCommunicators(const Trace& trace) {
  std::set<std::string_view> names;
  for (std::size_t c = 0; c < trace.communicators.size(); ++c) {
    const Communicator& communicator = trace.communicators[c];
    const std::string pointer = fmt::format("/communicators/{}", c);
    if (!Divides(communicator, trace.world_size)) {
      return MakeInputError(
          pointer, "the communicator's groups are not all there on so many ranks",
          fmt::format("{} (size {}, stride {})", communicator.name, communicator.size, communicator.stride),
          fmt::format("groups of {} ranks", trace.world_size));
    }
    if (!names.insert(communicator.name).second)
      return MakeInputError(pointer + "/name", "two communicators have one name", communicator.name);
  }
  for (std::size_t d = 0; d < trace.same_batch.size(); ++d) {
    if (names.contains(trace.same_batch[d])) continue;
    return MakeInputError(fmt::format("/same_batch/{}", d), "no communicator has this name",
                          trace.same_batch[d], fmt::format("{}", fmt::join(names, ", ")));
  }
  return {};
}

// A step of an optimizer frees its storages, and no other one is of the same matrix.
class OptimizerStepsCheck {
 public:
  explicit OptimizerStepsCheck(const Trace& trace) : trace_(trace) {
    for (const TraceInput& input : trace.inputs) born_.insert(input.storage);
    for (const ModuleBuffer& buffer : trace.buffers) born_.insert(buffer.storage);
    for (const std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
      for (const Pass& pass : *passes) {
        for (const TraceEvent& event : pass.events) {
          if (const auto* made = std::get_if<AllocateEvent>(&event)) born_.insert(made->storage);
        }
      }
    }
  }

  Status Run() {
    for (std::size_t s = 0; s < trace_.optimizer_steps.size(); ++s) {
      if (Status status = Check(trace_.optimizer_steps[s], fmt::format("/optimizer_steps/{}", s)); !status)
        return status;
    }
    return {};
  }

 private:
  using Key = std::tuple<OptimizerKind, std::int64_t, std::int64_t, std::vector<std::int64_t>, DType, bool,
                         std::int32_t>;

  Status Check(const TracedOptimizerStep& step, const std::string& pointer) {
    if (step.optimizer != OptimizerKind::kMuon)
      return MakeInputError(pointer + "/optimizer", "no matrix optimizer",
                            std::string(DescriptionOf(step.optimizer).name),
                            std::string(DescriptionOf(OptimizerKind::kMuon).name));
    if (step.shape.size() != 2)
      return MakeInputError(pointer + "/shape", "a matrix has two dimensions",
                            fmt::format("{}", step.shape.size()), "2");
    const Key key{step.optimizer, step.ranks,    step.replicas, step.shape,
                  step.dtype,     step.nesterov, step.ns_steps};
    if (!known_.insert(key).second) return MakeInputError(pointer, "the step of this matrix is there twice");
    alive_.clear();
    works_.clear();
    ranks_ = step.ranks * step.replicas;
    for (const auto& [name, entries] :
         {std::pair("update", &step.update), std::pair("orthogonalize", &step.orthogonalize),
          std::pair("apply", &step.apply)}) {
      for (std::size_t e = 0; e < entries->size(); ++e) {
        at_ = fmt::format("{}/{}/{}", pointer, name, e);
        if (Status status = std::visit([this](const auto& entry) { return Take(entry); }, (*entries)[e]);
            !status)
          return status;
      }
    }
    if (alive_.empty()) return {};
    return MakeInputError(pointer, "a storage of the step outlives it", fmt::format("{}", *alive_.begin()),
                          "a \"-\" event");
  }

  Status Take(const OperatorEvent& op) {
    for (const std::vector<StorageId>* used : {&op.reads, &op.writes}) {
      for (const StorageId storage : *used) {
        if (!alive_.contains(storage)) return NotAlive(storage);
      }
    }
    if (!op.parameters.empty())
      return MakeInputError(at_ + "/10", "shards of parameters are not named in an optimizer's step",
                            fmt::format("{}", op.parameters.front()), "[]");
    if (!op.collective) return {};
    if (op.collective->communicator >= 0)
      return MakeInputError(
          at_ + "/11/communicator", "an optimizer's step is over a parameter's own ranks",
          fmt::format("{}", op.collective->communicator),
          fmt::format("{} (shards), {} (replicas) or {} (both)", kOfShards, kOfReplicas, kOfBoth));
    if (ranks_ == 1)
      return MakeInputError(at_ + "/11", "a whole matrix needs no collective",
                            std::string(Name(op.collective->kind)), "none");
    if (op.collective->work >= 0) works_.insert(op.collective->work);
    return {};
  }
  Status Take(const AllocateEvent& made) {
    if (made.role != StorageRole::kOptimizerTemp)
      return MakeInputError(at_ + "/3", "an optimizer's step makes storages of its own",
                            std::string(Name(made.role)), std::string(Name(StorageRole::kOptimizerTemp)));
    if (!born_.insert(made.storage).second)
      return MakeInputError(at_ + "/1", "a storage is born once", fmt::format("{}", made.storage),
                            "a new number");
    alive_.insert(made.storage);
    return {};
  }
  Status Take(const FreeEvent& freed) {
    return alive_.erase(freed.storage) > 0 ? Status() : NotAlive(freed.storage);
  }
  Status Take(const CollectiveWaitEvent& wait) {
    if (works_.contains(wait.work)) return {};
    return MakeInputError(at_ + "/1", "no collective of this number is issued before",
                          fmt::format("{}", wait.work), "the work of a collective");
  }
  Status NotAlive(StorageId storage) const {
    return MakeInputError(at_, "this storage is not alive here", fmt::format("{}", storage),
                          "a storage of a \"+\" event of the step before");
  }

  const Trace& trace_;
  std::unordered_set<StorageId> born_;
  std::set<Key> known_;
  // The step that is walked over:
  std::unordered_set<StorageId> alive_;
  std::unordered_set<std::int32_t> works_;
  std::int64_t ranks_ = 1;
  std::string at_;
};

}  // namespace

Status CheckTrace(const Trace& trace) {
  if (Status status = CheckCommunicators(trace); !status) return status;
  if (Status status = CheckModules(trace); !status) return status;
  if (Status status = PassesCheck(trace).Run(); !status) return status;
  return OptimizerStepsCheck(trace).Run();
}

CompiledModules::CompiledModules(const Trace& trace) {
  for (const Module& module : trace.modules) {
    if (!module.compiled.empty()) by_fqn_.emplace(module.fqn, &module);
  }
}

const Module* CompiledModules::Around(const Module& module) const {
  const Module* around = nullptr;
  if (by_fqn_.empty()) return around;
  for (std::string_view fqn = module.fqn; !fqn.empty();) {
    const std::size_t dot = fqn.rfind('.');
    fqn = dot == std::string_view::npos ? std::string_view() : fqn.substr(0, dot);
    if (const auto found = by_fqn_.find(fqn); found != by_fqn_.end()) around = found->second;
  }
  return around;
}

}  // namespace shardplan
