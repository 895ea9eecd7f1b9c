// SPDX-License-Identifier: Apache-2.0
// Steps in which ranks own different work.
#pragma once

#include <vector>

#include "engine/step_runner.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// By instruction of a step with owned work: when its collective begins, in which the slowest owner has come,
// and ends; 0: it is none. kNegative: a wait can never finish.
Result<std::vector<CollectiveTimes>> TimesOfCollectives(const EngineProgram& program, const EngineStep& step,
                                                        const RunOptions& options);

// Whether the instruction is work of another rank than the program's.
bool IsOthers(const EngineProgram& program, const EngineStep& step, std::int32_t instruction);

}  // namespace shardplan::internal
