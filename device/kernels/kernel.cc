// SPDX-License-Identifier: Apache-2.0
#include "device/kernels/kernel.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "device/kernels/on_host.h"
#include "device/kernels/special.h"
#include "device/runtime/software_device.h"

namespace shardplan::softdevice {

bool ReadsNumbers(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

bool IsWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

namespace {

// torch moves the indices of these itself.
constexpr std::array<std::string_view, 6> kTakeIndicesOfTheHost = {
    "aten::index",         "aten::index_put_",       "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};

bool TakesIndicesOfTheHost(const c10::OperatorHandle& op) {
  return std::ranges::find(kTakeIndicesOfTheHost, op.schema().name()) != kTakeIndicesOfTheHost.end();
}

bool IsGenerator(const c10::Argument& argument) {
  const c10::TypePtr type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// The arguments of the call, changed by `tensors`; devices become `device`, generators `numbers` or nothing.
c10::Stack Changed(const c10::FunctionSchema& schema, const c10::Stack& arguments, TensorMap& tensors,
                   c10::Device device, const std::optional<at::Generator>& numbers) {
  c10::Stack changed;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (IsGenerator(schema.arguments()[i])) {
      changed.push_back(numbers ? c10::IValue(*numbers) : c10::IValue());
    } else if (arguments[i].isDevice()) {
      changed.emplace_back(device);
    } else {
      changed.push_back(tensors(arguments[i]));
    }
  }
  return changed;
}

std::optional<at::Generator> NumbersFor(const c10::FunctionSchema& schema, const c10::Stack& arguments,
                                        c10::Device device) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!IsGenerator(schema.arguments()[i])) continue;
    return arguments[i].isGenerator() ? NextNumbers(arguments[i].toGenerator()) : NextNumbers(device);
  }
  return std::nullopt;
}

// The argument that a returned value is; empty: a new value.
std::optional<std::size_t> ReturnedArgument(const c10::FunctionSchema& schema, std::size_t output) {
  const c10::AliasInfo* alias = schema.returns()[output].alias_info();
  if (alias == nullptr || !alias->isWrite()) return std::nullopt;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* of = schema.arguments()[i].alias_info();
    if (of != nullptr && of->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

void SetShape(const at::Tensor& tensor, const at::Tensor& as) {
  if (tensor.sizes() == as.sizes()) return;
  tensor.resize_(as.sizes());
  if (tensor.strides() != as.strides()) tensor.as_strided_(as.sizes(), as.strides());
}

at::Tensor MakeLike(const at::Tensor& shape, c10::Device device) {
  at::Tensor made = at::empty_strided(shape.sizes(), shape.strides(),
                                      at::TensorOptions(shape.scalar_type()).device(device));
  made._set_conj(shape.is_conj());
  made._set_neg(shape.is_neg());
  return made;
}

// Copies new results of the host's kernel to where the device's are.
void CopyResults(const c10::Stack& results, const c10::Stack& to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::vector<at::Tensor> from;
    ForEachTensor(results[i], [&](const at::Tensor& tensor) { from.push_back(tensor); });
    std::size_t next = 0;
    ForEachTensor(to[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(next < from.size() && from[next].sizes() == tensor.sizes(),
                  "the host's kernel gives another shape than the device's");
      tensor.copy_(from[next++]);
    });
  }
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::Stack arguments)
      : op_(op), arguments_(std::move(arguments)), device_(DeviceOf(op, arguments_)) {}

  // The values returned. With the shapes of a Meta kernel the host does not wait for the device.
  c10::Stack Run() {
    TORCH_CHECK(WhatIsBroken().empty(), "CUDA error: the device in software is broken: ", WhatIsBroken());
    std::optional<c10::Stack> shapes = Shapes();
    if (shapes) return RunQueued(*shapes);
    return RunNow([&](std::function<void()> work) { Queue(device_, schema().name(), std::move(work)); });
  }

  // The same, computed before it returns.
  c10::Stack RunAtOnce() {
    return RunNow([](const std::function<void()>& work) { work(); });
  }

  // Writes what the host's kernel gives where the results of the device's kernel are.
  void ComputeInto(const c10::Stack& results) {
    c10::Stack stack = OnHostWithNumbers();
    const c10::Stack targets = Targets(results);
    AdaptToHost(op_, stack);
    CallPlainly(op_, stack);
    CopyResults(stack, targets);
  }

  // New values as meta tensors, after the tensors that are written have got their new shapes. Nothing: only
  // the kernel itself tells.
  std::optional<c10::Stack> Shapes() {
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
    if (ReadsNumbers(op_)) return std::nullopt;
    for (const c10::Argument& output : schema().returns()) {
      const c10::TypeKind kind = output.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return std::nullopt;
    }
    TensorMap on_meta(OnMeta);
    c10::Stack stack = Changed(schema(), arguments_, on_meta, c10::Device(c10::kMeta), std::nullopt);
    try {
      CallPlainly(op_, stack);
    } catch (const c10::NotImplementedError&) {
      return std::nullopt;
    }
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      if (!IsWritten(schema().arguments()[i])) continue;
      ForEachTensor(arguments_[i], [&](const at::Tensor& tensor) { SetShape(tensor, on_meta(tensor)); });
    }
    return stack;
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }

