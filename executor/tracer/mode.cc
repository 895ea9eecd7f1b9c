// SPDX-License-Identifier: Apache-2.0
#include "tracer/mode.h"

#include <c10/core/SafePyObject.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <stdexcept>
#include <string>

namespace shardplan::executor {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// The key at which modes are asked, and all in front of it: autograd, autocast.
constexpr DispatchKeySet kModesAndAbove =
    DispatchKeySet(DispatchKeySet::FULL) ^ DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python);

}  // namespace

// An "interpreter" that has no objects and no tensors of its own: `dispatch` alone is ever asked for
// anything.
class DispatchMode::Table final : public c10::impl::PyInterpreterVTable {
 public:
  explicit Table(OperatorHandler& handler) : handler_(&handler) {}

  std::string name() const override { return "shardplan"; }
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    const c10::impl::ExcludeDispatchKeyGuard guard(kModesAndAbove);
    handler_->Dispatch(op, *stack);
  }
  // None: a detached tensor is a plain one.
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl*) const override { return {}; }

  void incref(PyObject*) const override {}
  void decref(PyObject*) const override {}
  bool try_incref(const c10::impl::PyObjectSlot&) const override { return false; }
  size_t refcnt(PyObject*) const override { return 0; }
  void reportErrorCallback(PyObject*, DispatchKey) const override {}
  void python_op_registration_trampoline(const c10::OperatorHandle&, DispatchKey, DispatchKeySet,
                                         torch::jit::Stack*, bool, bool) const override {
    Unasked();
  }
  void throw_abstract_impl_not_imported_error(std::string, const char*, const char*) const override {
    Unasked();
  }
  void python_dispatcher(const c10::OperatorHandle&, DispatchKeySet, torch::jit::Stack*) const override {
    Unasked();
  }
  bool is_contiguous(const c10::TensorImpl*, at::MemoryFormat) const override { Unasked(); }
  c10::SymBool sym_is_contiguous(const c10::TensorImpl*, at::MemoryFormat) const override { Unasked(); }
  bool is_strides_like(const c10::TensorImpl*, at::MemoryFormat) const override { Unasked(); }
  bool is_non_overlapping_and_dense(const c10::TensorImpl*) const override { Unasked(); }
  c10::Device device(const c10::TensorImpl*) const override { Unasked(); }
  int64_t dim(const c10::TensorImpl*) const override { Unasked(); }
  c10::IntArrayRef strides(const c10::TensorImpl*) const override { Unasked(); }
  c10::IntArrayRef sizes(const c10::TensorImpl*) const override { Unasked(); }
  c10::SymIntArrayRef sym_sizes(const c10::TensorImpl*) const override { Unasked(); }
  c10::Layout layout(const c10::TensorImpl*) const override { Unasked(); }
  int64_t numel(const c10::TensorImpl*) const override { Unasked(); }
  c10::SymInt sym_numel(const c10::TensorImpl*) const override { Unasked(); }
  c10::SymIntArrayRef sym_strides(const c10::TensorImpl*) const override { Unasked(); }
  c10::SymInt sym_storage_offset(const c10::TensorImpl*) const override { Unasked(); }
  void trace_gpu_event_creation(c10::DeviceType, uintptr_t) const override {}
  void trace_gpu_event_deletion(c10::DeviceType, uintptr_t) const override {}
  void trace_gpu_event_record(c10::DeviceType, uintptr_t, uintptr_t) const override {}
  void trace_gpu_event_wait(c10::DeviceType, uintptr_t, uintptr_t) const override {}
  void trace_gpu_memory_allocation(c10::DeviceType, uintptr_t) const override {}
  void trace_gpu_memory_deallocation(c10::DeviceType, uintptr_t) const override {}
  void trace_gpu_stream_creation(c10::DeviceType, uintptr_t) const override {}
  void trace_gpu_device_synchronization(c10::DeviceType) const override {}
  void trace_gpu_stream_synchronization(c10::DeviceType, uintptr_t) const override {}
  void trace_gpu_event_synchronization(c10::DeviceType, uintptr_t) const override {}
  void reset_backward_hooks(const c10::TensorImpl*) const override {}

 private:
  [[noreturn]] static void Unasked() {
    throw std::logic_error("shardplan: torch asks a recorder for something that only Python has");
  }

  OperatorHandler* handler_;
};

// Held by whoever holds the mode: torch copies its stack into each backward.
struct DispatchMode::Interpreter {
  explicit Interpreter(OperatorHandler& handler)
      : table(handler), interpreter(&table), mode(nullptr, &interpreter) {}

  Table table;
  c10::impl::PyInterpreter interpreter;
  c10::impl::PyObject_TorchDispatchMode mode;
};

DispatchMode::DispatchMode(OperatorHandler& handler) : interpreter_(std::make_shared<Interpreter>(handler)) {
  c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(
      std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>(interpreter_, &interpreter_->mode));
}

DispatchMode::~DispatchMode() { c10::impl::TorchDispatchModeTLS::pop_stack(); }

bool DispatchMode::IsAnyActive() { return c10::impl::TorchDispatchModeTLS::any_modes_set(); }

void CallBelow(const c10::OperatorHandle& op, torch::jit::Stack& stack) { op.callBoxed(&stack); }

}  // namespace shardplan::executor
