// SPDX-License-Identifier: Apache-2.0
#include "optimizers/python_locals.h"

#include <algorithm>
#include <utility>

namespace shardplan::internal {

void PythonLocals::Make(std::string_view name, Tensors tensors) {
  std::size_t index = values_.size();
  if (unused_.empty()) {
    values_.emplace_back();
  } else {
    index = unused_.back();
    unused_.pop_back();
  }
  Value& value = values_[index];
  value = {.tensors = std::move(tensors), .first_taken = taken_};
  for (const Bytes size : value.tensors) {
    value.bytes += InBlocks(size);
    steps_.push_back({.taken = size});
    ++taken_;
  }
  order_.push_back(index);
  alive_bytes_ += value.bytes;
  if (most_bytes_ < alive_bytes_) {
    most_bytes_ = alive_bytes_;
    at_most_.clear();
    for (const std::size_t v : order_) {
      at_most_.insert(at_most_.end(), values_[v].tensors.begin(), values_[v].tensors.end());
    }
  }
  Bind(name, index);
}

void PythonLocals::Bind(std::string_view name, std::size_t value) {
  ++values_[value].names;
  const auto [entry, added] = bound_.try_emplace(name, value);
  if (!added) Release(std::exchange(entry->second, value));
}

void PythonLocals::Alias(std::string_view name, std::string_view other) {
  const auto found = bound_.find(other);
  if (found == bound_.end()) return Drop(name);
  Bind(name, found->second);
}

void PythonLocals::Drop(std::string_view name) {
  const auto found = bound_.find(name);
  if (found == bound_.end()) return;
  const std::size_t value = found->second;
  bound_.erase(found);
  Release(value);
}

void PythonLocals::Rename(std::string_view from, std::string_view to) {
  Alias(to, from);
  Drop(from);
}

void PythonLocals::Release(std::size_t value) {
  if (--values_[value].names > 0) return;
  alive_bytes_ -= values_[value].bytes;
  for (std::size_t t = 0; t < values_[value].tensors.size(); ++t) {
    steps_.push_back({.dropped = values_[value].first_taken + static_cast<std::int32_t>(t)});
  }
  order_.erase(std::ranges::find(order_, value));
  unused_.push_back(value);
}

}  // namespace shardplan::internal
