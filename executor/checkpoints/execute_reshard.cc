// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/reshard_copies.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/executor/checkpoints.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "torch/agreement.h"

namespace shardplan::executor {
namespace {

constexpr StreamId kStream = 0;
constexpr CommunicatorId kWorld = 0;

// The storages that a rank has of one of the layouts.
class HeldStorages {
 public:
  HeldStorages(const StateLayout& layout, const ReshardStorage& ask, bool is_source)
      : ask_(ask), is_source_(is_source) {
    for (const StateTensor& tensor : layout.tensors) tensors_.emplace(tensor.name, &tensor);
  }

  // Asks for the tensor's. "": it has room for the copies; else what is wrong.
  std::string Ask(const std::string& name, std::int64_t needed_bytes) {
    const char* of = is_source_ ? "source" : "target";
    const auto tensor = tensors_.find(name);
    if (tensor == tensors_.end()) return fmt::format("the {} has no tensor {}", of, Printable(name));
    const at::Tensor storage = ask_(*tensor->second);
    if (!storage.defined() || !storage.is_contiguous())
      return fmt::format("the storage of {} in the {} is {}", Printable(name), of,
                         storage.defined() ? "not contiguous" : "not there");
    if (static_cast<std::int64_t>(storage.nbytes()) < needed_bytes)
      return fmt::format("the storage of {} in the {} has {} bytes, and the plan {} {}", Printable(name), of,
                         storage.nbytes(), is_source_ ? "reads" : "writes", needed_bytes);
    storages_.insert_or_assign(name, storage);
    return {};
  }
  const at::Tensor& Of(const std::string& name) const { return storages_.at(name); }

 private:
  const ReshardStorage& ask_;
  const bool is_source_;
  std::unordered_map<std::string_view, const StateTensor*> tensors_;
  std::unordered_map<std::string, at::Tensor> storages_;
};

class ReshardExecution {
 public:
  ReshardExecution(const ReshardPlan& plan, std::int64_t rank, TorchDevice& device, Collectives& collectives,
                   const ReshardStorage& source, const ReshardStorage& target, const ReshardRun& run)
      : plan_(plan),
        rank_(rank),
        ranks_(std::max(RanksOf(plan.source), RanksOf(plan.target))),
        device_(device),
        collectives_(collectives),
        run_(run),
        sources_(plan.source, source, true),
        targets_(plan.target, target, false) {}

  Result<ReshardMoved> Run() {
    if (Status status = AgreeOn("begin", WhyNot()); !status) return std::unexpected(status.error());
    Status status;
    ForEachReshardRoundOf(plan_, rank_, [&](ReshardRound round) {
      if (!status) return;
      status = Guarded([&] { return RunRound(round); });
      ++moved_.rounds;
      if (status && run_.progress) run_.progress(Done(), total_bytes_);
    });
    if (!status) {
      Blame(status.error());
      // Work that waits for a rank that is gone would keep the device, and whoever synchronises with it, for
      // ever.
      collectives_.Abort(status.error().message);
    }
    const Status ended = AgreeOn("end", status ? std::string() : ToString(status.error()));
    if (!status) return std::unexpected(status.error());
    if (!ended) return MakeError(ErrorCode::kEnvironment, ended.error().message);
    return moved_;
  }

 private:
  // Who died is said first, where somebody did: the collectives may not know.
  void Blame(Error& error) const {
    if (!run_.peers) return;
    run_.peers->Fail();
    const std::string culprit = AwaitCulprit(run_.peers.get(), kEndPatience);
    if (!error.message.contains(culprit)) error.message = culprit + ": " + error.message;
  }

  std::int64_t Done() const { return moved_.sent_bytes + moved_.received_bytes + moved_.kept_bytes; }

  // Why this rank cannot take part.
  std::string WhyNot() {
    if (rank_ == 0 && run_.verify) {
      const std::vector<ReshardViolation> wrong = VerifyReshard(plan_);
      if (!wrong.empty())
        return fmt::format("the plan of resharding does not verify: {}: {}", wrong.front().pointer,
                           wrong.front().message);
    }
    std::string wrong;
    const Status asked = Guarded([&]() -> Status {
      wrong = AskForStorages();
      return {};
    });
    return asked ? wrong : asked.error().message;
  }

  std::string AskForStorages() {
    for (const ReshardGroup& group : plan_.groups) {
      std::int64_t read_to = 0, written_to = 0, bytes = 0;
      for (const ReshardCopy& copy : group.copies) {
        if (copy.source_rank == rank_) read_to = std::max(read_to, EndOf(copy, true));
        if (copy.target_rank == rank_) written_to = std::max(written_to, EndOf(copy, false));
        const bool is_mine = copy.source_rank == rank_ || copy.target_rank == rank_;
        if (is_mine) bytes += MovedBytes(copy).value;
      }
      total_bytes_ += bytes * std::ssize(group.tensors);
      for (const std::string& name : group.tensors) {
        std::string wrong;
        if (read_to > 0) wrong = sources_.Ask(name, read_to);
        if (wrong.empty() && written_to > 0) wrong = targets_.Ask(name, written_to);
        if (!wrong.empty()) return wrong;
      }
    }
    return {};
  }

