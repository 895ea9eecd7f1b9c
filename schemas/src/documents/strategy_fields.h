// SPDX-License-Identifier: Apache-2.0
// The strategy in JSON (docs/reference/strategy-format.md). Whatever is left out has PyTorch's default.
#pragma once

#include "json/fields.h"
#include "json/types.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<ReshardAfterForward> = {
    "strategy", "reshard_after_forward",
    "FSDP2's reshard_after_forward: a bool, or the size of the smaller mesh to reshard to. Left out: "
    "argument not given."};

template <>
inline constexpr Definition kDefinition<MixedPrecision> = {
    "strategy", "mixed_precision",
    "MixedPrecisionPolicy (fsdp2) or MixedPrecision (fsdp1). A dtype that is left out is None."};
template <>
inline constexpr auto kFields<MixedPrecision> = FieldList(
    Optional("param_dtype", &MixedPrecision::param_dtype, "Of the gathered parameters and the compute."),
    Optional("reduce_dtype", &MixedPrecision::reduce_dtype, "Of the gradient reduction."),
    Optional(
        "keep_param_dtype", &MixedPrecision::keep_param_dtype,
        "fsdp2 of PyTorch 2.15, param_dtype_override_fn: parameters that keep their own dtype, by FQN or "
        "pattern over FQNs."),
    Optional("output_dtype", &MixedPrecision::output_dtype, "fsdp2."),
    Optional(
        "cast_forward_inputs", &MixedPrecision::cast_forward_inputs,
        "Cast the inputs of a unit's forward to param_dtype. Left out: true with fsdp2, false with fsdp1."),
    Optional("cast_root_forward_inputs", &MixedPrecision::cast_root_forward_inputs,
             "fsdp1: cast the inputs of the root's forward, also where cast_forward_inputs is false."),
    Optional("buffer_dtype", &MixedPrecision::buffer_dtype, "fsdp1."),
    Optional("keep_low_precision_grads", &MixedPrecision::keep_low_precision_grads, "fsdp1."),
    Optional("module_classes_to_ignore", &MixedPrecision::module_classes_to_ignore,
             "fsdp1 with a wrap policy: modules of these classes become units of their own in full "
             "precision; \"_BatchNorm\" stands for every batch norm."));

template <>
inline constexpr Definition kDefinition<DataParallelDims> = {
    "strategy", "data_parallel",
    "The mesh dimensions that make up FSDP's own two, outermost first: several are flattened into one."};
template <>
inline constexpr auto kFields<DataParallelDims> =
    FieldList(Optional("shard", &DataParallelDims::shard, "Names of the mesh dimensions sharded over."),
              Optional("replicate", &DataParallelDims::replicate,
                       "Names of the mesh dimensions replicated over (HSDP)."));

template <>
inline constexpr Definition kDefinition<ParameterMeshRule> = {
    "strategy", "parameter_mesh_rule",
    "ShardPlacementResult of shard_placement_fn for the parameters that match; the first rule that matches "
    "counts."};
template <>
inline constexpr auto kFields<ParameterMeshRule> =
    FieldList(Required("parameters", &ParameterMeshRule::parameters,
                       "FQNs, or patterns over FQNs with '*' (within a component) and '?'."),
              Required("data_parallel", &ParameterMeshRule::data_parallel, "Their mesh."),
              Optional("reshard_after_forward", &ParameterMeshRule::reshard_after_forward,
                       "Of these parameters alone; without it as the unit's. PyTorch has no call for it."));

template <>
inline constexpr Definition kDefinition<UnitRule> = {
    "strategy", "unit_rule", "One call of fully_shard or one FSDP wrap, or a rule that makes many."};
