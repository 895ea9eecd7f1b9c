// SPDX-License-Identifier: Apache-2.0
// The trace in JSON (docs/reference/trace-format.md).
#pragma once

#include "json/fields.h"
#include "json/types.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<DType> = {"trace", "dtype", "Element type, as torch names it."};

template <>
inline constexpr Definition kDefinition<CommunicatorDim> = {.says = "A digit of the rank."};
template <>
inline constexpr auto kFields<CommunicatorDim> =
    FieldList(Required("size", &CommunicatorDim::size, "Ranks along it.").AtLeast(1),
              Required("stride", &CommunicatorDim::stride, "Ranks between neighbours.").AtLeast(1));

template <>
inline constexpr Definition kDefinition<Communicator> = {
    "trace", "communicator", "The ranks that differ only in the digit (rank / stride) mod size."};
template <>
inline constexpr auto kFields<Communicator> =
    FieldList(Required("name", &Communicator::name, "\"shard\"."),
              Required("size", &Communicator::size, "Ranks of a group.").AtLeast(1),
              Optional("stride", &Communicator::stride, "Distance of neighbours.").AtLeast(1),
              Optional("dims", &Communicator::dims,
                       "Digits of a group flattened from dimensions that do not lie side by side, the most "
                       "significant first; size is their product and stride that of the last."));

template <>
inline constexpr Definition kDefinition<NamedParameter> = {
    .says = "A parameter that the module registers itself."};
template <>
inline constexpr auto kFields<NamedParameter> = FieldList(
    Required("name", &NamedParameter::name, "Attribute name in the module."),
    Required("parameter", &NamedParameter::parameter, "Index into parameters.").Ref(RefKind::kParameter));

template <>
inline constexpr Definition kDefinition<Module> = {"trace", "module", "A module of the model."};
template <>
inline constexpr auto kFields<Module> = FieldList(
    Required("fqn", &Module::fqn, "Fully qualified name; \"\" for the root."),
    Required("class_name", &Module::class_name, "Name of its class."),
    Optional("children", &Module::children,
             "Names of its children in registration order; a child's FQN is fqn + \".\" + name."),
    Optional("parameters", &Module::parameters,
             "Direct parameters in registration order. Several modules name the same one when it is tied."),
    Optional("buffers", &Module::buffers, "Names of its direct buffers."),
    Optional("same_module_as", &Module::same_module_as,
             "FQN first seen of a module that is registered twice; \"\" otherwise."),
    Optional("compiled", &Module::compiled,
             "torch.compile's backend of a module that runs as compiled graphs; \"\" otherwise. Of modules "
             "inside of it there are no events."),
    Optional("parts", &Module::parts, "What the model says that it is; frameworks make units by it."));

template <>
inline constexpr Definition kDefinition<ParameterPlacement> = {
    "trace", "placement",
    "Where a parameter lies on one mesh dimension that is not FSDP's own (a DTensor's placement there)."};
template <>
inline constexpr auto kFields<ParameterPlacement> = FieldList(
    Required("mesh_dim", &ParameterPlacement::mesh_dim, "Name of the mesh dimension."),
    Required("size", &ParameterPlacement::size, "Ranks along it.").AtLeast(1),
    Optional("dim", &ParameterPlacement::dim,
             "The parameter's dimension that is cut along it; -1: replicated.")
        .OrNone(),
    Optional("grad_partial", &ParameterPlacement::grad_partial,
             "Replicated: the gradient comes as a partial sum, to be reduced over this dimension."));

template <>
inline constexpr Definition kDefinition<Parameter> = {"trace", "parameter",
                                                      "A parameter, in the order of named_parameters()."};
