// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/frozen.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "order/backward_times.h"

namespace shardplan {
namespace {

// An event to add to a backward, and when in the forward its node was made.
struct Added {
  ForwardTime time;
  std::int32_t exit = 0;  // event of the forward that leaves the module
  TraceEvent event;
};

using FrozenUse = std::pair<ForwardTime, ModuleId>;  // of a frozen parameter of a unit that trains

bool Trains(const UnitParameter& parameter) { return parameter.requires_grad; }

// One forward, followed with "requires a gradient" as FSDP1 has it.
class ForwardGradients {
 public:
  ForwardGradients(const Trace& trace, const ModelIndex& index, const Partition& partition,
                   std::int32_t backward, std::int32_t position)
      : trace_(trace),
        index_(index),
        partition_(partition),
        pass_(trace.forwards[trace.backwards[backward].forwards[position]]),
        position_(position),
        first_seen_(pass_.tensors.size(), -1),
        requires_(pass_.tensors.size(), false),
        used_(pass_.tensors.size(), Use::kUnknown),
        made_in_(pass_.tensors.size(), -1),
        takers_(pass_.tensors.size()) {
    for (std::size_t t = 0; t < pass_.tensors.size(); ++t) requires_[t] = pass_.tensors[t].requires_grad;
    for (const TraceEvent& event : trace.backwards[backward].events) {
      const auto* ready = std::get_if<OutputGradReadyEvent>(&event);
      if (ready == nullptr || ready->forward != position) continue;
      ready_.insert({index.canonical[ready->module], ready->occurrence, ready->index});
    }
  }

  void Run() {
    for (at_ = 0; at_ < static_cast<std::int32_t>(pass_.events.size()); ++at_) {
      if (const auto* enter = std::get_if<EnterEvent>(&pass_.events[at_])) {
        Enter(*enter);
      } else if (const auto* exit = std::get_if<ExitEvent>(&pass_.events[at_])) {
        if (open_ >= 0) Exit(*exit);
      }
    }
  }

  // Outputs of modules whose gradient is ready because of frozen parts.
  std::vector<Added> OutputEvents() {
    std::vector<Added> added;
    for (const Call& call : calls_) {
      for (std::size_t i = 0; i < call.outputs.size(); ++i) {
        const TensorId tensor = call.outputs[i];
        if (!requires_[tensor] || pass_.tensors[tensor].requires_grad || !IsUsed(tensor)) continue;
        const OutputGradReadyEvent ready{call.module, static_cast<std::int32_t>(i), call.occurrence,
                                         position_};
        added.push_back({{position_, 4 * first_seen_[tensor] - 1}, call.exit, ready});
      }
    }
    return added;
  }

  // The earliest call that makes a gradient of each frozen parameter of a unit that trains.
  void AddFrozenUses(std::map<ParameterId, FrozenUse>& uses) {
    for (const Call& call : calls_) {
      const auto gets_gradient = [&](TensorId tensor) { return requires_[tensor] && IsUsed(tensor); };
      if (!std::ranges::any_of(call.outputs, gets_gradient)) continue;
      for (const NamedParameter& named : trace_.modules[call.module].parameters) {
        if (trace_.parameters[named.parameter].requires_grad ||
            !IsInTrainedUnit(named.parameter, call.module)) {
          continue;
        }
        uses.try_emplace(named.parameter, ForwardTime{position_, 4 * call.enter + 1}, call.module);
      }
    }
  }

  void MarkTensors(Pass& pass) const {
    for (std::size_t t = 0; t < requires_.size(); ++t) pass.tensors[t].requires_grad = requires_[t];
  }

 private:
  enum class Use : std::uint8_t { kUnknown, kAsked, kYes, kNo };

  struct Call {
    ModuleId module = -1;
    std::int32_t occurrence = 0;
    std::int32_t parent = -1;  // the call around it
    std::int32_t enter = 0, exit = 0;
    std::vector<TensorId> outputs;
    // Something computed in it so far requires a gradient here alone: what does in the plain model, too, goes
    // only into what the plain model tracks.
    bool uses_gradients = false;
    bool trains = false;  // something computed in it requires a gradient in the plain model
  };

