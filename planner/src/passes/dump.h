// SPDX-License-Identifier: Apache-2.0
// Results of the passes, as text for a reader.
#pragma once

#include <string>
#include <vector>

#include "order/record_order.h"
#include "units/partition.h"

namespace shardplan {

// Each unit with its modules, ranks, dtypes and parameters.
std::string UnitsText(const Trace& trace, const Partition& partition);

// The points that the host passes in each step, a line each.
std::string OrderText(const Partition& partition, const std::vector<RecordedStep>& steps);

}  // namespace shardplan
