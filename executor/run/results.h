// SPDX-License-Identifier: Apache-2.0
// Measured figures next to simulated ones.
#pragma once

#include <string>
#include <vector>

#include "options.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/report.h"

namespace shardplan::run {

struct Measurement {
  std::vector<Nanoseconds> steps_ns;  // wall time of each step, the slowest rank's
  Nanoseconds compute_ns;             // filler of one step
  Nanoseconds waiting_ns;  // of one step: blocked on communication (cpu: measured; cuda: step - compute)
  Bytes peak_bytes;
};

// A table for people. `report` may be null.
std::string ResultTable(const Plan& plan, const RunOptions& options, const Measurement& measured,
                        const Report* report);

}  // namespace shardplan::run