template <>
inline constexpr auto kFields<Parameter> = FieldList(
    Required("fqn", &Parameter::fqn, "The name first seen."),
    Required("shape", &Parameter::shape, "Unsharded shape; what this rank has of it where placements cut it.")
        .Shape(),
    Required("dtype", &Parameter::dtype, "Its dtype."),
    Optional("requires_grad", &Parameter::requires_grad, "Whether a gradient is computed for it."),
    Optional("grad_dtype", &Parameter::grad_dtype,
             "Of its gradients (Tensor.grad_dtype), where it is not the parameter's."),
    Optional("any_grad_dtype", &Parameter::any_grad_dtype,
             "Its gradients stay as autograd makes them (Tensor.grad_dtype is None)."),
    Optional("shared_with", &Parameter::shared_with, "The other FQNs of a tied parameter."),
    Optional("placements", &Parameter::placements, "Of a DTensor parameter, outermost mesh dimension first."),
    Optional("muon", &Parameter::muon, "Muon steps it, unless a strategy names others."));

template <>
inline constexpr Definition kDefinition<ModuleBuffer> = {"trace", "buffer", "A module buffer."};
template <>
inline constexpr auto kFields<ModuleBuffer> =
    FieldList(Required("fqn", &ModuleBuffer::fqn, "Fully qualified name."),
              Required("shape", &ModuleBuffer::shape, "Its shape.").Shape(),
              Required("dtype", &ModuleBuffer::dtype, "Its dtype."),
              Optional("persistent", &ModuleBuffer::persistent, "Whether the state_dict has it."),
              Optional("storage", &ModuleBuffer::storage, "Its storage id when operators read it. -1: none.")
                  .OrNone()
                  .Storage());

template <>
inline constexpr Definition kDefinition<Tensor> = {
    "trace", "tensor", "A tensor that crosses a module border. The same position is the same tensor object."};
template <>
inline constexpr auto kFields<Tensor> = FieldList(
    Required("shape", &Tensor::shape, "Its shape.").Shape(), Required("dtype", &Tensor::dtype, "Its dtype."),
    Optional("requires_grad", &Tensor::requires_grad, "Whether autograd tracks it."),
    Optional(
        "may_require_grad", &Tensor::may_require_grad,
        "Of a tensor that needs no gradient: whether it would if every parameter did. Left out: not known."),
    Optional(
        "in_loss", &Tensor::in_loss,
        "Of a tensor that needs no gradient: whether the loss depended on it then. Left out: not known."),
    Optional("storage", &Tensor::storage, "Its storage id. -1: none.").OrNone().Storage());

template <>
inline constexpr Definition kDefinition<TraceInput> = {"trace", "input",
                                                       "A tensor of the batch, alive before the step."};
template <>
inline constexpr auto kFields<TraceInput> =
    FieldList(Required("name", &TraceInput::name, "Name of the argument."),
              Required("shape", &TraceInput::shape, "Its shape.").Shape(),
              Required("dtype", &TraceInput::dtype, "Its dtype."),
              Optional("storage", &TraceInput::storage, "Its storage id. -1: none.").OrNone().Storage());

// ---- events: arrays ----
template <>
inline constexpr std::string_view kTag<EnterEvent> = "enter";
template <>
inline constexpr Definition kDefinition<EnterEvent> = {.says = "A module's forward is entered."};
template <>
inline constexpr auto kFields<EnterEvent> =
    FieldList(Required("module", &EnterEvent::module, "Module: index into modules.").Ref(RefKind::kModule),
              Required("inputs", &EnterEvent::inputs, "Tensors found in args and kwargs, flattened in order.")
                  .Ref(RefKind::kTensor));

template <>
inline constexpr std::string_view kTag<ExitEvent> = "exit";
template <>
inline constexpr Definition kDefinition<ExitEvent> = {.says = "A module's forward is left."};
template <>
inline constexpr auto kFields<ExitEvent> =
    FieldList(Required("module", &ExitEvent::module, "Module: index into modules.").Ref(RefKind::kModule),
              Required("outputs", &ExitEvent::outputs, "Tensors of its output, flattened in order.")
                  .Ref(RefKind::kTensor));

template <>
inline constexpr Definition kDefinition<ModelCollective> = {
    "trace", "model_collective", "The part of an operator that is a collective of the model's own."};
