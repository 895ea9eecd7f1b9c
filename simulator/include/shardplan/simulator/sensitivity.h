// SPDX-License-Identifier: Apache-2.0
// How far a step time may be off, and which of the cluster's figures that is from.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/report.h"

namespace shardplan {

// The cluster on which everything that follows from one figure takes `factor_ppm` of its time: durations are
// multiplied, rates divided. Of a slowdown it is the part that is lost.
Cluster WithFigure(Cluster cluster, ClusterFigure figure, std::int64_t factor_ppm);

struct FigureEffect {
  FigureSource source;
  // The step when the figure is better, and when it is worse, by what it may be off: divided and multiplied
  // by 1 + off.
  Nanoseconds better_ns, worse_ns;
};

struct Sensitivity {
  Nanoseconds step_ns;
  // Figures are off independently of each other: the squares of what they change are added on either side.
  Nanoseconds low_ns, high_ns;
  std::vector<FigureEffect> effects;  // the widest first
};

// Sensitivities of the steady step to the figures of `cluster.sources`. Errors as Simulate.
Result<Sensitivity> AnalyseSensitivity(const Plan& plan, const Cluster& cluster);

// The step's interval and the figures' effects, in its report.
void FillInterval(const Sensitivity& sensitivity, Report& report);

// "step 812.4 ms, 770.1 to 861.3 ms two times in three, most of it from network (guess, 20 %)". Empty without
// sources.
std::string IntervalText(const Sensitivity& sensitivity);

// A line for each figure, with a bar from better to worse (a tornado).
std::string SensitivityText(const Sensitivity& sensitivity);

}  // namespace shardplan
