// SPDX-License-Identifier: Apache-2.0
// DispatchMode: every operator that reaches the dispatcher below autograd, as TorchDispatchMode of Python
// sees them.
//
// [Note: a dispatch mode without Python]
// The dispatcher asks the innermost mode of c10::impl::TorchDispatchModeTLS, which is an "interpreter": a
// table of virtual functions that libtorch_python fills, and that anybody may fill
// (c10/core/impl/PyInterpreter.h; the kernel that asks it is in libtorch_cpu). So a recording in C++ has the
// operators of a recording in Python: composite ones are decomposed, autograd has saved what it saves,
// factories without tensors are seen, and the engine runs as it does for the tracer ([Note: in place on real
// tensors]). The alternatives have other operators: at::RecordFunction is called above autograd and inside of
// kernels, and can answer nothing; a fallback at a key of one's own is above autograd or collides with the
// fallbacks that are there. The table is the same in torch 2.11 to 2.15. If a later one has another function,
// this file does not compile.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace shardplan::executor {

// Whoever stands below autograd.
class OperatorHandler {
 public:
  virtual ~OperatorHandler() = default;
  // Replaces the arguments on top of the stack by the results: CallBelow does. Operators that it calls itself
  // do not come here. Its exceptions are the operator's.
  virtual void Dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
};

// Runs the operator's kernel.
void CallBelow(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// While it lives, operators of this thread, and of backwards that it begins, go to `handler`. Modes end in
// the opposite order.
class DispatchMode {
 public:
  explicit DispatchMode(OperatorHandler& handler);
  ~DispatchMode();
  DispatchMode(const DispatchMode&) = delete;
  DispatchMode& operator=(const DispatchMode&) = delete;

  // Some mode is there on this thread, of this process's C++ or Python.
  static bool IsAnyActive();

 private:
  class Table;
  struct Interpreter;
  std::shared_ptr<Interpreter> interpreter_;
};

}  // namespace shardplan::executor
