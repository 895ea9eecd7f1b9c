// SPDX-License-Identifier: Apache-2.0
#include "units/split_ties.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

class Splitter {
 public:
  Splitter(const Trace& trace, const ModelIndex& index, const Partition& partition)
      : trace_(trace), index_(index), partition_(partition) {}

  std::optional<SplitTrace> Run() {
    FindOwners();
    const bool shared = std::ranges::any_of(owners_, [](const auto& owners) { return owners.size() > 1; });
    if (!shared) return std::nullopt;
    result_ = trace_;
    SplitParameters();
    for (Pass& pass : result_.forwards) {
      for (TraceEvent& event : pass.events) Rename(event);
    }
    for (std::size_t b = 0; b < result_.backwards.size(); ++b) SplitBackward(result_.backwards[b]);
    Partition partition = SplitUnits();
    return SplitTrace{std::move(result_), std::move(partition)};
  }

 private:
  // A part of a parameter's gradient: what one use of it sends back.
  struct Part {
    StorageId storage = -1;
    std::size_t made = 0;  // position of the operator that writes it
    ParameterId parameter = -1;
  };

  // Facts of a backward's storages in its events.
  struct Storages {
    std::map<StorageId, Bytes> size;
    std::map<StorageId, std::size_t> born, dead;
    std::map<StorageId, std::vector<std::size_t>> written;  // by operators that write nothing else
  };

  UnitId UnitOf(ModuleId module) const { return partition_.managed_by[index_.canonical[module]]; }