  bool HasTrainableParameter(ModuleId module) const {
    return std::ranges::any_of(trace_.modules[module].parameters, [&](const NamedParameter& named) {
      return trace_.parameters[named.parameter].requires_grad;
    });
  }

  bool IsInTrainedUnit(ParameterId parameter, ModuleId module) const {
    const UnitParameterRef owner = OwnerOf(partition_, parameter, module);
    return owner.unit >= 0 && std::ranges::any_of(partition_.units[owner.unit].unit.parameters, Trains);
  }

  bool TakesFrozenPartOfTrainedUnit(ModuleId module) const {
    return std::ranges::any_of(trace_.modules[module].parameters, [&](const NamedParameter& named) {
      return !trace_.parameters[named.parameter].requires_grad && IsInTrainedUnit(named.parameter, module);
    });
  }

  // Whether the tensor requires a gradient here, but not in the plain model.
  bool RequiresHereAlone(TensorId tensor) const {
    return requires_[tensor] && !pass_.tensors[tensor].requires_grad;
  }

  // A tensor named first as an input was made in the module around, by operators between its modules. A
  // tensor that needs no gradient although the plain module trains is taken for detached.
  void See(TensorId tensor, bool uses_gradients, bool trains) {
    if (first_seen_[tensor] >= 0) return;
    first_seen_[tensor] = at_;
    made_in_[tensor] = open_;
    const Tensor& traced = pass_.tensors[tensor];
    if (uses_gradients && IsFloatingPoint(traced.dtype) && traced.may_require_grad.value_or(!trains)) {
      requires_[tensor] = true;
    }
  }

  void Enter(const EnterEvent& enter) {
    const ModuleId module = index_.canonical[enter.module];
    const auto number = static_cast<std::int32_t>(calls_.size());
    for (const TensorId tensor : enter.inputs) {
      See(tensor, open_ >= 0 && calls_[open_].uses_gradients, open_ >= 0 && calls_[open_].trains);
      takers_[tensor].push_back(number);
    }
    Call call{.module = module, .occurrence = runs_[module]++, .parent = open_, .enter = at_};
    call.uses_gradients = TakesFrozenPartOfTrainedUnit(module) ||
                          std::ranges::any_of(enter.inputs, [&](TensorId t) { return RequiresHereAlone(t); });
    call.trains = HasTrainableParameter(module) || std::ranges::any_of(enter.inputs, [&](TensorId t) {
                    return pass_.tensors[t].requires_grad;
                  });
    calls_.push_back(std::move(call));
    open_ = number;
  }

  void Exit(const ExitEvent& exit) {
    Call& call = calls_[open_];
    call.exit = at_;
    call.outputs = exit.outputs;
    for (const TensorId tensor : exit.outputs) {
      See(tensor, call.uses_gradients, call.trains);
      made_in_[tensor] = call.parent;
    }
    // The module's outputs carry gradients on, unless it ran without.
    const bool carries = exit.outputs.empty() ||
                         std::ranges::any_of(exit.outputs, [&](TensorId t) { return RequiresHereAlone(t); });
    open_ = call.parent;
    if (open_ < 0) return;
    calls_[open_].uses_gradients = calls_[open_].uses_gradients || (call.uses_gradients && carries);
    calls_[open_].trains = calls_[open_].trains || call.trains;
  }

  // Whether the loss depends on a tensor, as far as modules tell: what needs a gradient in the plain model
  // has one there; of the rest some module that takes it, or else what the module around returns, has to be
  // used. The root's outputs are taken for used.
  bool IsUsed(TensorId tensor) {
    Use& use = used_[tensor];
    if (use == Use::kUnknown) {
      use = Use::kAsked;  // a module that returns its input asks again
      const bool is_used = FindUse(tensor);
      used_[tensor] = is_used ? Use::kYes : Use::kNo;
    }
    return used_[tensor] == Use::kYes;
  }

