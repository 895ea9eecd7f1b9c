// The trace in JSON (docs/trace-format.md).
#pragma once

#include "json/json_fields.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

template <>
inline constexpr auto kFields<NamedParameter> =
    FieldList(Required("name", &NamedParameter::name),
              Required("parameter", &NamedParameter::parameter).Ref(RefKind::kParameter));

template <>
inline constexpr auto kFields<Module> = FieldList(Required("fqn", &Module::fqn),
                                                  Required("class_name", &Module::class_name),
                                                  Optional("children", &Module::children),
                                                  Optional("parameters", &Module::parameters),
                                                  Optional("buffers", &Module::buffers),
                                                  Optional("same_module_as", &Module::same_module_as));

template <>
inline constexpr auto kFields<ParameterPlacement> =
    FieldList(Required("mesh_dim", &ParameterPlacement::mesh_dim),
              Required("size", &ParameterPlacement::size).AtLeast(1),
              Optional("dim", &ParameterPlacement::dim).OrNone(),
              Optional("grad_partial", &ParameterPlacement::grad_partial));

template <>
inline constexpr auto kFields<Parameter> = FieldList(Required("fqn", &Parameter::fqn),
                                                     Required("shape", &Parameter::shape).Shape(),
                                                     Required("dtype", &Parameter::dtype),
                                                     Optional("requires_grad", &Parameter::requires_grad),
                                                     Optional("shared_with", &Parameter::shared_with),
                                                     Optional("placements", &Parameter::placements));

template <>
inline constexpr auto kFields<ModuleBuffer> =
    FieldList(Required("fqn", &ModuleBuffer::fqn), Required("shape", &ModuleBuffer::shape).Shape(),
              Required("dtype", &ModuleBuffer::dtype), Optional("persistent", &ModuleBuffer::persistent),
              Optional("storage", &ModuleBuffer::storage).OrNone().Storage());

template <>
inline constexpr auto kFields<Tensor> = FieldList(Required("shape", &Tensor::shape).Shape(),
                                                  Required("dtype", &Tensor::dtype),
                                                  Optional("requires_grad", &Tensor::requires_grad),
                                                  Optional("may_require_grad", &Tensor::may_require_grad),
                                                  Optional("in_loss", &Tensor::in_loss),
                                                  Optional("storage", &Tensor::storage).OrNone().Storage());

template <>
inline constexpr auto kFields<TraceInput> = FieldList(
    Required("name", &TraceInput::name), Required("shape", &TraceInput::shape).Shape(),
    Required("dtype", &TraceInput::dtype), Optional("storage", &TraceInput::storage).OrNone().Storage());

// ---- events: arrays ----
template <>
inline constexpr std::string_view kTag<EnterEvent> = "enter";
template <>
inline constexpr auto kFields<EnterEvent> =
    FieldList(Required("module", &EnterEvent::module).Ref(RefKind::kModule),
              Required("inputs", &EnterEvent::inputs).Ref(RefKind::kTensor));

template <>
inline constexpr std::string_view kTag<ExitEvent> = "exit";
template <>
inline constexpr auto kFields<ExitEvent> =
    FieldList(Required("module", &ExitEvent::module).Ref(RefKind::kModule),
              Required("outputs", &ExitEvent::outputs).Ref(RefKind::kTensor));

template <>
inline constexpr std::string_view kTag<OperatorEvent> = "op";
template <>
inline constexpr auto kFields<OperatorEvent> = FieldList(
    Required("name", &OperatorEvent::name),
    Required("module", &OperatorEvent::module).Ref(RefKind::kModule).OrNone(),
    Required("dtype", &OperatorEvent::dtype), Required("flops", &OperatorEvent::flops),
    Required("bytes_read", &OperatorEvent::bytes_read),
    Required("bytes_written", &OperatorEvent::bytes_written),
    Required("duration_ns", &OperatorEvent::duration_ns).OrNone(),
    Required("reads", &OperatorEvent::reads).Storage(), Required("writes", &OperatorEvent::writes).Storage(),
    Required("parameters", &OperatorEvent::parameters).Ref(RefKind::kParameter));

