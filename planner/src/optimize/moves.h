// SPDX-License-Identifier: Apache-2.0
// Beginnings of the search, and its moves.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optimize/choice.h"
#include "shardplan/planner/optimize.h"

namespace shardplan::optimize {

struct NamedChoice {
  std::string name;
  Choice choice;
};

// FSDP2 as it is by default, and as torchtitan wraps; FSDP1.
std::vector<NamedChoice> Baselines(const Job& job, const OptimizeOptions& options);
// The grid of common knobs, without those that change only the order of the same work.
std::vector<Choice> Grid(const Job& job, const OptimizeOptions& options);
// Settings of the grid that recompute nothing, with reductions in two levels, the first within a node.
std::vector<Choice> TwoLevels(const Job& job, const std::vector<Choice>& grid);
// Beginnings with several micro-batches, where memory is short: whole blocks recomputed, gradients that wait
// half reduced and parameters that are kept on the ranks of a node, or either of them, of all units. The
// number of units is left open.
std::vector<Choice> Waiting(const Job& job, const OptimizeOptions& options, Ends ends);
// Choices that leave other room for units that are kept: another number of inputs of reduce-scatters in
// flight, and a communicator of their own. With several micro-batches also another accumulation, reductions
// in one level or two, a smaller mesh or none.
std::vector<Choice> OtherRoom(const Job& job, const Choice& from);
// Every cut of a small model into units, and every number of them kept: hill climbing may miss the best. None
// where those are more than a few hundred.
std::vector<Choice> AllOfSmall(const Job& job, const OptimizeOptions& options);
// One of them with every setting of those knobs.
std::vector<Choice> Orders(const Job& job, const Choice& choice);
// The choices next to one in a class of decisions, of kMoveClasses.
inline constexpr int kMoveClasses = 4;
inline constexpr int kRecomputationMoves = 1, kUnitMoves = 2;
std::vector<Choice> Moves(const Job& job, const OptimizeOptions& options, const Choice& choice,
                          int move_class);
// Operators whose results a recomputation may keep: none, attention, every second product, too, or all.
std::vector<std::map<std::string, std::int64_t>> SavedOperators(const Job& job);
// The one that needs least memory, as far as that can be told without planning.
std::vector<Choice> Frugal(const Job& job, const OptimizeOptions& options);

}  // namespace shardplan::optimize