  // A unit's own parameters, and -1, last, where a module of no unit has the parameter as well: it goes on
  // with what the model was made with.
  void FindOwners() {
    for (const std::vector<UnitParameterRef>& owners : partition_.owners) {
      owners_.emplace_back();
      for (const UnitParameterRef& owner : owners) owners_.back().push_back(owner.unit);
    }
    for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
      if (UnitOf(static_cast<ModuleId>(m)) >= 0) continue;
      for (const NamedParameter& named : trace_.modules[m].parameters) {
        std::vector<UnitId>& owners = owners_[named.parameter];
        if (!owners.empty() && owners.back() >= 0) owners.push_back(-1);
      }
    }
  }

  // The parameter that stands for `parameter` in the module's unit.
  ParameterId In(ModuleId module, ParameterId parameter) const {
    if (module < 0) return parameter;
    const auto found = copies_.find({parameter, UnitOf(module)});
    return found == copies_.end() ? parameter : found->second;
  }

  void SplitParameters() {
    for (std::size_t p = 0; p < trace_.parameters.size(); ++p) {
      const std::vector<UnitId>& owners = owners_[p];
      if (owners.size() < 2) continue;
      for (std::size_t o = 0; o < owners.size(); ++o) {
        auto id = static_cast<ParameterId>(p);
        if (o > 0) {
          id = static_cast<ParameterId>(result_.parameters.size());
          result_.parameters.push_back(trace_.parameters[p]);
        }
        copies_[{static_cast<ParameterId>(p), owners[o]}] = id;
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

  // Every unit's own parameters in place of those that it shares.
  Partition SplitUnits() const {
    Partition split = partition_;
    split.owners.resize(result_.parameters.size());
    for (const auto& [shared, id] : copies_) {
      const auto& [parameter, unit] = shared;
      std::vector<UnitParameterRef>& owners = split.owners[id];
      owners.clear();
      for (const UnitParameterRef& owner : partition_.owners[parameter]) {
        if (owner.unit != unit) continue;
        SHARDPLAN_ASSERT(owners.empty(), "a unit holds a parameter once");
        owners.push_back(owner);
        UnitChoice& choice = split.units[unit];
        choice.parameter_ids[owner.parameter] = id;
        UnitParameter& own = choice.unit.parameters[owner.parameter];
        own.fqn = result_.parameters[id].fqn;
        own.shared_with = result_.parameters[id].shared_with;
      }
    }
    return split;
  }

  void Rename(TraceEvent& event) const {
    auto* op = std::get_if<OperatorEvent>(&event);
    if (op == nullptr) return;
    for (ParameterId& parameter : op->parameters) parameter = In(op->module, parameter);
  }

  bool IsShared(ParameterId parameter) const {
    return parameter < std::ssize(owners_) && owners_[parameter].size() > 1;
  }

  void SplitBackward(Pass& pass) {
    drop_.clear();
    behind_.clear();
    roles_.clear();
    LookAt(pass);
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

  void LookAt(const Pass& pass) {
    storages_ = {};
    inputs_done_.clear();
    ran_.clear();
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (const auto* born = std::get_if<AllocateEvent>(&pass.events[i])) {
        storages_.size[born->storage] = born->size_bytes;
        storages_.born[born->storage] = i;
      } else if (const auto* dead = std::get_if<FreeEvent>(&pass.events[i])) {
        storages_.dead[dead->storage] = i;
      } else if (const auto* op = std::get_if<OperatorEvent>(&pass.events[i])) {
        if (op->writes.size() == 1) storages_.written[op->writes[0]].push_back(i);
      } else if (const auto* done = std::get_if<InputsGradDoneEvent>(&pass.events[i])) {
        inputs_done_[partition_.unit_of_module[index_.canonical[done->module]]] = i;
      }
    }
    for (const std::int32_t f : pass.forwards) {
      for (const TraceEvent& event : trace_.forwards[f].events) {
        const auto* enter = std::get_if<EnterEvent>(&event);
        if (enter == nullptr) continue;
        for (const NamedParameter& named : trace_.modules[enter->module].parameters) {
          ran_.insert({named.parameter, UnitOf(enter->module)});
        }
      }
    }
  }

  // A sum has two tensors of its result's size that the backward has made.
  bool IsSum(const OperatorEvent& op) const {
    if (op.name != "aten.add" && op.name != "aten.add_") return false;
    const auto& size = storages_.size;
    return op.reads.size() == 2 && op.parameters.empty() &&
           std::ranges::all_of(op.reads, [&](StorageId read) {
             return size.contains(read) && size.at(read) == size.at(op.writes[0]);
           });
  }

  std::optional<std::size_t> LastWriter(StorageId storage, std::size_t before) const {
    const auto found = storages_.written.find(storage);
    if (found == storages_.written.end()) return std::nullopt;
    const std::vector<std::size_t>& writers = found->second;
    const auto behind = std::ranges::lower_bound(writers, before);
    return behind == writers.begin() ? std::nullopt : std::optional(*std::prev(behind));
  }

  // Every part of the gradient that ends in `grad`, and the engine's sums between them, which go.
  std::vector<Part> PartsOf(const Pass& pass, const ParameterGradEvent& grad, std::size_t end) {
    std::vector<Part> parts;
    std::vector<std::pair<StorageId, std::size_t>> open = {{grad.storage, end}};  // as written before there
    while (!open.empty()) {
      const auto [storage, before] = open.back();
      open.pop_back();
      const std::optional<std::size_t> writer = LastWriter(storage, before);
      if (!writer) continue;
      const auto& op = std::get<OperatorEvent>(pass.events[*writer]);
      if (!IsSum(op)) {
        parts.push_back({storage, *writer, In(op.module, grad.parameter)});
        continue;
      }
      for (const StorageId read : op.reads) open.emplace_back(read, *writer);
      drop_.insert(*writer);
      if (op.name == "aten.add") summed_.insert(storage);
    }
    std::ranges::sort(parts, {}, &Part::made);
    return parts;
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
    const auto drop = [&](const std::map<StorageId, std::size_t>& positions, StorageId storage) {
      const auto found = positions.find(storage);
      if (found != positions.end() && found->second < end) drop_.insert(found->second);
    };
    for (const StorageId storage : summed_) drop(storages_.born, storage);
    for (const StorageId storage : gone) drop(storages_.dead, storage);
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
    add.bytes_written = storages_.size.at(part.storage);
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
    for (const UnitId owner : owners_[parameter]) {
      // Whether a module of the unit that names the parameter ran in the forwards of this backward.
      if (!ran_.contains({parameter, owner})) continue;
      const auto done = inputs_done_.find(owner);
      const bool known = owner >= 0 && done != inputs_done_.end() && done->second > 0;
      behind_[known ? done->second - 1 : last].push_back(
          ParameterGradEvent{copies_.at({parameter, owner}), -1});
    }
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  Trace result_;
  std::vector<std::vector<UnitId>> owners_;  // by parameter
  std::map<std::pair<ParameterId, UnitId>, ParameterId> copies_;
  // The backward that is looked at: facts of its events; the last of a unit's inputs_done; units whose
  // modules that name a parameter ran before it; positions that go; events behind a position; storages that
  // become gradients; results of the engine's sums.
  Storages storages_;
  std::map<UnitId, std::size_t> inputs_done_;
  std::set<std::pair<ParameterId, UnitId>> ran_;
  std::set<std::size_t> drop_;
  std::map<std::size_t, std::vector<TraceEvent>> behind_;
  std::map<StorageId, ParameterId> roles_;
  std::set<StorageId> summed_;
};

// The outermost unit around a unit's first module.
UnitId RootOf(const ModelIndex& index, const Partition& partition, UnitId unit) {
  UnitId root = unit;
  for (ModuleId m = partition.units[unit].modules.front(); m >= 0; m = index.parent[m]) {
    if (const UnitId around = partition.unit_of_module[index.canonical[m]]; around >= 0) root = around;
  }
  return root;
}

}  // namespace

Status CheckTiesWithinRoots(const Trace& trace, const ModelIndex& index, const Partition& partition) {
  for (std::size_t p = 0; p < partition.owners.size(); ++p) {
    const std::vector<UnitParameterRef>& owners = partition.owners[p];
    for (std::size_t later = 1; later < owners.size(); ++later) {
      for (std::size_t earlier = 0; earlier < later; ++earlier) {
        const UnitId a = owners[earlier].unit, b = owners[later].unit;
        if (RootOf(index, partition, a) != RootOf(index, partition, b)) continue;
        return MakeInputError(
            "/units",
            fmt::format("PyTorch fails here: the parameter {} is shared by modules of two units",
                        trace.parameters[p].fqn),
            fmt::format("{} and {}", DisplayName(partition.units[a].unit.fqn),
                        DisplayName(partition.units[b].unit.fqn)),
            "a unit that has both modules, a group");
      }
    }
  }
  return {};
}

std::optional<SplitTrace> SplitTies(const Trace& trace, const ModelIndex& index, const Partition& partition) {
  return Splitter(trace, index, partition).Run();
}

}  // namespace shardplan
