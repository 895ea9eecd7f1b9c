// SPDX-License-Identifier: Apache-2.0
// Gradients that wait for a later backward, where autograd itself widens them and adds them up (from 2.15
// on).
//
// [Note: gradients that autograd adds up]
// A plan casts and adds such gradients behind their unit's backward, all of the unit at once. From
// gradients_stay_as_made on autograd does both, each gradient by itself: a node's gradients are converted
// behind its operators (validate_outputs in engine.cpp), and AccumulateGrad, which follows at once, adds one
// to what waits and drops it. A weight of a product is used turned, so the node that turns its gradient back
// converts it: when the product's node has released what it saved, and the engine has added up the gradient
// of its input.
//
//   entries of a segment   +dW  mm  +dx  mm  -x  -dy                  +dx  +dw  rms_norm_backward     -x  -dy
//   widened                                      | +wide dW  -dW                               | +wide dw -dw
//   added to what waits                          | -dW                                                   |
//   -dw
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"

namespace shardplan::internal {

// The destination of a gradient that a segment makes.
struct GradientArrival {
  enum Kind : std::uint8_t {
    kStays,      // as it is made
    kIsWidened,  // into `sum`, which it begins
    kIsAdded,    // to `sum`
  };
  Kind kind = kStays;
  BufferId sum = -1;
};

// Whether autograd adds up gradients of the plan that wait.
bool AutogradAddsUp(const Plan& plan);

// The arrival of each gradient that the segment lists, by the first instruction behind `at` that has to do
// with it.
std::vector<GradientArrival> ArrivalsOf(const Plan& plan, const Segment& segment, const MemoryPoint& at);

// The entries of the segment behind which a gradient of the operator at entry `op` is converted, and added.
struct GradientPlaces {
  std::int32_t widened = -1;
  std::int32_t added = -1;
};
GradientPlaces PlacesOf(const Segment& segment, std::size_t op);

}  // namespace shardplan::internal
