// SPDX-License-Identifier: Apache-2.0
#include "device/kernels/empty_call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/broadcast_tensors.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index.h>
#include <ATen/ops/nonzero.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "device/kernels/kernel.h"
#include "device/kernels/numbers.h"
#include "device/kernels/on_host.h"
#include "device/kernels/recorded_call.h"
#include "device/runtime/software_device.h"

namespace shardplan::softdevice {
namespace {

constexpr std::int64_t kBulkOfTheHost = std::int64_t{1} << 16;
constexpr std::int64_t kBulkTruthOfTheHost = std::int64_t{1} << 22;

// [Note: numbers inside a kernel]
// A kernel's host code may read what its own launches would have written (a count of segments, say). These
// launches were empty, and the memory holds what was there before: so inside of a kernel a number that comes
// from the device is 0, and the calls of other operators are not computed.
thread_local int depth = 0;
class Inside {
 public:
  Inside() { ReadZeros(++depth > 0); }
  ~Inside() { ReadZeros(--depth > 0); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

bool HasFloats(const at::Tensor& tensor) {
  return c10::isFloatingType(tensor.scalar_type()) || c10::isComplexType(tensor.scalar_type());
}

bool IsBulk(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kBool) return tensor.numel() > kBulkTruthOfTheHost;
  return tensor.numel() > kBulkOfTheHost && HasFloats(tensor);
}
bool IsBulkOfTheHost(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && IsBulk(tensor);
}

// May a kernel of the host that gives or writes this be left out?
bool IsEmptied(const at::Tensor& tensor) { return HasFloats(tensor) || tensor.scalar_type() == at::kBool; }

// Memory that nobody has touched: it reads as zeros.
at::Tensor Untouched(const at::Tensor& shape) {
  const at::TensorOptions options = at::TensorOptions(shape.scalar_type()).device(c10::kCPU);
  if (!IsBulk(shape)) return at::empty_strided(shape.sizes(), shape.strides(), options).zero_();
  const std::size_t bytes =
      at::detail::computeStorageNbytes(shape.sizes(), shape.strides(), shape.itemsize());
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return at::empty_strided(shape.sizes(), shape.strides(), options);
  return at::from_blob(
      memory, shape.sizes(), shape.strides(), [bytes](void* begin) { munmap(begin, bytes); }, options);
}

// Copies between host and device have a tensor of each.
bool IsCopy(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::copy_" || op.schema().name() == "aten::_foreach_copy_";
}

// Are the results, of known arguments, known or worth to be remembered? Floats of floats are not: few numbers
// that fill a large tensor are bulk.
bool CanBeKnown(const c10::Stack& arguments, std::span<const c10::IValue> results) {
  bool many = false, can = true;
  for (const c10::IValue& value : arguments) {
    ForEachTensor(value, [&](const at::Tensor& tensor) { many = many || tensor.numel() > kKnownFloats; });
  }
  for (const c10::IValue& value : results) {
    ForEachTensor(value, [&](const at::Tensor& tensor) {
      can = can && (IsKnown(tensor) || (many && CanRemember(tensor)));
    });
  }
  return can;
}

void RememberNew(std::span<const c10::IValue> results) {
  for (const c10::IValue& value : results) {
    ForEachTensor(value, [](const at::Tensor& tensor) {
      if (!IsKnown(tensor)) Remember(tensor);
    });
  }
}

void CopyKnown(const c10::Stack& arguments) {
  std::vector<at::Tensor> to, from;
  ForEachTensor(arguments[0], [&](const at::Tensor& tensor) { to.push_back(tensor); });
  ForEachTensor(arguments[1], [&](const at::Tensor& tensor) { from.push_back(tensor); });
  for (std::size_t i = 0; i < to.size() && i < from.size(); ++i) {
    const bool remembers = !IsKnown(to[i]) && CanRemember(to[i]) && from[i].numel() == to[i].numel();
    if (!IsKnown(from[i]) || !(IsKnown(to[i]) || remembers)) continue;
    if (remembers) Remember(to[i]);
    const c10::InferenceMode plain(false);
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    ViewOnHost(to[i]).copy_(ViewOnHost(from[i]));
  }
}

}  // namespace

EmptyKernel::EmptyKernel(const c10::OperatorHandle& op)
    : original_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)),
      reads_numbers_(ReadsNumbers(op) && op.schema().name() != "aten::index"),
      indices_(IndexResult(op.schema().name())) {}

void EmptyKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (depth > 0) return original_.callBoxed(op, keys, stack);
  if (op.schema().name() == "aten::_local_scalar_dense") {
    original_.callBoxed(op, keys, stack);
    c10::IValue& number = stack->back();
    if (number.isDouble() && std::isnan(number.toDouble())) number = 0.0;
    return;
  }
  WatchFrees();
  WatchAllocator();
  if (RunReworded(op, stack)) return;
  RecordedCall call(op, *stack);
  const std::size_t count = op.schema().arguments().size();
  const auto first = static_cast<std::ptrdiff_t>(stack->size() - count);
  const c10::Stack arguments(stack->begin() + first, stack->end());
  if (reads_numbers_) {
    stack->resize(static_cast<std::size_t>(first));
    if (op.schema().name() == "aten::equal" && !AreAllKnown(arguments)) {
      stack->emplace_back(arguments[0].toTensor().sizes() == arguments[1].toTensor().sizes());
      call.DoneAtOnce(*stack);
      return;
    }
    for (c10::IValue& value : RunAtOnce(op, arguments)) stack->push_back(std::move(value));
    call.DoneAtOnce(*stack);
    return;
  }
  {
    const Inside inside;
    original_.callBoxed(op, keys, stack);
  }
  call.Done(*stack);
  Settle(op, arguments, std::span(*stack).subspan(static_cast<std::size_t>(first)));
}