template <>
inline constexpr std::string_view kTag<AllocateEvent> = "+";
template <>
inline constexpr auto kFields<AllocateEvent> =
    FieldList(Required("storage", &AllocateEvent::storage).Storage(),
              Required("size_bytes", &AllocateEvent::size_bytes), Required("role", &AllocateEvent::role),
              Required("module", &AllocateEvent::module).Ref(RefKind::kModule).OrNone(),
              Optional("parameter", &AllocateEvent::parameter).Ref(RefKind::kParameter).OrNone());

template <>
inline constexpr std::string_view kTag<FreeEvent> = "-";
template <>
inline constexpr auto kFields<FreeEvent> = FieldList(Required("storage", &FreeEvent::storage).Storage());

template <>
inline constexpr std::string_view kTag<OutputGradReadyEvent> = "grad_ready";
template <>
inline constexpr auto kFields<OutputGradReadyEvent> =
    FieldList(Required("module", &OutputGradReadyEvent::module).Ref(RefKind::kModule),
              Required("index", &OutputGradReadyEvent::index),
              Required("occurrence", &OutputGradReadyEvent::occurrence),
              Required("forward", &OutputGradReadyEvent::forward));

template <>
inline constexpr std::string_view kTag<InputsGradDoneEvent> = "inputs_done";
template <>
inline constexpr auto kFields<InputsGradDoneEvent> =
    FieldList(Required("module", &InputsGradDoneEvent::module).Ref(RefKind::kModule),
              Required("occurrence", &InputsGradDoneEvent::occurrence),
              Required("forward", &InputsGradDoneEvent::forward));

template <>
inline constexpr std::string_view kTag<ParameterGradEvent> = "param_grad";
template <>
inline constexpr auto kFields<ParameterGradEvent> =
    FieldList(Required("parameter", &ParameterGradEvent::parameter).Ref(RefKind::kParameter),
              Required("storage", &ParameterGradEvent::storage).OrNone().Storage());

template <>
inline constexpr std::string_view kTag<RecomputeEnterEvent> = "recompute_enter";
template <>
inline constexpr auto kFields<RecomputeEnterEvent> =
    FieldList(Required("module", &RecomputeEnterEvent::module).Ref(RefKind::kModule));

template <>
inline constexpr std::string_view kTag<RecomputeExitEvent> = "recompute_exit";
template <>
inline constexpr auto kFields<RecomputeExitEvent> =
    FieldList(Required("module", &RecomputeExitEvent::module).Ref(RefKind::kModule));

template <>
inline constexpr std::string_view kTag<BackwardEndEvent> = "backward_end";
template <>
inline constexpr auto kFields<BackwardEndEvent> = FieldList();

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
inline constexpr bool kIsBlock<Pass> = true;
template <>
inline constexpr auto kFields<Pass> = FieldList(
    Required("name", &Pass::name), Optional("grad_enabled", &Pass::grad_enabled),
    Optional("tensors", &Pass::tensors).Lines().Defines(RefKind::kTensor),
    Optional("forwards", &Pass::forwards).Ref(RefKind::kForward), Required("events", &Pass::events).Lines());

template <>
inline constexpr bool kIsBlock<Trace> = true;
template <>
inline constexpr auto kFields<Trace> = FieldList(
    Required("model", &Trace::model), Optional("source", &Trace::source),
    Optional("recorded_with", &Trace::recorded_with), Required("compute_dtype", &Trace::compute_dtype),
    Optional("tokens_per_batch", &Trace::tokens_per_batch),
    Required("modules", &Trace::modules).Lines().Defines(RefKind::kModule),
    Required("parameters", &Trace::parameters).Lines().Defines(RefKind::kParameter),
    Optional("buffers", &Trace::buffers).Lines(), Optional("inputs", &Trace::inputs).Lines(),
    Required("forwards", &Trace::forwards).Lines().Defines(RefKind::kForward),
    Optional("backwards", &Trace::backwards).Lines());

}  // namespace shardplan
