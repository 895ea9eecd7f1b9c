// SPDX-License-Identifier: Apache-2.0
// The tasks of a communicator when they are tried.
#include <bit>
#include <cstring>

#include "device/nccl/communicator.h"

namespace shardplan::softdevice {
namespace {

std::size_t GivenBytes(const Operation& op, int rank, int ranks) {
  const std::size_t bytes = op.count * SizeOf(op.dtype);
  switch (op.kind) {
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return bytes * static_cast<std::size_t>(ranks);
    case OpKind::kBroadcast:
      return rank == op.peer ? bytes : 0;
    default:
      return bytes;
  }
}

Said WhatIsSaid(const Operation& op) {
  const bool message = op.kind == OpKind::kSend || op.kind == OpKind::kReceive;
  Said said = {.kind = static_cast<int>(message ? OpKind::kSend : op.kind),
               .dtype = op.dtype,
               .op = op.reduction.op,
               .root = message ? 0 : op.peer,
               .count = op.count,
               .scalar = std::bit_cast<std::uint64_t>(op.reduction.factor)};
  return said;
}

std::string Describe(const Said& said) {
  return std::string(NameOf(static_cast<OpKind>(said.kind))) + " of " + std::to_string(said.count) +
         " elements of dtype " + std::to_string(said.dtype) + ", operation " + std::to_string(said.op) +
         ", root " + std::to_string(said.root);
}

template <typename T>
void RaiseTo(std::atomic<T>& value, T least) {
  T now = value;
  while (now < least && !value.compare_exchange_weak(now, least)) {
  }
}

}  // namespace

const char* NameOf(OpKind kind) {
  switch (kind) {
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kGather:
      return "gather";
    case OpKind::kSend:
      return "send";
    case OpKind::kReceive:
      return "receive";
  }
  return "?";
}

bool Communicator::Advance(Operation& op) {
  if (op.done || aborted_) return true;
  if (error_ != ncclSuccess) return false;  // hangs until it is aborted, as NCCL's kernels do
  op.done = op.kind == OpKind::kSend      ? AdvanceSend(op)
            : op.kind == OpKind::kReceive ? AdvanceReceive(op)
                                          : AdvanceCollective(op);
  if (!op.done) CheckPeers(op);
  return op.done;
}

bool Communicator::AdvanceCollective(Operation& op) {
  SharedHead& head = file_->head();
  RankArea& own = head.ranks[rank_];
  const std::uint64_t next = op.number + 1;
  if (!op.given) {
    for (int r = 0; r < ranks_; ++r) {
      if (head.ranks[r].taken.load(std::memory_order_acquire) + kSlots < next) {
        RaiseTo(head.wanted, next);
        return false;
      }
    }
    own.said[op.number % kSlots] = WhatIsSaid(op);
    const std::size_t bytes = GivenBytes(op, rank_, ranks_);
    if (bytes > 0) std::memcpy(file_->Slot(rank_, op.number), op.from, bytes);
    own.given.store(next, std::memory_order_release);
    op.given = true;
  }
  for (int r = 0; r < ranks_; ++r) {
    if (head.ranks[r].given.load(std::memory_order_acquire) < next) {
      RaiseTo(head.wanted, next);
      return false;
    }
  }
  if (!AllSaidTheSame(op)) return false;
  std::vector<const std::byte*> given;
  for (int r = 0; r < ranks_; ++r) given.push_back(file_->Slot(r, op.number));
  TakeFrom(op, given);
  own.taken.store(next, std::memory_order_release);
  return true;
}

bool Communicator::AllSaidTheSame(const Operation& op) {
  const Said own = WhatIsSaid(op);
  for (int r = 0; r < ranks_; ++r) {
    const Said& other = file_->head().ranks[r].said[op.number % kSlots];
    if (other == own) continue;
    Fail(ncclInvalidUsage, "collective " + std::to_string(op.number) + " differs: here " + Describe(own) +
                               ", on rank " + std::to_string(r) + " " + Describe(other));
    return false;
  }
  return true;
}

void Communicator::TakeFrom(const Operation& op, const std::vector<const std::byte*>& given) {
  const std::size_t bytes = op.count * SizeOf(op.dtype);
  const auto own = static_cast<std::size_t>(rank_) * bytes;
  switch (op.kind) {
    case OpKind::kGather:
      if (rank_ != op.peer) return;
      [[fallthrough]];
    case OpKind::kAllGather:
      for (std::size_t r = 0; r < given.size(); ++r) std::memcpy(op.to + r * bytes, given[r], bytes);
      return;
    case OpKind::kAllToAll:
      for (std::size_t r = 0; r < given.size(); ++r) std::memcpy(op.to + r * bytes, given[r] + own, bytes);
      return;
    case OpKind::kBroadcast:
      std::memcpy(op.to, given[static_cast<std::size_t>(op.peer)], bytes);
      return;
    case OpKind::kReduceScatter: {
      std::vector<const std::byte*> pieces;
      for (const std::byte* whole : given) pieces.push_back(whole + own);
      return Reduce(op.reduction, op.dtype, pieces, op.count, op.to);
    }
    case OpKind::kReduce:
      if (rank_ != op.peer) return;
      [[fallthrough]];
    case OpKind::kAllReduce:
      return Reduce(op.reduction, op.dtype, given, op.count, op.to);
    case OpKind::kSend:
    case OpKind::kReceive:
      return;
  }
}

bool Communicator::AdvanceSend(Operation& op) {
  PairArea& pair = file_->head().pairs[rank_][op.peer];
  if (pair.received.load(std::memory_order_acquire) + kSlots <= op.number) {
    file_->head().any_message_wanted = true;
    return false;
  }
  const std::size_t bytes = op.count * SizeOf(op.dtype);
  if (bytes > SharedFile::kMessageBytes) {
    Fail(ncclInternalError, "a message of " + std::to_string(bytes) + " bytes is larger than its slot");
    return false;
  }
  pair.said[op.number % kSlots] = WhatIsSaid(op);
  std::memcpy(file_->MessageSlot(rank_, op.peer, op.number), op.from, bytes);
  pair.sent.store(op.number + 1, std::memory_order_release);
  return true;
}

bool Communicator::AdvanceReceive(Operation& op) {
  PairArea& pair = file_->head().pairs[op.peer][rank_];
  if (pair.sent.load(std::memory_order_acquire) <= op.number) {
    file_->head().any_message_wanted = true;
    return false;
  }
  const Said& other = pair.said[op.number % kSlots];
  if (other != WhatIsSaid(op)) {
    Fail(ncclInvalidUsage, "message " + std::to_string(op.number) + " differs: received as " +
                               Describe(WhatIsSaid(op)) + ", sent by rank " + std::to_string(op.peer) +
                               " as " + Describe(other));
    return false;
  }
  std::memcpy(op.to, file_->MessageSlot(op.peer, rank_, op.number), op.count * SizeOf(op.dtype));
  pair.received.store(op.number + 1, std::memory_order_release);
  return true;
}

}  // namespace shardplan::softdevice