bool EmptyKernel::RunReworded(const c10::OperatorHandle& op, c10::Stack* stack) {
  const std::string& name = op.schema().name();
  const std::size_t count = op.schema().arguments().size();
  if (name == "aten::masked_select" && count == 2) {
    const c10::Stack arguments = torch::jit::pop(*stack, count);
    const std::vector<at::Tensor> same =
        at::broadcast_tensors({arguments[0].toTensor(), arguments[1].toTensor()});
    stack->emplace_back(at::index(same[0], {same[1]}));
    return true;
  }
  if (name != "aten::index" && name != "aten::_index_put_impl_") return false;
  c10::IValue& indices = (*stack)[stack->size() - count + 1];
  c10::List<std::optional<at::Tensor>> places;
  for (const std::optional<at::Tensor>& index : indices.toOptionalTensorVector()) {
    const bool mask = index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    if (!mask) {
      places.push_back(index);
      continue;
    }
    const at::Tensor& self = (*stack)[stack->size() - count].toTensor();
    const at::Tensor nonzero = at::nonzero(index->to(self.device()));
    for (std::int64_t dim = 0; dim < index->dim(); ++dim) places.push_back(nonzero.select(1, dim));
  }
  indices = places;
  return false;
}

// Settles the results that the host may read.
void EmptyKernel::Settle(const c10::OperatorHandle& op, const c10::Stack& arguments,
                         std::span<c10::IValue> results) {
  const ForTheDevice computes;
  if (IsCopy(op)) return CopyKnown(arguments);
  const bool known = AreAllKnown(arguments) && CanBeKnown(arguments, results);
  const bool of_floats = indices_ && arguments[0].isTensor() && arguments[0].toTensor().is_floating_point();
  if (known && !of_floats) {
    try {
      ComputeInto(op, arguments, c10::Stack(results.begin(), results.end()));
      MakeFinite(results);
      RememberNew(results);
      return;
    } catch (const std::exception&) {
      // The host has no such kernel, or refuses the numbers: they are settled below.
    }
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const c10::AliasInfo* alias = op.schema().returns()[i].alias_info();
    const bool is_out =
        alias != nullptr && !op.schema().arguments().empty() && op.schema().arguments().back().is_out();
    if (alias != nullptr && !is_out) continue;
    Zero(results[i]);
    SettleTruth(op, arguments, results[i]);
    if (of_floats && i == *indices_ && results[i].isTensor()) {
      SpreadIndices(op, arguments, results[i].toTensor());
    }
  }
}

QuietKernel::QuietKernel(const c10::OperatorHandle& op)
    : original_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {}

void QuietKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (ForTheDevice::IsTrue()) return original_.callBoxed(op, keys, stack);
  const std::size_t count = op.schema().arguments().size();
  const std::size_t first = stack->size() - count;
  const auto arguments = std::span<const c10::IValue>(*stack).subspan(first);
  bool bulk = false;
  for (const c10::IValue& value : arguments) {
    ForEachTensor(value, [&](const at::Tensor& tensor) { bulk = bulk || IsBulkOfTheHost(tensor); });
  }
  if (bulk) {
    if (std::optional<c10::Stack> values = Unwritten(op, arguments)) {
      const c10::Stack given = IsRecording() ? c10::Stack(arguments.begin(), arguments.end()) : c10::Stack();
      stack->resize(first);
      for (c10::IValue& value : *values) stack->push_back(std::move(value));
      if (!given.empty()) RecordOnHost(op, given, std::span(*stack).subspan(first));
      return;
    }
  }
  if (!IsRecording()) return original_.callBoxed(op, keys, stack);
  const c10::Stack given(arguments.begin(), arguments.end());
  original_.callBoxed(op, keys, stack);
  RecordOnHost(op, given, std::span(*stack).subspan(first));
}

std::optional<c10::Stack> QuietKernel::Unwritten(const c10::OperatorHandle& op,
                                                 std::span<const c10::IValue> arguments) {
  const c10::FunctionSchema& schema = op.schema();
  if (ReadsNumbers(op)) return std::nullopt;
  c10::Stack values;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    if (!IsWritten(schema.arguments()[i])) continue;
    bool floats = true;
    ForEachTensor(arguments[i], [&](const at::Tensor& tensor) { floats = floats && IsEmptied(tensor); });
    if (!floats) return std::nullopt;
    if (values.size() < schema.returns().size()) values.push_back(arguments[i]);
  }
  const bool all_written = values.size() == schema.returns().size();
  const bool in_place = !schema.arguments().empty() && !schema.arguments().back().is_out();
  if (all_written && in_place) return values;
  std::optional<c10::Stack> shapes;
  try {
    shapes = ShapesOf(op, c10::Stack(arguments.begin(), arguments.end()));
  } catch (const std::exception&) {
    return std::nullopt;  // the kernel says what is wrong
  }
  if (!shapes) return std::nullopt;
  if (all_written) return values;
  if (!values.empty()) return std::nullopt;
  bool floats = true;
  for (const c10::IValue& value : *shapes) {
    ForEachTensor(value, [&](const at::Tensor& tensor) { floats = floats && IsEmptied(tensor); });
  }
  if (!floats) return std::nullopt;
  TensorMap make(Untouched);
  for (const c10::IValue& value : *shapes) {
    values.push_back(make(value));
    if (!values.back().isTensor() || !IsBulkOfTheHost(values.back().toTensor())) {
      SettleTruth(op, c10::Stack(arguments.begin(), arguments.end()), values.back());
    }
  }
  return values;
}

}  // namespace shardplan::softdevice
