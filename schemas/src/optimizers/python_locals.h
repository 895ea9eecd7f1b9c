// SPDX-License-Identifier: Apache-2.0
// The temporaries of a piece of Python, by the names that hold them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan::internal {

// Memory is freed when no name holds it; a name that is bound again drops its old value only after the new
// one exists. So a loop holds one iteration's tensors while it makes the next one's.
class PythonLocals {
 public:
  using Tensors = std::vector<Bytes>;

  // Binds `name` to new tensors.
  void Make(std::string_view name, Tensors tensors);
  // Binds `name` to what `other` holds (nothing: unbinds it).
  void Alias(std::string_view name, std::string_view other);
  void Drop(std::string_view name);
  void Rename(std::string_view from, std::string_view to);

  // The tensors alive when they took most, in 512-byte blocks.
  const Tensors& Most() const { return at_most_; }
  // The steps so far, in order.
  const std::vector<OptimizerTensorStep>& Steps() const { return steps_; }

 private:
  struct Value {
    Tensors tensors;
    std::int32_t first_taken = 0;  // number of the first tensor
    Bytes bytes;                   // in blocks
    int names = 0;
  };

  void Bind(std::string_view name, std::size_t value);
  void Release(std::size_t value);

  std::map<std::string_view, std::size_t> bound_;
  std::vector<Value> values_;  // alive, and unused ones
  std::vector<std::size_t> unused_;
  std::vector<std::size_t> order_;  // alive, in order of creation
  Bytes alive_bytes_, most_bytes_;
  Tensors at_most_;
  std::vector<OptimizerTensorStep> steps_;
  std::int32_t taken_ = 0;
};

}  // namespace shardplan::internal
