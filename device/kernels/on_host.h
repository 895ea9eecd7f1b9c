// SPDX-License-Identifier: Apache-2.0
// Tensors of the device as the host's kernels see them, and as shapes alone.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <unordered_map>
#include <vector>

namespace shardplan::softdevice {

// Each tensor of a call once, so that tensors that are the same stay the same.
class TensorMap {
 public:
  using Change = std::function<at::Tensor(const at::Tensor&)>;
  explicit TensorMap(Change change) : change_(std::move(change)) {}
  at::Tensor operator()(const at::Tensor& tensor);
  // All tensors in the value, lists included; nothing else changes.
  c10::IValue operator()(const c10::IValue& value);

 private:
  Change change_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> changed_;
};

void ForEachTensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

// The same memory in the eyes of the host's kernels. Holds its address alone, as a queued kernel does. A host
// tensor: a copy, as a kernel takes its scalars when it is launched.
at::Tensor OnHost(const at::Tensor& tensor);
// OnHost of a tensor of the device; a host tensor itself.
at::Tensor ViewOnHost(const at::Tensor& tensor);
// Its shape without memory. A scalar of the host stays what it is.
at::Tensor OnMeta(const at::Tensor& tensor);

// While one exists, the host's kernels of this thread work for the device, and compute whatever their size.
class ForTheDevice {
 public:
  ForTheDevice() { ++depth_; }
  ~ForTheDevice() { --depth_; }
  ForTheDevice(const ForTheDevice&) = delete;
  ForTheDevice& operator=(const ForTheDevice&) = delete;
  static bool IsTrue() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

// Calls the operator's kernel below autograd and all modes, whatever this thread has set.
void CallPlainly(const c10::OperatorHandle& op, c10::Stack& stack);

// A generator of the host that stands for the next numbers of one of the device, whose offset advances.
at::Generator NextNumbers(const at::Generator& device_generator);
at::Generator NextNumbers(c10::Device device);

}  // namespace shardplan::softdevice
