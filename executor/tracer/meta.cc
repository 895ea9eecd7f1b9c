// SPDX-License-Identifier: Apache-2.0
#include "tracer/meta.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/executor/trace_recorder.h"
#include "tracer/mode.h"
#include "tracer/operators.h"

namespace shardplan::executor {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using MetaResults = std::vector<c10::IValue>;

bool IsGiven(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// ---- attention ----

MetaResults FlashOfCpu(Arguments a, RecordedKernels) {
  const at::Tensor& q = a[0].toTensor();
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  const at::Tensor log_sum_exp =
      at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(half ? at::kFloat : q.scalar_type()));
  return {at::empty_like(q), log_sum_exp.transpose(1, 2)};
}

MetaResults FlashOfCpuBackward(Arguments a, RecordedKernels) {
  MetaResults gradients;
  for (std::size_t i = 1; i <= 3; ++i) {
    const at::Tensor& tensor = a[i].toTensor();
    gradients.emplace_back(at::empty(tensor.transpose(1, 2).sizes(), tensor.options()).transpose(1, 2));
  }
  return gradients;
}

// The offset of the random state is in host memory until torch 2.15, which allocates it first (attention.cu).
c10::Device DeviceOfRandomState() {
  constexpr bool kOnDevice = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;
  return kOnDevice ? c10::kMeta : c10::kCPU;
}

MetaResults FlashOfGpu(Arguments a, RecordedKernels) {
  const at::Tensor& q = a[0].toTensor();
  const at::TensorOptions options = q.options();
  return {at::empty_like(q),
          at::empty({q.size(0), q.size(1), q.size(2)}, options.dtype(at::kFloat)),
          at::Tensor(),
          at::Tensor(),
          q.size(2),
          a[1].toTensor().size(2),
          at::empty({2}, options.dtype(at::kUInt64)),
          at::empty({}, options.dtype(at::kUInt64)),
          at::empty({0}, options)};
}

MetaResults FlashOfGpuBackward(Arguments a, RecordedKernels) {
  return {at::empty_like(a[1].toTensor()), at::empty_like(a[2].toTensor()), at::empty_like(a[3].toTensor())};
}

MetaResults Efficient(Arguments a, RecordedKernels) {
  const at::Tensor &q = a[0].toTensor(), &v = a[2].toTensor();
  const at::TensorOptions options = q.options();
  const std::int64_t rows = a[4].toBool() ? (q.size(2) + 31) / 32 * 32 : 0;
  const at::TensorOptions state = options.dtype(at::kLong).device(DeviceOfRandomState());
  return {at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, options).transpose(1, 2),
          at::empty({q.size(0), q.size(1), rows}, options.dtype(at::kFloat)), at::empty({}, state),
          at::empty({}, state)};
}

MetaResults EfficientBackward(Arguments a, RecordedKernels kernels) {
  MetaResults gradients = FlashOfCpuBackward(a, kernels);
  at::Tensor of_bias;
  if (IsGiven(a[4]) && a[10].toBoolList()[3]) {
    std::vector<std::int64_t> shape = a[4].toTensor().sizes().vec();
    const std::int64_t columns = shape.back();
    shape.back() = (columns + 15) / 16 * 16;
    of_bias = at::empty(shape, a[4].toTensor().options()).narrow(-1, 0, columns);
  }
  gradients.emplace_back(of_bias);
  return gradients;
}

// ---- dropout of a GPU ----

MetaResults NativeDropout(Arguments a, RecordedKernels) {
  const at::Tensor& input = a[0].toTensor();
  return {at::empty_like(input), at::empty_like(input, input.options().dtype(at::kBool))};
}

MetaResults NativeDropoutBackward(Arguments a, RecordedKernels) { return {at::empty_like(a[0].toTensor())}; }

// ---- norms and embeddings ----

MetaResults LayerNorm(Arguments a, RecordedKernels kernels) {
  const at::Tensor& input = a[0].toTensor();
  std::vector<std::int64_t> statistics = input.sizes().vec();
  for (std::size_t i = statistics.size() - a[1].toIntVector().size(); i < statistics.size(); ++i)
    statistics[i] = 1;
  const at::ScalarType given = IsGiven(a[2]) ? a[2].toTensor().scalar_type() : input.scalar_type();
  const bool is_half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  const at::TensorOptions options = input.options().dtype(kernels == RecordedKernels::kCpu ? given
                                                          : is_half                        ? at::kFloat
                                                                    : input.scalar_type());
  return {at::empty(input.sizes(), input.options()), at::empty(statistics, options),
          at::empty(statistics, options)};
}

MetaResults LayerNormBackward(Arguments a, RecordedKernels) {
  const at::Tensor& input = a[1].toTensor();
  const auto wanted = a[7].toBoolList();
  const auto like = [](const c10::IValue& value) {
    return at::empty_like(value.toTensor(), at::MemoryFormat::Contiguous);
  };
  return {wanted[0] ? at::empty(input.sizes(), input.options()) : at::Tensor(),
          wanted[1] && IsGiven(a[5]) ? like(a[5]) : at::Tensor(),
          wanted[2] && IsGiven(a[6]) ? like(a[6]) : at::Tensor()};
}

