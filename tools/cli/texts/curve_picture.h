// SPDX-License-Identifier: Apache-2.0
// The price curve as a picture: time of a step against memory.
#pragma once

#include <string>

#include "shardplan/schemas/optimization.h"

namespace shardplan::cli {

// SVG, complete in itself: the curve, the plan, its bound, the budget, and the baselines as points.
std::string CurvePicture(const Optimization& report);

}  // namespace shardplan::cli
