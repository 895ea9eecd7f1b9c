// SPDX-License-Identifier: Apache-2.0
// The partial order of a plan's instructions: what may move, and how far (docs/internals/schedule-graph.md).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// The schedule graph of a step as GraphViz text, without edges that follow from others. The plan verifies.
// Time and memory of the square of the step's instructions.
std::string ScheduleGraphviz(const Plan& plan, std::int32_t step);

// The duration of an instruction of a step, by its trigger and its index there.
using InstructionDuration = std::function<Nanoseconds(std::int32_t trigger, std::int32_t instruction)>;

// For a reader: the graph's edges by kind, between which triggers each collective may move, which
// instructions nothing can move across, and the critical path by `duration_ns` (null: left out).
std::string ExplainSchedule(const Plan& plan, std::int32_t step,
                            const InstructionDuration& duration_ns = nullptr);

}  // namespace shardplan
