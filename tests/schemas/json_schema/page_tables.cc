// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/json_schema/page_tables.h"

namespace shardplan {

std::string WithTable(std::string_view page, std::string_view begins, std::string_view table) {
  const std::size_t begin = page.find(begins);
  const std::size_t end = page.find("\n\n", begin);
  if (begin == std::string_view::npos || end == std::string_view::npos) return "";
  table.remove_suffix(1);
  return std::string(page.substr(0, begin)) + std::string(table) + std::string(page.substr(end));
}

std::vector<PageTable> PageTables() {
  return {{"plan-format.md", WithInstructionTable},
          {"plan-format.md", WithEffectTable},
          {"plan-format.md", WithRoleTable},
          {"memory.md", WithOptimizerTable},
          {"memory.md", WithStateTable},
          {"pytorch-versions.md", WithPyTorchRulesTable}};
}

}  // namespace shardplan
