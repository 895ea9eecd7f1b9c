// SPDX-License-Identifier: Apache-2.0
#include "training/units/unit_hooks.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "training/profiler_ranges.h"
#include "training/runtime/runtime.h"
#include "training/units/inputs_done.h"
#include "training/units/post_backward.h"

namespace shardplan::executor {
namespace {

// True if any was elsewhere.
bool MoveTo(c10::Device device, std::vector<at::Tensor>& tensors) {
  bool changed = false;
  for (at::Tensor& tensor : tensors) {
    if (tensor.device() == device) continue;
    tensor = tensor.to(device);
    changed = true;
  }
  return changed;
}

std::vector<std::size_t> NeedingGrad(const std::vector<at::Tensor>& tensors) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].requires_grad()) indices.push_back(i);
  }
  return indices;
}

}  // namespace

bool CastFloatingPoint(std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  bool changed = false;
  for (at::Tensor& tensor : tensors) {
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype) continue;
    tensor = tensor.to(dtype);
    changed = true;
  }
  return changed;
}

void UnitHooks::NoteModule(TriggerKind kind, const void* module) {
  if (options_.modules.size() < 2) return;
  const auto found = std::ranges::find(options_.modules, module);
  if (found == options_.modules.end()) return;
  runtime_->NoteModule(kind, options_.unit, static_cast<std::int32_t>(found - options_.modules.begin()));
}

UnitHooks::InputWork UnitHooks::PreForward(const void* module, bool full_precision) {
  const UnitId unit = options_.unit;
  // The modules of a group are entered one after the other, in one forward of the unit.
  runtime_->GiveUpInterrupted(options_.modules.size() > 1 ? -1 : unit);
  const ModuleGroups::Entered entered = runtime_->groups().Enter(unit, options_.modules);
  if (!entered.runs_hook) {
    NoteModule(TriggerKind::kPreForward, module);
    return {};
  }
  if (runtime_->IsRecomputing(unit)) {
    runtime_->Recompute(TriggerKind::kPreForward, unit);
    NoteModule(TriggerKind::kPreForward, module);
    return {};
  }
  runtime_->PreForward(unit, full_precision);
  NoteModule(TriggerKind::kPreForward, module);
  FlatUnit* flat = runtime_->Flat(unit);
  const bool grad = unit >= 0 && at::GradMode::is_enabled();
  return {
      .casts = options_.input_dtype && !full_precision,
      .moves = !runtime_->torch_device().is_cpu() && runtime_->IsOutermost(unit),
      .insert_node = grad && entered.registers_inputs && flat == nullptr,
      .watch = grad && flat != nullptr && !flat->options().trains && flat->ClaimInputHooks(),
  };
}

bool UnitHooks::Prepare(const InputWork& work, bool is_cast, std::vector<at::Tensor>& tensors) {
  bool changed = is_cast;
  if (work.moves) {
    const ProfilerRange range("FSDP::inputs_to_device");
    changed = MoveTo(runtime_->torch_device(), tensors) || changed;
  }
  if (work.casts && !is_cast) {
    const ProfilerRange range("FSDP::cast_forward_inputs");
    changed = CastFloatingPoint(tensors, *options_.input_dtype) || changed;
  }
  if (work.insert_node) {
    const std::vector<std::size_t> indices = NeedingGrad(tensors);
    if (!indices.empty()) {
      InsertPostBackward(runtime_, options_.unit, tensors, indices);
      changed = true;
    }
  }
  if (work.watch) {  // a frozen flat unit is done with the gradients of its inputs
    std::vector<at::Tensor> watched;
    for (const std::size_t index : NeedingGrad(tensors)) watched.push_back(tensors[index]);
    WhenGradientsDone(watched, [runtime = runtime_, unit = options_.unit] { runtime->PostBackward(unit); });
  }
  return changed;
}

UnitHooks::OutputWork UnitHooks::PostForward(const void* module) {
  const UnitId unit = options_.unit;
  const bool casts = options_.output_dtype.has_value();
  NoteModule(TriggerKind::kPostForward, module);
  if (!runtime_->groups().Leave(unit, options_.modules, module)) {
    return {.casts = casts && runtime_->groups().each_is_cast(), .hooks = false, .completed = {}};
  }
  if (runtime_->IsRecomputing(unit)) {
    runtime_->Recompute(TriggerKind::kPostForward, unit);
    return {};
  }
  std::vector<UnitId> completed = runtime_->PostForward(unit);
  return {.casts = casts, .hooks = at::GradMode::is_enabled(), .completed = std::move(completed)};
}

void UnitHooks::HookOutputs(const OutputWork& work, const std::vector<at::Tensor>& tensors) {
  if (!work.hooks) return;
  HookPreBackward(options_.unit, tensors);
  for (const UnitId other : work.completed) HookPreBackward(other, tensors);
}

void UnitHooks::HookPreBackward(UnitId unit, const std::vector<at::Tensor>& tensors) {
  const std::int64_t run = runtime_->Runs(unit);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    tensor.register_hook(
        [runtime = runtime_, unit, run](const at::TensorBase&) { runtime->PreBackward(unit, run); });
  }
}

}  // namespace shardplan::executor
