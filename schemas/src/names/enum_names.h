// SPDX-License-Identifier: Apache-2.0
// The names that enumerators have in the documents. One table per enum, in the enumerators' order.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/recording.h"

namespace shardplan {

template <typename Enum>
inline constexpr std::nullptr_t kEnumNames = nullptr;

#define SHARDPLAN_ENUM_NAMES(Enum, ...) \
  template <>                           \
  inline constexpr auto kEnumNames<Enum> = std::to_array<std::string_view>({__VA_ARGS__})

SHARDPLAN_ENUM_NAMES(DType, "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
                     "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
                     "complex32", "uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e5m2fnuz",
                     "float8_e8m0fnu");
SHARDPLAN_ENUM_NAMES(PyTorchVersion, "2.11", "2.15");
SHARDPLAN_ENUM_NAMES(CollectiveKind, "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast",
                     "reduce", "gather", "scatter", "send", "recv");
SHARDPLAN_ENUM_NAMES(CollectiveAlgorithm, "ring", "tree", "pat", "nvls");
SHARDPLAN_ENUM_NAMES(ClusterFigure, "matmul", "attention", "vector", "memory", "kernel_overhead", "host",
                     "host_memory", "host_link", "collectives", "inner_link", "network", "compute_slowdown",
                     "communication_slowdown");
SHARDPLAN_ENUM_NAMES(FigureOrigin, "measured", "fitted", "data_sheet", "guess");
SHARDPLAN_ENUM_NAMES(CopyDirection, "host_to_device", "device_to_host", "device_to_device", "host_to_host");
SHARDPLAN_ENUM_NAMES(ModulePart, "base_model", "layer", "input_embeddings", "output_embeddings");
SHARDPLAN_ENUM_NAMES(StorageRole, "input", "buffer", "saved", "forward_temp", "output", "loss_saved",
                     "loss_temp", "backward_temp", "recompute", "parameter_grad", "optimizer_temp");
SHARDPLAN_ENUM_NAMES(Fsdp1Sharding, "full_shard", "shard_grad_op", "no_shard", "hybrid_shard",
                     "hybrid_shard_zero2");
SHARDPLAN_ENUM_NAMES(Fsdp1BackwardPrefetch, "none", "backward_pre", "backward_post");
SHARDPLAN_ENUM_NAMES(Fsdp1CommHook, "none", "allreduce_hook", "reduce_scatter_hook", "fp16_compress_hook",
                     "bf16_compress_hook");
SHARDPLAN_ENUM_NAMES(OptimizerImplementation, "for_loop", "foreach", "fused");
SHARDPLAN_ENUM_NAMES(MatrixCompute, "sharded", "owned", "replicated");
SHARDPLAN_ENUM_NAMES(LayoutKind, "per_parameter", "flat");
SHARDPLAN_ENUM_NAMES(MemoryKind, "device", "pinned_host", "host");
SHARDPLAN_ENUM_NAMES(ReduceOp, "sum", "average");
SHARDPLAN_ENUM_NAMES(SegmentPhase, "forward", "loss", "backward", "recompute", "optimizer");
SHARDPLAN_ENUM_NAMES(ProcedureKind, "unshard", "reshard", "unshard_full_precision", "reshard_full_precision",
                     "reduce", "accumulate", "accumulate_again", "reduce_accumulated", "reduce_kept",
                     "reduce_partial");
SHARDPLAN_ENUM_NAMES(TriggerKind, "step_begin", "lazy_init", "pre_forward", "post_forward", "pre_backward",
                     "post_backward", "backward_end", "optimizer_step", "zero_grad", "user_call", "step_end");
SHARDPLAN_ENUM_NAMES(PyTorchFault, "fsdp1_offloaded_gradient_replaced", "fsdp1_replicas_not_added",
                     "fsdp1_not_gathered_again", "fsdp1_lost_gradient", "fsdp1_missed_hook",
                     "fsdp1_mixed_with_reduced", "fsdp1_dropped_unreduced", "fsdp1_kept_unused",
                     "fsdp1_gradients_grow", "fsdp2_no_unshard_in_backward", "fsdp2_prefetched_by_other_root",
                     "fsdp2_divided_twice", "fsdp2_hook_input_freed", "fsdp2_group_not_unsharded",
                     "fsdp2_gradients_grow", "fsdp2_partial_sum_left", "fsdp2_outdated");

SHARDPLAN_ENUM_NAMES(VariantOutcome, "chosen", "slower", "does_not_fit", "cannot_fit", "cannot_win",
                     "refused", "not_tried");

#undef SHARDPLAN_ENUM_NAMES

// The names that the rows of a vocabulary's table have.
template <typename Table>
consteval auto NamesInTable(const Table& table) {
  std::array<std::string_view, std::tuple_size_v<Table>> names;
  for (std::size_t k = 0; k < names.size(); ++k) names[k] = table[k].name;
  return names;
}
template <>
inline constexpr auto kEnumNames<InstructionKind> = NamesInTable(kInstructionSet);
template <>
inline constexpr auto kEnumNames<BufferRole> = NamesInTable(kBufferRoleTable);
template <>
inline constexpr auto kEnumNames<OptimizerKind> = NamesInTable(kOptimizers);

// "?" for a value that is no enumerator.
template <typename Enum>
constexpr std::string_view EnumName(Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return index < kEnumNames<Enum>.size() ? kEnumNames<Enum>[index] : "?";
}

template <typename Enum>
constexpr std::optional<Enum> EnumFromName(std::string_view name) {
  for (std::size_t i = 0; i < kEnumNames<Enum>.size(); ++i) {
    if (kEnumNames<Enum>[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

// "one of sum, average", for error messages.
template <typename Enum>
std::string EnumChoices() {
  std::string choices = "one of ";
  for (std::size_t i = 0; i < kEnumNames<Enum>.size(); ++i) {
    if (i > 0) choices += ", ";
    choices += kEnumNames<Enum>[i];
  }
  return choices;
}

}  // namespace shardplan
