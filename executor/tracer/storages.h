// SPDX-License-Identifier: Apache-2.0
// StorageWatch: the moment at which a storage is freed.
#pragma once

#include <c10/core/StorageImpl.h>

#include <functional>
#include <unordered_map>

namespace shardplan::executor {

// Follows storages by their memory: around the function that frees it stands one that tells first. So frees
// are told where they are and in their order, which asking weak references in between would not give. Memory
// keeps its address. Whatever still lives at the end gets its own function back.
class StorageWatch {
 public:
  // `died` gets what was followed; it may not throw.
  explicit StorageWatch(std::function<void(c10::StorageImpl*)> died) : died_(std::move(died)) {}
  ~StorageWatch();
  StorageWatch(const StorageWatch&) = delete;
  StorageWatch& operator=(const StorageWatch&) = delete;

  void Follow(c10::StorageImpl* storage);
  // A storage that lives on was given other memory (resize_, set_data): it is no longer followed.
  bool lost_one() const { return lost_one_; }

 private:
  struct Memory;
  static void Free(void* memory);

  std::function<void(c10::StorageImpl*)> died_;
  std::unordered_map<c10::StorageImpl*, Memory*> followed_;
  bool lost_one_ = false;
};

}  // namespace shardplan::executor
