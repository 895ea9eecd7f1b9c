// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/host_copy.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cpu/counted_memory.h"

namespace shardplan::executor {
namespace {

constexpr std::size_t kCopyAlignment = 64;

}  // namespace

void HostCopy::Take(const std::vector<at::Tensor>& tensors) {
  begins_.assign(1, 0);
  sizes_.clear();
  device_.reset();
  copied_.reset();
  for (const at::Tensor& tensor : tensors) {
    const std::size_t end = begins_.back() + tensor.nbytes();
    sizes_.push_back(tensor.nbytes());
    begins_.push_back((end + kCopyAlignment - 1) / kCopyAlignment * kCopyAlignment);
    if (!tensor.is_cpu()) device_ = tensor.device();
  }
  const auto bytes = static_cast<std::int64_t>(begins_.back());
  const bool pins = device_.has_value();
  if (!memory_.defined() || memory_.numel() < bytes || memory_.is_pinned() != pins) {
    memory_.reset();
    const Uncounted of_no_device;  // on CPU ranks, too, it is beside the memory of a step
    memory_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(pins));
  }
  const auto copy = [&](std::size_t t) {
    const auto begin = static_cast<std::int64_t>(begins_[t]);
    const auto size = static_cast<std::int64_t>(tensors[t].nbytes());
    memory_.narrow(0, begin, size)
        .view(tensors[t].scalar_type())
        .copy_(tensors[t].detach().reshape({-1}), /*non_blocking=*/true);
  };
  if (!device_) {
    for (std::size_t t = 0; t < tensors.size(); ++t) copy(t);
    return;
  }
  const c10::impl::VirtualGuardImpl device(device_->type());
  const c10::Stream current = device.getStream(*device_);
  const c10::Stream own = device.getStreamFromGlobalPool(*device_, /*isHighPriority=*/false);
  c10::Event issued(device_->type());
  issued.record(current);
  issued.block(own);
  const c10::StreamGuard guard(own);
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    copy(t);
    if (!tensors[t].is_cpu()) tensors[t].record_stream(own);
  }
  copied_.emplace(device_->type());
  copied_->record(own);
}

void HostCopy::HoldBack() {
  if (copied_) copied_->block(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
}

void HostCopy::Synchronize() const {
  if (copied_) copied_->synchronize();
}

std::span<const std::byte> HostCopy::Bytes(std::size_t tensor) const {
  const auto* begin = static_cast<const std::byte*>(memory_.const_data_ptr()) + begins_[tensor];
  return {begin, sizes_[tensor]};
}

}  // namespace shardplan::executor
