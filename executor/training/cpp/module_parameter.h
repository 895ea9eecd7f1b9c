// SPDX-License-Identifier: Apache-2.0
// A parameter of a LibTorch module.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "shardplan/schemas/error.h"
#include "training/parameters/model_parameter.h"

namespace shardplan::executor {

// [Note: one tensor]
// Modules in C++ hold handles of a parameter in members that nobody else can reach, so the tensor cannot be
// swapped for another: what is in it is (set_data), the whole parameter or this rank's shard. Autograd's
// history of it is the tensor's own and stays, and what was saved for a backward is the tensor itself or a
// view of the whole one's memory, which is there again in the backward. The two gradients cannot both be the
// tensor's .grad: that is the one of what is in the tensor, and the other one waits here.
class ModuleParameter final : public ModelParameter {
 public:
  // parameter: what the modules hold, with the shard in it. unsharded: a view of the plan's buffer.
  ModuleParameter(at::Tensor parameter, at::Tensor unsharded);

  bool requires_grad() const override { return parameter_.requires_grad(); }
  at::Tensor& sharded_grad() const override;
  at::Tensor& unsharded_grad() const override;
  void SetGradDType(std::optional<at::ScalarType> dtype) override { parameter_.set_grad_dtype(dtype); }
  Status BindUnsharded() override;
  Status BindSharded() override;
  Status PublishGrad(const at::Tensor& local) override;
  // .grad is the user's: they drop it with zero_grad().
  void ForgetGrad() override {}

  // Has somebody put other memory into the tensor, while the shard was in it?
  bool IsReplaced() const;

 private:
  // `data`, the shard or the whole one, is in the tensor from now on.
  Status Put(const at::Tensor& data);

  at::Tensor parameter_;
  at::Tensor shard_, unsharded_;
  // Both have one dtype, device and layout. Then memory and sizes are all that differs: what set_data does
  // besides is a check, and a new gradient accumulator where dtype or device change. It is called for every
  // parameter four times a step, and takes three times as long.
  bool swaps_memory_;
  mutable at::Tensor other_grad_;  // of what is not in the tensor now
  bool is_unsharded_ = false;
};

}  // namespace shardplan::executor
