// SPDX-License-Identifier: Apache-2.0
// Plans with one field of one instruction or of one buffer changed, one instruction left out, issued twice or
// changed places: every field of the document, not only what orders the work.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

struct FieldMutation {
  std::string kind;  // "reduce_scatter: divisor", "buffer: dtype": what the counts are by
  std::string what;  // the place, and found and new value
  Plan plan;
  bool repeats = false;   // does the same work again: where that changes nothing, it is idle
  bool restates = false;  // says of a buffer or a segment, which is used as before, what is not so
};

// Every `stride`-th of all of them, from the `first`-th.
void ForEachFieldMutation(const Plan& plan, std::uint64_t first, std::uint64_t stride,
                          const std::function<void(const FieldMutation&)>& visit);

}  // namespace shardplan::test
