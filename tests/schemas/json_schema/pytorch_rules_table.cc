// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "shardplan/schemas/pytorch_rules.h"
#include "tests/schemas/json_schema/page_tables.h"

namespace shardplan {

std::string WithPyTorchRulesTable(std::string_view page) {
  std::string table = "| rule | since | before | now | in PyTorch | recording |\n|---|---|---|---|---|---|\n";
  for (const PyTorchRule& rule : kPyTorchRules) {
    table += fmt::format("| `{}` | {} | {} | {} | `{}` | {} |\n", rule.name, Name(rule.since), rule.before,
                         rule.now, rule.where,
                         rule.shown_by.empty() ? "\u2014" : fmt::format("`{}`", rule.shown_by));
  }
  return WithTable(page, "| rule | since |", table);
}

}  // namespace shardplan
