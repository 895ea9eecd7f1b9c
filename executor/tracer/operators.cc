// SPDX-License-Identifier: Apache-2.0
#include "tracer/operators.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>

#include "training/cpp/torch_names.h"

namespace shardplan::executor {
namespace {

using Values = c10::ArrayRef<c10::IValue>;

const std::set<std::string_view>& AllocateOnly() {
  static const std::set<std::string_view> names = {"empty",          "empty_like", "empty_strided",
                                                   "empty_permuted", "new_empty",  "new_empty_strided"};
  return names;
}

// The result depends on the arguments' shape only.
const std::set<std::string_view>& ReadsNothing() {
  static const std::set<std::string_view> names = {
      "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",  "rand_like",
      "randn_like", "zero_",     "fill_",     "uniform_",  "normal_",  "bernoulli_"};
  return names;
}

// Arguments of which only as many elements are read as the output has (the table of a lookup).
const std::map<std::string_view, std::size_t>& Lookups() {
  static const std::map<std::string_view, std::size_t> positions = {
      {"embedding", 0}, {"index_select", 0},     {"gather", 0},
      {"index", 0},     {"nll_loss_forward", 0}, {"take", 0}};
  return positions;
}

// Arguments that are there for their shape.
const std::map<std::string_view, std::size_t>& Unread() {
  static const std::map<std::string_view, std::size_t> positions = {{"nll_loss_backward", 1}, {"copy_", 0}};
  return positions;
}

// ---- FLOPs: those of torch.utils.flop_counter ----

using Shape = at::IntArrayRef;

Shape ShapeOf(const c10::IValue& value) { return value.toTensor().sizes(); }

std::int64_t Product(Shape shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

std::int64_t MatrixProduct(Shape a, Shape b) { return 2 * a[0] * a[1] * b[1]; }
std::int64_t BatchedProduct(Shape a, Shape b) { return 2 * a[0] * a[1] * a[2] * b[2]; }

// The products q k^T and p v for every head of the query: key and value heads that are shared count as if
// they were repeated.
std::int64_t AttentionForward(Shape query, Shape key, Shape value) {
  const std::int64_t pairs = query[0] * query[1] * query[2] * key[2];
  return 2 * pairs * (query[3] + value[3]);
}

// Scores once more, then the gradients of p, v, q and k.
std::int64_t AttentionBackward(Shape query, Shape key, Shape value) {
  const std::int64_t pairs = query[0] * query[1] * query[2] * key[2];
  return 2 * pairs * (3 * query[3] + 2 * value[3]);
}

std::int64_t Convolution(Shape input, Shape weight, Shape output, bool transposed) {
  return 2 * Product((transposed ? input : output).slice(2)) * Product(weight) * input[0];
}

std::int64_t ConvolutionBackward(Values arguments, Values results) {
  const Shape gradient = ShapeOf(arguments[0]), input = ShapeOf(arguments[1]), weight = ShapeOf(arguments[2]);
  const bool transposed = arguments[7].toBool();
  const auto mask = arguments[10].toBoolList();
  const auto swapped = [](Shape shape) {
    std::vector<std::int64_t> result(shape.begin(), shape.end());
    std::swap(result[0], result[1]);
    return result;
  };
  std::int64_t count = 0;
  if (mask[0]) count += Convolution(gradient, weight, ShapeOf(results[0]), !transposed);
  if (mask[1]) {
    const auto x = swapped(input), dy = swapped(gradient), dw = swapped(ShapeOf(results[1]));
    count += transposed ? Convolution(dy, x, dw, false) : Convolution(x, dy, dw, false);
  }
  return count;
}

// Every row of one side goes through one group's matrix, whatever the grouping.
std::int64_t GroupedProduct(Shape a, Shape b) {
  if (a.size() == 2 && b.size() == 3) return 2 * a[0] * a[1] * b[2];
  if (a.size() == 3 && b.size() == 2) return 2 * a[1] * a[2] * b[1];
  if (a.size() == 2 && b.size() == 2) return 2 * a[0] * a[1] * b[1];
  return 2 * a[0] * a[1] * a[2] * b[2];
}

// The products with the weights.
std::int64_t Recurrent(Values arguments) {
  const Shape input = ShapeOf(arguments[0]);
  const std::int64_t rows = Product(input.slice(0, input.size() - 1));
  std::int64_t count = 0;
  for (const at::Tensor& weight : TensorsIn(arguments.slice(1, 1))) {
    if (weight.dim() == 2) count += 2 * rows * weight.numel();
  }
  return count;
}

using FlopFormula = std::function<std::int64_t(Values arguments, Values results)>;

const std::map<std::string_view, FlopFormula>& FlopFormulas() {
  static const std::map<std::string_view, FlopFormula> formulas = [] {
    std::map<std::string_view, FlopFormula> made;
    const auto product = [](auto count, std::size_t first) {
      return [count, first](Values a, Values) { return count(ShapeOf(a[first]), ShapeOf(a[first + 1])); };
    };
    made["mm"] = product(MatrixProduct, 0);
    made["_scaled_mm"] = product(MatrixProduct, 0);
    made["addmm"] = product(MatrixProduct, 1);
    made["bmm"] = product(BatchedProduct, 0);
    made["baddbmm"] = product(BatchedProduct, 1);
    made["_grouped_mm"] = product(GroupedProduct, 0);
    for (const char* name : {"convolution", "_convolution", "cudnn_convolution", "_slow_conv2d_forward",
                             "convolution_overrideable"}) {
      made[name] = [](Values a, Values results) {
        const bool transposed = a.size() > 6 && a[6].isBool() && a[6].toBool();
        return Convolution(ShapeOf(a[0]), ShapeOf(a[1]), ShapeOf(results[0]), transposed);
      };
    }
    made["convolution_backward"] = ConvolutionBackward;
    for (const char* name :
         {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
          "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"}) {
      made[name] = [](Values a, Values) {
        return AttentionForward(ShapeOf(a[0]), ShapeOf(a[1]), ShapeOf(a[2]));
      };
    }
    for (const char* name :
         {"_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention_backward",
          "_scaled_dot_product_flash_attention_for_cpu_backward",
          "_scaled_dot_product_cudnn_attention_backward"}) {
      made[name] = [](Values a, Values) {
        return AttentionBackward(ShapeOf(a[1]), ShapeOf(a[2]), ShapeOf(a[3]));
      };
    }
    made["_cudnn_rnn"] = [](Values a, Values) { return Recurrent(a); };
    made["_cudnn_rnn_backward"] = [](Values a, Values) { return 2 * Recurrent(a); };
    return made;
  }();
  return formulas;
}

const at::Tensor* LargestFloating(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* largest = nullptr;
  for (const at::Tensor& tensor : tensors) {
    const bool floats = at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
    if (floats && (largest == nullptr || tensor.numel() > largest->numel())) largest = &tensor;
  }
  return largest;
}

}  // namespace

DType ToDType(at::ScalarType type) {
  if (const std::optional<DType> known = KnownDType(type)) return *known;
  switch (c10::elementSize(type)) {
    case 2:
      return DType::kInt16;
    case 4:
      return DType::kInt32;
    case 8:
      return DType::kInt64;
    default:
      return DType::kUInt8;
  }
}

void TensorsIn(const c10::IValue& value, std::vector<at::Tensor>& into) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) into.push_back(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) TensorsIn(item, into);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) TensorsIn(item, into);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) TensorsIn(entry.value(), into);
  }
}

