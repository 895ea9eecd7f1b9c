#include "optimize/moves.h"

#include <algorithm>
#include <limits>
#include <set>

namespace shardplan::optimize {
namespace {

constexpr std::int32_t kAll = std::numeric_limits<std::int32_t>::max();

std::vector<Accumulation> Accumulations(const Job& job) {
  if (job.microbatches < 2 || !job.plain_loop || job.keeps_accumulation) return {Accumulation::kEach};
  std::vector<Accumulation> all = {Accumulation::kEach, Accumulation::kLast, Accumulation::kLastKept};
  if (job.replicas > 1) all.push_back(Accumulation::kReplicasLast);
  return all;
}

std::vector<bool> Policies(const Job& job, const OptimizeOptions& options) {
  if (options.fixed.contains("policy")) return {job.strategy.policy == "fsdp1"};
  return {false, true};
}

// The sizes of a smaller mesh: powers of two that divide the shards, and a node.
std::vector<std::int64_t> Parts(const Job& job) {
  std::vector<std::int64_t> parts;
  for (std::int64_t ranks = 2; ranks < job.shards; ranks *= 2) {
    if (job.shards % ranks == 0) parts.push_back(ranks);
  }
  return parts;
}

Choice Titan(const Job& job) {
  Choice choice{.units = UnitsOfBlocks(job.chain, 1, Ends::kOwn)};
  const bool tail = !job.chain.modules.empty() && !job.chain.modules.back().block;
  choice.kept = tail ? 1 : 0;
  return choice;
}

Choice Default(const Job& job) { return {.units = UnitsOfBlocks(job.chain, 1, Ends::kRoot)}; }

Choice Fsdp1(const Job& job, bool grad_op) {
  Choice choice = Default(job);
  choice.fsdp1 = true;
  choice.grad_op = grad_op;
  return choice;
}

// Small units where nothing hides them, large ones between.
std::vector<std::int32_t> Ramp(const Job& job, std::int32_t most) {
  const auto modules = static_cast<std::int32_t>(job.chain.modules.size());
  std::vector<std::int32_t> front, back;
  std::int32_t left = modules;
  for (std::int32_t size = 1; left > 0; size = std::min(size * 2, most)) {
    front.push_back(std::min(size, left));
    left -= front.back();
    if (left <= 0) break;
    back.push_back(std::min(size, left));
    left -= back.back();
  }
  front.insert(front.end(), back.rbegin(), back.rend());
  return front;
}

void AddUnitMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  if (job.keeps_units) return;
  const auto add = [&](std::vector<std::int32_t> units) {
    Choice next = from;
    next.units = std::move(units);
    moves.push_back(std::move(next));
  };
  for (const Ends ends : {Ends::kRoot, Ends::kOwn, Ends::kJoined}) {
    add(UnitsOfBlocks(job.chain, 1, ends));
    if (from.fsdp1) continue;
    for (std::int32_t size = 2; size <= job.chain.blocks; size *= 2)
      add(UnitsOfBlocks(job.chain, size, ends));
  }
  if (from.fsdp1) return;
  for (std::int32_t most = 2; most <= job.chain.blocks; most *= 2) add(Ramp(job, most));
  const auto merged = [&](std::size_t i) {
    std::vector<std::int32_t> units = from.units;
    units[i] += units[i + 1];
    units.erase(units.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    return units;
  };
  const std::size_t count = from.units.size();
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const bool at_an_end = i < 2 || i + 3 >= count;
    if (at_an_end && from.units[i] > 0 && from.units[i + 1] > 0) add(merged(i));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const bool at_an_end = i < 2 || i + 2 >= count;
    if (!at_an_end || from.units[i] < 2) continue;
    std::vector<std::int32_t> units = from.units;
    units[i] = from.units[i] / 2;
    units.insert(units.begin() + static_cast<std::ptrdiff_t>(i), from.units[i] - units[i]);
    add(std::move(units));
  }
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
  add([](Choice& c) { c.kept = kAll; });
  add([](Choice& c) { c.root_freed = !c.root_freed; });
  for (std::int32_t step = 1; step <= units; step *= 2) {
    if (kept + step < units) add([&](Choice& c) { c.kept = kept + step; });
    if (kept - step > 0) add([&](Choice& c) { c.kept = kept - step; });
  }
  add([](Choice& c) { c.part = 0; });
  for (const std::int64_t part : Parts(job)) add([&](Choice& c) { c.part = part; });
}

void AddCheckpointMoves(const Job& job, const OptimizeOptions& options, const Choice& from,
                        std::vector<Choice>& moves) {
  if (job.keeps_checkpoint || !options.may_checkpoint) return;
  const std::int32_t blocks = job.chain.blocks;
  const auto add = [&](std::int32_t count, std::vector<std::string> children) {
    Choice next = from;
    next.recomputed = std::clamp(count, 0, blocks);
    next.children = next.recomputed == 0 ? std::vector<std::string>{} : std::move(children);
    moves.push_back(std::move(next));
  };
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

void AddAccumulationMoves(const Job& job, const Choice& from, std::vector<Choice>& moves) {
  for (const Accumulation accumulation : Accumulations(job)) {
    moves.push_back(from);
    moves.back().accumulation = accumulation;
  }
}

void AddOffloadMoves(const OptimizeOptions& options, const Choice& from, std::vector<Choice>& moves) {
  if (!options.may_offload || from.fsdp1) return;
  moves.push_back(from);
  moves.back().offload = !from.offload;
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

}  // namespace

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
  if (!options.may_checkpoint || job.keeps_checkpoint) return baselines;
  const std::size_t plain = baselines.size();
  for (std::size_t i = 0; i < plain; ++i) {
    NamedChoice recomputed = baselines[i];
    recomputed.name += ", blocks recomputed";
    recomputed.choice.recomputed = job.chain.blocks;
    baselines.push_back(std::move(recomputed));
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
        choice.kept = kAll;
        works.push_back(choice);
        if (const std::vector<std::int64_t> parts = Parts(job); !parts.empty()) {
          choice.kept = Titan(job).kept;
          choice.part = std::min<std::int64_t>(8, parts.back());
          works.push_back(choice);
        }
      }
    }
  }
  std::vector<Choice> grid;
  for (const Choice& work : works) {
    for (const Accumulation accumulation : Accumulations(job)) {
      Choice choice = work;
      choice.accumulation = accumulation;
      grid.push_back(choice);
      if (!options.may_checkpoint || job.keeps_checkpoint) continue;
      choice.recomputed = job.chain.blocks;
      grid.push_back(choice);
    }
  }
  return grid;
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
      AddAccumulationMoves(job, choice, moves);
      break;
    case 1:
      AddCheckpointMoves(job, options, choice, moves);
      AddOffloadMoves(options, choice, moves);
      break;
    case 2:
      AddUnitMoves(job, choice, moves);
      break;
    default:
      AddOrderMoves(job, choice, moves);
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
    frugal.push_back(std::move(choice));
  }
  return frugal;
}

}  // namespace shardplan::optimize