template <>
inline constexpr auto kFields<UnitRule> = FieldList(
    Required("modules", &UnitRule::modules,
             "FQNs, patterns over FQNs with '*' (within a component) and '?', or \"class:NAME\"."),
    Optional("group", &UnitRule::group, "All modules make one unit."),
    Optional("reshard_after_forward", &UnitRule::reshard_after_forward, "Of these units."),
    Optional("mixed_precision", &UnitRule::mixed_precision, "Of these units."),
    Optional("cpu_offload", &UnitRule::cpu_offload, "Parameters live in host memory."),
    Optional("data_parallel", &UnitRule::data_parallel, "fsdp2: the unit's own mesh, say of experts."),
    Optional("parameter_meshes", &UnitRule::parameter_meshes,
             "fsdp2 of 2.15: parameters on other meshes than the unit's; each mesh makes a unit of its own.")
        .Lines(),
    Optional("sharding", &UnitRule::sharding, "fsdp1: these units' ShardingStrategy."),
    Optional("backward_prefetch", &UnitRule::backward_prefetch, "fsdp1: these units' BackwardPrefetch."),
    Optional("forward_prefetch", &UnitRule::forward_prefetch,
             "fsdp1: these units prefetch the next one in the forward."));

template <>
inline constexpr Definition kDefinition<PrefetchList> = {"strategy", "prefetch_list",
                                                         "The units that a unit prefetches, in order."};
template <>
inline constexpr auto kFields<PrefetchList> =
    FieldList(Required("unit", &PrefetchList::unit, "FQN of the unit."),
              Required("prefetch", &PrefetchList::prefetch, "FQNs of the units."));

template <>
inline constexpr Definition kDefinition<ShardDimRule> = {
    "strategy", "shard_dim_rule",
    "shard_placement_fn for the parameters that match; the first rule that matches counts."};
template <>
inline constexpr auto kFields<ShardDimRule> =
    FieldList(Required("parameters", &ShardDimRule::parameters,
                       "FQNs, or patterns over FQNs with '*' (within a component) and '?'."),
              Required("dim", &ShardDimRule::dim, "The dimension that is cut; negative: from the end.")
                  .AtLeast(std::numeric_limits<std::int32_t>::min()));

template <>
inline constexpr Definition kDefinition<ExtensionTensor> = {
    "strategy", "extension_tensor", "A tensor that an all-gather extension makes of a parameter."};
template <>
inline constexpr auto kFields<ExtensionTensor> =
    FieldList(Required("dtype", &ExtensionTensor::dtype, "Its dtype."),
              Optional("per_elements", &ExtensionTensor::per_elements,
                       "One element for every so many elements, rounded up.")
                  .AtLeast(1),
              Optional("numel", &ExtensionTensor::numel,
                       "Elements whatever the parameter's size; left out: by per_elements.")
                  .AtMost(kMaxExact));

template <>
inline constexpr Definition kDefinition<ExtensionRule> = {
    "strategy", "extension_rule",
    "fsdp_pre_all_gather and fsdp_post_all_gather of the parameters that match; the first rule that "
    "matches counts."};
template <>
inline constexpr auto kFields<ExtensionRule> = FieldList(
    Required("parameters", &ExtensionRule::parameters,
             "FQNs, or patterns over FQNs with '*' (within a component) and '?'."),
    Required("gathered", &ExtensionRule::gathered, "What is gathered in place of a rank's padded shard."),
    Optional("unsharded", &ExtensionRule::unsharded,
             "What is allocated beside the gathered tensors, of the unsharded parameter's size."));

template <>
inline constexpr Definition kDefinition<AllReduceHook> = {
    "strategy", "all_reduce_hook",
    "set_all_reduce_hook: what is done with the reduced gradients on the all-reduce stream."};
template <>
inline constexpr auto kFields<AllReduceHook> = FieldList(
    Optional("modules", &AllReduceHook::modules, "Units it is set on, as in unit rules. Empty: all."),
    Optional("mesh_dim", &AllReduceHook::mesh_dim, "Mesh dimension that it all-reduces over; \"\": none."),
    Optional("reduce_op", &AllReduceHook::reduce_op, "Of that all-reduce."),
    Optional("divide", &AllReduceHook::divide, "What it divides by; left out: nothing.").Positive(),
    Optional("own_stream", &AllReduceHook::own_stream, "It has a stream of its own (not with HSDP)."));

