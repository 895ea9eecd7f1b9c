// SPDX-License-Identifier: Apache-2.0
// Tables that pages have from the sources.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardplan {

// The page with `table` (lines, each with its end) in the place of the one that begins with `begins`. "": it
// has none.
std::string WithTable(std::string_view page, std::string_view begins, std::string_view table);

// The page with the table as the sources are now. "": it has none.
std::string WithInstructionTable(std::string_view page);
std::string WithEffectTable(std::string_view page);
std::string WithRoleTable(std::string_view page);
std::string WithOptimizerTable(std::string_view page);
std::string WithStateTable(std::string_view page);
std::string WithPyTorchRulesTable(std::string_view page);

struct PageTable {
  std::string page;  // below docs/reference
  std::string (*with)(std::string_view);
};
std::vector<PageTable> PageTables();

}  // namespace shardplan
