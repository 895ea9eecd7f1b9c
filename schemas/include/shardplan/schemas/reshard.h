// SPDX-License-Identifier: Apache-2.0
// The layout of a training state: which rank holds which elements of every tensor
// (docs/reference/state_layout-format.md). Parameters, optimizer state, anything that a checkpoint has. And
// the plan that moves a state from one layout to another (docs/reference/reshard-format.md): who sends which
// bytes to whom. Functions on them are in shardplan/checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/dtype.h"
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

}  // namespace shardplan
