#include "policy/fsdp1/flat_storage.h"

#include <cassert>
#include <utility>

namespace shardplan::fsdp1 {

void FlatStorage::Allocate(ProgramBuilder& builder, StreamId stream) {
  assert(buffer >= 0);
  if (allocated) return;
  builder.Allocate(buffer, stream);
  allocated = true;
}

void FlatStorage::Free(ProgramBuilder& builder, StreamId stream, std::vector<StreamId> safe_after) {
  if (!allocated) return;
  assert(buffer >= 0);
  builder.Free(buffer, stream, std::move(safe_after));
  allocated = false;
}

void FlatTensor::Allocate(ProgramBuilder& builder, BufferId made, StreamId stream) {
  assert(!exists() && made >= 0);
  buffer = made;
  builder.Allocate(buffer, stream);
}

void FlatTensor::Free(ProgramBuilder& builder, StreamId stream, std::vector<StreamId> safe_after) {
  if (!exists()) return;
  builder.Free(buffer, stream, std::move(safe_after));
  buffer = -1;
}

}  // namespace shardplan::fsdp1
