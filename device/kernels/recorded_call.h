// SPDX-License-Identifier: Apache-2.0
// Operators in a recording: which memory of the device each reads and writes (device/runtime/recorder.h).
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <span>

namespace shardplan::softdevice {

// One call, from before its kernel until its results are there. Kernels that are launched meanwhile are the
// call's. Calls inside of it are not recorded. Without a recording it does nothing.
class RecordedCall {
 public:
  // `stack`: the arguments are its last.
  RecordedCall(const c10::OperatorHandle& op, const c10::Stack& stack);
  // A call that is not done has raised.
  ~RecordedCall();
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;
  // The results are the last of `stack`.
  void Done(const c10::Stack& stack);
  // The same, of an operator that runs at once: it was on the current stream, and the host has waited for
  // that.
  void DoneAtOnce(const c10::Stack& stack);

 private:
  void End(const c10::Stack& stack, bool at_once);

  const c10::OperatorHandle& op_;
  c10::Stack arguments_;
  bool records_ = false;
};

// torch's kernel of an operator that touches the allocator or streams alone: it says from where.
class PlacedKernel final : public c10::OperatorKernel {
 public:
  explicit PlacedKernel(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack);

 private:
  c10::SafeKernelFunction original_;
};

// A kernel of another library than aten. It may call operators of aten, which say their own accesses.
class OuterKernel final : public c10::OperatorKernel {
 public:
  explicit OuterKernel(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack);

 private:
  c10::SafeKernelFunction original_;
};

// Operators of the host that touch memory which devices read and write.
void RecordOnHost(const c10::OperatorHandle& op, const c10::Stack& arguments,
                  std::span<const c10::IValue> results);

// From now on the allocator's blocks are recorded.
void WatchAllocator();
void WatchNodes();

}  // namespace shardplan::softdevice