template <>
inline constexpr bool kIsBlock<Fsdp2Knobs> = true;
template <>
inline constexpr Definition kDefinition<Fsdp2Knobs> = {"strategy", "fsdp2", "Knobs of FSDP2."};
template <>
inline constexpr auto kFields<Fsdp2Knobs> = FieldList(
    Optional("forward_prefetch", &Fsdp2Knobs::forward_prefetch,
             "Units prefetched explicitly in the forward."),
    Optional("backward_prefetch", &Fsdp2Knobs::backward_prefetch,
             "Units prefetched explicitly in the backward; -1: PyTorch's implicit prefetch of one.")
        .AtLeast(-1),
    Optional("forward_prefetch_lists", &Fsdp2Knobs::forward_prefetch_lists,
             "set_modules_to_forward_prefetch.")
        .Lines(),
    Optional("backward_prefetch_lists", &Fsdp2Knobs::backward_prefetch_lists,
             "set_modules_to_backward_prefetch.")
        .Lines(),
    Optional("unshard_async_op", &Fsdp2Knobs::unshard_async_op,
             "set_unshard_in_backward's async all-gathers."),
    Optional("gradient_divide_factor", &Fsdp2Knobs::gradient_divide_factor,
             "set_gradient_divide_factor; left out: not set.")
        .Positive(),
    Optional("force_sum_reduction", &Fsdp2Knobs::force_sum_reduction, "set_force_sum_reduction_for_comms."),
    Optional("shard_dims", &Fsdp2Knobs::shard_dims, "shard_placement_fn.").Lines(),
    Optional("extensions", &Fsdp2Knobs::extensions, "All-gather extensions.").Lines(),
    Optional("all_reduce_hooks", &Fsdp2Knobs::all_reduce_hooks, "set_all_reduce_hook.").Lines(),
    Optional("separate_reduce_scatter_communicator", &Fsdp2Knobs::separate_reduce_scatter_communicator,
             "set_separate_reduce_scatter_group."),
    Optional("reduce_scatter_inputs_in_flight", &Fsdp2Knobs::reduce_scatter_inputs_in_flight,
             "set_reduce_scatter_max_input_buffers.")
        .AtLeast(1),
    Optional("allocate_memory_from_process_group", &Fsdp2Knobs::allocate_memory_from_process_group,
             "set_allocate_memory_from_process_group_for_comm."),
    Optional("post_optim_event", &Fsdp2Knobs::post_optim_event,
             "set_post_optim_event with an event recorded after every optimizer step."),
    Optional("part_after_backward", &Fsdp2Knobs::part_after_backward,
             "set_reshard_after_backward(False) leaves units with an integer reshard_after_forward on their "
             "smaller mesh after the backward, and not whole. Not in PyTorch."),
    Optional(
        "inner_reduce_ranks", &Fsdp2Knobs::inner_reduce_ranks,
        "Reductions in two levels: over so many neighbouring ranks of the shards first, then over the "
        "ranks that have the same place in theirs. set_requires_all_reduce(False) leaves the second to a "
        "later micro-batch. 0: in one. Not in PyTorch.")
        .AtLeast(0),
    Optional("shard_root", &Fsdp2Knobs::shard_root,
             "fully_shard is called on the root, too; false: each outermost unit is a root of its own."),
    Optional("shared_comm_contexts", &Fsdp2Knobs::shared_comm_contexts,
             "share_comm_ctx: lists of roots, by FQNs, patterns or class:NAME as in units.")
        .Lines());

template <>
inline constexpr Definition kDefinition<SizeBasedWrap> = {"strategy", "size_based_wrap",
                                                          "size_based_auto_wrap_policy. Classes by name."};
template <>
inline constexpr auto kFields<SizeBasedWrap> =
    FieldList(Optional("min_num_params", &SizeBasedWrap::min_num_params,
                       "Elements not yet in a unit from which a module becomes one."),
              Optional("force_leaf_modules", &SizeBasedWrap::force_leaf_modules,
                       "Classes below which nothing becomes a unit."),
              Optional("exclude_wrap_modules", &SizeBasedWrap::exclude_wrap_modules,
                       "Classes that do not become units themselves."));

