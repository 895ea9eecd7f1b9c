// SPDX-License-Identifier: Apache-2.0
#include "passes/checkpoint_regions.h"

#include <algorithm>
#include <utility>

namespace shardplan {
namespace {

class RegionFinder {
 public:
  RegionFinder(const Trace& trace, const ModelIndex& index, const std::vector<bool>& checkpointed,
               const Pass& backward)
      : trace_(trace), index_(index), checkpointed_(checkpointed), backward_(backward) {}

  CheckpointRegions Run() {
    for (const std::int32_t f : backward_.forwards) FindRegions(f);
    if (found_.regions.empty()) return {};
    IndexRegions();
    TellCallsApart();
    for (const std::int32_t f : backward_.forwards) FindLives(f);
    FindBackwardUses();
    ExtendInputs();
    return std::move(found_);
  }

 private:
  void FindRegions(std::int32_t f) {
    const Pass& pass = trace_.forwards[f];
    if (!pass.grad_enabled) return;
    std::map<ModuleId, std::int32_t> calls;
    int depth = 0;          // of running modules
    int region_depth = -1;  // of the region being passed over: inner checkpoints are part of it
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (const auto* enter = std::get_if<EnterEvent>(&pass.events[i])) {
        const ModuleId module = index_.canonical[enter->module];
        const std::int32_t occurrence = calls[module]++;
        if (checkpointed_[module] && region_depth < 0) {
          region_depth = depth;
          found_.regions.push_back({.module = module, .forward = f, .occurrence = occurrence, .enter = i});
          for (const TensorId tensor : enter->inputs) {
            if (pass.tensors[tensor].storage >= 0)
              found_.regions.back().inputs.push_back(pass.tensors[tensor].storage);
          }
        }
        ++depth;
      } else if (std::holds_alternative<ExitEvent>(pass.events[i])) {
        if (--depth == region_depth) {
          found_.regions.back().exit = i;
          region_depth = -1;
        }
      }
    }
  }

  void IndexRegions() {
    regions_of_.resize(trace_.modules.size());
    for (std::size_t r = 0; r < found_.regions.size(); ++r)
      regions_of_[found_.regions[r].module].push_back(r);
    for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
      std::vector<std::size_t>& over = regions_over_.emplace_back();
      for (auto module = static_cast<ModuleId>(m); module >= 0; module = index_.parent[module]) {
        const std::vector<std::size_t>& of = regions_of_[index_.canonical[module]];
        over.insert(over.end(), of.begin(), of.end());
      }
    }
  }

  // Operators name modules, not calls of them: what one call made may be read in the backward of the next.
  void TellCallsApart() {
    for (const TraceEvent& event : backward_.events) {
      const auto* ready = std::get_if<OutputGradReadyEvent>(&event);
      if (ready == nullptr || regions_of_[index_.canonical[ready->module]].size() < 2) continue;
      ForCall(*ready, [](CheckpointRegion& region) { region.started = false; });
    }
  }

  // The regions of the call that an event of the backward names.
  void ForCall(const auto& event, const auto& change) {
    for (const std::size_t r : regions_of_[index_.canonical[event.module]]) {
      CheckpointRegion& region = found_.regions[r];
      if (region.occurrence == event.occurrence && event.forward < std::ssize(backward_.forwards) &&
          backward_.forwards[event.forward] == region.forward) {
        change(region);
      }
    }
  }

