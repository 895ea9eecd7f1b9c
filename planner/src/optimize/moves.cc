// SPDX-License-Identifier: Apache-2.0
#include "optimize/moves.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "shardplan/planner/planner.h"

namespace shardplan::optimize {
namespace {

std::vector<Accumulation> Accumulations(const Job& job, const Choice& choice) {
  if (!DecidesAccumulation(job)) return {Accumulation::kEach};
  std::vector<Accumulation> all = {Accumulation::kEach, Accumulation::kEachKept, Accumulation::kLast,
                                   Accumulation::kLastKept};
  if (HasRest(job, choice)) {
    all.push_back(Accumulation::kRestLast);
    all.push_back(Accumulation::kRestLastKept);
  }
  return all;
}

// The sizes of a smaller mesh: powers of two that divide the shards, and a node.
std::vector<std::int64_t> Parts(const Job& job) {
  std::vector<std::int64_t> parts;
  for (std::int64_t ranks = 2; ranks < job.shards; ranks *= 2) {
    if (job.shards % ranks == 0) parts.push_back(ranks);
  }
  return parts;
}

// Fewer and more, in steps of powers of two.
std::vector<std::int32_t> CountsBeside(std::int32_t count, std::int32_t most) {
  count = std::clamp(count, 0, most);
  std::vector<std::int32_t> counts;
  for (std::int32_t step = 1; step <= most; step *= 2) {
    if (count - step >= 0) counts.push_back(count - step);
    if (count + step <= most) counts.push_back(count + step);
  }
  return counts;
}

// Reduced within a node in each micro-batch, and between nodes in the last.
Choice InTwoLevels(const Job& job, Choice choice, std::int64_t inner) {
  choice.inner = inner;
  if (DecidesAccumulation(job))
    choice.accumulation = KeepsOver(choice) ? Accumulation::kRestLastKept : Accumulation::kRestLast;
  choice.accumulated = 0;
  choice.outer_reduced_last = kAllUnits;
  return choice;
}

// The smaller mesh of a node's ranks; 0: there is none.
std::int64_t NodePart(const Job& job) {
  std::int64_t largest = 0;
  for (const std::int64_t part : Parts(job)) {
    if (part <= job.node_ranks) largest = part;
  }
  return largest;
}

// Reductions in two levels need shards on several nodes.
bool MayReduceInTwoLevels(const Job& job) {
  return !job.keeps_reduction && !job.of_pytorch && job.shards > job.node_ranks && NodePart(job) > 1;
}

std::vector<bool> Policies(const Job& job, const OptimizeOptions& options) {
  if (options.may_change_policy) return {false, true};
  return {job.strategy.policy == "fsdp1"};
}

bool MayBeFsdp2(const Job& job, const OptimizeOptions& options) {
  return options.may_change_policy || job.strategy.policy != "fsdp1";
}

Choice Titan(const Job& job) {
  Choice choice{.units = UnitsOfBlocks(job.chain, 1, Ends::kOwn)};
  const bool tail = !job.chain.modules.empty() && !job.chain.modules.back().block;
  choice.kept = tail ? 1 : 0;
  return choice;
}

// Selective checkpointing by operator, of what the blocks run.
std::map<std::string, std::int64_t> SavedByTorchtitan(const Job& job) {
  std::map<std::string, std::int64_t> saved;
  for (const SavedOperator& kept : TorchtitanSelectiveCheckpointing().save) {
    for (const std::vector<std::string>* names : {&job.chain.attentions, &job.chain.products}) {
      if (std::ranges::find(*names, kept.name) != names->end()) saved[kept.name] = kept.recompute_every;
    }
  }
  return saved;
}

Choice Default(const Job& job) { return {.units = UnitsOfBlocks(job.chain, 1, Ends::kRoot)}; }

Choice Fsdp1(const Job& job, bool grad_op) {
  Choice choice = Default(job);
  choice.fsdp1 = true;
  choice.grad_op = grad_op;
  return choice;
}

// Moves at border i of the units: they are joined, one module goes over it, or the first is cut.
void AddBorderMoves(const std::vector<std::int32_t>& units, std::size_t i,
                    std::vector<std::vector<std::int32_t>>& made) {
  const auto at = [](std::vector<std::int32_t>& list, std::size_t index) {
    return list.begin() + static_cast<std::ptrdiff_t>(index);
  };
  if (units[i] >= 2) {
    std::vector<std::int32_t> cut = units;
    cut[i] = units[i] / 2;
    cut.insert(at(cut, i), units[i] - cut[i]);
    made.push_back(std::move(cut));
  }
  if (i + 1 >= units.size() || units[i] < 0 || units[i + 1] < 0) return;
  std::vector<std::int32_t> joined = units;
  joined[i] += units[i + 1];
  joined.erase(at(joined, i + 1));
  made.push_back(std::move(joined));
  for (const std::int32_t over : {1, -1}) {
    std::vector<std::int32_t> shifted = units;
    shifted[i] += over;
    shifted[i + 1] -= over;
    if (shifted[i] > 0 && shifted[i + 1] > 0) made.push_back(std::move(shifted));
  }
}

void AddUnitMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (job.keeps_units) return;
  std::vector<std::vector<std::int32_t>> made;
  for (const Ends ends : {Ends::kRoot, Ends::kOwn, Ends::kJoined})
    made.push_back(UnitsOfBlocks(job.chain, 1, ends));
  if (!from.fsdp1) {
    constexpr std::size_t kFew = 12;  // where all borders are tried, not only those at the ends
    const std::size_t count = from.units.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (count <= kFew || i < 3 || i + 3 >= count) AddBorderMoves(from.units, i, made);
    }
  }
  for (std::vector<std::int32_t>& units : made) {
    moves.push_back(from);
    moves.back().units = std::move(units);
  }
  if (!MayBeInParts(job, from)) return;
  moves.push_back(from);
  moves.back().in_parts = !from.in_parts;
}

void AddReshardMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (job.keeps_reshard) return;
  const auto add = [&](auto change) {
    Choice next = from;
    change(next);
    moves.push_back(std::move(next));
  };
  if (from.fsdp1) {
    add([](Choice& c) { c.grad_op = !c.grad_op; });
    return;
  }
  const auto units = static_cast<std::int32_t>(from.units.size());
  const std::int32_t kept = std::min(from.kept, units);
  add([](Choice& c) { c.kept = 0; });
  add([](Choice& c) { c.kept = kAllUnits; });
  add([](Choice& c) { c.root_freed = !c.root_freed; });
  for (std::int32_t step = 1; step <= units; step *= 2) {
    if (kept + step < units) add([&](Choice& c) { c.kept = kept + step; });
    if (kept - step > 0) add([&](Choice& c) { c.kept = kept - step; });
  }
  if (!job.other_meshes.empty()) {
    add([](Choice& c) { c.kept_apart = kAsTheUnit; });
    add([](Choice& c) { c.kept_apart = kAllUnits; });
    for (const std::int32_t count : CountsBeside(from.kept_apart, units))
      add([&](Choice& c) { c.kept_apart = count; });
  }
  add([](Choice& c) { c.part = 0; });
  for (const std::int64_t part : Parts(job)) add([&](Choice& c) { c.part = part; });
  if (from.part <= 1) return;
  for (const std::int32_t count : CountsBeside(from.post_forward_units, units - kept))
    add([&](Choice& c) { c.post_forward_units = count; });
}

void AddCheckpointMoves(const Job& job, const OptimizeOptions& options, const Choice& from,
                        std::vector<Choice>& moves) {
  if (job.keeps_checkpoint || !options.may_checkpoint) return;
  const std::int32_t blocks = job.chain.blocks;
  const auto add = [&](std::int32_t count, std::vector<std::string> children) {
    Choice next = from;
    next.recomputed = std::clamp(count, 0, blocks);
    next.children = std::move(children);
    moves.push_back(Effective(job, std::move(next)));
  };
  for (const std::map<std::string, std::int64_t>& saved : SavedOperators(job)) {
    moves.push_back(from);
    moves.back().saved = saved;
  }
  add(0, {});
  add(blocks, from.children);
  for (std::int32_t step = 1; step <= blocks; step *= 2) {
    add(from.recomputed + step, from.children);
    add(from.recomputed - step, from.children);
  }
  if (from.recomputed == 0) {
    for (const std::string& child : job.chain.children) add(blocks, {child});
    return;
  }
  add(from.recomputed, {});
  for (const std::string& child : job.chain.children) {
    add(from.recomputed, {child});
    std::vector<std::string> others = from.children;
    if (std::erase(others, child) == 0) others.push_back(child);
    std::ranges::sort(others);
    if (!others.empty()) add(from.recomputed, others);
  }
}

void AddLayoutMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (job.keeps_layout || job.divisible_dims.empty() || from.fsdp1) return;
  moves.push_back(from);
  moves.back().cuts_divisible_dims = !from.cuts_divisible_dims;
  moves.back().part = 0;  // what is cut along another dimension has no smaller mesh
}

void AddAccumulationMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  for (const Accumulation accumulation : Accumulations(job, from)) {
    moves.push_back(from);
    moves.back().accumulation = accumulation;
  }
  const auto units = static_cast<std::int32_t>(from.units.size());
  const auto add = [&](Choice next) {
    next = Effective(job, std::move(next));
    if (next != Effective(job, from)) moves.push_back(std::move(next));
  };
  for (const auto waiting : {&Choice::accumulated, &Choice::outer_reduced_last}) {
    for (const std::int32_t count : CountsBeside(from.*waiting, units)) {
      Choice next = from;
      next.*waiting = count;
      add(std::move(next));
    }
  }
}

void AddReductionMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (from.fsdp1 || !MayReduceInTwoLevels(job)) return;
  const std::vector<std::int64_t> parts = Parts(job);
  if (from.inner == 0) {
    moves.push_back(InTwoLevels(job, from, NodePart(job)));
    return;
  }
  Choice at_once = from;
  at_once.inner = 0;
  moves.push_back(at_once);
  for (const Accumulation accumulation : Accumulations(job, at_once)) {
    moves.push_back(at_once);
    moves.back().accumulation = accumulation;
  }
  for (const std::int64_t inner : {from.inner / 2, from.inner * 2}) {
    if (std::ranges::find(parts, inner) == parts.end()) continue;
    moves.push_back(from);
    moves.back().inner = inner;
  }
}

void AddOffloadMoves(const OptimizeOptions& options, const Choice& from, std::vector<Choice>& moves) {
  if (!options.may_offload || from.fsdp1) return;
  moves.push_back(from);
  moves.back().offload = !from.offload;
}

void AddActivationMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (job.keeps_activations) return;
  for (const std::int32_t count : CountsBeside(from.offloaded, job.chain.blocks)) {
    moves.push_back(from);
    moves.back().offloaded = count;
  }
}

void AddOrderMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (job.keeps_prefetch) return;
  const std::vector<Choice> orders = Orders(job, from);
  moves.insert(moves.end(), orders.begin(), orders.end());
  if (from.fsdp1) return;
  for (const std::int32_t in_flight : {3, 4}) {
    moves.push_back(from);
    moves.back().in_flight = in_flight;
  }
}

void AddMuonMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  for (const MuonOwners owners : job.muon.owners) {
    moves.push_back(from);
    moves.back().owners = owners;
  }
  if (job.muon.owners.empty() || from.owners == MuonOwners::kNone) return;
  for (const std::int32_t exchanges : {1, from.exchanges / 2, from.exchanges * 2, job.chain.blocks}) {
    if (exchanges < 1) continue;
    for (const bool in_backward : {false, true}) {
      if (in_backward && !job.muon.may_begin_in_backward) continue;
      moves.push_back(from);
      moves.back().exchanges = exchanges;
      moves.back().exchanged_in_backward = in_backward;
    }
  }
}

