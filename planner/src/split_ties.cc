#include "split_ties.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace shardplan {
namespace {

class Splitter {
 public:
  Splitter(const Trace& trace, const ModelIndex& index, const Partition& partition)
      : trace_(trace), index_(index), partition_(partition) {}

  std::optional<Trace> Run() {
    const bool shared =
        std::ranges::any_of(partition_.owners, [](const auto& owners) { return owners.size() > 1; });
    if (!shared) return std::nullopt;
    result_ = trace_;
    SplitParameters();
    for (Pass& pass : result_.forwards) {
      for (TraceEvent& event : pass.events) Rename(event);
    }
    for (std::size_t b = 0; b < result_.backwards.size(); ++b) SplitBackward(result_.backwards[b]);
    return std::move(result_);
  }

 private:
  // A part of a parameter's gradient: what one use of it sends back.
  struct Part {
    StorageId storage = -1;
    std::size_t made = 0;  // position of the operator that writes it
    ParameterId parameter = -1;
  };

  UnitId UnitOf(ModuleId module) const {
    return module < 0 ? -1 : partition_.managed_by[index_.canonical[module]];
  }

  // The parameter that stands for `parameter` in the module's unit.
  ParameterId In(ModuleId module, ParameterId parameter) const {
    const auto found = copies_.find({parameter, UnitOf(module)});
    return found == copies_.end() ? parameter : found->second;
  }

  void SplitParameters() {
    for (std::size_t p = 0; p < trace_.parameters.size(); ++p) {
      const std::vector<UnitParameterRef>& owners = partition_.owners[p];
      if (owners.size() < 2) continue;
      for (std::size_t o = 0; o < owners.size(); ++o) {
        auto id = static_cast<ParameterId>(p);
        if (o > 0) {
          id = static_cast<ParameterId>(result_.parameters.size());
          result_.parameters.push_back(trace_.parameters[p]);
        }
        copies_[{static_cast<ParameterId>(p), owners[o].unit}] = id;
        result_.parameters[id].fqn.clear();
        result_.parameters[id].shared_with.clear();
      }
    }
    for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
      for (NamedParameter& named : result_.modules[m].parameters) {
        const auto found = copies_.find({named.parameter, UnitOf(static_cast<ModuleId>(m))});
        if (found == copies_.end()) continue;
        named.parameter = found->second;
        Parameter& parameter = result_.parameters[found->second];
        const std::string& fqn = trace_.modules[m].fqn;
        std::string name = fqn.empty() ? named.name : fqn + "." + named.name;
        if (parameter.fqn.empty()) {
          parameter.fqn = std::move(name);
        } else {
          parameter.shared_with.push_back(std::move(name));
        }
      }
    }
  }

  void Rename(TraceEvent& event) const {
    auto* op = std::get_if<OperatorEvent>(&event);
    if (op == nullptr) return;
    for (ParameterId& parameter : op->parameters) parameter = In(op->module, parameter);
  }

  bool IsShared(ParameterId parameter) const {
    return parameter < std::ssize(partition_.owners) && partition_.owners[parameter].size() > 1;
  }