MetaResults Embedding(Arguments a, RecordedKernels) {
  const at::Tensor& table = a[0].toTensor();
  std::vector<std::int64_t> shape = a[1].toTensor().sizes().vec();
  shape.push_back(table.size(1));
  return {at::empty(shape, table.options())};
}

MetaResults EmbeddingBackward(Arguments a, RecordedKernels) {
  const at::Tensor& gradient = a[0].toTensor();
  return {at::empty({a[2].toInt(), gradient.size(-1)}, gradient.options())};
}

MetaResults IndexSelect(Arguments a, RecordedKernels) {
  const at::Tensor& input = a[0].toTensor();
  std::vector<std::int64_t> shape = input.sizes().vec();
  if (!shape.empty()) {
    const std::int64_t dim = a[1].toInt();
    shape[static_cast<std::size_t>(dim < 0 ? dim + input.dim() : dim)] = a[2].toTensor().numel();
  }
  return {at::empty(shape, input.options())};
}

using MetaRule = MetaResults (*)(Arguments, RecordedKernels);

const MetaRule* MetaRuleOf(std::string_view name) {
  static const std::map<std::string_view, MetaRule> rules = {
      {"aten::_scaled_dot_product_flash_attention_for_cpu", FlashOfCpu},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", FlashOfCpuBackward},
      {"aten::_scaled_dot_product_flash_attention", FlashOfGpu},
      {"aten::_scaled_dot_product_flash_attention_backward", FlashOfGpuBackward},
      {"aten::_scaled_dot_product_efficient_attention", Efficient},
      {"aten::_scaled_dot_product_efficient_attention_backward", EfficientBackward},
      {"aten::native_dropout", NativeDropout},
      {"aten::native_dropout_backward", NativeDropoutBackward},
      {"aten::native_layer_norm", LayerNorm},
      {"aten::native_layer_norm_backward", LayerNormBackward},
      {"aten::embedding", Embedding},
      {"aten::embedding_dense_backward", EmbeddingBackward},
      {"aten::index_select", IndexSelect},
  };
  const auto found = rules.find(name);
  return found == rules.end() ? nullptr : &found->second;
}

// ---- the rest, on the CPU ----

class CpuStandIn {
 public:
  c10::IValue ToCpu(const c10::IValue& value) {
    if (value.isTensor()) return Zeros(value.toTensor());
    if (value.isDevice() && value.toDevice().is_meta()) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(Zeros(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(Zeros(*tensor)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  c10::IValue ToMeta(const c10::IValue& value) const {
    if (value.isTensor()) return Shape(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(Shape(tensor));
      return list;
    }
    return value;
  }

 private:
  at::Tensor Zeros(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta()) return tensor;
    at::Tensor zeros =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU)).zero_();
    given_.emplace_back(zeros, tensor);
    return zeros;
  }
  // An argument that is returned stays what it was.
  at::Tensor Shape(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [zeros, own] : given_) {
      if (zeros.is_same(tensor)) return own;
    }
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> given_;
};

}  // namespace

void CallOnAnyDevice(const c10::OperatorHandle& op, torch::jit::Stack& stack, RecordedKernels kernels) {
  const std::size_t count = op.schema().arguments().size();
  const std::size_t below = stack.size() - count;
  const auto is_on_meta = [](const at::Tensor& tensor) { return tensor.is_meta(); };
  const std::vector<at::Tensor> tensors = TensorsIn(Arguments(stack.data() + below, count));
  if (std::ranges::none_of(tensors, is_on_meta)) {
    CallBelow(op, stack);
    return;
  }
  const std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(below), stack.end());
  if (const MetaRule* rule = MetaRuleOf(op.schema().name())) {
    MetaResults results = (*rule)(arguments, kernels);
    stack.resize(below);
    for (c10::IValue& result : results) stack.push_back(std::move(result));
    return;
  }
  try {
    CallBelow(op, stack);
    return;
  } catch (const c10::NotImplementedError&) {  // no kernel for the meta device, here or in what it calls
    stack.resize(below);
  }
  CpuStandIn stand_in;
  for (const c10::IValue& argument : arguments) stack.push_back(stand_in.ToCpu(argument));
  CallBelow(op, stack);
  for (std::size_t i = below; i < stack.size(); ++i) stack[i] = stand_in.ToMeta(stack[i]);
}

// ---- models on the meta device ----

struct MetaDevice::Implementation final : OperatorHandler {
  void Dispatch(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const auto& parameters = op.schema().arguments();
    const std::size_t below = stack.size() - parameters.size();
    if (TensorsIn(Arguments(stack.data() + below, parameters.size())).empty()) {
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const bool is_device = parameters[i].name() == "device";
        if (is_device && stack[below + i].isNone()) stack[below + i] = c10::Device(c10::kMeta);
      }
    }
    CallOnAnyDevice(op, stack, RecordedKernels::kCpu);
  }
  DispatchMode mode{*this};
};

MetaDevice::MetaDevice() : implementation_(std::make_unique<Implementation>()) {}
MetaDevice::~MetaDevice() = default;

}  // namespace shardplan::executor
