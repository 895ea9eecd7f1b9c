// SPDX-License-Identifier: Apache-2.0
// The table of instructions in docs/reference/plan-format.md, made from the instruction set.
#pragma once

#include <string>
#include <string_view>

namespace shardplan {

// The page with its table (from "| kind |" to the next empty line) replaced by the instruction set's; ""
// where the page has none.
std::string WithInstructionTable(std::string_view page);

}  // namespace shardplan
