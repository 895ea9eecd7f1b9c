// SPDX-License-Identifier: Apache-2.0
// Texts and pages of `compare` for a measured step beside the predicted one.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "shardplan/schemas/report.h"
#include "shardplan/simulator/measurements.h"

namespace shardplan::cli {

// The answer first (how far the step is off, and from which cause), then tables.
std::string MeasuredText(const MeasuredComparison& comparison, const Report& predicted,
                         const Report& measured);

nlohmann::ordered_json ToJson(const MeasuredComparison& comparison);

}  // namespace shardplan::cli
