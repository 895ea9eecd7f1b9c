// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/reshard_copies.h"

#include <ATen/ops/from_blob.h>

#include <numeric>
#include <vector>

namespace shardplan::executor {
namespace {

// The places of a copy's bytes: its runs, at the strides of its loops.
struct Places {
  std::byte* begin = nullptr;
  c10::Device device;
  std::vector<std::int64_t> strides;  // of the loops, in bytes
};

Places InStorage(const at::Tensor& storage, const ReshardCopy& copy, bool is_source) {
  Places places{
      .begin = static_cast<std::byte*>(storage.data_ptr()), .device = storage.device(), .strides = {}};
  places.begin += is_source ? copy.source_offset : copy.target_offset;
  for (const CopyLoop& loop : copy.loops)
    places.strides.push_back(is_source ? loop.source_stride : loop.target_stride);
  return places;
}

Places InStaging(const at::Tensor& staging, const ReshardCopy& copy, std::int64_t at) {
  Places places{.begin = static_cast<std::byte*>(staging.data_ptr()) + at,
                .device = staging.device(),
                .strides = std::vector<std::int64_t>(copy.loops.size())};
  std::int64_t bytes = copy.run_bytes.value;
  for (std::size_t l = copy.loops.size(); l-- > 0;) {
    places.strides[l] = bytes;
    bytes *= copy.loops[l].count;
  }
  return places;
}

at::ScalarType WordOf(std::int64_t bytes) {
  return bytes == 8 ? at::kLong : bytes == 4 ? at::kInt : bytes == 2 ? at::kShort : at::kByte;
}

// The places as a tensor of words of so many bytes.
at::Tensor View(const Places& places, const ReshardCopy& copy, std::int64_t word) {
  std::vector<std::int64_t> sizes, strides;
  for (std::size_t l = 0; l < copy.loops.size(); ++l) {
    sizes.push_back(copy.loops[l].count);
    strides.push_back(places.strides[l] / word);
  }
  sizes.push_back(copy.run_bytes.value / word);
  strides.push_back(1);
  return at::for_blob(places.begin, sizes)
      .strides(strides)
      .options(at::TensorOptions().dtype(WordOf(word)).device(places.device))
      .target_device(places.device)
      .make_tensor();
}

void CopyPlaces(const Places& from, const Places& to, const ReshardCopy& copy) {
  std::int64_t word = std::gcd(std::int64_t{8}, copy.run_bytes.value);
  for (const Places* places : {&from, &to}) {
    word = std::gcd(word, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(places->begin) % 8));
    for (const std::int64_t stride : places->strides) word = std::gcd(word, stride);
  }
  View(to, copy, word).copy_(View(from, copy, word));
}

}  // namespace

std::int64_t EndOf(const ReshardCopy& copy, bool is_source) {
  std::int64_t end = (is_source ? copy.source_offset : copy.target_offset) + copy.run_bytes.value;
  for (const CopyLoop& loop : copy.loops)
    end += (loop.count - 1) * (is_source ? loop.source_stride : loop.target_stride);
  return end;
}

void Pack(const at::Tensor& source, const ReshardCopy& copy, const at::Tensor& staging, std::int64_t at) {
  CopyPlaces(InStorage(source, copy, true), InStaging(staging, copy, at), copy);
}

void Unpack(const at::Tensor& staging, std::int64_t at, const ReshardCopy& copy, const at::Tensor& target) {
  CopyPlaces(InStaging(staging, copy, at), InStorage(target, copy, false), copy);
}

void Move(const at::Tensor& source, const ReshardCopy& copy, const at::Tensor& target) {
  CopyPlaces(InStorage(source, copy, true), InStorage(target, copy, false), copy);
}

}  // namespace shardplan::executor
