// SPDX-License-Identifier: Apache-2.0
// Which grad_unsharded buffer a segment's gradient goes to. A plan does not say it: the buffer is the one
// that the gradient is taken from next.
#pragma once

#include <map>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/clocks.h"

namespace shardplan::verifier {

class GradBuffers {
 public:
  // `plan` has passed CheckTables.
  explicit GradBuffers(const Plan& plan);

  // -1 where the unit has no grad_unsharded buffer with this parameter. `at` is the compute instruction.
  BufferId Find(const SegmentGrad& grad, Position at) const;

 private:
  void ReadBackwards(std::int32_t step);
  bool Holds(BufferId buffer, std::int32_t parameter) const;

  const Plan& plan_;
  std::vector<std::vector<BufferId>> by_unit_;
  // Only for units with several such buffers, as when different micro-batches use different parameters.
  std::vector<std::vector<BufferId>> next_taken_;  // by unit and parameter, while reading backwards
  std::map<std::pair<Position, std::pair<UnitId, std::int32_t>>, BufferId> resolved_;
};

}  // namespace shardplan::verifier
