// SPDX-License-Identifier: Apache-2.0
// Layouts of a state, and the plan from one to another, in JSON (docs/reference/reshard-format.md).
#pragma once

#include "documents/strategy_fields.h"
#include "json/fields.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<TensorSplit> = {.says = "A cut, as torch.chunk cuts."};
template <>
inline constexpr auto kFields<TensorSplit> =
    FieldList(Required("mesh_dims", &TensorSplit::mesh_dims,
                       "Dimensions of the mesh that it is cut along, the most significant first."),
              Required("tensor_dim", &TensorSplit::tensor_dim, "Dimension of the tensor that is cut.")
                  .AtMost(kMostTensorDims - 1));

template <>
inline constexpr Definition kDefinition<MeshPosition> = {.says = "Ranks of one coordinate."};
template <>
inline constexpr auto kFields<MeshPosition> =
    FieldList(Required("mesh_dim", &MeshPosition::mesh_dim, "Dimension of the mesh."),
              Required("index", &MeshPosition::index, "Coordinate along it.").AtMost(kMostLayoutRanks));

template <>
inline constexpr Definition kDefinition<FlatBuffer> = {"state_layout", "flat_buffer",
                                                       "Tensors one behind the other, cut as one."};
template <>
inline constexpr auto kFields<FlatBuffer> =
    FieldList(Required("name", &FlatBuffer::name, "Unique name."),
              Required("dtype", &FlatBuffer::dtype, "Of all its tensors."),
              Required("numel", &FlatBuffer::numel, "Elements, padding included.").AtMost(kMaxExact),
              Optional("mesh_dims", &FlatBuffer::mesh_dims,
                       "Dimensions of the mesh that cut it into equal pieces, the most significant first."));

template <>
inline constexpr Definition kDefinition<StateTensor> = {"state_layout", "tensor", "Where a tensor lies."};
template <>
inline constexpr auto kFields<StateTensor> = FieldList(
    Required("name", &StateTensor::name, "Unique name."),
    Required("dtype", &StateTensor::dtype, "Its dtype."),
    Required("shape", &StateTensor::shape, "Of the whole tensor.").AtMost(kMaxExact).Shape(),
    Optional("splits", &StateTensor::splits, "In the order in which they cut."),
    Optional("only", &StateTensor::only, "Coordinates of the ranks that hold it. Empty: all."),
    Optional("flat", &StateTensor::flat, "Index of the flat buffer that it lies in; -1: in none.").OrNone(),
    Optional("flat_offset", &StateTensor::flat_offset, "Elements before it there.").AtMost(kMaxExact));

template <>
inline constexpr bool kIsBlock<StateLayout> = true;
template <>
inline constexpr Definition kDefinition<StateLayout> = {"state_layout", "state_layout",
                                                        "Which rank holds which elements."};
template <>
inline constexpr auto kFields<StateLayout> =
    FieldList(Required("name", &StateLayout::name, "A name for people."),
              Required("mesh", &StateLayout::mesh, "Outermost dimension first."),
              Optional("flats", &StateLayout::flats, "Flat buffers.").Lines(),
              Required("tensors", &StateLayout::tensors, "All tensors.").Lines());

template <>
inline constexpr Definition kDefinition<CopyLoop> = {.says = "A run again, at strides."};
template <>
inline constexpr auto kFields<CopyLoop> = FieldList(
    Required("count", &CopyLoop::count, "How often.").AtLeast(2).AtMost(kMaxExact),
    Required("source_stride", &CopyLoop::source_stride, "Bytes from one to the next.").AtMost(kMaxExact),
    Required("target_stride", &CopyLoop::target_stride, "Bytes from one to the next.").AtMost(kMaxExact));

template <>
inline constexpr Definition kDefinition<ReshardCopy> = {"reshard", "copy", "Bytes from a rank to a rank."};
template <>
inline constexpr auto kFields<ReshardCopy> = FieldList(
    Required("source_rank", &ReshardCopy::source_rank, "Sends.").AtMost(kMostLayoutRanks - 1),
    Required("target_rank", &ReshardCopy::target_rank, "Receives.").AtMost(kMostLayoutRanks - 1),
    Required("source_offset", &ReshardCopy::source_offset, "Byte of the source's storage.").AtMost(kMaxExact),
    Required("target_offset", &ReshardCopy::target_offset, "Byte of the target's storage.").AtMost(kMaxExact),
    Required("run_bytes", &ReshardCopy::run_bytes, "Bytes side by side."),
    Optional("loops", &ReshardCopy::loops, "The run again; the outermost first."));

template <>
inline constexpr bool kIsBlock<ReshardGroup> = true;
template <>
inline constexpr Definition kDefinition<ReshardGroup> = {"reshard", "group",
                                                         "Tensors that are copied alike."};
template <>
inline constexpr auto kFields<ReshardGroup> =
    FieldList(Required("tensors", &ReshardGroup::tensors, "Their names."),
              Required("copies", &ReshardGroup::copies, "Of each of them.").Lines());

template <>
inline constexpr bool kIsBlock<ReshardPlan> = true;
template <>
inline constexpr Definition kDefinition<ReshardPlan> = {"reshard", "reshard",
                                                        "How a state goes from one layout to another."};
template <>
inline constexpr auto kFields<ReshardPlan> =
    FieldList(Required("source", &ReshardPlan::source, "Where it is."),
              Required("target", &ReshardPlan::target, "Where it goes."),
              Optional("ranks_per_node", &ReshardPlan::ranks_per_node, "Ranks that share the faster links.")
                  .AtLeast(1)
                  .AtMost(kMostRanks),
              Optional("budget_bytes", &ReshardPlan::budget_bytes, "Staging memory of a rank.").AtLeast(1),
              Required("groups", &ReshardPlan::groups, "The copies.").Lines());

}  // namespace shardplan
