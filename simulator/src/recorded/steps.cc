// SPDX-License-Identifier: Apache-2.0
#include "recorded/steps.h"

#include <variant>

namespace shardplan::internal {
namespace {

Phase PhaseOf(const std::string& name) {
  return name == "backward" ? Phase::kBackward : name == "optimizer" ? Phase::kOptimizer : Phase::kForward;
}

}  // namespace

// A stretch of the optimizer ends a step where the next stretch is of another step, or nothing comes.
RecordedStep LastStep(const Recording& recording) {
  struct Stretch {
    Phase phase = Phase::kForward;
    std::int32_t step = 0;
    std::size_t begin = 0, end = 0;
  };
  std::vector<Stretch> stretches;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < recording.events.size(); ++i) {
    const auto* ended = std::get_if<PhaseEnded>(&recording.events[i]);
    if (ended == nullptr) continue;
    stretches.push_back({PhaseOf(ended->phase), ended->step, begin, i + 1});
    begin = i + 1;
  }
  RecordedStep step;
  for (const Stretch& stretch : stretches) {
    if (stretch.step > 0 && stretch.phase == Phase::kOptimizer) step.number = stretch.step;
  }
  if (step.number == 0) {
    step.end = recording.events.size();
    step.phases.assign(step.end, Phase::kForward);
    for (const Stretch& stretch : stretches) {
      for (std::size_t i = stretch.begin; i < stretch.end; ++i) step.phases[i] = stretch.phase;
    }
    return step;
  }
  bool first = true;
  for (const Stretch& stretch : stretches) {
    if (stretch.step != step.number) continue;
    if (first) step.begin = stretch.begin;
    first = false;
    step.end = stretch.end;
    for (std::size_t i = stretch.begin; i < stretch.end; ++i) step.phases.push_back(stretch.phase);
  }
  return step;
}

}  // namespace shardplan::internal
