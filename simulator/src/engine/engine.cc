// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/engine.h"

#include "engine/step_runner.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {

std::string_view Name(DeviceActivity activity) {
  static constexpr std::array<std::string_view, kDeviceActivities> kNames = {
      "forward",        "backward",   "optimizer", "copies", "all_gather",
      "reduce_scatter", "all_reduce", "host_link", "idle"};
  return kNames[static_cast<std::size_t>(activity)];
}

Result<EngineResult> RunStep(const EngineProgram& program, std::int32_t step, EngineTimeline* timeline,
                             const RunOptions& options) {
  SHARDPLAN_ASSERT(step >= 0 && static_cast<std::size_t>(step) < program.steps.size(), "the caller counts");
  const EngineStep& lowered = program.steps[static_cast<std::size_t>(step)];
  SHARDPLAN_ASSERT(
      lowered.code.size() == lowered.origins.size() && lowered.code.size() == lowered.next_in_stream.size(),
      "LowerPlan adds to all of them");
  return internal::StepRunner(program, lowered, timeline, options).Run();
}

}  // namespace shardplan
