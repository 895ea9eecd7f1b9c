// Runs the toy model on the virtual machine.
#pragma once

#include <cstdint>
#include <string>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// "" when after `steps` steps every rank holds exactly the right parameters; else what differs, or the error.
// The last rank follows `last_rank_plan`, when given: the same plan with other instructions.
std::string RunOnVirtual(const Plan& plan, std::uint64_t seed, std::int64_t steps,
                         const Plan* last_rank_plan = nullptr);

}  // namespace shardplan::test
