// SPDX-License-Identifier: Apache-2.0
// Pass `fuse_operators`: what torch.compile makes of elementwise operators.
#pragma once

#include <optional>

#include "shardplan/schemas/trace.h"

namespace shardplan {

// The trace with runs of elementwise operators and reductions of rows as one kernel each; none where there
// are no such runs.
std::optional<Trace> FuseOperators(const Trace& trace);

}  // namespace shardplan
