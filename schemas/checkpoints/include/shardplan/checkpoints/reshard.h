// SPDX-License-Identifier: Apache-2.0
// Plans of resharding: the copies that take a state from one layout to another
// (docs/reference/reshard-format.md), the rounds that they are executed in, and their proof.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "shardplan/checkpoints/state_layout.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

struct ReshardOptions {
  std::int64_t ranks_per_node = 8;
  Bytes budget_bytes{kUsualReshardBudget};
  // Tensors of the target that the source lacks are left out of the plan's target instead of an error.
  bool lenient = false;
};

// Every byte that a rank of the target holds comes from one rank: itself where it has it, else one of its
// node, else any, the one that sends least. A copy is as large as both layouts allow. Tensors of the source
// that the target lacks are not moved. kBadInput: a layout is none, a tensor is missing, or has another shape
// or dtype; `pointer` begins with /source or /target.
Result<ReshardPlan> PlanReshard(const StateLayout& source, const StateLayout& target,
                                const ReshardOptions& options = {});

// CheckStateLayout of both layouts.
Status CheckReshardLayouts(const ReshardPlan& plan);

// Bytes that a copy moves.
Bytes MovedBytes(const ReshardCopy& copy);

// A piece of a copy: of the tensor `tensor` of the group.
struct ReshardPiece {
  std::int32_t group = 0;
  std::int32_t tensor = 0;
  ReshardCopy copy;
};
// The order of execution, the same on all ranks: the copies as the plan has them, cut where they are larger
// than half the budget, in rounds in which no rank sends and receives more than the budget. What stays on a
// rank needs no staging.
using ReshardRound = std::span<const ReshardPiece>;
void ForEachReshardRound(const ReshardPlan& plan, const std::function<void(ReshardRound)>& visit);
// ForEachReshardRound with only those pieces that `rank` sends, receives or keeps; the rounds are the same
// ones, and some may have none. So the memory is that of a rank's own pieces.
void ForEachReshardRoundOf(const ReshardPlan& plan, std::int64_t rank,
                           const std::function<void(ReshardRound)>& visit);

// A fault of a plan: a JSON pointer and a sentence. A plan without faults writes every byte of the target
// exactly once, with the bytes of the same elements, from a rank that holds them.
struct ReshardViolation {
  std::string pointer;
  std::string message;
  bool operator==(const ReshardViolation&) const = default;
};
std::vector<ReshardViolation> VerifyReshard(const ReshardPlan& plan);

// The plan as lines for a person.
std::string ReshardText(const ReshardPlan& plan);

}  // namespace shardplan