template <>
inline constexpr auto kFields<ModelCollective> = FieldList(
    Required("kind", &ModelCollective::kind, "Kind of collective."),
    Required(
        "communicator", &ModelCollective::communicator,
        "Communicator: index into communicators. In optimizer_steps -1: the ranks that the matrix is cut "
        "over; -2: its replicas; -3: both together.")
        .Ref(RefKind::kCommunicator)
        .AtLeast(kOfBoth),
    Required("size_bytes", &ModelCollective::size_bytes,
             "The full tensor: the output of an all_gather or a gather, the input of a reduce_scatter or a "
             "scatter, what a rank sends in an all_to_all or a send."),
    Optional("work", &ModelCollective::work, "Of an asynchronous one: its number; -1: waited for at once.")
        .OrNone(),
    Optional("peer", &ModelCollective::peer,
             "send, recv: places in the group from this rank on to the other one, or -1.")
        .OrNone(),
    Optional("batch", &ModelCollective::batch, "What is issued as one group has one number, or -1.").OrNone(),
    Optional("busiest_ppm", &ModelCollective::busiest_ppm,
             "all_to_all: bytes that the busiest rank sends or receives, in millionths of size_bytes.")
        .AtLeast(1));

template <>
inline constexpr std::string_view kTag<CollectiveWaitEvent> = "wait";
template <>
inline constexpr Definition kDefinition<CollectiveWaitEvent> = {
    "trace", "collective_wait_event", "The compute stream waits for an asynchronous collective."};
template <>
inline constexpr auto kFields<CollectiveWaitEvent> = FieldList(Required("work", &CollectiveWaitEvent::work,
                                                                        "Number of the collective."));

template <>
inline constexpr std::string_view kTag<OperatorEvent> = "op";
template <>
inline constexpr Definition kDefinition<OperatorEvent> = {
    "trace", "operator_event",
    "One operator that a GPU would run: [\"op\", name, module, dtype, flops, bytes_read, bytes_written, "
    "duration_ns, reads, writes, parameters], and of a collective of the model what it moves, as last "
    "element."};
template <>
inline constexpr auto kFields<OperatorEvent> = FieldList(
    Required("name", &OperatorEvent::name, "Name, \"aten.mm\"."),
    Required("module", &OperatorEvent::module, "Innermost module, or -1.").Ref(RefKind::kModule).OrNone(),
    Required("dtype", &OperatorEvent::dtype, "Of the arithmetic."),
    Required("flops", &OperatorEvent::flops, "Floating-point operations."),
    Required("bytes_read", &OperatorEvent::bytes_read, "Bytes read."),
    Required("bytes_written", &OperatorEvent::bytes_written, "Bytes written."),
    Required("duration_ns", &OperatorEvent::duration_ns, "Measured duration, or -1.").OrNone(),
    Required("reads", &OperatorEvent::reads, "Storages read (not those of parameters).").Storage(),
    Required("writes", &OperatorEvent::writes, "Storages written.").Storage(),
    Required("parameters", &OperatorEvent::parameters, "Parameters read.").Ref(RefKind::kParameter),
    Optional("collective", &OperatorEvent::collective, "Of a collective of the model."));

template <>
inline constexpr std::string_view kTag<AllocateEvent> = "+";
template <>
inline constexpr Definition kDefinition<AllocateEvent> = {
    "trace", "allocate_event",
    "A storage is born: [\"+\", storage, size_bytes, role, module] or with parameter as sixth element."};
template <>
inline constexpr auto kFields<AllocateEvent> = FieldList(
    Required("storage", &AllocateEvent::storage, "Storage id.").Storage(),
    Required("size_bytes", &AllocateEvent::size_bytes, "Size as requested."),
    Required("role", &AllocateEvent::role, "What the storage turns out to be, over its whole life."),
    Required("module", &AllocateEvent::module, "Innermost module, or -1.").Ref(RefKind::kModule).OrNone(),
    Optional("parameter", &AllocateEvent::parameter, "Whose gradient (role parameter_grad), or -1.")
        .Ref(RefKind::kParameter)
        .OrNone());