std::vector<at::Tensor> TensorsIn(Values values) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : values) TensorsIn(value, found);
  return found;
}

std::int64_t TouchedBytes(const at::Tensor& tensor) {
  auto count = static_cast<std::int64_t>(tensor.element_size());
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 || tensor.size(dim) == 0) count *= tensor.size(dim);
  }
  return count;
}

bool IsDense(const at::Tensor& tensor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::ranges::sort(dims);
  std::int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return tensor.numel() > 0;
}

OperatorKind::OperatorKind(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string& full = schema.name();  // "aten::mm"
  const std::size_t colons = full.find("::");
  base = full.substr(colons + 2);
  name = full.substr(0, colons) + "." + base;
  allocates_only = AllocateOnly().contains(base);
  is_mutable = schema.is_mutable();
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) written.push_back(i);
    if (!argument.kwarg_only()) positional = i + 1;
  }
}

std::vector<ReadTensor> ReadTensors(const OperatorKind& kind, Values arguments,
                                    const std::vector<at::Tensor>& outputs) {
  std::vector<ReadTensor> result;
  if (ReadsNothing().contains(kind.base)) return result;
  const auto lookup = Lookups().find(kind.base);
  const auto unread = Unread().find(kind.base);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool by_position = i < kind.positional;
    if (by_position && unread != Unread().end() && unread->second == i) continue;
    std::vector<at::Tensor> found;
    TensorsIn(arguments[i], found);
    for (at::Tensor& tensor : found) {
      std::int64_t count = TouchedBytes(tensor);
      if (by_position && lookup != Lookups().end() && lookup->second == i) {
        std::int64_t rows = 0;
        for (const at::Tensor& output : outputs) rows = std::max(rows, output.numel());
        if (kind.base == "nll_loss_forward") rows = arguments[1].toTensor().numel();
        count = std::min(count, rows * static_cast<std::int64_t>(tensor.element_size()));
      }
      result.push_back({std::move(tensor), count});
    }
  }
  return result;
}

std::vector<at::Tensor> WrittenArguments(const OperatorKind& kind, Values arguments) {
  std::vector<at::Tensor> found;
  for (const std::size_t i : kind.written) TensorsIn(arguments[i], found);
  return found;
}

std::int64_t Flops(const OperatorKind& kind, Values arguments, Values results) {
  const auto formula = FlopFormulas().find(kind.base);
  return formula == FlopFormulas().end() ? 0 : formula->second(arguments, results);
}

DType ArithmeticDType(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
  for (const auto* tensors : {&inputs, &outputs}) {
    if (const at::Tensor* largest = LargestFloating(*tensors)) return ToDType(largest->scalar_type());
  }
  return ToDType((inputs.empty() ? outputs : inputs).front().scalar_type());
}

std::string OperatorTables() {
  std::string text;
  for (const std::string_view name : AllocateOnly()) text += fmt::format("allocate_only {}\n", name);
  for (const auto& [name, formula] : FlopFormulas()) text += fmt::format("flops {}\n", name);
  for (const auto& [name, position] : Lookups()) text += fmt::format("lookup {} {}\n", name, position);
  for (const std::string_view name : ReadsNothing()) text += fmt::format("reads_nothing {}\n", name);
  for (const auto& [name, position] : Unread()) text += fmt::format("unread {} {}\n", name, position);
  return text;
}

}  // namespace shardplan::executor
