// SPDX-License-Identifier: Apache-2.0
#include "passes/passed_through.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace shardplan {
namespace {

// A tensor object as the trace's identities make them: each input of a marked module is a new one.
struct Object {
  std::int32_t made_from = -1;                                           // by an identity that is not there
  std::vector<std::tuple<ModuleId, std::int32_t, std::int32_t>> absent;  // such identities made from this one
};

using Slot = std::tuple<ModuleId, std::int32_t, std::int32_t, std::int32_t>;  // module, index, call, forward

class Joiner {
 public:
  Joiner(const Trace& trace, const ModelIndex& index, const Partition& partition, bool inputs_wrapped)
      : trace_(trace),
        index_(index),
        partition_(partition),
        inputs_wrapped_(inputs_wrapped),
        marked_(trace.modules.size(), false) {
    for (std::size_t m = trace.modules.size(); m-- > 0;) {  // pre-order: children come later
      if (!trace.modules[m].parameters.empty()) marked_[m] = true;
      const ModuleId parent = index.parent[m];
      if (marked_[m] && parent >= 0) marked_[parent] = true;
    }
  }

  // The events of `backward` in the order in which they fire; nullopt: as they are.
  std::optional<std::vector<TraceEvent>> Join(const Pass& backward) {
    objects_.clear();
    slots_.clear();
    for (std::size_t f = 0; f < backward.forwards.size(); ++f) {
      Follow(trace_.forwards[backward.forwards[f]], static_cast<std::int32_t>(f));
    }
    moves_.assign(backward.events.size(), false);
    const std::map<std::int32_t, std::vector<TraceEvent>> moved = FindMoves(backward);
    if (moved.empty()) return std::nullopt;
    std::vector<TraceEvent> events;
    for (std::size_t i = 0; i < backward.events.size(); ++i) {
      if (!moves_[i]) events.push_back(backward.events[i]);
      const auto found = moved.find(static_cast<std::int32_t>(i));
      if (found != moved.end()) events.insert(events.end(), found->second.begin(), found->second.end());
    }
    return events;
  }

 private:
  struct Running {
    ModuleId module = -1;
    std::int32_t call = 0;
    std::vector<std::pair<TensorId, std::int32_t>> saved;  // the caller's objects of tensors marked here
  };

  bool HasIdentity(ModuleId module) const {
    const UnitId unit = partition_.unit_of_module[module];
    return inputs_wrapped_ && unit >= 0 && !partition_.units[unit].unit.parameters.empty();
  }

  std::int32_t NewObject(std::int32_t made_from) {
    objects_.push_back({.made_from = made_from});
    return static_cast<std::int32_t>(objects_.size()) - 1;
  }

  // Gives every output of every module its object.
  void Follow(const Pass& forward, std::int32_t number) {
    std::map<TensorId, std::int32_t> current;
    std::map<ModuleId, std::int32_t> calls;
    std::vector<Running> running;
    const auto object_of = [&](TensorId tensor) {
      const auto [entry, added] = current.try_emplace(tensor, -1);
      if (added) entry->second = NewObject(-1);
      return entry->second;
    };
    for (const TraceEvent& event : forward.events) {
      if (const auto* enter = std::get_if<EnterEvent>(&event)) {
        const ModuleId module = index_.canonical[enter->module];
        Running run{.module = module, .call = calls[module]++};
        if (marked_[module]) Mark(forward, *enter, number, object_of, current, run);
        running.push_back(std::move(run));
      } else if (const auto* exit = std::get_if<ExitEvent>(&event); exit != nullptr && !running.empty()) {
        const Running run = std::move(running.back());
        running.pop_back();
        for (std::size_t k = 0; k < exit->outputs.size(); ++k) {
          if (!forward.tensors[exit->outputs[k]].requires_grad) continue;
          slots_.emplace_back(Slot{run.module, static_cast<std::int32_t>(k), run.call, number},
                              object_of(exit->outputs[k]));
        }
        for (const auto& [tensor, object] : run.saved) {
          if (std::ranges::find(exit->outputs, tensor) == exit->outputs.end()) current[tensor] = object;
        }
      }
    }
  }

