// The comparison of reports as rows of text, for the terminal and for the page.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/report.h"

namespace shardplan::internal {

struct ComparisonRow {
  std::string label;
  std::vector<std::string> cells;  // one for each report
  bool heading = false;            // a title of the rows after it; no cells
  bool indented = false;
};

std::vector<ComparisonRow> ComparisonRows(const std::vector<Report>& reports);

}  // namespace shardplan::internal