// Every way to cut so many modules into units of neighbours, or to leave one to the root.
std::vector<std::vector<std::int32_t>> AllCuts(std::int32_t modules) {
  if (modules == 0) return {{}};
  std::vector<std::vector<std::int32_t>> all;
  const auto add = [&](std::int32_t unit, std::int32_t left) {
    for (const std::vector<std::int32_t>& rest : AllCuts(left)) {
      all.push_back({unit});
      all.back().insert(all.back().end(), rest.begin(), rest.end());
    }
  };
  add(-1, modules - 1);
  for (std::int32_t size = 1; size <= modules; ++size) add(size, modules - size);
  return all;
}

}  // namespace

std::vector<Choice> AllOfSmall(const Job& job, const OptimizeOptions& options) {
  constexpr std::size_t kMostModules = 4, kFew = 700;
  if (job.keeps_units || job.keeps_reshard || job.chain.modules.size() > kMostModules) return {};
  if (!MayBeFsdp2(job, options)) return {};
  std::vector<std::int64_t> parts = Parts(job);
  parts.insert(parts.begin(), 0);
  std::vector<Choice> all;
  for (const std::vector<std::int32_t>& units :
       AllCuts(static_cast<std::int32_t>(job.chain.modules.size()))) {
    const auto wrapped =
        static_cast<std::int32_t>(std::ranges::count_if(units, [](std::int32_t size) { return size > 0; }));
    for (std::int32_t kept = 0; kept <= wrapped; ++kept) {
      for (const std::int64_t part : parts) {
        for (const bool root_freed : {false, true}) {
          for (const Accumulation accumulation : Accumulations(job, {})) {
            all.push_back({.units = units,
                           .kept = kept,
                           .part = part,
                           .root_freed = root_freed,
                           .accumulation = accumulation});
          }
        }
      }
    }
  }
  if (all.size() > kFew) return {};
  return all;
}

std::vector<std::map<std::string, std::int64_t>> SavedOperators(const Job& job) {
  std::vector<std::map<std::string, std::int64_t>> lists = {{}};
  const auto add = [&](const std::vector<std::string>& products, std::int64_t every) {
    std::map<std::string, std::int64_t> saved;
    for (const std::string& name : job.chain.attentions) saved[name] = 0;
    for (const std::string& name : products) saved[name] = every;
    if (std::ranges::find(lists, saved) == lists.end()) lists.push_back(std::move(saved));
  };
  add({}, 0);
  add(job.chain.products, 2);
  add(job.chain.products, 0);
  return lists;
}

std::vector<NamedChoice> Baselines(const Job& job, const OptimizeOptions& options) {
  std::vector<NamedChoice> baselines;
  for (const bool fsdp1 : Policies(job, options)) {
    if (fsdp1) {
      baselines.push_back({"fsdp1 full_shard", Fsdp1(job, false)});
      baselines.push_back({"fsdp1 shard_grad_op", Fsdp1(job, true)});
    } else {
      baselines.push_back({"fsdp2 default", Default(job)});
      baselines.push_back({"fsdp2 as torchtitan wraps", Titan(job)});
    }
  }
  const std::size_t without_owners = baselines.size();
  const auto add_muon = [&](MuonOwners owners, std::int32_t exchanges, std::string_view name) {
    if (std::ranges::find(job.muon.owners, owners) == job.muon.owners.end()) return;
    for (std::size_t i = 0; i < without_owners; ++i) {
      NamedChoice with_muon = baselines[i];
      with_muon.name += name;
      with_muon.choice.owners = owners;
      with_muon.choice.exchanges = exchanges;
      baselines.push_back(std::move(with_muon));
    }
  };
  add_muon(MuonOwners::kShards, 1, ", owners among the shards");
  add_muon(MuonOwners::kReplicas, 1, ", owners among all replicas");
  // torchtitan's recipes of DistMuon have a bucket for each block.
  const std::int32_t by_block = std::max(job.chain.blocks, 1);
  add_muon(MuonOwners::kDistMuon, by_block, ", DistMuon");
  add_muon(MuonOwners::kAll, 1, ", every matrix on every rank");
  if (by_block > 1) add_muon(MuonOwners::kAll, by_block, ", every matrix on every rank, block by block");
  const std::size_t plain = baselines.size();
  if (!job.of_pytorch) baselines.push_back({"as given", {.as_given = true}});
  if (!options.may_checkpoint || job.keeps_checkpoint) return baselines;
  for (std::size_t i = 0; i < plain; ++i) {
    NamedChoice recomputed = baselines[i];
    recomputed.name += ", blocks recomputed";
    recomputed.choice.recomputed = job.chain.blocks;
    baselines.push_back(std::move(recomputed));
  }
  for (std::size_t i = 0; i < plain; ++i) {
    if (baselines[i].choice != Titan(job) || SavedByTorchtitan(job).empty()) continue;
    NamedChoice selective = baselines[i];
    selective.name += ", blocks recomputed but for what torchtitan saves";
    selective.choice.recomputed = job.chain.blocks;
    selective.choice.saved = SavedByTorchtitan(job);
    baselines.push_back(std::move(selective));
  }
  return baselines;
}