  void Mark(const Pass& forward, const EnterEvent& enter, std::int32_t number, const auto& object_of,
            std::map<TensorId, std::int32_t>& current, Running& run) {
    for (const TensorId tensor : enter.inputs) {
      const bool again = std::ranges::any_of(run.saved, [&](const auto& s) { return s.first == tensor; });
      if (!forward.tensors[tensor].requires_grad || again) continue;
      const std::int32_t outer = object_of(tensor);
      const bool there = HasIdentity(run.module);
      if (!there) objects_[outer].absent.emplace_back(run.module, run.call, number);
      run.saved.emplace_back(tensor, outer);
      current[tensor] = NewObject(there ? -1 : outer);
    }
  }

  std::int32_t Real(std::int32_t object) const {
    while (objects_[object].made_from >= 0) object = objects_[object].made_from;
    return object;
  }

  // Position behind which events go -> these, in the order of registration. Also of what a module returned
  // and nobody used: it is the tensor that the module got, whose gradient comes from elsewhere.
  std::map<std::int32_t, std::vector<TraceEvent>> FindMoves(const Pass& backward) {
    std::map<Slot, std::int32_t> ready;
    std::map<std::tuple<ModuleId, std::int32_t, std::int32_t>, std::int32_t> done;
    for (std::size_t i = 0; i < backward.events.size(); ++i) {
      const auto position = static_cast<std::int32_t>(i);
      if (const auto* r = std::get_if<OutputGradReadyEvent>(&backward.events[i])) {
        ready[{index_.canonical[r->module], r->index, r->occurrence, r->forward}] = position;
      } else if (const auto* d = std::get_if<InputsGradDoneEvent>(&backward.events[i])) {
        done[{index_.canonical[d->module], d->occurrence, d->forward}] = position;
      }
    }
    struct Tensor {
      std::vector<Slot> hooks;     // in the order of registration
      std::int32_t complete = -1;  // position behind which its gradient is complete
      bool apart = false;          // some hooks are on what an identity that is not there made of it
    };
    std::map<std::int32_t, Tensor> tensors;
    for (const auto& [slot, object] : slots_) {
      Tensor& tensor = tensors[Real(object)];
      tensor.hooks.push_back(slot);
      tensor.apart = tensor.apart || Real(object) != object;
      if (const auto found = ready.find(slot); found != ready.end()) {
        tensor.complete = std::max(tensor.complete, found->second);
      }
    }
    std::map<std::int32_t, std::vector<TraceEvent>> moved;
    for (auto& [object, tensor] : tensors) {
      if (!tensor.apart) continue;
      for (const auto& identity : objects_[object].absent) {
        if (const auto at = done.find(identity); at != done.end()) {
          tensor.complete = std::max(tensor.complete, at->second);
        }
      }
      if (tensor.complete < 0) continue;  // it gets no gradient
      for (const Slot& slot : tensor.hooks) {
        const auto& [module, index, call, forward] = slot;
        moved[tensor.complete].push_back(OutputGradReadyEvent{module, index, call, forward});
        if (const auto at = ready.find(slot); at != ready.end()) moves_[at->second] = true;
      }
    }
    return moved;
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const bool inputs_wrapped_;
  std::vector<bool> marked_;  // by module: the tracer puts an identity around its inputs
  std::vector<bool> moves_;   // by event of the backward
  std::vector<Object> objects_;
  std::vector<std::pair<Slot, std::int32_t>> slots_;  // outputs of modules and their objects, in host order
};

}  // namespace

std::optional<Trace> JoinPassedThrough(const Trace& trace, const ModelIndex& index,
                                       const Partition& partition, bool inputs_wrapped) {
  Joiner joiner(trace, index, partition, inputs_wrapped);
  std::optional<Trace> joined;
  for (std::size_t b = 0; b < trace.backwards.size(); ++b) {
    std::optional<std::vector<TraceEvent>> events = joiner.Join(trace.backwards[b]);
    if (!events) continue;
    if (!joined) joined = trace;
    joined->backwards[b].events = std::move(*events);
  }
  return joined;
}

}  // namespace shardplan
