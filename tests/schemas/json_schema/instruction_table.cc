// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/json_schema/instruction_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <vector>

#include "shardplan/schemas/instruction_set.h"
#include "tests/schemas/json_schema/page_table.h"

namespace shardplan {
namespace {

constexpr std::array<std::string_view, 7> kOptionalNames = {
    "unit", "parameter", "microbatch", "reduce_op", "divisor", "safe_after", "parts"};

std::string Operands(const InstructionDescription& is) {
  std::vector<std::string> fields;
  const auto add = [&](bool has, std::string_view field) {
    if (has) fields.push_back(fmt::format("`{}`", field));
  };
  add(is.segment, "segment");
  add(Has(is.src), "src");
  add(Has(is.dst), "dst");
  add(is.event, "event");
  add(is.communicator, "communicator");
  for (std::size_t f = 0; f < kOptionalNames.size(); ++f) {
    add(Has(is.optional, static_cast<OptionalField>(f)), kOptionalNames[f]);
  }
  add(is.place != Place::kHost, "stream");
  return fmt::format("{}", fmt::join(fields, ", "));
}

std::string_view Words(Place place) {
  switch (place) {
    case Place::kHost:
      return "host";
    case Place::kStream:
      return "stream";
    case Place::kStreamOrHost:
      return "stream, or host";
  }
  return "";
}

}  // namespace

std::string WithInstructionTable(std::string_view page) {
  std::string table = "| kind | where | operands | what it does |\n|---|---|---|---|\n";
  for (const InstructionDescription& is : kInstructionSet) {
    table += fmt::format("| `{}` | {} | {} | {} |\n", is.name, Words(is.place), Operands(is), is.says);
  }
  return WithTable(page, "| kind | where |", table);
}

}  // namespace shardplan