std::vector<Choice> Grid(const Job& job, const OptimizeOptions& options) {
  std::vector<Choice> works;
  for (const bool fsdp1 : Policies(job, options)) {
    if (fsdp1) {
      works.push_back(Fsdp1(job, false));
      works.push_back(Fsdp1(job, true));
      continue;
    }
    works.push_back(Default(job));
    for (const Ends ends : {Ends::kOwn, Ends::kRoot}) {
      for (std::int32_t size = 1; size <= std::min(8, std::max(1, job.chain.blocks)); size *= 2) {
        Choice choice = Titan(job);
        choice.units = UnitsOfBlocks(job.chain, size, ends);
        works.push_back(choice);
        choice.kept = kAllUnits;
        works.push_back(choice);
        if (!job.other_meshes.empty()) {
          choice.kept_apart = 0;
          works.push_back(choice);
          choice.kept = Titan(job).kept;
          choice.kept_apart = kAllUnits;
          works.push_back(choice);
          choice.kept_apart = kAsTheUnit;
        }
        if (const std::int64_t part = NodePart(job); part > 0) {
          choice.kept = Titan(job).kept;
          choice.part = part;
          works.push_back(choice);
        }
      }
    }
  }
  std::vector<Choice> grid;
  for (const Choice& work : works) {
    for (const Accumulation accumulation : Accumulations(job, work)) {
      Choice choice = work;
      choice.accumulation = accumulation;
      grid.push_back(choice);
      if (!options.may_checkpoint || job.keeps_checkpoint) continue;
      for (const std::int32_t share : {2, 1}) {  // the first half of the blocks, and all
        choice.recomputed = job.chain.blocks / share;
        grid.push_back(choice);
      }
      if (SavedByTorchtitan(job).empty()) continue;
      choice.saved = SavedByTorchtitan(job);
      grid.push_back(choice);
    }
  }
  return grid;
}

std::vector<Choice> TwoLevels(const Job& job, const std::vector<Choice>& grid) {
  if (!MayReduceInTwoLevels(job)) return {};
  std::vector<Choice> choices;
  for (const Choice& choice : grid) {
    if (choice.fsdp1 || choice.recomputed > 0) continue;
    Choice next = InTwoLevels(job, choice, NodePart(job));
    if (std::ranges::find(choices, next) == choices.end()) choices.push_back(std::move(next));
  }
  return choices;
}

std::vector<Choice> Waiting(const Job& job, const OptimizeOptions& options, Ends ends) {
  if (!DecidesAccumulation(job) || job.keeps_units || !MayBeFsdp2(job, options)) return {};
  std::vector<Choice> waiting;
  for (const std::int32_t size : {1, 2}) {
    Choice base{.units = UnitsOfBlocks(job.chain, size, ends)};
    if (options.may_checkpoint && !job.keeps_checkpoint) base.recomputed = job.chain.blocks;
    base.cuts_divisible_dims = !job.divisible_dims.empty() && !job.keeps_layout;
    const Choice in_levels = MayReduceInTwoLevels(job) ? InTwoLevels(job, base, NodePart(job)) : base;
    for (const bool parts : {true, false}) {
      if (parts && (job.keeps_reshard || base.cuts_divisible_dims || NodePart(job) < 2)) continue;
      for (const bool rest : {true, false}) {
        Choice choice = rest ? in_levels : base;
        if (rest ? !HasRest(job, choice) : !parts) continue;
        if (parts) choice.part = NodePart(job);
        choice.accumulation = rest ? Accumulation::kRestLastKept : Accumulation::kEachKept;
        waiting.push_back(std::move(choice));
      }
    }
  }
  return waiting;
}

