// SPDX-License-Identifier: Apache-2.0
#include "device/kernels/special.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "device/kernels/kernel.h"
#include "device/kernels/on_host.h"

namespace shardplan::softdevice {

// CUDA keeps a layer norm's statistics in float; the host in the input's dtype, unless the weight has
// another. The host has no histogram of integers.
void AdaptToHost(const c10::OperatorHandle& op, c10::Stack& stack) {
  if (op.schema().name() == "aten::histc" && !stack[0].toTensor().is_floating_point()) {
    stack[0] = stack[0].toTensor().to(at::kDouble);
  }
  if (op.schema().name() != "aten::native_layer_norm_backward") return;
  const at::ScalarType input = stack[1].toTensor().scalar_type();
  const bool mixed =
      stack[5].isTensor() && stack[5].toTensor().defined() && stack[5].toTensor().scalar_type() != input;
  const at::ScalarType statistics = mixed ? at::toOpMathType(input) : input;
  for (const std::size_t i : {3, 4}) stack[i] = stack[i].toTensor().to(statistics);
}

// Between host and device, and between devices, torch's own copy calls the runtime.
void Copy(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  at::Tensor to = arguments[0].toTensor();
  const at::Tensor from = arguments[1].toTensor();
  if (to.is_cuda() && from.device() == to.device()) return RunKernel(op, stack);
  const bool non_blocking = arguments[2].toBool();
  torch::jit::drop(*stack, 3);
  stack->emplace_back(at::native::copy_(to, from, non_blocking));
}

void ForeachCopy(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  const std::vector<at::Tensor> to = arguments[0].toTensorVector();
  const std::vector<at::Tensor> from = arguments[1].toTensorVector();
  const auto is_of = [&](const at::Tensor& tensor) { return tensor.device() == to[0].device(); };
  if (std::ranges::all_of(to, is_of) && std::ranges::all_of(from, is_of)) return RunKernel(op, stack);
  const bool non_blocking = arguments[2].toBool();
  torch::jit::drop(*stack, 3);
  for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

// The host's kernel draws from the host's default generator.
void NativeDropout(const c10::OperatorHandle&, c10::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 3);
  const at::Tensor input = arguments[0].toTensor();
  const double p = arguments[1].toDouble();
  const bool train = arguments[2].isNone() || arguments[2].toBool();
  const at::Tensor output = at::empty_like(input);
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  std::optional<at::Generator> numbers;
  if (train) numbers = NextNumbers(input.device());
  Queue(input.device(), "aten::native_dropout",
        [from = OnHost(input), to = OnHost(output), kept = OnHost(mask), p, numbers]() mutable {
          numbers ? kept.bernoulli_(1 - p, numbers) : kept.fill_(true);
          const double scale = !numbers ? 1.0 : p == 1 ? 0.0 : 1 / (1 - p);
          to.copy_(from.mul(kept).mul(scale));
        });
  stack->emplace_back(output);
  stack->emplace_back(mask);
}

}  // namespace shardplan::softdevice
