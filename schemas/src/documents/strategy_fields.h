// The strategy in JSON (docs/strategy-format.md). Whatever is left out has PyTorch's default.
#pragma once

#include "json/json_fields.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

template <>
inline constexpr auto kFields<MixedPrecision> =
    FieldList(Optional("param_dtype", &MixedPrecision::param_dtype),
              Optional("reduce_dtype", &MixedPrecision::reduce_dtype),
              Optional("output_dtype", &MixedPrecision::output_dtype),
              Optional("cast_forward_inputs", &MixedPrecision::cast_forward_inputs),
              Optional("cast_root_forward_inputs", &MixedPrecision::cast_root_forward_inputs),
              Optional("buffer_dtype", &MixedPrecision::buffer_dtype),
              Optional("keep_low_precision_grads", &MixedPrecision::keep_low_precision_grads),
              Optional("module_classes_to_ignore", &MixedPrecision::module_classes_to_ignore));

template <>
inline constexpr auto kFields<DataParallelDims> = FieldList(Optional("shard", &DataParallelDims::shard),
                                                            Optional("replicate",
                                                                     &DataParallelDims::replicate));

template <>
inline constexpr auto kFields<UnitRule> = FieldList(
    Required("modules", &UnitRule::modules), Optional("group", &UnitRule::group),
    Optional("reshard_after_forward", &UnitRule::reshard_after_forward),
    Optional("mixed_precision", &UnitRule::mixed_precision), Optional("cpu_offload", &UnitRule::cpu_offload),
    Optional("data_parallel", &UnitRule::data_parallel), Optional("sharding", &UnitRule::sharding),
    Optional("backward_prefetch", &UnitRule::backward_prefetch),
    Optional("forward_prefetch", &UnitRule::forward_prefetch));

template <>
inline constexpr auto kFields<PrefetchList> = FieldList(Required("unit", &PrefetchList::unit),
                                                        Required("prefetch", &PrefetchList::prefetch));

template <>
inline constexpr auto kFields<ShardDimRule> =
    FieldList(Required("parameters", &ShardDimRule::parameters),
              Required("dim", &ShardDimRule::dim).AtLeast(std::numeric_limits<std::int32_t>::min()));

template <>
inline constexpr auto kFields<ExtensionTensor> =
    FieldList(Required("dtype", &ExtensionTensor::dtype),
              Optional("per_elements", &ExtensionTensor::per_elements).AtLeast(1),
              Optional("numel", &ExtensionTensor::numel).AtMost(kMaxExact));

template <>
inline constexpr auto kFields<ExtensionRule> = FieldList(Required("parameters", &ExtensionRule::parameters),
                                                         Required("gathered", &ExtensionRule::gathered),
                                                         Optional("unsharded", &ExtensionRule::unsharded));

template <>
inline constexpr auto kFields<AllReduceHook> = FieldList(
    Optional("modules", &AllReduceHook::modules), Optional("mesh_dim", &AllReduceHook::mesh_dim),
    Optional("reduce_op", &AllReduceHook::reduce_op), Optional("divide", &AllReduceHook::divide).Positive(),
    Optional("own_stream", &AllReduceHook::own_stream));

template <>
inline constexpr bool kIsBlock<Fsdp2Knobs> = true;
template <>
inline constexpr auto kFields<Fsdp2Knobs> = FieldList(
    Optional("forward_prefetch", &Fsdp2Knobs::forward_prefetch),
    Optional("backward_prefetch", &Fsdp2Knobs::backward_prefetch).AtLeast(-1),
    Optional("forward_prefetch_lists", &Fsdp2Knobs::forward_prefetch_lists).Lines(),
    Optional("backward_prefetch_lists", &Fsdp2Knobs::backward_prefetch_lists).Lines(),
    Optional("unshard_async_op", &Fsdp2Knobs::unshard_async_op),
    Optional("gradient_divide_factor", &Fsdp2Knobs::gradient_divide_factor).Positive(),
    Optional("force_sum_reduction", &Fsdp2Knobs::force_sum_reduction),
    Optional("shard_dims", &Fsdp2Knobs::shard_dims).Lines(),
    Optional("extensions", &Fsdp2Knobs::extensions).Lines(),
    Optional("all_reduce_hooks", &Fsdp2Knobs::all_reduce_hooks).Lines(),
    Optional("separate_reduce_scatter_communicator", &Fsdp2Knobs::separate_reduce_scatter_communicator),
    Optional("reduce_scatter_inputs_in_flight", &Fsdp2Knobs::reduce_scatter_inputs_in_flight).AtLeast(1),
    Optional("allocate_memory_from_process_group", &Fsdp2Knobs::allocate_memory_from_process_group),
    Optional("post_optim_event", &Fsdp2Knobs::post_optim_event),
    Optional("shard_root", &Fsdp2Knobs::shard_root),
    Optional("shared_comm_contexts", &Fsdp2Knobs::shared_comm_contexts).Lines());

