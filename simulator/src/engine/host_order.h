// SPDX-License-Identifier: Apache-2.0
// Waits of the host before it issues an instruction, and before it leaves one.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// EngineStep::queued_behind of a lowered step; empty where the host never waits.
std::vector<std::int32_t> QueuedBehind(const EngineProgram& program, const EngineStep& step,
                                       const Host& host);

// If the host runs the kernels (executor/src/cpu/device.h), it leaves the instruction when the stream has
// passed it. streams[0] computes the model, so a wait there holds the host, too.
inline bool HostStaysWith(const EngineProgram& program, const EngineInstruction& instruction) {
  if (!program.host_runs_kernels) return false;
  switch (instruction.op) {
    case EngineOp::kSegment:
      return true;
    case EngineOp::kWork:
      return instruction.work != WorkClass::kCollective;
    case EngineOp::kWait:
      return instruction.stream == 0;
    default:
      return false;
  }
}

}  // namespace shardplan::internal
