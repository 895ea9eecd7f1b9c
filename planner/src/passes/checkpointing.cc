// Activation checkpointing as a transformation of a trace (torch.utils.checkpoint, use_reentrant=False).
//
// [Note: what checkpointing changes]
// A region is one call of a checkpointed module. In the forward, what only the region's own backward would
// read is not kept: it dies at its last use, or when the last module that got it as an argument returns (what
// else Python holds it by is not known). The region's inputs are kept instead, until its backward is
// over. In the backward, the first node that needs something saved in the region runs the region's forward
// again, up to the point where the last saved tensor has been remade (early stop), and the tensors made there
// take the place of the saved ones. What is left of the interrupted forward dies at once.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "shardplan/planner/planner.h"
#include "units/model_index.h"

namespace shardplan {
namespace {

struct Region {
  ModuleId module = -1;  // canonical
  std::int32_t forward = -1, occurrence = 0;
  std::size_t enter = 0, exit = 0;  // events of the forward
  std::vector<StorageId> inputs;
  std::set<StorageId> saved;              // born inside, read by the region's own backward
  std::set<ParameterId> parameters;       // read by the region's own backward
  std::map<StorageId, StorageId> remade;  // by the recomputation
  std::size_t first_use = 0;              // position in the backward that needs the recomputation
  bool recomputes = false;
  bool started = true;  // its backward has begun: the gradient of an output is there
  std::size_t end = 0;  // position in the backward behind which the inputs are dropped
  bool done = false;    // its backward is over
};

struct Life {
  std::int32_t birth_forward = -1;
  StorageRole role = StorageRole::kSaved;
  std::size_t birth = 0;
  std::int32_t death_forward = -1;  // -1: in the backward, or never
  std::size_t death = 0;
  bool dies = false;
  std::size_t last_forward_use = 0;
};

class Checkpointer {
 public:
  Checkpointer(const Trace& trace, ModelIndex index, const CheckpointRule& rule)
      : trace_(trace), index_(std::move(index)), rule_(rule), result_(trace) {}

  Result<Trace> Run() {
    if (Status s = MatchRule(); !s) return std::unexpected(s.error());
    FindNextStorage();
    for (std::size_t b = 0; b < trace_.backwards.size(); ++b) Transform(b);
    return std::move(result_);
  }

 private:
  Status MatchRule() {
    checkpointed_.assign(trace_.modules.size(), false);
    for (std::size_t e = 0; e < rule_.modules.size(); ++e) {
      Result<std::vector<std::string>> matched = MatchModules(trace_, rule_.modules[e]);
      if (!matched) {
        matched.error().pointer = fmt::format("/checkpoint/modules/{}", e);
        return std::unexpected(matched.error());
      }
      for (const std::string& fqn : *matched) {
        checkpointed_[index_.canonical[index_.by_fqn.find(fqn)->second]] = true;
      }
    }
    return {};
  }

  void FindNextStorage() {
    const auto see = [&](StorageId id) { next_storage_ = std::max(next_storage_, id + 1); };
    for (const TraceInput& input : trace_.inputs) see(input.storage);
    for (const ModuleBuffer& buffer : trace_.buffers) see(buffer.storage);
    for (const std::vector<Pass>* passes : {&trace_.forwards, &trace_.backwards}) {
      for (const Pass& pass : *passes) {
        for (const TraceEvent& event : pass.events) {
          if (const auto* allocate = std::get_if<AllocateEvent>(&event)) see(allocate->storage);
        }
      }
    }
  }

  bool IsUnder(ModuleId module, ModuleId ancestor) const {
    for (; module >= 0; module = index_.parent[module]) {
      if (index_.canonical[module] == ancestor) return true;
    }
    return false;
  }

