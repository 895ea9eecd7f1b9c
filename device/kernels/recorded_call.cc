// SPDX-License-Identifier: Apache-2.0
#include "device/kernels/recorded_call.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>
#endif

#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "device/kernels/kernel.h"
#include "device/kernels/on_host.h"
#include "device/runtime/software_device.h"

namespace shardplan::softdevice {
namespace {

thread_local bool in_call = false;

bool IsOfDevice(const at::Tensor& tensor) { return tensor.is_cuda(); }
bool IsOfPinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && tensor.numel() > 0 && IsPinned(tensor.const_data_ptr());
}

// A tensor without gaps has no strides: its bytes are one stretch, in whatever order.
RecordedTensor Described(const at::Tensor& tensor) {
  RecordedTensor result;
  result.address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  result.dtype = c10::getDtypeNames(tensor.scalar_type()).first;
  result.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
  if (!tensor.is_non_overlapping_and_dense()) {
    result.strides.assign(tensor.strides().begin(), tensor.strides().end());
  }
  return result;
}

using Choice = bool (*)(const at::Tensor&);

void Add(std::vector<RecordedTensor>& to, const c10::IValue& value, Choice is_recorded) {
  ForEachTensor(value, [&](const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.numel() == 0) return;
    if (is_recorded(tensor)) to.push_back(Described(tensor));
  });
}

// Operators whose argument is there for its shape.
bool ReadsShapesAlone(std::string_view name) {
  return name.ends_with("_like") || name.starts_with("aten::new_") || name == "aten::fill_" ||
         name == "aten::zero_";
}

// Fused optimizers write gradients where a loss scale is taken out of them, and else read them alone.
bool KeepsGradients(const c10::FunctionSchema& schema, const c10::Stack& arguments, std::size_t i) {
  if (!schema.name().starts_with("aten::_fused_") || schema.arguments()[i].name() != "grads") return false;
  const std::optional<int> scale = schema.argumentIndexWithName("grad_scale");
  return scale && arguments[static_cast<std::size_t>(*scale)].isNone();
}

struct Accesses {
  std::vector<RecordedTensor> reads, writes;
};

Accesses AccessesOf(const c10::OperatorHandle& op, const c10::Stack& arguments,
                    std::span<const c10::IValue> results, Choice is_recorded) {
  const c10::FunctionSchema& schema = op.schema();
  Accesses accesses;
  const bool shapes_alone = ReadsShapesAlone(schema.name());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool written = IsWritten(schema.arguments()[i]) && !KeepsGradients(schema, arguments, i);
    if (!written && shapes_alone) continue;
    Add(written ? accesses.writes : accesses.reads, arguments[i], is_recorded);
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) Add(accesses.writes, results[i], is_recorded);
  }
  return accesses;
}

std::span<const c10::IValue> Last(const c10::Stack& stack, std::size_t count) {
  return std::span(stack).last(count);
}

// The node that the operator's backward will be: the last that this thread has made, where a gradient is
// wanted.
std::optional<AutogradNode> MadeNode(const c10::Stack& arguments) {
  if (!c10::GradMode::is_enabled() || at::sequence_number::peek() == 0) return std::nullopt;
  bool wanted = false;
  for (const c10::IValue& value : arguments) {
    ForEachTensor(value, [&](const at::Tensor& tensor) { wanted = wanted || tensor.requires_grad(); });
  }
  if (!wanted) return std::nullopt;
  return AutogradNode{at::RecordFunction::currentThreadId(), at::sequence_number::peek() - 1, ""};
}

std::optional<AutogradNode> NodeHere() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return std::nullopt;
  return AutogradNode{node->thread_id(), node->sequence_nr(), node->name()};
}

}  // namespace

RecordedCall::RecordedCall(const c10::OperatorHandle& op, const c10::Stack& stack) : op_(op) {
  if (in_call || !IsRecording()) return;
  in_call = records_ = true;
  const std::span<const c10::IValue> arguments = Last(stack, op.schema().arguments().size());
  arguments_.assign(arguments.begin(), arguments.end());
  BeginOperator(MadeNode(arguments_));
}

RecordedCall::~RecordedCall() {
  if (!records_) return;
  in_call = false;
  AbandonOperator();
}

void RecordedCall::Done(const c10::Stack& stack) { End(stack, false); }
void RecordedCall::DoneAtOnce(const c10::Stack& stack) { End(stack, true); }

void RecordedCall::End(const c10::Stack& stack, bool at_once) {
  if (!records_) return;
  const Accesses accesses =
      AccessesOf(op_, arguments_, Last(stack, op_.schema().returns().size()), IsOfDevice);
  const bool touches = !accesses.reads.empty() || !accesses.writes.empty();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  EndOperator(op_.schema().name(), accesses.reads, accesses.writes, at_once && touches ? &stream : nullptr);
  in_call = records_ = false;
  if (at_once && touches) (void)FinishStream(stream);
}

PlacedKernel::PlacedKernel(const c10::OperatorHandle& op)
    : original_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) {}

void PlacedKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const bool used = op.schema().name() == "aten::record_stream" && IsRecording();
  if (used) {
    const c10::cuda::CUDAStream stream(stack->back().toStream());
    const at::Tensor& tensor = (*stack)[stack->size() - 2].toTensor();
    if (tensor.has_storage()) {
      RecordUsedOn(reinterpret_cast<std::uintptr_t>(tensor.storage().data()), stream.stream());
    }
  }
  RecordedCall call(op, *stack);
  original_.callBoxed(op, keys, stack);
  call.Done(*stack);
}

OuterKernel::OuterKernel(const c10::OperatorHandle& op)
    : original_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) {}

void OuterKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (!IsRecording()) return original_.callBoxed(op, keys, stack);
  const std::span<const c10::IValue> given = Last(*stack, op.schema().arguments().size());
  const c10::Stack arguments(given.begin(), given.end());
  BeginOuterOperator();
  try {
    original_.callBoxed(op, keys, stack);
  } catch (...) {
    EndOuterOperator(op.schema().name(), {}, {}, true);
    throw;
  }
  const Accesses accesses = AccessesOf(op, arguments, Last(*stack, op.schema().returns().size()), IsOfDevice);
  EndOuterOperator(op.schema().name(), accesses.reads, accesses.writes, false);
}

void RecordOnHost(const c10::OperatorHandle& op, const c10::Stack& arguments,
                  std::span<const c10::IValue> results) {
  const Accesses accesses = AccessesOf(op, arguments, results, IsOfPinned);
  if (accesses.reads.empty() && accesses.writes.empty()) return;
  RecordHostOperator(op.schema().name(), accesses.reads, accesses.writes);
}

void WatchAllocator() {
  if (!IsRecording()) return;
  static std::once_flag once;
  std::call_once(once, [] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);  // a program in C++ may not have yet
    GuardRecords(true);
    c10::Event(c10::DeviceType::CUDA).record(c10::cuda::getCurrentCUDAStream().unwrap());
    GuardRecords(false);
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) {
      using Entry = std::decay_t<decltype(entry)>;
      if (entry.action_ == Entry::ALLOC) {
        RecordAllocated(entry.addr_, entry.size_, static_cast<cudaStream_t>(entry.stream_), entry.device_);
      } else if (entry.action_ == Entry::FREE_REQUESTED) {
        RecordFreed(entry.addr_, entry.size_);
      } else if (entry.action_ == Entry::FREE_COMPLETED) {
        RecordFreeCompleted();
      }
    });
  });
}

void WatchNodes() { WatchAutograd({NodeHere, WatchAllocator}); }

}  // namespace shardplan::softdevice
