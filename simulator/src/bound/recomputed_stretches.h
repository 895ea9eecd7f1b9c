// SPDX-License-Identifier: Apache-2.0
// Which operators of a pass are looked at together when what they make may be kept or made again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "bound/recomputation_choices.h"

namespace shardplan::internal {

// Operators of one pass: what later passes use of it is kept, or they run again. Between the end of operator
// `from` and the start of `to` that is one of the choices.
struct RecomputedStretch {
  std::shared_ptr<const std::vector<RecomputationChoice>> choices;
  std::int64_t from = -1, to = -1;
  std::int64_t until = -1;  // the last operator for which they run again
};

// Operators and tensors of one pass. Tensors are counted in it, operators in the step.
struct PassTensor {
  std::int64_t bytes = 0;
  std::int64_t last_use = -1;                              // in the pass
  std::int64_t first_later_use = -1, last_later_use = -1;  // by later passes; -1: none
  std::int64_t chosen_until = -1;  // set: a stretch says until the start of that operator what is kept of it
};
struct PassOperator {
  std::int64_t duration_ns = 0;
  std::vector<std::int32_t> reads, writes;  // tensors that the pass makes
};

// Stretches of equal operators share their choices: a model's blocks are alike.
class StretchMaker {
 public:
  void Add(std::int64_t first_operator, const std::vector<PassOperator>& operators,
           std::vector<PassTensor>& tensors, std::vector<RecomputedStretch>& stretches);

 private:
  std::map<RecomputationGraph, std::shared_ptr<const std::vector<RecomputationChoice>>> known_;
};

}  // namespace shardplan::internal