  bool FindUse(TensorId tensor) {
    if (pass_.tensors[tensor].requires_grad) {
      bool returned = false;
      for (const Call& call : calls_) {
        for (std::size_t i = 0; i < call.outputs.size(); ++i) {
          if (call.outputs[i] != tensor) continue;
          if (ready_.contains({call.module, call.occurrence, static_cast<std::int32_t>(i)})) return true;
          returned = true;
        }
      }
      if (returned) return false;
    }
    if (pass_.tensors[tensor].in_loss) return *pass_.tensors[tensor].in_loss;
    const std::int32_t around = made_in_[tensor];
    if (around < 0) return true;
    const auto returns_used = [&](std::int32_t call) {
      return std::ranges::any_of(calls_[call].outputs, [&](TensorId t) { return t != tensor && IsUsed(t); });
    };
    if (takers_[tensor].empty()) return returns_used(around);
    return std::ranges::any_of(takers_[tensor], returns_used);
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const Pass& pass_;
  const std::int32_t position_;  // of the forward in its backward
  std::int32_t at_ = 0;
  std::vector<std::int32_t> first_seen_;
  std::vector<char> requires_;
  std::vector<Use> used_;
  std::vector<std::int32_t> made_in_;              // by tensor: the call whose operators or modules made it
  std::vector<std::vector<std::int32_t>> takers_;  // by tensor: calls that have it as an input
  std::map<ModuleId, std::int32_t> runs_;
  std::set<std::tuple<ModuleId, std::int32_t, std::int32_t>> ready_;  // module, occurrence, index
  std::vector<Call> calls_;
  std::int32_t open_ = -1;  // the innermost call that runs
};

// Each goes behind the last event that is newer; hooks on one tensor run in the order in which they were
// made, those on inputs first (as in a trace).
void Insert(std::vector<Added> added, const std::vector<ForwardTime>& times,
            std::vector<TraceEvent>& events) {
  std::ranges::stable_sort(added, [](const Added& a, const Added& b) {
    return a.time != b.time ? a.time > b.time : a.exit < b.exit;
  });
  std::map<ForwardTime, std::size_t, std::greater<>> last;  // event behind all that are as new or newer
  for (std::size_t i = 0; i < times.size(); ++i) last[times[i]] = i + 1;
  std::size_t latest = 0;
  for (auto& [time, behind] : last) latest = behind = std::max(behind, latest);
  std::vector<std::vector<TraceEvent>> placed(times.size() + 1);
  for (Added& add : added) {
    const auto older = last.upper_bound(add.time);
    placed[older == last.begin() ? 0 : std::prev(older)->second].push_back(std::move(add.event));
  }
  std::vector<TraceEvent> merged;
  for (std::size_t i = 0; i <= events.size(); ++i) {
    std::ranges::move(placed[i], std::back_inserter(merged));
    if (i < events.size()) merged.push_back(std::move(events[i]));
  }
  events = std::move(merged);
}

bool IsPartlyFrozen(const UnitChoice& choice) {
  const std::vector<UnitParameter>& parts = choice.unit.parameters;
  return std::ranges::any_of(parts, Trains) && !std::ranges::all_of(parts, Trains);
}

}  // namespace

std::optional<Trace> WithGradientsOfFrozenParts(const Trace& trace, const ModelIndex& index,
                                                const Partition& partition) {
  if (std::ranges::none_of(partition.units, IsPartlyFrozen)) return std::nullopt;
  Trace result = trace;
  for (std::size_t b = 0; b < trace.backwards.size(); ++b) {
    const auto backward = static_cast<std::int32_t>(b);
    std::vector<Added> added;
    std::map<ParameterId, FrozenUse> uses;
    for (std::size_t f = 0; f < trace.backwards[b].forwards.size(); ++f) {
      ForwardGradients gradients(trace, index, partition, backward, static_cast<std::int32_t>(f));
      gradients.Run();
      std::vector<Added> of_forward = gradients.OutputEvents();
      added.insert(added.end(), of_forward.begin(), of_forward.end());
      gradients.AddFrozenUses(uses);
      gradients.MarkTensors(result.forwards[trace.backwards[b].forwards[f]]);
    }
    for (const auto& [parameter, use] : uses) {
      added.push_back(
          {use.first, std::numeric_limits<std::int32_t>::max(), ParameterGradEvent{parameter, -1}});
    }
    Insert(std::move(added), BackwardTimes(trace, index, backward), result.backwards[b].events);
  }
  return result;
}

}  // namespace shardplan
