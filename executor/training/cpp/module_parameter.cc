// SPDX-License-Identifier: Apache-2.0
#include "training/cpp/module_parameter.h"

#include <ATen/core/grad_mode.h>

#include <exception>
#include <utility>

namespace shardplan::executor {
namespace {

Status SetData(at::Tensor& parameter, const at::Tensor& data) {
  try {
    parameter.set_data(data);
  } catch (const std::exception& error) {
    return MakeError(ErrorCode::kInternal, error.what());
  }
  return {};
}

}  // namespace

ModuleParameter::ModuleParameter(at::Tensor parameter, at::Tensor unsharded)
    : parameter_(std::move(parameter)),
      shard_(parameter_.variable_data()),
      unsharded_(std::move(unsharded)),
      swaps_memory_(shard_.options().type_equal(unsharded_.options()) &&
                    shard_.device() == unsharded_.device() && shard_.is_contiguous() &&
                    unsharded_.is_contiguous()) {}

Status ModuleParameter::Put(const at::Tensor& data) {
  if (!swaps_memory_) return SetData(parameter_, data);
  c10::TensorImpl* tensor = parameter_.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(data.storage());
  tensor->set_storage_offset(data.storage_offset());
  tensor->set_sizes_contiguous(data.sizes());
  return {};
}

at::Tensor& ModuleParameter::sharded_grad() const {
  return is_unsharded_ ? other_grad_ : parameter_.mutable_grad();
}

at::Tensor& ModuleParameter::unsharded_grad() const {
  return is_unsharded_ ? parameter_.mutable_grad() : other_grad_;
}

Status ModuleParameter::BindUnsharded() {
  if (is_unsharded_) return {};
  if (Status status = Put(unsharded_); !status) return status;
  std::swap(parameter_.mutable_grad(), other_grad_);
  is_unsharded_ = true;
  return {};
}

Status ModuleParameter::BindSharded() {
  if (!is_unsharded_) return {};
  if (Status status = Put(shard_); !status) return status;
  std::swap(parameter_.mutable_grad(), other_grad_);
  is_unsharded_ = false;
  return {};
}

Status ModuleParameter::PublishGrad(const at::Tensor& local) {
  at::Tensor& grad = sharded_grad();
  if (!grad.defined()) {
    grad = local;
    return {};
  }
  const at::NoGradGuard no_grad;
  // The plan may have accumulated in the memory that was handed out for an earlier micro-batch.
  if (!grad.is_alias_of(local) || grad.numel() == 0) grad.add_(local);
  return {};
}

bool ModuleParameter::IsReplaced() const {
  return !is_unsharded_ &&
         parameter_.storage().unsafeGetStorageImpl() != shard_.storage().unsafeGetStorageImpl();
}

}  // namespace shardplan::executor
