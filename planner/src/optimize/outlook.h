// SPDX-License-Identifier: Apache-2.0
// The outlook of a job before it is searched: about how fast it is, and what is proven of all its plans.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan::optimize {

struct Outlook {
  Nanoseconds step_ns;  // the fastest of some common settings that may fit; kLongestStep: none may
  // Work of all plans of the class that the search may choose; none: nothing is proven of them.
  std::optional<StepWork> work;
  std::vector<LayoutKind> layouts;
  Bytes budget;
};

// Errors as MakePlan's, where no setting can be planned.
Result<Outlook> LookAt(const Trace& trace, const Strategy& job, const Cluster& cluster,
                       const OptimizeOptions& options);

// Prices for each layout.
std::vector<CertificateBranch> FindBranches(const StepWork& work, const std::vector<std::int64_t>& cuts,
                                            const std::vector<LayoutKind>& layouts, Bytes budget);
Nanoseconds LeastOf(const std::vector<CertificateBranch>& branches);

}  // namespace shardplan::optimize
