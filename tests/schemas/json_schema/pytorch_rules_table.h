// SPDX-License-Identifier: Apache-2.0
// The table of what differs between releases of PyTorch, of a page (docs/reference/pytorch-versions.md).
#pragma once

#include <string>
#include <string_view>

namespace shardplan {

// The page with the table as the rules are now. "": it has none.
std::string WithPyTorchRulesTable(std::string_view page);

}  // namespace shardplan
