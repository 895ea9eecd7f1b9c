// How much has to be recomputed to be within the budget, and what is cheapest for it.
#pragma once

#include <vector>

#include "optimize/choice.h"
#include "optimize/evaluator.h"

namespace shardplan::optimize {

// Choices that differ from `from` in what is recomputed alone, the most promising that are within the budget
// and what is next to them. Each of the blocks' modules is priced by itself (time for each byte that is
// freed); the cheapest are recomputed until the rest fits, the last of them in so many blocks as are needed.
std::vector<Choice> FitRecomputation(Evaluator& evaluator, const Job& job, const OptimizeOptions& options,
                                     const Choice& from);

}  // namespace shardplan::optimize
