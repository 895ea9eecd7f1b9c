// SPDX-License-Identifier: Apache-2.0
// The order in which a plan of copies is executed, and its rounds.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {

Status CheckReshardLayouts(const ReshardPlan& plan) {
  if (Status status = CheckStateLayout(plan.source, "/source"); !status) return status;
  return CheckStateLayout(plan.target, "/target");
}

Bytes MovedBytes(const ReshardCopy& copy) {
  Bytes bytes = copy.run_bytes;
  for (const CopyLoop& loop : copy.loops) bytes = bytes * loop.count;
  return bytes;
}

namespace {

// Calls take(piece) with pieces of at most `most` bytes, in the order of the copy's bytes.
template <typename Take>
void CutCopy(const ReshardCopy& copy, std::int64_t most, const Take& take) {
  const std::int64_t bytes = MovedBytes(copy).value;
  if (bytes <= most) return take(copy);
  ReshardCopy piece = copy;
  if (copy.loops.empty()) {
    for (std::int64_t at = 0; at < bytes; at += most) {
      piece.source_offset = copy.source_offset + at;
      piece.target_offset = copy.target_offset + at;
      piece.run_bytes = Bytes{std::min(most, bytes - at)};
      take(piece);
    }
    return;
  }
  const CopyLoop& outer = copy.loops.front();
  const std::int64_t inner = bytes / outer.count;
  const std::int64_t at_once = std::max<std::int64_t>(1, most / inner);
  for (std::int64_t i = 0; i < outer.count; i += at_once) {
    piece.loops = copy.loops;
    piece.loops.front().count = std::min(at_once, outer.count - i);
    if (piece.loops.front().count == 1) piece.loops.erase(piece.loops.begin());
    piece.source_offset = copy.source_offset + i * outer.source_stride;
    piece.target_offset = copy.target_offset + i * outer.target_stride;
    CutCopy(piece, most, take);
  }
}

constexpr std::int64_t kEveryRank = -1;

class RoundMaker {
 public:
  // `rank`: whose pieces are kept.
  RoundMaker(std::int64_t budget, std::int64_t rank, const std::function<void(ReshardRound)>& visit)
      : budget_(budget), rank_(rank), visit_(visit) {}

  void Take(ReshardPiece piece) {
    const std::int64_t bytes = MovedBytes(piece.copy).value;
    if (piece.copy.source_rank != piece.copy.target_rank) {
      std::int64_t& sender = staged_[piece.copy.source_rank];
      std::int64_t& receiver = staged_[piece.copy.target_rank];
      if (sender + bytes > budget_ || receiver + bytes > budget_) Close();
      staged_[piece.copy.source_rank] += bytes;
      staged_[piece.copy.target_rank] += bytes;
    }
    if (rank_ == kEveryRank || rank_ == piece.copy.source_rank || rank_ == piece.copy.target_rank)
      pieces_.push_back(std::move(piece));
    if (++taken_ == kMostPieces) Close();
  }
  void Close() {
    if (taken_ > 0) visit_(pieces_);
    pieces_.clear();
    taken_ = 0;
    staged_.clear();
  }

 private:
  static constexpr std::size_t kMostPieces = std::size_t{1} << 20;

  const std::int64_t budget_;
  const std::int64_t rank_;
  const std::function<void(ReshardRound)>& visit_;
  std::size_t taken_ = 0;
  std::unordered_map<std::int64_t, std::int64_t> staged_;
  std::vector<ReshardPiece> pieces_;
};

void MakeRounds(const ReshardPlan& plan, std::int64_t rank, const std::function<void(ReshardRound)>& visit) {
  RoundMaker rounds(plan.budget_bytes.value, rank, visit);
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const ReshardGroup& group = plan.groups[g];
    for (std::size_t t = 0; t < group.tensors.size(); ++t) {
      for (const ReshardCopy& copy : group.copies) {
        const auto take = [&](const ReshardCopy& piece) {
          rounds.Take({static_cast<std::int32_t>(g), static_cast<std::int32_t>(t), piece});
        };
        if (copy.source_rank == copy.target_rank) {
          take(copy);
        } else {
          CutCopy(copy, plan.budget_bytes.value / 2, take);
        }
      }
    }
  }
  rounds.Close();
}

}  // namespace

void ForEachReshardRound(const ReshardPlan& plan, const std::function<void(ReshardRound)>& visit) {
  MakeRounds(plan, kEveryRank, visit);
}

void ForEachReshardRoundOf(const ReshardPlan& plan, std::int64_t rank,
                           const std::function<void(ReshardRound)>& visit) {
  MakeRounds(plan, rank, visit);
}

std::string ReshardText(const ReshardPlan& plan) {
  std::string text =
      fmt::format("reshard {} ranks -> {} ranks, {} per node, staging at most {} bytes a rank\n",
                  RanksOf(plan.source), RanksOf(plan.target), plan.ranks_per_node, plan.budget_bytes.value);
  for (const ReshardGroup& group : plan.groups) {
    text += fmt::format("group of {} tensor{}, {} cop{} each\n", group.tensors.size(),
                        group.tensors.size() == 1 ? "" : "s", group.copies.size(),
                        group.copies.size() == 1 ? "y" : "ies");
    for (const std::string& tensor : group.tensors) text += fmt::format("  {}\n", Printable(tensor));
    for (const ReshardCopy& copy : group.copies) {
      text += fmt::format("    rank {} at {} -> rank {} at {}: {} bytes", copy.source_rank,
                          copy.source_offset, copy.target_rank, copy.target_offset, copy.run_bytes.value);
      for (const CopyLoop& loop : copy.loops)
        text += fmt::format(" x {} (every {} -> {})", loop.count, loop.source_stride, loop.target_stride);
      text += "\n";
    }
  }
  return text;
}

}  // namespace shardplan
