// SPDX-License-Identifier: Apache-2.0
// Random small programs: right in host order, with few or many waits between the streams.
#pragma once

#include <random>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// One or two units that are unsharded, read and resharded over and over, each instruction on any of two to
// four streams, with records, waits, host waits and record_stream strewn in. `waits_percent` of the time a
// stream waits for the one that it needs.
Plan RandomUnshardPlan(std::mt19937_64& random, int waits_percent);

}  // namespace shardplan::test