  void SplitBackward(Pass& pass) {
    drop_.clear();
    behind_.clear();
    roles_.clear();
    born_.clear();
    for (const TraceEvent& event : pass.events) {
      if (const auto* born = std::get_if<AllocateEvent>(&event)) born_[born->storage] = born->size_bytes;
    }
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i]);
      if (grad == nullptr || !IsShared(grad->parameter)) continue;
      if (grad->storage < 0) {
        PlaceWithoutOperators(pass, grad->parameter, i);
      } else {
        PlaceParts(pass, *grad, i);
      }
    }
    std::vector<TraceEvent> events;
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (!drop_.contains(i)) {
        Rename(pass.events[i]);
        events.push_back(pass.events[i]);
        auto* allocate = std::get_if<AllocateEvent>(&events.back());
        if (allocate != nullptr && roles_.contains(allocate->storage)) {
          allocate->role = StorageRole::kParameterGrad;
          allocate->parameter = roles_.at(allocate->storage);
        }
      }
      if (const auto added = behind_.find(i); added != behind_.end()) {
        events.insert(events.end(), added->second.begin(), added->second.end());
      }
    }
    pass.events = std::move(events);
  }

  // Of two tensors of its result's size that the backward has made.
  bool IsSum(const OperatorEvent& op) const {
    if (op.name != "aten.add" && op.name != "aten.add_") return false;
    return op.reads.size() == 2 && op.parameters.empty() &&
           std::ranges::all_of(op.reads, [&](StorageId read) {
             return born_.contains(read) && born_.at(read) == born_.at(op.writes[0]);
           });
  }

  // Every part of the gradient that ends in `grad`, and the engine's sums between them, which go.
  std::vector<Part> PartsOf(const Pass& pass, const ParameterGradEvent& grad, std::size_t end) {
    std::set<StorageId> sums = {grad.storage};  // and, once looked at, what is summed
    std::map<StorageId, Part> parts;
    for (std::size_t i = end; i-- > 0;) {
      const auto* op = std::get_if<OperatorEvent>(&pass.events[i]);
      if (op == nullptr || op->writes.size() != 1 || !sums.contains(op->writes[0])) continue;
      const StorageId written = op->writes[0];
      if (parts.contains(written)) continue;
      if (IsSum(*op)) {
        sums.insert(op->reads.begin(), op->reads.end());
        drop_.insert(i);
        if (op->name == "aten.add") summed_.insert(written);
      } else {
        parts[written] = {written, i, In(op->module, grad.parameter)};
      }
    }
    std::vector<Part> ordered;
    for (const auto& [storage, part] : parts) ordered.push_back(part);
    std::ranges::sort(ordered, {}, &Part::made);
    return ordered;
  }

  void PlaceParts(const Pass& pass, const ParameterGradEvent& grad, std::size_t end) {
    summed_.clear();
    const std::vector<Part> parts = PartsOf(pass, grad, end);
    if (parts.empty()) return;  // nothing tells whose it is: the first unit's
    drop_.insert(end);
    std::set<StorageId> gone = summed_;  // their births and deaths are no longer the trace's
    std::map<ParameterId, std::vector<Part>> by_copy;
    for (const Part& part : parts) {
      by_copy[part.parameter].push_back(part);
      gone.insert(part.storage);
    }
    for (std::size_t i = 0; i < end; ++i) {
      const auto* born = std::get_if<AllocateEvent>(&pass.events[i]);
      if (born != nullptr && summed_.contains(born->storage)) drop_.insert(i);
      const auto* dead = std::get_if<FreeEvent>(&pass.events[i]);
      if (dead != nullptr && gone.contains(dead->storage)) drop_.insert(i);
    }
    for (const auto& [parameter, own] : by_copy) {
      const StorageId first = own.front().storage;
      roles_[first] = parameter;
      for (std::size_t i = 1; i < own.size(); ++i) AddInPlace(pass, first, own[i]);
      behind_[own.back().made].push_back(ParameterGradEvent{parameter, first});
    }
  }

  void AddInPlace(const Pass& pass, StorageId sum, const Part& part) {
    const auto& maker = std::get<OperatorEvent>(pass.events[part.made]);
    OperatorEvent add{.name = "aten.add_", .module = maker.module, .dtype = maker.dtype};
    add.bytes_written = born_.at(part.storage);
    add.bytes_read.value = 2 * add.bytes_written.value;
    add.reads = {sum, part.storage};
    add.writes = {sum};
    behind_[part.made].push_back(add);
    behind_[part.made].push_back(FreeEvent{part.storage});
  }

  void PlaceWithoutOperators(const Pass& pass, ParameterId parameter, std::size_t position) {
    drop_.insert(position);
    std::size_t last = pass.events.size() - 1;
    if (last > 0 && std::holds_alternative<BackwardEndEvent>(pass.events[last])) --last;
    for (const UnitParameterRef& owner : partition_.owners[parameter]) {
      if (!Ran(pass, parameter, owner.unit)) continue;
      std::size_t behind = last;
      for (std::size_t i = 0; i < pass.events.size(); ++i) {
        const auto* done = std::get_if<InputsGradDoneEvent>(&pass.events[i]);
        if (done == nullptr) continue;
        if (partition_.unit_of_module[index_.canonical[done->module]] == owner.unit && i > 0) behind = i - 1;
      }
      behind_[behind].push_back(ParameterGradEvent{copies_.at({parameter, owner.unit}), -1});
    }
  }

  // Whether a module of the unit that names the parameter ran in the forwards of this backward.
  bool Ran(const Pass& backward, ParameterId parameter, UnitId unit) const {
    for (const std::int32_t f : backward.forwards) {
      for (const TraceEvent& event : trace_.forwards[f].events) {
        const auto* enter = std::get_if<EnterEvent>(&event);
        if (enter == nullptr || UnitOf(enter->module) != unit) continue;
        const std::vector<NamedParameter>& named = trace_.modules[enter->module].parameters;
        if (std::ranges::find(named, parameter, &NamedParameter::parameter) != named.end()) return true;
      }
    }
    return false;
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  Trace result_;
  std::map<std::pair<ParameterId, UnitId>, ParameterId> copies_;
  // Of the backward that is looked at: positions that go, what comes behind a position, storages that become
  // gradients, results of the engine's sums.
  std::set<std::size_t> drop_;
  std::map<std::size_t, std::vector<TraceEvent>> behind_;
  std::map<StorageId, ParameterId> roles_;
  std::set<StorageId> summed_;
  std::map<StorageId, Bytes> born_;  // sizes
};

}  // namespace

std::optional<Trace> SplitTies(const Trace& trace, const ModelIndex& index, const Partition& partition) {
  return Splitter(trace, index, partition).Run();
}

}  // namespace shardplan
