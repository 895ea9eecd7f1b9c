// SPDX-License-Identifier: Apache-2.0
// Tables that pages have from the sources.
#pragma once

#include <string>
#include <string_view>

namespace shardplan {

// The page with `table` (lines, each with its end) in the place of the one that begins with `begins`. "": it
// has none.
std::string WithTable(std::string_view page, std::string_view begins, std::string_view table);

}  // namespace shardplan
