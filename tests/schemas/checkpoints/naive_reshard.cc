// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/checkpoints/naive_reshard.h"

#include <algorithm>
#include <functional>

#include "shardplan/checkpoints/reshard.h"

namespace shardplan::test {
namespace {

constexpr std::uint8_t kUnwritten = 0xee;

std::uint8_t ByteOf(const std::string& name, std::int64_t element, std::int64_t byte) {
  std::uint64_t h =
      std::hash<std::string>{}(name) ^ (static_cast<std::uint64_t>(element) * 0x9e3779b97f4a7c15ULL);
  h ^= static_cast<std::uint64_t>(byte) << 17;
  h ^= h >> 31;
  h *= 0xbf58476d1ce4e5b9ULL;
  return static_cast<std::uint8_t>(h >> 56);
}

std::map<std::string, std::int64_t> CoordinatesOf(const StateLayout& layout, std::int64_t rank) {
  std::map<std::string, std::int64_t> at;
  for (std::size_t d = layout.mesh.size(); d-- > 0;) {
    at[layout.mesh[d].name] = rank % layout.mesh[d].size;
    rank /= layout.mesh[d].size;
  }
  return at;
}

std::int64_t SizeOf(const StateLayout& layout, const std::string& name) {
  for (const StrategyMeshDim& dim : layout.mesh) {
    if (dim.name == name) return dim.size;
  }
  return 0;
}

// Elements of the whole tensor that the splits leave on a rank, in row-major order.
std::vector<std::int64_t> ElementsOf(const StateLayout& layout, const StateTensor& tensor,
                                     std::int64_t rank) {
  auto at = CoordinatesOf(layout, rank);
  for (const MeshPosition& position : tensor.only) {
    if (at[position.mesh_dim] != position.index) return {};
  }
  // The indices along each dimension that are left.
  std::vector<std::vector<std::int64_t>> left;
  for (const std::int64_t extent : tensor.shape) {
    left.emplace_back();
    for (std::int64_t i = 0; i < extent; ++i) left.back().push_back(i);
  }
  for (const TensorSplit& split : tensor.splits) {
    std::int64_t pieces = 1;
    std::int64_t which = 0;
    for (const std::string& dim : split.mesh_dims) {
      pieces *= SizeOf(layout, dim);
      which = which * SizeOf(layout, dim) + at[dim];
    }
    auto& indices = left[static_cast<std::size_t>(split.tensor_dim)];
    const std::int64_t rows = (std::ssize(indices) + pieces - 1) / pieces;
    std::vector<std::int64_t> kept;
    for (std::int64_t i = 0; i < std::ssize(indices); ++i) {
      if (rows > 0 && i / rows == which) kept.push_back(indices[static_cast<std::size_t>(i)]);
    }
    indices = kept;
  }
  std::vector<std::int64_t> elements = {0};
  for (std::size_t d = 0; d < left.size(); ++d) {
    std::vector<std::int64_t> next;
    for (const std::int64_t element : elements) {
      for (const std::int64_t index : left[d]) next.push_back(element * tensor.shape[d] + index);
    }
    elements = next;
  }
  return elements;
}

NaiveState Fill(const StateLayout& layout, bool with_values) {
  std::int64_t ranks = 1;
  for (const StrategyMeshDim& dim : layout.mesh) ranks *= dim.size;
  NaiveState state(static_cast<std::size_t>(ranks));
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    RankStorage& storage = state[static_cast<std::size_t>(rank)];
    auto at = CoordinatesOf(layout, rank);
    for (const FlatBuffer& flat : layout.flats) {
      std::int64_t pieces = 1;
      for (const std::string& dim : flat.mesh_dims) pieces *= SizeOf(layout, dim);
      storage["flat " + flat.name].assign(
          static_cast<std::size_t>(flat.numel / pieces * SizeBytes(flat.dtype)), kUnwritten);
    }
    for (const StateTensor& tensor : layout.tensors) {
      const std::vector<std::int64_t> elements = ElementsOf(layout, tensor, rank);
      const std::int64_t bytes = SizeBytes(tensor.dtype);
      std::string key = tensor.name;
      std::int64_t skipped = 0;
      if (tensor.flat >= 0) {
        const FlatBuffer& flat = layout.flats[static_cast<std::size_t>(tensor.flat)];
        key = "flat " + flat.name;
        std::int64_t pieces = 1;
        std::int64_t which = 0;
        for (const std::string& dim : flat.mesh_dims) {
          pieces *= SizeOf(layout, dim);
          which = which * SizeOf(layout, dim) + at[dim];
        }
        skipped = which * (flat.numel / pieces);
      } else {
        storage[key].assign(elements.size() * static_cast<std::size_t>(bytes), kUnwritten);
      }
      auto& room = storage[key];
      for (std::int64_t i = 0; with_values && i < std::ssize(elements); ++i) {
        for (std::int64_t b = 0; b < bytes; ++b) {
          const std::int64_t place = (tensor.flat_offset + i - skipped) * bytes + b;
          if (place < 0 || place >= std::ssize(room)) continue;
          room[static_cast<std::size_t>(place)] =
              ByteOf(tensor.name, elements[static_cast<std::size_t>(i)], b);
        }
      }
    }
  }
  return state;
}

std::string KeyOf(const StateLayout& layout, const std::string& name) {
  for (const StateTensor& tensor : layout.tensors) {
    if (tensor.name == name)
      return tensor.flat < 0 ? name : "flat " + layout.flats[static_cast<std::size_t>(tensor.flat)].name;
  }
  return name;
}

std::int64_t Between(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

}  // namespace

std::vector<std::int64_t> HeldElements(const StateLayout& layout, const StateTensor& tensor,
                                       std::int64_t rank) {
  const std::vector<std::int64_t> elements = ElementsOf(layout, tensor, rank);
  if (tensor.flat < 0) return elements;
  const FlatBuffer& flat = layout.flats[static_cast<std::size_t>(tensor.flat)];
  auto at = CoordinatesOf(layout, rank);
  std::int64_t pieces = 1;
  std::int64_t which = 0;
  for (const std::string& dim : flat.mesh_dims) {
    pieces *= SizeOf(layout, dim);
    which = which * SizeOf(layout, dim) + at[dim];
  }
  std::vector<std::int64_t> held;
  for (std::int64_t i = 0; i < std::ssize(elements); ++i) {
    if ((tensor.flat_offset + i) / (flat.numel / pieces) == which)
      held.push_back(elements[static_cast<std::size_t>(i)]);
  }
  return held;
}

NaiveState StateIn(const StateLayout& layout) { return Fill(layout, true); }
NaiveState EmptyIn(const StateLayout& layout) { return Fill(layout, false); }

std::optional<std::string> Execute(const ReshardPlan& plan, const NaiveState& from, NaiveState& to) {
  std::optional<std::string> wrong;
  ForEachReshardRound(plan, [&](ReshardRound round) {
    std::map<std::int64_t, std::int64_t> staged;
    for (const ReshardPiece& piece : round) {
      const std::string& name =
          plan.groups[static_cast<std::size_t>(piece.group)].tensors[static_cast<std::size_t>(piece.tensor)];
      const ReshardCopy& copy = piece.copy;
      const auto& source = from.at(static_cast<std::size_t>(copy.source_rank)).at(KeyOf(plan.source, name));
      auto& target = to.at(static_cast<std::size_t>(copy.target_rank)).at(KeyOf(plan.target, name));
      if (copy.source_rank != copy.target_rank) {
        staged[copy.source_rank] += MovedBytes(copy).value;
        staged[copy.target_rank] += MovedBytes(copy).value;
      }
      const std::function<void(std::size_t, std::int64_t, std::int64_t)> run =
          [&](std::size_t loop, std::int64_t s, std::int64_t t) {
            if (loop < copy.loops.size()) {
              for (std::int64_t i = 0; i < copy.loops[loop].count; ++i)
                run(loop + 1, s + i * copy.loops[loop].source_stride, t + i * copy.loops[loop].target_stride);
              return;
            }
            for (std::int64_t b = 0; b < copy.run_bytes.value; ++b) {
              if (s + b >= std::ssize(source) || t + b >= std::ssize(target)) {
                wrong = "a copy of " + name + " leaves its storage";
                return;
              }
              target[static_cast<std::size_t>(t + b)] = source[static_cast<std::size_t>(s + b)];
            }
          };
      run(0, copy.source_offset, copy.target_offset);
    }
    for (const auto& [rank, bytes] : staged) {
      if (bytes > plan.budget_bytes.value)
        wrong = "rank " + std::to_string(rank) + " stages more than its budget";
    }
  });
  return wrong;
}

RandomTensors MakeTensors(std::mt19937_64& random) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8};
  RandomTensors tensors;
  const std::int64_t count = Between(random, 1, 6);
  for (std::int64_t t = 0; t < count; ++t) {
    tensors.names.push_back("t" + std::to_string(t));
    std::vector<std::int64_t> shape(static_cast<std::size_t>(Between(random, 0, 4)));
    for (std::int64_t& extent : shape) extent = Between(random, 0, 9) == 0 ? 0 : Between(random, 1, 7);
    tensors.shapes.push_back(shape);
    tensors.dtypes.push_back(kDTypes[random() % 4]);
  }
  return tensors;
}