template <>
inline constexpr std::string_view kTag<FreeEvent> = "-";
template <>
inline constexpr Definition kDefinition<FreeEvent> = {"trace", "free_event", "A storage dies."};
template <>
inline constexpr auto kFields<FreeEvent> =
    FieldList(Required("storage", &FreeEvent::storage, "Storage id.").Storage());

template <>
inline constexpr std::string_view kTag<OutputGradReadyEvent> = "grad_ready";
template <>
inline constexpr Definition kDefinition<OutputGradReadyEvent> = {
    .says = "The gradient of an output tensor of a module is ready."};
template <>
inline constexpr auto kFields<OutputGradReadyEvent> = FieldList(
    Required("module", &OutputGradReadyEvent::module, "Module: index into modules.").Ref(RefKind::kModule),
    Required("index", &OutputGradReadyEvent::index, "Which tensor of the flattened output."),
    Required("occurrence", &OutputGradReadyEvent::occurrence,
             "Which call of the module in the forward, from 0."),
    Required("forward", &OutputGradReadyEvent::forward, "Position in the forwards of this pass."));

template <>
inline constexpr std::string_view kTag<InputsGradDoneEvent> = "inputs_done";
template <>
inline constexpr Definition kDefinition<InputsGradDoneEvent> = {
    .says = "The gradients of all inputs of a module that need one are done."};
template <>
inline constexpr auto kFields<InputsGradDoneEvent> = FieldList(
    Required("module", &InputsGradDoneEvent::module, "Module: index into modules.").Ref(RefKind::kModule),
    Required("occurrence", &InputsGradDoneEvent::occurrence,
             "Which call of the module in the forward, from 0."),
    Required("forward", &InputsGradDoneEvent::forward, "Position in the forwards of this pass."));

template <>
inline constexpr std::string_view kTag<ParameterGradEvent> = "param_grad";
template <>
inline constexpr Definition kDefinition<ParameterGradEvent> = {
    .says = "A parameter's gradient has been accumulated into .grad."};
template <>
inline constexpr auto kFields<ParameterGradEvent> =
    FieldList(Required("parameter", &ParameterGradEvent::parameter, "Parameter id.").Ref(RefKind::kParameter),
              Required("storage", &ParameterGradEvent::storage, "Storage id of the gradient, or -1.")
                  .OrNone()
                  .Storage(),
              Optional("dtype", &ParameterGradEvent::dtype,
                       "As autograd makes it, where that is not what the parameter is computed in."));

template <>
inline constexpr std::string_view kTag<RecomputeEnterEvent> = "recompute_enter";
template <>
inline constexpr Definition kDefinition<RecomputeEnterEvent> = {
    .says = "A checkpointed module's forward is run again."};
template <>
inline constexpr auto kFields<RecomputeEnterEvent> = FieldList(
    Required("module", &RecomputeEnterEvent::module, "Module: index into modules.").Ref(RefKind::kModule));

template <>
inline constexpr std::string_view kTag<RecomputeExitEvent> = "recompute_exit";
template <>
inline constexpr Definition kDefinition<RecomputeExitEvent> = {
    .says = "A checkpointed module's forward has been run again."};
template <>
inline constexpr auto kFields<RecomputeExitEvent> = FieldList(
    Required("module", &RecomputeExitEvent::module, "Module: index into modules.").Ref(RefKind::kModule),
    Optional("stopped", &RecomputeExitEvent::stopped,
             "Whether an early stop inside of it ends the recomputation: its hooks do not run."));

template <>
inline constexpr std::string_view kTag<BackwardEndEvent> = "backward_end";
template <>
inline constexpr Definition kDefinition<BackwardEndEvent> = {
    .says = "The autograd engine has finished; what is freed later was held by the caller of backward."};
template <>
inline constexpr auto kFields<BackwardEndEvent> = FieldList();

template <>
inline constexpr std::string_view kTag<ReleaseEvent> = "release";
template <>
inline constexpr Definition kDefinition<ReleaseEvent> = {
    .says = "Forward: from here on autograd alone holds the storage."};
