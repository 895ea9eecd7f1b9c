// SPDX-License-Identifier: Apache-2.0
// Steps in which ranks own different work.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_runner.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// By instruction of a step with owned work: when its collective begins, in which the slowest owner has come,
// and ends; 0: it is none. kNegative: a wait can never finish.
Result<std::vector<CollectiveTimes>> TimesOfCollectives(const EngineProgram& program, const EngineStep& step,
                                                        const RunOptions& options);

// Matrices that a rank orthogonalises, and for how long, alone on the device.
struct OwnedWork {
  std::int64_t matrices = 0;
  Nanoseconds time_ns;
};
// By rank, up to the last one that a group of program.groups has.
std::vector<OwnedWork> OwnedByRank(const EngineProgram& program, const EngineStep& step);

// Whether the instruction is work of another rank than the program's.
bool IsOthers(const EngineProgram& program, const EngineStep& step, std::int32_t instruction);

}  // namespace shardplan::internal
