// SPDX-License-Identifier: Apache-2.0
// Kernels where nothing computes.
//
// [Note: both kernels]
// torch's own CUDA kernel runs first: its host code allocates results and scratch to the byte, and what it
// launches is empty. If all tensors of the call are known (numbers.h), the host's kernel of the operator then
// runs on the same memory. Operators whose result's shape depends on numbers run on the host alone, but for
// an index by masks: it is one by the places of their true elements, which are read first.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <span>

namespace shardplan::softdevice {

// In the place of torch's kernel of an operator, which it keeps.
class EmptyKernel final : public c10::OperatorKernel {
 public:
  explicit EmptyKernel(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack);

 private:
  // Runs the operator in other words, where its masks have to be read; true: its values are on the stack.
  bool RunReworded(const c10::OperatorHandle& op, c10::Stack* stack);
  void Settle(const c10::OperatorHandle& op, const c10::Stack& arguments, std::span<c10::IValue> results);

  c10::SafeKernelFunction original_;
  bool reads_numbers_;
  std::optional<std::size_t> indices_;
};

// Host tensors of many floats are not computed either: a model that is initialised on the host touches no
// page of its parameters. Integers are.
class QuietKernel final : public c10::OperatorKernel {
 public:
  explicit QuietKernel(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack);

 private:
  // The values of a call that is left out; nothing: it has to run.
  std::optional<c10::Stack> Unwritten(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments);

  c10::SafeKernelFunction original_;
};

}  // namespace shardplan::softdevice
