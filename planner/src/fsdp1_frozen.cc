#include "fsdp1_frozen.h"

#include <algorithm>
#include <map>

#include "backward_times.h"

namespace shardplan {
namespace {

// An event to add to a backward, and when in the forward its node was made.
struct Added {
  ForwardTime time;
  std::int32_t exit = 0;  // event of the forward that leaves the module
  TraceEvent event;
};

// One forward, followed with "requires a gradient" as FSDP1 has it.
class ForwardGradients {
 public:
  ForwardGradients(const Trace& trace, const ModelIndex& index, const Partition& partition, const Pass& pass)
      : trace_(trace),
        index_(index),
        partition_(partition),
        pass_(pass),
        first_seen_(pass.tensors.size(), -1),
        requires_(pass.tensors.size(), false) {
    for (std::size_t t = 0; t < pass.tensors.size(); ++t) requires_[t] = pass.tensors[t].requires_grad;
  }

  // `position`: of the forward in its backward.
  std::vector<Added> Run(std::int32_t position) {
    for (at_ = 0; at_ < static_cast<std::int32_t>(pass_.events.size()); ++at_) {
      if (const auto* enter = std::get_if<EnterEvent>(&pass_.events[at_])) {
        Enter(*enter);
      } else if (const auto* exit = std::get_if<ExitEvent>(&pass_.events[at_])) {
        if (!open_.empty()) Exit(*exit, position);
      }
    }
    return std::move(added_);
  }

  void MarkTensors(Pass& pass) const {
    for (std::size_t t = 0; t < requires_.size(); ++t) pass.tensors[t].requires_grad = requires_[t];
  }

 private:
  struct Frame {
    ModuleId module = -1;
    std::int32_t occurrence = 0;
    bool uses_gradients = false;  // something computed in it so far requires a gradient
    bool trains = false;          // ... in the plain model, too
  };

  bool HasTrainableParameter(ModuleId module) const {
    return std::ranges::any_of(trace_.modules[module].parameters, [&](const NamedParameter& named) {
      return trace_.parameters[named.parameter].requires_grad;
    });
  }

  bool TakesPartOfTrainableUnit(ModuleId module) const {
    for (const NamedParameter& named : trace_.modules[module].parameters) {
      const UnitParameterRef owner = OwnerOf(partition_, named.parameter, module);
      if (owner.unit < 0) continue;
      const std::vector<UnitParameter>& parts = partition_.units[owner.unit].unit.parameters;
      if (std::ranges::any_of(parts, &UnitParameter::requires_grad)) return true;
    }
    return false;
  }

  // A tensor named first as an input was made in the module around, by operators between its modules.
  void See(TensorId tensor, bool may_require) {
    if (first_seen_[tensor] >= 0) return;
    first_seen_[tensor] = at_;
    if (may_require && IsFloatingPoint(pass_.tensors[tensor].dtype)) requires_[tensor] = true;
  }

  void Enter(const EnterEvent& enter) {
    const ModuleId module = index_.canonical[enter.module];
    for (const TensorId tensor : enter.inputs) {
      See(tensor, !open_.empty() && open_.back().uses_gradients && !open_.back().trains);
    }
    Frame frame{.module = module, .occurrence = calls_[module]++};
    frame.uses_gradients = TakesPartOfTrainableUnit(module) ||
                           std::ranges::any_of(enter.inputs, [&](TensorId t) { return requires_[t]; });
    frame.trains = HasTrainableParameter(module) || std::ranges::any_of(enter.inputs, [&](TensorId t) {
                     return pass_.tensors[t].requires_grad;
                   });
    open_.push_back(frame);
  }

  void Exit(const ExitEvent& exit, std::int32_t position) {
    const Frame frame = open_.back();
    open_.pop_back();
    // What needs no gradient although the plain module trains is detached.
    for (const TensorId tensor : exit.outputs) See(tensor, frame.uses_gradients && !frame.trains);
    if (!open_.empty()) {
      open_.back().uses_gradients = open_.back().uses_gradients || frame.uses_gradients;
      open_.back().trains = open_.back().trains || frame.trains;
    }
    if (partition_.unit_of_module[frame.module] < 0) return;
    for (std::size_t i = 0; i < exit.outputs.size(); ++i) {
      const TensorId tensor = exit.outputs[i];
      if (!requires_[tensor] || pass_.tensors[tensor].requires_grad) continue;
      const OutputGradReadyEvent ready{frame.module, static_cast<std::int32_t>(i), frame.occurrence,
                                       position};
      added_.push_back({{position, 4 * first_seen_[tensor] - 1}, at_, ready});
    }
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const Pass& pass_;
  std::int32_t at_ = 0;
  std::vector<std::int32_t> first_seen_;
  std::vector<char> requires_;
  std::map<ModuleId, std::int32_t> calls_;
  std::vector<Frame> open_;
  std::vector<Added> added_;
};

// Each goes behind the last event that is newer; hooks on one tensor run in the order in which they were
// made, those on inputs first (as in a trace).
void Insert(std::vector<Added> added, const std::vector<ForwardTime>& times,
            std::vector<TraceEvent>& events) {
  std::ranges::stable_sort(added, [](const Added& a, const Added& b) {
    return a.time != b.time ? a.time > b.time : a.exit < b.exit;
  });
  std::vector<std::pair<std::size_t, TraceEvent>> placed;
  for (Added& add : added) {
    std::size_t behind = 0;
    for (std::size_t i = 0; i < times.size(); ++i) {
      if (times[i] >= add.time) behind = i + 1;
    }
    placed.emplace_back(behind, std::move(add.event));
  }
  for (auto place = placed.rbegin(); place != placed.rend(); ++place) {
    events.insert(events.begin() + static_cast<std::ptrdiff_t>(place->first), std::move(place->second));
  }
}

bool IsPartlyFrozen(const UnitChoice& choice) {
  const std::vector<UnitParameter>& parts = choice.unit.parameters;
  return std::ranges::any_of(parts, &UnitParameter::requires_grad) &&
         !std::ranges::all_of(parts, &UnitParameter::requires_grad);
}

}  // namespace

std::optional<Trace> WithGradientsOfFrozenParts(const Trace& trace, const ModelIndex& index,
                                                const Partition& partition) {
  if (std::ranges::none_of(partition.units, IsPartlyFrozen)) return std::nullopt;
  Trace result = trace;
  for (std::size_t b = 0; b < trace.backwards.size(); ++b) {
    std::vector<Added> added;
    for (std::size_t f = 0; f < trace.backwards[b].forwards.size(); ++f) {
      const std::int32_t forward = trace.backwards[b].forwards[f];
      ForwardGradients gradients(trace, index, partition, trace.forwards[forward]);
      std::vector<Added> of_forward = gradients.Run(static_cast<std::int32_t>(f));
      added.insert(added.end(), of_forward.begin(), of_forward.end());
      gradients.MarkTensors(result.forwards[forward]);
    }
    Insert(std::move(added), BackwardTimes(trace, index, static_cast<std::int32_t>(b)),
           result.backwards[b].events);
  }
  return result;
}

}  // namespace shardplan
