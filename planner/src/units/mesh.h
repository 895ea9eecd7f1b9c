// SPDX-License-Identifier: Apache-2.0
// The mesh of ranks and the groups that FSDP makes of it.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// The digits of a rank along one flattened dimension, the most significant first; neighbours that lie side by
// side are one digit. No digit: one rank.
using MeshDigits = std::vector<CommunicatorDim>;

class Mesh {
 public:
  // Dimensions that CheckStrategy lets through. kBadInput: they do not cover `ranks`.
  static Result<Mesh> Make(std::vector<StrategyMeshDim> dims, std::int64_t ranks);

  const std::vector<StrategyMeshDim>& dims() const { return dims_; }
  const StrategyMeshDim* Find(std::string_view name) const;
  // Dimensions of the job's other meshes, which may lie over several of this one.
  void NoteOthers(const std::vector<Communicator>& others);
  // The dimensions of this mesh that one of the job's lies over: itself, or several. Empty: there are none.
  std::vector<std::string> Over(std::string_view name) const;
  // The dimensions of `names`, flattened in the mesh's order (whatever the order of the names).
  MeshDigits Flatten(const std::vector<std::string>& names) const;

 private:
  // ... and that have ranks `stride` apart, `size` of them.
  std::vector<std::string> Over(std::int64_t size, std::int64_t stride) const;

  std::vector<StrategyMeshDim> dims_;
  std::map<std::string, std::vector<std::string>, std::less<>> others_;
};

std::int64_t RanksOf(const MeshDigits& digits);
// The `size` adjacent ranks of the flattened dimension that a rank is in (mesh.view(-1, size) of PyTorch).
// nullopt when these are no digits: a part of a digit that does not divide it.
std::optional<MeshDigits> Innermost(const MeshDigits& digits, std::int64_t size);
// The ranks that have the same place among their `size` adjacent ones, where Innermost gives these digits.
MeshDigits Outermost(const MeshDigits& digits, std::int64_t size);
Communicator MakeCommunicator(std::string name, const MeshDigits& digits);

}  // namespace shardplan