template <>
inline constexpr auto kFields<SizeBasedWrap> =
    FieldList(Optional("min_num_params", &SizeBasedWrap::min_num_params),
              Optional("force_leaf_modules", &SizeBasedWrap::force_leaf_modules),
              Optional("exclude_wrap_modules", &SizeBasedWrap::exclude_wrap_modules));

template <>
inline constexpr auto kFields<Fsdp1Knobs> = FieldList(
    Optional("sharding", &Fsdp1Knobs::sharding),
    Optional("backward_prefetch", &Fsdp1Knobs::backward_prefetch),
    Optional("forward_prefetch", &Fsdp1Knobs::forward_prefetch),
    Optional("limit_all_gathers", &Fsdp1Knobs::limit_all_gathers),
    Optional("use_orig_params", &Fsdp1Knobs::use_orig_params),
    Optional("full_precision_in_eval", &Fsdp1Knobs::full_precision_in_eval),
    Optional("validate_execution_order", &Fsdp1Knobs::validate_execution_order),
    Optional("size_based_wrap", &Fsdp1Knobs::size_based_wrap),
    Optional("ignored_modules", &Fsdp1Knobs::ignored_modules), Optional("comm_hook", &Fsdp1Knobs::comm_hook),
    Optional("gradient_predivide_factor", &Fsdp1Knobs::gradient_predivide_factor).Positive(),
    Optional("gradient_postdivide_factor", &Fsdp1Knobs::gradient_postdivide_factor).Positive());

template <>
inline constexpr auto kFields<CheckpointRule> = FieldList(Required("modules", &CheckpointRule::modules),
                                                          Optional("early_stop",
                                                                   &CheckpointRule::early_stop));

template <>
inline constexpr auto kFields<Optimizer> =
    FieldList(Optional("kind", &Optimizer::kind), Optional("implementation", &Optimizer::implementation),
              Optional("momentum", &Optimizer::momentum), Optional("nesterov", &Optimizer::nesterov),
              Optional("weight_decay", &Optimizer::weight_decay), Optional("amsgrad", &Optimizer::amsgrad),
              Optional("capturable", &Optimizer::capturable), Optional("maximize", &Optimizer::maximize),
              Optional("in_backward", &Optimizer::in_backward));

// ---- the training loop ----
template <>
inline constexpr std::string_view kTag<ForwardCall> = "forward";
template <>
inline constexpr auto kFields<ForwardCall> = FieldList(Optional("microbatch", &ForwardCall::microbatch),
                                                       Optional("trace", &ForwardCall::trace),
                                                       Optional("training", &ForwardCall::training));

template <>
inline constexpr std::string_view kTag<BackwardCall> = "backward";
template <>
inline constexpr auto kFields<BackwardCall> = FieldList(Optional("microbatches", &BackwardCall::microbatches),
                                                        Optional("trace", &BackwardCall::trace));

template <>
inline constexpr std::string_view kTag<OptimizerStepCall> = "optimizer_step";
template <>
inline constexpr auto kFields<OptimizerStepCall> = FieldList();

template <>
inline constexpr std::string_view kTag<ZeroGradCall> = "zero_grad";
template <>
inline constexpr auto kFields<ZeroGradCall> = FieldList();

template <>
inline constexpr std::string_view kTag<ModuleCall> = "module";
template <>
inline constexpr auto kFields<ModuleCall> = FieldList(Required("method", &ModuleCall::method),
                                                      Required("module", &ModuleCall::module),
                                                      Optional("value", &ModuleCall::value),
                                                      Optional("recurse", &ModuleCall::recurse),
                                                      Optional("number", &ModuleCall::number).Positive(),
                                                      Optional("modules", &ModuleCall::modules),
                                                      Optional("flags", &ModuleCall::flags));

template <>
inline constexpr auto kFields<StrategyMeshDim> =
    FieldList(Required("name", &StrategyMeshDim::name), Required("size", &StrategyMeshDim::size).AtLeast(1));

template <>
inline constexpr bool kIsBlock<Strategy> = true;
template <>
inline constexpr auto kFields<Strategy> = FieldList(
    Required("policy", &Strategy::policy), Optional("mesh", &Strategy::mesh),
    Optional("data_parallel", &Strategy::data_parallel), Optional("units", &Strategy::units).Lines(),
    Optional("mixed_precision", &Strategy::mixed_precision),
    Optional("reshard_after_forward", &Strategy::reshard_after_forward),
    Optional("cpu_offload", &Strategy::cpu_offload), Optional("pin_memory", &Strategy::pin_memory),
    Optional("ignored_parameters", &Strategy::ignored_parameters).Lines(),
    Optional("fsdp2", &Strategy::fsdp2), Optional("fsdp1", &Strategy::fsdp1),
    Optional("checkpoint", &Strategy::checkpoint), Optional("optimizer", &Strategy::optimizer),
    Optional("setup", &Strategy::setup).Lines(), Optional("program", &Strategy::program).Lines());

}  // namespace shardplan