template <>
inline constexpr auto kFields<ReleaseEvent> =
    FieldList(Required("storage", &ReleaseEvent::storage, "Storage id.").Storage());

template <>
inline constexpr bool kIsEvent<EnterEvent> = true;
template <>
inline constexpr bool kIsEvent<ExitEvent> = true;
template <>
inline constexpr bool kIsEvent<OperatorEvent> = true;
template <>
inline constexpr bool kIsEvent<AllocateEvent> = true;
template <>
inline constexpr bool kIsEvent<FreeEvent> = true;
template <>
inline constexpr bool kIsEvent<OutputGradReadyEvent> = true;
template <>
inline constexpr bool kIsEvent<InputsGradDoneEvent> = true;
template <>
inline constexpr bool kIsEvent<ParameterGradEvent> = true;
template <>
inline constexpr bool kIsEvent<RecomputeEnterEvent> = true;
template <>
inline constexpr bool kIsEvent<RecomputeExitEvent> = true;
template <>
inline constexpr bool kIsEvent<BackwardEndEvent> = true;
template <>
inline constexpr bool kIsEvent<ReleaseEvent> = true;
template <>
inline constexpr bool kIsEvent<CollectiveWaitEvent> = true;

template <>
inline constexpr Definition kDefinition<TraceEvent> = {
    "trace", "event", "One event, in host order; the first element is its kind."};

template <>
inline constexpr std::string_view kTag<TracedForward> = "forward";
template <>
inline constexpr Definition kDefinition<TracedForward> = {.says = "A forward runs."};
template <>
inline constexpr auto kFields<TracedForward> =
    FieldList(Required("forward", &TracedForward::forward, "Which of the trace.").Ref(RefKind::kForward));

template <>
inline constexpr std::string_view kTag<TracedBackward> = "backward";
template <>
inline constexpr Definition kDefinition<TracedBackward> = {.says = "A backward runs."};
template <>
inline constexpr auto kFields<TracedBackward> =
    FieldList(Required("backward", &TracedBackward::backward, "Which of the trace.").Ref(RefKind::kBackward));

template <>
inline constexpr bool kIsEvent<TracedForward> = true;
template <>
inline constexpr bool kIsEvent<TracedBackward> = true;
template <>
inline constexpr Definition kDefinition<TraceCall> = {
    "trace", "call", "A pass that runs; the first element says of which kind."};

template <>
inline constexpr bool kIsBlock<Pass> = true;
template <>
inline constexpr Definition kDefinition<Pass> = {"trace", "pass",
                                                 "One forward (loss included) or one backward."};
template <>
inline constexpr auto kFields<Pass> =
    FieldList(Required("name", &Pass::name, "\"f0\", \"b0\"."),
              Optional("grad_enabled", &Pass::grad_enabled, "false: a forward under no_grad."),
              Optional("abandoned", &Pass::abandoned,
                       "It raised: modules are entered and not left, or the backward does not end."),
              Optional("tensors", &Pass::tensors, "Tensors that cross module borders (forwards only).")
                  .Lines()
                  .Defines(RefKind::kTensor),
              Optional("forwards", &Pass::forwards, "The forwards that a backward covers (backwards only).")
                  .Ref(RefKind::kForward),
              Required("events", &Pass::events, "Events in host order.").Lines());

template <>
inline constexpr bool kIsBlock<TracedOptimizerStep> = true;
template <>
inline constexpr Definition kDefinition<TracedOptimizerStep> = {
    "trace", "optimizer_step", "A matrix optimizer's step of one matrix, on the first of its ranks."};
