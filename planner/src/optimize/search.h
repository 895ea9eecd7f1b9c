// From the best of what people set to the best next to it, until nothing next to it is better.
#pragma once

#include <optional>

#include "optimize/evaluator.h"
#include "optimize/moves.h"

namespace shardplan::optimize {

struct Found {
  Choice choice;
  Evaluation evaluation;
};

class Search {
 public:
  Search(Evaluator& evaluator, const Job& job, const OptimizeOptions& options)
      : evaluator_(evaluator), job_(job), options_(options) {}

  // The fastest within `budget` bytes (pooled); where nothing is, the one that needs least. Plans that
  // `refuse` holds are passed over.
  std::optional<Found> Run(Bytes budget, const std::set<Choice>& refused);

 private:
  bool Better(const Evaluation& a, const Evaluation& b) const;
  void Consider(const std::vector<Choice>& choices);
  void TryOrders(const std::vector<Choice>& grid);
  void Climb();
  std::optional<Found> Next(const std::set<Choice>& tried) const;

  Evaluator& evaluator_;
  const Job& job_;
  const OptimizeOptions& options_;
  Bytes budget_;
  std::set<Choice> refused_;
  std::optional<Found> best_;
};

}  // namespace shardplan::optimize
