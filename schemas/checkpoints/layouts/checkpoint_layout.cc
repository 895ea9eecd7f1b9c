// SPDX-License-Identifier: Apache-2.0
// Layouts of checkpoints: what belongs to which parameter, and where ranks hold it.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kStateWord = "state.";
constexpr std::int64_t kFlatAlignmentBytes = 16;  // FSDP1's, with use_orig_params

// The role of a checkpoint's tensor: it belongs to the parameter `fqn`, as `kind` of its states (empty: as
// the parameter itself).
struct TensorRole {
  std::string fqn, kind;
};

class CheckpointNames {
 public:
  explicit CheckpointNames(const Checkpoint& checkpoint) {
    for (const CheckpointTensor& tensor : checkpoint.tensors)
      has_model_ = has_model_ || tensor.name.starts_with(kModelPrefix);
    for (const CheckpointTensor& tensor : checkpoint.tensors) {
      const std::string_view fqn = ParameterOf(tensor.name);
      if (!fqn.empty()) parameters_.emplace(fqn, &tensor);
    }
  }

  // Empty names: it belongs to no parameter.
  TensorRole RoleOf(const CheckpointTensor& tensor) const {
    if (const std::string_view fqn = ParameterOf(tensor.name); !fqn.empty()) return {std::string(fqn), ""};
    std::string_view rest = AfterState(tensor.name);
    // The longest parameter's name that the rest begins with.
    for (std::size_t dot = rest.rfind('.'); dot != std::string_view::npos && dot > 0;
         dot = rest.rfind('.', dot - 1)) {
      const auto found = parameters_.find(rest.substr(0, dot));
      if (found == parameters_.end()) continue;
      return {std::string(rest.substr(0, dot)), std::string(rest.substr(dot + 1))};
    }
    return {};
  }
  const CheckpointTensor* Parameter(std::string_view fqn) const {
    const auto found = parameters_.find(fqn);
    return found == parameters_.end() ? nullptr : found->second;
  }

 private:
  static std::string_view AfterState(std::string_view name) {
    if (name.starts_with(kStateWord)) return name.substr(kStateWord.size());
    const std::size_t at = name.find(fmt::format(".{}", kStateWord));
    return at == std::string_view::npos ? std::string_view() : name.substr(at + 1 + kStateWord.size());
  }
  std::string_view ParameterOf(std::string_view name) const {
    if (has_model_)
      return name.starts_with(kModelPrefix) ? name.substr(kModelPrefix.size()) : std::string_view();
    return AfterState(name).empty() ? name : std::string_view();
  }

  bool has_model_ = false;
  std::map<std::string_view, const CheckpointTensor*> parameters_;
};

class CheckpointLayoutMaker {
 public:
  CheckpointLayoutMaker(const Checkpoint& checkpoint, const CheckpointLayoutOptions& options)
      : checkpoint_(checkpoint), options_(options), names_(checkpoint) {
    layout_.name = "checkpoint";
    layout_.mesh = options.mesh;
    for (const StrategyMeshDim& dim : options.mesh) {
      if (dim.name != "replicate") shard_.push_back(dim.name);
    }
  }

  StateLayout Run() {
    for (const CheckpointTensor& tensor : checkpoint_.tensors) {
      StateTensor placed{.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape};
      if (options_.layout == CheckpointLayout::kPerParameter && !tensor.shape.empty() && !shard_.empty())
        placed.splits.push_back({shard_, 0});
      if (options_.layout == CheckpointLayout::kFlat) PlaceFlat(tensor, placed);
      layout_.tensors.push_back(std::move(placed));
    }
    EndFlats();
    return std::move(layout_);
  }