  c10::Stack OnHostWithNumbers() {
    TensorMap on_host(OnHost);
    return Changed(schema(), arguments_, on_host, c10::Device(c10::kCPU),
                   NumbersFor(schema(), arguments_, device_));
  }

  // The device's new tensors; an argument in place of what is one.
  c10::Stack Results(const c10::Stack& values) {
    TensorMap make([&](const at::Tensor& shape) { return MakeLike(shape, device_); });
    c10::Stack results;
    for (std::size_t i = 0; i < schema().returns().size(); ++i) {
      const std::optional<std::size_t> argument = ReturnedArgument(schema(), i);
      results.push_back(argument ? arguments_[*argument] : make(values[i]));
    }
    return results;
  }

  // The results that have to be written yet, as the host sees them.
  c10::Stack Targets(const c10::Stack& results) {
    TensorMap on_host(OnHost);
    c10::Stack targets;
    for (std::size_t i = 0; i < results.size(); ++i) {
      targets.push_back(ReturnedArgument(schema(), i) ? c10::IValue() : on_host(results[i]));
    }
    return targets;
  }

  c10::Stack RunQueued(const c10::Stack& shapes) {
    c10::Stack results = Results(shapes);
    c10::Stack stack = OnHostWithNumbers();
    Queue(device_, schema().name(),
          [op = op_, stack = std::move(stack), targets = Targets(results)]() mutable {
            AdaptToHost(op, stack);
            CallPlainly(op, stack);
            CopyResults(stack, targets);
          });
    return results;
  }

  // Runs an operator whose result's shape depends on numbers, or is a number: waits for the stream. `queue`
  // takes the copies of the results to the device.
  c10::Stack RunNow(const std::function<void(std::function<void()>)>& queue) {
    const c10::cuda::CUDAGuard guard(device_);
    TORCH_CHECK(FinishStream(c10::cuda::getCurrentCUDAStream(device_.index()).stream()),
                "CUDA error: ", WhatIsBroken());
    c10::Stack stack = OnHostWithNumbers();
    // An out argument takes any shape: a new tensor of the host does.
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      if (!schema().arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
      outs.emplace_back(arguments_[i].toTensor(), stack[i].toTensor().clone());
      stack[i] = outs.back().second;
    }
    AdaptToHost(op_, stack);
    CallPlainly(op_, stack);
    for (const auto& [device_tensor, host_tensor] : outs) SetShape(device_tensor, host_tensor);
    c10::Stack results = Results(stack);
    queue([outs = HostOuts(outs), stack, targets = Targets(results)] {
      for (const auto& [to, from] : outs) to.copy_(from);
      CopyResults(stack, targets);
    });
    return results;
  }

  static std::vector<std::pair<at::Tensor, at::Tensor>> HostOuts(
      std::vector<std::pair<at::Tensor, at::Tensor>> outs) {
    for (auto& [device_tensor, host_tensor] : outs) device_tensor = OnHost(device_tensor);
    return outs;
  }

  const c10::OperatorHandle op_;
  const c10::Stack arguments_;
  const c10::Device device_;
};

}  // namespace

void Queue(c10::Device device, const std::string& name, std::function<void()> work) {
  const c10::cuda::CUDAGuard guard(device);
  EnqueueKernel(c10::cuda::getCurrentCUDAStream(device.index()).stream(), name,
                [name, work = std::move(work)] {
                  try {
                    const c10::InferenceMode plain(false);
                    work();
                  } catch (const c10::Error& error) {
                    throw std::runtime_error(error.what_without_backtrace());
                  }
                });
}

c10::Device DeviceOf(const c10::OperatorHandle& op, const c10::Stack& arguments) {
  std::optional<c10::Device> device;
  const bool any_host_tensor = TakesIndicesOfTheHost(op);
  for (const c10::IValue& argument : arguments) {
    ForEachTensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && !device) device = tensor.device();
    });
  }
  for (const c10::IValue& argument : arguments) {
    ForEachTensor(argument, [&](const at::Tensor& tensor) {
      const bool scalar = tensor.is_cpu() && (tensor.dim() == 0 || any_host_tensor);
      TORCH_CHECK(!device || scalar || tensor.device() == *device,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                  " and ", tensor.device(), " (", op.schema().name(), ")");
    });
    if (!device && argument.isDevice() && argument.toDevice().is_cuda()) device = argument.toDevice();
  }
  if (device && device->has_index()) return *device;
  return {c10::kCUDA, c10::cuda::current_device()};
}

void RunKernel(const c10::OperatorHandle& op, c10::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  Call call(op, torch::jit::pop(*stack, count));
  for (c10::IValue& value : call.Run()) stack->push_back(std::move(value));
}

c10::Stack RunAtOnce(const c10::OperatorHandle& op, c10::Stack arguments) {
  const ForTheDevice computes;
  return Call(op, std::move(arguments)).RunAtOnce();
}

void ComputeInto(const c10::OperatorHandle& op, c10::Stack arguments, const c10::Stack& results) {
  const ForTheDevice computes;
  Call(op, std::move(arguments)).ComputeInto(results);
}

std::optional<c10::Stack> ShapesOf(const c10::OperatorHandle& op, c10::Stack arguments) {
  return Call(op, std::move(arguments)).Shapes();
}

}  // namespace shardplan::softdevice
