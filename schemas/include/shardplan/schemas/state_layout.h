// SPDX-License-Identifier: Apache-2.0
// The layout of a training state: which rank holds which elements of every tensor
// (docs/reference/reshard-format.md). Parameters, optimizer state, anything that a checkpoint has.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

inline constexpr std::int64_t kMostTensorDims = 8;
inline constexpr std::int64_t kMostLayoutRanks = std::int64_t{1} << 20;

// A tensor's dimension is cut, as torch.chunk cuts, into a piece for each coordinate along the dimensions of
// the mesh (flattened, the first the most significant).
struct TensorSplit {
  std::vector<std::string> mesh_dims;
  std::int32_t tensor_dim = 0;
  bool operator==(const TensorSplit&) const = default;
};

// The ranks that have this coordinate along a dimension of the mesh.
struct MeshPosition {
  std::string mesh_dim;
  std::int64_t index = 0;
  bool operator==(const MeshPosition&) const = default;
};

// Tensors one behind the other (FSDP1's flat parameter, and its optimizer state): `numel` elements, padding
// included, cut into equal pieces along `mesh_dims` (flattened, the first the most significant).
struct FlatBuffer {
  std::string name;
  DType dtype = DType::kFloat32;
  std::int64_t numel = 0;
  std::vector<std::string> mesh_dims;
  bool operator==(const FlatBuffer&) const = default;
};

struct StateTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;  // of the whole tensor
  std::vector<TensorSplit> splits;  // in the order in which they cut: each cuts what those before it left
  std::vector<MeshPosition> only;   // held by ranks that have all these coordinates; empty: by all
  std::int32_t flat = -1;           // index into StateLayout::flats: what the splits left lies there ...
  std::int64_t flat_offset = 0;     // ... behind so many elements; -1 and 0: storage of its own
  bool operator==(const StateTensor&) const = default;
};

// Along dimensions of the mesh that neither a split nor a flat buffer names, all ranks hold the same.
struct StateLayout {
  std::string name;                   // for people
  std::vector<StrategyMeshDim> mesh;  // outermost first, the last dimension's ranks are adjacent
  std::vector<FlatBuffer> flats;
  std::vector<StateTensor> tensors;
  bool operator==(const StateLayout&) const = default;
};

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
