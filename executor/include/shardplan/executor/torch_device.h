// SPDX-License-Identifier: Apache-2.0
// TorchDevice: what the LibTorch backends (cpu, cuda) have in common: buffers are tensors.
//
// [Note: storages that come and go]
// The part of a param_unsharded buffer is one tensor for ever; Allocate and Free resize its storage to the
// part's bytes and to 0, as FSDP2 does. So the module's parameters, and what autograd saved of them, stay
// valid views. All other buffers are a fresh tensor each time; Free drops the device's reference, and a
// gradient that the user still holds lives on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include "shardplan/executor/device.h"
#include "shardplan/executor/step_recorder.h"

namespace shardplan::executor {

// torch's element type.
at::ScalarType ToScalarType(DType dtype);

class TorchDevice : public Device {
 public:
  virtual c10::Device torch_device() const = 0;

  // Runs `work`, host code that may read and issue work on the stream's buffers, with `stream` as the current
  // one (cpu: when what is pending on it is done). Its exceptions are thrown on.
  virtual Status RunOn(StreamId stream, const std::function<void()>& work) = 0;

  // From now on `count` has what is allocated of the device's memory: on cuda all of it, on cpu the plan's
  // buffers and what NewTensor makes (Gloo's own memory is not the device's). Before Replayer::Create.
  virtual void CountAllocations(std::shared_ptr<AllocationCount> count) = 0;
  virtual DeviceFacts Facts() const { return {}; }
  // A fresh 1-D tensor of the model's own, on streams[0]; content undefined. Behind Replayer::Create.
  virtual at::Tensor NewTensor(std::int64_t numel, DType dtype) = 0;

  // Supplies the parts of a buffer: one tensor per part. For a persistent buffer (param_sharded) before
  // Replayer::Create or between steps: contiguous, of the buffer's dtype, at least the part's elements
  // (padding included); the tensors are used in place. For grad_unsharded: from Model::TakeGradients; any
  // strides, the parameter's shape (a flat unit: one tensor of the flat parameter's elements), the buffer's
  // dtype. kUsage says what does not fit.
  virtual Status SetParts(BufferId buffer, std::vector<at::Tensor> parts) = 0;

  // The 1-D tensor of one part; undefined while the buffer is not alive. A param_unsharded buffer has always
  // the same tensor, alive or not (then its storage is empty).
  virtual at::Tensor Part(BufferId buffer, std::int32_t part) const = 0;

  // The parameter `parameter` (index into Unit::parameters) of a buffer that holds unsharded parameters, in
  // its original shape: a view of the part, as Part. For the parameters to bind. Does not require a gradient.
  virtual Result<at::Tensor> ParameterView(BufferId buffer, std::int32_t parameter) const = 0;
  // The piece of a parameter in a param_sharded or grad_sharded buffer of a per_parameter unit, in the shape
  // that this rank holds, without padding (layout.h, ShardShape); of a flat unit the whole 1-D shard. kUsage
  // while not alive.
  virtual Result<at::Tensor> ShardedView(BufferId buffer, std::int32_t parameter,
                                         std::int64_t rank) const = 0;
};

}  // namespace shardplan::executor