template <>
inline constexpr Definition kDefinition<Fsdp1Knobs> = {"strategy", "fsdp1", "Knobs of FSDP1."};
template <>
inline constexpr auto kFields<Fsdp1Knobs> = FieldList(
    Optional("sharding", &Fsdp1Knobs::sharding, "ShardingStrategy."),
    Optional("backward_prefetch", &Fsdp1Knobs::backward_prefetch, "BackwardPrefetch."),
    Optional("forward_prefetch", &Fsdp1Knobs::forward_prefetch, "Prefetch the next unit in the forward."),
    Optional("limit_all_gathers", &Fsdp1Knobs::limit_all_gathers, "The rate limiter."),
    Optional("use_orig_params", &Fsdp1Knobs::use_orig_params,
             "Views of the flat parameter as the original parameters."),
    Optional("full_precision_in_eval", &Fsdp1Knobs::full_precision_in_eval,
             "FSDP_USE_FULL_PREC_IN_EVAL=1: forwards in evaluation mode gather the original dtype."),
    Optional("validate_execution_order", &Fsdp1Knobs::validate_execution_order,
             "What TORCH_DISTRIBUTED_DEBUG=DETAIL adds: all ranks compare the units of the first iteration's "
             "forwards."),
    Optional("size_based_wrap", &Fsdp1Knobs::size_based_wrap, "Units by size; left out: none."),
    Optional("ignored_modules", &Fsdp1Knobs::ignored_modules,
             "Modules that are left alone, as in a unit rule."),
    Optional("comm_hook", &Fsdp1Knobs::comm_hook, "register_comm_hook."),
    Optional("gradient_predivide_factor", &Fsdp1Knobs::gradient_predivide_factor,
             "Gradients are divided by it before they are reduced; left out: PyTorch's choice.")
        .Positive(),
    Optional("gradient_postdivide_factor", &Fsdp1Knobs::gradient_postdivide_factor,
             "Gradients are divided by it after they are reduced; left out: PyTorch's choice.")
        .Positive());

template <>
inline constexpr Definition kDefinition<SavedOperator> = {
    .says = "An operator whose results a checkpointed module keeps."};
template <>
inline constexpr auto kFields<SavedOperator> =
    FieldList(Required("name", &SavedOperator::name, "As the trace calls it."),
              Optional("recompute_every", &SavedOperator::recompute_every,
                       "Every so many-th of a module's is run again all the same; 0: none."));

template <>
inline constexpr Definition kDefinition<CheckpointRule> = {
    .says = "Activation checkpointing applied to the trace."};
template <>
inline constexpr auto kFields<CheckpointRule> = FieldList(
    Required("modules", &CheckpointRule::modules, "Which modules are recomputed, as in a unit rule."),
    Optional("early_stop", &CheckpointRule::early_stop, "Recomputation ends with the last saved tensor."),
    Optional("every", &CheckpointRule::every, "Of those modules every so many-th.").AtLeast(1),
    Optional("save", &CheckpointRule::save, "Operators that are not run again."));

template <>
inline constexpr Definition kDefinition<ActivationOffload> = {
    .says = "Activations in host memory between forward and backward."};
template <>
inline constexpr auto kFields<ActivationOffload> =
    FieldList(Required("modules", &ActivationOffload::modules,
                       "Whose, as in a unit rule: modules of which units are made, or in them."),
              Optional("every", &ActivationOffload::every,
                       "Of these units every so many-th, in the order of their forwards.")
                  .AtLeast(1),
              Optional("min_bytes", &ActivationOffload::min_bytes, "Smaller tensors stay on the device."));

template <>
inline constexpr Definition kDefinition<MatrixRule> = {
    .says = "Where Muon has the matrices that match whole; no two rules match one."};
template <>
inline constexpr auto kFields<MatrixRule> = FieldList(
    Optional("parameters", &MatrixRule::parameters, "FQNs or patterns; left out: all the rest."),
    Optional("compute", &MatrixRule::compute,
             "sharded: nowhere, as torch.optim.Muon does on DTensors. owned (left out): on one rank."),
    Optional("over_replicas", &MatrixRule::over_replicas,
             "owned: also over the replicas of HSDP; left out: each replica computes all."),
    Optional("block_rows", &MatrixRule::block_rows,
             "owned: every so many rows are a matrix; 0: all are one."),
    Optional("owner", &MatrixRule::owner,
             "owned: by this rank of the group; left out: by the one with the least work."));

