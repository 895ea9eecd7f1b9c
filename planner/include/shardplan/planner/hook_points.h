// SPDX-License-Identifier: Apache-2.0
// The points that the host passes in a step, in order, with the model's own work between them: where hooks of
// units fire, not what they do. That is a policy's (policy.h).
//
//   forward_begin  pre_forward A  segment  post_forward A  pre_forward B  segment  post_forward B forward_end
//   backward_begin  pre_backward B  segment  inputs_grad_done B  pre_backward A  ...  backward_end
//   optimizer_step  zero_grad
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

enum class HookPointKind : std::uint8_t {
  kForwardBegin,
  kForwardEnd,
  kPreForward,
  kPostForward,
  kRecomputePreForward,  // a unit's forward hooks inside a recomputation
  kRecomputePostForward,
  kBackwardBegin,
  kPreBackward,         // tensor hook of one output tensor of a unit
  kInputsGradDone,      // autograd function on a unit's inputs
  kParameterGradsDone,  // the last parameter gradient of a unit in this backward has been accumulated (fsdp2)
  kUnitBackwardDone,    // all that was computed since a unit's pre-forward has run backward (fsdp1)
  kBackwardEnd,
  kOptimizerStep,
  kZeroGrad,
  kModuleCall,
  kSegment,
};

// A stretch of a pass: events [begin, end) of Trace::forwards[pass] or ::backwards[pass].
struct EventRange {
  bool backward = false;
  std::int32_t pass = -1;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  auto operator<=>(const EventRange&) const = default;
};

// A point of a step that the host passes: where a hook fires, a call of the user, or work of the model.
struct HookPoint {
  HookPointKind kind = HookPointKind::kSegment;
  UnitId unit = -1;
  std::int32_t microbatch = 0;
  std::int32_t run = 0;  // which of the micro-batch's forwards, where the trace lists calls (Trace::calls)
  std::int32_t occurrence = 0;  // kUnitBackwardDone, kInputsGradDone: which call of the unit in its forward
  bool grad_enabled = true;     // of the forward that this belongs to
  bool training = true;         // mode of the modules in that forward
  bool outputs_require_grad = false;            // kPostForward
  EventRange range;                             // kSegment; kBackwardBegin: which backward of the trace
  std::int32_t forward = 0;                     // kSegment: of which forward that the backward covers
  std::string name;                             // kSegment; `unit` is the segment's
  SegmentPhase phase = SegmentPhase::kForward;  // kSegment
  const ModuleCall* call = nullptr;             // kModuleCall
  std::vector<std::int32_t> microbatches;       // kBackwardBegin: that it covers, as in Pass::forwards
  std::vector<std::int32_t> runs;               // kBackwardBegin: `run` of each
  bool operator==(const HookPoint&) const = default;
};

struct RecordedStep {
  std::string name;
  std::vector<HookPoint> events;
  bool operator==(const RecordedStep&) const = default;
};

}  // namespace shardplan
