// SPDX-License-Identifier: Apache-2.0
// Hill climbing from the best common setting: the best neighbour counts, until no neighbour is better.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "optimize/recomputation.h"

namespace shardplan::optimize {

struct Found {
  Choice choice;
  Evaluation evaluation;
};

class Search {
 public:
  Search(Evaluator& evaluator, const Job& job, const OptimizeOptions& options)
      : evaluator_(evaluator), job_(job), options_(options) {}

  // The fastest that fits; where none does, the one that pools least. Plans that `refuse` holds are passed
  // over.
  std::optional<Found> Run(const std::set<Choice>& refused);
  bool Fits(const Found& found);

 private:
  // kAll: each that is faster than the best is asked whether it fits, and all are planned unless a signal
  // ends the search. kPromising: not those that are likely to reserve too much.
  enum class Effort : std::uint8_t { kPromising, kAll };
  void Consider(const std::vector<Choice>& choices, Effort effort = Effort::kPromising);
  void Tell();
  void TryRecomputation(const std::vector<Choice>& beginnings);
  void TryRecomputationOf(const Choice& fastest, std::int64_t part);
  void FitRecomputationOf(const Choice& from);
  void ClimbOffloading();
  void TryOffloadBeside(const Choice& best);
  void TryRecomputationBeside(Choice best);
  std::vector<Choice> WithMost(std::vector<Choice> choices, std::int32_t Choice::*count,
                               std::vector<std::int32_t>& most);
  std::vector<Choice> KeepingMost(std::vector<Choice> choices);
  void ConsiderMost(const std::vector<Choice>& choices, std::int32_t Choice::*count);
  void TryWaiting();
  bool TryWaitingOf(const std::vector<Choice>& waiting);
  std::vector<Choice> RecomputingOf(const std::vector<Choice>& grid);
  void TryOrders(const std::vector<Choice>& grid, Effort effort = Effort::kPromising);
  const Evaluation* Known(const Choice& choice) const;
  void NoteRecomputed(const Choice& choice);
  bool CannotWin(const Choice& work) const;
  bool IsOverInAnyOrder(const Choice& work) const;
  void TryWholeGrid(const std::vector<Choice>& grid);
  void Climb();
  void ClimbByMoves();
  void TryTrades(const Choice& best);
  std::optional<Found> Next(const std::set<Choice>& tried) const;

  Evaluator& evaluator_;
  const Job& job_;
  const OptimizeOptions& options_;
  RecomputationPrices recomputation_;
  std::set<Choice> refused_;
  std::optional<Found> best_;
  // More to compute with so many blocks recomputed, and that kept: of settings of the grid.
  std::map<std::pair<std::int32_t, std::map<std::string, std::int64_t>>, Nanoseconds> recomputed_ns_;
  bool fits_ = false;                                  // the best does
  bool offloads_ = false;                              // activations may leave
  std::optional<std::pair<bool, std::int64_t>> told_;  // of the best that progress was told of
};

}  // namespace shardplan::optimize
