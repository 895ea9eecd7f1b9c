// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/engine.h"

#include <set>

#include "engine/model_streams.h"
#include "engine/owners.h"
#include "engine/step_runner.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {

std::string_view Name(DeviceActivity activity) {
  static constexpr std::array<std::string_view, kDeviceActivities> kNames = {
      "forward",    "backward",   "optimizer", "copies",           "all_gather", "reduce_scatter",
      "all_reduce", "all_to_all", "send_recv", "other_collective", "host_link",  "idle"};
  return kNames[static_cast<std::size_t>(activity)];
}

DeviceActivity ActivityOf(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return DeviceActivity::kAllGather;
    case CollectiveKind::kReduceScatter:
      return DeviceActivity::kReduceScatter;
    case CollectiveKind::kAllReduce:
      return DeviceActivity::kAllReduce;
    case CollectiveKind::kAllToAll:
      return DeviceActivity::kAllToAll;
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      return DeviceActivity::kSendReceive;
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kReduce:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
      return DeviceActivity::kOtherCollective;
  }
  return DeviceActivity::kOtherCollective;
}

namespace internal {

std::vector<CommunicatorId> ModelCommunicators(const Plan& plan) {
  std::set<CommunicatorId> used;
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* op = std::get_if<OperatorEvent>(&entry);
      if (op != nullptr && op->collective) used.insert(op->collective->communicator);
    }
  }
  return {used.begin(), used.end()};
}

}  // namespace internal

std::vector<std::string> EngineStreams(const Plan& plan) {
  std::vector<std::string> names;
  for (const PlanStream& stream : plan.streams) names.push_back(stream.name);
  for (const CommunicatorId id : internal::ModelCommunicators(plan))
    names.push_back("model " + plan.communicators[static_cast<std::size_t>(id)].name);
  return names;
}

Result<EngineResult> RunStep(const EngineProgram& program, std::int32_t step, EngineTimeline* timeline,
                             const RunOptions& options) {
  SHARDPLAN_ASSERT(step >= 0 && static_cast<std::size_t>(step) < program.steps.size(), "the caller counts");
  const EngineStep& lowered = program.steps[static_cast<std::size_t>(step)];
  SHARDPLAN_ASSERT(
      lowered.code.size() == lowered.origins.size() && lowered.code.size() == lowered.next_in_stream.size(),
      "LowerPlan adds to all of them");
  if (lowered.owned.empty()) return internal::StepRunner(program, lowered, timeline, options).Run();
  const Result<std::vector<internal::CollectiveTimes>> times =
      internal::TimesOfCollectives(program, lowered, options);
  if (!times) return std::unexpected(times.error());
  return internal::StepRunner(program, lowered, timeline, options, nullptr,
                              {.rank = program.rank, .collectives = &*times})
      .Run();
}

}  // namespace shardplan
