// SPDX-License-Identifier: Apache-2.0
// Exchanges of a matrix optimizer (plan.h, [Note: exchanges]): which rank has which rows of which matrix, and
// what lies where.
//
// [Note: pieces and wholes]
// On a rank, update_pieces has by owner the rows of each matrix that this rank's shard holds, without
// padding. Then update_whole has by rank that they come from the rows of the matrices that this rank owns.
// Both keep the exchange's order. So a matrix that is the only one of its owner is contiguous. Two matrices
// of four rows on two ranks, a of owner 0 and b of owner 1:
//
//   rank 0   pieces  a[0:2] | b[0:2]     whole  a[0:2] | a[2:4]
//   rank 1   pieces  a[2:4] | b[2:4]     whole  b[0:2] | b[2:4]
//
// With replicas the group's ranks are replica * shards + shard. On the way there an owner gets its matrices
// from its own replica; on the way back every rank of the group gets its rows.
//
// Without owners every rank gets all pieces, and pads its own to the length of the first rank's, which has
// the most rows of every parameter. One matrix of three rows on two ranks, its last row padded:
//
//   rank 0   pieces  a[0:2]       whole  a[0:2] | a[2:3] -
//   rank 1   pieces  a[2:3] -     whole  a[0:2] | a[2:3] -
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Whether its matrices have an owner each; without, every rank has all of them whole.
bool HasOwners(const Exchange& exchange);

enum class ExchangeDirection : std::uint8_t { kToOwners, kToShards };

// The parameter is seen as [elements / columns, columns].
std::int64_t ColumnsOf(const UnitParameter& parameter);
std::int64_t RowsOf(const UnitParameter& parameter, const ExchangedMatrix& matrix);
std::vector<std::int64_t> ShapeOf(const Plan& plan, const ExchangedMatrix& matrix);

// The groups of shards and replicas together, shards side by side: rank = replica * shards + shard.
Communicator ReplicasOfShards(const Communicator& replicas, const Communicator& shards);

// The rows of an exchange's matrices by rank. The plan has passed CheckExchanges and outlives it.
class ExchangeLayout {
 public:
  ExchangeLayout(const Plan& plan, const Exchange& exchange);

  std::int64_t ranks() const { return ranks_; }    // of the group
  std::int64_t shards() const { return shards_; }  // of them: that shard a parameter; the rest are replicas

  // Elements of a matrix that a rank of the group holds.
  std::int64_t PieceNumel(std::size_t matrix, std::int64_t rank) const;
  // With owners: elements that `from` sends to `to`.
  std::int64_t SentNumel(ExchangeDirection direction, std::int64_t from, std::int64_t to) const;
  // The first of them in the buffer of `from`. An owner's replicas get the same rows.
  std::int64_t SentFirst(ExchangeDirection direction, std::int64_t from, std::int64_t to) const;
  // Elements of a rank's update_pieces, with padding, and update_whole.
  std::int64_t PiecesNumel(std::int64_t rank) const;
  std::int64_t WholeNumel(std::int64_t rank) const;
  // The rank whose update_whole is the largest; the first one of several.
  std::int64_t LargestOwner() const;

 private:
  const Plan& plan_;
  const Exchange& exchange_;
  std::int64_t ranks_ = 1;
  std::int64_t shards_ = 1;
};

// The all_to_all of an exchange, as costs have it. They take the tensor of a mean rank, of which all but the
// rank's own part moves. `busiest_ppm` is the most that any rank sends or receives over that, in millionths.
// A matrix that its owner has whole moves nothing.
struct ExchangeTraffic {
  Bytes size_bytes;
  std::int64_t busiest_ppm = 1'000'000;
};
ExchangeTraffic TrafficOf(const Plan& plan, const Exchange& exchange, ExchangeDirection direction);
// ... of an all_to_all instruction.
ExchangeTraffic TrafficOf(const Plan& plan, const Instruction& all_to_all);
ExchangeDirection DirectionOf(const Plan& plan, const Instruction& all_to_all);
// The tensor of a collective instruction, as costs have it: FullTensorOf's, or that of an all_to_all.
Bytes TensorBytesOf(const Plan& plan, const Instruction& collective);

// kBadInput, with the parameter's FQN: a matrix that Muon does not step, that is not cut by rows over the
// exchange's ranks, or whose owner is outside of the group. Or rows of a parameter that no matrix or several
// have, a parameter in two exchanges, or an exchange where some matrices have an owner and some have none.
Status CheckExchanges(const Plan& plan);

}  // namespace shardplan
