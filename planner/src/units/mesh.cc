// SPDX-License-Identifier: Apache-2.0
#include "units/mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace shardplan {

Result<Mesh> Mesh::Make(std::vector<StrategyMeshDim> dims, std::int64_t ranks) {
  Mesh mesh;
  if (dims.empty()) dims = {{"shard", ranks}};
  std::int64_t covered = 1;
  for (StrategyMeshDim& dim : dims) {
    if (__builtin_mul_overflow(covered, dim.size, &covered)) covered = 0;
    mesh.dims_.push_back(std::move(dim));
  }
  if (covered != ranks) {
    return MakeInputError("/mesh", "the mesh does not cover the cluster's ranks", fmt::format("{}", covered),
                          fmt::format("{}", ranks));
  }
  return mesh;
}

const StrategyMeshDim* Mesh::Find(std::string_view name) const {
  const auto found = std::ranges::find(dims_, name, &StrategyMeshDim::name);
  return found == dims_.end() ? nullptr : &*found;
}

void Mesh::NoteOthers(const std::vector<Communicator>& others) {
  for (const Communicator& other : others) {
    if (!other.dims.empty() || Find(other.name) != nullptr) continue;
    if (std::vector<std::string> over = Over(other.size, other.stride); !over.empty())
      others_.emplace(other.name, std::move(over));
  }
}

std::vector<std::string> Mesh::Over(std::string_view name) const {
  if (Find(name) != nullptr) return {std::string(name)};
  const auto other = others_.find(name);
  return other == others_.end() ? std::vector<std::string>() : other->second;
}

std::vector<std::string> Mesh::Over(std::int64_t size, std::int64_t stride) const {
  std::vector<std::string> over;
  std::int64_t own = 1;  // stride
  for (auto dim = dims_.rbegin(); dim != dims_.rend(); own *= dim->size, ++dim) {
    if (own >= stride && own < stride * size && dim->size > 1) over.push_back(dim->name);
  }
  const MeshDigits digits = Flatten(over);
  const bool are_they = digits.size() == 1 && digits[0].size == size && digits[0].stride == stride;
  return are_they ? over : std::vector<std::string>();
}

MeshDigits Mesh::Flatten(const std::vector<std::string>& names) const {
  MeshDigits digits;  // the least significant first
  std::int64_t stride = 1;
  for (auto dim = dims_.rbegin(); dim != dims_.rend(); ++dim) {
    if (std::ranges::find(names, dim->name) != names.end() && dim->size > 1) {
      if (!digits.empty() && digits.back().stride * digits.back().size == stride) {
        digits.back().size *= dim->size;
      } else {
        digits.push_back({dim->size, stride});
      }
    }
    stride *= dim->size;
  }
  std::ranges::reverse(digits);
  return digits;
}

std::int64_t RanksOf(const MeshDigits& digits) {
  std::int64_t ranks = 1;
  for (const CommunicatorDim& digit : digits) ranks *= digit.size;
  return ranks;
}

std::optional<MeshDigits> Innermost(const MeshDigits& digits, std::int64_t size) {
  MeshDigits inner;
  for (auto digit = digits.rbegin(); digit != digits.rend() && size > 1; ++digit) {
    const std::int64_t taken = std::min(size, digit->size);
    if (digit->size % taken != 0 || size % taken != 0) return std::nullopt;
    inner.insert(inner.begin(), {taken, digit->stride});
    size /= taken;
  }
  if (size != 1) return std::nullopt;
  return inner;
}

MeshDigits Outermost(const MeshDigits& digits, std::int64_t size) {
  MeshDigits outer = digits;
  while (!outer.empty() && size > 1) {
    CommunicatorDim& last = outer.back();
    const std::int64_t taken = std::min(size, last.size);
    last = {last.size / taken, last.stride * taken};
    if (last.size == 1) outer.pop_back();
    size /= taken;
  }
  return outer;
}

Communicator MakeCommunicator(std::string name, const MeshDigits& digits) {
  Communicator communicator{.name = std::move(name), .size = RanksOf(digits)};
  if (!digits.empty()) communicator.stride = digits.back().stride;
  if (digits.size() > 1) communicator.dims = digits;
  return communicator;
}

}  // namespace shardplan