 private:
  void PlaceFlat(const CheckpointTensor& tensor, StateTensor& placed) {
    const TensorRole role = names_.RoleOf(tensor);
    if (role.fqn.empty() || names_.Parameter(role.fqn)->shape != tensor.shape) return;
    const std::string unit = UnitOf(role.fqn);
    const auto [found, is_new] = flats_.try_emplace({unit, role.kind, tensor.dtype}, layout_.flats.size());
    if (is_new)
      layout_.flats.push_back(
          {fmt::format("{}|{}|{}", unit, role.kind, Name(tensor.dtype)), tensor.dtype, 0, shard_});
    FlatBuffer& flat = layout_.flats[found->second];
    const std::int64_t alignment = std::max<std::int64_t>(1, kFlatAlignmentBytes / SizeBytes(tensor.dtype));
    placed.flat = static_cast<std::int32_t>(found->second);
    placed.flat_offset = (flat.numel + alignment - 1) / alignment * alignment;
    std::int64_t numel = 1;
    for (const std::int64_t extent : tensor.shape) numel *= extent;
    flat.numel = placed.flat_offset + numel;
  }

  // The innermost module that a pattern names, the root ("") otherwise.
  std::string UnitOf(const std::string& fqn) const {
    for (std::size_t dot = fqn.rfind('.'); dot != std::string::npos;
         dot = dot == 0 ? dot : fqn.rfind('.', dot - 1)) {
      const std::string_view module = std::string_view(fqn).substr(0, dot);
      if (std::ranges::any_of(options_.units, [&](const std::string& unit) { return Matches(unit, module); }))
        return std::string(module);
      if (dot == 0) break;
    }
    return {};
  }

  // Padded so that ranks have equal pieces.
  void EndFlats() {
    std::int64_t pieces = 1;
    for (const StrategyMeshDim& dim : options_.mesh) pieces *= dim.name == "replicate" ? 1 : dim.size;
    for (FlatBuffer& flat : layout_.flats) flat.numel = (flat.numel + pieces - 1) / pieces * pieces;
  }

  const Checkpoint& checkpoint_;
  const CheckpointLayoutOptions& options_;
  CheckpointNames names_;
  StateLayout layout_;
  std::vector<std::string> shard_;
  std::map<std::tuple<std::string, std::string, DType>, std::size_t> flats_;
};

}  // namespace

Result<StateLayout> LayoutOfCheckpoint(const Checkpoint& checkpoint, const CheckpointLayoutOptions& options) {
  StateLayout layout = CheckpointLayoutMaker(checkpoint, options).Run();
  if (Status status = CheckStateLayout(layout); !status) return std::unexpected(status.error());
  return layout;
}

Result<StateLayout> LayoutForCheckpoint(const Checkpoint& checkpoint, const StateLayout& layout,
                                        bool lenient) {
  std::unordered_map<std::string_view, const StateTensor*> placed;
  for (const StateTensor& tensor : layout.tensors) placed.emplace(tensor.name, &tensor);
  const CheckpointNames names(checkpoint);
  StateLayout result{.name = layout.name, .mesh = layout.mesh, .flats = layout.flats};
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    const TensorRole role = names.RoleOf(tensor);
    auto found = placed.find(tensor.name);
    if (found == placed.end())
      found = placed.find(role.kind.empty() ? role.fqn : fmt::format("state.{}.{}", role.fqn, role.kind));
    StateTensor here{.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape};
    if (found != placed.end()) {
      here = *found->second;
      here.name = tensor.name;
      if (here.shape != tensor.shape || here.dtype != tensor.dtype)
        return MakeInputError(fmt::format("/tensors/{}", found->second - layout.tensors.data()),
                              fmt::format("{} is another tensor in the checkpoint", Printable(tensor.name)),
                              fmt::format("{} [{}]", Name(here.dtype), fmt::join(here.shape, ", ")),
                              fmt::format("{} [{}]", Name(tensor.dtype), fmt::join(tensor.shape, ", ")));
    } else if (!lenient) {
      return MakeInputError("/tensors", "the layout lacks a tensor of the checkpoint", {},
                            Printable(tensor.name));
    }
    result.tensors.push_back(std::move(here));
  }
  if (Status status = CheckStateLayout(result); !status) return std::unexpected(status.error());
  return result;
}

}  // namespace shardplan
