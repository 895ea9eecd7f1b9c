// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing as a transformation of a trace (torch.utils.checkpoint, use_reentrant=False).
//
// [Note: what checkpointing changes]
// A region is one call of a checkpointed module. In the forward, what only the region's own backward would
// read is not kept: it dies where Python releases it; in a trace that does not say where, at its last use, or
// when the last module that got it as an argument returns. The region's inputs are kept instead, until its
// backward is over. In the backward, the first node that needs something saved in the region runs the
// region's forward again, up to the point where the last saved tensor has been remade (early stop), and the
// tensors made there take the place of the saved ones. The rest of the interrupted forward dies at once.
//
// [Note: sums behind a node]
// A gradient of an operand that was broadcast is summed by the engine, behind the node that made it
// (validate_outputs, torch/csrc/autograd/engine.cpp). A node holds what it saved itself until the engine is
// done with it; what it saved in a region it only unpacks, and that dies when the node returns, before the
// sums.
//
// [Note: operators that are not run again]
// Selective checkpointing (torch.utils.checkpoint.create_selective_checkpoint_contexts) keeps what some
// operators of the region made, temporaries too. The recomputation takes that from where it is kept in place
// of running the operator; what nobody saved then dies where it died in the forward. Results that an early
// stop leaves untaken go with the region's inputs.
#include "passes/checkpointing.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#include "passes/checkpoint_regions.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/checks.h"
#include "units/model_index.h"

namespace shardplan {
namespace {

class Checkpointer {
 public:
  Checkpointer(const Trace& trace, const ModelIndex& index, const CheckpointRule& rule)
      : trace_(trace), index_(index), rule_(rule), result_(trace) {}

  Result<Trace> Run() {
    if (Status s = MatchRule(); !s) return std::unexpected(s.error());
    FindNextStorage();
    std::set<std::int32_t> covered;  // by what was called before
    for (std::size_t b = 0; b < trace_.backwards.size(); ++b) {
      Transform(b);
      for (const std::int32_t f : trace_.backwards[b].forwards) {
        const bool again = !covered.insert(f).second && !trace_.calls.empty() && !found_.regions.empty();
        if (again) return RunsBackwardTwice(b, f);
      }
    }
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
    std::int64_t count = 0;
    for (std::size_t m = 0; m < checkpointed_.size(); ++m) {
      if (checkpointed_[m] && ++count % rule_.every != 0) checkpointed_[m] = false;
    }
    return CheckSaved();
  }

  // The first of them keeps and drops other tensors than the second needs.
  static std::unexpected<Error> RunsBackwardTwice(std::size_t b, std::int32_t f) {
    return MakeInputError(
        "/checkpoint",
        fmt::format("two backwards of a step, {} the last, go through forward {} of the trace", b, f),
        "a checkpointed module in it", "a trace of a model that checkpoints by itself");
  }

