// SPDX-License-Identifier: Apache-2.0
// Whether a layout of a state is one.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoints/layouts/mesh_digits.h"
#include "json/fields.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

class LayoutCheck {
 public:
  LayoutCheck(const StateLayout& layout, const std::string& pointer) : layout_(layout), pointer_(pointer) {}

  Status Run() {
    if (Status status = CheckMesh(); !status) return status;
    for (std::size_t f = 0; f < layout_.flats.size(); ++f) {
      if (Status status = CheckFlat(f); !status) return status;
    }
    std::set<std::string_view> names;
    for (std::size_t t = 0; t < layout_.tensors.size(); ++t) {
      const StateTensor& tensor = layout_.tensors[t];
      const std::string at = fmt::format("{}/tensors/{}", pointer_, t);
      if (!names.insert(tensor.name).second)
        return MakeInputError(at + "/name", "two tensors have one name", tensor.name);
      if (Status status = CheckTensor(tensor, at); !status) return status;
    }
    return CheckRoom();
  }

 private:
  Status CheckMesh() {
    std::set<std::string_view> names;
    std::int64_t ranks = 1;
    for (std::size_t d = 0; d < layout_.mesh.size(); ++d) {
      const StrategyMeshDim& dim = layout_.mesh[d];
      const std::string at = fmt::format("{}/mesh/{}", pointer_, d);
      if (!names.insert(dim.name).second)
        return MakeInputError(at + "/name", "two dimensions of the mesh have one name", dim.name);
      if (dim.size < 1 || dim.size > kMostLayoutRanks / ranks)
        return MakeInputError(at + "/size", "a mesh of another size than a layout may have",
                              fmt::format("{}", dim.size),
                              fmt::format("1 to {} ranks in all", kMostLayoutRanks));
      ranks *= dim.size;
    }
    return {};
  }

  // Dimensions that exist, each of them once in `used`.
  Status CheckDims(const std::vector<std::string>& dims, const std::string& at, std::set<std::string>& used) {
    for (std::size_t d = 0; d < dims.size(); ++d) {
      const std::string here = fmt::format("{}/{}", at, d);
      if (FindMeshDim(layout_, dims[d]) < 0)
        return MakeInputError(here, "not a dimension of the mesh", dims[d], DimNames());
      if (!used.insert(dims[d]).second)
        return MakeInputError(here, "a dimension of the mesh cuts or places a tensor twice", dims[d]);
    }
    return {};
  }

  std::string DimNames() const {
    std::vector<std::string> names;
    for (const StrategyMeshDim& dim : layout_.mesh) names.push_back(dim.name);
    return fmt::format("one of {}", fmt::join(names, ", "));
  }

  Status CheckFlat(std::size_t f) {
    const FlatBuffer& flat = layout_.flats[f];
    const std::string at = fmt::format("{}/flats/{}", pointer_, f);
    std::set<std::string> used;
    if (Status status = CheckDims(flat.mesh_dims, at + "/mesh_dims", used); !status) return status;
    if (!flat_names_.insert(flat.name).second)
      return MakeInputError(at + "/name", "two flat buffers have one name", flat.name);
    const std::int64_t pieces = SizeAlong(layout_, flat.mesh_dims);
    if (flat.numel < 0 || flat.numel % pieces != 0)
      return MakeInputError(at + "/numel", "a flat buffer is cut into equal pieces",
                            fmt::format("{}", flat.numel), fmt::format("a multiple of {}", pieces));
    return {};
  }

