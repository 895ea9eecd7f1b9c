// SPDX-License-Identifier: Apache-2.0
// The flags of `shardplan plan` for knobs that are fsdp1's, or both policies' but seldom set.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "flags/flag_group.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

struct Fsdp1Flags {
  std::vector<std::string> ignored_modules;
  std::optional<std::int64_t> size_based_wrap;
  std::vector<std::string> force_leaf, exclude_wrap;  // classes
  std::optional<std::string> comm_hook;
  std::optional<double> predivide_factor, postdivide_factor;
  std::optional<std::string> buffer_dtype;
  bool keep_low_precision_grads = false;
  std::deque<bool> switches;  // by row of the table
  bool optimizer_in_backward = false;
};

void AddFsdp1Flags(FlagGroup& group, Fsdp1Flags& flags);

// Writes the given flags over `strategy`. kUsage as ApplyPlanFlags.
Status ApplyFsdp1Flags(const Fsdp1Flags& flags, Strategy& strategy);

}  // namespace shardplan::cli
