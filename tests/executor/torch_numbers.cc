// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/torch_numbers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace shardplan::test {

at::Tensor TorchNumbers::Bytes(const BytePlace& place, std::size_t bytes) const {
  return device_.Part(place.buffer, place.part)
      .view(at::kByte)
      .narrow(0, place.byte, static_cast<std::int64_t>(bytes));
}

// Copies, as the writes that follow may be to the same place.
void TorchNumbers::Read(NumberWork& work) {
  Unchecked unchecked;
  bool now = true;
  for (const NumberWork::Read& read : work.reads) {
    const at::Tensor bytes = Bytes(read.at, read.bytes);
    const bool on_host = bytes.is_cpu();
    now = now && on_host;
    unchecked.found.push_back(at::empty(bytes.sizes(), at::TensorOptions(at::kByte).pinned_memory(!on_host)));
    unchecked.found.back().copy_(bytes, /*non_blocking=*/!on_host);
  }
  unchecked.work.check = std::move(work.check);
  // Memory that the device still has to read stays for Finish.
  if (now) {
    Check(unchecked);
  } else {
    unchecked_.push_back(std::move(unchecked));
  }
}

void TorchNumbers::Write(const NumberWork::Write& write) const {
  at::Tensor to = Bytes(write.at, write.value.size());
  at::Tensor value =
      at::from_blob(const_cast<std::byte*>(write.value.data()), to.sizes(), at::TensorOptions(at::kByte));
  if (!to.is_cpu()) value = value.pin_memory().to(to.device(), /*non_blocking=*/true);
  const at::ScalarType dtype = executor::ToScalarType(write.dtype);
  write.adds ? to.view(dtype).add_(value.view(dtype)) : to.copy_(value);
}

Status TorchNumbers::Enqueue(StreamId stream, NumberWork work) {
  return device_.RunOn(stream, [&] {
    if (work.check) Read(work);
    for (const NumberWork::Write& write : work.writes) Write(write);
  });
}

void TorchNumbers::Finish() {
  for (const Unchecked& unchecked : std::exchange(unchecked_, {})) Check(unchecked);
}

void TorchNumbers::Check(const Unchecked& unchecked) {
  std::vector<const std::byte*> found;
  for (const at::Tensor& tensor : unchecked.found) {
    found.push_back(static_cast<const std::byte*>(tensor.const_data_ptr()));
  }
  unchecked.work.check(found);
}

}  // namespace shardplan::test
