// SPDX-License-Identifier: Apache-2.0
// The flags of `shardplan plan` for knobs that are fsdp2's, or both policies' but seldom set.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "flags/flag_group.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

struct Fsdp2Flags {
  std::vector<std::string> shard_over, replicate_over;  // names of mesh dimensions
  std::vector<std::string> shard_dims;                  // "layers.*.weight=1"
  std::vector<std::string> ignored_parameters;
  bool cpu_offload = false, no_pin_memory = false;
  std::optional<double> gradient_divide_factor;
  std::optional<std::int32_t> reduce_scatter_inputs;
  std::optional<std::int64_t> inner_reduce_ranks;
  std::optional<std::string> all_reduce_hook;  // a mesh dimension
  std::deque<bool> switches;                   // by row of the table
  bool separate_reduce_scatter = false;
  bool no_root = false;
  bool share_comm_context = false;
};

void AddFsdp2Flags(FlagGroup& group, Fsdp2Flags& flags);

// Writes the given flags over `strategy`. kUsage as ApplyPlanFlags.
Status ApplyFsdp2Flags(const Fsdp2Flags& flags, Strategy& strategy);

}  // namespace shardplan::cli
