// SPDX-License-Identifier: Apache-2.0
// How much has to be recomputed to be within the budget, and what is cheapest for it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optimize/choice.h"
#include "optimize/evaluator.h"

namespace shardplan::optimize {

// Costs and freed bytes of recomputing each of the blocks' modules: planned once, for the first choice that
// is asked about.
class RecomputationPrices {
 public:
  using Saved = std::map<std::string, std::int64_t>;  // as Choice::saved
  // The recomputed part of a block: modules, or the block as a whole.
  struct Level {
    std::vector<std::string> children;
    bool whole = false;
    // Sums over all blocks.
    std::int64_t freed_bytes = 0;
    std::int64_t cost_ns = 0;
  };

  void Measure(Evaluator& evaluator, const Job& job, const Choice& from);
  const std::map<Saved, std::vector<Level>>& levels() const { return levels_; }

 private:
  bool measured_ = false;
  std::map<Saved, std::vector<Level>> levels_;
};

Choice WithoutRecomputation(Choice choice);

// Choices that differ from `from` in what is recomputed alone, the most promising that are within the budget
// and what is next to them. Each of the blocks' modules has a price (time for each byte that is freed); the
// cheapest are recomputed until the rest fits, the last of them in so many blocks as are needed. A choice
// that takes as long as `limit` is not looked at closely.
std::vector<Choice> FitRecomputation(Evaluator& evaluator, const Job& job, const OptimizeOptions& options,
                                     RecomputationPrices& prices, const Choice& from, Nanoseconds limit);

}  // namespace shardplan::optimize