  void Transform(std::size_t b) {
    backward_ = &trace_.backwards[b];
    lives_.clear();
    regions_.clear();
    region_of_birth_.clear();
    born_in_backward_.clear();
    for (const std::int32_t f : backward_->forwards) FindRegions(f);
    if (regions_.empty()) return;
    TellCallsApart();
    for (const std::int32_t f : backward_->forwards) FindLives(f);
    FindBackwardUses();
    ExtendInputs();
    for (const std::int32_t f : backward_->forwards) RewriteForward(f);
    RewriteBackward(b);
  }

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
          regions_.push_back({.module = module, .forward = f, .occurrence = occurrence, .enter = i});
          for (const TensorId tensor : enter->inputs) {
            if (pass.tensors[tensor].storage >= 0)
              regions_.back().inputs.push_back(pass.tensors[tensor].storage);
          }
        }
        ++depth;
      } else if (std::holds_alternative<ExitEvent>(pass.events[i])) {
        if (--depth == region_depth) {
          regions_.back().exit = i;
          region_depth = -1;
        }
      }
    }
  }

  // Operators name modules, not calls of them: what one call made may be read in the backward of the next.
  void TellCallsApart() {
    std::map<ModuleId, int> calls;
    for (const Region& region : regions_) ++calls[region.module];
    for (const TraceEvent& event : backward_->events) {
      const auto* ready = std::get_if<OutputGradReadyEvent>(&event);
      if (ready == nullptr) continue;
      for (Region& region : regions_) {
        if (calls[region.module] > 1 && Is(region, *ready)) region.started = false;
      }
    }
  }

  // Whether an event of the backward is of the region's call.
  bool Is(const Region& region, const auto& event) const {
    return region.module == index_.canonical[event.module] && region.occurrence == event.occurrence &&
           event.forward < std::ssize(backward_->forwards) &&
           backward_->forwards[event.forward] == region.forward;
  }

  void FindLives(std::int32_t f) {
    const Pass& pass = trace_.forwards[f];
    std::vector<const EnterEvent*> running;
    const auto use = [&](const std::vector<TensorId>& tensors, std::size_t i) {
      for (const TensorId tensor : tensors) {
        const StorageId s = pass.tensors[tensor].storage;
        if (s >= 0) lives_[s].last_forward_use = i;
      }
    };
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (const auto* allocate = std::get_if<AllocateEvent>(&pass.events[i])) {
        lives_[allocate->storage] = {
            .birth_forward = f, .role = allocate->role, .birth = i, .last_forward_use = i};
      } else if (const auto* free = std::get_if<FreeEvent>(&pass.events[i])) {
        Life& life = lives_[free->storage];
        life.dies = true;
        life.death_forward = f;
        life.death = i;
      } else if (const auto* op = std::get_if<OperatorEvent>(&pass.events[i])) {
        for (const StorageId s : op->reads) lives_[s].last_forward_use = i;
        for (const StorageId s : op->writes) lives_[s].last_forward_use = i;
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
    for (std::size_t r = 0; r < regions_.size(); ++r) {
      if (regions_[r].forward != f) continue;
      for (std::size_t i = regions_[r].enter; i <= regions_[r].exit; ++i) {
        const auto* allocate = std::get_if<AllocateEvent>(&pass.events[i]);
        if (allocate != nullptr) region_of_birth_[allocate->storage] = r;
      }
    }
  }

  void FindBackwardUses() {
    for (std::size_t i = 0; i < backward_->events.size(); ++i) {
      const TraceEvent& event = backward_->events[i];
      if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        if (op->module >= 0 && ReadsSaved(*op)) {
          for (Region& region : regions_) {
            if (!region.done && IsUnder(op->module, region.module)) Unpack(region, *op, i);
          }
        }
        for (const StorageId s : op->reads) UseInBackward(s, op->module, i);
        for (const StorageId s : op->writes) UseInBackward(s, op->module, i);
      } else if (const auto* done = std::get_if<InputsGradDoneEvent>(&event)) {
        for (Region& region : regions_) region.done = region.done || Is(region, *done);
      } else if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
        for (Region& region : regions_) region.started = region.started || Is(region, *ready);
      } else if (const auto* born = std::get_if<AllocateEvent>(&event)) {
        born_in_backward_.insert(born->storage);
      } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
        EndWithNode(free->storage, i);
        const auto life = lives_.find(free->storage);
        if (life == lives_.end()) continue;
        life->second.dies = true;
        life->second.death_forward = -1;
        life->second.death = i;
      }
    }
  }

  // Whatever a node of the region saved, also a parameter, comes from the recomputation.
  static void Unpack(Region& region, const OperatorEvent& op, std::size_t position) {
    region.end = position;
    if (!region.started) return;
    region.parameters.insert(op.parameters.begin(), op.parameters.end());
    if (!region.recomputes) region.first_use = position;
    region.recomputes = true;
  }

  // A node may run operators behind the last one that reads what it saved; it gives that up when all have
  // run.
  void EndWithNode(StorageId storage, std::size_t position) {
    const auto born = region_of_birth_.find(storage);
    if (born == region_of_birth_.end() || needed_outside_.contains(storage)) return;
    Region& region = regions_[born->second];
    if (region.saved.contains(storage) && !region.done) region.end = position;
  }

  // Whether the node of an operator holds anything from the forward: sums of gradients do not.
  bool ReadsSaved(const OperatorEvent& op) const {
    if (!op.parameters.empty()) return true;
    return std::ranges::any_of(op.reads, [&](StorageId s) { return !born_in_backward_.contains(s); });
  }

  void UseInBackward(StorageId storage, ModuleId module, std::size_t position) {
    const auto born = region_of_birth_.find(storage);
    if (born == region_of_birth_.end()) return;
    Region& region = regions_[born->second];
    const Life& life = lives_[storage];
    const bool dead = life.death_forward == region.forward && life.dies && life.death < region.exit;
    if (module < 0 || !IsUnder(module, region.module) || !region.started || dead) {
      needed_outside_.insert(storage);
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
    kept_until_.clear();
    for (const Region& region : regions_) {
      if (!region.recomputes) continue;
      for (const StorageId input : region.inputs) {
        if (!lives_.contains(input) || lives_[input].birth_forward < 0) continue;  // batch data, buffers
        std::size_t& until = kept_until_[input];
        until = std::max(until, region.end);
      }
    }
  }

  // Where a storage born in the forward dies now: in the forward behind an event, or in the backward.
  bool DiesInForward(StorageId storage, std::size_t& behind) const {
    if (kept_until_.contains(storage)) return false;
    const Life& life = lives_.at(storage);
    if (life.dies && life.death_forward >= 0) {
      behind = life.death;
      return true;
    }
    const auto born = region_of_birth_.find(storage);
    if (born == region_of_birth_.end() || needed_outside_.contains(storage)) return false;
    if (life.role == StorageRole::kOutput) return false;  // the caller holds it
    if (!regions_[born->second].saved.contains(storage)) return false;
    behind = life.last_forward_use;
    return true;
  }

  void RewriteForward(std::int32_t f) {
    const Pass& pass = trace_.forwards[f];
    std::map<std::size_t, std::vector<StorageId>> free_behind;
    for (const auto& [storage, life] : lives_) {
      std::size_t behind = 0;
      if (life.birth_forward == f && DiesInForward(storage, behind)) free_behind[behind].push_back(storage);
    }
    std::vector<TraceEvent>& events = result_.forwards[f].events;
    events.clear();
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      TraceEvent event = pass.events[i];
      if (const auto* free = std::get_if<FreeEvent>(&event)) {
        if (!lives_.contains(free->storage) || lives_[free->storage].birth_forward != f)
          events.push_back(event);
      } else {
        if (auto* allocate = std::get_if<AllocateEvent>(&event)) SetRole(*allocate);
        events.push_back(std::move(event));
      }
      if (const auto freed = free_behind.find(i); freed != free_behind.end()) {
        for (const StorageId storage : freed->second) events.push_back(FreeEvent{storage});
      }
    }
  }

  void SetRole(AllocateEvent& allocate) const {
    std::size_t behind = 0;
    const bool forward_only = DiesInForward(allocate.storage, behind);
    if (forward_only && allocate.role == StorageRole::kSaved) allocate.role = StorageRole::kForwardTemp;
    if (!forward_only && allocate.role == StorageRole::kForwardTemp) allocate.role = StorageRole::kSaved;
  }

  // Everything of the region's forward up to the point where the last tensor has been saved: an operator
  // saves inputs, its parameters among them, before it runs, outputs behind it.
  std::vector<TraceEvent> Recompute(Region& region) {
    const Pass& pass = trace_.forwards[region.forward];
    std::size_t stop = region.exit;
    if (rule_.early_stop) {
      stop = region.enter;
      for (std::size_t i = region.enter; i <= region.exit; ++i) {
        const auto* op = std::get_if<OperatorEvent>(&pass.events[i]);
        if (op == nullptr) continue;
        if (std::ranges::any_of(op->parameters,
                                [&](ParameterId p) { return region.parameters.contains(p); })) {
          stop = std::max(stop, BeforeAllocations(pass.events, i) - 1);
        }
        for (const StorageId s : op->writes) {
          if (region.saved.contains(s)) stop = i;
        }
      }
    }
    std::vector<TraceEvent> events;
    std::set<StorageId> alive;  // remade, not saved
    for (std::size_t i = region.enter; i <= stop; ++i) {
      const TraceEvent& event = pass.events[i];
      if (const auto* enter = std::get_if<EnterEvent>(&event)) {
        events.push_back(RecomputeEnterEvent{enter->module});
      } else if (const auto* exit = std::get_if<ExitEvent>(&event)) {
        if (i != region.exit) events.push_back(RecomputeExitEvent{exit->module});
      } else if (const auto* allocate = std::get_if<AllocateEvent>(&event)) {
        AllocateEvent again = *allocate;
        again.role = StorageRole::kRecompute;
        again.storage = region.remade[allocate->storage] = next_storage_++;
        if (!region.saved.contains(allocate->storage)) alive.insert(again.storage);
        events.push_back(again);
      } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
        const auto again = region.remade.find(free->storage);
        if (again != region.remade.end() && alive.erase(again->second) > 0) {
          events.push_back(FreeEvent{again->second});
        }
      } else if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        events.push_back(Renamed(*op, region));
      }
    }
    // An early stop is an exception: what the interrupted functions hold lives until it has been caught,
    // outside.
    const bool interrupted = stop < region.exit;
    if (interrupted) events.push_back(RecomputeExitEvent{region.module});
    for (const StorageId storage : alive) events.push_back(FreeEvent{storage});
    if (!interrupted) events.push_back(RecomputeExitEvent{region.module});
    return events;
  }

  static OperatorEvent Renamed(OperatorEvent op, const Region& region) {
    for (std::vector<StorageId>* list : {&op.reads, &op.writes}) {
      for (StorageId& storage : *list) {
        if (const auto again = region.remade.find(storage); again != region.remade.end())
          storage = again->second;
      }
    }
    return op;
  }

  // A node packs what it saves of its inputs, and unpacks that, before it allocates its results.
  static std::size_t BeforeAllocations(const std::vector<TraceEvent>& events, std::size_t position) {
    while (position > 0 && std::holds_alternative<AllocateEvent>(events[position - 1])) --position;
    return position;
  }

  void RewriteBackward(std::size_t b) {
    std::map<std::size_t, std::vector<Region*>> recompute_at;
    for (Region& region : regions_) {
      if (region.recomputes)
        recompute_at[BeforeAllocations(backward_->events, region.first_use)].push_back(&region);
    }
    std::map<std::size_t, std::vector<StorageId>> drop_behind;  // inputs that live longer than before
    for (const auto& [storage, until] : kept_until_) {
      const Life& life = lives_[storage];
      const bool later = life.dies && life.death_forward < 0 && life.death >= until;
      if (!later) drop_behind[until].push_back(storage);
    }
    std::vector<TraceEvent>& events = result_.backwards[b].events;
    events.clear();
    for (std::size_t i = 0; i < backward_->events.size(); ++i) {
      if (const auto due = recompute_at.find(i); due != recompute_at.end()) {
        for (Region* region : due->second) {
          std::vector<TraceEvent> again = Recompute(*region);
          std::move(again.begin(), again.end(), std::back_inserter(events));
        }
      }
      const TraceEvent& event = backward_->events[i];
      if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        events.push_back(RenamedInBackward(*op));
      } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
        RewriteFree(*free, i, events);
      } else {
        events.push_back(event);
      }
      if (const auto drop = drop_behind.find(i); drop != drop_behind.end()) {
        for (const StorageId storage : drop->second) events.push_back(FreeEvent{storage});
      }
    }
  }

  OperatorEvent RenamedInBackward(OperatorEvent op) const {
    for (std::vector<StorageId>* list : {&op.reads, &op.writes}) {
      for (StorageId& storage : *list) {
        const auto born = region_of_birth_.find(storage);
        if (born == region_of_birth_.end()) continue;
        const Region& region = regions_[born->second];
        if (op.module < 0 || !IsUnder(op.module, region.module) || !region.saved.contains(storage)) continue;
        if (const auto again = region.remade.find(storage); again != region.remade.end())
          storage = again->second;
      }
    }
    return op;
  }

  void RewriteFree(const FreeEvent& free, std::size_t position, std::vector<TraceEvent>& events) const {
    const auto born = region_of_birth_.find(free.storage);
    if (born != region_of_birth_.end() && regions_[born->second].saved.contains(free.storage)) {
      const Region& region = regions_[born->second];
      if (const auto again = region.remade.find(free.storage); again != region.remade.end()) {
        events.push_back(FreeEvent{again->second});
      }
    }
    const auto life = lives_.find(free.storage);
    if (life == lives_.end() || life->second.birth_forward < 0) {
      events.push_back(free);
      return;
    }
    std::size_t behind = 0;
    if (DiesInForward(free.storage, behind)) return;
    const auto kept = kept_until_.find(free.storage);
    if (kept != kept_until_.end() && kept->second > position) return;  // dropped later, with the region
    events.push_back(free);
  }

  const Trace& trace_;
  ModelIndex index_;
  const CheckpointRule& rule_;
  Trace result_;
  std::vector<bool> checkpointed_;  // by canonical module
  StorageId next_storage_ = 0;
  const Pass* backward_ = nullptr;
  std::vector<Region> regions_;
  std::map<StorageId, Life> lives_;
  std::map<StorageId, std::size_t> region_of_birth_;
  std::set<StorageId> needed_outside_;
  std::set<StorageId> born_in_backward_;
  std::map<StorageId, std::size_t> kept_until_;  // position in the backward
};

}  // namespace

Result<Trace> ApplyCheckpointing(const Trace& trace, const CheckpointRule& rule) {
  Result<ModelIndex> index = MakeModelIndex(trace);
  if (!index) return std::unexpected(index.error());
  return Checkpointer(trace, std::move(*index), rule).Run();
}

}  // namespace shardplan
