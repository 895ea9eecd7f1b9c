// SPDX-License-Identifier: Apache-2.0
#include "tracer/storages.h"

#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <utility>

namespace shardplan::executor {

struct StorageWatch::Memory {
  c10::DataPtr own;
  StorageWatch* watch = nullptr;  // nullptr: it is over
  c10::StorageImpl* storage = nullptr;
};

StorageWatch::~StorageWatch() {
  for (const auto& [storage, memory] : followed_) {
    memory->watch = nullptr;
    c10::DataPtr own = std::move(memory->own);
    storage->set_data_ptr_noswap(std::move(own));  // frees `memory`
  }
}

void StorageWatch::Follow(c10::StorageImpl* storage) {
  auto memory = std::make_unique<Memory>();
  memory->watch = this;
  memory->storage = storage;
  memory->own = std::move(storage->_mutable_data_ptr_no_checks());
  void* const data = memory->own.get();
  const c10::Device device = memory->own.device();
  followed_[storage] = memory.get();
  storage->set_data_ptr_noswap(c10::DataPtr(data, memory.release(), &StorageWatch::Free, device));
}

void StorageWatch::Free(void* context) {
  const std::unique_ptr<Memory> memory(static_cast<Memory*>(context));
  StorageWatch* const watch = memory->watch;
  if (watch == nullptr) return;
  watch->followed_.erase(memory->storage);
  if (c10::raw::intrusive_ptr::use_count(memory->storage) > 0) {
    watch->lost_one_ = true;
  } else {
    watch->died_(memory->storage);
  }
}

}  // namespace shardplan::executor
