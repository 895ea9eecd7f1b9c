// SPDX-License-Identifier: Apache-2.0
// A training state made of nothing: every byte follows from its tensor, its element and its place there.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "shardplan/checkpoints/reshard.h"

namespace shardplan::run {

// The part of a layout that one rank holds.
class RankState {
 public:
  RankState(const StateLayout& layout, std::int64_t rank, c10::Device device);

  // The storage of the tensor, or of the flat buffer that it lies in.
  at::Tensor StorageOf(const StateTensor& tensor) const { return storages_.at(KeyOf(tensor)); }
  void Fill();
  // Overwrites everything with a byte that says that nothing came.
  void Clear();
  // "w: byte 12 of what the rank holds is 7, and has to be 9".
  std::optional<std::string> FirstWrong() const;
  std::int64_t bytes() const;

 private:
  std::string KeyOf(const StateTensor& tensor) const;
  at::Tensor BytesOf(const StateTensor& tensor) const;  // on the host, as they have to be

  const StateLayout& layout_;
  const std::int64_t rank_;
  std::map<std::string, at::Tensor> storages_;  // bytes
};

}  // namespace shardplan::run
