// SPDX-License-Identifier: Apache-2.0
// Memory of tensors that a flat parameter has beside its shard.
#pragma once

#include <vector>

#include "shardplan/planner/program_builder.h"

namespace shardplan::fsdp1 {

// A tensor that is there for ever, its memory is not (_alloc_storage, _free_storage).
struct FlatStorage {
  BufferId buffer = -1;    // -1: there is no such tensor
  bool allocated = false;  // _storage_size_allocated

  // Does nothing when it is allocated.
  void Allocate(ProgramBuilder& builder, StreamId stream);
  // Does nothing when it is not. `safe_after`: streams that use it (record_stream).
  void Free(ProgramBuilder& builder, StreamId stream, std::vector<StreamId> safe_after = {});

  bool operator==(const FlatStorage&) const = default;
};

// A tensor that is made and dropped.
struct FlatTensor {
  BufferId buffer = -1;  // -1: there is none. An earlier buffer is no state.

  bool exists() const { return buffer >= 0; }
  void Allocate(ProgramBuilder& builder, BufferId made, StreamId stream);
  // Does nothing when there is none. `safe_after` as above.
  void Free(ProgramBuilder& builder, StreamId stream, std::vector<StreamId> safe_after = {});

  bool operator==(const FlatTensor&) const = default;
};

}  // namespace shardplan::fsdp1