  Status CheckSaved() const {
    std::set<std::string> names;
    for (const Pass& pass : trace_.forwards) {
      for (const TraceEvent& event : pass.events) {
        if (const auto* op = std::get_if<OperatorEvent>(&event)) names.insert(op->name);
      }
    }
    for (std::size_t s = 0; s < rule_.save.size(); ++s) {
      const std::string pointer = fmt::format("/checkpoint/save/{}", s);
      if (rule_.save[s].name.empty())
        return MakeInputError(pointer + "/name", "an operator needs a name", "\"\"", "\"aten.mm\"");
      if (rule_.save[s].recompute_every < 0)
        return MakeInputError(pointer + "/recompute_every", "not a number of operators",
                              std::to_string(rule_.save[s].recompute_every), "0 or more");
    }
    const bool any = std::ranges::any_of(
        rule_.save, [&](const SavedOperator& saved) { return names.contains(saved.name); });
    if (rule_.save.empty() || any) return {};
    return MakeInputError("/checkpoint/save", "the model runs none of these operators", rule_.save[0].name,
                          "operators of the trace, as aten.mm");
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

  void Transform(std::size_t b) {
    backward_ = &trace_.backwards[b];
    found_ = FindCheckpointRegions(trace_, index_, checkpointed_, *backward_);
    if (found_.regions.empty()) return;
    for (CheckpointRegion& region : found_.regions) {
      if (!region.recomputes) continue;
      FindSaved(region);
      FindStop(region);
      KeepUntaken(region);
    }
    for (const std::int32_t f : backward_->forwards) RewriteForward(f);
    RewriteBackward(b);
  }

  void RewriteForward(std::int32_t f) {
    const Pass& pass = trace_.forwards[f];
    std::unordered_map<std::size_t, std::vector<StorageId>> free_behind;
    for (const auto& [storage, life] : found_.lives) {
      std::size_t behind = 0;
      if (life.birth_forward == f && found_.DiesInForward(storage, behind))
        free_behind[behind].push_back(storage);
    }
    for (auto& [position, freed] : free_behind) std::ranges::sort(freed);
    std::vector<TraceEvent>& events = result_.forwards[f].events;
    events.clear();
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      TraceEvent event = pass.events[i];
      if (const auto* free = std::get_if<FreeEvent>(&event)) {
        if (!found_.lives.contains(free->storage) || found_.lives[free->storage].birth_forward != f)
          events.push_back(event);
      } else if (const auto* release = std::get_if<ReleaseEvent>(&event)) {
        std::size_t behind = 0;
        if (!found_.DiesInForward(release->storage, behind)) events.push_back(event);
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
    const bool forward_only = found_.DiesInForward(allocate.storage, behind);
    if (forward_only && allocate.role == StorageRole::kSaved) allocate.role = StorageRole::kForwardTemp;
    if (!forward_only && allocate.role == StorageRole::kForwardTemp) allocate.role = StorageRole::kSaved;
  }

  // The operators of a region whose results are kept: those that the rule names, but every n-th.
  void FindSaved(CheckpointRegion& region) {
    const Pass& pass = trace_.forwards[region.forward];
    std::map<std::string_view, std::int64_t> count;
    for (std::size_t i = region.enter; i <= region.exit; ++i) {
      const auto* op = std::get_if<OperatorEvent>(&pass.events[i]);
      if (op == nullptr) continue;
      const auto rule = std::ranges::find(rule_.save, op->name, &SavedOperator::name);
      if (rule == rule_.save.end()) continue;
      const std::int64_t number = ++count[op->name];
      if (rule->recompute_every > 0 && number % rule->recompute_every == 0) continue;
      std::vector<StorageId> made = MadeBy(pass.events, i);
      if (made.empty()) continue;
      region.saves.insert(i);
      region.kept.insert(made.begin(), made.end());
    }
  }

  // Storages that an operator writes and that were allocated for it.
  static std::vector<StorageId> MadeBy(const std::vector<TraceEvent>& events, std::size_t position) {
    const std::vector<StorageId>& writes = std::get<OperatorEvent>(events[position]).writes;
    std::vector<StorageId> made;
    for (std::size_t i = BeforeAllocations(events, position); i < position; ++i) {
      const StorageId storage = std::get<AllocateEvent>(events[i]).storage;
      if (std::ranges::find(writes, storage) != writes.end()) made.push_back(storage);
    }
    return made;
  }

  // Up to the point where the last tensor has been saved: an operator saves inputs, its parameters among
  // them, before it runs, outputs behind it.
  void FindStop(CheckpointRegion& region) const {
    const Pass& pass = trace_.forwards[region.forward];
    region.stop = region.exit;
    if (!rule_.early_stop) return;
    region.stop = region.enter;
    for (std::size_t i = region.enter; i <= region.exit; ++i) {
      const auto* op = std::get_if<OperatorEvent>(&pass.events[i]);
      if (op == nullptr) continue;
      if (std::ranges::any_of(op->parameters, [&](ParameterId p) { return region.parameters.contains(p); })) {
        region.stop = std::max(region.stop, BeforeAllocations(pass.events, i) - 1);
      }
      for (const StorageId s : op->writes) {
        if (region.saved.contains(s)) region.stop = i;
      }
    }
  }

  // Results that the recomputation never comes to stay as long as the region's inputs.
  void KeepUntaken(CheckpointRegion& region) {
    const Pass& pass = trace_.forwards[region.forward];
    for (const std::size_t i : region.saves) {
      if (i <= region.stop) continue;
      for (const StorageId storage : MadeBy(pass.events, i)) {
        if (!region.saved.contains(storage)) found_.kept_until[storage] = region.end;
      }
    }
  }

  // Everything of the region's forward up to its stop.
  std::vector<TraceEvent> Recompute(CheckpointRegion& region) {
    const Pass& pass = trace_.forwards[region.forward];
    const std::size_t stop = region.stop;
    std::vector<TraceEvent> events;
    std::set<StorageId> alive;  // remade, not saved
    std::set<std::int32_t> kept_works;
    for (std::size_t i = region.enter; i <= stop; ++i) {
      const TraceEvent& event = pass.events[i];
      if (const auto* enter = std::get_if<EnterEvent>(&event)) {
        events.push_back(RecomputeEnterEvent{enter->module});
      } else if (const auto* exit = std::get_if<ExitEvent>(&event)) {
        if (i != region.exit) events.push_back(RecomputeExitEvent{exit->module});
      } else if (const auto* allocate = std::get_if<AllocateEvent>(&event)) {
        if (region.kept.contains(allocate->storage)) {
          if (DiesInItsForward(allocate->storage)) alive.insert(allocate->storage);
          continue;
        }
        AllocateEvent again = *allocate;
        again.role = StorageRole::kRecompute;
        again.storage = region.remade[allocate->storage] = next_storage_++;
        if (!region.saved.contains(allocate->storage)) alive.insert(again.storage);
        events.push_back(again);
      } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
        const auto again = region.remade.find(free->storage);
        const StorageId dead = again == region.remade.end() ? free->storage : again->second;
        if (alive.erase(dead) > 0) events.push_back(FreeEvent{dead});
      } else if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        if (region.saves.contains(i)) {
          if (op->collective) kept_works.insert(op->collective->work);
          continue;
        }
        events.push_back(Renamed(*op, region));
      } else if (const auto* wait = std::get_if<CollectiveWaitEvent>(&event)) {
        if (!kept_works.contains(wait->work)) events.push_back(*wait);
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

  // Nobody saved it: it died in the forward before it was kept.
  bool DiesInItsForward(StorageId storage) const {
    const StorageLife& life = found_.lives.at(storage);
    return life.dies && life.death_forward >= 0 && !found_.kept_until.contains(storage);
  }

  static OperatorEvent Renamed(OperatorEvent op, const CheckpointRegion& region) {
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
    std::map<std::size_t, std::vector<CheckpointRegion*>> recompute_at;
    for (CheckpointRegion& region : found_.regions) {
      if (region.recomputes)
        recompute_at[BeforeAllocations(backward_->events, region.first_use)].push_back(&region);
    }
    std::map<std::size_t, std::vector<StorageId>> drop_behind;  // inputs that live longer than before
    for (const auto& [storage, until] : found_.kept_until) {
      const StorageLife& life = found_.lives[storage];
      const bool later = life.dies && life.death_forward < 0 && life.death >= until;
      if (!later) drop_behind[until].push_back(storage);
    }
    std::vector<TraceEvent>& events = result_.backwards[b].events;
    events.clear();
    for (std::size_t i = 0; i < backward_->events.size(); ++i) {
      if (const auto due = recompute_at.find(i); due != recompute_at.end()) {
        for (CheckpointRegion* region : due->second) {
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
        const auto born = found_.region_of_birth.find(storage);
        if (born == found_.region_of_birth.end()) continue;
        const CheckpointRegion& region = found_.regions[born->second];
        if (op.module < 0 || !IsUnder(index_, op.module, region.module) || !region.saved.contains(storage))
          continue;
        if (const auto again = region.remade.find(storage); again != region.remade.end())
          storage = again->second;
      }
    }
    return op;
  }

  // Behind the last node, before the engine's sums (see the note).
  static void FreeUnpacked(StorageId storage, std::vector<TraceEvent>& events) {
    std::size_t behind = events.size();
    for (std::size_t end = events.size(); end > 0;) {
      while (end > 0 && std::holds_alternative<FreeEvent>(events[end - 1])) --end;
      const auto* op = end > 0 ? std::get_if<OperatorEvent>(&events[end - 1]) : nullptr;
      if (op == nullptr || op->name != "aten.sum") break;
      if (std::ranges::find(op->reads, storage) != op->reads.end()) break;
      behind = end = BeforeAllocations(events, end - 1);
    }
    events.insert(events.begin() + static_cast<std::ptrdiff_t>(behind), FreeEvent{storage});
  }

  void RewriteFree(const FreeEvent& free, std::size_t position, std::vector<TraceEvent>& events) const {
    const auto born = found_.region_of_birth.find(free.storage);
    if (born != found_.region_of_birth.end() && found_.regions[born->second].saved.contains(free.storage)) {
      const CheckpointRegion& region = found_.regions[born->second];
      if (const auto again = region.remade.find(free.storage); again != region.remade.end()) {
        FreeUnpacked(again->second, events);
      }
    }
    const auto life = found_.lives.find(free.storage);
    if (life == found_.lives.end() || life->second.birth_forward < 0) {
      events.push_back(free);
      return;
    }
    std::size_t behind = 0;
    if (found_.DiesInForward(free.storage, behind)) return;
    const auto kept = found_.kept_until.find(free.storage);
    if (kept != found_.kept_until.end() && kept->second > position) return;  // dropped later, with the region
    events.push_back(free);
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const CheckpointRule& rule_;
  Trace result_;
  std::vector<bool> checkpointed_;  // by canonical module
  StorageId next_storage_ = 0;
  const Pass* backward_ = nullptr;
  CheckpointRegions found_;
};

}  // namespace

Result<Trace> ApplyCheckpointing(const Trace& trace, const CheckpointRule& rule) {
  if (Status status = CheckTrace(trace); !status) return std::unexpected(std::move(status.error()));
  return CheckpointChecked(trace, MakeModelIndex(trace), rule);
}

Result<Trace> CheckpointChecked(const Trace& trace, const ModelIndex& index, const CheckpointRule& rule) {
  return Checkpointer(trace, index, rule).Run();
}

}  // namespace shardplan
