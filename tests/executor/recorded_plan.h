// SPDX-License-Identifier: Apache-2.0
// Facts that every recording of a plan's steps has to say, whatever the device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "shardplan/executor/step_recorder.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::test {

inline const Instruction& PlannedOf(const Plan& plan, const executor::RecordedInstruction& recorded) {
  return plan.steps[plan.steady_step].triggers[recorded.trigger].instructions[recorded.instruction];
}

// Each instruction of the steady step once, in its order; host times follow one another; work follows its
// call, and what came before it in its stream. `slack_ns`: how far the device's clock may be off the host's.
inline void ExpectWholeSteps(const executor::Recording& recording, const Plan& plan,
                             std::int64_t slack_ns = 0) {
  std::vector<std::pair<std::int32_t, std::int32_t>> planned;
  const std::vector<Trigger>& triggers = plan.steps[plan.steady_step].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i)
      planned.emplace_back(static_cast<std::int32_t>(t), static_cast<std::int32_t>(i));
  }
  for (const executor::MeasuredStep& step : recording.steps) {
    std::vector<std::pair<std::int32_t, std::int32_t>> found;
    std::map<StreamId, std::int64_t> done_ns;  // by stream: the end of the last work
    std::int64_t host_ns = step.begin_ns;
    for (const executor::RecordedInstruction& one : step.instructions) {
      found.emplace_back(one.trigger, one.instruction);
      EXPECT_LE(host_ns, one.host_begin_ns);
      EXPECT_LE(one.host_begin_ns, one.host_end_ns);
      host_ns = one.host_end_ns;
      if (one.span < 0) continue;
      const StreamId stream = std::max(PlannedOf(plan, one).stream, 0);
      EXPECT_LE(one.host_begin_ns, one.work.begin_ns + slack_ns);
      EXPECT_LE(done_ns[stream], one.work.begin_ns + slack_ns);
      EXPECT_LE(one.work.begin_ns, one.work.end_ns + slack_ns);
      done_ns[stream] = one.work.end_ns;
    }
    EXPECT_LE(host_ns, step.end_ns);
    EXPECT_LE(step.begin_ns, step.on_device.begin_ns + slack_ns);
    EXPECT_LE(step.on_device.begin_ns, step.on_device.end_ns);
    EXPECT_LE(done_ns[0], step.on_device.end_ns + slack_ns);
    EXPECT_EQ(found, planned);
    Bytes of_categories;
    for (const CategoryBytes& category : step.peak_by_category) of_categories += category.size_bytes;
    EXPECT_LE(of_categories, step.peak_bytes);
    EXPECT_GT(step.peak_bytes.value, 0);
  }
}

}  // namespace shardplan::test