template <>
inline constexpr auto kFields<TracedOptimizerStep> = FieldList(
    Required("optimizer", &TracedOptimizerStep::optimizer, "Which."),
    Required("ranks", &TracedOptimizerStep::ranks, "Over which the first dimension is cut; 1: it is whole.")
        .AtLeast(1),
    Optional("replicas", &TracedOptimizerStep::replicas, "Ranks that have the same rows (HSDP).").AtLeast(1),
    Required("shape", &TracedOptimizerStep::shape, "Of the whole matrix.").Shape(),
    Required("dtype", &TracedOptimizerStep::dtype, "Of the parameter and of its gradient."),
    Optional("nesterov", &TracedOptimizerStep::nesterov, "Nesterov momentum."),
    Optional("ns_steps", &TracedOptimizerStep::ns_steps, "Newton-Schulz iterations.").AtLeast(1),
    Required("update", &TracedOptimizerStep::update,
             "Gradient and momentum become what is orthogonalised; storages are optimizer_temp.")
        .Lines(),
    Required("orthogonalize", &TracedOptimizerStep::orthogonalize,
             "From the cast to bfloat16 to the end of the iterations.")
        .Lines(),
    Required("apply", &TracedOptimizerStep::apply, "The result goes to the parameter.").Lines());

template <>
inline constexpr bool kIsBlock<Trace> = true;
template <>
inline constexpr Definition kDefinition<Trace> = {"trace", "trace",
                                                  "What one training step of the unsharded model does."};
template <>
inline constexpr auto kFields<Trace> = FieldList(
    Required("model", &Trace::model, "A name for people."),
    Optional("source", &Trace::source, "\"package.module:callable\" or the name of the config file."),
    Optional("recorded_with", &Trace::recorded_with, "Program and version, \"torch 2.11.0\"."),
    Required("compute_dtype", &Trace::compute_dtype, "The dtype that the passes were recorded in."),
    Optional("tokens_per_batch", &Trace::tokens_per_batch,
             "Batch x sequence of one rank's micro-batch; samples when there is no sequence."),
    Optional("world_size", &Trace::world_size, "Ranks of the job that was traced.").AtLeast(1),
    Optional("same_batch", &Trace::same_batch,
             "Names of mesh dimensions along which all ranks work on one batch."),
    Optional("communicators", &Trace::communicators,
             "Groups of ranks: of the model's collectives, and of mesh dimensions that placements name.")
        .Lines()
        .Defines(RefKind::kCommunicator),
    Required("modules", &Trace::modules, "Pre-order, children in registration order; the first is the root.")
        .Lines()
        .NotEmpty()
        .Defines(RefKind::kModule),
    Required("parameters", &Trace::parameters, "The order of named_parameters().")
        .Lines()
        .Defines(RefKind::kParameter),
    Optional("buffers", &Trace::buffers, "Module buffers.").Lines(),
    Optional("inputs", &Trace::inputs, "The batch.").Lines(),
    Required("forwards", &Trace::forwards, "Recorded forwards.").Lines().Defines(RefKind::kForward),
    Optional("backwards", &Trace::backwards, "Recorded backwards.").Lines().Defines(RefKind::kBackward),
    Optional("calls", &Trace::calls,
             "What one micro-batch calls, in order, where the loss runs backwards of its own.")
        .Lines(),
    Optional("optimizer_steps", &Trace::optimizer_steps, "Steps of matrix optimizers, by ranks and matrix.")
        .Lines());

// trace_json.cc defines them.
extern template const JsonObjectType& JsonObjectTypeOf<Trace>();
extern template const JsonObjectType& JsonObjectTypeOf<TracedOptimizerStep>();
extern template const JsonObjectType& JsonObjectTypeOf<TraceInput>();
extern template const JsonObjectType& JsonObjectTypeOf<ModuleBuffer>();
extern template const JsonObjectType& JsonObjectTypeOf<ParameterPlacement>();
extern template const JsonObjectType& JsonObjectTypeOf<EnterEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<ExitEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<OperatorEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<AllocateEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<FreeEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<OutputGradReadyEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<InputsGradDoneEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<ParameterGradEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<RecomputeEnterEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<RecomputeExitEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<BackwardEndEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<ReleaseEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<CollectiveWaitEvent>();
extern template const JsonObjectType& JsonObjectTypeOf<ModelCollective>();
extern template const JsonObjectType& JsonObjectTypeOf<Communicator>();
extern template const JsonObjectType& JsonObjectTypeOf<CommunicatorDim>();

}  // namespace shardplan
