// SPDX-License-Identifier: Apache-2.0
// The comparison of reports as rows of text, for the terminal and for the page.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/report.h"

namespace shardplan::internal {

struct ComparisonRow {
  std::string label;
  std::vector<std::string> cells;  // one for each report
  bool heading = false;            // a title of the rows after it; no cells
  bool indented = false;
};

// Categories of memory that the caching allocator does not follow.
bool OutsideAllocated(std::string_view category);

std::vector<ComparisonRow> ComparisonRows(const std::vector<Report>& reports);

}  // namespace shardplan::internal
