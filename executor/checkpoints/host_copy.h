// SPDX-License-Identifier: Apache-2.0
// Copies of tensors in host memory, made while the device works on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace shardplan::executor {

// The memory is kept, and used again by the next copy.
class HostCopy {
 public:
  // Copies tensors of one device. Tensors in host memory are copied when this returns; those of a device with
  // streams are copied on one of its own, behind what is issued already.
  void Take(const std::vector<at::Tensor>& tensors);
  // Later work on the current stream runs when the copies are made.
  void HoldBack();
  // Blocks until the copies are made.
  void Synchronize() const;
  std::span<const std::byte> Bytes(std::size_t tensor) const;

 private:
  at::Tensor memory_;  // bytes
  std::vector<std::size_t> begins_, sizes_;
  std::optional<c10::Event> copied_;
  std::optional<c10::Device> device_;
};

}  // namespace shardplan::executor