StateLayout MakeLayout(const RandomTensors& tensors, std::mt19937_64& random) {
  StateLayout layout;
  const char* names[] = {"a", "b", "c"};
  const std::int64_t mesh_dims = Between(random, 0, 3);
  for (std::int64_t d = 0; d < mesh_dims; ++d)
    layout.mesh.push_back({names[d], Between(random, 1, mesh_dims > 2 ? 3 : 5)});
  const auto size_along = [&](const std::vector<std::string>& dims) {
    std::int64_t size = 1;
    for (const std::string& dim : dims) size *= SizeOf(layout, dim);
    return size;
  };
  for (std::size_t t = 0; t < tensors.names.size(); ++t) {
    StateTensor tensor{.name = tensors.names[t], .dtype = tensors.dtypes[t], .shape = tensors.shapes[t]};
    std::vector<std::string> free;
    for (const StrategyMeshDim& dim : layout.mesh) free.push_back(dim.name);
    std::ranges::shuffle(free, random);
    const bool in_flat = random() % 3 == 0;
    while (!free.empty() && random() % 4 != 0) {
      std::vector<std::string> taken = {free.back()};
      free.pop_back();
      if (!free.empty() && random() % 4 == 0) {
        taken.push_back(free.back());
        free.pop_back();
      }
      if (random() % 5 == 0) {
        for (const std::string& dim : taken)
          tensor.only.push_back({dim, Between(random, 0, SizeOf(layout, dim) - 1)});
      } else if (!tensor.shape.empty()) {
        const auto dim = static_cast<std::int32_t>(random() % tensor.shape.size());
        tensor.splits.push_back({taken, dim});
      }
    }
    if (in_flat) {
      // Equal pieces only.
      std::vector<std::int64_t> left = tensor.shape;
      std::erase_if(tensor.splits, [&](const TensorSplit& split) {
        std::int64_t& extent = left[static_cast<std::size_t>(split.tensor_dim)];
        if (extent % size_along(split.mesh_dims) != 0) return true;
        extent /= size_along(split.mesh_dims);
        return false;
      });
      std::int64_t numel = 1;
      for (const std::int64_t extent : left) numel *= extent;
      // Behind what is there of the last flat buffer, or in a new one; with a gap now and then.
      const bool again = !layout.flats.empty() && layout.flats.back().dtype == tensor.dtype &&
                         random() % 2 == 0 &&
                         std::ranges::all_of(layout.flats.back().mesh_dims, [&](const std::string& dim) {
                           return std::ranges::find(free, dim) != free.end();
                         });
      if (!again) {
        std::vector<std::string> dims;
        if (!free.empty() && random() % 4 != 0) dims.push_back(free.back());
        if (free.size() > 1 && random() % 3 == 0) dims.push_back(free.front());
        layout.flats.push_back({"f" + std::to_string(layout.flats.size()), tensor.dtype, 0, dims});
      }
      FlatBuffer& flat = layout.flats.back();
      tensor.flat = static_cast<std::int32_t>(layout.flats.size()) - 1;
      tensor.flat_offset = flat.numel + Between(random, 0, 3);
      const std::int64_t pieces = size_along(flat.mesh_dims);
      flat.numel = (tensor.flat_offset + numel + pieces - 1) / pieces * pieces;
    }
    layout.tensors.push_back(tensor);
  }
  std::ranges::shuffle(layout.tensors, random);
  return layout;
}

}  // namespace shardplan::test
