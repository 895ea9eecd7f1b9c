// SPDX-License-Identifier: Apache-2.0
#include "order/backward_times.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace shardplan {
namespace {

// The order in which things were made in one forward.
struct ForwardIndex {
  std::map<ModuleId, std::int32_t> first_enter;                         // canonical modules
  std::map<std::pair<ModuleId, std::int32_t>, const ExitEvent*> exits;  // module, occurrence
  std::map<std::pair<ModuleId, std::int32_t>, std::int32_t> left;       // ... the event
  std::vector<std::int32_t> first_seen;  // by tensor: event that names it first, or allocates it
};

ForwardIndex MakeForwardIndex(const Pass& pass, const ModelIndex& index) {
  ForwardIndex forward;
  forward.first_seen.assign(pass.tensors.size(), -1);
  std::map<ModuleId, std::int32_t> calls;
  std::vector<std::int32_t> open;  // occurrences
  // A tensor is as old as its storage, unless another one had the storage before: then it is a view, or was
  // changed in place.
  std::map<StorageId, std::int32_t> born;
  std::set<StorageId> known;
  const auto see = [&](const std::vector<TensorId>& tensors, std::int32_t position) {
    for (const TensorId tensor : tensors) {
      if (forward.first_seen[tensor] >= 0) continue;
      const StorageId storage = pass.tensors[tensor].storage;
      const auto birth = born.find(storage);
      const bool fresh = birth != born.end() && known.insert(storage).second;
      forward.first_seen[tensor] = fresh ? birth->second : position;
    }
  };
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(pass.events.size()); ++i) {
    if (const auto* enter = std::get_if<EnterEvent>(&pass.events[i])) {
      const ModuleId module = index.canonical[enter->module];
      forward.first_enter.try_emplace(module, i);
      open.push_back(calls[module]++);
      see(enter->inputs, i);
    } else if (const auto* allocate = std::get_if<AllocateEvent>(&pass.events[i])) {
      born[allocate->storage] = i;
    } else if (const auto* exit = std::get_if<ExitEvent>(&pass.events[i])) {
      see(exit->outputs, i);
      if (open.empty()) continue;
      forward.exits[{index.canonical[exit->module], open.back()}] = exit;
      forward.left[{index.canonical[exit->module], open.back()}] = i;
      open.pop_back();
    }
  }
  return forward;
}

class Times {
 public:
  Times(const Trace& trace, const ModelIndex& index, std::int32_t backward)
      : index_(index), pass_(trace.backwards[backward]), users_(trace.parameters.size()) {
    for (const std::int32_t f : pass_.forwards) {
      forwards_.push_back(MakeForwardIndex(trace.forwards[f], index));
    }
    for (std::size_t m = 0; m < trace.modules.size(); ++m) {
      for (const NamedParameter& named : trace.modules[m].parameters) {
        users_[named.parameter].push_back(static_cast<ModuleId>(m));
      }
    }
  }

  std::vector<ForwardTime> Run() const {
    std::vector<ForwardTime> times;
    for (const TraceEvent& event : pass_.events) times.push_back(TimeOf(event));
    return times;
  }

 private:
  ForwardTime TimeOf(const TraceEvent& event) const {
    if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) return OfOutput(*ready);
    if (const auto* op = std::get_if<OperatorEvent>(&event)) return OfModule(op->module);
    const auto* grad = std::get_if<ParameterGradEvent>(&event);
    if (grad == nullptr) return {-1, -1};
    // A gradient is complete with its part from the earliest use.
    ForwardTime earliest{-1, -1};
    for (const ModuleId user : users_[grad->parameter]) {
      const ForwardTime time = OfModule(user);
      if (earliest.forward < 0 || (time.forward >= 0 && time < earliest)) earliest = time;
    }
    return earliest;
  }

  // The tensor was made before the event that names it first.
  ForwardTime OfOutput(const OutputGradReadyEvent& ready) const {
    if (ready.forward < 0 || ready.forward >= static_cast<std::int32_t>(forwards_.size())) return {-1, -1};
    const ForwardIndex& forward = forwards_[ready.forward];
    const auto exit = forward.exits.find({index_.canonical[ready.module], ready.occurrence});
    if (exit == forward.exits.end() ||
        ready.index >= static_cast<std::int32_t>(exit->second->outputs.size())) {
      return {-1, -1};
    }
    return {ready.forward, 4 * forward.first_seen[exit->second->outputs[ready.index]] - 1};
  }

  // The first call of the module; of the innermost module around it that was called, if it was not.
  ForwardTime OfModule(ModuleId module) const {
    for (; module >= 0; module = index_.parent[module]) {
      for (std::size_t f = 0; f < forwards_.size(); ++f) {
        const auto enter = forwards_[f].first_enter.find(index_.canonical[module]);
        if (enter != forwards_[f].first_enter.end())
          return {static_cast<std::int32_t>(f), 4 * enter->second + 1};
      }
    }
    return {-1, -1};
  }

  const ModelIndex& index_;
  const Pass& pass_;
  std::vector<std::vector<ModuleId>> users_;  // by parameter
  std::vector<ForwardIndex> forwards_;
};

