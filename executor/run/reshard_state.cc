// SPDX-License-Identifier: Apache-2.0
#include "reshard_state.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cstring>
#include <functional>
#include <vector>

#include "shardplan/schemas/printable.h"

namespace shardplan::run {
namespace {

constexpr std::uint8_t kNothingCame = 0xee;

std::uint64_t WordOf(std::uint64_t tensor, std::int64_t element) {
  std::uint64_t word = tensor ^ (static_cast<std::uint64_t>(element) * 0x9e3779b97f4a7c15ULL);
  word ^= word >> 31;
  word *= 0xbf58476d1ce4e5b9ULL;
  return word ^ (word >> 29);
}

// The element of the whole tensor that is number `n` of the box.
std::int64_t ElementOf(const StateTensor& tensor, const LocalPart& part, std::int64_t n) {
  std::int64_t element = 0, stride = 1;
  for (std::size_t d = part.size.size(); d-- > 0;) {
    element += (part.low[d] + n % part.size[d]) * stride;
    n /= part.size[d];
    stride *= tensor.shape.empty() ? 1 : tensor.shape[d];
  }
  return element;
}

}  // namespace

RankState::RankState(const StateLayout& layout, std::int64_t rank, c10::Device device)
    : layout_(layout), rank_(rank) {
  const auto make = [&](std::int64_t bytes) {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  };
  if (rank >= RanksOf(layout)) return;
  for (const StateTensor& tensor : layout.tensors) {
    if (storages_.contains(KeyOf(tensor))) continue;
    std::int64_t bytes = PartOf(layout, tensor, rank).count * SizeBytes(tensor.dtype);
    if (tensor.flat >= 0) {
      const FlatBuffer& flat = layout.flats[tensor.flat];
      std::int64_t pieces = 1;
      for (const std::string& dim : flat.mesh_dims) {
        for (const StrategyMeshDim& of_mesh : layout.mesh) pieces *= of_mesh.name == dim ? of_mesh.size : 1;
      }
      bytes = flat.numel / pieces * SizeBytes(flat.dtype);
    }
    storages_.emplace(KeyOf(tensor), make(bytes));
  }
}

std::string RankState::KeyOf(const StateTensor& tensor) const {
  return tensor.flat < 0 ? "tensor " + tensor.name : "flat " + layout_.flats[tensor.flat].name;
}

at::Tensor RankState::BytesOf(const StateTensor& tensor) const {
  const LocalPart part = PartOf(layout_, tensor, rank_);
  const std::int64_t size = SizeBytes(tensor.dtype);
  at::Tensor bytes = at::empty({part.count * size}, at::kByte);
  auto* at = static_cast<std::uint8_t*>(bytes.data_ptr());
  const std::uint64_t name = std::hash<std::string>{}(tensor.name);
  for (std::int64_t i = 0; i < part.count; ++i, at += size) {
    const std::uint64_t word = WordOf(name, ElementOf(tensor, part, part.first + i));
    std::memcpy(at, &word, static_cast<std::size_t>(size));
  }
  return bytes;
}

void RankState::Clear() {
  for (auto& [key, storage] : storages_) storage.fill_(kNothingCame);
}

void RankState::Fill() {
  Clear();
  if (storages_.empty()) return;
  for (const StateTensor& tensor : layout_.tensors) {
    const at::Tensor bytes = BytesOf(tensor);
    const std::int64_t begin = PartOf(layout_, tensor, rank_).offset * SizeBytes(tensor.dtype);
    StorageOf(tensor).narrow(0, begin, bytes.numel()).copy_(bytes);
  }
}

std::optional<std::string> RankState::FirstWrong() const {
  if (storages_.empty()) return std::nullopt;
  for (const StateTensor& tensor : layout_.tensors) {
    const at::Tensor wanted = BytesOf(tensor);
    const std::int64_t begin = PartOf(layout_, tensor, rank_).offset * SizeBytes(tensor.dtype);
    const at::Tensor found = StorageOf(tensor).narrow(0, begin, wanted.numel()).cpu();
    const auto* is = static_cast<const std::uint8_t*>(found.data_ptr());
    const auto* has_to_be = static_cast<const std::uint8_t*>(wanted.data_ptr());
    for (std::int64_t b = 0; b < wanted.numel(); ++b) {
      if (is[b] != has_to_be[b])
        return fmt::format("{}: byte {} of what the rank holds is {}, and has to be {}",
                           Printable(tensor.name), b, is[b], has_to_be[b]);
    }
  }
  return std::nullopt;
}

std::int64_t RankState::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [key, storage] : storages_) bytes += storage.numel();
  return bytes;
}

}  // namespace shardplan::run