std::vector<Choice> OtherRoom(const Job& job, const Choice& from) {
  std::vector<Choice> others;
  for (const Choice& order : Orders(job, from)) {
    if (order.prefetch == from.prefetch) others.push_back(order);
  }
  if (job.microbatches < 2) return others;
  for (const Accumulation accumulation : Accumulations(job, from)) {
    others.push_back(from);
    others.back().accumulation = accumulation;
  }
  AddReductionMoves(job, from, others);
  if (!job.keeps_reshard) {
    others.push_back(from);
    others.back().part = from.part > 1 ? 0 : NodePart(job);
  }
  others.push_back(from);
  others.back().in_parts = !from.in_parts;
  for (Choice& other : others) other = Effective(job, std::move(other));
  std::erase(others, Effective(job, from));
  return others;
}

std::vector<Choice> Orders(const Job& job, const Choice& choice) {
  std::vector<Choice> orders;
  if (job.keeps_prefetch) return orders;
  for (std::int32_t prefetch = 0; prefetch <= 3; ++prefetch) {
    Choice next = choice;
    next.prefetch = prefetch;
    if (choice.fsdp1) {
      if (prefetch > 1) continue;
      for (const auto backward :
           {Fsdp1BackwardPrefetch::kNone, Fsdp1BackwardPrefetch::kPre, Fsdp1BackwardPrefetch::kPost}) {
        next.backward_prefetch = backward;
        orders.push_back(next);
      }
      continue;
    }
    for (const std::int32_t in_flight : {1, 2}) {
      for (const bool own : {false, true}) {
        next.in_flight = in_flight;
        next.own_communicator = own;
        orders.push_back(next);
      }
    }
  }
  return orders;
}

std::vector<Choice> Moves(const Job& job, const OptimizeOptions& options, const Choice& choice,
                          int move_class) {
  std::vector<Choice> moves;
  switch (move_class) {
    case 0:
      AddReshardMoves(job, choice, moves);
      AddLayoutMoves(job, choice, moves);
      AddAccumulationMoves(job, choice, moves);
      AddReductionMoves(job, choice, moves);
      break;
    case kRecomputationMoves:
      AddCheckpointMoves(job, options, choice, moves);
      AddActivationMoves(job, choice, moves);
      AddOffloadMoves(options, choice, moves);
      break;
    case kUnitMoves:
      AddUnitMoves(job, choice, moves);
      break;
    default:
      AddOrderMoves(job, choice, moves);
      AddMuonMoves(job, choice, moves);
  }
  std::erase(moves, choice);
  std::set<Choice> seen;
  std::erase_if(moves, [&](const Choice& move) { return !seen.insert(move).second; });
  return moves;
}

std::vector<Choice> Frugal(const Job& job, const OptimizeOptions& options) {
  std::vector<Choice> frugal;
  for (const bool fsdp1 : Policies(job, options)) {
    Choice choice{.fsdp1 = fsdp1, .units = UnitsOfBlocks(job.chain, 1, Ends::kOwn), .root_freed = true};
    if (options.may_checkpoint && !job.keeps_checkpoint) choice.recomputed = job.chain.blocks;
    choice.offload = options.may_offload && !fsdp1;
    frugal.push_back(choice);
    if (MayBeInParts(job, choice)) {
      frugal.push_back(choice);
      frugal.back().in_parts = true;
    }
    if (options.may_offload_activations && !job.keeps_activations) {
      frugal.push_back(choice);
      frugal.back().recomputed = 0;
      frugal.back().offloaded = job.chain.blocks;
    }
    if (job.divisible_dims.empty() || job.keeps_layout || fsdp1) continue;
    choice.cuts_divisible_dims = true;
    frugal.push_back(std::move(choice));
  }
  return frugal;
}

}  // namespace shardplan::optimize
