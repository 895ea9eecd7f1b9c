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
  // Says the instruction or table otherwise and moves the same numbers: a stream of an instruction that runs
  // on none, say.
  Plan plan;
};

// Every `stride`-th of all of them, from the `first`-th.
void ForEachFieldMutation(const Plan& plan, std::uint64_t first, std::uint64_t stride,
                          const std::function<void(const FieldMutation&)>& visit);

}  // namespace shardplan::test