class AutogradEvents {
 public:
  AutogradEvents(const Trace& trace, const ModelIndex& index, const Partition& partition,
                 std::int32_t backward)
      : trace_(trace), index_(index), partition_(partition), pass_(trace.backwards[backward]) {
    const std::vector<ForwardTime> times = Times(trace, index, backward).Run();
    for (std::size_t i = 0; i < times.size(); ++i) {
      const auto position = static_cast<std::int32_t>(i);
      if (std::holds_alternative<BackwardEndEvent>(pass_.events[i])) break;
      last_[times[i]] = position;
      if (const auto* done = std::get_if<InputsGradDoneEvent>(&pass_.events[i])) {
        inputs_done_[{done->forward, index.canonical[done->module], done->occurrence}] = position + 1;
      } else if (const auto* ready = std::get_if<OutputGradReadyEvent>(&pass_.events[i])) {
        ready_.insert({ready->forward, index.canonical[ready->module], ready->occurrence, ready->index});
      }
    }
    std::int32_t latest = -1;
    for (auto& [time, position] : last_) latest = position = std::max(position, latest);
  }

  std::vector<AutogradEvent> Run() {
    for (std::size_t f = 0; f < pass_.forwards.size(); ++f) {
      const Pass& forward = trace_.forwards[pass_.forwards[f]];
      const ForwardIndex seen = MakeForwardIndex(forward, index_);
      const std::set<TensorId> without_gradient = WithoutGradient(seen, static_cast<std::int32_t>(f));
      std::map<UnitId, std::int32_t> runs;
      for (std::size_t i = 0; i < forward.events.size(); ++i) {
        const auto* enter = std::get_if<EnterEvent>(&forward.events[i]);
        const UnitId unit =
            enter == nullptr ? -1 : partition_.unit_of_module[index_.canonical[enter->module]];
        if (unit < 0) continue;
        const AutogradEvent call{
            .unit = unit, .occurrence = runs[unit]++, .forward = static_cast<std::int32_t>(f)};
        Add({call.forward, static_cast<std::int32_t>(4 * i)}, call);
        AddInputs(*enter, static_cast<std::int32_t>(i), forward, seen, without_gradient, call);
      }
    }
    std::ranges::stable_sort(found_, [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<AutogradEvent> events;
    std::int32_t position = 0;
    for (auto& [time, event] : found_) {
      position = std::max(event.position, position);
      if (!event.inputs_done) position = BehindFrees(position);
      event.position = position;
      events.push_back(event);
    }
    return events;
  }

 private:
  // The node behind which a unit's backward is done has let go of what it was given before the next one runs.
  std::int32_t BehindFrees(std::int32_t position) const {
    const auto is_free = [&] {
      return position < std::ssize(pass_.events) &&
             std::holds_alternative<FreeEvent>(pass_.events[static_cast<std::size_t>(position)]);
    };
    while (is_free()) ++position;
    return position;
  }

  // Behind the last event of the backward whose node was made at `time` or later, if there is one.
  void Add(ForwardTime time, AutogradEvent event) {
    const auto older = last_.upper_bound(time);
    if (older == last_.begin()) return;
    event.position = std::max(event.position, std::prev(older)->second + 1);
    found_.emplace_back(time, event);
  }

  // Outputs of modules whose gradient does not come in this backward.
  std::set<TensorId> WithoutGradient(const ForwardIndex& seen, std::int32_t forward) const {
    std::set<TensorId> returned, with;
    for (const auto& [call, exit] : seen.exits) {
      for (std::size_t i = 0; i < exit->outputs.size(); ++i) {
        const bool ready = ready_.contains({forward, call.first, call.second, static_cast<std::int32_t>(i)});
        (ready ? with : returned).insert(exit->outputs[i]);
      }
    }
    for (const TensorId tensor : with) returned.erase(tensor);
    return returned;
  }

  // Behind the hooks on `tensor` (made at `time`) of the modules that had returned it before event `entered`
  // of the forward: hooks on a tensor run in the order in which they were registered, and those of modules
  // that return it later come behind the frozen unit's own.
  std::int32_t BehindEarlierHooks(TensorId tensor, ForwardTime time, std::int32_t entered,
                                  const ForwardIndex& seen) const {
    const auto at = last_.lower_bound(time);
    std::int32_t position = at == last_.begin() ? 0 : std::prev(at)->second + 1;
    for (std::size_t i = 0; i < pass_.events.size(); ++i) {
      const auto* ready = std::get_if<OutputGradReadyEvent>(&pass_.events[i]);
      if (ready == nullptr || ready->forward != time.forward) continue;
      const std::pair key(index_.canonical[ready->module], ready->occurrence);
      const auto exit = seen.exits.find(key);
      if (exit == seen.exits.end() || ready->index >= std::ssize(exit->second->outputs)) continue;
      const TensorId returned = exit->second->outputs[ready->index];
      if (4 * seen.first_seen[returned] - 1 != time.quarter) continue;
      const bool later = returned == tensor && seen.left.find(key)->second > entered;
      if (!later) position = std::max(position, static_cast<std::int32_t>(i) + 1);
    }
    return position;
  }

  void AddInputs(const EnterEvent& enter, std::int32_t entered, const Pass& forward, const ForwardIndex& seen,
                 const std::set<TensorId>& without_gradient, AutogradEvent call) {
    const std::vector<UnitParameter>& parts = partition_.units[call.unit].unit.parameters;
    if (parts.empty() || std::ranges::any_of(parts, &UnitParameter::requires_grad)) return;
    std::int32_t oldest = -1;
    TensorId of = -1;
    for (const TensorId tensor : enter.inputs) {
      const std::int32_t first = seen.first_seen[tensor];
      if (without_gradient.contains(tensor)) continue;
      if (!forward.tensors[tensor].requires_grad || (oldest >= 0 && first >= oldest)) continue;
      oldest = first;
      of = tensor;
    }
    if (oldest < 0) return;
    call.inputs_done = true;
    const auto traced = inputs_done_.find({call.forward, index_.canonical[enter.module], call.occurrence});
    if (traced != inputs_done_.end()) call.position = traced->second;
    const ForwardTime time{call.forward, 4 * oldest - 1};
    if (last_.upper_bound(time) == last_.begin()) return;
    call.position = std::max(call.position, BehindEarlierHooks(of, time, entered, seen));
    found_.emplace_back(time, call);
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const Pass& pass_;
  // The last event of the backward at or after each time, newest first.
  std::map<ForwardTime, std::int32_t, std::greater<>> last_;
  std::map<std::tuple<std::int32_t, ModuleId, std::int32_t>, std::int32_t> inputs_done_;
  std::set<std::tuple<std::int32_t, ModuleId, std::int32_t, std::int32_t>>
      ready_;  // forward, module, call, index
  std::vector<std::pair<ForwardTime, AutogradEvent>> found_;
};

}  // namespace

std::vector<ForwardTime> BackwardTimes(const Trace& trace, const ModelIndex& index, std::int32_t backward) {
  return Times(trace, index, backward).Run();
}

std::vector<AutogradEvent> FindAutogradEvents(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, std::int32_t backward) {
  return AutogradEvents(trace, index, partition, backward).Run();
}

}  // namespace shardplan
