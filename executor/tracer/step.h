// SPDX-License-Identifier: Apache-2.0
// One recording of a step: what RecordTrace puts together a trace of.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardplan/executor/module_calls.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"
#include "tracer/composites.h"
#include "tracer/mode.h"
#include "tracer/operators.h"
#include "tracer/storages.h"
#include "tracer/tree.h"

namespace shardplan::executor {

// The step cannot be recorded. It leaves through the user's function, and becomes RecordTrace's error.
struct RecordingError : std::runtime_error {
  RecordingError(ErrorCode error_code, const std::string& message)
      : std::runtime_error(message), code(error_code) {}
  ErrorCode code;
};

struct TracedStep {
  std::vector<TraceInput> inputs;
  std::vector<StorageId> buffer_storages;  // as TracedTree::buffers
  std::vector<Pass> forwards;
  std::vector<Pass> backwards;
  std::int64_t tokens = 0;  // of the first input: tokens of a (batch, sequence) of ids, else samples
  // The marks on modules' inputs changed how gradients are summed (see [Note: two recordings]).
  bool sums_regrouped = false;
};

// Writes down what happens from the first time that the root is entered until Finish. Between a Begin and an
// End it listens to modules and to the dispatcher.
//
// [Note: in place on real tensors]
// Two things a backward does in place, and out of place where a dispatch mode watches: the autograd engine
// adds the gradients of a value that is used several times into the first one, when it holds the only
// reference to it and to its storage (a view keeps the tensor that it was made from, a second reference); and
// some formulas fill zeros of their own (the gradient of indexing, of a gather, of a top-k). A trace shows
// what an unwatched step does: when the target dies at once, nobody else held it, so the result is written
// into the target's storage, and neither the birth of the result nor the death of the target is an event. The
// tracer in Python does the same (recorder.py).
class StepTracer final : public ModuleListener, private OperatorHandler {
 public:
  // `tree` outlives it. mark_inputs: an identity function around the inputs of modules with parameters tells
  // when their gradients are done. Listens to `calls` until its end. RecordingError: somebody else does.
  // kernels, always_trains: as MetaComposites has them.
  StepTracer(const TracedTree& tree, const torch::nn::Module& model, ModuleCalls& calls, bool mark_inputs,
             RecordedKernels kernels, bool always_trains);
  ~StepTracer() override;
  StepTracer(const StepTracer&) = delete;
  StepTracer& operator=(const StepTracer&) = delete;

  // Around the forward and its loss.
  void BeginForward();
  void EndForward();
  // loss.backward(), then frees it. The gradients of parameters are dropped.
  void Backward(at::Tensor loss);
  TracedStep Finish();
  bool entered() const { return !forwards_.empty(); }

  void Enter(std::int32_t module, std::span<at::Tensor* const> inputs) override;
  void Leave(std::int32_t module, std::span<at::Tensor* const> outputs) override;
  void Abandon(std::int32_t module) noexcept override;

 private:
  enum class Phase : std::uint8_t { kOff, kForward, kLoss, kBackward };
  struct Storage {
    Bytes size;
    Phase born = Phase::kOff;
    bool resident = false;  // alive before the step
    bool announced = false;
    bool is_output = false;
    std::optional<Phase> died;
    ParameterId gradient_of = -1;
  };
  // An operator that may turn out to be in place.
  struct Pending {
    StorageId target = -1;
    StorageId result = -1;
    c10::StorageImpl* memory = nullptr;  // of the result
    OperatorEvent event;                 // without what it writes
  };
  struct NamedTensor {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // its address is not used again
    TensorId id = -1;
  };
  class GradientHook;

  // ---- operators ----
  void Dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void Observe(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
               c10::ArrayRef<c10::IValue> results);
  void EmitOperator(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments,
                    c10::ArrayRef<c10::IValue> results, const std::vector<at::Tensor>& outputs,
                    ModuleId module);
  bool IsInPlaceUnwatched(const OperatorKind& kind, const c10::OperatorHandle& op,
                          c10::ArrayRef<c10::IValue> arguments, const at::Tensor& result) const;
  void Hold(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments, const at::Tensor& result,
            StorageId storage, ModuleId module);
  void Settle(bool in_place);
  bool IsOnDevice(const at::Tensor& tensor) const;

  // ---- storages ----
  static c10::StorageImpl* MemoryOf(const at::Tensor& tensor);
  StorageId Birth(c10::StorageImpl* memory, bool resident);
  void Death(c10::StorageImpl* memory);
  void Announce(StorageId storage, ModuleId module);
  StorageId KnownStorage(const at::Tensor& tensor);
  StorageId StorageOf(const at::Tensor& tensor) const;  // -1: none
  ParameterId ParameterOf(const at::Tensor& tensor) const;
  void AddResidents(std::span<at::Tensor* const> root_inputs);
  StorageRole RoleOf(const Storage& storage) const;

  // ---- modules ----
  void Emit(TraceEvent event);
  void BeginPass();
  TensorId NameOf(const at::Tensor& tensor);
  void MarkNodes();
  ModuleId CurrentModule();

  const TracedTree& tree_;
  ModuleCalls calls_;
  std::vector<ModuleId> module_ids_;  // by the number of ModuleCalls
  bool mark_inputs_;
  RecordedKernels kernels_;
  c10::Device device_;

  Phase phase_ = Phase::kOff;
  std::vector<Pass> forwards_, backwards_;
  std::vector<TraceEvent>* events_ = nullptr;  // of the pass that runs
  std::size_t group_begin_ = 0;                // the first forward of the next backward
  std::optional<MetaComposites> meta_composites_;
  std::optional<DispatchMode> mode_;

  std::vector<Storage> storages_;
  std::unordered_map<c10::StorageImpl*, StorageId> live_;
  std::unordered_map<c10::StorageImpl*, ParameterId> parameters_;
  std::vector<c10::Storage> residents_;  // held: their addresses are theirs until the end
  std::vector<TraceInput> inputs_;
  std::vector<TraceInput> captured_;
  std::vector<at::Tensor> input_tensors_;
  std::vector<StorageId> buffer_storages_;
  std::int64_t tokens_ = 0;
  std::int32_t root_calls_ = 0;
  std::unordered_map<std::string, OperatorKind> kinds_;
  std::optional<Pending> pending_;
  StorageId last_zeros_ = -1;

  std::unordered_map<const c10::TensorImpl*, NamedTensor> names_;  // of the current forward
  std::vector<ModuleId> stack_;
  std::vector<std::int32_t> open_calls_;               // occurrences, as stack_
  std::unordered_map<ModuleId, std::int32_t> counts_;  // calls in the current forward
  std::vector<std::pair<std::uint64_t, ModuleId>> node_marks_;
  ModuleId last_module_ = -1;
  bool sums_regrouped_ = false;
  std::shared_ptr<StepTracer*> self_;  // for hooks that may outlive it: what they refer to is then nullptr
  std::vector<std::unique_ptr<GradientHook>> hooks_;
  StorageWatch watch_;  // the last: it ends first
};

}  // namespace shardplan::executor