  // `moment`: of the resharding. This rank's own failure is told to the others.
  Status AgreeOn(const char* moment, const std::string& failure) {
    if (ranks_ < 2) return failure.empty() ? Status() : MakeError(ErrorCode::kNegative, failure);
    Statement statement{.facts = {}, .failure = failure};
    if (failure.empty())
      statement.facts = {
          {"the plan of resharding", digest_.empty() ? digest_ = Digest(ToJson(plan_)) : digest_}};
    std::vector<std::int64_t> all(static_cast<std::size_t>(ranks_));
    std::iota(all.begin(), all.end(), 0);
    const auto own =
        c10::make_intrusive<c10d::PrefixStore>(fmt::format("shardplan/reshard/{}", moment), run_.store);
    return Agree(own, rank_, all, statement, run_.timeout, run_.peers.get());
  }

  template <typename Work>
  Status Guarded(const Work& work) {
    try {
      return work();
    } catch (const std::exception& exception) {  // no memory
      const std::string what = exception.what();
      return MakeError(ErrorCode::kEnvironment, what.substr(0, what.find('\n')));
    }
  }

  // Pieces that a rank sends to and receives from each other one, one behind the other in its staging memory.
  struct Staged {
    std::vector<std::vector<const ReshardPiece*>> to, from;
    std::vector<std::int64_t> sends, receives;
    std::int64_t sent = 0, received = 0;
  };
  Staged Sort(ReshardRound round) const {
    const auto ranks = static_cast<std::size_t>(ranks_);
    Staged staged{.to = std::vector<std::vector<const ReshardPiece*>>(ranks),
                  .from = std::vector<std::vector<const ReshardPiece*>>(ranks),
                  .sends = std::vector<std::int64_t>(ranks, 0),
                  .receives = std::vector<std::int64_t>(ranks, 0)};
    for (const ReshardPiece& piece : round) {
      const ReshardCopy& copy = piece.copy;
      if (copy.source_rank == copy.target_rank) continue;
      const std::int64_t bytes = MovedBytes(copy).value;
      if (copy.source_rank == rank_) {
        staged.to[copy.target_rank].push_back(&piece);
        staged.sends[copy.target_rank] += bytes;
        staged.sent += bytes;
      } else {
        staged.from[copy.source_rank].push_back(&piece);
        staged.receives[copy.source_rank] += bytes;
        staged.received += bytes;
      }
    }
    return staged;
  }

  Status RunRound(ReshardRound round) {
    const Staged staged = Sort(round);
    const std::int64_t bytes = staged.sent + staged.received;
    if (!staging_.defined() || staging_.numel() < bytes) {
      staging_.reset();
      staging_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_.torch_device()));
      moved_.staging_bytes = std::max(moved_.staging_bytes, bytes);
    }
    Status status = device_.RunOn(kStream, [&] {
      std::int64_t at = 0;
      for (const auto& pieces : staged.to) {
        for (const ReshardPiece* piece : pieces) {
          Pack(sources_.Of(NameOf(*piece)), piece->copy, staging_, at);
          at += MovedBytes(piece->copy).value;
        }
      }
      for (const ReshardPiece& piece : round) {
        if (piece.copy.source_rank != piece.copy.target_rank) continue;
        Move(sources_.Of(NameOf(piece)), piece.copy, targets_.Of(NameOf(piece)));
        moved_.kept_bytes += MovedBytes(piece.copy).value;
      }
    });
    if (status && ranks_ > 1) status = collectives_.Exchange(ExchangeOf(staged), kStream);
    if (!status) return status;
    status = device_.RunOn(kStream, [&] {
      std::int64_t at = staged.sent;
      for (const auto& pieces : staged.from) {
        for (const ReshardPiece* piece : pieces) {
          Unpack(staging_, at, piece->copy, targets_.Of(NameOf(*piece)));
          at += MovedBytes(piece->copy).value;
        }
      }
    });
    if (!status) return status;
    moved_.sent_bytes += staged.sent;
    moved_.received_bytes += staged.received;
    return Finish();
  }

  // The end of a stream does not tell that its work is done: a collective that was given up ends, too.
  Status Finish() {
    const Result<bool> done = device_.Synchronize();
    if (Status status = collectives_.Check(); !status) return status;
    return done ? Status() : std::unexpected(done.error());
  }

  ByteExchange ExchangeOf(const Staged& staged) const {
    ByteExchange exchange{.communicator = kWorld, .send = {}, .receive = {}};
    auto* at = static_cast<std::byte*>(staging_.data_ptr());
    for (const std::int64_t bytes : staged.sends) {
      exchange.send.emplace_back(at, static_cast<std::size_t>(bytes));
      at += bytes;
    }
    for (const std::int64_t bytes : staged.receives) {
      exchange.receive.emplace_back(at, static_cast<std::size_t>(bytes));
      at += bytes;
    }
    return exchange;
  }

  const std::string& NameOf(const ReshardPiece& piece) const {
    return plan_.groups[piece.group].tensors[piece.tensor];
  }

  const ReshardPlan& plan_;
  const std::int64_t rank_, ranks_;
  TorchDevice& device_;
  Collectives& collectives_;
  const ReshardRun& run_;
  HeldStorages sources_, targets_;
  std::string digest_;
  std::int64_t total_bytes_ = 0;
  at::Tensor staging_;
  ReshardMoved moved_;
};

}  // namespace

Plan ExchangePlan(std::int64_t ranks) {
  Plan plan;
  plan.world_size = ranks;
  plan.streams.push_back({.name = "reshard"});
  plan.communicators.push_back({.name = "world", .size = ranks, .stride = 1});
  return plan;
}

Result<ReshardMoved> ExecuteReshard(const ReshardPlan& plan, std::int64_t rank, TorchDevice& device,
                                    Collectives& collectives, const ReshardStorage& source,
                                    const ReshardStorage& target, const ReshardRun& run) {
  return ReshardExecution(plan, rank, device, collectives, source, target, run).Run();
}

}  // namespace shardplan::executor