  Status CheckTensor(const StateTensor& tensor, const std::string& at) {
    const auto dims = std::ssize(tensor.shape);
    if (dims > kMostTensorDims)
      return MakeInputError(at + "/shape", "too many dimensions", fmt::format("{}", dims),
                            fmt::format("at most {}", kMostTensorDims));
    std::int64_t numel = 1;
    for (const std::int64_t extent : tensor.shape) {
      if (extent < 0 || (extent > 0 && numel > kMaxExact / SizeBytes(tensor.dtype) / extent))
        return MakeInputError(at + "/shape", "no shape of a tensor",
                              fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
      numel *= extent;
    }
    std::set<std::string> used;
    for (std::size_t s = 0; s < tensor.splits.size(); ++s) {
      const TensorSplit& split = tensor.splits[s];
      const std::string here = fmt::format("{}/splits/{}", at, s);
      if (Status status = CheckDims(split.mesh_dims, here + "/mesh_dims", used); !status) return status;
      if (split.tensor_dim < 0 || split.tensor_dim >= dims)
        return MakeInputError(here + "/tensor_dim", "the tensor has no such dimension",
                              fmt::format("{}", split.tensor_dim), fmt::format("less than {}", dims));
    }
    for (std::size_t p = 0; p < tensor.only.size(); ++p) {
      const std::string here = fmt::format("{}/only/{}", at, p);
      if (Status status = CheckDims({tensor.only[p].mesh_dim}, here, used); !status) return status;
      const std::int64_t size = layout_.mesh[FindMeshDim(layout_, tensor.only[p].mesh_dim)].size;
      if (tensor.only[p].index < 0 || tensor.only[p].index >= size)
        return MakeInputError(here + "/index", "no coordinate along that dimension",
                              fmt::format("{}", tensor.only[p].index), fmt::format("less than {}", size));
    }
    return CheckInFlat(tensor, at, used);
  }

  Status CheckInFlat(const StateTensor& tensor, const std::string& at, std::set<std::string>& used) {
    if (tensor.flat < -1 || tensor.flat >= std::ssize(layout_.flats))
      return MakeInputError(at + "/flat", "no such flat buffer", fmt::format("{}", tensor.flat),
                            fmt::format("-1, or less than {}", layout_.flats.size()));
    if (tensor.flat < 0) {
      if (tensor.flat_offset == 0) return {};
      return MakeInputError(at + "/flat_offset", "an offset in no flat buffer",
                            fmt::format("{}", tensor.flat_offset), "0");
    }
    const FlatBuffer& flat = layout_.flats[tensor.flat];
    if (Status status = CheckDims(flat.mesh_dims, at + "/flat", used); !status) return status;
    if (tensor.dtype != flat.dtype)
      return MakeInputError(at + "/dtype", "a flat buffer has one dtype", std::string(Name(tensor.dtype)),
                            std::string(Name(flat.dtype)));
    std::vector<std::int64_t> left = tensor.shape;
    for (std::size_t s = 0; s < tensor.splits.size(); ++s) {
      std::int64_t& extent = left[tensor.splits[s].tensor_dim];
      const std::int64_t pieces = SizeAlong(layout_, tensor.splits[s].mesh_dims);
      if (extent % pieces != 0)
        return MakeInputError(fmt::format("{}/splits/{}", at, s),
                              "tensors of a flat buffer are cut into equal pieces",
                              fmt::format("{} rows", extent), fmt::format("a multiple of {}", pieces));
      extent /= pieces;
    }
    std::int64_t numel = 1;
    for (const std::int64_t extent : left) numel *= extent;
    if (tensor.flat_offset < 0 || numel > flat.numel || tensor.flat_offset > flat.numel - numel)
      return MakeInputError(at + "/flat_offset", "the tensor does not lie within its flat buffer",
                            fmt::format("{} elements at {}", numel, tensor.flat_offset),
                            fmt::format("a buffer of {}", flat.numel));
    rooms_.push_back({tensor.flat, tensor.flat_offset, numel, at});
    return {};
  }

  Status CheckRoom() {
    std::ranges::sort(rooms_, {},
                      [](const Room& room) { return std::tie(room.flat, room.offset, room.numel); });
    for (std::size_t r = 1; r < rooms_.size(); ++r) {
      const Room& before = rooms_[r - 1];
      if (before.flat == rooms_[r].flat && before.offset + before.numel > rooms_[r].offset)
        return MakeInputError(
            rooms_[r].at + "/flat_offset", "two tensors of a flat buffer overlap",
            fmt::format("{}", rooms_[r].offset),
            fmt::format("at least {}, the end of {}", before.offset + before.numel, before.at));
    }
    return {};
  }

  struct Room {
    std::int32_t flat;
    std::int64_t offset, numel;
    std::string at;
  };
  const StateLayout& layout_;
  const std::string& pointer_;
  std::set<std::string_view> flat_names_;
  std::vector<Room> rooms_;
};

}  // namespace

Status CheckStateLayout(const StateLayout& layout, const std::string& pointer) {
  return LayoutCheck(layout, pointer).Run();
}

}  // namespace shardplan
