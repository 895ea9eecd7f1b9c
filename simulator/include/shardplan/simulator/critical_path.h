// SPDX-License-Identifier: Apache-2.0
// The critical path of a step by cause, and the step's length without single causes
// (docs/reference/explain.md).
//
// [Note: the critical path]
// Everything in a step begins when something else ends: work on a stream when the work before it ends, when
// the host has issued it, when the record that a wait refers to is reached, or when its communicator is free;
// the host's next instruction when the one before is issued, or when what it waits for is there. So from the
// end of the step one can go back from cause to cause to its beginning: the parts of that chain follow one
// another without a gap, and add up to the step exactly.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/simulator/engine.h"

namespace shardplan {

enum class TimeCause : std::uint8_t {
  kForward,  // the loss, too
  kBackward,
  kRecompute,
  kOptimizer,
  kKernelsSlowed,  // what the kernels on the path take longer than alone
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kSendReceive,
  kOtherCollective,
  kCollectivesSlowed,
  kCopies,  // kernels that move memory
  kHostLink,
  kHostIssue,
  kHostWork,
  kOtherOwners,  // a collective waits for ranks that own more
};
inline constexpr std::size_t kTimeCauses = static_cast<std::size_t>(TimeCause::kOtherOwners) + 1;
std::string_view Name(TimeCause cause);

struct PathPart {
  TimeCause cause = TimeCause::kForward;
  UnitId unit = -1;  // whose work it is; -1: of none
  InstructionOrigin at;
  Nanoseconds duration_ns;
};

struct CriticalPath {
  Nanoseconds step_ns;
  std::vector<PathPart> parts;  // in order; their durations add up to step_ns
};

// The critical path of the last step of a lowered plan. Errors as RunStep.
Result<CriticalPath> FindCriticalPath(const Plan& plan, const EngineProgram& program);

using TimeByCause = std::array<Nanoseconds, kTimeCauses>;
TimeByCause SumByCause(const CriticalPath& path);

// The length of the step if one cause cost nothing and everything else stayed. It is no prediction for
// another plan.
struct WhatIf {
  std::string without;  // "the wait for all_gather (root)", "the host's issue costs"
  std::string knob;     // of the policy, where one decides it; "" else
  Nanoseconds step_ns;
};

// For everything that a stream or the host waits for, unit by unit, and for each resource; those that make
// the step shorter, the most first.
Result<std::vector<WhatIf>> WithoutEach(const Plan& plan, const EngineProgram& program);

// A step's time and memory in two plans, by cause.
struct Difference {
  std::string cause;
  std::int64_t a = 0, b = 0;
};
struct Comparison {
  Nanoseconds step_a_ns, step_b_ns;
  std::vector<Difference> time_ns;       // adds up to the steps
  Bytes memory_a_bytes, memory_b_bytes;  // what the devices need (NeededBytes)
  std::vector<Difference> memory_bytes;  // adds up to it
  bool fits_a = true, fits_b = true;     // the plans' own devices
};

// Each on its own cluster.
Result<Comparison> CompareSteps(const Plan& a, const Plan& b);

}  // namespace shardplan