  void FindLives(std::int32_t f) {
    const Pass& pass = trace_.forwards[f];
    std::vector<const EnterEvent*> running;
    const auto use = [&](const std::vector<TensorId>& tensors, std::size_t i) {
      for (const TensorId tensor : tensors) {
        const StorageId s = pass.tensors[tensor].storage;
        if (s >= 0) found_.lives[s].last_forward_use = i;
      }
    };
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (const auto* allocate = std::get_if<AllocateEvent>(&pass.events[i])) {
        found_.lives[allocate->storage] = {
            .birth_forward = f, .role = allocate->role, .birth = i, .last_forward_use = i};
      } else if (const auto* free = std::get_if<FreeEvent>(&pass.events[i])) {
        StorageLife& life = found_.lives[free->storage];
        life.dies = true;
        life.death_forward = f;
        life.death = i;
      } else if (const auto* release = std::get_if<ReleaseEvent>(&pass.events[i])) {
        found_.lives[release->storage].released = true;
        found_.lives[release->storage].release = i;
        found_.says_releases.insert(f);
      } else if (const auto* op = std::get_if<OperatorEvent>(&pass.events[i])) {
        for (const StorageId s : op->reads) found_.lives[s].last_forward_use = i;
        for (const StorageId s : op->writes) found_.lives[s].last_forward_use = i;
      } else if (const auto* exit = std::get_if<ExitEvent>(&pass.events[i])) {
        use(exit->outputs, i);
        if (running.empty()) continue;
        use(running.back()->inputs, i);  // the call holds its arguments until it returns
        running.pop_back();
      } else if (const auto* enter = std::get_if<EnterEvent>(&pass.events[i])) {
        use(enter->inputs, i);
        running.push_back(enter);
      }
    }
    for (std::size_t r = 0; r < found_.regions.size(); ++r) {
      if (found_.regions[r].forward != f) continue;
      for (std::size_t i = found_.regions[r].enter; i <= found_.regions[r].exit; ++i) {
        const auto* allocate = std::get_if<AllocateEvent>(&pass.events[i]);
        if (allocate != nullptr) found_.region_of_birth[allocate->storage] = r;
      }
    }
  }

  void FindBackwardUses() {
    for (std::size_t i = 0; i < backward_.events.size(); ++i) {
      const TraceEvent& event = backward_.events[i];
      if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        if (op->module >= 0 && ReadsSaved(*op)) {
          for (const std::size_t r : regions_over_[op->module]) {
            if (!found_.regions[r].done) Unpack(found_.regions[r], *op, i);
          }
        }
        for (const StorageId s : op->reads) UseInBackward(s, op->module, i);
        for (const StorageId s : op->writes) UseInBackward(s, op->module, i);
      } else if (const auto* done = std::get_if<InputsGradDoneEvent>(&event)) {
        ForCall(*done, [](CheckpointRegion& region) { region.done = true; });
      } else if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
        ForCall(*ready, [](CheckpointRegion& region) { region.started = true; });
      } else if (const auto* born = std::get_if<AllocateEvent>(&event)) {
        born_in_backward_.insert(born->storage);
      } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
        EndWithNode(free->storage, i);
        const auto life = found_.lives.find(free->storage);
        if (life == found_.lives.end()) continue;
        life->second.dies = true;
        life->second.death_forward = -1;
        life->second.death = i;
      }
    }
  }

  // Whatever a node of the region saved, also a parameter, comes from the recomputation.
  static void Unpack(CheckpointRegion& region, const OperatorEvent& op, std::size_t position) {
    region.end = position;
    if (!region.started) return;
    region.parameters.insert(op.parameters.begin(), op.parameters.end());
    if (!region.recomputes) region.first_use = position;
    region.recomputes = true;
  }

  // A node may run operators behind the last one that reads what it saved; it gives that up when all have
  // run.
  void EndWithNode(StorageId storage, std::size_t position) {
    const auto born = found_.region_of_birth.find(storage);
    if (born == found_.region_of_birth.end() || found_.needed_outside.contains(storage)) return;
    CheckpointRegion& region = found_.regions[born->second];
    if (region.saved.contains(storage) && !region.done) region.end = position;
  }

  // Whether the node of an operator holds anything from the forward: sums of gradients do not.
  bool ReadsSaved(const OperatorEvent& op) const {
    if (!op.parameters.empty()) return true;
    return std::ranges::any_of(op.reads, [&](StorageId s) { return !born_in_backward_.contains(s); });
  }

  void UseInBackward(StorageId storage, ModuleId module, std::size_t position) {
    const auto born = found_.region_of_birth.find(storage);
    if (born == found_.region_of_birth.end()) return;
    CheckpointRegion& region = found_.regions[born->second];
    const StorageLife& life = found_.lives[storage];
    const bool dead = life.death_forward == region.forward && life.dies && life.death < region.exit;
    if (module < 0 || !IsUnder(index_, module, region.module) || !region.started || dead) {
      found_.needed_outside.insert(storage);
      return;
    }
    region.saved.insert(storage);
    if (!region.recomputes) {
      region.recomputes = true;
      region.first_use = position;
    }
  }

  // A region's inputs belong to what recomputes it, and that to the tensors saved in the region: they go with
  // the last node that saved one.
  void ExtendInputs() {
    for (const CheckpointRegion& region : found_.regions) {
      if (!region.recomputes) continue;
      for (const StorageId input : region.inputs) {
        if (!found_.lives.contains(input) || found_.lives[input].birth_forward < 0)
          continue;  // batch data, buffers
        std::size_t& until = found_.kept_until[input];
        until = std::max(until, region.end);
      }
    }
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const std::vector<bool>& checkpointed_;
  const Pass& backward_;
  CheckpointRegions found_;
  std::vector<std::vector<std::size_t>> regions_of_;    // by canonical module: its calls
  std::vector<std::vector<std::size_t>> regions_over_;  // by module: calls of it, or of modules around it
  std::unordered_set<StorageId> born_in_backward_;
};

}  // namespace

bool IsUnder(const ModelIndex& index, ModuleId module, ModuleId ancestor) {
  for (; module >= 0; module = index.parent[module]) {
    if (index.canonical[module] == ancestor) return true;
  }
  return false;
}

CheckpointRegions FindCheckpointRegions(const Trace& trace, const ModelIndex& index,
                                        const std::vector<bool>& checkpointed, const Pass& backward) {
  return RegionFinder(trace, index, checkpointed, backward).Run();
}

bool CheckpointRegions::IsKept(StorageId storage) const {
  const auto born = region_of_birth.find(storage);
  return born != region_of_birth.end() && regions[born->second].kept.contains(storage);
}

bool CheckpointRegions::DiesInForward(StorageId storage, std::size_t& behind) const {
  if (kept_until.contains(storage) || IsKept(storage)) return false;
  const StorageLife& life = lives.at(storage);
  if (life.dies && life.death_forward >= 0) {
    behind = life.death;
    return true;
  }
  const auto born = region_of_birth.find(storage);
  if (born == region_of_birth.end() || needed_outside.contains(storage)) return false;
  if (life.role == StorageRole::kOutput) return false;  // the caller holds it
  if (!regions[born->second].saved.contains(storage)) return false;
  const bool known = says_releases.contains(life.birth_forward);
  behind = known ? life.release : life.last_forward_use;
  return !known || life.released;
}

}  // namespace shardplan
