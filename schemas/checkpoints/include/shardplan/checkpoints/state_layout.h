// SPDX-License-Identifier: Apache-2.0
// What a layout of a state says (docs/reference/reshard-format.md): which elements of a tensor a rank holds,
// and where they lie in its storage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

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

}  // namespace shardplan
