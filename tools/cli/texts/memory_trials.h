// SPDX-License-Identifier: Apache-2.0
// Knobs that change a plan's peak, each tried by planning again.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::cli {

struct KnobTrial {
  std::string knob;  // "reshard_after_forward: true"
  Bytes peak_bytes;
  bool changes_numbers = false;  // losses and gradients are other ones, if only in their last bits
};

// `plan` is made from `trace`: its strategy is changed in one knob at a time, and the result profiled. Knobs
// that the plan already has, and those that change nothing, are left out; those that change no numbers first,
// and of both the lowest peak. kBadInput: the trace is another one (its digest differs).
Result<std::vector<KnobTrial>> TryKnobs(const Plan& plan, const Trace& trace, bool kernel_temporaries);

std::string TrialsTable(const std::vector<KnobTrial>& trials, Bytes peak_bytes);

}  // namespace shardplan::cli
