// SPDX-License-Identifier: Apache-2.0
// The plan that moves a state from one layout to another (docs/reference/reshard-format.md): who sends which
// bytes to whom.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/state_layout.h"

namespace shardplan {

inline constexpr std::int64_t kLeastReshardBudget = 4096;
inline constexpr std::int64_t kUsualReshardBudget = std::int64_t{256} << 20;

struct CopyLoop {
  std::int64_t count = 1;
  std::int64_t source_stride = 0;  // bytes
  std::int64_t target_stride = 0;
  bool operator==(const CopyLoop&) const = default;
};

// `run_bytes` at source_offset of the source rank's storage to target_offset of the target rank's; again at
// the strides of each loop, the outermost first. Storage is that of the tensor, or of its flat buffer.
struct ReshardCopy {
  std::int64_t source_rank = 0;
  std::int64_t target_rank = 0;
  std::int64_t source_offset = 0;  // bytes
  std::int64_t target_offset = 0;
  Bytes run_bytes;
  std::vector<CopyLoop> loops;
  bool operator==(const ReshardCopy&) const = default;
};

// Tensors of one placement in the source and one in the target: the copies of each of them.
struct ReshardGroup {
  std::vector<std::string> tensors;
  std::vector<ReshardCopy> copies;
  bool operator==(const ReshardGroup&) const = default;
};

// Rank r of the target is the process that rank r of the source was: what it keeps crosses no link.
struct ReshardPlan {
  StateLayout source;
  StateLayout target;
  std::int64_t ranks_per_node = 8;
  Bytes budget_bytes{kUsualReshardBudget};  // of staging memory of a rank
  std::vector<ReshardGroup> groups;
  bool operator==(const ReshardPlan&) const = default;
};

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