template <>
inline constexpr Definition kDefinition<Muon> = {
    .says = "torch.optim.Muon for some parameters; the kind of the optimizer steps the rest."};
template <>
inline constexpr auto kFields<Muon> = FieldList(
    Optional("matrices", &Muon::matrices, "FQNs or patterns. Left out: those that the trace marks."),
    Optional("nesterov", &Muon::nesterov, "Nesterov momentum."),
    Optional("ns_steps", &Muon::ns_steps, "Newton-Schulz iterations.").AtLeast(1),
    Optional("compute", &Muon::compute, "Where matrices are whole; one that no rule matches is sharded."),
    Optional(
        "buckets", &Muon::buckets,
        "FQNs or patterns of the matrices that are exchanged together, in order; what none matches comes "
        "last, together."),
    Optional(
        "dist_muon", &Muon::dist_muon,
        "As torchtitan's DistMuon: exchanged in the parameters' dtype, updated on the exchange's stream."),
    Optional(
        "begin_in_backward", &Muon::begin_in_backward,
        "Exchanges begin behind the reduction of the last of their gradients; for loops that do not clip."));

template <>
inline constexpr Definition kDefinition<Optimizer> = {.says = "The optimizer."};
template <>
inline constexpr auto kFields<Optimizer> = FieldList(
    Optional("kind", &Optimizer::kind, "Which."),
    Optional("implementation", &Optimizer::implementation,
             "How PyTorch runs it. Left out: as it does by default, foreach, adafactor in a loop."),
    Optional("momentum", &Optimizer::momentum, "sgd only."),
    Optional("nesterov", &Optimizer::nesterov, "sgd only, with momentum."),
    Optional("weight_decay", &Optimizer::weight_decay, "sgd and adam: a decay is added to the gradients."),
    Optional("amsgrad", &Optimizer::amsgrad, "adam and adamw only."),
    Optional("capturable", &Optimizer::capturable, "adam and adamw only: step counts on the device."),
    Optional("maximize", &Optimizer::maximize, "Gradients are negated first."),
    Optional("in_backward", &Optimizer::in_backward,
             "A parameter is stepped as soon as its gradient is reduced."),
    Optional("muon", &Optimizer::muon, "Which parameters Muon steps; left out: none."));

// ---- the training loop ----
template <>
inline constexpr std::string_view kTag<ForwardCall> = "forward";
template <>
inline constexpr Definition kDefinition<ForwardCall> = {.says = "Forward and loss of a micro-batch."};
template <>
inline constexpr auto kFields<ForwardCall> =
    FieldList(Optional("microbatch", &ForwardCall::microbatch, "Which micro-batch."),
              Optional("trace", &ForwardCall::trace, "Which forward of the trace."),
              Optional("training", &ForwardCall::training,
                       "Modules are in training mode; left out: as gradients are enabled."));

template <>
inline constexpr std::string_view kTag<BackwardCall> = "backward";
template <>
inline constexpr Definition kDefinition<BackwardCall> = {.says = "One backward."};
template <>
inline constexpr auto kFields<BackwardCall> =
    FieldList(Optional("microbatches", &BackwardCall::microbatches, "Micro-batches that it covers."),
              Optional("trace", &BackwardCall::trace, "Which backward of the trace."));

template <>
inline constexpr std::string_view kTag<OptimizerStepCall> = "optimizer_step";
template <>
inline constexpr Definition kDefinition<OptimizerStepCall> = {.says = "optimizer.step()."};
template <>
inline constexpr auto kFields<OptimizerStepCall> = FieldList();

template <>
inline constexpr std::string_view kTag<ZeroGradCall> = "zero_grad";
template <>
inline constexpr Definition kDefinition<ZeroGradCall> = {.says = "optimizer.zero_grad()."};
template <>
inline constexpr auto kFields<ZeroGradCall> = FieldList();

