// SPDX-License-Identifier: Apache-2.0
// Positions of the parts of a plan's JSON text: the elements of its long lists.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "documents/plan_parts.h"

namespace shardplan {

struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

struct PlanOutline {
  std::string rest;  // the document with these lists empty
  std::vector<TextRange> buffers, segments, procedures;
  std::vector<std::vector<TextRange>> triggers;  // by step
};

// nullopt where the text has another form than a writer gives it. It may still be a plan.
std::optional<PlanOutline> OutlineOf(DocumentBytes& bytes);

}  // namespace shardplan
