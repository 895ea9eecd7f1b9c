// SPDX-License-Identifier: Apache-2.0
#include "training/libtorch/module_parameter.h"

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
      unsharded_(std::move(unsharded)) {}

at::Tensor& ModuleParameter::sharded_grad() const {
  return is_unsharded_ ? other_grad_ : parameter_.mutable_grad();
}

at::Tensor& ModuleParameter::unsharded_grad() const {
  return is_unsharded_ ? parameter_.mutable_grad() : other_grad_;
}

Status ModuleParameter::BindUnsharded() {
  if (is_unsharded_) return {};
  if (Status status = SetData(parameter_, unsharded_); !status) return status;
  std::swap(parameter_.mutable_grad(), other_grad_);
  is_unsharded_ = true;
  return {};
}

Status ModuleParameter::BindSharded() {
  if (!is_unsharded_) return {};
  if (Status status = SetData(parameter_, shard_); !status) return status;
  std::swap(parameter_.mutable_grad(), other_grad_);
  is_unsharded_ = false;
  return {};
}

Status ModuleParameter::PublishGrad(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  at::Tensor& grad = sharded_grad();
  if (!grad.defined()) {
    // No view in autograd's eyes: it would hold the buffer of this step.
    grad = local.variable_data();
    return {};
  }
  // The plan may have accumulated in the memory that was handed out for an earlier micro-batch.
  if (!grad.is_alias_of(local) || grad.numel() == 0) grad.add_(local);
  return {};
}

bool ModuleParameter::IsReplaced() const {
  return !is_unsharded_ &&
         parameter_.storage().unsafeGetStorageImpl() != shard_.storage().unsafeGetStorageImpl();
}

}  // namespace shardplan::executor
