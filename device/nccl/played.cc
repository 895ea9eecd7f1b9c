// SPDX-License-Identifier: Apache-2.0
#include "device/nccl/played.h"

#include <algorithm>
#include <cstring>

#include "device/nccl/arithmetic.h"
#include "device/runtime/known_memory.h"

namespace shardplan::softdevice {
namespace {

std::size_t KnownElements(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt32:
    case ncclUint32:
    case ncclInt64:
    case ncclUint64:
      return kKnownIntegers;
    case ncclInt8:
    case ncclUint8:
      return kKnownBytes;
    default:
      return kKnownFloats;
  }
}

bool IsPlayed(const Operation& op, std::size_t ranks) {
  const bool many = op.kind == OpKind::kAllGather || op.kind == OpKind::kGather ||
                    op.kind == OpKind::kReduceScatter || op.kind == OpKind::kAllToAll;
  const std::size_t factor = many ? ranks : 1;
  if (op.count <= KnownElements(op.dtype) / factor) return true;
  const bool takes_many = op.kind == OpKind::kReduceScatter || op.kind == OpKind::kAllToAll;
  const std::size_t given = op.count * SizeOf(op.dtype) * (takes_many ? ranks : 1);
  return op.from != nullptr && op.count <= kKnownIntegers / factor && IsRemembered(op.from, given);
}

// The reduction over ranks that all give the same.
void ReduceSame(const Operation& op, const std::byte* from, std::size_t ranks) {
  const bool adds = op.reduction.op == ncclSum || op.reduction.has_factor;
  // One part stands for all where the operation does not change it.
  const std::vector<const std::byte*> parts(adds || op.reduction.op == ncclProd ? ranks : 1, from);
  Reduce(op.reduction, op.dtype, parts, op.count, op.to);
}

// Peers give in the same launch what this rank gives there: its message to itself (an all_to_all of
// messages), else its message to anybody (a ring), or its broadcast (an all_gather of broadcasts).
const Operation* Given(const std::vector<Operation>& operations, const Operation& op, int rank) {
  const OpKind kind = op.kind == OpKind::kReceive ? OpKind::kSend : op.kind;
  const Operation* found = nullptr;
  for (const Operation& other : operations) {
    if (other.kind != kind) continue;
    if (other.peer == rank) return &other;
    const bool fits = kind == OpKind::kSend && other.count == op.count && other.dtype == op.dtype;
    if (fits && found == nullptr) found = &other;
  }
  return found;
}

// `given` may be less than is received: the rest is zero.
void Receive(const Operation& op, const Operation* given, std::size_t ranks) {
  const std::size_t bytes = op.count * SizeOf(op.dtype);
  const bool known = given != nullptr && IsPlayed(*given, ranks);
  if (!known && op.count > KnownElements(op.dtype)) return;
  const std::size_t there = known ? std::min(bytes, given->count * SizeOf(given->dtype)) : 0;
  if (there > 0) std::memmove(op.to, given->from, there);
  std::memset(op.to + there, 0, bytes - there);
  if (known && op.count > KnownElements(op.dtype)) RememberMemory(op.to, bytes);
}

}  // namespace

void PlayPeers(const std::vector<Operation>& operations, int rank, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  for (const Operation& op : operations) {
    if (op.kind == OpKind::kReceive) {
      Receive(op, Given(operations, op, rank), n);
      continue;
    }
    if (!IsPlayed(op, n)) continue;
    const bool floats = op.count > KnownElements(op.dtype);
    const std::size_t bytes = op.count * SizeOf(op.dtype);
    const std::byte* own = op.from == nullptr ? nullptr : op.from + static_cast<std::size_t>(rank) * bytes;
    switch (op.kind) {
      case OpKind::kGather:
        if (rank != op.peer) break;
        [[fallthrough]];
      case OpKind::kAllGather: {
        const std::vector<std::byte> part(op.from, op.from + bytes);  // `from` may lie in `to`
        for (std::size_t r = 0; r < n; ++r) std::memcpy(op.to + r * bytes, part.data(), bytes);
        break;
      }
      case OpKind::kAllToAll: {
        const std::vector<std::byte> part(own, own + bytes);
        for (std::size_t r = 0; r < n; ++r) std::memcpy(op.to + r * bytes, part.data(), bytes);
        break;
      }
      case OpKind::kBroadcast: {
        const Operation* given = Given(operations, op, rank);
        const bool same = given != nullptr && given->count * SizeOf(given->dtype) >= bytes;
        std::memmove(op.to, same ? given->from : op.from, bytes);
        break;
      }
      case OpKind::kReduceScatter:
        ReduceSame(op, own, n);
        break;
      case OpKind::kReduce:
        if (rank != op.peer) break;
        [[fallthrough]];
      case OpKind::kAllReduce:
        ReduceSame(op, op.from, n);
        break;
      case OpKind::kReceive:
      case OpKind::kSend:
        continue;
    }
    const bool gives_many =
        op.kind == OpKind::kAllGather || op.kind == OpKind::kGather || op.kind == OpKind::kAllToAll;
    if (floats) RememberMemory(op.to, bytes * (gives_many ? n : 1));
  }
}

}  // namespace shardplan::softdevice