template <>
inline constexpr std::string_view kTag<ModuleCall> = "module";
template <>
inline constexpr Definition kDefinition<ModuleCall> = {.says = "A setter or user call on a module."};
template <>
inline constexpr auto kFields<ModuleCall> = FieldList(
    Required("method", &ModuleCall::method, "PyTorch's name of the method, \"set_requires_gradient_sync\"."),
    Required("module", &ModuleCall::module, "FQN of the module."),
    Optional("value", &ModuleCall::value, "Its argument, when it has one."),
    Optional("recurse", &ModuleCall::recurse, "Whether it applies to submodules."),
    Optional("number", &ModuleCall::number, "Its argument, when that is a number.").Positive(),
    Optional("modules", &ModuleCall::modules, "Its argument, when that is a list of modules: FQNs."),
    Optional("flags", &ModuleCall::flags, "Further arguments that are not at their default."));

template <>
inline constexpr Definition kDefinition<ProgramCall> = {"strategy", "call", "A call of the training loop."};

template <>
inline constexpr Definition kDefinition<StrategyMeshDim> = {"strategy", "mesh_dim",
                                                            "A dimension of the mesh."};
template <>
inline constexpr auto kFields<StrategyMeshDim> =
    FieldList(Required("name", &StrategyMeshDim::name,
                       "\"shard\", \"replicate\", or any other: \"tensor\", \"expert\", \"dp_shard\"."),
              Required("size", &StrategyMeshDim::size, "Ranks along it.").AtLeast(1));

template <>
inline constexpr bool kIsBlock<Strategy> = true;
template <>
inline constexpr Definition kDefinition<Strategy> = {
    "strategy", "strategy",
    "Which policy, units, knobs and training loop. Whatever is left out has PyTorch's default."};
template <>
inline constexpr auto kFields<Strategy> = FieldList(
    Required("policy", &Strategy::policy,
             "\"fsdp2\", \"fsdp1\", or the name of a policy that is not built in."),
    Optional(
        "pytorch", &Strategy::pytorch,
        "The release of PyTorch whose FSDP is planned. Left out: the one that recorded the trace, else the "
        "newest."),
    Optional("mesh", &Strategy::mesh,
             "Outermost first; the ranks of the last are adjacent. Empty: one shard dimension of all ranks."),
    Optional("data_parallel", &Strategy::data_parallel,
             "For units that give none. Left out: the dimensions named shard and replicate."),
    Optional("units", &Strategy::units,
             "In call order, the root's rule last. Empty: one unit per block class and the root.")
        .Lines(),
    Optional("mixed_precision", &Strategy::mixed_precision, "For units that give none."),
    Optional("reshard_after_forward", &Strategy::reshard_after_forward, "For units that give none."),
    Optional("cpu_offload", &Strategy::cpu_offload, "Parameters live in host memory."),
    Optional("pin_memory", &Strategy::pin_memory, "That memory is pinned."),
    Optional("ignored_parameters", &Strategy::ignored_parameters, "FQNs that are left alone.").Lines(),
    Optional("fsdp2", &Strategy::fsdp2, "Knobs of policy fsdp2."),
    Optional("fsdp1", &Strategy::fsdp1, "Knobs of policy fsdp1."),
    Optional("policy_knobs", &Strategy::policy_knobs,
             "Knobs of a policy that is not built in, by name: its library says which there are."),
    Optional("checkpoint", &Strategy::checkpoint,
             "Activation checkpointing applied to the trace; left out: none."),
    Optional("activation_offload", &Strategy::activation_offload,
             "Activations in host memory between forward and backward; left out: none."),
    Optional("compile", &Strategy::compile, "Elementwise operators are fused as torch.compile does."),
    Optional("alloc_conf", &Strategy::alloc_conf,
             "Settings of the caching allocator, as PYTORCH_CUDA_ALLOC_CONF has them. They decide what is "
             "reserved, and nothing of the plan."),
    Optional("optimizer", &Strategy::optimizer, "Which optimizer steps, and how."),
    Optional("setup", &Strategy::setup, "Calls before the first step.").Lines(),
    Optional("program", &Strategy::program,
             "The steps as run, each a list of calls; the last repeats for ever. Empty: forward 0, backward "
             "[0], optimizer_step, zero_grad.")
        .Lines());

// strategy_json.cc defines them.
extern template const JsonObjectType& JsonObjectTypeOf<Strategy>();
extern template const JsonObjectType& JsonObjectTypeOf<StrategyMeshDim>();

}  // namespace shardplan
