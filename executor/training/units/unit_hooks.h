// SPDX-License-Identifier: Apache-2.0
// Work where a module of a unit is entered and left, whatever language calls it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

class Runtime;

// Options of a unit's hooks besides firing triggers.
struct HookOptions {
  UnitId unit = -1;  // -1: a root that is no unit of the plan (it holds no parameter of its own)
  std::vector<const void*> modules;            // of the unit, as identities; see [Note: groups]
  std::optional<at::ScalarType> input_dtype;   // floating-point inputs are cast to it
  std::optional<at::ScalarType> output_dtype;  // and outputs to this
  // Modules that are not in training mode compute with parameters in full precision, and their inputs are
  // left as they are (fsdp1).
  bool full_precision_in_eval = false;
};

class UnitHooks {
 public:
  // Work to be done with the inputs.
  struct InputWork {
    bool casts = false;
    bool moves = false;        // to the runtime's device
    bool insert_node = false;  // the unit's post-backward is theirs
    bool watch = false;        // the same, of a frozen flat unit
    bool any() const { return casts || moves || insert_node || watch; }
  };

  UnitHooks(std::shared_ptr<Runtime> runtime, HookOptions options)
      : runtime_(std::move(runtime)), options_(std::move(options)) {}

  Runtime& runtime() const { return *runtime_; }
  const HookOptions& options() const { return options_; }

  // Module `module` is entered. full_precision: see HookOptions.
  InputWork PreForward(const void* module, bool full_precision);
  // `tensors`: all of the inputs', cast already if `is_cast`. Returns whether any is another one now.
  bool Prepare(const InputWork& work, bool is_cast, std::vector<at::Tensor>& tensors);

  // Module `module` is left. Returns whether its outputs are to be handed to Finish.
  struct OutputWork {
    bool casts = false;
    bool hooks = false;
    std::vector<UnitId> completed;
    bool any() const { return casts || hooks; }
  };
  OutputWork PostForward(const void* module);
  // The tensors of the outputs, before they are cast.
  void HookOutputs(const OutputWork& work, const std::vector<at::Tensor>& tensors);

 private:
  void NoteModule(TriggerKind kind, const void* module);
  void HookPreBackward(UnitId unit, const std::vector<at::Tensor>& tensors);

  std::shared_ptr<Runtime> runtime_;
  HookOptions options_;
};

// Casts floating-point tensors; true if any changed.
bool CastFloatingPoint(std::vector<at::Tensor>& tensors, at::ScalarType dtype);

}  // namespace shardplan::executor
