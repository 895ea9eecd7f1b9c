// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/flat_storage.h"

#include <utility>

#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp1 {

void FlatStorage::Allocate(ProgramBuilder& builder, StreamId stream) {
  SHARDPLAN_ASSERT(buffer >= 0, "only what the unit's knobs ask for is allocated");
  if (allocated) return;
  builder.Allocate(buffer, stream);
  allocated = true;
}

void FlatStorage::Free(ProgramBuilder& builder, StreamId stream, std::vector<StreamId> safe_after) {
  if (!allocated) return;
  builder.Free(buffer, stream, std::move(safe_after));
  allocated = false;
}

void FlatTensor::Allocate(ProgramBuilder& builder, BufferId made, StreamId stream) {
  SHARDPLAN_ASSERT(!exists(), "the one before was dropped: overwriting its name would leak it");
  buffer = made;
  builder.Allocate(buffer, stream);
}

void FlatTensor::Free(ProgramBuilder& builder, StreamId stream, std::vector<StreamId> safe_after) {
  if (!exists()) return;
  builder.Free(buffer, stream, std::move(safe_after));
  buffer = -1;
}

}  // namespace shardplan::fsdp1
