#include "tests/schemas/json_schema/pytorch_rules_table.h"

#include <fmt/format.h>

#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/schemas/pytorch_version.h"

namespace shardplan {

std::string WithPyTorchRulesTable(std::string_view page) {
  const std::size_t begin = page.find("| rule | since |");
  const std::size_t end = page.find("\n\n", begin);
  if (begin == std::string_view::npos || end == std::string_view::npos) return "";
  std::string table = "| rule | since | before | now | in PyTorch | recording |\n|---|---|---|---|---|---|\n";
  for (const PyTorchRule& rule : kPyTorchRules) {
    table += fmt::format("| `{}` | {} | {} | {} | `{}` | {} |\n", rule.name, Name(rule.since), rule.before,
                         rule.now, rule.where,
                         rule.shown_by.empty() ? "\u2014" : fmt::format("`{}`", rule.shown_by));
  }
  table.pop_back();
  return std::string(page.substr(0, begin)) + table + std::string(page.substr(end));
}

}  // namespace shardplan
