// SPDX-License-Identifier: Apache-2.0
#include "device/kernels/on_host.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>
#include <stdexcept>
#include <utility>

namespace shardplan::softdevice {
namespace {

constexpr std::uint64_t kOffsetOfACall = 4;  // philox draws four numbers at a time

c10::impl::LocalDispatchKeySet PlainKeys() {
  using c10::DispatchKey;
  c10::impl::PODLocalDispatchKeySet none = {};
  c10::impl::LocalDispatchKeySet keys(none);
  keys.included_ = c10::DispatchKeySet(DispatchKey::BackendSelect);
  keys.excluded_ =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::functorch_transforms_ks |
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                           DispatchKey::Functionalize, DispatchKey::Tracer, DispatchKey::PreDispatch,
                           DispatchKey::DeferredInit, DispatchKey::FuncTorchDynamicLayerFrontMode,
                           DispatchKey::FuncTorchDynamicLayerBackMode});
  return keys;
}

void CopyBits(const at::Tensor& from, const at::Tensor& to) {
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
}

std::uint64_t Mix(std::uint64_t seed, std::uint64_t offset) {
  std::uint64_t x = seed + 0x9E3779B97F4A7C15ULL * (offset + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

thread_local int ForTheDevice::depth_ = 0;

at::Tensor TensorMap::operator()(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor& changed = changed_[tensor.unsafeGetTensorImpl()];
  if (!changed.defined()) changed = change_(tensor);
  return changed;
}

c10::IValue TensorMap::operator()(const c10::IValue& value) {
  if (value.isTensor()) return (*this)(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back((*this)(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>((*this)(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void ForEachTensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) visit(tensor);
    }
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined()) visit(*tensor);
    }
  }
}

at::Tensor OnHost(const at::Tensor& tensor) {
  const c10::impl::ForceDispatchKeyGuard plain(PlainKeys());
  if (tensor.is_cpu()) {
    at::Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }
  const std::size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), static_cast<std::size_t>(tensor.storage_offset()));
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(tensor.numel() == 0 || storage->nbytes() >= needed,
              "a kernel of the device is given a tensor whose memory is gone: ", needed, " bytes of ",
              storage->nbytes());
  c10::Storage same(c10::Storage::use_byte_size_t{}, storage->nbytes(),
                    c10::DataPtr(storage->_mutable_data_ptr_no_checks().get(), c10::Device(c10::kCPU)),
                    nullptr, false);
  at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  CopyBits(tensor, host);
  return host;
}

at::Tensor ViewOnHost(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : OnHost(tensor); }

at::Tensor OnMeta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;
  const c10::impl::ForceDispatchKeyGuard plain(PlainKeys());
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                      at::TensorOptions(tensor.scalar_type()).device(c10::kMeta));
  CopyBits(tensor, meta);
  return meta;
}

void CallPlainly(const c10::OperatorHandle& op, c10::Stack& stack) {
  const c10::impl::ForceDispatchKeyGuard plain(PlainKeys());
  op.callBoxed(stack);
}

at::Generator NextNumbers(const at::Generator& device_generator) {
  at::Generator generator = device_generator;
  const std::lock_guard lock(generator.mutex());
  const std::uint64_t offset = generator.get_offset();
  const std::uint64_t seed = generator.current_seed();
  generator.set_offset(offset + kOffsetOfACall);
  return at::make_generator<at::CPUGeneratorImpl>(Mix(seed, offset));
}

at::Generator NextNumbers(c10::Device device) {
  return NextNumbers(at::globalContext().defaultGenerator(device));
}

}  // namespace shardplan::softdevice
