// SPDX-License-Identifier: Apache-2.0
// Plans of resharding: the copies that take a state from one layout to another
// (docs/reference/reshard-format.md), the rounds that they are executed in, and their proof.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

// The meaning of a layout (docs/reference/reshard-format.md): which elements of a tensor a rank holds, and
// where they lie in its storage.

// One run of elements of a tensor that a rank holds: the elements [first, first + count) in row-major order
// of the box that begins at `low` and has the extents `size`. They lie side by side in the rank's storage,
// behind `offset` elements. A scalar is a tensor of one dimension and one element.
struct LocalPart {
  std::vector<std::int64_t> low;
  std::vector<std::int64_t> size;
  std::int64_t first = 0;
  std::int64_t count = 0;  // 0: nothing
  std::int64_t offset = 0;
  bool operator==(const LocalPart&) const = default;
};

std::int64_t RanksOf(const StateLayout& layout);
// kBadInput with the place: names of dimensions, tensors and buffers, what is cut, and room in flat buffers.
// `pointer`: where the document has the layout.
Status CheckStateLayout(const StateLayout& layout, const std::string& pointer = {});

// The functions below take layouts that CheckStateLayout lets through.
LocalPart PartOf(const StateLayout& layout, const StateTensor& tensor, std::int64_t rank);
// Bytes of a rank's storage, padding of flat buffers included.
Bytes StorageBytes(const StateLayout& layout, std::int64_t rank);
// Equal texts: every rank holds the same of both tensors, at the same place of its storage.
std::string PlacementKey(const StateLayout& layout, const StateTensor& tensor);

// The parameters of a plan and the state of its optimizer, at the end of a step: "layers.0.weight",
// "state.layers.0.weight.exp_avg". kBadInput: a parameter lies on the mesh in a way that no layout says.
Result<StateLayout> StateLayoutOf(const Plan& plan);

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
// than half the budget. In a round no rank sends and receives more than the budget. Bytes that stay on a rank
// need no staging.
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
